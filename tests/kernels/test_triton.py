"""The Triton backend under its interpreter: both paths of a chunk, and sums of squares of any size."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from halfstep import kernels
from halfstep.kernels.backends import launch_config, triton, triton_source
from halfstep.kernels.backends.launch_config import LaunchConfig
from halfstep.kernels.codegen import layout_of
from halfstep.kernels.expr import ElementwiseKernel
from halfstep.kernels.launch import launch
from halfstep.kernels.multi_tensor import read_gradients
from halfstep.kernels.storage import SPLIT, dense, split
from halfstep.kernels.tensor_table import TensorTable
from tests.support.backends import needs_interpreter
from tests.support.worlds import BF16

pytestmark = [
    needs_interpreter,
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),  # NumPy's; a GPU has none
]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few elements make several chunks."""
    monkeypatch.setattr(launch_config, "DEFAULT", LaunchConfig(256, 4))
    monkeypatch.setattr(launch_config, "READING", LaunchConfig(256, 4))


def _move(g: Any, p: Any, *, lr: Any) -> dict[str, Any]:
    return {"p": p - g * lr, "squares": p, "others": g}


MOVE = ElementwiseKernel("move", _move, squares=("squares", "others"))


def at(values: torch.Tensor, offset: int) -> torch.Tensor:
    """A copy that begins so many elements after an address that is a multiple of 16 bytes."""
    room = torch.zeros(len(values) + 32, dtype=values.dtype)
    begin = (-room.data_ptr() // values.element_size()) % (16 // values.element_size()) + offset
    return room[begin : begin + len(values)].copy_(values)


@pytest.mark.costly
@pytest.mark.exhaustive
@pytest.mark.parametrize("lengths", [(1,), (4, 700), (256,), (258, 0, 1024), (3, 5, 777)], ids=str)
@pytest.mark.parametrize("offsets", [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 3), (4, 4, 4), (8, 8, 8)], ids=str)
def test_rows_of_any_length_and_alignment_give_the_same_bits(lengths: Any, offsets: Any) -> None:
    results = []
    for name, (a, b, c) in (("eager", (0, 0, 0)), ("triton", offsets)):
        torch.manual_seed(0)
        grads, weights, remainders = [], [], []
        for length in lengths:
            weight, remainder = split(torch.randn(length))
            grads.append(at(torch.randn(length).to(BF16), a))
            weights.append(at(weight, b))
            remainders.append(at(remainder, c))
        table = TensorTable({"g": (dense(BF16), (grads,)), "p": (SPLIT, (weights, remainders))})
        with kernels.backend(name):
            for _ in range(2):  # the counters of the rows begin at zero again
                sums = launch(table, MOVE, {"lr": 0.25})
        results.append((weights, remainders, sums))
    for ours, theirs in zip(results[1][:2], results[0][:2], strict=True):
        assert all(torch.equal(x, y) for x, y in zip(ours, theirs, strict=True))
    torch.testing.assert_close(results[1][2], results[0][2], rtol=1e-6, atol=0.0)


@pytest.mark.parametrize(
    ("length", "offset", "vectors"), [(256, 0, 1), (512, 0, 2), (260, 0, 2), (258, 0, 1), (256, 1, 0), (3, 0, 0)]
)
def test_aligned_chunks_take_the_path_of_vectors(
    length: int, offset: int, vectors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An odd tensor does not slow down the others of its table."""
    table = TensorTable.of(grad=[at(torch.ones(length), offset), at(torch.ones(512), 0)])
    names = triton._module(read_gradients, layout_of(read_gradients, table), True).kernel.fn.__globals__
    update, taken = names["update"], []

    def record(*args: Any) -> Any:
        taken.append((int(args[1].handle.data.item()), bool(args[-2])))
        return update(*args)

    monkeypatch.setitem(names, "update", record)
    with kernels.backend("triton"):
        launch(table, read_gradients, {})
    assert sum(fast for row, fast in taken if row == 0) == vectors
    assert [fast for row, fast in taken if row == 1] == [True, True]


@pytest.mark.exhaustive
def test_a_sum_of_many_chunks_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than are added up at once."""
    assert triton_source._PRELUDE.count("= 1024)") == 1
    monkeypatch.setattr(triton_source, "_PRELUDE", triton_source._PRELUDE.replace("= 1024)", "= 16)"))
    triton._module.cache_clear()
    values = torch.ones(35 * 256 + 7)
    with kernels.backend("triton"):
        (sums,) = launch(TensorTable.of(grad=[values, torch.full((300,), 2.0)]), read_gradients, {})
    triton._module.cache_clear()
    assert sums.tolist() == [len(values), 1200.0]
