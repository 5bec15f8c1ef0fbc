"""Steps of optimizers on lists of tensors."""

from __future__ import annotations

import torch

from ...kernels import multi_tensor as ops
from ...kernels.expr import Pass
from ...optimizers.adagrad import adagrad
from ...optimizers.adam import adam
from ...optimizers.lamb import lamb_apply, lamb_direction, lamb_moments, trust_ratio
from ...optimizers.novograd import novograd
from ...optimizers.sgd import momentum_sgd, sgd
from .arguments import Lists, Number, corrections, row_by_row, skip_of, take, unscale

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

_ADAM = Pass("adam", adam)
_ADAGRAD = Pass("adagrad", adagrad)
_SGD = Pass("sgd", sgd)
_MOMENTUM_SGD = Pass("momentum_sgd", momentum_sgd)
_NOVOGRAD = Pass("novograd", novograd)
_LAMB_MOMENTS = Pass("lamb_moments", lamb_moments, squares=("weight", "direction"))
_LAMB_APPLY = Pass("lamb_apply", lamb_apply)
_LAMB_DIRECTION = Pass("lamb_direction", lamb_direction)


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
    grads, params, buffers = take(lists, 3, 4)[:3]
    skip = skip_of(noop_flag, params)
    late = wd_after_momentum and momentum
    scalars: dict[str, Number] = {"factor": scale, "l2": 0.0 if late else wd, "lr": lr}
    if momentum:
        scalars |= {
            "old": 0.0 if first_run else momentum,
            "new": 1.0 if first_run else 1.0 - dampening,
            "direct": 1.0 if nesterov else 0.0,
            "smoothed": momentum if nesterov else 1.0,
            "late_l2": wd if late else 0.0,
        }
        ops.run(_MOMENTUM_SGD, scalars, None, skip=skip, grad=grads, param=params, momentum_buffer=buffers)
    else:
        ops.run(_SGD, scalars, None, skip=skip, grad=grads, param=params)
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
    _adam(noop_flag, take(lists, 4), lr, beta1, beta2, eps, step, mode, bias_correction, weight_decay)


def multi_tensor_adam_capturable(
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
    inv_scale: Number,
) -> None:
    """``multi_tensor_adam`` that multiplies the gradients by ``inv_scale`` first, and leaves them so. Obeys."""
    found = take(lists, 4)
    unscale(noop_flag, found[0], inv_scale)
    _adam(noop_flag, found, lr, beta1, beta2, eps, step, mode, bias_correction, weight_decay)


def multi_tensor_adam_capturable_master(
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
    inv_scale: Number,
) -> None:
    """``multi_tensor_adam_capturable`` with a fifth list of fp32 masters, which the parameters follow. Obeys."""
    grads, params, exp_avg, exp_avg_sq, masters = take(lists, 5)
    unscale(noop_flag, grads, inv_scale)
    moved = [grads, masters, exp_avg, exp_avg_sq]
    _adam(noop_flag, moved, lr, beta1, beta2, eps, step, mode, bias_correction, weight_decay)
    ops.copy(masters, params)


def multi_tensor_adagrad(
    chunk_size: int,
    noop_flag: torch.Tensor,
    lists: Lists,
    lr: Number,
    eps: float,
    mode: int,
    weight_decay: float,
) -> None:
    """Adagrad for lists ``[gradients, parameters, sums]``; mode 0 is L2, 1 decays apart from the gradient. Obeys."""
    grads, params, sums = take(lists, 3)
    scalars = {
        "factor": 1.0,
        "l2": 0.0 if mode else weight_decay,
        "decay": 1.0 - lr * weight_decay if mode else 1.0,
        "rate": lr,
        "eps": eps,
    }
    ops.run(_ADAGRAD, scalars, None, skip=skip_of(noop_flag, params), grad=grads, param=params, sum=sums)


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
    """NovoGrad for lists ``[gradients, parameters, exp_avg]``; ``grad_norms``, [n], is moved on. Obeys.

    ``moment_mode`` 0 normalizes the gradient and decays before the first moment, 1 after it. ``norm_type`` is 2, or 0
    for the largest magnitude.
    """
    grads, params, exp_avg = take(lists, 3)
    skip = skip_of(noop_flag, params)
    before = grad_norms.double()
    if norm_type == 2:
        _, norms = ops.l2norm(grads, per_tensor=True)
        assert norms is not None
        after = (beta2 * before.square() + (1.0 - beta2) * norms.double().square()).sqrt()
    else:
        largest = [g.abs().amax() if g.numel() else g.new_zeros(()) for g in grads]
        after = beta2 * before + (1.0 - beta2) * torch.stack(largest).double()
    grad_norms.copy_(torch.where(skip != 0, before, after))
    first, second = corrections(beta1, beta2, step, bias_correction)
    denominator = after * second + eps
    inside = moment_mode == 0
    numbers = {
        "factor": 1.0 / denominator if inside else torch.ones_like(denominator),
        "rate": torch.as_tensor(lr * first) * (torch.ones_like(denominator) if inside else 1.0 / denominator),
    }
    scalars = {
        "l2": weight_decay if inside else 0.0,
        "beta1": beta1,
        "new1": 1.0 - beta1 if grad_averaging else 1.0,
        "decay": 1.0 if inside else 1.0 - lr * weight_decay,
    }
    row_by_row(_NOVOGRAD, scalars, numbers, skip, grad=grads, param=params, exp_avg=exp_avg)


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
    grads, params, exp_avg, exp_avg_sq = take(lists, 4)
    skip = skip_of(noop_flag, params)
    norm, limit = (torch.as_tensor(x, dtype=torch.float64) for x in (global_grad_norm, max_grad_norm))
    norm, limit = norm.reshape(()), limit.reshape(()).to(norm.device)
    scale, root = corrections(beta1, beta2, step, bias_correction)
    shared: dict[str, Number] = {"scale": scale, "root": root, "eps": eps, "decay": weight_decay if mode else 0.0}
    moments: dict[str, Number] = {
        "factor": torch.where((limit > 0) & (norm > limit), limit / norm, 1.0),
        "l2": 0.0 if mode else weight_decay,
        "beta1": beta1,
        "new1": 1.0 - beta1 if grad_averaging else 1.0,
        "beta2": beta2,
        "new2": 1.0 - beta2,
    }
    state = {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    sums = ops.run(_LAMB_MOMENTS, {**shared, **moments}, None, skip=skip, grad=grads, param=params, **state)
    rate = torch.as_tensor(lr, dtype=torch.float64).expand(len(params)).clone()
    for rows, squares in sums:
        weight, direction = squares.sqrt()
        if weight_decay or use_nvlamb:
            rate[rows] *= trust_ratio(weight, direction).to(rate.device)
    row_by_row(_LAMB_APPLY, shared, {"rate": rate}, skip, param=params, **state)


def multi_tensor_lamb_mp(
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
    use_nvlamb: bool | None,
    found_inf: torch.Tensor,
    inv_scale: Number,
) -> None:
    """``multi_tensor_lamb`` with ``found_inf``, ``inv_scale`` and, as a fifth list, 16-bit copies. Obeys both flags."""
    found = take(lists, 4, 5)
    flag = torch.maximum(noop_flag.float().reshape(()), found_inf.to(noop_flag.device).float().reshape(()))
    unscale(flag, found[0], inv_scale)
    numbers = (lr, beta1, beta2, eps, step, bias_correction, weight_decay, grad_averaging, mode)
    multi_tensor_lamb(chunk_size, flag, found[:4], *numbers, global_grad_norm, max_grad_norm, use_nvlamb)
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
    """The first half of LAMB for lists ``[gradients, parameters, exp_avg, exp_avg_sq, updates]``, the last written.

    ``per_tensor_decay`` has shape [n]; ``step`` counts from 0; the gradients are clipped by their norm. Runs on
    whatever the flag says, on any device.
    """
    grads, params, exp_avg, exp_avg_sq, updates = take(lists, 5)
    scale, root = corrections(beta1, beta2, step + 1, 1)
    norm = torch.as_tensor(global_grad_norm, dtype=torch.float64).reshape(())
    shared = {
        "factor": torch.where(norm > max_global_grad_norm, max_global_grad_norm / norm, 1.0),
        "l2": 0.0,
        "beta1": beta1,
        "new1": 1.0 - beta1,
        "beta2": beta2,
        "new2": 1.0 - beta2,
        "scale": scale,
        "root": root,
        "eps": epsilon,
    }
    state = {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq, "update": updates}
    row_by_row(_LAMB_DIRECTION, shared, {"decay": per_tensor_decay}, None, grad=grads, param=params, **state)


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
    """The second half, for lists ``[parameters, updates]`` and their norms, each [n]: the step. As the first, always.

    The rate is ``lr`` times the ratio of the norms where there is weight decay or ``use_nvlamb``, else ``lr``.
    """
    params, updates = take(lists, 2)
    rate = trust_ratio(per_tensor_param_norm, per_tensor_update_norm) * lr
    if not (weight_decay or use_nvlamb):
        rate = torch.full_like(rate, lr)
    row_by_row(ops.AXPBY, {"a": 1.0}, {"b": -rate}, None, x=params, y=updates, target=params)


def _adam(
    flag: torch.Tensor,
    lists: list[list[torch.Tensor]],
    lr: Number,
    beta1: float,
    beta2: float,
    eps: float,
    step: Number,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    grads, params, exp_avg, exp_avg_sq = lists
    lr = lr.reshape(()) if isinstance(lr, torch.Tensor) else lr
    first, root = corrections(beta1, beta2, step, bias_correction)
    scalars = {
        "factor": 1.0,
        "l2": 0.0 if mode else weight_decay,
        "decay": 1.0 - lr * weight_decay if mode else 1.0,
        "new1": 1.0 - beta1,
        "beta2": beta2,
        "new2": 1.0 - beta2,
        "step_size": lr * first,
        "root": root,
        "eps": eps,
    }
    state = {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    ops.run(_ADAM, scalars, None, skip=skip_of(flag, params), grad=grads, param=params, **state)
