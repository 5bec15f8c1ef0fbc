"""``Format`` as a value, and what is said of wrong arguments."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch

from halfstep.core.errors import ArgumentIndexError, ArgumentTypeError, ArgumentValueError
from halfstep.formats import Format, dequantize, error, quantize
from halfstep.formats.format import FORMATS
from halfstep.formats.quantize import round_to


def test_a_format_prints_as_it_is_parsed() -> None:
    for name, format in FORMATS.items():
        assert str(format) == name
        assert Format.parse(name) == Format.parse(format) == format
    assert str(FORMATS["mxfp8"].replace(scale_rule="floor")) == "mxfp8,scale_rule=floor"
    assert Format.parse(" mxfp8, scale_rule=floor") == FORMATS["mxfp8"].replace(scale_rule="floor")
    blocks = ("tensor", "row", "1x32", "1x16", "16x16", "128x128")
    for element, block, scale in product(("float8_e5m2", "e2m1", "int8"), blocks, ("fp32", "e8m0", "e4m3")):
        for rounding, saturate in product(("even", "stochastic"), (True, False)):
            if (scale, block) != ("e4m3", "tensor") and (saturate or element == "float8_e5m2"):
                format = Format(element, block, scale, "even", rounding, saturate)
                assert Format.parse(str(format)) == format


X = torch.randn(48, 40)


def given_scales(format: str, change: Callable[[Any], Any]) -> torch.Tensor:
    """Dequantize codes with other scales than theirs."""
    codes, scales = quantize(torch.ones(32, 64), format)
    return dequantize(codes, change(scales), format)


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda: Format.parse("fp9"), ArgumentValueError, "'fp9' is not a format; choose one of fp8_e4m3, fp8_e5m2"),
        (lambda: Format.parse("mxfp8,scale"), ArgumentValueError, "'scale' is not a field of a format"),
        (lambda: Format.parse("mxfp8,scale_rule=up"), ArgumentValueError, "is not a valid scale rule of a format;"),
        (lambda: Format.parse(8), ArgumentTypeError, "must be a Format or the name of one"),  # type: ignore[arg-type]
        (lambda: Format("e2m1", "tensor", "e4m3"), ArgumentValueError, "scale='fp32', or a smaller block"),
        (lambda: Format("e2m1", saturate=False), ArgumentValueError, "neither inf nor NaN, so it always saturates"),
        (lambda: Format.parse("mxfp4,scale_rule=4over6"), ArgumentValueError, "is for e2m1 elements with e4m3 scales"),
        (lambda: Format.parse("nvfp4,block=16x16,scale_rule=eden"), ArgumentValueError, "'eden' for blocks of 1x16"),
        (lambda: quantize(X, "nvfp4,scale_rule=eden", dim=0), ArgumentValueError, "in groups of 128 numbers, as"),
        (lambda: quantize(X, "mxfp8"), ArgumentValueError, "40 is not a multiple of 32. Pad it with 24 zeros to 64"),
        (lambda: quantize(X, "mxfp8", dim=0), ArgumentValueError, "48 is not a multiple of 32. Pad it with 16 zeros"),
        (lambda: round_to(X, "nvfp4,block=16x16"), ArgumentValueError, "40 is not a multiple of 16. Pad it with 8"),
        (lambda: round_to(X[:, 0], "fp8_blockwise"), ArgumentValueError, "need two dimensions"),
        (lambda: round_to(X, "mxfp8", dim=2), ArgumentIndexError, "dim=2 is not a dimension"),
        (lambda: quantize(X.double(), "fp8_e4m3"), ArgumentTypeError, "torch.float64 is not quantized"),
        (lambda: quantize([1.0], "fp8_e4m3"), ArgumentTypeError, "must be a tensor"),  # type: ignore[arg-type]
        (lambda: quantize(X.to_sparse(), "fp8_e4m3"), ArgumentTypeError, "layout torch.sparse_coo is not quantized"),
        (lambda: quantize(X, "mxfp8", dim=1.0), ArgumentTypeError, "dim must be"),  # type: ignore[arg-type]
        (lambda: quantize(X, "fp8_e4m3", dim=5), ArgumentIndexError, "dim=5 is not a dimension"),
        (lambda: quantize(X, "mxfp8", generator=3), ArgumentTypeError, "generator must be"),  # type: ignore[arg-type]
        (lambda: error([1.0], "fp8_e4m3"), ArgumentTypeError, "must be a tensor"),  # type: ignore[arg-type]
        (lambda: error(X.int(), "fp8_e4m3"), ArgumentTypeError, "torch.int32 is not quantized"),
        (lambda: dequantize(*quantize(X, "fp8_e4m3"), "fp8_e4m3", dtype="fp1"), ArgumentValueError, "fp1"),
        (lambda: round_to(X, "mxint8,block=row", amax=1.0), ArgumentValueError, "amax= is for blocks that are whole"),
        (lambda: round_to(X, "fp8_e4m3", out=X[0]), ArgumentValueError, "out= must have the shape and the dtype"),
        (lambda: dequantize(X, X, "fp8_e4m3"), ArgumentTypeError, "are torch.float8_e4m3fn, not torch.float32"),
        (lambda: dequantize([1], X, "fp8_e4m3"), ArgumentTypeError, "codes must be a tensor"),  # type: ignore[arg-type]
        (lambda: given_scales("nvfp4", lambda pair: pair[0]), ArgumentTypeError, "nvfp4 are a pair, scales of blocks"),
        (lambda: given_scales("mxfp8", lambda scales: (scales, X)), ArgumentTypeError, "mxfp8 are one tensor, not ("),
        (lambda: given_scales("mxfp8", lambda scales: None), ArgumentTypeError, "mxfp8 are one tensor, not None"),
        (lambda: given_scales("mxfp8", lambda scales: scales[0, 0]), ArgumentValueError, "of shape (32, 2), not"),
        (lambda: given_scales("mxfp8", lambda scales: scales.T), ArgumentValueError, "of shape (2, 32)"),
        (lambda: given_scales("fp8_e4m3,block=16x16", lambda s: s.T), ArgumentValueError, "of shape (2, 4), not"),
        (lambda: given_scales("fp8_e4m3,block=row", lambda s: s[:16]), ArgumentValueError, "of shape (32, 1), not"),
        (lambda: given_scales("mxfp8", lambda s: s.view(torch.uint8)), ArgumentValueError, "not torch.uint8 of"),
    ],
)
def test_a_wrong_argument_is_named(call: Callable[[], object], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind) as raised:
        call()
    assert message in str(raised.value)


def test_codes_scales_and_errors_have_no_gradient() -> None:
    given = X.clone().requires_grad_()
    codes, scales = quantize(given, "fp8_e4m3")
    assert isinstance(scales, torch.Tensor)
    assert [each.requires_grad for each in (codes, scales, error(given, "fp8_e4m3"))] == [False] * 3
    assert dequantize(codes, scales, "fp8_e4m3", dtype="bf16").dtype is torch.bfloat16
