"""``apex.multi_tensor_apply`` and ``amp_C``: the multi-tensor operations under the names and arguments Apex gave them.

Each takes ``(chunk_size, noop_flag, tensor_lists, *args)``. ``chunk_size`` is accepted and not needed. ``noop_flag`` is
a tensor with one element: operations that check set it to 1 if they read inf or NaN, operations that obey change
nothing where it is not 0. Nothing is read back from the device. Lists may mix dtypes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .core.errors import ArgumentTypeError, ArgumentValueError
from .kernels import ops
from .kernels.expr import Pass
from .optimizers.adagrad import adagrad
from .optimizers.adam import adam
from .optimizers.lamb import lamb_apply, lamb_direction, lamb_moments, trust_ratio
from .optimizers.novograd import novograd
from .optimizers.sgd import momentum_sgd, sgd

__all__ = [
    "MultiTensorApply",
    "multi_tensor_adagrad",
    "multi_tensor_adam",
    "multi_tensor_adam_capturable",
    "multi_tensor_adam_capturable_master",
    "multi_tensor_applier",
    "multi_tensor_axpby",
    "multi_tensor_l2norm",
    "multi_tensor_l2norm_mp",
    "multi_tensor_l2norm_scale",
    "multi_tensor_lamb",
    "multi_tensor_lamb_mp",
    "multi_tensor_lamb_stage1_cuda",
    "multi_tensor_lamb_stage2_cuda",
    "multi_tensor_novograd",
    "multi_tensor_scale",
    "multi_tensor_sgd",
    "multi_tensor_unscale_l2norm",
    "update_scale_hysteresis",
]

Lists = Sequence[Sequence[torch.Tensor]]
Number = float | torch.Tensor

_ADAM = Pass("adam", adam)
_ADAGRAD = Pass("adagrad", adagrad)
_SGD = Pass("sgd", sgd)
_MOMENTUM_SGD = Pass("momentum_sgd", momentum_sgd)
_NOVOGRAD = Pass("novograd", novograd)
_LAMB_MOMENTS = Pass("lamb_moments", lamb_moments, squares=("weight", "direction"))
_LAMB_APPLY = Pass("lamb_apply", lamb_apply)
_LAMB_DIRECTION = Pass("lamb_direction", lamb_direction)


class MultiTensorApply:
    """Calls an operation with a chunk size, as ``multi_tensor_applier(op, noop_flag, lists, *args)``.

    Args:
        chunk_size: handed on.
    """

    available = True
    import_err: Exception | None = None

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size

    def __call__(self, op: Callable[..., Any], noop_flag_buffer: torch.Tensor, tensor_lists: Lists, *args: Any) -> Any:
        """``op(chunk_size, noop_flag_buffer, tensor_lists, *args)``."""
        return op(self.chunk_size, noop_flag_buffer, tensor_lists, *args)


multi_tensor_applier = MultiTensorApply(2048 * 32)
"""The one that scripts import."""


def multi_tensor_scale(chunk_size: int, noop_flag: torch.Tensor, lists: Lists, scale: Number) -> None:
    """``out = in * scale`` for lists ``[in, out]``. Checks."""
    sources, targets = _lists(lists, 2)
    with _Flag(noop_flag, sources) as found:
        ops.scale(sources, targets, scale, found)


def multi_tensor_axpby(
    chunk_size: int, noop_flag: torch.Tensor, lists: Lists, a: Number, b: Number, arg_to_check: int = -1
) -> None:
    """``out = a x + b y`` for lists ``[x, y, out]``. Checks x (0), y (1) or both (-1)."""
    xs, ys, targets = _lists(lists, 3)
    if arg_to_check not in (-1, 0, 1):
        raise ArgumentValueError(f"arg_to_check={arg_to_check!r} must be 0 (x), 1 (y) or -1 (both).")
    with _Flag(noop_flag, xs) as found:
        if arg_to_check == -1:
            ops.axpby(a, xs, b, ys, targets, found)
        else:
            ops.l2norm((xs, ys)[arg_to_check], found_inf=found)  # before the output, which may be one of them
            ops.axpby(a, xs, b, ys, targets)


def multi_tensor_l2norm(
    chunk_size: int, noop_flag: torch.Tensor, lists: Lists, per_tensor: bool | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The 2-norm of ``lists[0]`` as one vector, float32 of shape [1], and of each tensor, [n] or empty. Checks."""
    (tensors,) = _lists(lists, 1)
    with _Flag(noop_flag, tensors) as found:
        norm, each = ops.l2norm(tensors, per_tensor=bool(per_tensor), found_inf=found)
    return norm.reshape(1), norm.new_zeros(0) if each is None else each


def multi_tensor_l2norm_mp(
    chunk_size: int, noop_flag: torch.Tensor, lists: Lists, per_tensor: bool | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """``multi_tensor_l2norm`` that obeys: zeros where the flag was set before."""
    before = noop_flag.clone()
    norms = multi_tensor_l2norm(chunk_size, noop_flag, lists, per_tensor)
    norm, each = (torch.where(before.to(n.device) != 0, 0.0, n) for n in norms)
    return norm, each


def multi_tensor_l2norm_scale(
    chunk_size: int, noop_flag: torch.Tensor, lists: Lists, scale: Number, per_tensor: bool | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """``out = in * scale`` for lists ``[in, out]``, and the norms of ``out`` as ``multi_tensor_l2norm``. Checks."""
    multi_tensor_scale(chunk_size, noop_flag, lists, scale)
    return multi_tensor_l2norm(chunk_size, noop_flag, [lists[1]], per_tensor)


def multi_tensor_unscale_l2norm(
    chunk_size: int,
    noop_flag: torch.Tensor,
    lists: Lists,
    inv_scale: torch.Tensor,
    per_tensor: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norms of ``lists[0]`` times ``inv_scale``; the tensors stay as they are. Checks."""
    norm, each = multi_tensor_l2norm(chunk_size, noop_flag, lists, per_tensor)
    factor = inv_scale.to(norm).abs().reshape(())
    return norm * factor, each * factor


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
    grads, params, buffers = _lists(lists, 3, 4)[:3]
    skip = _skip(noop_flag, params)
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
    _adam(noop_flag, _lists(lists, 4), lr, beta1, beta2, eps, step, mode, bias_correction, weight_decay)


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
    found = _lists(lists, 4)
    _unscale(noop_flag, found[0], inv_scale)
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
    grads, params, exp_avg, exp_avg_sq, masters = _lists(lists, 5)
    _unscale(noop_flag, grads, inv_scale)
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
    grads, params, sums = _lists(lists, 3)
    scalars = {
        "factor": 1.0,
        "l2": 0.0 if mode else weight_decay,
        "decay": 1.0 - lr * weight_decay if mode else 1.0,
        "rate": lr,
        "eps": eps,
    }
    ops.run(_ADAGRAD, scalars, None, skip=_skip(noop_flag, params), grad=grads, param=params, sum=sums)


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
    grads, params, exp_avg = _lists(lists, 3)
    skip = _skip(noop_flag, params)
    before = grad_norms.double()
    if norm_type == 2:
        _, norms = ops.l2norm(grads, per_tensor=True)
        assert norms is not None
        after = (beta2 * before.square() + (1.0 - beta2) * norms.double().square()).sqrt()
    else:
        largest = [g.abs().amax() if g.numel() else g.new_zeros(()) for g in grads]
        after = beta2 * before + (1.0 - beta2) * torch.stack(largest).double()
    grad_norms.copy_(torch.where(skip != 0, before, after))
    first, second = _corrections(beta1, beta2, step, bias_correction)
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
    _rows(_NOVOGRAD, scalars, numbers, skip, grad=grads, param=params, exp_avg=exp_avg)


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
    grads, params, exp_avg, exp_avg_sq = _lists(lists, 4)
    skip = _skip(noop_flag, params)
    norm, limit = (torch.as_tensor(x, dtype=torch.float64) for x in (global_grad_norm, max_grad_norm))
    norm, limit = norm.reshape(()), limit.reshape(()).to(norm.device)
    scale, root = _corrections(beta1, beta2, step, bias_correction)
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
    _rows(_LAMB_APPLY, shared, {"rate": rate}, skip, param=params, **state)


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
    found = _lists(lists, 4, 5)
    flag = torch.maximum(noop_flag.float().reshape(()), found_inf.to(noop_flag.device).float().reshape(()))
    _unscale(flag, found[0], inv_scale)
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
    grads, params, exp_avg, exp_avg_sq, updates = _lists(lists, 5)
    scale, root = _corrections(beta1, beta2, step + 1, 1)
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
    _rows(_LAMB_DIRECTION, shared, {"decay": per_tensor_decay}, None, grad=grads, param=params, **state)


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
    params, updates = _lists(lists, 2)
    rate = trust_ratio(per_tensor_param_norm, per_tensor_update_norm) * lr
    if not (weight_decay or use_nvlamb):
        rate = torch.full_like(rate, lr)
    _rows(ops.AXPBY, {"a": 1.0}, {"b": -rate}, None, x=params, y=updates, target=params)


@torch.no_grad()
def update_scale_hysteresis(
    current_scale: torch.Tensor,
    growth_tracker: torch.Tensor,
    hysteresis_tracker: torch.Tensor,
    found_inf: torch.Tensor,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    hysteresis: int,
) -> torch.Tensor:
    """Move a loss scale in place, on its device; it backs off when ``hysteresis`` overflows are used up.

    A finite step fills ``hysteresis_tracker`` up again. ``halfstep.scaling.DynamicLossScale`` has the same rule with
    bounds.

    Returns:
        ``current_scale``.
    """
    bad = found_inf.reshape(()) != 0
    left = torch.where(bad, hysteresis_tracker - 1, hysteresis)
    good = torch.where(bad, 0, growth_tracker + 1)
    grows = ~bad & (good == growth_interval)
    grown = current_scale * growth_factor
    scale = torch.where(bad & (left <= 0), current_scale * backoff_factor, current_scale)
    scale = torch.where(grows & grown.isfinite(), grown, scale)
    current_scale.copy_(scale)
    growth_tracker.copy_(torch.where(grows, 0, good))
    hysteresis_tracker.copy_(left)
    return current_scale


# ---- inside


class _Flag:
    """A ``found_inf`` for the block, brought into Apex's integer flag when it ends."""

    def __init__(self, noop_flag: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
        self._flag = noop_flag
        self._found = torch.zeros((), device=tensors[0].device if tensors else noop_flag.device)

    def __enter__(self) -> torch.Tensor:
        return self._found

    def __exit__(self, *exc: object) -> None:
        self._flag.copy_(torch.maximum(self._flag, self._found.to(self._flag).expand_as(self._flag)))


def _lists(lists: Lists, *counts: int) -> list[list[torch.Tensor]]:
    if len(lists) not in counts:
        wanted = " or ".join(map(str, counts))
        raise ArgumentTypeError(f"This operation takes {wanted} lists of tensors, not {len(lists)}.")
    if len({len(tensors) for tensors in lists}) > 1:
        raise ArgumentValueError(f"The lists are of different lengths: {', '.join(str(len(t)) for t in lists)}.")
    return [list(tensors) for tensors in lists]


def _skip(flag: torch.Tensor, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return flag.to(tensors[0].device if tensors else flag.device, torch.float32).reshape(())


def _corrections(beta1: float, beta2: float, step: Number, corrected: int) -> tuple[Number, Number]:
    """What the first moment, and the root of the second, are to be multiplied by."""
    if not corrected:
        return 1.0, 1.0
    t = torch.as_tensor(step, dtype=torch.float64).reshape(())
    return (1.0 - beta1**t).reciprocal(), (1.0 - beta2**t).rsqrt()


def _unscale(flag: torch.Tensor, grads: list[torch.Tensor], inv_scale: Number) -> None:
    factor = inv_scale.reshape(()) if isinstance(inv_scale, torch.Tensor) else inv_scale
    ops.run(ops.SCALE, {"factor": factor}, None, skip=_skip(flag, grads), source=grads, target=grads)


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
    first, root = _corrections(beta1, beta2, step, bias_correction)
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
    ops.run(_ADAM, scalars, None, skip=_skip(flag, params), grad=grads, param=params, **state)


def _rows(
    pass_: Pass,
    scalars: dict[str, Any],
    numbers: dict[str, torch.Tensor],
    skip: torch.Tensor | None,
    **columns: list[torch.Tensor],
) -> None:
    """A pass with numbers of shape [rows], row by row of the lists."""
    for i in range(len(next(iter(columns.values())))):
        row = {name: [tensors[i]] for name, tensors in columns.items()}
        ops.run(pass_, {**scalars, **{name: value[i] for name, value in numbers.items()}}, None, skip=skip, **row)
