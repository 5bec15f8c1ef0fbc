"""The rules about optimizers, their state, gradients and loss scales."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ...core.dtypes import HALF_DTYPES, dtype_name, is_half
from ...core.inner_optimizers import params_of
from ...parameters.ledger import get_grads
from ...parameters.loss_scaler import DeviceLossScaler
from ...stepping.attached import attached_to
from ...torch_internals.torch_compat import initial_scale
from .facts import Facts, Rules, gradients_of
from .finding import Found, share
from .updates import decays_apart, rounds_once

__all__ = ["RULES", "ZERO_GRADIENTS_FIX", "lost"]

_USE_MASTERS = (
    "Use fp32 masters, from amp.initialize(..., opt_level='O2'), or for Adam, AdamW, SGD, Adagrad and "
    "Muon from optimizers.fuse(optimizer, master_weights=True)"
)
ZERO_GRADIENTS_FIX = (
    "in float16, where values below 6e-8 become 0, use a loss scale (amp.GradScaler(), loss_scale='dynamic') or "
    "bfloat16; otherwise find what cuts the graph or multiplies by 0: detach(), a mask, a dead ReLU"
)

_MOMENTS = ("exp_avg", "momentum_buffer", "square_avg", "sum")
"""State entries of torch's optimizers that are 0 as long as all gradients are 0."""

LOST_ERROR, LOST_WARNING = 0.5, 0.1
"""The shares of lost updates from which HS101 is an error, or a warning."""

_MANY_PASSES = 16


def lost(where: str, fraction: float, text: str, **evidence: object) -> Found | None:
    """Make HS101 for a share of lost updates; None if the share is small."""
    if fraction < LOST_WARNING:
        return None
    text = f"{share(fraction)} of the updates round to nothing{text}."
    return Found("error" if fraction >= LOST_ERROR else "warning", where, text, {"lost": fraction, **evidence})


def lost_updates(facts: Facts) -> Iterator[Found]:
    """HS101: 16-bit weights that an optimizer without masters moves by less than half of their last bit.

    The prediction rounds an update from state and learning rate and compares the weight. HS101 is an error if half of
    the updates are lost, a warning from one in ten. Before the first step only Adam's update is known: it moves every
    weight by the learning rate. Source: NVIDIA-NeMo/Automodel#3875.
    """
    for entry in facts.lost:
        name, dtype = type(entry.optimizer).__name__, dtype_name(entry.dtype)
        needed = f" (half of the weights need lr > {entry.lr_for_half:.1e})"
        text = f": {dtype} weights, {name} keeps no masters, lr {entry.lr:g}{needed}"
        known = {"lr": entry.lr, "lr_for_half": entry.lr_for_half, "dtype": dtype}
        if found := lost(facts.where(entry.params), entry.fraction, text, **known):
            yield found


def stuck_second_moment(facts: Facts) -> Iterator[Found]:
    """HS102: a second moment in 16 bits whose decay is smaller than half of its last bit.

    A step multiplies the moment by beta2. If 1 - beta2 is below a quarter of the format's epsilon, every value rounds
    back to itself, and one large gradient makes all later steps small; below half of epsilon, some values do. Measured:
    after 5,000 steps without gradient, 0.001 is still 0.001 in bfloat16, and 6.7e-6 in fp32.
    """
    for moment in facts.second_moments:
        eps, change = torch.finfo(moment.dtype).eps, 1 - moment.keeps
        if 0 < change < eps / 2:
            name, always = dtype_name(moment.dtype), change < eps / 4
            text = f"The second moment of {type(moment.group.optimizer).__name__} is {name} and shrinks by 1 - beta2 = "
            text += f"{change:.3g} per step, less than {eps / (4 if always else 2):.3g}: "
            text += "it can never decay." if always else "some of its values cannot decay."
            known = {"decay": change, "grid": eps / 4, "dtype": name}
            yield Found("error" if always else "warning", facts.where(moment.params), text, known)


def lost_weight_decay(facts: Facts) -> Iterator[Found]:
    """HS103: decoupled weight decay that is smaller than half of the last bit of every 16-bit weight.

    AdamW multiplies the weight by 1 - lr * weight_decay and rounds it back to the same weight. If the step rounds only
    once, the decay still adds to the update, so HS103 is only a warning. Source: OneTrainer#996.
    """
    for group in facts.groups:
        lr = group.hyper.get("lr")
        if not group.halves or not decays_apart(group.hyper) or isinstance(lr, torch.Tensor) or not lr:
            continue
        decay = lr * group.hyper["weight_decay"]
        fine = {dtype for dtype in group.dtypes if 0 < decay < torch.finfo(dtype).eps / 4}
        params = [p for p in group.halves if p.dtype in fine]
        if params:
            grid, once = torch.finfo(params[0].dtype).eps / 4, rounds_once(group.optimizer, group.hyper)
            text = f"lr * weight_decay = {decay:.3g} is less than {grid:.3g}: weight decay alone never changes a "
            text += f"{dtype_name(params[0].dtype)} weight."
            known = {"decay": decay, "grid": grid}
            yield Found("warning" if once else "error", facts.where(params), text, known)


def eps_underflows(facts: Facts) -> Iterator[Found]:
    """HS106: an ``eps`` that is 0 in the dtype of the optimizer's state, so that 0 / 0 gives NaN.

    The smallest float16 number is 2**-24 = 6e-8, and Adam's default is 1e-8. A fused step computes in fp32.
    """
    for moment in facts.second_moments:
        eps, info = moment.group.hyper.get("eps"), torch.finfo(moment.dtype)
        smallest = info.smallest_normal * info.eps
        fused = rounds_once(moment.group.optimizer, moment.group.hyper)
        if isinstance(eps, float) and not fused and 0 < eps <= smallest / 2:  # a tie also rounds to 0
            text = f"eps = {eps:g} is 0 in {dtype_name(moment.dtype)}, whose smallest number is {smallest:.1e}: "
            text += "a weight without gradient becomes NaN."
            yield Found("error", facts.where(moment.params), text, {"eps": eps, "smallest": smallest})


def fp16_without_loss_scale(facts: Facts) -> Iterator[Found]:
    """HS107: float16 gradients without a loss scale: gradients below 6e-8 become 0.

    Applies if trained weights, the policy or the watched forward pass are in float16 and no scaler scales. Pass a
    scaler that only the script knows to ``check``. Source: arXiv 1710.03740, section 3.2.
    """
    if not facts.optimizers or not facts.scaling_is_known or torch.float16 not in facts.computed:
        return
    if not any(_scales(scaler) for scaler in facts.scalers):
        off = [_kind(scaler) for scaler in facts.scalers if not _is_enabled(scaler)]
        params = [p for group in facts.groups for p in group.params if p.dtype is torch.float16]
        known = {"smallest": 2.0**-24, "scalers": len(facts.scalers)}
        text = "float16 without a loss scale: gradients below 6e-8 become 0." + (
            f" The {off[0]} is off." if off else ""
        )
        yield Found("error", facts.where(params) if params else "the model", text, known)


def useless_scaler(facts: Facts) -> Iterator[Found]:
    """HS108: a loss scaler that multiplies by 1, or that scales losses whose gradients are not in float16.

    bfloat16 has the exponents of fp32, so a scaler only costs time, and torch's scaler refuses bfloat16 gradients on
    CUDA: '"_amp_foreach_non_finite_check_and_unscale_cuda" not implemented for 'BFloat16''.
    Source: datawhalechina/hello-agents#459.
    """
    for scaler in facts.scalers:
        name = _kind(scaler)
        given = "amp.initialize" not in name
        fix = "Leave it out." if given else "Leave loss_scale out."
        if given and _is_enabled(scaler) and not _scales(scaler):
            message = f"The {name} stays at a scale of 1, so it scales nothing."
            yield Found("warning", name, message, {"dtypes": _names(facts)}, "Use a dynamic scale.")
        elif _scales(scaler) and torch.bfloat16 in facts.computed and torch.float16 not in facts.computed:
            refuses = name == "torch.amp.GradScaler" and torch.bfloat16 in facts.trained
            message = f"The {name} is unnecessary for bfloat16, which has the range of fp32."
            message += " On CUDA it raises an error for bfloat16 gradients." if refuses else ""
            severity = "warning" if refuses else "note"
            yield Found(severity, name, message, {"dtypes": _names(facts)}, fix)  # type: ignore[arg-type]


def _names(facts: Facts) -> list[str]:
    return sorted(map(dtype_name, facts.computed))


def _is_enabled(scaler: Any) -> bool:
    """True if the scaler is enabled."""
    return isinstance(scaler, DeviceLossScaler) or bool(scaler.is_enabled())


def _scales(scaler: Any) -> bool:
    """True if the scaler can multiply a loss by a factor other than 1."""
    if not _is_enabled(scaler):
        return False
    inner = getattr(scaler, "loss_scaler", scaler)  # set on halfstep's GradScaler
    if isinstance(inner, DeviceLossScaler):
        return not inner.neutral
    return bool(scaler.get_growth_factor() != 1.0 or initial_scale(scaler) != 1.0)


def _kind(scaler: Any) -> str:
    """Name a scaler for messages."""
    if isinstance(scaler, DeviceLossScaler):
        return f"{'dynamic' if scaler.dynamic else 'static'} loss scale of amp.initialize"
    return "torch.amp.GradScaler" if type(scaler) is torch.amp.GradScaler else type(scaler).__name__


def accumulation_in_16_bits(facts: Facts) -> Iterator[Found]:
    """HS110: gradients of 16 or more passes summed in 16 bits.

    The sum grows so much larger than the next gradient that some, and finally all, bits of the gradient round away: of
    equal gradients bfloat16 loses every one from the 256th on. With halfstep's masters, gradients are summed in fp32.
    """
    if facts.accumulate < _MANY_PASSES:
        return
    params = [p for p in facts.halves if getattr(p, "grad_dtype", p.dtype) in HALF_DTYPES]
    if params:
        text = f"Gradients of {facts.accumulate} passes are summed in {dtype_name(params[0].dtype)}."
        yield Found("warning", facts.where(params), text, {"passes": facts.accumulate})


def fused_sgd_on_cpu(facts: Facts) -> Iterator[Found]:
    """HS113: torch's fused SGD on 16-bit weights on a CPU, whose step leaves most of them unchanged."""
    for group in facts.groups:
        torchs = type(group.optimizer).__name__ == "SGD" and not hasattr(group.optimizer, "keep_masters")
        if torchs and group.hyper.get("fused") and any(p.is_cpu for p in group.halves):
            text = "torch's SGD(fused=True) leaves most 16-bit weights on a CPU unchanged (seen in torch 2.13)."
            yield Found("error", facts.where(group.halves), text, {"fused": True})


def foreign_parameters(facts: Facts) -> Iterator[Found]:
    """HS115: an optimizer with frozen parameters, or parameters of no model, while the model trains others.

    This happens if user code created or replaced the model, a part of it, or its adapters after it created the
    optimizer. Hand-made fp32 masters, which have as many weights as a 16-bit model, are not reported. A part that was
    replaced after ``amp`` prepared the optimizer is an error, as in the next step.
    """
    own = set(map(id, facts.own_params))
    held = params_of(*facts.optimizers)
    trained = set(map(id, held))
    foreign = [p for p in held if id(p) not in own or not p.requires_grad]
    left = list({id(p): p for p in facts.own_params if p.requires_grad and id(p) not in trained}.values())
    masters = any(map(is_half, left)) and not any(map(is_half, foreign))
    as_many = sum(map(torch.Tensor.numel, foreign)) == sum(map(torch.Tensor.numel, left))
    if not foreign or not left or (masters and as_many):
        return
    attached = [(found, one) for one in facts.optimizers if (found := attached_to(one)) is not None]
    replaced = any(each.param is p for found, one in attached for each in found.replaced.find(one) for p in left)
    text = f"{len(foreign)} of {len(held)} parameters of {type(facts.optimizers[0]).__name__} are frozen or not in the "
    text += f"model, and {len(left)} parameters of the model are in none of the given optimizers."
    known = {"foreign": len(foreign), "untrained": len(left)}
    yield Found("error" if replaced or len(foreign) == len(held) else "warning", facts.where(left), text, known)


def zero_gradients(facts: Facts) -> Iterator[Found]:
    """HS121: the gradients of all parameters are 0, although a backward pass has run.

    The rule needs gradients, so call ``check`` after a backward pass and before ``zero_grad``. Gradients that
    ``zero_grad`` set to 0 are not reported: nonzero moments of the optimizer, or the gradients' versions, show the
    write.
    """
    if facts.any_gradient or facts.any_gradient is None:
        return
    params = facts.trained_params
    pairs = list(gradients_of(params))
    there = sum(grad is not None for grad in get_grads(params))
    if len(pairs) < there or any(bool(grad.any()) for _, grad in pairs):  # not sampled, or sparse
        return
    kept = [each for p, _ in pairs for each in _moments(facts, p)]
    untouched = not any(grad._version for _, grad in pairs)
    if any(bool(each.any()) for each in kept) or not (kept or untouched or _would_keep(facts)):
        return
    text = f"The gradients of all {len(pairs)} parameters are 0."
    yield Found("error", facts.where([p for p, _ in pairs]), text, {"tensors": len(pairs)})


def _moments(facts: Facts, param: torch.Tensor) -> Iterator[torch.Tensor]:
    for optimizer in facts.optimizers:
        state = optimizer.state.get(param) or {}
        yield from (state[name] for name in _MOMENTS if isinstance(state.get(name), torch.Tensor))


def _would_keep(facts: Facts) -> bool:
    """True if every optimizer has moments after a step, so that missing moments mean that it has not stepped yet."""
    defaults = [optimizer.defaults for optimizer in facts.optimizers]
    return bool(defaults) and all("betas" in each or each.get("momentum") for each in defaults)


RULES: Rules = {
    "HS101": (lost_updates, f"{_USE_MASTERS}; or rounding='stochastic' of a fused optimizer for bfloat16."),
    "HS102": (stuck_second_moment, f"{_USE_MASTERS}."),
    "HS103": (lost_weight_decay, f"{_USE_MASTERS}."),
    "HS106": (eps_underflows, f"{_USE_MASTERS}; or eps=1e-4."),
    "HS107": (
        fp16_without_loss_scale,
        "Use a dynamic loss scale: amp.GradScaler(), or loss_scale='dynamic' of amp.initialize. Or train in bfloat16, "
        "which needs none. If you already use a scaler, pass it to halfstep.check: scaler=scaler.",
    ),
    "HS108": (useless_scaler, ""),
    "HS110": (accumulation_in_16_bits, f"{_USE_MASTERS}; or param.grad_dtype = torch.float32 (torch 2.13)."),
    "HS113": (fused_sgd_on_cpu, f"{_USE_MASTERS}."),
    "HS115": (foreign_parameters, "Build, move and wrap the model, then create the optimizer from model.parameters()."),
    "HS121": (zero_gradients, f"{ZERO_GRADIENTS_FIX[0].upper()}{ZERO_GRADIENTS_FIX[1:]}."),
}
