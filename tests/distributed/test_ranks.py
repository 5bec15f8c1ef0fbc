"""What an optimizer knows of other ranks, with the ranks played by the test: overflows, scales, buckets, means."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from halfstep import amp, optimizers
from halfstep.core.errors import UsageError
from halfstep.core.loss_scale import DynamicLossScale
from halfstep.parameters.loss_scaler import DeviceLossScaler
from halfstep.parameters.masters import table_of
from halfstep.parameters.table import Slot, record_of
from halfstep.stepping.attached import attach
from halfstep.stepping.backward import any_overflow
from halfstep.stepping.ranks import ddp_sync, flat_buckets
from halfstep.stepping.ranks.ddp_hook import DDPHook
from halfstep.stepping.ranks.ddp_sync import BackwardRecord, RankSync, share_overflow
from tests.support.worlds import BF16, FP32


class Wrapper(DDPHook):
    """The reduction of two ranks for some parameters, without a wrapper of torch behind it."""

    factor = 1.0
    changes_gradients = True
    will_sync = True
    is_joining = False
    has_cpu = True
    _plain = None
    _fill_missing_gradients = end_window = rebuild_buckets = lambda self: None
    wrapper: Any = staticmethod(lambda: "alive")

    def __init__(self, *params: torch.Tensor, group: Any = None, factor: float = 1.0) -> None:
        self.group, self.factor, self.world = group or object(), factor, 2
        self.params = frozenset(map(id, params))
        self.device, self.hooked = torch.device("cpu"), True
        self.allreduces = 0
        self.scale, self.open = None, set()
        self.stayed: list[torch.Tensor] = []
        self.fp32: list[list[int]] = []

    def remember_unsynced(self, params: Iterable[torch.Tensor]) -> None:
        self.stayed.extend(params)

    def hook(self, fp32: Iterable[torch.Tensor] = ()) -> None:
        self.fp32.append([id(p) for p in fp32])


def param(grad: float | None = None, dtype: torch.dtype = FP32, size: int = 2) -> nn.Parameter:
    made = nn.Parameter(torch.zeros(size, dtype=dtype))
    made.grad = None if grad is None else torch.full((size,), grad, dtype=dtype)
    return made


def with_wrappers(*wrappers: Wrapper) -> RankSync:
    ranks = RankSync()
    ranks.reductions = list(wrappers)
    return ranks


def slots(*params: torch.Tensor, saved: Iterable[torch.Tensor] = ()) -> list[Slot]:
    """Rows of a table, with gradients of ones set aside for some of the parameters."""
    for p in saved:
        record_of(p).saved = torch.ones(2)
    return [Slot(p, 0, record_of(p)) for p in params]


def flag(value: float) -> torch.Tensor:
    return torch.tensor(value)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[float], Any, Any]]:
    """What is all-reduced: the values of this rank, the operation and the group. The other rank has nothing."""
    calls: list[tuple[list[float], Any, Any]] = []

    def all_reduce(tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None) -> None:
        calls.append((tensor.to_dense().tolist(), op, group))

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    return calls


# ---- overflows


@pytest.mark.parametrize("flags", [[0.0], [1.0], [0.0, 0.0], [0.0, 1.0, 0.0], [1.0, 0.0]])
def test_one_overflow_among_passes_is_an_overflow(flags: list[float]) -> None:
    found = any_overflow([BackwardRecord(flag(value), None) for value in flags])
    assert (found.shape, float(found)) == ((), max(flags))


def test_without_ranks_each_scale_hears_of_its_latest_pass(sent: list[Any]) -> None:
    one, two = (DeviceLossScaler(DynamicLossScale()) for _ in range(2))
    passes = [
        BackwardRecord(flag(1.0), one),
        BackwardRecord(flag(0.0), one),
        BackwardRecord(flag(1.0), two),
        BackwardRecord(flag(1.0), None),
    ]
    told = share_overflow(passes, [RankSync()])
    assert {scaler: float(found) for scaler, found in told.items()} == {one: 0.0, two: 1.0}
    assert all(passed.shared for passed in passes)
    assert share_overflow(passes, [RankSync()]) == {}, "it hears of a pass once"
    assert sent == []


def test_one_number_a_loss_scale_goes_to_each_group_once(sent: list[Any]) -> None:
    one, two = (DeviceLossScaler(DynamicLossScale()) for _ in range(2))
    a, b, gone = Wrapper(), Wrapper(), Wrapper()
    also_a, gone.wrapper = Wrapper(group=a.group), lambda: None
    passes = [BackwardRecord(flag(0.0), one), BackwardRecord(flag(1.0), one), BackwardRecord(flag(0.0), two)]
    told = share_overflow(passes, [with_wrappers(a, gone), with_wrappers(b, also_a)])
    assert sent == [([1.0, 0.0], dist.ReduceOp.MAX, group) for group in (a.group, b.group)]
    assert [float(passed.found_inf) for passed in passes] == [1.0, 1.0, 0.0]
    assert {scaler: float(found) for scaler, found in told.items()} == {one: 1.0, two: 0.0}
    sent.clear()
    assert share_overflow(passes, [with_wrappers(a)]) == {}
    assert sent == []


@pytest.mark.parametrize(("earlier", "now", "told"), [(0.0, 1.0, 1.0), (1.0, 1.0, 0.0), (0.0, 0.0, 0.0)])
def test_an_overflow_that_is_known_is_told_once(earlier: float, now: float, told: float, sent: list[Any]) -> None:
    scaler = DeviceLossScaler(DynamicLossScale())
    passes = [BackwardRecord(flag(earlier), scaler, shared=True), BackwardRecord(flag(now), scaler)]
    assert float(share_overflow(passes, [with_wrappers(Wrapper())])[scaler]) == told


# ---- scales


def test_wrappers_that_disagree_are_refused() -> None:
    with pytest.raises(UsageError, match="gradient_average or gradient_predivide_factor"):
        with_wrappers(Wrapper(factor=4.0), Wrapper()).gradient_scale(None)


# ---- passes


def test_what_the_coming_pass_averages_is_carried() -> None:
    p, q, r = param(1.0), param(1.0), param(1.0)
    a, b = Wrapper(p), Wrapper(q)
    b.will_sync = False
    ranks = with_wrappers(a, b)
    assert ranks.will_sync
    assert [id(x.param) for x in ranks.averaged_next(slots(p, q, r))] == [id(p)]
    a.will_sync = False
    assert not ranks.will_sync
    assert ranks.averaged_next(slots(p, q, r)) == []
    assert ranks.abandon_backward(), "what was carried went with the pass that failed"
    assert not ranks.abandon_backward()


def unsynced_pass(ranks: RankSync, *params: torch.Tensor) -> None:
    """A pass that the ranks do not average brings gradients to parameters without."""
    ranks.begin_backward(None, slots(*params))
    for one in params:
        one.grad = torch.ones_like(one)
    ranks.end_backward()


def test_a_synced_pass_that_brings_nothing_fills_gradients_and_leaves_nothing_behind() -> None:
    p, filled = param(1.0), []
    wrapper: Any = Wrapper(p)
    wrapper._fill_missing_gradients = lambda: filled.append(p)
    ranks = with_wrappers(wrapper)
    ranks.begin_backward(None, slots(p))
    ranks.end_backward()
    assert (len(filled), ranks.has_unsynced) == (1, False)


@pytest.mark.parametrize(
    ("syncs", "unsent", "behind"), [(True, True, False), (False, False, False), (False, True, True)]
)
def test_a_reduction_nobody_expected_counts_if_it_carried_all(syncs: bool, unsent: bool, behind: bool) -> None:
    p = param()
    wrapper = Wrapper(p)
    ranks = with_wrappers(wrapper)
    unsynced_pass(ranks, p)
    ranks.begin_backward(None, slots(p, saved=[p] if unsent else []))
    wrapper.allreduces, wrapper.will_sync = 1, syncs
    ranks.end_backward()
    assert ranks.has_unsynced is behind


def test_two_optimizers_of_one_wrapper_end_their_passes_one_by_one() -> None:
    """Gradients that one of them has set aside are those of this one alone."""
    p, q = param(), param()
    wrapper = Wrapper(p, q)
    first, second = with_wrappers(wrapper), with_wrappers(wrapper)
    unsynced_pass(first, p)
    unsynced_pass(second, q)
    wrapper.will_sync = False
    first.begin_backward(None, slots(p))
    second.begin_backward(None, slots(q, saved=[q]))
    wrapper.allreduces += 1
    first.end_backward()
    assert wrapper.open == {second}
    second.end_backward()
    assert (wrapper.open, first.has_unsynced, second.has_unsynced) == (set(), False, True)


@pytest.mark.parametrize("talked", [False, True])
def test_a_pass_that_failed_is_lost_once_ranks_have_talked(talked: bool) -> None:
    p = param()
    wrapper = Wrapper(p)
    ranks = with_wrappers(wrapper)
    ranks.begin_backward(None, slots(p))
    p.grad = torch.ones(2)
    wrapper.allreduces += talked
    assert ranks.abandon_backward() is talked
    assert wrapper.open == set()
    assert [id(x) for x in wrapper.stayed] == ([] if talked else [id(p)])
    assert not ranks.abandon_backward()


# ---- what is averaged before a step


def test_flat_buckets_hold_one_dtype_and_not_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flat_buckets, "_BUCKET", 4)
    sizes = [(2, FP32), (2, FP32), (1, FP32), (9, FP32), (1, BF16), (3, BF16)]
    tensors = [torch.zeros(n, dtype=dtype) for n, dtype in sizes]
    chunks = [[t.numel() for t in chunk] for chunk in flat_buckets._chunks(tensors)]
    assert chunks == [[2, 2], [1], [9], [1, 3]]
    assert flat_buckets._chunks([]) == []
    assert [len(chunk) for chunk in flat_buckets._chunks([torch.zeros(n) for n in (1, 4, 1)])] == [1, 1, 1]


# ---- finding wrappers


class Finder:
    """A process in which wrappers come and go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.wrappers: list[Wrapper] = []
        self.broadcasts: list[list[float]] = []
        monkeypatch.setattr(ddp_sync, "REDUCTIONS", self.wrappers)
        monkeypatch.setattr(dist, "get_global_rank", lambda group, rank: rank + 6)
        monkeypatch.setattr(dist, "broadcast", self.broadcast)

    def broadcast(self, flat: torch.Tensor, source: int, group: object) -> None:
        assert source == 6, "the first rank of the group"
        self.broadcasts.append(flat.tolist())
        flat.copy_(torch.arange(1.0, flat.numel() + 1) + 2.0**-12)


def test_wrappers_around_the_parameters_are_found_when_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    finder, ranks = Finder(monkeypatch), RankSync()
    p, q = param(), param()
    ranks.find_wrappers([p, q], [q], [])
    assert ranks.reductions == []
    mine, foreign, idle = Wrapper(p), Wrapper(param()), Wrapper(q)
    finder.wrappers += [mine, foreign, idle]
    idle.changes_gradients = False
    for _ in range(2):
        ranks.find_wrappers([p, q], [q], [])
        assert ranks.reductions == [mine]
    assert (mine.fp32, foreign.fp32, idle.fp32) == ([[id(q)]], [], []), "once for what there is"
    late = Wrapper(q)
    finder.wrappers.append(late)
    ranks.find_wrappers([p, q], [q], [])
    assert ranks.reductions == [mine, late]
    finder.wrappers.remove(mine)
    ranks.find_wrappers([p, q], [q], [])
    assert ranks.reductions == [late], "the other one is gone"
    inside = attach(torch.optim.SGD([p, q]), delegates_to_outer=True).window
    inside.sync()
    assert inside.ranks.reductions == [], "the optimizer around it does this"


def test_every_rank_gets_the_masters_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    finder, ranks = Finder(monkeypatch), RankSync()
    weight, other, bare = (nn.Parameter(torch.zeros(shape, dtype=BF16)) for shape in ((2, 2), (1,), (2,)))
    optimizer = torch.optim.SGD([weight, other], lr=0.0)
    table, _ = table_of(optimizer, True, {id(weight): torch.full((2, 2), 2.0**-140)})
    finder.wrappers.append(Wrapper(weight, bare))
    ranks.find_wrappers([weight, other, bare], [], [weight, other, bare])
    assert finder.broadcasts == [[2.0**-140] * 4]
    assert table.find(weight).read().tolist() == [[1.0 + 2.0**-12, 2.0 + 2.0**-12], [3.0 + 2.0**-12, 4.0 + 2.0**-12]]
    assert weight.tolist() == [[1.0, 2.0], [3.0, 4.0]]
    assert table.find(other).read().tolist() == [0.0], "it is in no wrapper"
    version = weight._version
    again = RankSync()
    again.find_wrappers([weight], [], [weight])
    assert len(finder.broadcasts) == 2
    assert weight._version == version, "what is the same is not written"


@pytest.mark.parametrize("other", [0.0, 1.0], ids=["the same masters", "others"])
def test_masters_are_exchanged_without_a_write_to_weights_that_they_round_to(
    other: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A forward pass may have kept them. Before the first step a master half way between two weights is at either."""
    monkeypatch.setattr(dist, "get_global_rank", lambda group, rank: rank)
    monkeypatch.setattr(dist, "broadcast", lambda flat, source, group: flat.add_(other))
    ties = torch.tensor([[1 + 2.0**-8, 1 + 3 * 2.0**-8, -1 - 2.0**-8]])
    model = nn.Linear(3, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(ties)
    optimizer = optimizers.FusedAdam(model.parameters(), master_weights="split")
    amp.initialize(model, optimizer, opt_level="O2", dtype=BF16, verbosity=0)
    before, version = model.weight.detach().clone(), model.weight._version
    flat_buckets.share_masters([model.weight], object())  # type: ignore[arg-type]
    assert (model.weight._version == version) == (other == 0.0)
    assert torch.equal(model.weight, before) == (other == 0.0)
    assert torch.equal(model.state_dict()["weight"], ties + other)
