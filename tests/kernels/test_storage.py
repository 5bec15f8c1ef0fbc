"""The bit arithmetic of masters: split and joined without loss, written weights after_writes, rounding that is fair."""

from __future__ import annotations

import math

import pytest
import torch

from halfstep.kernels.storage import (
    SPLIT,
    Storage,
    after_writes,
    dense,
    join,
    plain,
    round_half_away,
    round_stochastic,
    split,
    split_of,
    stochastic,
)
from tests.support.worlds import BF16, FP16, FP32

LOWS = [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF]


def of_bits(bits: torch.Tensor) -> torch.Tensor:
    """Float32 numbers by their bits, given as int64."""
    return torch.where(bits > 0x7FFF_FFFF, bits - (1 << 32), bits).to(torch.int32).view(FP32)


def bits_of(value: torch.Tensor) -> torch.Tensor:
    return value.view(torch.int32).long() & 0xFFFF_FFFF


EVERY = of_bits(torch.arange(1 << 16).repeat_interleave(len(LOWS)) * 65536 + torch.tensor(LOWS).repeat(1 << 16))
"""Float32 numbers with every sign, exponent and bfloat16 mantissa, and six ways to go on."""

NAN = EVERY.isnan()


def scalar(value: float, dtype: torch.dtype = FP32) -> torch.Tensor:
    return torch.tensor([value], dtype=dtype)


def test_the_forms_and_their_dtypes() -> None:
    assert Storage("split", (BF16, torch.int16)) == SPLIT
    assert dense(FP16) == Storage("dense", (FP16,))
    assert plain(FP16) == Storage("plain", (FP32, FP16))
    assert stochastic(BF16) == Storage("stochastic", (BF16,))


# ---- split


def test_what_is_split_and_joined_is_the_same_to_the_bit() -> None:
    weight, remainder = split(EVERY)
    assert (weight.dtype, remainder.dtype) == (BF16, torch.int16)
    again = join(weight, remainder)
    assert torch.equal(bits_of(again)[~NAN], bits_of(EVERY)[~NAN])
    quiet = bits_of(EVERY[NAN]) | 0x0040_0000
    assert torch.equal(bits_of(again)[NAN], quiet), "a NaN keeps its sign and payload"


def test_the_weight_is_the_nearest_bfloat16_and_away_from_zero_at_a_tie() -> None:
    weight = round_half_away(EVERY)
    assert torch.equal(weight.isnan(), NAN)
    tie = (bits_of(EVERY) & 0xFFFF) == 0x8000
    even = EVERY.to(BF16)
    assert torch.equal(weight[~tie & ~NAN], even[~tie & ~NAN])
    away = of_bits((bits_of(EVERY[tie & ~NAN]) & 0xFFFF_0000) + 0x1_0000)
    assert torch.equal(weight[tie & ~NAN].float(), away)


def test_a_foreign_remainder_stays_within_half_an_ulp() -> None:
    weight = torch.arange(1 << 16).to(torch.int32).to(torch.int16).view(BF16)
    finite = weight.float().isfinite() & (weight != 0)
    for low in (-32768, -1, 0, 1, 32767):
        value = join(weight, torch.full_like(weight, low, dtype=torch.int16))
        assert torch.equal(value.isnan(), weight.isnan())
        assert torch.equal(value[weight == 0], weight[weight == 0].float()) or low > 0
        assert torch.equal(value[weight.isinf()], weight[weight.isinf()].float()) or low < 0
        ulps = (bits_of(value) - bits_of(weight.float()))[finite]
        assert torch.equal(ulps, torch.full_like(ulps, low))


@pytest.mark.parametrize(("low", "zero", "infinity"), [(-1, 0.0, None), (1, 2.0**-149, math.inf), (0, 0.0, math.inf)])
def test_zero_and_infinity_do_not_become_nan(low: int, zero: float, infinity: float | None) -> None:
    remainder = torch.tensor([low], dtype=torch.int16)
    for sign in (1.0, -1.0):
        assert join(scalar(sign * 0.0, BF16), remainder).item() == sign * zero
        value = join(scalar(sign * math.inf, BF16), remainder).item()
        assert value == sign * (infinity or (2.0 - 2.0**-23) * 2.0**127)


# ---- plain


@pytest.mark.parametrize("half", [BF16, FP16], ids=["bf16", "fp16"])
def test_a_master_counts_where_it_rounds_to_its_weight(half: torch.dtype) -> None:
    assert torch.equal(bits_of(after_writes(EVERY, EVERY.to(half)))[~NAN], bits_of(EVERY)[~NAN])
    assert after_writes(EVERY, EVERY.to(half))[NAN].isnan().all()
    fine = 1.0 + 2.0**-12
    cases = [  # master, weight, value
        (fine, 1.0, fine),
        (fine, 2.0, 2.0),
        (fine, math.nan, math.nan),
        (math.nan, 1.0, 1.0),
        (1e-42, -0.0, 1e-42),
        (3.4e38, math.inf, 3.4e38),
    ]
    for master, weight, value in cases:
        found = after_writes(scalar(master), scalar(weight, half))
        assert torch.equal(found, scalar(value)) or (math.isnan(value) and found.isnan())
        assert found.dtype is FP32


def test_splitting_a_master_keeps_it_however_its_weight_was_rounded() -> None:
    tie = scalar(1.0 + 2.0**-8)
    for weight in (tie.to(BF16), round_half_away(tie)):
        assert torch.equal(join(*split_of(tie, weight)), tie)
    assert torch.equal(join(*split_of(tie, scalar(3.0, BF16))), scalar(3.0))
    fine = scalar(1.0 + 2.0**-12)
    assert torch.equal(join(*split_of(fine, scalar(1.0, BF16))), fine)


# ---- stochastic


def test_stochastic_rounding_goes_up_with_the_probability_of_the_distance() -> None:
    seed = torch.tensor(7, dtype=torch.int32)
    for sixteenths in (1, 4, 8, 13):
        value = torch.full((1 << 16,), 1.0 + sixteenths * 2.0**-11)
        rounded = round_stochastic(value, seed)
        assert set(rounded.tolist()) == {1.0, 1.0 + 2.0**-7}
        up = float((rounded > 1.0).double().mean())
        assert up == pytest.approx(sixteenths / 16, abs=0.01)
        assert torch.equal(round_stochastic(-value, seed), -rounded)


def test_what_is_a_bfloat16_stays() -> None:
    exact = EVERY[0 :: len(LOWS)].clone()
    rounded = round_stochastic(exact, torch.tensor(3, dtype=torch.int32)).float()
    assert torch.equal(bits_of(rounded)[~exact.isnan()], bits_of(exact)[~exact.isnan()])
    assert rounded[exact.isnan()].isnan().all()


@pytest.mark.parametrize("seed", [0, 1, -1, 2**31 - 1])
def test_no_finite_number_becomes_infinite_and_no_nan_a_number(seed: int) -> None:
    rounded = round_stochastic(EVERY, torch.tensor(seed, dtype=torch.int32))
    assert torch.equal(rounded.isnan(), NAN)
    assert torch.equal(rounded.isinf(), EVERY.isinf())
    assert torch.equal(rounded.signbit(), EVERY.signbit())
    finite = EVERY.isfinite()
    distance = (bits_of(rounded.float()) - bits_of(EVERY))[finite]
    assert int(distance.abs().max()) < 1 << 16


def test_the_seed_and_the_place_choose() -> None:
    value = torch.full((64, 64), 1.0 + 2.0**-8)
    one, two = (round_stochastic(value, torch.tensor(seed, dtype=torch.int32)) for seed in (1, 2))
    assert torch.equal(one, round_stochastic(value, torch.tensor(1, dtype=torch.int32)))
    assert float((one == two).double().mean()) == pytest.approx(0.5, abs=0.05)
    for neighbours in (one[1:] == one[:-1], one[:, 1:] == one[:, :-1]):
        assert float(neighbours.double().mean()) == pytest.approx(0.5, abs=0.06)
    turned = round_stochastic(value.t(), torch.tensor(1, dtype=torch.int32))
    assert turned.stride() == (1, 64)
    assert torch.equal(turned.t(), one), "elements are numbered as they lie in memory"


def test_the_mixed_bits_are_those_of_the_kernels() -> None:
    """Recorded, so that every backend and every version rounds alike."""
    value = torch.linspace(1.0, 2.0, 16)
    rounded = round_stochastic(value, torch.tensor(12345, dtype=torch.int32))
    low, high = value.view(torch.int32) >> 16, (value.view(torch.int32) >> 16) + 1
    chosen = rounded.view(torch.int16).int()
    assert ((chosen == low) | (chosen == high)).all()
    assert (chosen - low).tolist() == [0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 1, 1, 0, 1, 0, 0]
