"""``compare_step``: runs one step in fp32 and in 16 bits, op by op, and finds the module that adds the error."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ...core.checks import check_count, check_kind
from ...core.dtypes import dtype_name
from ...core.errors import ArgumentTypeError, ArgumentValueError
from ...core.loss_scale import make_loss_scale
from ...core.policy import Policy, check_policy
from ..findings.forward import same_random_numbers
from ..observe.names import qualified_names
from ..observe.watch import CallWatch
from .blame import entries_of, first_not_finite
from .comparison import Comparison
from .linked_rows import LinkedRow
from .recording import Recorder
from .trial_runs import as_candidate, as_reference, refuse, run_step

__all__ = ["compare_step"]

_HEADROOM = 4.0
"""The least factor between the largest gradient and the largest number of the dtype, under a dynamic loss scale."""


def compare_step(
    step: Callable[[], Any],
    model: nn.Module,
    *,
    reference: torch.dtype = torch.float32,
    candidate: Policy | str | None = None,
    dtype: torch.dtype | None = None,
    samples: int = 1024,
) -> Comparison:
    """Run one step twice, in a wide dtype and as a candidate, and find the module that adds the error.

    ::

        def step():
            return loss_fn(model(x), y)

        print(halfstep.numerics.compare_step(step, model, candidate="O1"))

    Both runs begin with the same weights, buffers and random numbers, and get the same batch if ``step`` uses the same.
    They leave no trace: weights, buffers, gradients, hooks and the random state are restored, and no optimizer steps
    and no loss scale changes, because a run ends when gradients are unscaled or an optimizer steps.

    In the reference all ops compute in one dtype: casts to a narrower dtype, by the level or the script, do nothing,
    and 16-bit weights come from their masters if they have any. Ops of both runs are aligned by module, op, shape and
    occurrence; casts, which the reference does not make, are measured by their input and output.

    The error that an op adds is the error of its result minus the largest error of its inputs, which are identified by
    memory address. A well-conditioned op passes its input's error on and adds the roundoff of its dtype; ``excess`` is
    the additional error, in these units. A subtraction of nearly equal numbers and an overflow have a large excess. In
    gradients, values that are 0 and should not be count as lost, however small they are. Ops on the float list that
    return 16-bit numbers, fp32 results that lie on the grid of a 16-bit format, and values that the script rounds to 16
    bits and widens again have the excess of their format relative to fp32, because this roundoff is no larger than the
    inherited error and yet is added.

    If the loss or a gradient of the reference itself is inf or NaN, precision is not the cause, and ``not_finite`` of
    the comparison names the origin.

    Args:
        step: a function without arguments that runs forward and backward pass. If it only returns the loss,
            ``compare_step`` runs the backward pass; the candidate's with the loss scale of its policy, for a dynamic
            one the largest power of two that leaves headroom.
        model: the model of the step, possibly in DDP. A model under FSDP2 is refused.
        reference: torch.float32 or torch.float64.
        candidate: a policy or a level, such as "O1". None runs model and step as they are, for example prepared by
            ``amp.initialize``, or with ``amp.auto_cast`` in the step.
        dtype: the 16-bit dtype of a level; None is bfloat16.
        samples: the number of values to keep of each tensor, 1 or more.

    Raises:
        ArgumentTypeError: for a candidate or model of another type.
        ArgumentValueError: for an unknown level, another reference, or ``samples`` below 1.
        UsageError: for a sharded model, or a policy that contradicts itself.
    """
    policy = _policy(candidate, dtype)
    if reference not in (torch.float32, torch.float64):
        raise ArgumentValueError(f"reference={reference} must be torch.float32 or torch.float64.")
    check_count("samples", samples)
    check_kind("model of compare_step", model, nn.Module, "a torch.nn.Module")
    refuse(model)
    names = qualified_names(model)

    def run(recorder: Recorder, scale: float, compute_in: torch.dtype | None = None) -> bool:
        recorder.begin(names)
        watch = CallWatch(names, ops=recorder.notice, casts=True, compute_in=compute_in)
        with same_random_numbers(model), watch:
            scaled = run_step(model, step, scale, recorder.begin_backward)
        recorder.end(model)
        return scaled

    wide, narrow = Recorder(samples, reference), Recorder(samples)
    with as_reference(model, reference):
        run(wide, 1.0, reference)
    scale = _scale(policy, wide.rows)
    with as_candidate(model, policy):
        scaled = run(narrow, scale)
    entries, alone = entries_of(narrow.rows, wide.rows, scale if scaled else 1.0)
    about: dict[str, Any] = {"ops of one run only": alone} if alone else {}
    if scaled and scale != 1.0:
        about["loss scale"] = scale
    name = "as it is" if candidate is None else candidate if isinstance(candidate, str) else str(candidate)
    if isinstance(candidate, str) and policy is not None:
        name += f" {dtype_name(policy.compute_dtype)}" if policy.compute_dtype is not None else ""
    return Comparison(entries, (dtype_name(reference), name), about, first_not_finite(wide.rows))


def _policy(candidate: Any, dtype: torch.dtype | None) -> Policy | None:
    if isinstance(candidate, str):
        return Policy.from_level(candidate, dtype or torch.bfloat16)
    if candidate is None or isinstance(candidate, Policy):
        if candidate is not None:
            check_policy(candidate)
        return candidate
    raise ArgumentTypeError(f"candidate={candidate!r} must be a halfstep.Policy, a level such as 'O1', or None.")


def _scale(policy: Policy | None, reference: Sequence[LinkedRow]) -> float:
    """Return the loss scale of a policy; for a dynamic one the largest power of two that leaves headroom."""
    if policy is None:
        return 1.0
    rule = make_loss_scale(policy.loss_scale)
    if not rule.dynamic:
        return rule.init_scale
    values = (r.amax for r in reference if r.backward and not r.passes_on and math.isfinite(r.amax))
    limit = torch.finfo(policy.compute_dtype or torch.float32).max
    return 2.0 ** math.floor(math.log2(min(rule.init_scale, limit, limit / _HEADROOM / max(values, default=1.0))))
