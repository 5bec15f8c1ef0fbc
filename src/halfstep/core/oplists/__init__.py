"""The precision of each op: the tables, the names of ops, and the user's choice of lists as a value."""

from .entries import Entry, entries
from .names import resolve
from .op_lists import LIST_LEVELS, RULES, OpLists
from .tables import BANNED

__all__ = ["BANNED", "LIST_LEVELS", "RULES", "Entry", "OpLists", "entries", "resolve"]
