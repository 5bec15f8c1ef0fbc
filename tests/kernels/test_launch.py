"""A pass over rows of tensors on each backend: what it computes, sums, finds and skips, wherever things lie."""

from __future__ import annotations

import importlib.util
import math
from typing import Any

import pytest
import torch

from halfstep import kernels
from halfstep.core.errors import ArgumentValueError, UsageError
from halfstep.kernels import launch as launch_module
from halfstep.kernels import multi_tensor as ops
from halfstep.kernels.expr import ElementwiseKernel, trace
from halfstep.kernels.launch import launch
from halfstep.kernels.storage import SPLIT, dense, join, plain, split, stochastic
from halfstep.kernels.tensor_table import ScalarTable, TensorTable, of_rows
from tests.support.backends import needs_interpreter, on_each_backend  # noqa: F401
from tests.support.worlds import BF16, FP16, FP32, FP64

SHAPES = [(3, 4), (), (0,), (70_000,), (2, 3, 5)]


def _all_operations(x: Any, y: Any, out: Any, *, a: Any, b: Any) -> dict[str, Any]:
    """Every operation of the language, numbers on either side of it."""
    value = (a * x + y * b - x / b) + 2.0 * (x * x).sqrt() - 0.5
    return {"out": (1.0 + value.maximum(y)) / 2.0, "x_seen": x, "sum": x - y}


ALL = ElementwiseKernel("all_operations", _all_operations, squares=("sum",), checks=("x_seen",))


def some(seed: int, dtype: torch.dtype = FP32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def expected(x: torch.Tensor, y: torch.Tensor, a: float, b: float) -> torch.Tensor:
    x, y = x.double(), y.double()
    value = x * a + y * b - x / b + 2 * x.abs() - 0.5
    return (1 + value.maximum(y)) / 2


def close(found: torch.Tensor, exact: torch.Tensor) -> None:
    tolerance = 16 * max(torch.finfo(found.dtype).eps, torch.finfo(FP32).eps)
    torch.testing.assert_close(found.double(), exact, rtol=tolerance, atol=tolerance)


def zero() -> torch.Tensor:
    return torch.zeros(())


# ---- results


@pytest.mark.parametrize("dtype", [FP32, FP64, BF16, FP16], ids=str)
def test_every_operation_and_sum_is_that_of_float64(dtype: torch.dtype) -> None:
    x, y, out, found = some(0, dtype), some(1, dtype), some(2, dtype), zero()
    before = [t.clone() for t in (*x, *y)]
    sums = launch(TensorTable.of(x=x, y=y, out=out), ALL, {"a": 0.25, "b": torch.tensor(4.0)}, found=found)
    for p, q, r in zip(x, y, out, strict=True):
        close(r, expected(p, q, 0.25, 4.0))
    assert (sums.dtype, sums.shape) == (FP64, (1, len(SHAPES)))
    exact = torch.stack([(p.double() - q.double()).square().sum() for p, q in zip(x, y, strict=True)])
    torch.testing.assert_close(sums[0], exact, rtol=1e-5, atol=0.0)
    assert found == 0
    assert all(torch.equal(t, was) for t, was in zip((*x, *y), before, strict=True)), "what is read is not written"


def test_each_row_has_its_numbers() -> None:
    x, y, out = some(0), some(1), some(2)
    a = torch.arange(1.0, 6.0)
    launch(TensorTable.of(x=x, y=y, out=out), ALL, {"a": a, "b": 4.0})
    for p, q, r, number in zip(x, y, out, a.tolist(), strict=True):
        close(r, expected(p, q, number, 4.0))
    assert {number.dtype for each in (2, a.double()) for number in of_rows(each, [0, 3])} == {FP32}


@pytest.mark.parametrize("row", [0, 1, 3])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_is_found_where_it_is_looked_for(bad: float, row: int) -> None:
    for column, hit in (("x", 1), ("y", 0)):
        columns, found = {"x": some(0), "y": some(1), "out": some(2)}, zero()
        columns[column][row].view(-1)[-1] = bad
        launch(TensorTable.of(**columns), ALL, {"a": 0.25, "b": 4.0}, found=found)
        assert found == hit
    found = torch.ones(())
    launch(TensorTable.of(x=some(0), y=some(1), out=some(2)), ALL, {"a": 0.25, "b": 4.0}, found=found)
    assert found == 1, "what was found before stays found"


@pytest.mark.parametrize("skip", [0.0, 1.0])
def test_a_skipped_pass_writes_nothing_and_sums_nothing(skip: float) -> None:
    x, out = some(0), some(2)
    before, rows = [t.clone() for t in out], TensorTable.of(x=x, y=some(1), out=out)
    first = launch(rows, ALL, {"a": 0.25, "b": 4.0})
    for t, was in zip(out, before, strict=True):
        t.copy_(was)
    sums = launch(rows, ALL, {"a": 0.25, "b": 4.0}, skip=torch.tensor(skip))
    assert [torch.equal(t, was) for t, was in zip(out, before, strict=True)] == [bool(skip), bool(skip), True] + [
        bool(skip)
    ] * 2
    assert torch.equal(sums, torch.zeros_like(sums) if skip else first)


def test_nothing_is_nothing() -> None:
    for x in ([], [torch.zeros(0)]):
        rows = TensorTable({name: (dense(FP32), ([*map(torch.clone, x)],)) for name in ("x", "y", "out")})
        found = zero()
        sums = launch(rows, ALL, {"a": 1.0, "b": 1.0}, found=found)
        assert (sums.shape, float(sums.sum()), float(found), len(rows)) == ((1, len(x)), 0.0, 0.0, len(x))


# ---- where things lie


LAYOUTS = {
    "transposed": lambda: torch.randn(6, 4).t(),
    "every second": lambda: torch.randn(8, 6)[::2],
    "expanded row": lambda: torch.randn(4, 6, 2)[..., 1],
    "channels last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "offset": lambda: torch.randn(25)[1:].view(4, 6),
}


@pytest.mark.parametrize("other", [*LAYOUTS, "same"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_gives_the_same(layout: str, other: str) -> None:
    x = LAYOUTS[layout]()
    out = LAYOUTS[other]() if other in LAYOUTS and LAYOUTS[other]().shape == x.shape else torch.empty_like(x)
    y = torch.randn(x.shape)
    launch(TensorTable.of(x=[x, x], y=[y, y], out=[out, torch.zeros(x.shape)]), ALL, {"a": 0.25, "b": 4.0})
    close(out, expected(x, y, 0.25, 4.0))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_columns_of_one_layout_are_worked_on_where_they_lie(layout: str) -> None:
    x, y, out = (LAYOUTS[layout]() for _ in range(3))
    launch(TensorTable.of(x=[x], y=[y], out=[out]), ALL, {"a": 0.25, "b": 4.0})
    close(out, expected(x, y, 0.25, 4.0))


def _move(g: Any, p: Any, *, lr: Any) -> dict[str, Any]:
    return {"p": p - g * lr}


MOVE = ElementwiseKernel("move", _move)


def test_renewed_gradients_are_read_and_moved_columns_refused() -> None:
    p = [torch.ones(3), torch.ones(2, 2)]
    rows = TensorTable.of(g=[torch.ones(3), torch.ones(2, 2)], p=p)
    launch(rows, MOVE, {"lr": 0.5})
    assert rows.renew([torch.full((3,), 2.0), torch.full((2, 2), 4.0)])
    launch(rows, MOVE, {"lr": 0.25})
    assert [t.flatten().tolist() for t in p] == [[0.0] * 3, [-0.5] * 4]
    assert rows.renew([torch.full((3,), 2.0), torch.full((2, 2), 4.0)])
    for wrong in (torch.ones(3, dtype=FP64), torch.ones(6)[::2], torch.ones(3).to_sparse()):
        assert not rows.renew([wrong, torch.ones(2, 2)])


def test_a_column_in_new_memory_needs_a_new_batch_where_there_are_pointers(on: str) -> None:
    p = [torch.ones(3)]
    rows = TensorTable.of(g=[torch.ones(3)], p=p)
    launch(rows, MOVE, {"lr": 0.5})
    p[0].data = torch.ones(3)
    assert rows.renew([torch.ones(3)]) is (on == "eager")


def test_tables_cut_rows_into_chunks_that_cover_them() -> None:
    table = TensorTable.of(g=[torch.ones(5), torch.ones(0), torch.ones(4), torch.ones(1)]).pointers(2)
    assert table.chunks == 6
    assert table.row.tolist() == [0, 0, 0, 2, 2, 3]
    assert table.start.tolist() == [0, 2, 4, 0, 2, 0]
    assert table.count.tolist() == [2, 2, 1, 2, 2, 1]
    assert table.first.tolist() == [0, 3, 3, 5, 6]
    with torch.device("meta"):
        again = TensorTable.of(g=[torch.ones(5, device="cpu")]).pointers(2)
    assert again.row.tolist() == [0, 0, 0], "whatever the default device is"


def test_addresses_are_read_once_for_all_chunk_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    table = TensorTable.of(g=[torch.ones(5), torch.ones(3)], p=[torch.ones(5), torch.ones(3)])
    small, large = table.pointers(2), table.pointers(4)
    assert small.memory is large.memory
    assert (small.chunks, large.chunks) == (5, 3)
    gradients = [torch.ones(5), torch.ones(3)]
    assert table.renew(gradients)
    assert small.memory.values[:2].tolist() == [g.data_ptr() for g in gradients]
    monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.clone)  # stands in for a copy to a device
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    small.memory._on_host, gradients = False, [torch.ones(5), torch.ones(3)]
    assert table.renew(gradients)
    assert (sent := small.memory.values)[:2].tolist() == [g.data_ptr() for g in gradients]
    assert table.renew(gradients)
    assert small.memory.values is sent


# ---- forms of storage


def stepped(storage: Any, parts: Any, **scalars: Any) -> None:
    """One step of 2**-10 for a column of ones."""
    gradients = [torch.full(part.shape, 2.0**-10) for part in parts[0]]
    rows = TensorTable({"g": (dense(FP32), (gradients,)), "p": (storage, parts)})
    launch(rows, MOVE, {"lr": 1.0, **scalars})


def test_a_split_column_keeps_32_bits() -> None:
    weight, remainder = split(torch.ones(5))
    for i in range(1, 9):
        stepped(SPLIT, ([weight], [remainder]))
        assert join(weight, remainder).tolist() == [1.0 - i * 2.0**-10] * 5
        assert torch.equal(weight, split(torch.full((5,), 1.0 - i * 2.0**-10))[0])


@pytest.mark.parametrize("half", [BF16, FP16], ids=["bf16", "fp16"])
def test_a_plain_column_is_a_master_and_its_rounding(half: torch.dtype) -> None:
    master, weight = torch.ones(5), torch.ones(5, dtype=half)
    for i in range(1, 9):
        stepped(plain(half), ([master], [weight]))
        assert master.tolist() == [1.0 - i * 2.0**-10] * 5
        assert torch.equal(weight, master.to(half))
    weight[0] = 3.0
    stepped(plain(half), ([master], [weight]))
    assert master.tolist() == [3.0 - 2.0**-10, *[1.0 - 9 * 2.0**-10] * 4]


def test_a_stochastic_column_moves_as_far_on_average(on: str) -> None:
    weight = torch.ones(1 << 14, dtype=BF16)
    stepped(stochastic(BF16), ([weight],), seed=torch.tensor([5], dtype=torch.int32))
    assert set(weight.tolist()) == {1.0, 1.0 - 2.0**-8}
    assert float(1.0 - weight.double().mean()) == pytest.approx(2.0**-10, rel=0.05)


@needs_interpreter
@pytest.mark.parametrize("seed", [5, -1])
def test_triton_rounds_stochastically_as_the_others_do(on: str, seed: int) -> None:
    weights = []
    for name in (on, "triton"):
        with kernels.backend(name):
            weight = torch.linspace(-2.0, 2.0, 5000).to(BF16)
            weight[:3] = torch.tensor([math.inf, -math.inf, torch.finfo(BF16).max])
            stepped(stochastic(BF16), ([weight],), seed=torch.tensor([seed], dtype=torch.int32))
            weights.append(weight)
    assert torch.equal(*weights)
    assert weights[1][:2].tolist() == [math.inf, -math.inf]
    assert float((weights[1] != torch.linspace(-2.0, 2.0, 5000).to(BF16)).double().mean()) > 0.1


@needs_interpreter
@pytest.mark.parametrize("dtype", [FP32, FP64, BF16, FP16], ids=str)
def test_triton_computes_every_operation_as_the_others_do(on: str, dtype: torch.dtype) -> None:
    results = []
    for name in (on, "triton"):
        with kernels.backend(name):
            x, y, out, found = some(0, dtype)[:3], some(1, dtype)[:3], some(2, dtype)[:3], zero()
            sums = launch(TensorTable.of(x=x, y=y, out=out), ALL, {"a": 0.25, "b": 4.0}, found=found)
            results.append((out, sums))
            assert found == 0
    for ours, theirs in zip(*[out for out, _ in results], strict=True):
        assert torch.equal(ours, theirs)
    torch.testing.assert_close(results[1][1], results[0][1], rtol=1e-6, atol=0.0)


def test_a_batch_computes_in_double_if_a_column_is() -> None:
    assert TensorTable.of(x=[torch.ones(1)]).compute_dtype is FP32
    assert TensorTable.of(x=[torch.ones(1)], y=[torch.ones(1, dtype=FP64)]).compute_dtype is FP64
    assert TensorTable({"x": (dense(FP32), ([torch.ones(1)],))}, FP64).compute_dtype is FP64
    assert TensorTable({"p": (plain(BF16), ([torch.ones(1)], [torch.ones(1)])), "g": (dense(FP32), ([],))}).slots == {
        "p": range(2),
        "g": range(2, 3),
    }


# ---- the language


def test_a_trace_computes_each_value_once_and_reads_what_is_used() -> None:
    def fn(x: Any, y: Any, out: Any, *, a: Any, unused: Any) -> dict[str, Any]:
        return {"out": (x * a + 1.0) * (x * a + 1.0), "seen": y}

    program = trace(ElementwiseKernel("twice", fn, checks=("seen",)))
    assert (program.columns, program.scalars) == (("x", "y", "out"), ("a", "unused"))
    assert program.loads == ("x", "y")
    assert [node.op for node in program.nodes].count("mul") == 2
    assert [node.op for node in program.nodes].count("add") == 1
    assert program.nodes[program.stores["out"]].op == "mul"
    assert program.stores.keys() == {"out"}
    assert [program.nodes[i].args for i in program.checks] == [("y",)]
    assert program.squares == ()


def test_a_scalar_table_writes_what_changed() -> None:
    table = ScalarTable(["a", "b", "seed"], 2, FP32, torch.device("cpu"))
    values = table.fill({"a": 1.0, "b": torch.tensor([2.0, 3.0]), "seed": torch.tensor([5, 6], dtype=torch.int32)})
    assert values[:2].tolist() == [[1.0, 1.0], [2.0, 3.0]]
    assert values[2].view(torch.int32).tolist() == [5, 6]
    values[0] = 9.0
    table.fill({"a": 1.0, "b": 4.0, "seed": torch.tensor([7, 8], dtype=torch.int32)})
    assert values[0].tolist() == [9.0, 9.0], "a number that is the same is not written again"
    assert values[1].tolist() == [4.0, 4.0]
    assert values[2].view(torch.int32).tolist() == [7, 8]
    table.fill({"a": torch.tensor(3.0), "b": 4.0, "seed": torch.tensor([7, 8], dtype=torch.int32)})
    table.fill({"a": 1.0, "b": 4.0, "seed": torch.tensor([7, 8], dtype=torch.int32)})
    assert values[0].tolist() == [1.0, 1.0]
    assert ScalarTable([], 2, FP64, torch.device("cpu")).fill({}).shape == (1, 2)


def test_a_backend_is_chosen_for_a_block(on: str) -> None:
    with kernels.backend("eager") as chosen:
        assert isinstance(chosen, kernels.backend)
        assert kernels.backend_for("cpu") == "eager"
    assert kernels.backend_for("cpu") == on


# ---- which backend


def test_a_backend_that_cannot_run_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for name in ("compiled", "torch"):
        message = f"backend='{name}' runs on the CPU, not on cuda; choose 'auto'"
        with kernels.backend(name), pytest.raises(UsageError, match=message):
            kernels.backend_for("cuda")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with kernels.backend("triton"):
        for device in ("cpu", "cuda"):
            with pytest.raises(UsageError, match="needs the triton package"):
                kernels.backend_for(device)
    with kernels.backend("auto"):
        assert kernels.backend_for("cuda") == "eager"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    with kernels.backend("triton"):
        assert kernels.backend_for("cuda:1") == "triton"
        with pytest.raises(UsageError, match="runs on CUDA, not on cpu; choose 'auto', or set TRITON_INTERPRET=1"):
            kernels.backend_for("cpu")
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        assert kernels.backend_for("cpu") == "triton"
    with kernels.backend("auto"):
        assert kernels.backend_for("cuda") == "triton"
        assert kernels.backend_for("mps") == "eager"


def test_the_environment_chooses_where_nobody_did(monkeypatch: pytest.MonkeyPatch, on: str) -> None:
    monkeypatch.setenv("HALFSTEP_BACKEND", "quick")
    assert kernels.backend_for("cpu") == on
    token = launch_module._chosen.set(None)
    try:
        with pytest.raises(ArgumentValueError, match="HALFSTEP_BACKEND: 'quick' is no backend; choose one of auto"):
            kernels.backend_for("cpu")
        monkeypatch.setenv("HALFSTEP_BACKEND", "eager")
        assert kernels.backend_for("cpu") == "eager"
        monkeypatch.setenv("HALFSTEP_BACKEND", "")
        assert kernels.backend_for("meta") == "eager"
    finally:
        launch_module._chosen.reset(token)


def test_autograd_learns_of_a_write() -> None:
    x, out = torch.ones(3), torch.zeros(3)
    version = out._version
    ops.scale([x], [out], 2.0)
    assert out.tolist() == [2.0] * 3
    assert (out._version > version, x._version) == (True, 0)
