"""Sessions: the options and loss scalers of one ``amp.initialize`` call, and the functions that use them.

Optimizers refer to their session, so it is freed with them. The module refers only to the latest session, for the calls
without an optimizer: ``amp.state_dict()`` and ``amp.load_state_dict()``.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch

from ..casting.dynamo import eager
from ..core.checks import check_flag, check_kind
from ..core.errors import ArgumentIndexError, ArgumentTypeError, ArgumentValueError, UsageError
from ..core.inner_optimizers import params_of
from ..parameters.loss_scaler import saved_numbers
from ..stepping.attached import AttachedOptimizer, attached_to, skipped_steps
from ..stepping.scaled_backward import ScaledBackward
from .loss_scaler import LossScaler
from .options import ResolvedProperties

__all__ = ["Session", "latest", "load_state_dict", "master_params", "scale_loss", "state_dict", "steps_skipped"]

logger = logging.getLogger("halfstep")


@dataclass
class Session:
    """The properties and loss scalers of the models and optimizers of one ``amp.initialize`` call."""

    options: ResolvedProperties
    verbosity: int
    loss_scalers: list[LossScaler] = field(default_factory=list)


class _Latest:
    """The holder of the latest session, for calls without an optimizer; None before the first ``amp.initialize``."""

    session: Session | None = None


latest = _Latest()


class _NoSessionError(UsageError, AttributeError):
    """Raised without a session. It is an AttributeError because Apex scripts call ``hasattr`` on ``amp._amp_state``."""


def require_session(caller: str) -> Session:
    """Return the latest session.

    Raises:
        UsageError: if there is no session.
    """
    if latest.session is None:
        raise _NoSessionError(f"{caller} needs amp.initialize to be called before it.")
    return latest.session


def session_of(optimizers: object, caller: str) -> tuple[Session, list[AttachedOptimizer]]:
    """Return the session of one or several optimizers, and their attached states; no states if amp is disabled.

    Raises:
        ArgumentTypeError: if an argument is not an optimizer.
        UsageError: before ``amp.initialize``, or for an optimizer that it did not return.
    """
    given = optimizers if isinstance(optimizers, (list, tuple)) else (optimizers,)
    if len(set(map(id, given))) < len(given):
        raise UsageError(f"{caller} was given an optimizer twice; pass each once.")
    found = []
    for optimizer in given:
        attached = attached_to(optimizer)
        if attached is None or attached.session is None:
            check_optimizer(optimizer, caller)
            current = require_session(caller)
            if not current.options.enabled:
                return current, []
            raise UsageError(
                f"{caller} was given an optimizer of type {type(optimizer).__name__} that amp.initialize did not "
                "return (it has no _amp_stash); pass every optimizer to amp.initialize and use the optimizers that it "
                "returns."
            )
        found.append(attached)
    session: Session = found[0].session if found else require_session(caller)
    if not found and session.options.enabled:
        raise UsageError(
            f"{caller} was given no optimizer, so nothing would unscale the gradients; pass every optimizer whose "
            "parameters get gradients from this loss."
        )
    return session, found


def check_optimizer(given: object, caller: str) -> None:
    """Check that an argument is an optimizer, or a wrapper with ``param_groups``.

    Raises:
        ArgumentTypeError: for any other value.
    """
    if not hasattr(given, "param_groups"):
        raise ArgumentTypeError(
            f"{caller} needs an optimizer or a list of optimizers, not {type(given).__name__}; pass the optimizers "
            "that amp.initialize returned."
        )


@eager
def scale_loss(
    loss: torch.Tensor,
    optimizers: torch.optim.Optimizer | list[torch.optim.Optimizer],
    loss_id: int = 0,
    model: torch.nn.Module | None = None,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> AbstractContextManager[torch.Tensor]:
    """Scale a loss for its backward pass, and unscale the gradients of the pass.

    ::

        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()

    After the block, ``p.grad`` holds unscaled gradients: the gradients of the pass, added to the earlier gradients. The
    gradient of a 16-bit parameter with a master is fp32. If a new gradient is inf or NaN, the next ``step`` of each of
    these optimizers is skipped, and a dynamic scale is lowered. If gradients of a skipped step are still in ``p.grad``
    when the next block opens, they are set to zero. If an exception leaves the block, the earlier gradients are put
    back, and the scale does not change. With a static scale of 1.0 and without masters, the block does nothing.

    Args:
        loss: a tensor of any floating-point dtype on any device; 16-bit losses are scaled in fp32.
        optimizers: the optimizers whose parameters get gradients from this backward pass.
        loss_id: the index of the loss scaler, below ``num_losses`` of ``amp.initialize``.
        model: ignored; for compatibility with Apex.
        delay_unscale: for compatibility with Apex. Gradients accumulate correctly without it. With it, they are also
            unscaled at the end of this block, but in the next block, ``p.grad`` holds the scaled sum of both passes.
        delay_overflow_check: True to unscale, but ignore an overflow: the scale does not change, and no step is
            skipped.

    Returns:
        A context manager that returns the loss times the scale. With a static scale of 1.0, or if amp is disabled, it
        returns the loss unchanged.

    Raises:
        UsageError: before ``amp.initialize``, without an optimizer, or for an optimizer that it did not return; from
            the block, if a block of the optimizer is already open, or if ``backward`` was called on the unscaled loss.
        ArgumentIndexError: if ``loss_id`` has no loss scaler.
        ArgumentTypeError: if the loss is not a floating-point tensor, ``loss_id`` is not an integer, or a flag is
            neither True nor False.
    """
    session, attached = session_of(optimizers, "amp.scale_loss")
    if not session.options.enabled:
        return nullcontext(loss)
    scalers = session.loss_scalers
    if isinstance(loss_id, bool) or not isinstance(loss_id, int):
        raise ArgumentTypeError(f"loss_id={loss_id!r} must be a whole number, the index of the loss from 0.")
    if not 0 <= loss_id < len(scalers):
        raise ArgumentIndexError(
            f"loss_id={loss_id}, but amp.initialize was called with num_losses={len(scalers)}; count losses from 0, "
            "and set num_losses to the number of losses with separate loss scales."
        )
    options: dict[str, Any] = {}
    if delay_unscale is not False or delay_overflow_check is not False:
        options["delay"] = check_flag("delay_unscale", delay_unscale)
        options["check"] = not check_flag("delay_overflow_check", delay_overflow_check)
    return ScaledBackward(loss, [one.window for one in attached], scalers[loss_id], name="amp.scale_loss", **options)


def master_params(optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer]) -> Iterator[torch.Tensor]:
    """Return the parameters that the optimizer updates: fp32 masters at O2, the model's parameters at other levels.

    ``torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), max_norm)`` after an ``amp.scale_loss`` block clips
    the unscaled gradients in fp32. The ``grad`` of a master is the gradient of the model's parameter, so the step uses
    the clipped gradients.

    Args:
        optimizer: an optimizer, prepared by ``amp`` or not, or a list of optimizers.

    Returns:
        An iterator over the parameters of all groups. It yields the master of a 16-bit parameter as a float32
        ``torch.nn.Parameter``. Values that you write to it reach the stored master and the weight at the next step,
        forward pass of the model, ``state_dict()`` or call of this function. If another rank steps the parameter
        (``ZeroRedundancyOptimizer``), it yields the parameter.

    Raises:
        ArgumentTypeError: for any other value, such as a model. The call raises it, not the iteration.
    """
    optimizers = optimizer if isinstance(optimizer, (list, tuple)) else (optimizer,)
    for each in optimizers:
        check_optimizer(each, "amp.master_params")
    return chain.from_iterable(map(_stepped_params, optimizers))


def _stepped_params(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    attached = attached_to(optimizer)
    return iter(params_of(optimizer)) if attached is None else attached.master_params()


def steps_skipped(optimizer: torch.optim.Optimizer) -> int:
    """Return the number of steps that an optimizer skipped because gradients overflowed. Reads the device."""
    _, found = session_of([optimizer], "amp.steps_skipped")
    return skipped_steps(found[0].counts) if found else 0


def state_dict(
    destination: dict[str, Any] | None = None, *, optimizer: torch.optim.Optimizer | None = None
) -> dict[str, Any]:
    """Return the loss scales as plain numbers in Apex's format, to save with the model and the optimizer.

    Args:
        destination: the dict to fill; a new dict if None.
        optimizer: the optimizer whose session to save, if ``amp.initialize`` was called more than once; the latest
            session if None.

    Returns:
        ``{"loss_scaler0": {"loss_scale": 65536.0, "unskipped": 0}, ...}``, empty if amp is disabled.

    Raises:
        UsageError: before ``amp.initialize``.
    """
    target: dict[str, Any] = OrderedDict() if destination is None else destination
    for i, scaler in enumerate(_session(optimizer, "amp.state_dict").loss_scalers):
        target[f"loss_scaler{i}"] = scaler.state_dict()
    return target


def load_state_dict(state_dict: Mapping[str, Any], *, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Load the loss scales from the result of ``amp.state_dict``, or of Apex's ``amp.state_dict``.

    The dict may have fewer or more entries than there are loss scalers, as in Apex; this is logged as a warning.

    Args:
        state_dict: the saved dict.
        optimizer: the optimizer whose session to load; the latest session if None.

    Raises:
        UsageError: before ``amp.initialize``.
        ArgumentTypeError: if ``state_dict`` is not a dict.
        ArgumentValueError: if an entry is not the state of a loss scaler. Nothing is loaded then.
    """
    scalers = _session(optimizer, "amp.load_state_dict").loss_scalers
    check_kind("state_dict", state_dict, Mapping, "what amp.state_dict() returned, a dict")
    names = [key for key in state_dict if key.startswith("loss_scaler")]
    unexpected = [key for key in state_dict if key not in names]
    if unexpected:
        raise ArgumentValueError(
            f"amp.load_state_dict: unexpected keys {unexpected}; pass what amp.state_dict() returned. Nothing was "
            "loaded."
        )
    try:
        for name in names:
            saved_numbers(name, state_dict[name])
    except ArgumentValueError as error:
        raise ArgumentValueError(
            f"amp.load_state_dict: {error} Pass what amp.state_dict() returned. Nothing was loaded."
        ) from None
    if (saved := len(names)) != (used := len(scalers)):
        text = "amp.load_state_dict: %d loss scalers saved, %d in use; the surplus is ignored."
        logger.warning(text, saved, used)
    for scaler, name in zip(scalers, names, strict=False):
        if scaler.dynamic and state_dict[name]["loss_scale"] == 1.0:
            logger.warning(
                "amp.load_state_dict: the saved %s is 1.0, as in bfloat16, at O0 and at O3. The dynamic loss scale "
                "continues from 1.0, and small gradients are lost until it has grown. Do not call amp.load_state_dict "
                "if the dtype changes.",
                name,
            )
        scaler.load_state_dict(state_dict[name])


def _session(optimizer: torch.optim.Optimizer | None, caller: str) -> Session:
    return require_session(caller) if optimizer is None else session_of([optimizer], caller)[0]
