"""The rules about modules, their computations and their devices."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from ...casting.buffers import POSITIONS
from ...casting.modules import copies_of, has_casting, hooks_of
from ...core.dtypes import HALF_DTYPES, dtype_name, is_half
from ...core.hardware import has_units
from ...core.text import listed
from ...parameters.held_masters import master_of
from ...torch_internals.torch_compat import BatchNorm, buffers_of, children_of, fsdp_policies, parameters_of
from ..observe.names import part_of
from .facts import Facts, Rules
from .finding import Found, grouped
from .forward import is_norm, is_router

__all__ = ["BEGINS", "ROUNDED", "RULES"]

_SLOW_AVERAGE = 0.998


def sensitive_parts_in_16_bits(facts: Facts) -> Iterator[Found]:
    """HS104: parts in 16 bits that need more: norms and routers without masters, statistics, frequencies, positions.

    - Frequencies of rotary embeddings and positions as numbers: the error of the angle grows with the position.
    - Weights of norms, near 1, and of routers, if the optimizer keeps no masters. Source: axolotl#3670.
    - Running statistics of BatchNorm.
    - With a batch: a hand-written norm that sums squares in 16 bits and takes a root, an error if it divides by inf;
      and routers with 16-bit results.
      Source: Switch Transformers, arXiv 2101.03961, section 2.4.
    """
    bare = {id(p) for p in facts.halves}
    positions: dict[str, int] = {}
    statistics: dict[str, int] = {}
    weights: list[torch.Tensor] = []
    for name, module in facts.half_modules:
        for key, buffer in buffers_of(module).items():
            if buffer is not None and is_half(buffer):
                whole = part_of(name, key)
                if POSITIONS.search(key):
                    positions[whole] = buffer.numel()
                elif isinstance(module, BatchNorm):
                    statistics[whole] = buffer.numel()
        if is_norm(module) or is_router(name, facts.module_names):
            weights += [p for p in parameters_of(module).values() if p is not None and id(p) in bare]
    if positions:
        text = "Frequencies or positions are in 16 bits: at position 4,096 an angle may be off by more than a radian."
        layers = sorted({name.rpartition(".")[0] for name in positions})
        fix = f"Compute them in fp32 in forward, or keep their modules in fp32: excluded_layers={layers}."
        yield Found("error", grouped(positions), text, {"tensors": list(positions)}, fix)
    if weights:
        text = f"Weights of norms or routers are {dtype_name(weights[0].dtype)} and have no masters."
        fix = "Keep them in fp32 (amp.decorate does so for norms), or use masters: amp.initialize(..., opt_level='O2')."
        yield Found("warning", facts.where(weights), text, {"tensors": len(weights)}, fix)
    if statistics:
        text = "Running statistics of BatchNorm are in 16 bits."
        fix = "Leave BatchNorm in fp32: keep_batchnorm_fp32=True."
        yield Found("warning", grouped(statistics), text, {"tensors": list(statistics)}, fix)
    yield from _sensitive_ops(facts)


def _sensitive_ops(facts: Facts) -> Iterator[Found]:
    fix = "Compute them in fp32 (x.float()) and cast the result, as torch's own norms do."
    if zero := facts.zero_norms:
        text = "A norm returns zeros: its sum of squares is inf in 16 bits, so that the division gives 0."
        yield Found("error", listed(zero), text, {"ops": zero}, fix)
    if statistics := [name for name in facts.norms if name not in facts.zero_norms]:
        text = "A norm computes its statistics in 16 bits."
        yield Found("warning", listed(statistics), text, {"ops": statistics}, fix)
    if routers := list(facts.forward.routers):
        text = "A router computes the scores of its experts in 16 bits, so close scores become equal."
        yield Found("note", listed(routers), text, {"routers": routers}, "Run it in fp32.")


def loss_in_16_bits(facts: Facts) -> Iterator[Found]:
    """HS105: a loss computed in 16 bits. Needs ``batch``.

    Near 36, neighbouring bfloat16 numbers differ by 0.25. FSDP2's MixedPrecisionPolicy does not enable autocast, so
    logits reach cross_entropy in 16 bits. Source: Modalities#464.
    """
    seen = facts.forward
    if not (seen.losses or seen.loss_dtype in HALF_DTYPES):
        return
    dtype = next(iter(seen.losses.values())) if seen.losses else seen.loss_dtype
    assert dtype is not None
    ops, name = list(seen.losses), dtype_name(dtype)
    text = f"The loss is computed in {name}, which has steps of {torch.finfo(dtype).eps * 8:g} near 10."
    yield Found("warning", listed(ops) or "the loss", text, {"ops": ops, "dtype": name})


def average_in_16_bits(facts: Facts) -> Iterator[Found]:
    """HS109: a moving average of weights kept in 16 bits with a decay of 0.998 or more.

    A step adds (1 - decay) of the difference, which is less than half of the last bit of the average. The rule looks at
    ``AveragedModel``, at modules with a ``decay``, ``ema_decay`` or ``beta`` that hold a copy of a model, and at deep
    copies of the model that are not trained and have other weights by now.
    """
    for module in facts.modules if facts.has_halves else ():
        for average in copies_of(module):
            pairs = zip(average.named_parameters(), module.parameters(), strict=False)
            apart = {name: p.numel() for (name, p), own in pairs if is_half(p) and not torch.equal(p, own.to(p.device))}
            if apart and all(p.grad is None and master_of(p) is None for p in average.parameters()):
                text = "A copy of the model has other weights, in 16 bits: an average loses most changes."
                yield Found("warning", grouped(apart), text, {})
        decay = _decay_of(module)
        if decay is None or not _SLOW_AVERAGE <= decay < 1:
            continue
        sizes = {name: p.numel() for name, p in module.named_parameters() if is_half(p)}
        if sizes:
            name = type(module).__name__
            text = f"{name} averages weights in 16 bits with decay {decay:g}: most changes round away."
            yield Found("error", grouped(sizes), text, {"decay": decay})


def _decay_of(module: nn.Module) -> float | None:
    """Find the decay of a module that averages weights; None for any other module."""
    if isinstance(module, AveragedModel):
        functions: list[Any] = [module.multi_avg_fn, module.avg_fn]
        for function in filter(None, functions):
            function = inspect.unwrap(function)
            cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
            if "decay" in cells:
                return float(cells["decay"].cell_contents)
        return None
    given = vars(module).get
    decay = given("decay", given("ema_decay", given("beta")))
    return decay if isinstance(decay, float) and bool(children_of(module)) else None


def no_units(facts: Facts) -> Iterator[Found]:
    """HS111: a 16-bit dtype for which this device has no units.

    With halfstep's ``amp``, products then run in fp32 kernels at the cost of fp32; this is a note. Without it, a
    bfloat16 product on such a CPU takes at least ten times as long as in fp32.
    """
    if not facts.own_params:
        return
    device = facts.own_params[0].device
    for dtype in sorted(facts.computed, key=dtype_name):
        if not has_units(device, dtype, "product"):
            emulated = has_casting(facts.model)
            cost = "take about as long as in fp32" if emulated else "take many times as long as in fp32"
            text = f"{device} has no units for {dtype_name(dtype)}: products {cost}."
            known = {"device": str(device), "dtype": dtype_name(dtype)}
            yield Found("note" if emulated else "warning", str(device), text, known, _faster(device, dtype))


def _faster(device: torch.device, slow: torch.dtype) -> str:
    """Compose the advice for a device that is slow in a dtype."""
    other = torch.float16 if slow is torch.bfloat16 else torch.bfloat16
    if has_units(device, other, "product"):
        return f"Train in {dtype_name(other)} (dtype= of amp.initialize), for which {device} has units."
    return 'For speed train in fp32 (opt_level="O0"): on this device 16 bits only save memory.'


def inputs_that_a_cast_destroys(facts: Facts) -> Iterator[Found]:
    """HS118: inputs of a 16-bit model with integers too large to be exact in its dtype, such as time steps.

    These inputs stay fp32. Source: diffusers#993.
    """
    given, casting = (hooks := hooks_of(facts.model)).inputs, hooks.casting
    stay = sorted({place for (place, *_), _ in given.stays}, key=str) if given is not None else []
    if stay and casting is not None:
        text = f"Inputs contain integers that {dtype_name(casting.dtype)} cannot represent, so they stay float32."
        yield Found("note", listed([f"input {place}" for place in stay]), text, {"inputs": stay})


def buffers_that_a_cast_destroys(facts: Facts) -> Iterator[Found]:
    """HS119: buffers kept in fp32: a cast would give 0 or inf, or they are frequencies, or the model updates them."""
    passes = hooks_of(facts.model).passes
    if passes is not None and passes.fp32_buffers:
        dtype = dtype_name(passes.casting.dtype)
        text = f"Buffers stay float32: {dtype} would lose their values, or the updates that the model makes to them."
        yield Found("note", listed(list(passes.fp32_buffers)), text, {"buffers": list(passes.fp32_buffers)})


ROUNDED = (
    "fp32 weights hold only 16-bit values although they have stepped: some code rounds them after each step.",
    "Find the code that copies 16-bit weights into them: load_state_dict, .half(), a 16-bit copy of the model.",
)
"""The message and the fix of weights that are fp32 in name only."""


def fp32_in_name_only(facts: Facts) -> Iterator[Found]:
    """HS112: fp32 tensors whose values all lie on the grid of a 16-bit format, because an op rounds them.

    Checks weights after a step (a checkpoint may have held 16-bit weights) and, with a batch, the loss and the outputs
    of modules whose inputs are fp32. Source: Liger-Kernel#1430, TransformerEngine#3193.
    """
    if rounded := facts.stepped_on_grid:
        yield Found("warning", facts.where(rounded), ROUNDED[0], {"tensors": len(rounded)}, ROUNDED[1])
    if facts.outputs_on_grid:
        text = "fp32 in name only: every value lies on a 16-bit grid, so it was rounded before it became fp32."
        fix = "Cast to fp32 before the computation, not after it."
        yield Found("warning", listed(facts.outputs_on_grid), text, {"outputs": facts.outputs_on_grid}, fix)


BEGINS = {
    "the batch": ("the batch already contains it", "Check the batch and the code that prepares it, or skip it."),
    "the loss": (
        "the loss function computes it from finite values",
        "Check the target of this batch, and a log, a division or a sum in the loss; compute the loss in fp32.",
    ),
}
"""The message and the fix for inf or NaN that begins outside the model, by its place."""


def loss_not_finite(facts: Facts) -> Iterator[Found]:
    """HS122: inf or NaN in the loss, or in the output of the model, and the module where it begins. Needs ``batch``."""
    if facts.not_finite:
        (place, _), (end, what) = facts.not_finite[0], facts.not_finite[-1]
        how, fix = BEGINS.get(place, (f"inf or NaN begins in {place}, whose inputs are finite", ""))
        text = f"The {'loss' if end == 'the loss' else 'output'} of this batch is {what}: {how}."
        yield Found("error", place, text, {"module": place}, fix)


def fsdp_reduces_in_16_bits(facts: Facts) -> Iterator[Found]:
    """HS114: FSDP2 that averages gradients over ranks in 16 bits, because its policy has no ``reduce_dtype``.

    Without ``reduce_dtype`` gradients are reduced in ``param_dtype``. Source: torch's ``MixedPrecisionPolicy``.
    """
    halves = [(module, policy) for module, policy in fsdp_policies(facts.modules) if policy.param_dtype in HALF_DTYPES]
    modules = [facts.name_of(module) for module, policy in halves if policy.reduce_dtype in (None, *HALF_DTYPES)]
    if modules:
        text = "FSDP2 sums the gradients of all ranks in 16 bits."
        yield Found("warning", listed(modules), text, {"modules": modules})


RULES: Rules = {
    "HS104": (sensitive_parts_in_16_bits, ""),
    "HS105": (loss_in_16_bits, "Compute it from logits.float(), or within amp.auto_cast, which does this."),
    "HS109": (average_in_16_bits, "Average fp32 weights: amp.master_model(model) gives the masters as a model."),
    "HS111": (no_units, ""),
    "HS112": (fp32_in_name_only, ""),
    "HS114": (fsdp_reduces_in_16_bits, "MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)."),
    "HS118": (
        inputs_that_a_cast_destroys,
        "Nothing is lost; ops that mix dtypes cost a cast. Integer tensors, or features made from them, cost none.",
    ),
    "HS119": (
        buffers_that_a_cast_destroys,
        "Nothing is lost; ops that mix dtypes cost a cast. cast_ops=False of amp.initialize casts these buffers, too.",
    ),
    "HS122": (loss_not_finite, "halfstep.diagnose finds the op, and tests whether fp32 has the same problem."),
}
