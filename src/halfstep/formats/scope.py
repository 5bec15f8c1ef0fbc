"""The rules of ``amp.auto_cast(products=)``: calls of products in a block round their operands to formats."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..casting.dispatch import CastMode, Rule
from ..casting.emulation import has_own_ops
from ..kernels.shards import is_sharded
from .layers import result_dtype, set_products
from .products import linear, matmul
from .recipe import Products, Recipe

__all__ = ["rules_of_products", "set_products"]

_OPS = {
    "linear": (F.linear,),
    "matmul": (torch.matmul, Tensor.matmul, Tensor.__matmul__),
    "mm": (torch.mm, Tensor.mm),
    "bmm": (torch.bmm, Tensor.bmm),
}

_DIMENSIONS = {"mm": (2, 2), "bmm": (3, 3)}
"""The dimensions of both operands, of which torch refuses others."""


def rules_of_products(text: str, table: Mapping[Any, Rule]) -> dict[Callable[..., Any] | str, Rule]:
    """Make the rules of the products under a recipe, of which each replaces a rule of a table.

    Args:
        text: the recipe.
        table: the rules of calls that the formats do not fit.
    """
    recipe = Recipe.parse(text)
    divisors = recipe.by_inputs, recipe.by_outputs
    return {
        func: functools.partial(_rule, name, recipe.products, divisors, table.get(func))
        for name, funcs in _OPS.items()
        for func in funcs
    }


def _rule(
    name: str,
    products: Products,
    divisors: tuple[int, int],
    otherwise: Rule | None,
    mode: CastMode,
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Round the operands of one call of a product."""
    given = (
        dict(zip(("input", "weight", "bias") if name == "linear" else ("input", "other"), args, strict=False)) | kwargs
    )
    bias = given.pop("bias", None)
    a, b = (*given.values(), None, None)[:2]
    if len(given) > 2 or not _fits(a, b, name, divisors):
        return func(*args, **kwargs) if otherwise is None else otherwise(mode, func, args, kwargs)
    dtype = result_dtype(a, b)
    return linear(a, b, bias, products, dtype) if name == "linear" else matmul(a, b, products, dtype)


def _fits(a: Any, b: Any, name: str, divisors: tuple[int, int]) -> bool:
    """True if the operands of a call are matrices, or batches of them, whose sizes the blocks divide."""
    if not all(isinstance(t, Tensor) and t.is_floating_point() and t.layout is torch.strided for t in (a, b)):
        return False
    if torch.float64 in (a.dtype, b.dtype) or any(has_own_ops(t) or is_sharded(t) for t in (a, b)):
        return False
    if (a.dim(), b.dim()) != _DIMENSIONS.get(name, (a.dim(), b.dim())) or min(a.dim(), b.dim()) < 2:
        return False
    if (name == "linear" and b.dim() > 2) or (name == "bmm" and a.shape[0] != b.shape[0]):
        return False
    rows, columns = b.shape[-2:] if name == "linear" else b.shape[-1:-3:-1]
    return bool(columns % divisors[0] == 0 and rows % divisors[1] == 0)
