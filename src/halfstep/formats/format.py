"""A number format as one value: ``Format``."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from ..core.checks import check_kind
from ..core.errors import ArgumentValueError
from .elements import ELEMENTS, Element

__all__ = ["EDEN_GROUP", "FORMATS", "Format"]

EDEN_GROUP = 128
"""The size of the groups of ``scale_rule="eden"``, and of the Hadamard transform before it."""

_CHOICES = {
    "element": tuple(ELEMENTS),
    "block": ("tensor", "row", "1x32", "1x16", "16x16", "128x128"),
    "scale": ("fp32", "e8m0", "e4m3"),
    "scale_rule": ("floor", "rceil", "ceil", "even", "4over6", "eden"),
    "rounding": ("even", "away", "stochastic"),
    "saturate": (True, False),
}


@dataclass(frozen=True)
class Format:
    """A number format: small numbers in blocks, and a scale for each block.

    A format prints as the name that it is nearest to, with the fields in which it differs, and parses back from it:
    ``Format.parse(str(format)) == format``.

    Attributes:
        element: the numbers: ``"float8_e4m3fn"``, ``"float8_e5m2"``, ``"e2m3"``, ``"e3m2"``, ``"e2m1"`` or ``"int8"``.
        block: the numbers that share a scale: all of a tensor, a row (all numbers along one dimension), 32 or 16
            numbers of a row, or a square.
        scale: a kind of scale: any fp32 number, a power of two (``"e8m0"``), or an e4m3 number beside one fp32
            number for the tensor (``"e4m3"``).
        scale_rule: the way from the largest magnitude of a block to its scale. Four rules are for powers of two:
            ``"floor"`` takes the binade of the largest magnitude, so numbers above the greatest of the element
            saturate; this is OCP's rule. ``"rceil"`` takes the smallest power with which none of them saturates; this
            is cuBLAS's rule. ``"ceil"`` rounds the largest magnitude up to a power of two first, and ``"even"`` rounds
            it to the fraction bits of the element first. fp32 and e4m3 scales map the largest magnitude to the greatest
            number of the element under each of these.

            Two rules are for e2m1 elements with e4m3 scales. ``"4over6"`` (arXiv 2512.02010) maps the largest magnitude
            of a block to 6 or to 4, by the smaller squared error of rounding to the nearest;
            with equal errors to 6. ``"eden"`` (MS-EDEN, arXiv 2601.22813) maps it to 6.07, which is best for the error,
            and then multiplies the scales of 128 numbers, which lie along the dimension of the blocks, by
            ``sum(x * x) / sum(x * rounded)``, rounded stochastically to e4m3. After a random rotation of these 128
            numbers the mean of the result is the number, with less noise than by stochastic rounding. With both rules
            the fp32 scale of the tensor leaves room: the scales of blocks begin at 256, not at 448.
        rounding: the neighbour, of two, that a number becomes: the nearest, of two equally near ones the even one
            (``"even"``) or the greater in magnitude (``"away"``); or each with a probability by which the mean is the
            number (``"stochastic"``).
        saturate: True if numbers that are too great become the greatest number. Otherwise they become NaN in
            float8_e4m3fn and inf in float8_e5m2; the other elements have neither.

    Raises:
        ArgumentValueError: for a value that a field does not have.
    """

    element: str
    block: str = "tensor"
    scale: str = "fp32"
    scale_rule: str = "rceil"
    rounding: str = "even"
    saturate: bool = True

    def __post_init__(self) -> None:
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ArgumentValueError(
                    f"{name}={getattr(self, name)!r} is not a valid {name.replace('_', ' ')} of a format; choose "
                    f"one of {', '.join(map(str, allowed))}."
                )
        if not self.saturate and self.numbers.overflow is None:
            raise ArgumentValueError(
                f"{self.element} has neither inf nor NaN, so it always saturates; leave saturate=True, or choose "
                "float8_e4m3fn or float8_e5m2."
            )
        rule = {"4over6": (), "eden": ("1x16", "even")}.get(self.scale_rule)
        given = (self.element, self.scale, *(self.block, self.rounding)[: len(rule or ())])
        if rule is not None and given != ("e2m1", "e4m3", *rule):
            raise ArgumentValueError(
                f"scale_rule={self.scale_rule!r} is for e2m1 elements with e4m3 scales, and 'eden' for blocks of 1x16 "
                f"with rounding='even'; choose another rule, or begin with the format nvfp4."
            )
        if self.scale == "e4m3" and self.block == "tensor":
            raise ArgumentValueError(
                "scale='e4m3' has an fp32 scale for the tensor beside one for each block, and block='tensor' has no "
                "others; choose scale='fp32', or a smaller block."
            )

    @property
    def numbers(self) -> Element:
        """The facts of the element format."""
        return ELEMENTS[self.element]

    @property
    def sides(self) -> tuple[int, int] | None:
        """The height and the width of a block; ``None`` if the block is a tensor or a row."""
        height, times, width = self.block.partition("x")
        return (int(height), int(width)) if times else None

    def replace(self, **changes: object) -> Format:
        """Copy the format with some fields changed."""
        return replace(self, **changes)  # type: ignore[arg-type]

    def __str__(self) -> str:
        def differences(other: Format) -> list[str]:
            pairs = ((field.name, getattr(self, field.name), getattr(other, field.name)) for field in fields(self))
            return [f"{name}={mine}" for name, mine, theirs in pairs if mine != theirs]

        name, different = min(((n, differences(f)) for n, f in FORMATS.items()), key=lambda pair: len(pair[1]))
        return ",".join((name, *different))

    @classmethod
    def parse(cls, text: str | Format) -> Format:
        """Parse the format that prints as ``text``: a name, and fields in which the format differs from it.

        Raises:
            ArgumentTypeError: if ``text`` is not a string.
            ArgumentValueError: for a name that no format has, an unknown field, or a value that it does not have.
        """
        if isinstance(text, Format):
            return text
        check_kind("format", text, str, "a Format or the name of one")
        name, *changes = (part.strip() for part in text.split(","))
        if name not in FORMATS:
            raise ArgumentValueError(f"{name!r} is not a format; choose one of {', '.join(FORMATS)}, or pass a Format.")
        values: dict[str, object] = {}
        for change in changes:
            field, found, value = change.partition("=")
            if not found or field not in _CHOICES:
                raise ArgumentValueError(
                    f"{change!r} is not a field of a format; write name=value with a name among {', '.join(_CHOICES)}."
                )
            values[field] = {"True": True, "False": False}.get(value, value)
        return FORMATS[name].replace(**values)


FORMATS = {
    "fp8_e4m3": Format("float8_e4m3fn"),
    "fp8_e5m2": Format("float8_e5m2"),
    "mxfp8": Format("float8_e4m3fn", "1x32", "e8m0"),
    "mxfp6_e2m3": Format("e2m3", "1x32", "e8m0"),
    "mxfp6_e3m2": Format("e3m2", "1x32", "e8m0"),
    "mxfp4": Format("e2m1", "1x32", "e8m0"),
    "nvfp4": Format("e2m1", "1x16", "e4m3"),
    "mxint8": Format("int8", "1x32", "e8m0"),
    "fp8_blockwise": Format("float8_e4m3fn", "128x128"),
}
"""The formats that have a name."""
