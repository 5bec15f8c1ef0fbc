"""Differences of rounding in compiled code, derived from its outputs, because its ops cannot be observed."""

from __future__ import annotations

from typing import Any

import torch

from ..core.dtypes import HALF_DTYPES
from ..diagnostics.observe.ops import tensors_in, widened, written
from ..torch_internals.compiler_compat import compiled_from, inductor_options
from ..torch_internals.torch_compat import TorchDispatchMode, schema_of, tree_flatten, tree_unflatten
from .parting import PRODUCTS

__all__ = ["Fused", "rounding_as_eager"]


def rounding_as_eager(side: Any) -> Any:
    """Compile what Inductor compiled once more, with its options and the roundings of eager code between fused ops.

    Other backends have no such option: for these the result is the side itself.
    """
    options = inductor_options(side)
    if options is None:
        return side
    return torch.compile(compiled_from(side), options={**options, "emulate_precision_casts": True})


class Fused(TorchDispatchMode):
    """Leaves out the roundings to 16 bits that a compiler leaves out: results stay in fp32 until a product reads them.

    Compilers compute in fp32 and fuse all ops but products, which are calls of libraries.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._wide: set[int] = set()
        self._half: torch.dtype = torch.bfloat16

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves, tree = tree_flatten((args, kwargs or {}))
        tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
        self._half = next((x.dtype for x in tensors if x.dtype in HALF_DTYPES), self._half)
        narrow = any(x.dtype in HALF_DTYPES or self._is_wide(x) for x in tensors)
        if func.is_view or not narrow:
            return func(*args, **(kwargs or {}))
        product = schema_of(func).name.rpartition(":")[2] in PRODUCTS
        if product:
            leaves = [x.to(self._half) if isinstance(x, torch.Tensor) and self._is_wide(x) else x for x in leaves]
            args, kwargs = tree_unflatten(leaves, tree)
        else:
            args, kwargs = widened(args, kwargs or {}, torch.float32, list(written(func, args, kwargs or {})))
        result = func(*args, **kwargs)
        for x in tensors_in(result):
            wide = x.dtype is torch.float32 and not product
            (self._wide.add if wide else self._wide.discard)(x.untyped_storage().data_ptr())
        return result

    def _is_wide(self, tensor: torch.Tensor) -> bool:
        return tensor.dtype is torch.float32 and tensor.untyped_storage().data_ptr() in self._wide
