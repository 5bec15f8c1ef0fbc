"""Findings in the observed steps that no other tool looks for: batches, random numbers, ranks, who unscales gradients.

Each rule yields findings. HS123 to HS126 and HS132 are codes of ``diagnose`` only, and HS122 is one of ``check``, too.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator

import torch
from torch import nn

from ..core.dtypes import HALF_DTYPES, dtype_name
from ..diagnostics.findings.checking import finding
from ..diagnostics.findings.facts import Facts
from ..diagnostics.findings.finding import Finding, Found
from ..diagnostics.findings.rules_of_model import BEGINS, ROUNDED, average_in_16_bits
from ..torch_internals.torch_compat import tree_flatten
from .observed import Observed, Pass

__all__ = ["apply"]


def apply(seen: Observed) -> Iterator[Finding]:
    """Apply the rules to a finished run."""
    yield from _batch(seen)
    yield from _warned(seen.warned)
    yield from _averages(seen)
    if seen.repeats_random_numbers:
        text = "Each step begins with the same random numbers, so dropout masks and noise are the same in every step."
        fix = "Set the seed once, before the first step: no torch.manual_seed or set_rng_state within a step."
        yield Finding("HS125", "error", "the step", text, {}, fix)
    if seen.stays_on_grid and all(each.code != "HS112" for each in seen.found):
        yield Finding("HS112", "warning", "the model", ROUNDED[0], {}, ROUNDED[1])
    if seen.kept > 1:
        text = "A backward pass begins with the gradients of the step before, so the gradients of all steps add up."
        yield Finding("HS132", "error", "the gradients", text, {}, "Call optimizer.zero_grad() once before each step.")
    made = [each for each in gc.get_objects() if issubclass(type(each), nn.parallel.DistributedDataParallel)]
    unused = [each for each in made if any(each.module is one for one in seen.models) and each not in seen.wrappers]
    for wrapper in [*unused, *(each for each, sent in seen.wrappers.items() if not sent)]:
        what, fix = "The model is in a DistributedDataParallel that is never called", "Call the wrapper, as model(x)."
        if wrapper in seen.wrappers:
            what = "Every pass of DistributedDataParallel ran in no_sync()"
            fix = "Leave no_sync() for the last pass before each step, or drop it."
        yield Finding("HS126", "error", type(wrapper.module).__name__, f"{what}: ranks exchange no gradients.", {}, fix)


def _batch(seen: Observed) -> Iterator[Finding]:
    """HS122: a batch that holds inf or NaN, or numbers that are too large for float16. HS118: rounded integers."""
    one = seen.bad or seen.first
    if one is None:
        return
    computes_in_fp16 = torch.float16 in seen.dtypes
    for name, value in _inputs(one):
        if not value.is_floating_point():
            continue
        if not value.isfinite().all():
            what = "NaN" if value.isnan().any() else "inf"
            text = f"The batch holds {what}: {name} of the model, before any op."
            yield Finding("HS122", "error", name, text, {}, BEGINS["the batch"][1])
        elif value.dtype in HALF_DTYPES and _is_rounded(value):
            text = f"Integers up to {float(value.abs().amax()):g} were rounded: they are in {dtype_name(value.dtype)}."
            fix = "Give the model integers or fp32 for time steps and positions: it casts what it may cast."
            yield Finding("HS118", "warning", name, text, {}, fix)
        elif computes_in_fp16 and float(value.abs().amax()) > 65504.0:
            text = f"The batch has numbers up to {float(value.abs().amax()):.3g}; above 65504 they are inf in float16."
            yield Finding("HS122", "error", name, text, {}, "Normalize the inputs of the model, or use bfloat16.")
    if seen.bad is not None and one.output and one.loss is not None:
        what, dtype = "NaN" if one.loss != one.loss else "inf", seen.loss_dtype
        if dtype in HALF_DTYPES:
            text = f"The loss is {what}: it is computed in {dtype_name(dtype)}, and what the model returns is finite."
            yield Finding("HS105", "error", "the loss", text, {}, "Compute it from logits.float().")
        else:
            text = f"The loss is {what} although the model returns finite values: it begins in the loss function."
            yield Finding("HS122", "error", "the loss", text, {}, BEGINS["the loss"][1])


def _inputs(one: Pass) -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in [*enumerate(one.args), *one.kwargs.items()]:
        yield from ((f"input {name}", t) for t in tree_flatten(value)[0] if isinstance(t, torch.Tensor) and t.numel())


def _is_rounded(value: torch.Tensor) -> bool:
    exact = 2.0 / torch.finfo(value.dtype).eps
    return bool((value == value.round()).all()) and float(value.abs().amax()) > exact


def _warned(messages: Iterable[str]) -> Iterator[Finding]:
    """HS123: what the engine warns of while gradients are scaled, clipped and unscaled."""
    for message in dict.fromkeys(messages):
        if "loss scale" in message and ("clipped" in message or "twice" in message or "loss scales" in message):
            text, _, fix = message.partition(". ")
            yield Finding("HS123", "error", "the gradients", f"{text}.", {}, fix)


def _averages(seen: Observed) -> Iterator[Finding]:
    """HS109 for averages of the model, which the model does not contain."""
    for module in seen.written():
        yield from (finding("HS109", Found(*each)) for each in average_in_16_bits(Facts(module, [])))
