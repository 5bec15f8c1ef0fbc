"""``OpLists``: the op lists that a user chooses, as a value with a short text form (``str`` and ``parse``)."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from ..checks import check_flag, check_kind
from ..errors import ArgumentTypeError, ArgumentValueError
from .names import computes, known_names, resolve
from .tables import Op, row_of

__all__ = ["LIST_LEVELS", "RULES", "OpLists"]

RULES = {
    "half": "its floating inputs are cast to the 16-bit dtype",
    "wide": "its floating inputs are cast to the 16-bit dtype, and its result is fp32",
    "float": "its 16-bit inputs are cast to fp32",
    "promote": "its inputs are cast to the widest dtype among them",
    "sequence-promote": "the tensors of its sequence are cast to the widest dtype among them",
    "banned": "16-bit inputs are an error",
    "free": "it computes in the dtype of its inputs",
}
"""The rules and their meanings. float64 and integer inputs are never cast."""

LIST_LEVELS = {
    "O1": "the half list in 16 bits, the float list in fp32, everything else in the widest dtype of its inputs",
    "O2": "as O1 with a float list of only embedding, interpolation and scatter",
    "OD": "matrix products and convolutions in 16 bits, everything else in fp32",
    "none": "only the ops that the user put on a list",
    "native": "the lists of torch.autocast, which differ between CPU and CUDA",
}


_ALSO_AT_O2 = ("interpolation", "accumulation")

_CUSTOM = {"white": ("+", "half"), "black": ("-", "float"), "free": ("~", "free"), "wide": ("^", "wide")}
"""The user's custom lists: the sign of each in the text form, and the rule of its ops."""
_TEXT = re.compile(r"(?P<level>\w+)(?P<fixed>!promote)?(?P<moved>([+~^-][\w.]+)*)")


@dataclass(frozen=True)
class OpLists:
    """The precision of each op: the lists of a level, and the ops that the user moved to other lists.

    Attributes:
        level: a key of ``LIST_LEVELS``.
        white: canonical names of ops that run in 16 bits. The four custom lists override the level.
        black: canonical names of ops that run in fp32.
        free: canonical names of ops that compute in the dtype of their inputs.
        wide: canonical names of matrix products that read 16-bit operands and return fp32.
        promote: at O2, True if ops on no list compute in the widest dtype of their inputs, False for 16 bits.

    Raises:
        ArgumentValueError: for an unknown level, or a name that is not canonical.
        ArgumentTypeError: if a list is not a tuple.
    """

    level: str = "O1"
    white: tuple[str, ...] = ()
    black: tuple[str, ...] = ()
    promote: bool = True
    free: tuple[str, ...] = ()
    wide: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.level not in LIST_LEVELS:
            raise ArgumentValueError(f"level={self.level!r} has no op lists; use one of {', '.join(LIST_LEVELS)}.")
        for name in _CUSTOM:
            ops = getattr(self, name)
            if not isinstance(ops, tuple):
                raise ArgumentTypeError(f"{name}={ops!r} must be a tuple; OpLists.custom takes other collections.")
            unknown = [op for op in ops if op not in known_names()]
            if unknown:
                raise ArgumentValueError(
                    f"{name} has {unknown}, which is not canonical; OpLists.custom accepts every spelling."
                )
        refused = [op for op in self.wide if row_of(op).kind != "product"]
        if refused:
            raise ArgumentValueError(
                f"wide has {refused}, but takes only matrix products such as 'linear'; put other ops on black for fp32."
            )

    @classmethod
    def default(cls) -> OpLists:
        """Return the lists of opt level O1."""
        return cls()

    @classmethod
    def native(cls) -> OpLists:
        """Return the lists of ``torch.autocast``, which torch itself carries out, without extra cost per op."""
        return cls("native")

    @classmethod
    def custom(
        cls,
        white: Iterable[object] | None = (),
        black: Iterable[object] | None = (),
        *,
        level: str = "O1",
        use_promote: bool = True,
        free: Iterable[object] | None = (),
        wide: Iterable[object] | None = (),
    ) -> OpLists:
        """Return the lists of a level with custom lists, which override the lists of the level.

        Args:
            white: ops to run in 16 bits: a list, tuple or set of names or torch functions.
            black: ops to run in fp32.
            level: "O1", "O2" or "OD".
            use_promote: at O2, True to run ops on no list in the widest dtype of their inputs, False to run them in 16
                bits. Other levels ignore it.
            free: ops to compute in the dtype of their inputs.
            wide: matrix products to run on 16-bit operands with an fp32 result.

        Raises:
            ArgumentValueError: for an unknown name or level, an op on two lists, or an op on the wide list that is not
                a matrix product.
            ArgumentTypeError: if a list is a string or not a collection.
        """
        chosen = dict(zip(_CUSTOM, map(_names, _CUSTOM, (white, black, free, wide)), strict=True))
        if level == "native" and any(chosen.values()):
            raise ArgumentValueError("level='native' is torch.autocast as it is; custom lists need 'O1', 'O2' or 'OD'.")
        use_promote = check_flag("use_promote", use_promote)
        for one, other in itertools.combinations(chosen, 2):
            both = sorted(set(chosen[one]) & set(chosen[other]))
            if both:
                raise ArgumentValueError(
                    f"Custom {one} list overlap custom {other} list: {', '.join(both)} cannot run in both precisions; "
                    "leave each on one list."
                )
        return cls(level, promote=use_promote or level != "O2", **chosen)

    def rule(self, op: object) -> str:
        """Return the rule for an op, a key of ``RULES``.

        Raises:
            ArgumentValueError: if ``op`` is not an op.
        """
        rules = {self.rule_of(name) for name in resolve(op)} or {"free"}
        if len(rules) > 1:
            raise ArgumentValueError(f"{op!r} means {', '.join(resolve(op))}, which have different rules.")
        return rules.pop()

    def rule_of(self, name: str) -> str:
        """Return the rule for a canonical name."""
        return self.row(name).list

    def reason(self, name: str) -> str:
        """Return the reason why an op is on its list, in one word; empty for an op on no list."""
        return self.row(name).reason

    def row(self, name: str) -> Op:
        """Return the row of an op in these lists: ``list`` is its rule, and ``reason`` the reason for it."""
        op = row_of(name)
        rule, reason = self._listed(op)
        return op._replace(list=rule, reason=reason)

    def _listed(self, op: Op) -> tuple[str, str]:
        for name, (_, rule) in _CUSTOM.items():
            if op.name in getattr(self, name):
                return rule, "custom"
        if self.level in ("native", "none"):
            return "free", ""
        if self.level == "OD" and op.reason != "matrix-unit":
            return ("float", op.reason if op.list == "float" else "default") if computes(op.name) else ("free", "")
        if op.list == "half" or (self.level == "O1" and op.list in ("float", "banned")) or op.reason in _ALSO_AT_O2:
            return op.list, op.reason
        if op.list == "banned":
            return "float", "loss"
        if not self.promote:
            return ("half", "default") if computes(op.name) else ("free", "")
        # At O2 a loss function may get the 16-bit output of a model and fp32 labels.
        return "promote" if op.reason == "loss" else "free" if op.list == "float" else op.list, ""

    def replace(self, **changes: object) -> OpLists:
        """Return a copy with some attributes changed."""
        return replace(self, **changes)  # type: ignore[arg-type]

    def __str__(self) -> str:
        level = self.level if self.promote else self.level + "!promote"
        return level + "".join(sign + op for name, (sign, _) in _CUSTOM.items() for op in getattr(self, name))

    @classmethod
    def parse(cls, text: str) -> OpLists:
        """Return the lists that print as ``text``: a level, then +op for the white, -op for the black, ~op for the
        free and ^op for the wide list.

        Raises:
            ArgumentValueError: if ``text`` has another form, or contains an unknown op.
        """
        match = _TEXT.fullmatch(text.strip()) if isinstance(text, str) else None
        if match is None or match["level"] not in LIST_LEVELS:
            raise ArgumentValueError(
                f"op lists must have the form LEVEL+op-op, such as 'O1+gelu-linear', with a level among "
                f"{', '.join(LIST_LEVELS)}; got {text!r}."
            )
        moved = re.findall(r"([+~^-])([\w.]+)", match["moved"])
        chosen: Any = {name: [op for s, op in moved if s == sign] for name, (sign, _) in _CUSTOM.items()}
        return cls.custom(level=match["level"], use_promote=match["fixed"] is None, **chosen)


def _names(which: str, ops: Iterable[object] | None) -> tuple[str, ...]:
    if ops is None:
        return ()
    if isinstance(ops, str):
        raise ArgumentTypeError(f"the {which} list is the string {ops!r}; pass a list of ops, [{ops!r}].")
    check_kind(f"the {which} list", ops, Iterable, "a list, tuple or set of ops")
    return tuple(sorted({name for op in ops for name in resolve(op)}))
