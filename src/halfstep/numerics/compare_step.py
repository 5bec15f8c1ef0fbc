"""``compare_step``: one step in fp32 and in 16 bits, op by op, and which module adds the error."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ..core.checks import check_count
from ..core.dtypes import dtype_name
from ..core.errors import ArgumentTypeError, ArgumentValueError
from ..core.loss_scale import make_loss_scale
from ..core.policy import Policy, check_policy
from ..findings.forward import same_random_numbers
from ..observe.names import qualified_names
from ..observe.watch import Watch
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
    """Run one step twice, in a wide dtype and as a candidate, and say which module adds the error.

    ::

        def step():
            return loss_fn(model(x), y)

        print(halfstep.numerics.compare_step(step, model, candidate="O1"))

    Both runs begin with the same weights, buffers and random numbers, and get the same batch if ``step`` uses the same.
    Nothing of them remains: weights, buffers, gradients, hooks and the state of the random numbers are what they were,
    and no optimizer steps and no loss scale moves: a run ends where gradients are unscaled or an optimizer steps.

    In the reference all ops compute in one dtype: casts to a narrower one, of the level or in the script, do nothing,
    and 16-bit weights come from their masters where they have some. Ops of both runs are aligned by module, op, shape
    and occurrence; casts, which the reference does not make, are measured by what goes in and what comes out.

    What an op adds: the error of its result is compared with the largest error of what goes in, which is known by
    where each tensor lies in memory. An op of good condition hands on as much as it gets, and adds the roundoff of its
    dtype; ``excess`` is what it adds more, in these units. The subtraction of nearly equal numbers and a value that
    overflows have a large one. In gradients, values that are 0 and should not be count as lost, however small they
    are. Ops on the float list that return 16-bit numbers, fp32 results that lie on the grid of a 16-bit format, and
    values that the script rounds to 16 bits and widens again have that of their format in fp32, for such roundoff is
    no larger than what is inherited and yet is added.

    Where the loss or a gradient of the reference is inf or NaN itself, precision is not the cause: ``not_finite`` of
    the comparison says where it began.

    Args:
        step: a function without arguments that runs forward and backward pass. If it runs no backward pass and returns
            the loss, the backward pass is run for it; the candidate's with the loss scale of its policy, the largest
            power of two that leaves room if that is dynamic.
        model: the model that it runs, in DDP too. One under FSDP2 is refused.
        reference: torch.float32 or torch.float64.
        candidate: a policy or a level, "O1", say. None is the model and the step as they are: brought up by
            ``amp.initialize``, or with ``amp.auto_cast`` in the step.
        dtype: the 16-bit dtype of a level. None is bfloat16.
        samples: how many values are kept of each tensor, 1 or more.

    Raises:
        ArgumentTypeError: for a candidate or model of another kind.
        ArgumentValueError: for an unknown level, another reference, or ``samples`` below 1.
        UsageError: for a sharded model, or a policy that contradicts itself.
    """
    policy = _policy(candidate, dtype)
    if reference not in (torch.float32, torch.float64):
        raise ArgumentValueError(f"reference={reference} must be torch.float32 or torch.float64.")
    check_count("samples", samples)
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError(f"compare_step takes a torch.nn.Module, not {type(model).__name__}.")
    refuse(model)
    names = qualified_names(model)

    def run(recorder: Recorder, scale: float, compute_in: torch.dtype | None = None) -> bool:
        recorder.begin(names)
        watch = Watch(names, ops=recorder.notice, casts=True, compute_in=compute_in)
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
    """The loss scale of a policy; for a dynamic one the largest power of two that leaves room to the gradients."""
    if policy is None:
        return 1.0
    rule = make_loss_scale(policy.loss_scale)
    if not rule.dynamic:
        return rule.init_scale
    values = (r.amax for r in reference if r.backward and not r.passes_on and math.isfinite(r.amax))
    limit = torch.finfo(policy.compute_dtype or torch.float32).max
    return 2.0 ** math.floor(math.log2(min(rule.init_scale, limit, limit / _HEADROOM / max(values, default=1.0))))
