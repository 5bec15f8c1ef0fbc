"""``halfstep doctor SCRIPT``: the script runs until its first optimizer step, and then its model is checked."""

from __future__ import annotations

import runpy
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from ..findings import Finding

__all__ = ["check_script"]


class _FirstStep(BaseException):
    """Ends the script. No ``except Exception`` of the script catches it."""


class _Seen:
    """The models that a script called, outermost ones only, and its loss scalers."""

    def __init__(self) -> None:
        self.models: list[torch.nn.Module] = []
        self.scalers: list[Any] = []
        self.optimizer: torch.optim.Optimizer | None = None
        self._depth = 0

    def enter(self, module: torch.nn.Module, args: Any) -> None:
        """A module is called."""
        if not self._depth and not any(module is model for model in self.models):
            self.models.append(module)
        self._depth += 1

    def leave(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        """It has returned, or failed."""
        self._depth -= 1

    def end(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """An optimizer has stepped."""
        self.optimizer = optimizer
        raise _FirstStep

    def trained(self) -> torch.nn.Module | None:
        """The model that has most of the optimizer's parameters; of those without any, the one with most gradients."""
        if self.optimizer is None:
            return None
        held = {id(p) for group in self.optimizer.param_groups for p in group["params"]}

        def parts(model: torch.nn.Module) -> tuple[int, int]:
            params = list(model.parameters())
            return sum(id(p) in held for p in params), sum(p.grad is not None for p in params)

        return max(self.models, key=parts, default=None)


def check_script(script: Path, args: tuple[str, ...], device: str | None = None) -> list[Finding] | None:
    """Run a script until an optimizer has stepped, and check the model that it trains.

    Args:
        script: its path. ``import apex`` finds halfstep, as in ``halfstep run``.
        args: its arguments.
        device: "cpu" sends what the script asks of CUDA to the CPU.

    Returns:
        The findings; None if no optimizer has stepped, or if no model was called.
    """
    from ..compat.cuda_shim import cuda_on_cpu
    from ..compat.install import install
    from ..findings.checking import findings_of
    from ..findings.forward import Forward, watching_forward

    install()
    sys.argv = [str(script), *args]
    sys.path.insert(0, str(script.resolve().parent))
    forward = Forward()
    with _watched() as seen:
        with cuda_on_cpu() if device == "cpu" else nullcontext(), watching_forward(forward), _quiet():
            with suppress(_FirstStep):
                runpy.run_path(str(script), run_name="__main__")
        model = seen.trained()
        if model is None:
            return None
        return findings_of(model, [seen.optimizer], scalers=seen.scalers, forward=forward)


@contextmanager
def _quiet() -> Iterator[None]:
    """Torch warns of compiled modules while all modules are watched."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Using `torch.compile\\(module\\)` when there are global hooks")
        yield


@contextmanager
def _watched() -> Iterator[_Seen]:
    """Within the block models, scalers and the first step are noticed."""
    import torch
    from torch.nn.modules import module
    from torch.optim import optimizer

    from ..amp.grad_scaler import GradScaler

    seen = _Seen()
    hooks = [
        module.register_module_forward_pre_hook(seen.enter),
        module.register_module_forward_hook(seen.leave, always_call=True),
        optimizer.register_optimizer_step_post_hook(seen.end),
    ]
    classes: list[Any] = [torch.amp.GradScaler, GradScaler]
    own = [cls.scale for cls in classes]

    def noting(scale: Any) -> Any:
        def noted(self: Any, outputs: Any) -> Any:
            if not any(self is scaler for scaler in seen.scalers):
                seen.scalers.append(self)
            return scale(self, outputs)

        return noted

    for cls, scale in zip(classes, own, strict=True):
        cls.scale = noting(scale)
    try:
        yield seen
    finally:
        for cls, scale in zip(classes, own, strict=True):
            cls.scale = scale
        for hook in hooks:
            hook.remove()
