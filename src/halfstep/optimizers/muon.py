"""Muon for the matrices of a model and AdamW for all other parameters, in one optimizer."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..core.checks import arguments, check_kind, check_number
from ..core.errors import ArgumentTypeError, ArgumentValueError, UsageError
from ..kernels.expr import elementwise_kernel
from ..kernels.shards import domain_of
from ..torch_internals.torch_compat import is_flattened
from .adam import adam, adam_scalars
from .base import FusedOptimizer, Hyper, Step
from .newton_schulz import counts_of, matrix_shape, parts_of, product_dtype, unit_singular_values
from .options import CommonOptions
from .param_rows import FIRST_MOMENT, NUMBER, SECOND_MOMENT, ParamRows, StateLayout

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["FusedMuon", "UseMuon", "hidden_matrix", "muon_apply", "muon_direction"]

UseMuon = bool | Callable[[str, torch.Tensor], bool]
"""The rule of a group: True for Muon, False for AdamW, or a function of a parameter's name and tensor."""

_EMBEDDINGS = frozenset((
    "embed", "embedding", "embeddings", "embed_tokens", "embed_positions", "tok_embeddings", "token_embedding",
    "word_embeddings", "position_embeddings", "wte", "wpe", "patch_embed", "pos_embed",
))  # fmt: skip
_HEADS = frozenset(("head", "lm_head", "classifier", "output", "embed_out", "score", "shared"))
_BATCH = 1 << 24  # elements; larger batches of matrices are not faster, and their copies need memory


def hidden_matrix(name: str, param: torch.Tensor) -> bool:
    """True if a parameter is a matrix, or a stack of them, between hidden layers: the default rule of ``FusedMuon``.

    This holds for two or more dimensions, unless a part of the name between dots denotes an embedding
    (``embed_tokens``, ``wte`` and so on), or the name of the owning module denotes a head (``lm_head``,
    ``classifier``).

    Args:
        name: the name from ``model.named_parameters()``.
        param: the parameter.

    Raises:
        ArgumentValueError: for a matrix without a name.
    """
    if param.dim() < 2:
        return False
    if not name:
        raise ArgumentValueError(
            f"FusedMuon: a parameter of shape {tuple(param.shape)} has no name, so nothing tells whether it is an "
            "embedding or a head, which are not for Muon. Pass model.named_parameters(), or groups with "
            "use_muon=True or False."
        )
    parts = name.split(".")
    return _EMBEDDINGS.isdisjoint(parts) and _HEADS.isdisjoint(parts[-2:-1])


@elementwise_kernel()
def muon_direction(
    grad: Any, momentum_buffer: Any, direction: Any,
    *, factor: Any, new: Any, direct: Any, smoothed: Any,
) -> dict[str, Any]:  # fmt: skip
    """Update the momentum and compute the direction, whose singular values are then made 1: Muon's first pass."""
    grad = grad * factor
    momentum_buffer = momentum_buffer + (grad - momentum_buffer) * new
    return {"momentum_buffer": momentum_buffer, "direction": grad * direct + momentum_buffer * smoothed}


@elementwise_kernel()
def muon_apply(param: Any, direction: Any, *, decay: Any, rate: Any) -> dict[str, Any]:
    """Apply weight decay and the step: Muon's second pass."""
    return {"param": param * decay - direction * rate}


class FusedMuon(FusedOptimizer):
    """``torch.optim.Muon`` for the weights of hidden layers, and AdamW for all other parameters.

    Muon (K. Jordan et al., https://kellerjordan.github.io/posts/muon/) makes the singular values of its momentum about
    1 before it steps. One pass unscales, clips and adds to the momentum, a few batched products serve all weights of a
    shape, and one pass writes weights and masters.

    A group of parameters without ``use_muon`` is split into two by the rule, each with its ``use_muon``, which
    ``print(optimizer)`` shows. A weight of three dimensions is a stack of matrices, such as experts. A weight of more
    dimensions is one matrix of ``shape[0]`` rows. The weight of a 1-d convolution looks like a stack but is not one:
    set ``use_muon=False`` for it.

    State: ``momentum_buffer`` as in torch's Muon; ``step``, ``exp_avg`` and ``exp_avg_sq`` as in torch's AdamW.

    Args:
        params: named parameters (``model.named_parameters()``), parameters, or groups of them.
        lr: learning rate of both parts, a number or 0-dim tensor. See ``adjust_lr_fn``.
        weight_decay: decoupled weight decay coefficient.
        momentum: momentum factor.
        nesterov: look ahead by one momentum step.
        ns_coefficients: a, b and c of the Newton-Schulz iteration.
        eps: the minimum norm by which the momentum is divided.
        ns_steps: number of iterations; below 100.
        adjust_lr_fn: the factor for the learning rate of a matrix of A rows and B columns. "original" and None:
            sqrt(max(1, A / B)). "match_rms_adamw": 0.2 * sqrt(max(A, B)), with which one rate suits Muon and AdamW
            (Liu et al., arXiv 2502.16982).
        use_muon: the rule: True, False, or a function of name and parameter. A group may have its own.
        betas: ``betas`` of AdamW.
        adam_eps: ``eps`` of AdamW.
        ns_dtype: dtype of the products; None is bfloat16 on a device with units for it, and float32 elsewhere.
        set_grad_none: the default of ``zero_grad(set_to_none=...)``.
        **common: the options that all fused optimizers share; see ``CommonOptions``.

    Raises:
        ArgumentValueError: for a value out of range, a vector with ``use_muon=True``, or a matrix without a name where
            the default rule is to decide.
        ArgumentTypeError: for a value of the wrong type.
        UsageError: from a step, for a matrix that is cut into shards.
    """

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.775, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        use_muon: UseMuon = hidden_matrix,
        betas: tuple[float, float] = (0.9, 0.95),
        adam_eps: float = 1e-8,
        ns_dtype: torch.dtype | None = None,
        set_grad_none: bool = True,
        **common: Unpack[CommonOptions],
    ) -> None:
        super().__init__(**arguments(locals()))

    def add_param_group(self, param_group: Hyper) -> None:
        """Add a group, or the two into which its rule splits it; missing options get their defaults.

        Raises:
            ArgumentValueError, ArgumentTypeError: see the class. No group has been added then.
        """
        rule = self.defaults.get("use_muon", True)
        if not isinstance(param_group, dict) or "params" not in param_group:
            super().add_param_group(param_group)
            return
        rule = param_group.get("use_muon", rule)
        given = param_group["params"]
        given = [given] if isinstance(given, torch.Tensor) else given if isinstance(given, set) else list(given)
        if not callable(rule):
            super().add_param_group({**param_group, "params": given})
            return
        chosen = [bool(rule(*(each if isinstance(each, tuple) else ("", each)))) for each in given]
        before = len(self.param_groups)
        try:
            for use_muon in dict.fromkeys((True, False)) if given else (True,):
                part = [each for each, choice in zip(given, chosen, strict=True) if choice is use_muon]
                if part or not given:
                    super().add_param_group({**param_group, "params": part, "use_muon": use_muon})
        except (TypeError, ValueError):
            del self.param_groups[before:]
            raise

    def __setstate__(self, state: dict[str, Any]) -> None:
        for group in state.get("param_groups", ()):
            group.setdefault("use_muon", True)  # missing in states of torch's Muon
        super().__setstate__(state)

    def _check(self, group: Hyper) -> None:
        super()._check(group)
        rule, kind, dtype = group.get("use_muon", True), group["adjust_lr_fn"], group.get("ns_dtype")
        if not callable(rule) and not isinstance(rule, bool):
            raise ArgumentTypeError(f"use_muon={rule!r} must be True, False, or a function of name and parameter.")
        if kind not in (None, "original", "match_rms_adamw"):
            raise ArgumentValueError(f"adjust_lr_fn={kind!r} must be 'original', 'match_rms_adamw' or None.")
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ArgumentTypeError(f"ns_dtype={dtype!r} must be a floating-point torch.dtype or None.")
        check_kind("ns_steps", group["ns_steps"], int, "an int")
        check_number("ns_steps", group["ns_steps"], below=100)
        if len(group["ns_coefficients"]) != 3:
            raise ArgumentValueError(f"ns_coefficients={group['ns_coefficients']!r} must be three numbers.")
        if rule is True:
            for param in group.get("params", ()):
                _check_matrix(param[1] if isinstance(param, tuple) else param)

    def _layout(self, group: Hyper) -> StateLayout:
        if self._takes_muon(group):
            return {"momentum_buffer": FIRST_MOMENT}
        return {"step": NUMBER, "exp_avg": FIRST_MOMENT, "exp_avg_sq": SECOND_MOMENT}

    def _takes_muon(self, group: Hyper) -> bool:
        """True if the parameters of a group take Muon: all groups of torch's Muon do."""
        return self._groups_of_torch or bool(group["use_muon"])

    def _marks(self, group: Hyper, params: Sequence[torch.Tensor]) -> list[Hashable]:
        marks = super()._marks(group, params)
        if not self._takes_muon(group):
            return marks
        filled: Counter[Hashable] = Counter()
        for i, param in enumerate(params):
            if param.grad is not None:
                key = marks[i], matrix_shape(param.shape)
                marks[i] = *key, filled[key] // _BATCH
                filled[key] += param.numel()
        return marks

    def _complete_state(self, group: Hyper, params: Iterable[torch.Tensor]) -> None:
        for param in params if self._takes_muon(group) else ():
            _check_matrix(param)
            if domain_of(param):
                raise UsageError(
                    f"FusedMuon: a matrix of shape {tuple(param.shape)} is cut into shards, and Muon needs whole "
                    "ones. Use torch.optim.Muon for sharded matrices, which gathers them, or use_muon=False."
                )
        super()._complete_state(group, params)

    def _update(self, group: Hyper, rows: ParamRows, step: Step) -> None:
        if not self._takes_muon(group):
            hyper = {**group, "eps": group["adam_eps"], "decoupled_weight_decay": True}
            t = step.t if isinstance(group["lr"], torch.Tensor) else step.t_on_host
            rows.launch(adam, adam_scalars(hyper, t, step.factor, of_torch=True), step.skip)
            return
        momentum, nesterov, lr, weights = group["momentum"], group["nesterov"], group["lr"], rows.weights
        shape = matrix_shape(weights[0].shape)
        dtype = product_dtype(weights[0], group.get("ns_dtype"))
        stack = torch.empty(sum(counts_of(weights)), *shape, dtype=dtype, device=rows.device)
        smoothing = {
            "factor": step.factor,
            "new": 1.0 - momentum,
            "direct": 1.0 - momentum if nesterov else 0.0,
            "smoothed": momentum if nesterov else 1.0,
        }
        rows.launch(muon_direction, smoothing, step.skip, beside={"direction": parts_of(stack, weights)})
        stack = unit_singular_values(stack, group["ns_coefficients"], group["ns_steps"], group["eps"])
        rates = {"decay": 1.0 - lr * group["weight_decay"], "rate": lr * _rate(group, *shape)}
        rows.launch(muon_apply, rates, step.skip, beside={"direction": parts_of(stack.contiguous(), weights)})


def _rate(group: Hyper, rows: int, columns: int) -> float:
    """Compute the factor for the learning rate of a matrix."""
    if group["adjust_lr_fn"] == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1.0, rows / columns)) if columns else 1.0


def _check_matrix(param: torch.Tensor) -> None:
    if param.dim() < 2:
        cut = " FSDP1 has flattened it; FusedMuon needs whole matrices." if is_flattened(param) else ""
        raise ArgumentValueError(
            f"FusedMuon: a parameter of shape {tuple(param.shape)} is in a group with use_muon=True, which is for "
            f"matrices.{cut} Put it into a group with use_muon=False, where AdamW steps it."
        )
