"""Every code and every rounding of the element formats, against gfloat and ml_dtypes, which others wrote."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch

from halfstep.formats import Format, dequantize, quantize
from halfstep.formats.elements import ELEMENTS, values
from halfstep.formats.quantize import round_to

gfloat = pytest.importorskip("gfloat", reason="needs the extra `test`")
ml_dtypes = pytest.importorskip("ml_dtypes", reason="needs the extra `test`")

IN_ML_DTYPES = {name: name for name in ("float8_e4m3fn", "float8_e5m2")}
IN_ML_DTYPES |= {"e2m3": "float6_e2m3fn", "e3m2": "float6_e3m2fn", "e2m1": "float4_e2m1fn"}
BITS16 = torch.arange(65536, dtype=torch.int32).to(torch.int16)


def info(name: str) -> Any:
    from gfloat import formats

    return getattr(formats, f"format_info_ocp_{name.removeprefix('float8_').removesuffix('fn')}")


def differ(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """True where two numbers differ; NaN equals NaN, and -0 differs from 0."""
    a, b = a.float(), b.float()
    return ((a != b) | (a.signbit() != b.signbit())) & ~(a.isnan() & b.isnan())


def cast(numbers: torch.Tensor, element: str, **fields: object) -> torch.Tensor:
    """Round to an element format without a scale: one for amax at the greatest number."""
    format = Format(element, **fields)  # type: ignore[arg-type]
    return round_to(numbers.float(), format, amax=format.numbers.greatest)


@pytest.mark.parametrize("name", ELEMENTS)
def test_every_code_has_the_value_that_gfloat_gives_it(name: str) -> None:
    theirs = torch.tensor([gfloat.decode_float(info(name), code).fval for code in range(2 ** ELEMENTS[name].bits)])
    ours = values(name)
    if name == "int8":  # it has one zero
        assert torch.equal(ours, theirs)
    assert not differ(ours, theirs).any()


@pytest.mark.parametrize("name", ELEMENTS)
def test_every_number_of_an_element_is_quantized_to_its_code_and_back(name: str) -> None:
    numbers = values(name)
    codes = torch.arange(len(numbers))
    used = numbers.isfinite() & (numbers.abs() <= ELEMENTS[name].greatest)  # -128 of int8 has no use
    format = Format(name, "tensor", "fp32")
    found, scale = quantize(numbers[used], format)
    assert isinstance(scale, torch.Tensor)
    assert scale.item() == 1
    assert torch.equal(found.view(torch.uint8).long(), codes[used])
    assert not differ(dequantize(found, scale, format), numbers[used]).any()


@pytest.mark.parametrize("rounding", ["even", "away"])
@pytest.mark.parametrize("name", ELEMENTS)
def test_numbers_between_two_codes_round_as_in_gfloat(name: str, rounding: str) -> None:
    grid = values(name)
    grid = grid[grid.isfinite() & (grid.abs() <= ELEMENTS[name].greatest)].unique()
    middles = (grid[1:] + grid[:-1]) / 2  # exact in fp32
    far = torch.tensor(1e9)
    numbers = torch.cat([middles, torch.nextafter(middles, far), torch.nextafter(middles, -far), grid, grid * 1.7])
    mode = gfloat.RoundMode.TiesToEven if rounding == "even" else gfloat.RoundMode.TiesToAway
    theirs = torch.tensor([gfloat.round_float(info(name), float(n), mode, sat=True) for n in numbers])
    ours = cast(numbers, name, rounding=rounding)
    if name == "int8":  # gfloat saturates to -2, and has one zero
        theirs = theirs.clamp(min=-127 / 64)
        ours, theirs = ours + 0.0, theirs + 0.0
    assert not differ(ours, theirs).any()


@pytest.mark.parametrize("name", IN_ML_DTYPES)
def test_every_16_bit_number_rounds_as_in_ml_dtypes(name: str) -> None:
    """Overflow apart: ml_dtypes does not saturate float8. The rules of both are in the next test."""
    dtype = getattr(ml_dtypes, IN_ML_DTYPES[name])
    for numbers in (BITS16.view(torch.bfloat16).float(), BITS16.view(torch.float16).float()):
        with numpy.errstate(invalid="ignore"):
            theirs = torch.from_numpy(numbers.numpy().astype(dtype).astype("float32"))
        ours = cast(numbers, name)
        finite = numbers.isfinite() & theirs.isfinite()
        assert int(finite.sum()) > 20_000
        assert not differ(ours, theirs)[finite].any()
        if ELEMENTS[name].overflow is not None:
            assert not differ(cast(numbers, name, saturate=False), theirs).any()
            of_torch = numbers.to(ELEMENTS[name].dtype).float()
            in_range = numbers.abs() <= ELEMENTS[name].greatest  # what torch does above depends on its version
            assert not differ(ours, of_torch)[in_range].any()


@pytest.mark.parametrize(
    ("name", "saturate", "of_overflow", "of_inf"),
    [
        ("float8_e4m3fn", True, 448.0, 448.0),
        ("float8_e4m3fn", False, float("nan"), float("nan")),
        ("float8_e5m2", True, 57344.0, 57344.0),
        ("float8_e5m2", False, float("inf"), float("inf")),
        ("e2m3", True, 7.5, 7.5),
        ("e3m2", True, 28.0, 28.0),
        ("e2m1", True, 6.0, 6.0),
        ("int8", True, 127 / 64, 127 / 64),
    ],
)
def test_what_a_number_becomes_that_is_too_great(name: str, saturate: bool, of_overflow: float, of_inf: float) -> None:
    numbers = torch.tensor([1e6, -1e6, float("inf"), -float("inf"), float("nan")])
    expected = torch.tensor([of_overflow, -of_overflow, of_inf, -of_inf, float("nan")])
    assert not (differ(cast(numbers, name, saturate=saturate), expected)).any()


@pytest.mark.parametrize("name", ELEMENTS)
def test_stochastic_rounding_gives_the_two_neighbours_with_the_number_as_their_mean(name: str) -> None:
    grid = values(name)
    grid = grid[grid.isfinite() & (grid >= 0)].unique()
    low, high = grid[2], grid[3]
    number = low + (high - low) * 0.3
    generator = torch.Generator().manual_seed(7)
    numbers = number.expand(100_000).contiguous()
    format = Format(name, rounding="stochastic")
    rounded = round_to(numbers, format, amax=format.numbers.greatest, generator=generator)
    assert set(rounded.unique().tolist()) == {low.item(), high.item()}
    share = ((rounded - low) / (high - low)).mean().item()
    assert abs(share - 0.3) < 5 * (0.21 / 100_000) ** 0.5
    again = round_to(numbers, format, amax=format.numbers.greatest, generator=torch.Generator().manual_seed(7))
    assert torch.equal(again, rounded)
    assert not torch.equal(round_to(numbers, format, amax=format.numbers.greatest, generator=generator), rounded)
