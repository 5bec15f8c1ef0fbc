"""All that halfstep leaves on the objects of its users is in a table of docs/side-effects.md, with the reason."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

import halfstep
from halfstep import amp, fp16_utils, numerics, optimizers, parallel, static
from halfstep.torch_internals.torch_compat import HAS_GRAD_DTYPE
from tests.support.backends import needs_compiler
from tests.support.design_tables import differences
from tests.support.marks import Mark, came, marks, on_module
from tests.support.processes import one_rank
from tests.support.worlds import read_back

TABLE = "Marks on the objects of users"
X, Y = torch.ones(4, 8), torch.arange(4) % 3
LOSS = nn.CrossEntropyLoss()


class Looker(nn.Module):
    """A layer that calls ``see`` in every forward and backward pass."""

    see: Callable[[], None] = staticmethod(lambda: None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Looker.see()
        if x.requires_grad:
            x.register_hook(lambda grad: Looker.see())
        return x


class LookingSGD(torch.optim.SGD):
    """Calls ``see`` in every step; as it has a step of its own, no fused one takes its place."""

    def step(self, closure: Any = None) -> Any:
        Looker.see()
        return super().step(closure)


class LookingAdamW(torch.optim.AdamW):
    """The same, with torch's fused step, which takes a loss scale."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1, fused=True)

    def step(self, closure: Any = None) -> Any:
        Looker.see()
        return super().step(closure)


class Network(nn.Sequential):
    """A model with a public method."""

    def features(self, x: torch.Tensor) -> torch.Tensor:
        return self[0](x)  # type: ignore[no-any-return]


KINDS = (torch.optim.SGD, torch.optim.AdamW, LookingSGD, LookingAdamW, optimizers.FusedAdam)


class Stage:
    """A model and an optimizer, and all that came onto them since they were made, whenever anybody looked."""

    def __init__(self, kind: Any) -> None:
        self.model, self.optimizer = self._made(kind)
        self.called = self.model
        twin, other = self._twin = self._made(kind)  # what torch itself leaves there; kept, as identities are compared
        for _ in range(2):
            LOSS(twin(X), Y).backward()
            other.step()
        self._before = marks(self.model, self.optimizer) | marks(twin, other)
        self.found: set[Mark] = set()

    @staticmethod
    def _made(kind: Any) -> tuple[nn.Module, Any]:
        model = Network(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), Looker(), nn.Linear(8, 3))
        return model, kind(model.parameters())

    def see(self) -> None:
        self.found |= came(marks(self.model, self.optimizer), self._before)

    @contextmanager
    def watched(self) -> Iterator[Stage]:
        """Look now, in every pass and step meanwhile, and in the end."""
        Looker.see = self.see
        try:
            yield self
            self.see()
        finally:
            Looker.see = staticmethod(lambda: None)
            amp.deactivate()

    def by_scale_loss(self, **options: Any) -> None:
        for _ in range(2):
            with amp.scale_loss(LOSS(self.called(X), Y), self.optimizer, **options) as scaled_loss:
                self.see()
                scaled_loss.backward()
                self.see()
            self.see()
            self.optimizer.step()
            self.see()
            self.optimizer.zero_grad()

    def by_scaler(self, scaler: Any, casting: Any = None) -> None:
        for _ in range(2):
            with casting or torch.autocast("cpu", enabled=False):
                loss = LOSS(self.called(X).float(), Y)
            scaler.scale(loss).backward()
            scaler.unscale_(self.optimizer)
            self.see()
            scaler.step(self.optimizer)
            scaler.update()
            self.see()
            self.optimizer.zero_grad()


def levels(kind: Any, level: str, dtype: str, **options: Any) -> set[Mark]:
    with Stage(kind).watched() as stage:
        amp.initialize(stage.model, stage.optimizer, opt_level=level, dtype=dtype, verbosity=0, **options)
        stage.by_scale_loss()
        stage.by_scale_loss(delay_unscale=True)
    return stage.found


def scalers(kind: Any) -> set[Mark]:
    found = set()
    for scaler in (amp.GradScaler(), torch.amp.GradScaler("cpu")):
        with Stage(kind).watched() as stage:
            stage.by_scaler(scaler)
        found |= stage.found
    return found


def decorated(kind: Any) -> set[Mark]:
    with Stage(kind).watched() as stage:
        amp.decorate(stage.model, stage.optimizer, level="O2", dtype="float16")
        stage.by_scaler(amp.GradScaler(), amp.auto_cast(level="O2", dtype="float16"))
    return stage.found


def fused(kind: Any) -> set[Mark]:
    if not optimizers.can_fuse(Stage(kind).optimizer):
        return set()
    with Stage(kind).watched() as stage:
        optimizers.fuse(stage.optimizer, max_grad_norm=1.0)
        stage.by_scaler(torch.amp.GradScaler("cpu"))
        optimizers.unfuse(stage.optimizer)
        stage.by_scaler(torch.amp.GradScaler("cpu"))
    return stage.found


def released() -> set[Mark]:
    with Stage(torch.optim.AdamW).watched() as stage:
        amp.initialize(stage.model, stage.optimizer, opt_level="O2", dtype="bfloat16", verbosity=0)
        stage.optimizer.attach(stage.model)
        stage.by_scale_loss()
    return stage.found


def copied() -> set[Mark]:
    with Stage(torch.optim.AdamW).watched() as stage:
        amp.initialize(stage.model, stage.optimizer, opt_level="O2", verbosity=0)
        stage.by_scale_loss()
        for copies in (copy.deepcopy, partial(read_back, weights_only=False)):
            stage.model, stage.optimizer = copies((stage.model, stage.optimizer))
            stage.see()
        amp.master_model(stage.model)
        list(amp.master_params(stage.optimizer))
        stage.optimizer.load_state_dict(stage.optimizer.state_dict())
        stage.model.load_state_dict(stage.model.state_dict())
    return {(on, mark) for on, mark in stage.found if mark not in ("['params']", "state")}  # a copy has its own


def scheduled() -> set[Mark]:
    with Stage(torch.optim.SGD).watched() as stage:
        amp.initialize(stage.model, stage.optimizer, opt_level="O2", verbosity=0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            scheduler = torch.optim.lr_scheduler.StepLR(stage.optimizer, 1)
        stage.by_scale_loss()
        scheduler.step()
    return stage.found - {("group", "['initial_lr']")}  # torch's


def by_handle() -> set[Mark]:
    handle = amp.init(verbose=False)
    with Stage(torch.optim.SGD).watched() as stage:
        wrapped = handle.wrap_optimizer(stage.optimizer)
        for _ in range(2):
            with wrapped.scale_loss(LOSS(stage.model(X), Y)) as scaled_loss:
                scaled_loss.backward()
            wrapped.step()
    handle._deactivate()
    return stage.found


def by_fp16_optimizer() -> set[Mark]:
    with Stage(torch.optim.SGD).watched() as stage:
        stage.model.half()
        optimizer = fp16_utils.FP16_Optimizer(stage.optimizer, dynamic_loss_scale=True, verbose=False)
        for _ in range(2):
            optimizer.backward(stage.model(X.half()).float().sum())
            stage.see()
            optimizer.step()
            stage.see()
            optimizer.zero_grad()
    return stage.found


def on_ranks() -> set[Mark]:
    with one_rank():
        with Stage(torch.optim.SGD).watched() as stage:
            amp.initialize(stage.model, stage.optimizer, opt_level="O2", dtype="bfloat16", verbosity=0)
            wrapper = stage.called = parallel.DistributedDataParallel(stage.model, gradient_average=False)
            twin = parallel.DistributedDataParallel(nn.Linear(8, 3))
            twin._forward_hooks.clear()  # halfstep sees every wrapper
            with wrapper.no_sync():
                stage.by_scale_loss()
            stage.by_scale_loss()
        LOSS(twin(X), Y).backward()
        return stage.found | {("wrapper", mark) for mark in {*on_module(wrapper)} - {*on_module(twin)}}


def observed() -> set[Mark]:
    with Stage(torch.optim.AdamW).watched() as stage:
        amp.initialize(stage.model, stage.optimizer, opt_level="O2", dtype="bfloat16", verbosity=0)
        watch = halfstep.watch(stage.optimizer, every=1)
        with numerics.Monitor(stage.model, stage.optimizer, every=1):
            stage.by_scale_loss()
        watch.remove()
        halfstep.check(stage.model, optimizer=stage.optimizer, batch=X)
        numerics.op_table(lambda: stage.model(X), stage.model)
    return stage.found


def in_one_call() -> set[Mark]:
    with Stage(torch.optim.SGD).watched() as stage:
        amp.initialize(stage.model, stage.optimizer, opt_level="O2", dtype="bfloat16", verbosity=0)
        halfstep.TrainStep(stage.model, LOSS, stage.optimizer)(X, Y)
    found = stage.found
    with Stage(torch.optim.SGD).watched() as stage:
        halfstep.TrainStep(stage.model, LOSS, stage.optimizer, cuda_graph=True)
        stage.see()
    found |= stage.found
    with Stage(torch.optim.SGD).watched() as stage:
        network = halfstep.Model(stage.model)
        network.prepare(stage.optimizer, LOSS, amp_configs="O2")
        network.fit([(X, Y)], verbose=0)
    return found | stage.found


def in_a_graph() -> set[Mark]:
    with Stage(torch.optim.SGD).watched() as stage:
        program = static.capture(stage.model, LOSS, (X, Y))
        static.amp.decorate(stage.optimizer, level="O2", dtype="float16").minimize(program.loss)
        for _ in range(2):
            static.Executor().run(program, dict(zip(program.feed_names, (X, Y), strict=True)), [program.loss])
            stage.see()
    return stage.found


USES: list[Callable[[], set[Mark]]] = [
    *(partial(levels, *case) for case in product(KINDS, ("O0", "O1", "O2", "O3"), ("float16", "bfloat16"))),
    partial(levels, torch.optim.SGD, "O1", "bfloat16", products="fp8_tensorwise"),
    *(partial(use, kind) for use, kind in product((scalers, decorated, fused), KINDS)),
    *(released, copied, scheduled, by_handle, by_fp16_optimizer, on_ranks, observed, in_one_call, in_a_graph),
]


@needs_compiler
@pytest.mark.skipif(not HAS_GRAD_DTYPE, reason="the table is that of torch 2.13: an older one has no grad_dtype")
def test_every_mark_is_in_the_table() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of updates that round away
        found = set().union(*(use() for use in USES))
    problems = differences(TABLE, found)
    assert not problems, "\n".join(problems)


def test_a_mark_is_found() -> None:
    """One of each kind that a user's object can have."""
    with Stage(torch.optim.SGD).watched() as stage:
        stage.model[0].extra = 1
        stage.model[0].register_forward_pre_hook(print)
        weight = stage.model[0].weight
        weight.extra = 1
        weight.register_post_accumulate_grad_hook(print)
        weight.grad = torch.zeros_like(weight)
        weight.grad.extra = 1
        stage.optimizer.__class__ = type("SGD", (Stage, torch.optim.SGD), {})
        stage.optimizer.register_step_post_hook(print)
        stage.optimizer.param_groups[0]["extra"] = 1
        stage.optimizer.param_groups[0]["params"][1] = torch.zeros(8)
        stage.optimizer.state = {weight: {"extra": 1}}
    assert stage.found == {
        *((kind, "extra") for kind in ("module", "parameter", "gradient")),
        *(("optimizer", mark) for mark in (f"class of {__name__}", "step_post_hook print", "state")),
        *(("parameter", mark) for mark in ("post_accumulate_grad_hook print", "class of torch")),
        *(
            ("module", "forward_pre_hook print"),
            ("group", "['extra']"),
            ("group", "['params']"),
            ("state", "['extra']"),
        ),
    }


TEXT = """
### Some marks

| On | Mark | Why |
|---|---|---|
| module | `a` | It is needed. |
| module | `b` |  |

### More
"""


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (["a", "b", "c"], "module c is not in the table 'Some marks' of docs/side-effects.md"),
        (["b"], "row module a of the table 'Some marks' of docs/side-effects.md names something that is not there"),
        (["a", "b"], "row module b of the table 'Some marks' of docs/side-effects.md gives no reason."),
    ],
)
def test_a_table_that_differs_is_told_of(found: list[str], says: str) -> None:
    assert says in " ".join(differences("Some marks", [("module", mark) for mark in found], TEXT))
