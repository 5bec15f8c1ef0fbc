"""Which ops run in which precision: the tables, the names people write for an op, and a choice of lists as a value."""

from .choice import LIST_LEVELS, RULES, OpLists
from .names import resolve

__all__ = ["LIST_LEVELS", "RULES", "OpLists", "resolve"]
