"""Which ops run in which precision: data that can be printed and compared."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import ArgumentValueError

__all__ = ["OpLists"]


@dataclass(frozen=True)
class OpLists:
    """A choice of op lists, printed and parsed by its name."""

    name: str = "default"

    @classmethod
    def default(cls) -> OpLists:
        """The lists of opt level O1."""
        return cls()

    def __str__(self) -> str:
        return self.name

    @classmethod
    def parse(cls, text: str) -> OpLists:
        """The lists that print as ``text``.

        Raises:
            ArgumentValueError: for an unknown name.
        """
        if text != "default":
            raise ArgumentValueError(f"op lists {text!r} are unknown; use 'default'.")
        return cls(text)
