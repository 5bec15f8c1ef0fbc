"""Automatic sparsity: weights of which two of each four are zero, kept so while training."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .....core.errors import ArgumentValueError, UsageError
from .sparse_masklib import create_mask

__all__ = ["ASP"]

logger = logging.getLogger("halfstep")

_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass
class _Sparse:
    """A weight that is pruned, with the names of its mask and of what was pruned among the module's buffers."""

    module: nn.Module
    name: str

    @property
    def weight(self) -> torch.Tensor:
        return self.module.get_parameter(self.name)

    @property
    def mask(self) -> torch.Tensor:
        return self.module.get_buffer(f"__{self.name}_mma_mask")

    @property
    def pruned(self) -> torch.Tensor | None:
        return getattr(self.module, f"__{self.name}_mma_pruned_p", None)


class ASP:
    """Prunes a model to two of four weights, and keeps it so; a namespace with the state of one model, as in Apex.

    The masks are buffers of the modules, under Apex's names. Channels are never permuted to lose less.
    """

    _model: nn.Module | None = None
    _optimizer: torch.optim.Optimizer | None = None
    _calculate: Callable[[torch.Tensor], torch.Tensor] | None = None
    _sparse: list[_Sparse] = []  # noqa: RUF012 - replaced, never changed

    @classmethod
    def init_model_for_pruning(
        cls,
        model: nn.Module,
        mask_calculator: str | Callable[[torch.Tensor], torch.Tensor] = "m4n2_1d",
        verbosity: int = 3,
        whitelist: Sequence[type[nn.Module]] = _LAYERS,
        allowed_layer_names: Sequence[str] | None = None,
        disallowed_layer_names: Sequence[str] = (),
        allow_recompute_mask: bool = False,
        custom_layer_dict: Mapping[type[nn.Module], Sequence[str]] | None = None,
        allow_permutation: bool = True,
    ) -> None:
        """Give a model masks that keep everything, until ``compute_sparse_masks``.

        Weights of fewer than two dimensions, or whose first two sizes are no multiples of 8 and 16, are left out.

        Args:
            model: any module.
            mask_calculator: "m4n2_1d", or a function of a weight that returns its mask.
            verbosity: from 2 on, the logger "halfstep" says what is pruned.
            whitelist: the types of module whose weights are pruned.
            allowed_layer_names: if given, only these modules.
            disallowed_layer_names: not these modules.
            allow_recompute_mask: keep what is pruned, in CPU memory, so that it can come back.
            custom_layer_dict: for more types of module, the names of their weights.
            allow_permutation: not done; a warning says so where it is asked for.

        Raises:
            UsageError: if there is a model already.
            ArgumentValueError: for an unknown pattern or type of module.
        """
        if cls._model is not None:
            raise UsageError("ASP has a model already; Apex's ASP prunes one model in a process.")
        if isinstance(mask_calculator, str):
            create_mask(torch.zeros(4, dtype=torch.float32), mask_calculator)  # refuses what it does not have
            mask_calculator = functools.partial(create_mask, pattern=mask_calculator)
        if allow_permutation:
            logger.warning("ASP: channels are not permuted before pruning; this is allow_permutation=False.")
        custom = dict(custom_layer_dict or {})
        names: dict[type[nn.Module], Sequence[str]] = {**{kind: ["weight"] for kind in _LAYERS}, **custom}
        kinds = (*whitelist, *custom)
        unknown = [kind.__name__ for kind in kinds if kind not in names]
        if unknown:
            raise ArgumentValueError(f"ASP does not know the weights of {unknown}; name them in custom_layer_dict.")
        found = []
        for name, module in model.named_modules():
            allowed = allowed_layer_names is None or name in allowed_layer_names
            kind = next((kind for kind in kinds if isinstance(module, kind)), None)
            if kind is None or not allowed or name in disallowed_layer_names:
                continue
            params = dict(module.named_parameters(recurse=False))
            found += [
                _Sparse(module, one) for one in names[kind] if one in params and _fits(params[one], f"{name}.{one}")
            ]
        for sparse in found:
            weight = sparse.weight
            sparse.module.register_buffer(f"__{sparse.name}_mma_mask", torch.ones_like(weight, dtype=torch.bool))
            if allow_recompute_mask:
                sparse.module.register_buffer(f"__{sparse.name}_mma_pruned_p", torch.zeros_like(weight).cpu())
        if verbosity >= 2:
            logger.info("ASP: %d weights will be sparse.", len(found))
        cls._model, cls._calculate, cls._sparse = model, mask_calculator, found

    @classmethod
    def already_init_asp_model(cls) -> bool:
        """True if there is a model."""
        return cls._model is not None

    @classmethod
    def init_optimizer_for_pruning(cls, optimizer: torch.optim.Optimizer) -> None:
        """Let the steps of an optimizer keep pruned weights at zero.

        Raises:
            UsageError: without a model, or if there is an optimizer already.
        """
        if cls._model is None:
            raise UsageError("Call ASP.init_model_for_pruning first.")
        if cls._optimizer is not None:
            raise UsageError("ASP has an optimizer already.")
        cls._optimizer = optimizer
        step = optimizer.step

        @functools.wraps(step)
        def pruned_step(*args: Any, **kwargs: Any) -> Any:
            cls._mask([s for s in cls._sparse if s.weight.grad is not None], of_grads=True)
            result = step(*args, **kwargs)
            cls._mask(cls._sparse)
            return result

        optimizer.step = pruned_step  # type: ignore[method-assign]

    @classmethod
    @torch.no_grad()
    def compute_sparse_masks(cls) -> None:
        """Compute the masks from the weights as they are, and prune.

        Raises:
            UsageError: if the model is sparse and what was pruned was not kept.
        """
        for sparse in cls._sparse:
            assert cls._calculate is not None
            cls._restore(sparse)
            sparse.mask.copy_(cls._calculate(sparse.weight))
            if sparse.pruned is not None:
                sparse.pruned.copy_(sparse.weight * ~sparse.mask)
            cls._mask([sparse])

    @classmethod
    @torch.no_grad()
    def restore_pruned_weights(cls) -> None:
        """Take back what was pruned.

        Raises:
            UsageError: if it was not kept.
        """
        for sparse in cls._sparse:
            cls._restore(sparse)

    @classmethod
    def is_sparsity_enabled(cls) -> bool:
        """True if the weights are pruned.

        Raises:
            UsageError: if some are and some are not.
        """
        shares = {round(sparse.mask.float().mean().item(), 2) for sparse in cls._sparse}
        if shares <= {1.0}:
            return False
        if shares == {0.5}:
            return True
        raise UsageError(f"The shares of weights that are kept are {sorted(shares)}; load a whole checkpoint.")

    @classmethod
    def prune_trained_model(cls, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Prune the linear and the two-dimensional convolutional layers of a model, and keep them so."""
        cls.init_model_for_pruning(model, verbosity=2, whitelist=[nn.Linear, nn.Conv2d], allow_permutation=False)
        cls.init_optimizer_for_pruning(optimizer)
        cls.compute_sparse_masks()

    # ---- inside

    @classmethod
    @torch.no_grad()
    def _mask(cls, sparse: Sequence[_Sparse], of_grads: bool = False) -> None:
        for one in sparse:
            tensor = one.weight.grad if of_grads else one.weight
            assert tensor is not None
            tensor.masked_fill_(~one.mask, 0.0)  # also where the weight is not finite

    @staticmethod
    def _restore(sparse: _Sparse) -> None:
        if sparse.mask.all():
            return
        if sparse.pruned is None:
            raise UsageError("What was pruned was not kept; pass allow_recompute_mask=True to init_model_for_pruning.")
        sparse.weight.add_(sparse.pruned.to(sparse.weight))
        sparse.mask.fill_(True)
        sparse.pruned.zero_()


def _fits(weight: torch.Tensor, name: str) -> bool:
    """True if the sparse units of a GPU take a weight of this shape."""
    fits = weight.requires_grad and weight.dim() > 1 and weight.shape[0] % 8 == weight.shape[1] % 16 == 0
    if not fits:
        logger.info("ASP: %s of shape %s stays dense.", name, tuple(weight.shape))
    return fits
