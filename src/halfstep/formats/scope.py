"""The rules of ``amp.auto_cast(products=)``: calls of products in a block round their operands to formats."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..casting.dispatch import CastMode, Rule
from ..casting.emulation import has_own_ops
from ..core.oplists.names import spellings
from ..kernels.shards import is_sharded
from ..torch_internals import torch_compat
from .layers import result_dtype, set_products
from .products import linear, matmul, refuse_torchscript
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
    **dict.fromkeys(("addmm", "baddbmm"), ("input", "a", "b")),
    "grouped_mm": ("mat_a", "mat_b", "offs", "bias", "out_dtype"),
    "scaled_dot_product_attention": ("query", "key", "value", "attn_mask", "dropout_p", "is_causal"),
}
"""The positional arguments of the functions that do not take two operands; the methods call ``input`` self."""

_SHORT = {"mat1": "a", "batch1": "a", "mat2": "b", "batch2": "b", "other": "b"}
"""The operands of products, as their rules call them."""

_DIMENSIONS = {"mm": (2, 2), "bmm": (3, 3), "addmm": (2, 2), "baddbmm": (3, 3)}
"""The dimensions of both operands, of which torch refuses others."""


class _Op(NamedTuple):
    """An op that multiplies, under a recipe.

    Attributes:
        name: the op.
        products: the formats; see ``Recipe.products``.
        divisors: the numbers that divide the inputs and the outputs of a product if blocks fill them.
        otherwise: the rule of calls that the formats do not fit; None for torch's own function.
        names: the arguments that the op needs, and all that its rule knows.
    """

    name: str
    products: Products
    divisors: tuple[int, int]
    otherwise: Rule | None
    names: tuple[frozenset[str], frozenset[str]]


def rules_of_products(text: str, table: Mapping[Any, Rule]) -> dict[Callable[..., Any] | str, Rule]:
    """Make the rules of the products under a recipe, each of which replaces a rule of a table.

    Args:
        text: the recipe.
        table: the rules of calls that the formats do not fit.
    """
    recipe = Recipe.parse(text)
    divisors = recipe.by_inputs, recipe.by_outputs
    return {
        func: functools.partial(_rule, _Op(name, recipe.products, divisors, table.get(func), _names_of(name)))
        for name, funcs in _OPS.items()
        if recipe.attention or name != "scaled_dot_product_attention"
        for func in funcs
    }


def _rule(op: _Op, mode: CastMode, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Round the operands of one call of a product."""
    refuse_torchscript()
    given = dict(zip(_ARGUMENTS.get(op.name, ("input", "b")), args, strict=False))
    given |= {_SHORT.get(name, name): value for name, value in kwargs.items()}
    required, known = op.names
    # Dynamo of torch 2.11 cannot compare frozensets with <=.
    found = _COMPUTE[op.name](op, **given) if required.issubset(given) and known.issuperset(given) else None
    if found is not None:
        return found
    return func(*args, **kwargs) if op.otherwise is None else op.otherwise(mode, func, args, kwargs)


def _names_of(name: str) -> tuple[frozenset[str], frozenset[str]]:
    """The arguments that a function needs, and all that its rule knows; torch reports other arguments."""
    params = list(inspect.signature(_COMPUTE[name]).parameters.values())[1:]
    needed = frozenset(each.name for each in params if each.default is each.empty)
    return needed, frozenset(each.name for each in params)


def _product(op: _Op, input: Any, b: Any) -> Tensor | None:
    """``matmul``, ``mm`` and ``bmm``; None where the formats do not fit."""
    return matmul(input, b, op.products, result_dtype(input, b)) if _fits(op, input, b) else None


def _linear(op: _Op, input: Any, weight: Any, bias: Any = None) -> Tensor | None:
    return linear(input, weight, bias, op.products, result_dtype(input, weight)) if _fits(op, input, weight) else None


def _added(op: _Op, input: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1) -> Tensor | None:
    """``addmm`` and ``baddbmm``: the sum is in fp32, and rounded once."""
    if not _fits(op, a, b) or not isinstance(input, Tensor):
        return None
    product = alpha * matmul(a, b, op.products, torch.float32)
    input = input.expand_as(product)  # or torch's error
    summed: Tensor = product + beta * input if beta else product
    return summed.to(result_dtype(a, b))


def _grouped(op: _Op, mat_a: Any, mat_b: Any, *, offs: Any = None, bias: Any = None, out_dtype: Any = None) -> Any:
    """``grouped_mm`` of the tokens of each expert with its matrix: each group has scales of its own.

    The ends of the groups are read from the device. Products of two matrices, which torch computes in backward
    passes, stay as they are.
    """
    if not _fits(op, mat_a, mat_b) or bias is not None or mat_b.dim() != 3:
        return None
    dtype = out_dtype or result_dtype(mat_a, mat_b)
    if mat_a.dim() == 3:
        return matmul(mat_a, mat_b, op.products, dtype) if offs is None and len(mat_a) == len(mat_b) else None
    if offs is None or len(offs) != len(mat_b):
        return None
    ends = offs.tolist()
    rows = [mat_a[start:end] for start, end in itertools.pairwise((0, *ends))]
    found = [linear(part, each.mT, None, op.products, dtype) for part, each in zip(rows, mat_b.unbind(), strict=True)]
    rest = mat_a.new_zeros(len(mat_a) - ends[-1], mat_b.shape[-1], dtype=dtype)
    return torch.cat([*found, rest])


def _attention(
    op: _Op,
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
    if not (_fits(op, query, key.mT) and _fits(op, key.mT, value)):
        return None
    dtype = result_dtype(query, key)
    scores = matmul(query, key.mT, op.products, torch.float32) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], device=scores.device, dtype=torch.bool).tril()
    if attn_mask is not None:
        is_choice = attn_mask.dtype is torch.bool
        scores = scores.masked_fill(~attn_mask, -torch.inf) if is_choice else scores + attn_mask
    return matmul(F.dropout(torch_compat.safe_softmax(scores, -1), dropout_p), value, op.products, dtype)


_COMPUTE: dict[str, Callable[..., Tensor | None]] = {
    **dict.fromkeys(("matmul", "mm", "bmm"), _product),
    "linear": _linear,
    **dict.fromkeys(("addmm", "baddbmm"), _added),
    "grouped_mm": _grouped,
    "scaled_dot_product_attention": _attention,
}


def _fits(op: _Op, a: Any, b: Any) -> bool:
    """True if the operands of a call are matrices, or batches of them, whose sizes the blocks divide."""
    if not all(isinstance(t, Tensor) and t.is_floating_point() and t.layout is torch.strided for t in (a, b)):
        return False
    if torch.float64 in (a.dtype, b.dtype) or any(has_own_ops(t) or is_sharded(t) for t in (a, b)):
        return False
    if (a.dim(), b.dim()) != _DIMENSIONS.get(op.name, (a.dim(), b.dim())) or min(a.dim(), b.dim()) < 2:
        return False
    if (op.name == "linear" and b.dim() > 2) or (op.name in ("bmm", "baddbmm") and a.shape[0] != b.shape[0]):
        return False
    rows, columns = b.shape[-2:] if op.name == "linear" else b.shape[-1:-3:-1]
    return bool(columns % op.divisors[0] == 0 and rows % op.divisors[1] == 0)
