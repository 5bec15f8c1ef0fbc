"""Sessions: the options and loss scalers of one call of ``amp.initialize``, and the functions that look them up.

The optimizers hold their session, so its memory is freed with them. The module holds only the latest one, for the calls
that name no optimizer: ``amp.state_dict()`` and ``amp.load_state_dict()``.
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
from ..parameters.loss_scaler import saved_numbers
from ..stepping.attached import AttachedOptimizer, attached_to, skipped_steps
from ..stepping.scaled_backward import ScaledBackward
from .loss_scaler import LossScaler
from .options import Properties

__all__ = ["Session", "latest", "load_state_dict", "master_params", "scale_loss", "state_dict", "steps_skipped"]

logger = logging.getLogger("halfstep")


@dataclass
class Session:
    """The properties and loss scalers shared by the models and optimizers of one ``amp.initialize``."""

    options: Properties
    verbosity: int
    loss_scalers: list[LossScaler] = field(default_factory=list)


class _Latest:
    """The holder of the latest session, for calls that name no optimizer; None before the first ``amp.initialize``."""

    session: Session | None = None


latest = _Latest()


class _NoSessionError(UsageError, AttributeError):
    """Also an AttributeError: scripts ask ``hasattr(amp._amp_state, "loss_scalers")``, as Apex had it."""


def require_session(caller: str) -> Session:
    """The latest session.

    Raises:
        UsageError: if there is none.
    """
    if latest.session is None:
        raise _NoSessionError(f"{caller} needs amp.initialize to be called before it.")
    return latest.session


def session_of(optimizers: object, caller: str) -> tuple[Session, list[AttachedOptimizer]]:
    """The session of an optimizer or of a list of them, and the record of each; there is none if amp is disabled.

    Raises:
        ArgumentTypeError: for something else than an optimizer.
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
                f"{caller} was given an optimizer of type {type(optimizer).__name__} that did not come back from "
                "amp.initialize (it has no _amp_stash); pass every optimizer through amp.initialize and use what it "
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
    """Check that an argument is an optimizer, or a wrapper that has the groups of one.

    Raises:
        ArgumentTypeError: for anything else.
    """
    if not hasattr(given, "param_groups"):
        raise ArgumentTypeError(
            f"{caller} needs an optimizer or a list of them, not {type(given).__name__}; pass those that "
            "amp.initialize returned."
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

    After the block ``p.grad`` is unscaled: the gradients of the pass are added to those from before it. The gradient
    of a 16-bit parameter with a master is fp32. If one of the new gradients was inf or NaN, the next ``step`` of each
    optimizer given here is skipped, and a dynamic scale is lowered. Gradients of a skipped step that are still there
    when the next block opens are set to zero. If an exception leaves the block, the gradients are those from before it,
    and the scale does not change. With a static scale of 1.0 and without masters the block does nothing at all.

    Args:
        loss: a tensor of any floating dtype on any device; 16-bit losses are scaled in fp32.
        optimizers: the optimizers whose parameters get gradients from this backward pass.
        loss_id: the number of the loss scaler to use, from 0 on and below ``num_losses`` of ``amp.initialize``.
        model: accepted for Apex's sake, not used.
        delay_unscale: accepted for Apex's sake: gradients accumulate rightly without it, and with it they are unscaled
            at once, too. Only the block of the next pass differs: there ``p.grad`` has the scaled gradients of both.
        delay_overflow_check: unscale, but neither move the scale nor skip a step for this pass.

    Returns:
        A context manager whose value is the loss times the scale. With a static scale of 1.0, and when amp is
        disabled, nothing is multiplied.

    Raises:
        UsageError: before ``amp.initialize``, without an optimizer or for one that it did not return; from the block,
            if another block of the optimizer is open, or if ``backward`` was called on the loss that is not scaled.
        ArgumentIndexError: for a ``loss_id`` there is no scaler for.
        ArgumentTypeError: if the loss is no floating tensor, ``loss_id`` no whole number, or a switch neither True nor
            False.
    """
    session, attached = session_of(optimizers, "amp.scale_loss")
    if not session.options.enabled:
        return nullcontext(loss)
    scalers = session.loss_scalers
    if isinstance(loss_id, bool) or not isinstance(loss_id, int):
        raise ArgumentTypeError(f"loss_id={loss_id!r} must be a whole number: which loss this is, counted from 0.")
    if not 0 <= loss_id < len(scalers):
        raise ArgumentIndexError(
            f"loss_id={loss_id}, but amp.initialize was called with num_losses={len(scalers)}; count losses from 0, "
            "and pass num_losses= as many as there are losses with a scale of their own."
        )
    options: dict[str, Any] = {}
    if delay_unscale is not False or delay_overflow_check is not False:
        options["delay"] = check_flag("delay_unscale", delay_unscale)
        options["check"] = not check_flag("delay_overflow_check", delay_overflow_check)
    return ScaledBackward(loss, [one.window for one in attached], scalers[loss_id], name="amp.scale_loss", **options)


def master_params(optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer]) -> Iterator[torch.Tensor]:
    """The parameters that the optimizer updates: fp32 masters at O2, the model's own at other levels.

    ``torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), max_norm)`` right after ``amp.scale_loss`` clips
    unscaled gradients, in fp32. A master's ``grad`` is the gradient of the model's parameter, so the step uses it.

    Args:
        optimizer: one that ``amp.initialize`` returned, or any other, or a list of optimizers.

    Returns:
        An iterator over the parameters of all groups. For a 16-bit parameter with a master it is the master, a float32
        ``torch.nn.Parameter``. Values that you write into it reach the stored master and the weight at the next step,
        forward pass of the model, ``state_dict()`` or call of this function. For a parameter that another rank steps
        (``ZeroRedundancyOptimizer``) it is the parameter itself.

    Raises:
        ArgumentTypeError: for anything else, such as a model, by the call itself.
    """
    optimizers = optimizer if isinstance(optimizer, (list, tuple)) else (optimizer,)
    for each in optimizers:
        check_optimizer(each, "amp.master_params")
    return chain.from_iterable(map(_stepped_params, optimizers))


def _stepped_params(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    attached = attached_to(optimizer)
    plain = (param for group in optimizer.param_groups for param in group["params"])
    return plain if attached is None else attached.keeper.master_params()


def steps_skipped(optimizer: torch.optim.Optimizer) -> int:
    """The number of steps of an optimizer that were skipped because gradients overflowed. Reads the device."""
    _, found = session_of([optimizer], "amp.steps_skipped")
    return skipped_steps(found[0].counts) if found else 0


def state_dict(
    destination: dict[str, Any] | None = None, *, optimizer: torch.optim.Optimizer | None = None
) -> dict[str, Any]:
    """The loss scales, to be saved beside the model and the optimizer. Plain numbers, as Apex wrote them.

    Args:
        destination: a dict to fill; a new one if None.
        optimizer: the optimizer whose session to save, when ``amp.initialize`` was called more than once; the latest if
            None.

    Returns:
        ``{"loss_scaler0": {"loss_scale": 65536.0, "unskipped": 0}, ...}``, empty when amp is disabled.

    Raises:
        UsageError: before ``amp.initialize``.
    """
    target: dict[str, Any] = OrderedDict() if destination is None else destination
    for i, scaler in enumerate(_session(optimizer, "amp.state_dict").loss_scalers):
        target[f"loss_scaler{i}"] = scaler.state_dict()
    return target


def load_state_dict(state_dict: Mapping[str, Any], *, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Take the loss scales back from what ``amp.state_dict`` (or Apex's) returned.

    Fewer or more entries than there are loss scalers is allowed, as in Apex, and logged as a warning.

    Args:
        state_dict: the saved dict.
        optimizer: the optimizer whose session to load; the latest if None.

    Raises:
        UsageError: before ``amp.initialize``.
        ArgumentTypeError: for something else than a dict.
        ArgumentValueError: for an entry that is not one of a loss scaler; nothing is loaded then.
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
        text = "amp.load_state_dict: %d loss scalers saved, %d in use; the surplus is left as it is."
        logger.warning(text, saved, used)
    for scaler, name in zip(scalers, names, strict=False):
        if scaler.dynamic and state_dict[name]["loss_scale"] == 1.0:
            logger.warning(
                "amp.load_state_dict: %s is 1.0, as in bfloat16, at O0 and at O3. The dynamic loss scale goes on from "
                "it, and small gradients are lost until it has grown. Leave amp.load_state_dict out where the dtype "
                "changes.",
                name,
            )
        scaler.load_state_dict(state_dict[name])


def _session(optimizer: torch.optim.Optimizer | None, caller: str) -> Session:
    return require_session(caller) if optimizer is None else session_of([optimizer], caller)[0]
