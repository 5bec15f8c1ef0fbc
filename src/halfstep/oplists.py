"""The precision of each op: the lists, how to choose others, and what the name of an op means."""

from .core.oplists import BANNED, LIST_LEVELS, RULES, Entry, OpLists, entries, resolve

__all__ = ["BANNED", "LIST_LEVELS", "RULES", "Entry", "OpLists", "entries", "resolve"]
__dir__ = __all__.copy
