"""8-bit codes: the map, what rounding to it may lose, and the same bits from every backend."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from halfstep import kernels
from halfstep.kernels.blockwise import (
    BLOCK,
    SIGNED,
    UNSIGNED,
    blocks_of,
    dequantize,
    dynamic_map,
    quantize,
    widened,
)
from halfstep.kernels.expr import ElementwiseKernel
from halfstep.kernels.launch import launch
from halfstep.kernels.storage import Storage, dense
from halfstep.kernels.tensor_table import TensorTable
from tests.support.backends import needs_interpreter
from tests.support.worlds import assert_equal

FORMS = pytest.mark.parametrize("storage", [SIGNED, UNSIGNED], ids=["signed", "unsigned"])
LENGTHS = [0, 1, 255, 256, 257, 1023, 1025, 2500]


def numbers_for(storage: Storage, count: int, seed: int = 0) -> torch.Tensor:
    """Numbers over eight decades, of both signs or not, with zeros among them."""
    torch.manual_seed(seed)
    values = torch.randn(count) * 10 ** (-8 * torch.rand(count)) * (torch.rand(count) > 0.1)
    return values if storage.signed else values.abs()


@FORMS
def test_the_map_is_the_published_one(storage: Storage) -> None:
    """Section 2.2 and figure 2 of the paper: seven decades, each with twice the numbers of the one below, 0 and 1."""
    numbers = dynamic_map(storage)
    assert (len(numbers), numbers.max(), (numbers == 0).sum()) == (256, 1.0, 1)
    assert torch.equal(numbers, numbers.sort().values)
    above = numbers[(numbers > 0) & (numbers < 1)]
    first = 1 if storage.signed else 2
    inside = [((above > 10.0 ** (k - 7)) & (above < 10.0 ** (k - 6))).sum().item() for k in range(7)]
    assert inside == [first * 2**k for k in range(7)]
    below = numbers[numbers < 0]
    assert torch.equal(-below.flip(0), above if storage.signed else above[:0])


@FORMS
@settings(max_examples=60)
@example(seed=292, count=272, exponent=0)
@given(seed=st.integers(0, 2**30), count=st.integers(1, 700), exponent=st.integers(-30, 30))
def test_rounding_is_to_the_nearest(storage: Storage, seed: int, count: int, exponent: int) -> None:
    values = numbers_for(storage, count, seed) * 2.0**exponent
    codes, absmax = quantize(values, storage)
    blocks = [block.abs().max() for block in values.split(BLOCK)]
    assert torch.equal(absmax, torch.stack(blocks))
    numbers = dynamic_map(storage).double()
    each = absmax.double().repeat_interleave(BLOCK)[:count]
    scaled = values.double() / each.where(each > 0, 1.0)
    lost = (numbers[codes.int()] - scaled).abs()
    least = (numbers - scaled[:, None]).abs().min(1).values
    risen = (codes == 1) & (scaled < numbers[1] / 2) if not storage.signed else torch.zeros(count, dtype=torch.bool)
    # Between the numbers 0.1 and 1 of a decade a place is a float32 number: next to a middle it may be the other one.
    assert (lost <= least + 2e-6 * scaled.abs())[~risen].all()
    assert torch.equal(dequantize(codes, absmax, storage) == 0, values == 0) if not storage.signed else True
    assert not dequantize(codes, absmax, storage)[values == 0].any()
    largest = values == absmax.repeat_interleave(BLOCK)[:count]
    assert torch.equal(dequantize(codes, absmax, storage)[largest], values[largest])


@FORMS
@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**30), count=st.integers(1, 700), exponent=st.integers(-60, 60), sign=st.sampled_from([1, -1])
)
def test_widened_codes_become_the_same_codes(storage: Storage, seed: int, count: int, exponent: int, sign: int) -> None:
    values = numbers_for(storage, count, seed) * 2.0**exponent * (sign if storage.signed else 1)
    codes, absmax = quantize(values, storage)
    again, same = quantize(widened(codes, absmax, storage), storage)
    assert torch.equal(codes, again)
    assert torch.equal(absmax, same)


def test_a_second_moment_that_is_not_zero_never_becomes_zero() -> None:
    values = torch.tensor([1.0, 1e-12, 0.0, 1e-30])
    assert (dequantize(*quantize(values, UNSIGNED), UNSIGNED) > 0).tolist() == [True, True, False, True]


@FORMS
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_shows_in_its_block_only(storage: Storage, bad: float) -> None:
    values = numbers_for(storage, 600)
    values[300] = bad
    read = dequantize(*quantize(values, storage), storage)
    assert not read[256:512].isfinite().any()
    assert read[:256].isfinite().all()
    assert read[512:].isfinite().all()


def _mix(grad: Any, first: Any, second: Any, *, new: Any) -> dict[str, Any]:
    first = first + (grad - first) * new
    return {"first": first, "second": second + grad * grad * new, "seen": first}


MIX = ElementwiseKernel("mix", _mix, squares=("seen",))


def layouts() -> Iterator[tuple[str, Any]]:
    yield "contiguous", lambda t: t
    yield "channels_last", lambda t: t.to(memory_format=torch.channels_last)
    yield "transposed", lambda t: t.transpose(0, 1).contiguous().transpose(0, 1)
    yield "with holes", lambda t: torch.stack([t, t], -1)[..., 0]


TRITON = pytest.param("triton", marks=[needs_interpreter, pytest.mark.exhaustive])


def run(
    name: str, grads: list[torch.Tensor], values: list[Any], skip: float, steps: int = 3
) -> list[list[torch.Tensor]]:
    """The codes and ``absmax`` of both moments after three steps, and sums of squares."""
    columns: dict[str, Any] = {"grad": (dense(grads[0].dtype), (grads,))}
    kept = []
    for place, (column, storage) in enumerate((("first", SIGNED), ("second", UNSIGNED))):
        codes, absmax = map(list, zip(*(quantize(row[place], storage) for row in values), strict=True))
        columns[column] = (storage, (codes, absmax, [dynamic_map(storage, torch.device("cpu"))] * len(grads)))
        kept += [codes, absmax]
    with kernels.backend(name):
        for _ in range(3):
            table = TensorTable(columns)
            sums = launch(table, MIX, {"new": 0.1}, skip=torch.tensor(skip))
    return [*kept, [sums.double()]]


@pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero) encountered:RuntimeWarning")
@pytest.mark.parametrize("name", ["compiled", "torch", TRITON])
@pytest.mark.parametrize("skip", [0.0, 1.0])
def test_every_backend_gives_the_same_bits(name: str, skip: float) -> None:
    found = []
    for each in ("eager", name):
        grads = [numbers_for(SIGNED, n, 1).bfloat16() for n in LENGTHS]
        grads[-1][700] = torch.nan
        values = [(numbers_for(SIGNED, n), numbers_for(UNSIGNED, n)) for n in LENGTHS]
        found.append(run(each, grads, values, skip))
    for ours, theirs in zip(*(kept[:-1] for kept in found), strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert torch.equal(one.nan_to_num(7.0) if one.is_floating_point() else one,
                               other.nan_to_num(7.0) if other.is_floating_point() else other)  # fmt: skip
    torch.testing.assert_close(found[0][-1], found[1][-1], rtol=1e-5, atol=0.0, equal_nan=True)
    for n, codes, absmax in zip(LENGTHS, found[1][0], found[1][1], strict=True):
        assert len(absmax) == blocks_of(n)
        if skip:
            assert torch.equal(codes, quantize(numbers_for(SIGNED, n), SIGNED)[0])


@pytest.mark.parametrize("name", ["eager", "compiled", TRITON])
@pytest.mark.parametrize(("layout", "laid"), list(layouts()), ids=[name for name, _ in layouts()])
def test_blocks_are_runs_in_the_memory_of_the_codes(name: str, layout: str, laid: Any) -> None:
    """However gradients lie: they may come in another order at each step."""
    shape = (4, 6, 5, 7)
    grad = numbers_for(SIGNED, 840, 1).view(shape)
    first, second = numbers_for(SIGNED, 840).view(shape), numbers_for(UNSIGNED, 840).view(shape)
    as_codes = laid(first) if layout != "with holes" else first
    values = [(as_codes, torch.empty_like(as_codes).copy_(second))]
    plain = run("eager", [torch.empty_like(as_codes).copy_(grad)], values, 0.0)
    for other in (grad, laid(grad), grad.flip(0).flip(0)):
        assert_equal([ours[0] for ours in run(name, [other], values, 0.0)[:-1]], [theirs[0] for theirs in plain[:-1]])
