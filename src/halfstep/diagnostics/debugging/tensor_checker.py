"""Checks that look for inf and NaN in the results of all ops, or of selected ops, while a script runs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial, wraps
from pathlib import Path
from typing import Any, TypeVar

import torch

from ...core.errors import ArgumentTypeError, ArgumentValueError, UsageError
from ..observe.ops import OpCall, tensors_in
from ..observe.watch import CallWatch
from .checks import Checked, DebugMode, can_check, check_mode, facts_of
from .names import listed, log_name, op_of

__all__ = ["TensorCheckerConfig", "check_layer_numerics", "disable_tensor_checker", "enable_tensor_checker"]

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(eq=False)
class TensorCheckerConfig:
    """The settings of ``enable_tensor_checker``.

    Args:
        enable: True to check, False to turn the checks off.
        debug_mode: the tensors to print, and whether inf and NaN raise an error.
        output_dir: a folder; lines go to its file ``worker_cpu`` or ``worker_gpu.0`` instead of stdout.
        checked_op_list: check only these ops and their gradients, by Paddle's or torch's names; "x_grad" names the
            gradient of "x".
        skipped_op_list: skip these ops and their gradients.
        debug_step: (start, end): check from call number ``start`` of ``enable_tensor_checker``, counted from 0, up to
            but not including call number ``end``. None checks always.
        stack_height_limit: ignored; accepted because Paddle has it.

    Raises:
        ArgumentTypeError: if ``debug_mode`` is not a ``DebugMode``.
        ArgumentValueError: for any other value of an argument, and for a name that no op has.
    """

    enable: bool
    debug_mode: DebugMode = DebugMode.CHECK_NAN_INF_AND_ABORT
    output_dir: str | None = None
    checked_op_list: Sequence[str] | None = None
    skipped_op_list: Sequence[str] | None = None
    debug_step: Sequence[int] | None = None
    stack_height_limit: int = 1
    current_step_id: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        check_mode(self.debug_mode)
        for name in ("debug_step", "checked_op_list", "skipped_op_list"):
            given = getattr(self, name)
            if given is not None and not isinstance(given, (list, tuple)):
                raise ArgumentValueError(f"{name} must be list or tuple, not {given!r}.")
        steps = self.debug_step
        if steps is not None and (len(steps) != 2 or not 0 <= steps[0] < steps[1]):
            raise ArgumentValueError(f"debug_step={steps!r} must be (start, end) with 0 <= start < end.")
        if isinstance(self.stack_height_limit, bool) or not isinstance(self.stack_height_limit, int):
            raise ArgumentValueError(f"stack_height_limit must be int, not {self.stack_height_limit!r}.")
        self._checked = None if self.checked_op_list is None else listed(self.checked_op_list)
        self._skipped = listed(self.skipped_op_list or ())

    def update_and_check_step_id(self) -> bool:
        """Count a step, and return True if this step is to be checked."""
        step, self.current_step_id = self.current_step_id, self.current_step_id + 1
        return self.enable and (self.debug_step is None or self.debug_step[0] <= step < self.debug_step[1])

    def checks(self, op: str, backward: bool = False) -> bool:
        """True if the config checks an op, or its gradient if ``backward``, given by its canonical name."""
        names = {op, op + "_grad"} if backward else {op}
        return not names & self._skipped and (self._checked is None or bool(names & self._checked))


def _check(config: TensorCheckerConfig, call: OpCall) -> None:
    """Check the result of an op."""
    if call.op.is_view or call.is_empty or not config.checks(op := op_of(call), call.backward):
        return
    name = log_name(op) + ("_grad" if call.backward else "")
    for tensor in tensors_in(call.result):
        if can_check(tensor) and tensor.numel():
            checked = Checked.of(tensor, name, "", *facts_of(tensor))
            if checked.wanted(config.debug_mode):
                _write(config.output_dir, checked)
            if checked.bad and config.debug_mode is DebugMode.CHECK_NAN_INF_AND_ABORT:
                raise checked.error()


def _write(folder: str | None, checked: Checked) -> None:
    if folder is None:
        sys.stdout.write(checked.line())
        return
    Path(folder).mkdir(parents=True, exist_ok=True)
    with (Path(folder) / f"worker_{checked.device.replace(':', '.')}").open("a", encoding="utf-8") as file:
        file.write(checked.line())


_checking: list[CallWatch] = []


def enable_tensor_checker(checker_config: TensorCheckerConfig) -> None:
    """Check the results of the ops that this thread runs from now on, forward and backward.

    Each result costs a read of the device. Compiled modules run eagerly. Call this function once per step if
    ``debug_step`` is to count steps. A new config replaces the previous one.

    Args:
        checker_config: the settings of the checks.

    Raises:
        ArgumentTypeError: for an argument of another type.
    """
    if not isinstance(checker_config, TensorCheckerConfig):
        raise ArgumentTypeError(f"enable_tensor_checker takes a TensorCheckerConfig, not {checker_config!r}.")
    disable_tensor_checker()
    if checker_config.update_and_check_step_id():
        _checking.append(CallWatch({}, ops=partial(_check, checker_config)).begin())


def disable_tensor_checker() -> None:
    """Stop the checks. Does nothing if ``enable_tensor_checker`` has not started any."""
    if _checking:
        _checking.pop().end()


def check_layer_numerics(forward: F) -> F:
    """Check every result that a layer's ``forward`` computes: an inf or NaN raises an error that names the op.

    ::

        class Layer(nn.Module):
            @amp.debugging.check_layer_numerics
            def forward(self, x): ...

    Args:
        forward: the method of a module. Its first argument must be a tensor, given by position.

    Raises:
        UsageError: when ``forward`` is called without such an argument.
        HalfstepError: when ``forward`` computes an inf or NaN.
    """

    @wraps(forward)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not args:
            raise UsageError("No elements found in args. Give the first input of this layer by position.")
        if not isinstance(args[0], torch.Tensor):
            raise UsageError(f"First input of this layer must be tensor. It is of type {type(args[0]).__name__}.")
        with CallWatch({}, ops=partial(_check, TensorCheckerConfig(enable=True))):
            return forward(self, *args, **kwargs)

    return checked  # type: ignore[return-value]
