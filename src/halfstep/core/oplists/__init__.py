"""Which ops run in which precision: the tables, the names that ops go by, and ``OpLists``, a choice of lists."""

from .lists import OpLists, Rule, reason
from .names import canonical, resolve, spellings

__all__ = ["OpLists", "Rule", "canonical", "reason", "resolve", "spellings"]
