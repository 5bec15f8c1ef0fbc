"""``profile``: runs steps under torch.profiler, and ``of_run`` the first steps of a script."""

from __future__ import annotations

import gc
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.profiler import ProfilerActivity, record_function

from ..core.checks import check_count, check_kind
from ..core.errors import ArgumentValueError, UsageError
from ..core.inner_optimizers import params_of, unwrap
from ..diagnostics.numerics.survey import can_survey
from ..torch_internals.torch_compat import profiler_enabled
from .accounts import RunSettings
from .answer import Profile, profile_of
from .machine import cores, denormal_cost, machine_of, thread_cost
from .trace import FORWARD, STEP, parsed, trace_of

__all__ = ["model_of", "of_run", "profile"]

_WARMUP, _STEPS = 3, 5  # of a script: steps before the profiled ones, and these
_OTHER = (
    "torch runs one profiler at a time, and records one thread: take torch.profiler out of the steps and from around "
    "halfstep.profile, and run the steps in the main thread."
)
_CYCLE = 0.1
"""Seconds of recording after which the end of a step stops torch.profiler; the next step starts it again.

torch.profiler keeps about 24 KB for each op until it is stopped, and little of that is needed here. A GPU is still busy
while the host prepares the next step, so on a GPU stops between steps would change what is measured."""


def profile(
    step: Callable[[], Any],
    *,
    model: nn.Module | None = None,
    optimizer: Any = None,
    warmup: int = 3,
    steps: int = 5,
    device: torch.device | str | None = None,
) -> Profile:
    """Run a step a few times under torch.profiler, and say where its time goes and what would make it faster.

    ::

        print(halfstep.profile(step, model=model, optimizer=optimizer))

    The steps train: give a step that may be taken ``warmup + steps`` times more.

    Args:
        step: a function without arguments that runs one training step.
        model: the model, or None; its weights are looked at for denormal numbers.
        optimizer: the optimizer, a list of them, or None.
        warmup: the steps before the profiled ones.
        steps: the profiled steps.
        device: the device; None for the device of the model, or of this machine.

    Raises:
        ArgumentTypeError: for an argument of another type.
        ArgumentValueError: for fewer than 0 steps of warmup, fewer than 1 step, or a device that runs no steps here.
        UsageError: for a step that raises an error, which is the cause; or if another profiler runs.
    """
    check_kind("step", step, Callable, "a function that runs a step")  # type: ignore[arg-type]
    check_kind("model", model, (nn.Module, type(None)), "a torch.nn.Module or None")
    check_count("warmup", warmup, least=0)
    check_count("steps", steps)
    optimizers = _optimizers(optimizer)
    recorder = OpRecorder(_device(device, model))
    try:
        for number in range(warmup + steps):
            if number >= warmup:
                recorder.begin()
            try:
                step()
            except Exception as error:
                raise UsageError(f"Step {number + 1} raised {type(error).__name__}: {str(error)[:200]}") from error
            recorder.end()
    finally:
        recorder.stop()
    return recorder.profile(model, optimizers)


def of_run(run: Callable[[], Any], prepare: Callable[[nn.Module, Any], Any] | None = None) -> Profile | int:
    """Profile steps 4 to 8 of a script, and end it after them, for ``halfstep profile``.

    A step ends where an optimizer has stepped.

    Args:
        run: runs a script; its errors pass through, and ``sys.exit`` without one is its end.
        prepare: a function of the model and its optimizer, called after their first step, without gradients.

    Returns:
        The profile; or the number of steps that the script took, if it took 3 or fewer.

    Raises:
        UsageError: if ``prepare`` is given, and no module has the optimizer's parameters; if another profiler runs; or
            for steps in another thread.
    """
    recorder, taken = OpRecorder(_device(None, None)), 0
    known: list[Any] = []

    def stepped(optimizer: Any, *_: Any) -> None:
        nonlocal taken
        if not any(optimizer is each for each in known):
            known.append(optimizer)
        if optimizer is not known[0]:
            return
        taken += 1
        if taken == 1 and prepare is not None:
            if (model := model_of(known)) is None:
                raise UsageError("No module has the parameters of this optimizer: there is no model to cast.")
            optimizer.zero_grad()  # gradients of the dtype that the weights had before
            prepare(model, optimizer)
        if _WARMUP < taken <= _WARMUP + _STEPS:
            recorder.end()
        if taken >= _WARMUP + _STEPS:  # at each further step of a script that catches SystemExit
            sys.exit()
        if taken >= _WARMUP:
            recorder.begin()

    handle = register_optimizer_step_post_hook(stepped)
    try:
        run()
    except BaseException as error:
        if not isinstance(error, SystemExit) or error.code:
            raise
    finally:
        handle.remove()
        recorder.stop()
    if taken <= _WARMUP:
        return taken
    return recorder.profile(model_of(known), [unwrap(each) for each in known])


def model_of(optimizers: Sequence[Any]) -> nn.Module | None:
    """Find the outermost module that has the parameters of optimizers."""
    held = {*map(id, params_of(*optimizers))}
    models = [each for each in gc.get_objects() if issubclass(type(each), nn.Module)]
    ranked = [((sum(id(p) in held for p in each.parameters()), len([*each.modules()])), each) for each in models]
    (count, _), model = max(ranked, key=lambda pair: pair[0], default=((0, 0), None))
    return model if count else None


class OpRecorder:
    """torch.profiler, with a mark around each step and at its first module. It is in use until ``stop``.

    Args:
        device: the device of the steps.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._profiler: torch.profiler.profile | None = None
        self._events: list[Any] = []
        self._step: Any = None
        self._thread = threading.get_ident()
        self._refused = False
        self._warnings = warnings.catch_warnings()
        self._warnings.__enter__()
        # torch 2.11 warns of what a second cycle of a profiler would lose, and torch.compile of the hook of ``begin``.
        warnings.filterwarnings("ignore", "Using `torch.compile.module.` when .* global hooks|.*Profiler clears events")

    def begin(self) -> None:
        """Begin a step."""
        self._check()
        if self._profiler is None:
            self._start()
        self._hook = register_module_forward_pre_hook(self._forward)
        self._step = record_function(STEP)
        self._step.__enter__()

    def end(self) -> None:
        """End a step, if one has begun."""
        if self._step is not None:
            self._check()
            self._step.__exit__(None, None, None)
            self._step = None
            self._hook.remove()
            if self.device.type == "cpu" and time.perf_counter() - self._began > _CYCLE:
                self._collect()

    def stop(self) -> None:
        """Stop recording. A step that has begun and not ended does not count.

        Raises:
            UsageError: if a step could not begin or end, because of another profiler or thread.
        """
        if self._step is not None:
            self._step.__exit__(None, None, None)
            self._hook.remove()
        self._warnings.__exit__(None, None, None)
        self._collect()
        if self._refused:
            raise UsageError(_OTHER) from None

    def profile(self, model: nn.Module | None, optimizers: Sequence[Any]) -> Profile:
        """Make the profile of what was recorded, after ``stop``."""
        trace, threads = trace_of(self._events), torch.get_num_threads()
        if self._step is not None:
            trace.marks.remove(max((m for m in trace.marks if m.name == STEP), key=lambda mark: mark.start))
        settings = _settings(self.device, threads, model, optimizers)
        machine = machine_of(self.device, threads)
        return profile_of(trace, machine, settings, f"{machine.name}, rates {machine.source}")

    def _start(self) -> None:
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.device.type == "cuda" else [])]
        self._synchronize()
        self._profiler = torch.profiler.profile(activities=activities, record_shapes=True)
        self._profiler.start()
        self._began = time.perf_counter()

    def _check(self) -> None:
        """End the steps if torch.profiler does not run, in this thread, exactly when this recorder has started it."""
        if threading.get_ident() != self._thread or profiler_enabled() != (self._profiler is not None):
            self._refused = True
            sys.exit()

    def _collect(self) -> None:
        """Stop the profiler, if it runs, and keep its events."""
        if self._profiler is None or not profiler_enabled():
            self._step = None  # nothing of it is recorded
            return
        self._synchronize()
        self._profiler.stop()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            self._profiler.export_chrome_trace(str(path))
            self._events += parsed(path.read_text(encoding="utf-8", errors="replace"))[0]
        self._profiler = None
        gc.collect()  # torch's profiler is part of a reference cycle and holds everything that it recorded

    def _forward(self, *_: Any) -> None:
        with record_function(FORWARD):
            self._hook.remove()

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _optimizers(given: Any) -> list[Any]:
    optimizers = list(given) if isinstance(given, (list, tuple)) else [] if given is None else [given]
    for each in optimizers:
        check_kind("optimizer", unwrap(each), torch.optim.Optimizer, "a torch.optim.Optimizer")
    return [unwrap(each) for each in optimizers]


def _device(given: torch.device | str | None, model: nn.Module | None) -> torch.device:
    if given is None and model is not None:
        given = next((p.device for p in model.parameters()), None)
    if given is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.ones((), device=given, dtype=torch.float32).item()
    except (RuntimeError, AssertionError, TypeError) as error:
        raise ArgumentValueError(f"device={str(given)!r} runs no steps here: {str(error)[:100]}") from None
    return torch.device(given)


def _settings(device: torch.device, threads: int, model: nn.Module | None, optimizers: Sequence[Any]) -> RunSettings:
    """Look at the process, the weights, and the numbers of the optimizer."""
    params = params_of(*optimizers)
    own = [] if model is None else [*model.parameters()]
    on_gpu = device.type == "cuda"
    tf32_off = on_gpu and torch.version.hip is None and torch.get_float32_matmul_precision() == "highest"
    tf32_off = tf32_off and torch.cuda.get_device_capability(device) >= (8, 0)
    state = [value for each in optimizers for p in params for value in each.state.get(p, {}).values()]
    held = [*own, *(p.grad for p in params), *state] if not on_gpu else []
    denormal = dict(_denormal([t for t in held if can_survey(t) and t.dtype is torch.float32]))
    half = sorted({str(p.dtype).removeprefix("torch.") for p in own if p.dtype in (torch.bfloat16, torch.float16)})
    cost = thread_cost(threads) if not on_gpu and threads > cores() else 1.0
    slow, count = denormal_cost() if denormal else (1.0, 1.0), sum(p.numel() for p in params)
    return RunSettings(device, threads, cores(), cost, tf32_off, denormal, slow, count, tuple(half))


def _denormal(tensors: Sequence[torch.Tensor]) -> Iterator[tuple[tuple[int, ...], float]]:
    """The share of denormal numbers in a sample of each tensor that has some."""
    for each in tensors:
        sample = each.detach().flatten()[: 1 << 16].abs()
        found = ((sample > 0) & (sample < torch.finfo(torch.float32).tiny)).sum()
        if share := float(found) / sample.numel():
            yield tuple(each.shape), share
