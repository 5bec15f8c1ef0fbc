"""``op_table``: the module of each op, forward and backward, and who makes each cast. The step does not change."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from halfstep import amp, numerics
from halfstep.casting.current import thread
from halfstep.diagnostics.observe.ops import OpCall
from halfstep.diagnostics.observe.watch import CallWatch
from halfstep.numerics import OpTable
from tests.support.processes import Ranks, one_rank
from tests.support.worlds import Applies, Made, scaled_step, with_optimizer


class Net(nn.Module):
    """Two linear layers of which the second is used twice, a norm, and a product of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.norm = nn.LayerNorm(16)
        self.twice = nn.Linear(16, 16)
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(x)).tanh()
        x = self.twice(self.twice(x))
        return self.head(x * 2)


def loss_of(model: nn.Module, scale: float = 1.0) -> torch.Tensor:
    torch.manual_seed(1)
    return F.cross_entropy(model(torch.randn(6, 8)), torch.tensor([0, 1, 2, 3, 0, 1])) * scale


def made() -> nn.Module:
    torch.manual_seed(0)
    return Net()


def ops_of(table: OpTable, *, backward: bool) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for row in table.rows():
        if row.backward == backward:
            found.setdefault(row.module, []).append(row.op)
    return found


# ---- modules


@pytest.mark.parametrize("again", [None, False, True], ids=["plain", "checkpoint", "reentrant checkpoint"])
def test_ops_belong_to_modules_in_both_passes(again: bool | None) -> None:
    model = made()

    def step() -> None:
        x = torch.randn(6, 8, requires_grad=True)
        out = model(x) if again is None else checkpoint(model, x, use_reentrant=again)
        F.cross_entropy(out, torch.tensor([0, 1, 2, 3, 0, 1])).backward()

    table = numerics.op_table(step, model)
    forward, backward = ops_of(table, backward=False), ops_of(table, backward=True)
    assert {name: forward[name] for name in ("first", "norm", "twice", "head", "(root)")} == {
        "first": ["addmm"],
        "norm": ["native_layer_norm"],
        "twice": ["addmm"],
        "head": ["addmm"],
        "(root)": ["tanh", "mul"],
    }
    assert backward["norm"] == ["native_layer_norm_backward"]
    assert backward["(root)"] == ["mul", "tanh_backward"]
    assert backward["first"] == backward["head"] == ["mm", "sum"]
    assert backward["twice"][:2] == ["mm", "sum"]
    assert backward["(step)"] == ["nll_loss_backward", "_log_softmax_backward_data"]
    calls = {(row.module, row.op): row.calls for row in table.rows() if not row.backward}
    assert calls["twice", "addmm"] == {"float32": 2 if again is None else 4}


def test_without_a_model_modules_are_named_by_the_way_to_them() -> None:
    model = nn.Sequential(Net(), nn.ReLU())
    table = numerics.op_table(lambda: model(torch.randn(2, 8)).sum().backward())
    names = {row.module for row in table.rows()}
    assert names == {"Sequential.0.first", "Sequential.0.norm", "Sequential.0.twice", "Sequential.0.head"} | {
        "Sequential.0",
        "Sequential.1",
        "(step)",
    }


def test_ops_of_an_optimizer_are_its_own() -> None:
    model, optimizer = with_optimizer(made(), torch.optim.SGD, lr=0.1, foreach=False)

    def step() -> None:
        loss_of(model).backward()
        optimizer.step()

    rows = [row for row in numerics.op_table(step, model).rows() if row.module == "(optimizer)"]
    assert [(row.op, row.calls) for row in rows] == [("add_", {"float32": 8})]


def test_an_error_in_a_module_closes_it_and_leaves_no_hook() -> None:
    class Broken(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError(str(x.sum() > 0))

    model = nn.ModuleDict({"broken": Broken(), "fine": nn.Linear(2, 2)})

    def step() -> None:
        with pytest.raises(ValueError, match="True"):
            model["broken"](torch.ones(2))
        torch.ones(2).exp()
        model["fine"](torch.ones(2))

    table = numerics.op_table(step, model)
    assert {(row.module, row.op) for row in table.rows()} >= {("broken", "sum"), ("(step)", "exp"), ("fine", "addmm")}
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.exhaustive
def test_compiled_modules_run_eagerly() -> None:
    model = torch.compile(made(), backend="eager")
    table = numerics.op_table(lambda: loss_of(model).backward(), model)
    assert ops_of(table, backward=False)["twice"] == ["addmm"]


def in_ddp(rank: int) -> list[tuple[str, str]]:
    model = nn.parallel.DistributedDataParallel(made())
    table = numerics.op_table(lambda: loss_of(model).backward(), model)
    return [(row.module, row.op) for row in table.rows()]


def test_under_ddp_names_are_those_of_the_model(ranks: Ranks) -> None:
    first, second = ranks.run(in_ddp)
    assert first == second
    assert {("norm", "native_layer_norm"), ("twice", "mm"), ("head", "addmm")} <= set(first)


def test_a_notice_sees_every_op_with_its_result() -> None:
    seen: list[OpCall] = []
    with CallWatch(None, ops=seen.append):
        torch.ones(3).add_(1).sum().item()
    assert [call.name for call in seen if not call.op.is_view] == ["ones", "add_", "sum", "_local_scalar_dense"]
    assert [None if call.output is None else call.output.dtype for call in seen][-2:] == [torch.float32, None]
    count = len(seen)
    torch.ones(3)
    assert len(seen) == count


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_emulated_product_counts_under_its_dtype_and_no_look_at_values_counts(level: str) -> None:
    # casting looks at integers and at masks
    embedded = Made(
        lambda self, words, mask: self.net(self.words(words) * mask), words=nn.Embedding(100, 8), net=made()
    )
    model = amp.initialize(embedded, opt_level=level, dtype=torch.float16, emulate=True, verbosity=0)
    words, mask = torch.arange(90, 96), torch.arange(6.0)[:, None] * 3000
    with numerics.Monitor(model, every=1):
        table = numerics.op_table(lambda: model(words, mask).float().sum().backward(), model)
    products = {(row.backward, *row.calls) for row in table.rows() if row.op in ("mm", "addmm")}
    assert products == {(False, "float16 (emulated)"), (True, "float16 (emulated)")}
    assert " float16 (emulated)" in str(table).splitlines()[2]
    assert {"abs", "aminmax", "equal", "max", "_local_scalar_dense"}.isdisjoint(row.op for row in table.rows())


# ---- casts


def cast_rows(table: OpTable) -> set[tuple[Any, ...]]:
    return {(c.module, c.asked_by, c.made_by, c.source, c.target, c.backward, c.calls) for c in table.casts()}


def test_casts_of_auto_cast_name_the_function_that_asked() -> None:
    model = made()

    def step() -> None:
        with amp.auto_cast(dtype="bfloat16"):
            loss = loss_of(model)
        loss.backward()

    casts = cast_rows(numerics.op_table(step, model))
    assert ("norm", "layer_norm", "casting", "bfloat16", "float32", False, 1) in casts
    assert ("norm", "layer_norm", "casting", "float32", "bfloat16", True, 1) in casts
    assert ("(step)", "cross_entropy", "casting", "bfloat16", "float32", False, 1) in casts
    assert {made_by for _, _, made_by, *_ in casts} == {"casting"}


def test_casts_of_native_autocast_are_casting_too() -> None:
    model = nn.Linear(8, 4)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            model(torch.randn(2, 8))

    assert cast_rows(numerics.op_table(step, model)) == {
        ("(root)", "linear", "casting", "float32", "bfloat16", False, 3)
    }


@pytest.mark.parametrize("level", ["O1", None])
def test_casts_of_the_user_are_the_users(level: str | None) -> None:
    model = nn.Sequential(Applies(lambda x: x.to(torch.float16).float()))

    def step() -> None:
        x = torch.ones(10, requires_grad=True)
        with amp.auto_cast(enable=level is not None, dtype="bfloat16"):
            model(x).sum().backward()

    table = numerics.op_table(step, model)
    assert cast_rows(table) == {
        ("0", "", "user", "float32", "float16", False, 1),
        ("0", "", "user", "float16", "float32", False, 1),
        ("0", "", "user", "float32", "float16", True, 1),
        ("0", "", "user", "float16", "float32", True, 1),
    }
    assert [cast.bytes for cast in table.casts()] == [60] * 4


def test_casts_of_a_models_inputs_and_outputs_are_casting() -> None:
    model = amp.initialize(made(), opt_level="O2", dtype="bfloat16", verbosity=0)
    casts = cast_rows(numerics.op_table(lambda: model(torch.randn(2, 8)), model))
    assert ("(root)", "", "casting", "float32", "bfloat16", False, 1) in casts
    assert ("(root)", "", "casting", "bfloat16", "float32", False, 1) in casts


def test_what_torch_casts_by_itself() -> None:
    linear = nn.Linear(4, 4).bfloat16()

    def step() -> None:
        (linear(torch.ones(2, 4, dtype=torch.bfloat16)) + torch.ones(2, 4)).sum().backward()

    casts = cast_rows(numerics.op_table(step, linear))
    assert casts == {("(step)", "", "torch", "float32", "bfloat16", True, 1)}


def test_what_fsdp2_casts_is_torchs() -> None:
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    with one_rank():
        policy = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        model = fsdp.fully_shard(nn.Linear(8, 4), mesh=dist.init_device_mesh("cpu", (1,)), mp_policy=policy)
        table = numerics.op_table(lambda: model(torch.randn(2, 8)), model)
    assert {(cast.made_by, cast.source, cast.target) for cast in table.casts()} == {("torch", "float32", "bfloat16")}
    assert ("(root)", "addmm", {"bfloat16": 1}) in [(row.module, row.op, row.calls) for row in table.rows()]


# ---- nothing changes


def plain(model: nn.Module) -> Callable[[], None]:
    return lambda: loss_of(model).backward()


def auto_cast(model: nn.Module) -> Callable[[], None]:
    def step() -> None:
        for _ in range(2):
            with amp.auto_cast(dtype="bfloat16"):
                loss = loss_of(model)
            loss.backward()

    return step


def at_level(level: str, dtype: str, model: nn.Module) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, dtype=dtype, verbosity=0)
    return lambda: scaled_step(loss_of(model), optimizer)


RECIPES = [plain, auto_cast, partial(at_level, "O1", "float16"), partial(at_level, "O2", "bfloat16")]


@pytest.mark.parametrize("recipe", RECIPES, ids=["plain", "auto_cast", "O1", "O2"])
def test_the_step_is_the_same_to_the_bit(recipe: Callable[[nn.Module], Callable[[], None]]) -> None:
    results = []
    for watched in (False, True):
        model = made()
        step = recipe(model)
        for _ in range(3):
            if watched:
                numerics.op_table(step, model)
            else:
                step()
        results.append([*model.parameters(), *(p.grad for p in model.parameters() if p.grad is not None)])
    assert len(results[0]) == len(results[1]) > 8
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_the_weight_cache_works_as_without() -> None:
    model = made()

    def step() -> None:
        with amp.auto_cast(dtype="bfloat16"):
            model(torch.randn(2, 8))

    counts = []
    for run in (step, lambda: numerics.op_table(step, model)):
        before = thread.cache.casts
        run()
        counts.append(thread.cache.casts - before)
    assert counts == [6, 6]  # the weight and the bias of each linear layer, once


# ---- text


def test_the_table_prints() -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.ReLU())

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            model(torch.randn(2, 8)).float().argmax()

    table = numerics.op_table(step, model)
    assert table.by_dtype() == {"float32": 1, "bfloat16": 2, "int64": 1}
    assert str(table) == (
        "One step: 4 calls of ops (2 bfloat16, 1 float32, 1 int64)\n"
        "\n"
        "module  op      pass     float32  bfloat16  other\n"
        "(step)  randn   forward        1         .      .\n"
        "0       addmm   forward        .         1      .\n"
        "1       relu    forward        .         1      .\n"
        "(step)  argmax  forward        .         .      1\n"
        "\n"
        "4 casts, 360 B moved\n"
        "\n"
        "module  asked by  made by  pass     from      to        casts  bytes\n"
        "0       linear    casting  forward  float32   bfloat16      3  312 B\n"
        "(step)  .         user     forward  bfloat16  float32       1   48 B"
    )
