"""``attach(model, offload="cpu")``: the host steps, and every number is that of the ordinary step.

On a CPU all copies happen at once, so the table proves values. ``late_device`` gives it streams whose work is done when
somebody waits for it, and no earlier: a step that does not wait reads NaN there.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from halfstep import amp, optimizers
from halfstep.core.errors import ArgumentValueError, UsageError
from halfstep.kernels import backend
from halfstep.optimizers import offload as offload_file
from halfstep.optimizers import release as release_file
from halfstep.optimizers.offload import Offload
from tests.optimizers.test_gradient_release import (
    OPTIMIZERS,
    SCALERS,
    assert_same,
    batches,
    loss_of,
    make,
    train,
)
from tests.support.fake_cuda import fake_cuda

BF16, FP16 = torch.bfloat16, torch.float16
Run = tuple[nn.Module, Any]


@pytest.fixture(params=[1, 2**22], ids=["alone", "together"])
def bucket(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many elements wait for each other."""
    monkeypatch.setattr(release_file, "_BUCKET", request.param)
    return request.param  # type: ignore[no-any-return]


def both(make_run: Callable[[], Run], use: Callable[[Run], None], **arguments: Any) -> None:
    """Train without and with offload: every number is the same."""
    runs = []
    for offloads in (False, True):
        run = make_run()
        if offloads:
            run[1].attach(run[0], offload="cpu", **arguments)
        use(run)
        runs.append(run)
    assert_same(*runs)


# ---- values


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("loss_scale", [1.0, "dynamic"])
@pytest.mark.parametrize(("level", "dtype"), [("O1", BF16), ("O2", BF16), ("O2", FP16), ("O3", BF16)])
@pytest.mark.filterwarnings("ignore:.*updates bfloat16 weights in place")
def test_steps_as_the_ordinary_step(kind: str, loss_scale: Any, level: str, dtype: Any, bucket: int) -> None:
    both(
        lambda: make(kind, level=level, dtype=dtype, loss_scale=loss_scale),
        lambda run: train(*run, batches(3)),
    )


OTHERS: dict[str, Callable[[nn.Module], Any]] = {
    "8-bit": lambda model: optimizers.FusedAdam(model.parameters(), state_dtype="8bit"),
    "Muon": lambda model: optimizers.FusedMuon(model.named_parameters(), lr=0.02),
    "stochastic": lambda model: optimizers.FusedAdam(model.parameters(), rounding="stochastic"),
    "clipped": lambda model: optimizers.FusedAdam(model.parameters(), max_grad_norm=0.1),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_steps_as_gradient_release_on_the_device(kind: str, bucket: int) -> None:
    """Whose numbers, with clipping and Muon, are not quite those of the ordinary step."""
    runs = []
    for offload in (None, "cpu"):
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
        optim = OTHERS[kind](model)
        model, optim = amp.initialize(model, optim, opt_level="O2", dtype=BF16, verbosity=0)
        optim.attach(model, offload=offload)
        train(model, optim, list(torch.randn(3, 5, 64, generator=torch.Generator().manual_seed(1))))
        runs.append((model, optim))
    assert_same(*runs)
    assert runs[0][1].grad_norm == runs[1][1].grad_norm


@pytest.mark.parametrize("name", ["eager", "torch"])
def test_on_the_backend_that_was_chosen(name: str, bucket: int) -> None:
    with backend(name):
        both(lambda: make("Adam", level="O2", dtype=BF16), lambda run: train(*run, batches(2)))


def test_weights_that_others_write_and_gradients_that_add_up(bucket: int) -> None:
    def use(run: Run) -> None:
        model, optim = run
        train(model, optim, batches(1))
        for param in model.parameters():
            param.data.mul_(1.01)
        optim.zero_grad()
        for x in batches(2):
            keeps = optim.release.accumulate() if optim.release else nullcontext()
            with keeps, amp.scale_loss(loss_of(model, x), optim) as loss:
                loss.backward()
        with amp.scale_loss(loss_of(model, x), optim) as loss:
            loss.backward()
        optim.step()
        optim.zero_grad()
        model[0].requires_grad_(False)  # type: ignore[index]
        train(model, optim, batches(1))
        model[0].requires_grad_(True)  # type: ignore[index]
        optim.param_groups[0]["lr"] *= 0.5
        train(model, optim, batches(1))

    both(lambda: make("Adam", level="O2", dtype=FP16, loss_scale="dynamic"), use)


@pytest.mark.parametrize("name", SCALERS)
def test_with_a_grad_scaler(name: str, bucket: int) -> None:
    runs = []
    for offload in (None, "cpu"):
        scaler = SCALERS[name]()
        run = make("Adam")
        run[1].attach(run[0], scaler=scaler, offload=offload)
        for x in batches(3):
            scaler.scale(loss_of(run[0], x)).backward()
            scaler.step(run[1])
            scaler.update()
            run[1].zero_grad()
        runs.append(run)
    assert_same(*runs)


@pytest.mark.parametrize("offloads", [False, True])
def test_a_run_goes_on_from_a_checkpoint(offloads: bool) -> None:
    def resume(run: Run) -> None:
        model, optim = run
        train(model, optim, batches(2))
        saved = copy.deepcopy((model.state_dict(), optim.state_dict()))
        train(model, optim, batches(1))
        model.load_state_dict(saved[0])
        optim.load_state_dict(saved[1])
        if optim.release and not offloads:
            optim.release.remove()
        train(model, optim, batches(2))

    both(lambda: make("Adam", level="O2", dtype=BF16), resume)


# ---- the order of copies and waits


class Late:
    """A device whose side streams do their work when somebody waits for it. What was freed before is NaN then.

    Attributes:
        device: its log: what the thread of the backward pass asks for.
        host: what the thread of the steps asks for.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.device: list[str] = []
        self.host: list[str] = []
        self.current: dict[int, Any] = {}
        self.recorded: set[int] = set()
        names = iter(["down", "up"])
        main = threading.get_ident()
        late = self

        class Stream:
            def __init__(self, device: Any) -> None:
                self.name = next(names)
                self.queue: list[Callable[[], None]] = []

            def __enter__(self) -> None:
                late.current[threading.get_ident()] = self

            def __exit__(self, *_: object) -> None:
                del late.current[threading.get_ident()]

            def wait_event(self, event: Event) -> None:
                late.log(f"{self.name} waits for {event.stream}")

            def run(self, count: int) -> None:
                for work in self.queue[:count]:
                    work()
                self.queue[:count] = [lambda: None] * len(self.queue[:count])

        class Current:
            name = "current"
            queue: tuple[()] = ()

            def wait_stream(self, stream: Stream) -> None:
                late.log(f"current waits for {stream.name}")
                stream.run(len(stream.queue))

            def run(self, count: int) -> None:
                pass

        class Event:
            def __init__(self, device: Any) -> None:
                pass

            def record(self, stream: Any) -> None:
                self.on, self.stream, self.count = stream, stream.name, len(stream.queue)

            def synchronize(self) -> None:
                late.log(f"host waits for {self.stream}")
                self.on.run(self.count)

        def late_copy(target: torch.Tensor, source: torch.Tensor) -> None:
            stream = late.current[threading.get_ident()]
            late.log(f"{stream.name} copies")

            def work() -> None:
                lost = stream.name == "down" and source.data_ptr() not in late.recorded
                target.fill_(torch.nan) if lost else target.copy_(source)

            stream.queue.append(work)

        def record_stream(tensor: torch.Tensor, stream: Stream) -> None:
            assert stream.name == "down"
            late.recorded.add(tensor.data_ptr())

        def log(what: str) -> None:
            found = late.device if threading.get_ident() == main else late.host
            if found[-1:] != [what]:
                found.append(what)

        self.log = log
        patch.setattr(offload_file, "_runs_late", lambda device: True)
        patch.setattr(offload_file, "_copy", late_copy)
        patch.setattr(Offload, "_room", staticmethod(lambda tensor: torch.full_like(tensor, torch.nan)))
        patch.setattr(torch, "Stream", Stream)
        patch.setattr(torch, "Event", Event)
        patch.setattr(torch.Tensor, "record_stream", record_stream)
        patch.setattr(torch.accelerator, "current_stream", lambda device: Current())


@pytest.fixture
def late_device(monkeypatch: pytest.MonkeyPatch) -> Late:
    """CPU tensors are taken for those of a late device."""
    return Late(monkeypatch)


@pytest.mark.parametrize(("dtype", "loss_scale"), [(BF16, 1.0), (FP16, "dynamic")])
def test_nothing_is_read_before_it_is_there(dtype: Any, loss_scale: Any, bucket: int, late_device: Late) -> None:
    both(
        lambda: make("Adam", level="O2", dtype=dtype, loss_scale=loss_scale),
        lambda run: train(*run, batches(3)),
    )


def test_copies_and_waits_are_in_order(monkeypatch: pytest.MonkeyPatch, late_device: Late) -> None:
    monkeypatch.setattr(release_file, "_BUCKET", 1)
    model: Any = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    optim = optimizers.FusedSGD(model.parameters(), lr=0.1)
    optim.attach(model, offload="cpu")
    late_device.device.clear()
    model(torch.ones(2, 4)).sum().backward()
    assert late_device.device == [*["down waits for current", "down copies"] * 2, "current waits for up"]
    assert late_device.host == ["host waits for down", "up copies"] * 2


def test_the_backward_pass_goes_on_while_the_host_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release_file, "_BUCKET", 1)
    model, optim = make("Adam")
    optim.attach(model, offload="cpu")
    reached, arrive, waited = threading.Event(), Offload.arrive, []

    def slow(fetched: Any) -> Any:
        waited.append(reached.wait(10))
        return arrive(fetched)

    monkeypatch.setattr(Offload, "arrive", staticmethod(slow))
    model[0].weight.register_hook(lambda grad: reached.set())  # type: ignore[index]
    loss_of(model, batches(1)[0]).backward()
    assert waited == [True] * 8


def test_a_weight_that_a_later_part_of_the_pass_reads_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release_file, "_BUCKET", 1)
    model: Any = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    optim = optimizers.FusedSGD(model.parameters(), lr=0.1)
    optim.attach(model, offload="cpu")
    x = model[0](torch.ones(2, 4)) @ model[1].weight.detach()  # read after the gradient below is there
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model[1](x).sum().backward()


def test_an_error_of_the_thread_is_raised_by_the_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optim = make("Adam")
    optim.attach(model, offload="cpu")
    with monkeypatch.context() as patch:
        patch.setattr(type(optim), "_update", lambda *_: [][0])
        with pytest.raises(IndexError):
            loss_of(model, batches(1)[0]).backward()
    optim.zero_grad()
    train(model, optim, batches(1))
    assert optim.state[model[0].weight]["step"] == 1  # type: ignore[index]


def test_a_sparse_gradient_is_refused_before_it_is_copied(late_device: Late) -> None:
    embedding = nn.Embedding(4, 4)
    optim = optimizers.FusedSGD(embedding.parameters(), lr=0.1)
    optim.attach(embedding, offload="cpu")
    embedding.sparse = True
    with pytest.raises(UsageError, match="is sparse"):
        embedding(torch.tensor([1])).sum().backward()
    assert not optim.state


# ---- where things are


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_the_device_has_the_weights_and_the_host_all_else(dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of fake tensors each op checks that all are on one device. A block cannot be left: it reads late."""
    monkeypatch.setattr(offload_file, "_runs_late", lambda device: False)  # fakes have no streams
    with fake_cuda() as cuda, torch.device(cuda), backend("eager"):
        model: Any = nn.Sequential(nn.Linear(4, 2), nn.LayerNorm(2))
        optim: Any = optimizers.FusedSGD(model.parameters(), lr=0.1, momentum=0.9)
        model, optim = amp.initialize(model, optim, opt_level="O2", dtype=dtype, loss_scale=1.0, verbosity=0)

        def kinds() -> set[str]:
            return {value.device.type for state in optim.state.values() for value in state.values()}

        handle = optim.attach(model, offload="cpu")
        for _ in range(2):
            for param in model.parameters():
                param.grad = torch.ones_like(param, dtype=torch.float32)
            optim.step()
        assert kinds() == {"cpu"}
        masters = [optim.master_value(param) for param in model.parameters()]
        assert {value.device.type for value in (*model.parameters(), *masters)} == {cuda}
        optim.load_state_dict(optim.state_dict())
        assert kinds() == {"cpu"}
        handle.remove()
        assert kinds() == {cuda}


def test_what_does_not_go_together_is_refused() -> None:
    model, optim = make("Adam")
    with pytest.raises(ArgumentValueError, match=r"attach\(offload='cuda'\) must be 'cpu' or None"):
        optim.attach(model, offload="cuda")
    with pytest.raises(ArgumentValueError, match="pass release=True, too"):
        optim.attach(model, release=False, offload="cpu")
    optim.param_groups[0]["lr"] = torch.tensor(0.1, device="meta")
    with pytest.raises(ArgumentValueError, match="lr of group 0 is a tensor on meta"):
        optim.attach(model, offload="cpu")
    assert optim.release is None
    assert optim.offload is None
