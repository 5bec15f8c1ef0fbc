"""Steps of optimizers on lists of tensors."""

from __future__ import annotations

from typing import Any

import torch

from ...core.checks import arguments
from ...core.scalars import in_scalar_dtype
from ...kernels import multi_tensor as ops
from ...optimizers.adagrad import adagrad, adagrad_scalars
from ...optimizers.adam import adam, adam_scalars
from ...optimizers.lamb import lamb_apply, lamb_direction, lamb_moments, lamb_scalars, trust_ratio
from ...optimizers.novograd import moving_norm, novograd, novograd_scalars
from ...optimizers.sgd import momentum_sgd, sgd, sgd_scalars
from .arguments import Lists, Number, as_float64, skip_of, take, unscale

__all__ = [
    "multi_tensor_adagrad",
    "multi_tensor_adam",
    "multi_tensor_adam_capturable",
    "multi_tensor_adam_capturable_master",
    "multi_tensor_lamb",
    "multi_tensor_lamb_mp",
    "multi_tensor_lamb_stage1_cuda",
    "multi_tensor_lamb_stage2_cuda",
    "multi_tensor_novograd",
    "multi_tensor_sgd",
]


def multi_tensor_sgd(
    chunk_size: int,
    noop_flag: torch.Tensor,
    lists: Lists,
    wd: float,
    momentum: float,
    dampening: float,
    lr: Number,
    nesterov: bool,
    first_run: bool,
    wd_after_momentum: bool,
    scale: Number = 1.0,
) -> None:
    """Gradient descent for lists ``[gradients, parameters, momenta]`` and, as a fourth, 16-bit copies. Obeys."""
    group = {**arguments(locals()), "weight_decay": wd}
    grads, params, buffers = take(lists, 3, 4)[:3]
    skip = skip_of(noop_flag, params)
    scalars = sgd_scalars(group, 1.0 if first_run else 1.0 - dampening, scale)
    if momentum:
        if first_run:
            scalars["old"] = 0.0  # ignore the contents of the buffer
        ops.run(momentum_sgd, scalars, skip=skip, grad=grads, param=params, momentum_buffer=buffers)
    else:
        ops.run(sgd, scalars, skip=skip, grad=grads, param=params)
    if len(lists) == 4:
        ops.copy(params, lists[3])


def multi_tensor_adam(
    chunk_size: int,
    noop_flag: torch.Tensor,
    lists: Lists,
    lr: Number,
    beta1: float,
    beta2: float,
    eps: float,
    step: Number,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """Adam for lists ``[gradients, parameters, exp_avg, exp_avg_sq]``; mode 0 is L2, 1 is AdamW. Obeys."""
    group = {**arguments(locals()), "betas": (beta1, beta2), "adam_w_mode": mode}
    group["lr"] = lr.reshape(()) if isinstance(lr, torch.Tensor) else lr
    grads, params, exp_avg, exp_avg_sq = take(lists, 4)
    scalars = adam_scalars(group, as_float64(step), 1.0)
    state: dict[str, Any] = {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    ops.run(adam, scalars, skip=skip_of(noop_flag, params), grad=grads, param=params, **state)


def multi_tensor_adam_capturable(chunk_size: int, noop_flag: torch.Tensor, lists: Lists, *numbers: Any) -> None:
    """Multiply the gradients by the last number in place, then run ``multi_tensor_adam``. Obeys."""
    found = take(lists, 4)
    unscale(noop_flag, found[0], numbers[-1])
    multi_tensor_adam(chunk_size, noop_flag, found, *numbers[:-1])


def multi_tensor_adam_capturable_master(chunk_size: int, noop_flag: torch.Tensor, lists: Lists, *numbers: Any) -> None:
    """Run ``multi_tensor_adam_capturable`` on a fifth list of fp32 masters, and round them into parameters. Obeys."""
    grads, params, exp_avg, exp_avg_sq, masters = take(lists, 5)
    multi_tensor_adam_capturable(chunk_size, noop_flag, [grads, masters, exp_avg, exp_avg_sq], *numbers)
    ops.copy(masters, params)


def multi_tensor_adagrad(
    chunk_size: int, noop_flag: torch.Tensor, lists: Lists, lr: Number, eps: float, mode: int, weight_decay: float
) -> None:
    """Adagrad for lists ``[gradients, parameters, sums]``; mode 0 is L2, 1 decays apart from the gradient. Obeys."""
    group = {**arguments(locals()), "adagrad_w_mode": mode, "lr_decay": 0.0}
    grads, params, sums = take(lists, 3)
    scalars = adagrad_scalars(group, torch.ones((), dtype=torch.float32, device="cpu"), 1.0)
    ops.run(adagrad, scalars, skip=skip_of(noop_flag, params), grad=grads, param=params, sum=sums)


def multi_tensor_novograd(
    chunk_size: int,
    noop_flag: torch.Tensor,
    lists: Lists,
    grad_norms: torch.Tensor,
    lr: Number,
    beta1: float,
    beta2: float,
    eps: float,
    step: Number,
    bias_correction: int,
    weight_decay: float,
    grad_averaging: int,
    moment_mode: int,
    norm_type: int,
) -> None:
    """NovoGrad for lists ``[gradients, parameters, exp_avg]``; updates ``grad_norms``, [n]. Obeys.

    ``moment_mode`` 0 normalizes the gradient and decays before the first moment, 1 after it. ``norm_type`` is 2, or 0
    for the largest magnitude.
    """
    group = {**arguments(locals()), "betas": (beta1, beta2), "reg_inside_moment": moment_mode == 0}
    grads, params, exp_avg = take(lists, 3)
    skip = skip_of(noop_flag, params)
    before = in_scalar_dtype(grad_norms)
    if norm_type == 2:
        _, norms = ops.l2norm(grads, per_tensor=True)
        assert norms is not None
    else:
        norms = torch.stack([g.abs().amax() if g.numel() else g.new_zeros(()) for g in grads])
    after = moving_norm(before, in_scalar_dtype(norms), beta2, norm_type)
    grad_norms.copy_(torch.where(skip != 0, before, after))
    scalars = novograd_scalars(group, as_float64(step), 1.0, after)
    ops.run(novograd, scalars, skip=skip, grad=grads, param=params, exp_avg=exp_avg)


def multi_tensor_lamb(
    chunk_size: int,
    noop_flag: torch.Tensor,
    lists: Lists,
    lr: Number,
    beta1: float,
    beta2: float,
    eps: float,
    step: Number,
    bias_correction: int,
    weight_decay: float,
    grad_averaging: int,
    mode: int,
    global_grad_norm: Number,
    max_grad_norm: Number,
    use_nvlamb: bool | None = None,
) -> None:
    """LAMB for lists ``[gradients, parameters, exp_avg, exp_avg_sq]``; the gradients are clipped by their norm. Obeys.

    ``mode`` 0 adds weight decay to the gradient, 1 to the direction. ``max_grad_norm`` of 0 does not clip.
    """
    group = {**arguments(locals()), "betas": (beta1, beta2), "adam_w_mode": mode}
    grads, params, exp_avg, exp_avg_sq = take(lists, 4)
    skip = skip_of(noop_flag, params)
    norm = as_float64(global_grad_norm)
    limit = as_float64(max_grad_norm).to(norm)
    factor = torch.where((limit > 0) & (norm > limit), limit / norm, 1.0)
    scalars = lamb_scalars(group, as_float64(step), factor)
    state: dict[str, Any] = {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    weight, direction = ops.run(lamb_moments, scalars, skip=skip, grad=grads, param=params, **state).sqrt()
    rate = torch.as_tensor(lr, dtype=weight.dtype, device=weight.device)
    if weight_decay or use_nvlamb:
        rate = rate * trust_ratio(weight, direction)
    ops.run(lamb_apply, {**scalars, "rate": rate}, skip=skip, param=params, **state)


def multi_tensor_lamb_mp(chunk_size: int, noop_flag: torch.Tensor, lists: Lists, *numbers: Any) -> None:
    """Run ``multi_tensor_lamb`` with two last numbers, a flag and a factor for the gradients. Obeys both flags.

    A fifth list has 16-bit copies of the parameters.
    """
    found = take(lists, 4, 5)
    *numbers_of_lamb, found_inf, inv_scale = numbers
    flag = torch.maximum(noop_flag.float().reshape(()), found_inf.to(noop_flag.device).float().reshape(()))
    unscale(flag, found[0], inv_scale)
    multi_tensor_lamb(chunk_size, flag, found[:4], *numbers_of_lamb)
    if len(found) == 5:
        ops.copy(found[1], found[4])


def multi_tensor_lamb_stage1_cuda(
    chunk_size: int,
    noop_flag: torch.Tensor,
    lists: Lists,
    per_tensor_decay: torch.Tensor,
    step: int,
    beta1: float,
    beta2: float,
    epsilon: float,
    global_grad_norm: Number,
    max_global_grad_norm: float,
) -> None:
    """Run the first half of LAMB for lists ``[gradients, parameters, exp_avg, exp_avg_sq, updates]``: write updates.

    ``per_tensor_decay`` has shape [n]; ``step`` counts from 0; the gradients are clipped by their norm. It ignores the
    flag and runs on any device.
    """
    grads, params, exp_avg, exp_avg_sq, updates = take(lists, 5)
    norm = as_float64(global_grad_norm)
    group = {
        "betas": (beta1, beta2),
        "eps": epsilon,
        "weight_decay": per_tensor_decay,
        "adam_w_mode": True,
        "bias_correction": True,
        "grad_averaging": True,
    }
    factor = torch.where(norm > max_global_grad_norm, max_global_grad_norm / norm, 1.0)
    scalars = lamb_scalars(group, as_float64(step + 1), factor)
    state: dict[str, Any] = {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq, "update": updates}
    ops.run(lamb_direction, scalars, grad=grads, param=params, **state)


def multi_tensor_lamb_stage2_cuda(
    chunk_size: int,
    noop_flag: torch.Tensor,
    lists: Lists,
    per_tensor_param_norm: torch.Tensor,
    per_tensor_update_norm: torch.Tensor,
    lr: float,
    weight_decay: float,
    use_nvlamb: bool | None = None,
) -> None:
    """Run the second half of LAMB, the step, for lists ``[parameters, updates]`` and their norms, each [n].

    The rate is ``lr`` times the ratio of the norms with weight decay or ``use_nvlamb``, else ``lr``. It ignores the
    flag.
    """
    params, updates = take(lists, 2)
    rate = trust_ratio(per_tensor_param_norm, per_tensor_update_norm) * lr
    if not (weight_decay or use_nvlamb):
        rate = torch.full_like(rate, lr)
    ops.run(ops.axpby_kernel, {"a": 1.0, "b": -rate}, x=params, y=updates, target=params)
