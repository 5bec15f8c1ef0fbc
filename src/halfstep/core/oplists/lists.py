"""A choice of op lists as a value: printable, comparable, hashable."""

from __future__ import annotations

import enum
import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ..errors import ArgumentValueError
from . import names, tables

__all__ = ["OpLists", "Rule"]


class Rule(enum.Enum):
    """What happens to the floating inputs of an op; float64 is never touched."""

    HALF = "half"
    FLOAT = "float"
    PROMOTE = "promote"
    SEQUENCE_PROMOTE = "sequence promote"
    BANNED = "banned"
    FREE = "free"

    @property
    def meaning(self) -> str:
        """The rule in a sentence."""
        return _MEANING[self]


_MEANING = {
    Rule.HALF: "inputs are cast to the 16-bit dtype",
    Rule.FLOAT: "16-bit inputs are cast to fp32",
    Rule.PROMOTE: "inputs are cast to the widest dtype among them",
    Rule.SEQUENCE_PROMOTE: "the tensors of a sequence are cast to the widest dtype among them",
    Rule.BANNED: "16-bit inputs are an error",
    Rule.FREE: "inputs are left as they are",
}

_LEVELS = ("O1", "O2", "OD", "native")
_TEXT = re.compile(r"(?P<level>O1|O2|OD|native)(?P<fixed>!promote)?(?P<changes>([+-][\w.]+)*)")


@dataclass(frozen=True)
class OpLists:
    """Which ops run in 16 bits, which in fp32, and what becomes of the others.

    It prints as one short word and parses back from it: ``O1+gelu-linear`` is level O1 with ``gelu`` moved to the
    half list and ``linear`` to the float list.

    Attributes:
        level: "O1" has all the lists. "O2" has the half list and, as float list, only what cannot run in 16 bits:
            everything else follows its inputs. "OD" has only the half list: everything else runs in fp32. "native"
            leaves all to ``torch.autocast`` and its lists, which are others on the CPU than on CUDA.
        white: ops that run in 16 bits whatever the level says.
        black: ops that run in fp32 whatever the level says.
        promote: at O2, whether an op on no list takes the widest dtype of its inputs; if not, it runs in 16 bits.

    Raises:
        ArgumentValueError: for an unknown level or op, or an op that is on both lists.
        ArgumentTypeError: if ``white`` or ``black`` is a string.
    """

    level: str = "O1"
    white: tuple[str, ...] = ()
    black: tuple[str, ...] = ()
    promote: bool = True

    def __post_init__(self) -> None:
        if self.level not in _LEVELS:
            raise ArgumentValueError(f"level={self.level!r} has no op lists; use one of {', '.join(_LEVELS)}.")
        object.__setattr__(self, "white", names.resolve_all(self.white, "white"))
        object.__setattr__(self, "black", names.resolve_all(self.black, "black"))
        both = sorted(set(self.white) & set(self.black))
        if both:
            raise ArgumentValueError(
                f"Custom white list overlap custom black list: {', '.join(both)}. An op is on one of them or on none."
            )
        if self.level == "native" and (self.white or self.black):
            raise ArgumentValueError('level="native" has the lists of torch.autocast; custom lists need "O1".')
        if self.level != "O2":
            object.__setattr__(self, "promote", True)  # it has no meaning elsewhere, so that equal lists are equal

    @classmethod
    def default(cls) -> OpLists:
        """The lists of opt level O1."""
        return cls()

    @classmethod
    def native(cls) -> OpLists:
        """The lists of ``torch.autocast``: nothing is intercepted, and an op costs what it costs there."""
        return cls("native")

    @classmethod
    def custom(
        cls, white: Iterable[Any] = (), black: Iterable[Any] = (), *, level: str = "O1", promote: bool = True
    ) -> OpLists:
        """The lists of a level with some ops moved.

        Args:
            white: ops to run in 16 bits: torch callables or names, as ``halfstep oplists`` knows them.
            black: ops to run in fp32.
            level: "O1", "O2" or "OD".
            promote: as the attribute.

        Raises:
            ArgumentValueError: for an unknown level or op, or an op that is on both lists.
            ArgumentTypeError: if a list is a string.
        """
        return cls(level, white, black, promote)  # type: ignore[arg-type]

    def rule(self, op: Any) -> Rule:
        """The rule for an op.

        Args:
            op: a torch callable or a name.

        Raises:
            ArgumentValueError: if there is no such op.
        """
        return self.rules().get(names.resolve(op)[0], self.unlisted)

    @property
    def unlisted(self) -> Rule:
        """The rule for an op on no list."""
        if self.level == "OD":
            return Rule.FLOAT
        return Rule.FREE if self.promote else Rule.HALF

    def rules(self) -> dict[str, Rule]:
        """The rule of every op that is on a list, by canonical name."""
        return dict(_rules(self))

    def __str__(self) -> str:
        text = self.level if self.promote else self.level + "!promote"
        return text + "".join(f"+{op}" for op in self.white) + "".join(f"-{op}" for op in self.black)

    @classmethod
    def parse(cls, text: str) -> OpLists:
        """The lists that print as ``text``.

        Raises:
            ArgumentValueError: if the text has another form, or names an op that does not exist.
        """
        match = _TEXT.fullmatch(text.strip())
        if match is None:
            raise ArgumentValueError(
                f"op lists {text!r} have not the form LEVEL+op-op with a level among {', '.join(_LEVELS)}, "
                'as in "O1+gelu-linear".'
            )
        changes = re.findall(r"([+-])([\w.]+)", match["changes"])
        return cls(
            match["level"],
            tuple(op for sign, op in changes if sign == "+"),
            tuple(op for sign, op in changes if sign == "-"),
            match["fixed"] is None,
        )


@functools.lru_cache(maxsize=256)
def _rules(lists: OpLists) -> dict[str, Rule]:
    rules: dict[str, Rule] = {}
    if lists.level in ("O1", "native"):
        rules |= dict.fromkeys((op for ops in tables.FLOAT.values() for op in ops), Rule.FLOAT)
        rules |= dict.fromkeys(tables.BANNED, Rule.BANNED)
    if lists.level == "O2":
        rules |= dict.fromkeys(tables.O2_FLOAT, Rule.FLOAT)
    if lists.unlisted is Rule.FREE:
        rules |= dict.fromkeys((*tables.PROMOTE, *tables.PROMOTE_BY_TORCH), Rule.PROMOTE)
        rules |= dict.fromkeys(tables.SEQUENCE_PROMOTE, Rule.SEQUENCE_PROMOTE)
    rules |= dict.fromkeys(tables.HALF, Rule.HALF)
    rules |= dict.fromkeys(lists.white, Rule.HALF)
    rules |= dict.fromkeys(lists.black, Rule.FLOAT)
    return rules


def reason(op: str) -> str:
    """Why a canonical op is on the float list, in a word or two; empty if it is not."""
    return next((why for why, ops in tables.FLOAT.items() if op in ops), "")
