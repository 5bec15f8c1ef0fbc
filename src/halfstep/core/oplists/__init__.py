"""The precision of each op: the table of ops, the names of ops, and the op lists that a user chooses."""

from .entries import Entry, entries
from .names import resolve
from .op_lists import LIST_LEVELS, RULES, OpLists
from .tables import BANNED

__all__ = ["BANNED", "LIST_LEVELS", "RULES", "Entry", "OpLists", "entries", "resolve"]
