"""The rules of ``amp.auto_cast(products=)``: calls of products in a block round their operands to formats."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..casting.dispatch import CastMode, Rule
from ..casting.emulation import has_own_ops
from ..core.oplists.names import spellings
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
    "addmm": (torch.addmm, Tensor.addmm),
    "baddbmm": (torch.baddbmm, Tensor.baddbmm),
    "grouped_mm": tuple(func for func, (name, _) in spellings().items() if name == "grouped_mm"),
    "scaled_dot_product_attention": (F.scaled_dot_product_attention,),
}

_ARGUMENTS = {
    "linear": ("input", "weight", "bias"),
    "addmm": ("input", "mat1", "mat2"),
    "baddbmm": ("input", "batch1", "batch2"),
    "grouped_mm": ("mat_a", "mat_b", "offs", "bias", "out_dtype"),
    "scaled_dot_product_attention": ("query", "key", "value", "attn_mask", "dropout_p", "is_causal"),
}
"""The positional arguments of the functions that do not take ``(input, other)``; the methods call ``input`` self."""

Divisors = tuple[int, int]
"""The numbers that divide the inputs and the outputs of a product if blocks fill them."""

_DIMENSIONS = {"mm": (2, 2), "bmm": (3, 3), "addmm": (2, 2), "baddbmm": (3, 3)}
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
        func: functools.partial(_rule, name, recipe.products, divisors, _names_of(name), table.get(func))
        for name, funcs in _OPS.items()
        if recipe.attention or name != "scaled_dot_product_attention"
        for func in funcs
    }


def _rule(
    name: str,
    products: Products,
    divisors: Divisors,
    names: tuple[frozenset[str], frozenset[str]],
    otherwise: Rule | None,
    mode: CastMode,
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Round the operands of one call of a product."""
    given = dict(zip(_ARGUMENTS.get(name, ("input", "other")), args, strict=False)) | kwargs
    compute: Callable[..., Tensor | None] = _COMPUTE.get(name, _product)
    required, known = names
    found = compute(name, products, divisors, **given) if required <= given.keys() <= known else None
    if found is not None:
        return found
    return func(*args, **kwargs) if otherwise is None else otherwise(mode, func, args, kwargs)


def _names_of(name: str) -> tuple[frozenset[str], frozenset[str]]:
    """The arguments that a function needs, and all that its rule knows; torch says what is wrong with others."""
    params = list(inspect.signature(_COMPUTE.get(name, _product)).parameters.values())[3:]
    needed = frozenset(each.name for each in params if each.default is each.empty)
    return needed, frozenset(each.name for each in params)


def _product(name: str, products: Products, divisors: Divisors, input: Any, other: Any) -> Tensor | None:
    """``matmul``, ``mm`` and ``bmm``; None where the formats do not fit."""
    if not _fits(input, other, name, divisors):
        return None
    return matmul(input, other, products, result_dtype(input, other))


def _linear(name: str, products: Products, divisors: Divisors, input: Any, weight: Any, bias: Any = None) -> Any:
    if not _fits(input, weight, name, divisors):
        return None
    return linear(input, weight, bias, products, result_dtype(input, weight))


def _added(
    name: str,
    products: Products,
    divisors: Divisors,
    input: Any,
    mat1: Any = None,
    mat2: Any = None,
    *,
    batch1: Any = None,
    batch2: Any = None,
    beta: Any = 1,
    alpha: Any = 1,
) -> Tensor | None:
    """``addmm`` and ``baddbmm``: the sum is in fp32, and rounded once."""
    a, b = (mat1, mat2) if name == "addmm" else (batch1, batch2)
    if not _fits(a, b, name, divisors) or not isinstance(input, Tensor):
        return None
    product = alpha * matmul(a, b, products, torch.float32)
    summed: Tensor = product + beta * input if beta else product
    return summed.to(result_dtype(a, b))


def _grouped(
    name: str,
    products: Products,
    divisors: Divisors,
    mat_a: Any,
    mat_b: Any,
    *,
    offs: Any = None,
    bias: Any = None,
    out_dtype: Any = None,
) -> Tensor | None:
    """``grouped_mm`` of the tokens of each expert with its matrix: each group has scales of its own.

    The ends of the groups are read from the device. Products of two matrices, which torch computes in backward
    passes, stay as they are.
    """
    if not _fits(mat_a, mat_b, name, divisors) or bias is not None or mat_b.dim() != 3:
        return None
    dtype = out_dtype or result_dtype(mat_a, mat_b)
    if mat_a.dim() == 3:
        return matmul(mat_a, mat_b, products, dtype) if offs is None and len(mat_a) == len(mat_b) else None
    if offs is None or len(offs) != len(mat_b):
        return None
    ends = offs.tolist()
    rows = [mat_a[start:end] for start, end in itertools.pairwise((0, *ends))]
    found = [linear(part, each.mT, None, products, dtype) for part, each in zip(rows, mat_b.unbind(), strict=True)]
    rest = mat_a.new_zeros(len(mat_a) - ends[-1], mat_b.shape[-1], dtype=dtype)
    return torch.cat([*found, rest])


def _attention(
    name: str,
    products: Products,
    divisors: Divisors,
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    """Attention with both products rounded: queries with keys, and an fp32 softmax with values."""
    if not all(isinstance(each, Tensor) for each in (query, key, value)) or (is_causal and attn_mask is not None):
        return None
    if enable_gqa:
        key, value = (each.repeat_interleave(query.shape[-3] // each.shape[-3], -3) for each in (key, value))
    if not (_fits(query, key.mT, "matmul", divisors) and _fits(key.mT, value, "matmul", divisors)):
        return None
    dtype = result_dtype(query, key)
    scores = matmul(query, key.mT, products, torch.float32) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], device=scores.device, dtype=torch.bool).tril()
    if attn_mask is not None:
        is_choice = attn_mask.dtype is torch.bool
        scores = scores.masked_fill(~attn_mask, -torch.inf) if is_choice else scores + attn_mask
    weights = scores.softmax(-1).nan_to_num(0.0) if attn_mask is not None else scores.softmax(-1)
    return matmul(F.dropout(weights, dropout_p), value, products, dtype)


_COMPUTE: dict[str, Callable[..., Tensor | None]] = {
    "linear": _linear,
    **dict.fromkeys(("addmm", "baddbmm"), _added),
    "grouped_mm": _grouped,
    "scaled_dot_product_attention": _attention,
}


def _fits(a: Any, b: Any, name: str, divisors: Divisors) -> bool:
    """True if the operands of a call are matrices, or batches of them, whose sizes the blocks divide."""
    if not all(isinstance(t, Tensor) and t.is_floating_point() and t.layout is torch.strided for t in (a, b)):
        return False
    if torch.float64 in (a.dtype, b.dtype) or any(has_own_ops(t) or is_sharded(t) for t in (a, b)):
        return False
    if (a.dim(), b.dim()) != _DIMENSIONS.get(name, (a.dim(), b.dim())) or min(a.dim(), b.dim()) < 2:
        return False
    if (name == "linear" and b.dim() > 2) or (name in ("bmm", "baddbmm") and a.shape[0] != b.shape[0]):
        return False
    rows, columns = b.shape[-2:] if name == "linear" else b.shape[-1:-3:-1]
    return bool(columns % divisors[0] == 0 and rows % divisors[1] == 0)
