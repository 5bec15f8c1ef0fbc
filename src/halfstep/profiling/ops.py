"""Descriptions of calls of ops: kind, floating-point operations and bytes, from name, dtypes and shapes."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..core.oplists.tables import row_of
from .trace import Call, Piece

__all__ = ["KINDS", "SIZES", "Product", "Work", "works_of"]

KINDS = {
    "products": "matrix products, convolutions, attention",
    "memory-bound ops": "ops that read and write, and compute little",
    "casts": "copies from one dtype to another",
    "optimizer": "steps of optimizers",
    "loss scale": "unscaling gradients, and checking them for inf and NaN",
    "communication, hidden": "sent while the device computes",
    "communication, exposed": "sent while the device computes nothing",
    "waits for data": "from the start of a step to its first module, and in a DataLoader",
    "waits for the device": "the host waits until the device is done, and reads a number",
    "host": "the device has nothing to do: Python, and launches",
    "not named": "kernels without an op",
}
"""The kinds of time, each with what it is."""

SIZES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8": 1}

_SCALING = ("unscale", "_amp_update_scale", "_amp_foreach", "aminmax")
_SENDS = ("nccl", "rccl", "gloo", "c10d::", "record_param_comms", "ucc:", "mpi:")
_STEPS = ("Optimizer.", "aten::_fused_adam", "aten::_fused_sgd", "aten::_fused_adagrad")
_PRODUCTS = {
    *("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "_scaled_mm", "_int_mm", "mkldnn_linear"),
    *("mkldnn_rnn_layer", "mkldnn_rnn_layer_backward", "_grouped_mm"),
}
_WITH_STRIDE = ("convolution", "_convolution", "convolution_backward")  # others begin with their padding
_WITH = ("convolution", "attention", "_linear_", "lstm", "gru", "_moe", "rnn_layer")


@dataclass(frozen=True)
class Product:
    """A product as a matrix product: ``batch`` times (m, k) by (k, n).

    Attributes:
        batch: the number of products.
        m: the rows.
        n: the columns.
        k: the length of the sums.
        what: "product", "convolution", "attention" or "experts".
        text: the shape in words.
        aligned: the sizes that lie side by side in memory: they should fill 16 bytes.
        times: the number of products of this size, such as the two of attention.
    """

    batch: int
    m: int
    n: int
    k: int
    what: str
    text: str
    aligned: tuple[int, ...] = ()
    times: float = 1.0

    @property
    def flops(self) -> float:
        """The floating-point operations."""
        return 2.0 * self.batch * self.m * self.n * self.k * self.times


@dataclass(slots=True, eq=False)
class Work:
    """A ``Piece`` with what it is.

    Attributes:
        piece: the interval and its call.
        kind: one of ``KINDS``.
        op: the short name of the op.
        dtype: the dtype that it reads; "" if unknown.
        count: the largest number of elements that it reads.
        bytes: the bytes that it reads and writes.
        product: the sizes, if it is a product with known shapes.
        zeroes: True if it sets gradients to zero outside a backward pass.
        accumulates: True if it adds to the gradient of a parameter.
        tensors: the sizes of the tensors that it reads.
        whole: the call of which it is a part: several kernels may do one product.
    """

    piece: Piece
    kind: str
    op: str
    dtype: str = ""
    count: int = 0
    bytes: float = 0.0
    product: Product | None = None
    zeroes: bool = False
    accumulates: bool = False
    tensors: Collection[tuple[int, ...]] = ()
    whole: Call | None = None

    @property
    def sizes(self) -> str:
        """The sizes in words; "" if unknown."""
        return self.product.text if self.product is not None else f"{self.count:,} elements" if self.count else ""


def works_of(pieces: Iterable[Piece]) -> list[Work]:
    """Describe the work of each piece. Equal calls are described once, because a step repeats a few of them."""
    known: dict[Any, tuple[Work, int]] = {}
    works = []
    for piece in pieces:
        call = piece.call
        like = piece.name if call is None else call.like or call
        if like not in known:
            known[like] = _kernel_without_op(piece) if call is None else _described(piece, [*call.chain()])
        work, depth = known[like]
        whole = call and next(itertools.islice(call.chain(), depth, None))
        works.append(replace(work, piece=piece, whole=whole))
    return works


def _kernel_without_op(piece: Piece) -> tuple[Work, int]:
    is_sent = any(word in piece.name.lower() for word in _SENDS[:2])
    return Work(piece, "communication, exposed" if is_sent else "not named", piece.name), 0


def _described(piece: Piece, chain: list[Call]) -> tuple[Work, int]:
    """Describe the innermost call of a chain, and return the index of the outermost product in the chain, or 0."""
    names = [call.name for call in chain]
    shaped = next((call for call in chain if any(isinstance(dims, list) and dims for dims in call.dims)), chain[0])
    products = [index for index, name in enumerate(names) if _is_product(name)]
    work = Work(piece, _kind(names, shaped, chain[products[0]] if products else None), _short(shaped.name))
    arguments = [(dtype, _count(dims)) for dtype, dims in zip(shaped.dtypes, shaped.dims, strict=False)]
    floats = [(SIZES[dtype], count) for dtype, count in arguments if dtype]
    work.dtype = next((dtype for dtype, count in arguments if dtype and count), "")
    work.count = written = max((count for _, count in floats), default=0)
    if work.kind == "products":
        product = next(filter(_has_shapes, chain[products[0] :]), chain[products[0]])
        work.product, work.op = _product(product), _short(product.name)
        work.dtype = next(filter(None, product.dtypes), work.dtype)
        if work.product is not None and work.product.what == "product":
            written = work.product.batch * work.product.m * work.product.n
    written_size = 0 if work.op in ("zero_", "fill_") else SIZES.get(work.dtype, 0)
    work.bytes = float(sum(size * count for size, count in floats) + written * written_size)
    fills = [call for call in chain if _short(call.name) in ("zero_", "_foreach_zero_", "fill_")]
    only_fills = all(call.mark or call in fills for call in chain)
    work.zeroes = bool(fills) and only_fills and not any("Optimizer.step" in name for name in names)
    work.accumulates = any("AccumulateGrad" in name for name in names)
    all_dims = (dims for call in chain for dims in call.dims)
    work.tensors = {tuple(dims) for dims in all_dims if isinstance(dims, list) and dims and isinstance(dims[0], int)}
    return work, products[-1] if products else 0


def _kind(names: Sequence[str], told: Call, main: Call | None) -> str:
    if any(name.startswith(_SENDS) for name in names):
        return "communication, exposed"
    if any(word in name for name in names for word in _SCALING):
        return "loss scale"
    if any(name.startswith(_STEPS) for name in names):
        return "optimizer"
    if main is not None and not (_short(names[0]) == "copy_" and _short(main.name) not in ("addmm", "baddbmm")):
        return "products"
    if any(_short(name) in ("item", "_local_scalar_dense", "is_nonzero") for name in names):
        return "waits for the device"
    if _short(told.name) in ("copy_", "_to_copy", "to", "_foreach_copy_") and _is_cast(told):
        return "casts"
    return "memory-bound ops"


@functools.lru_cache(4096)
def _short(name: str) -> str:
    return name.rpartition("::")[2]


@functools.lru_cache(4096)
def _is_product(name: str) -> bool:
    if "Backward" in name or name.startswith(("autograd", "Optimizer")):
        return False
    short = _short(name)
    if short in _PRODUCTS or any(word in short for word in _WITH):
        return True
    row = row_of(short.removeprefix("_")) if "::" in name else None
    return row is not None and row.kind in ("product", "convolution", "attention", "recurrent")


def _is_cast(call: Call) -> bool:
    used = [dtype for dtype in call.dtypes[:2] if dtype]
    return len({*used}) == 2 if _short(call.name) == "copy_" else bool(used)


def _has_shapes(call: Call) -> bool:
    return sum(_count(dims) > 0 for dims in call.dims) >= 2


def _count(dims: Any) -> int:
    """The number of elements of an argument, which may be a list of tensors."""
    if not isinstance(dims, list) or not dims:
        return 0
    return sum(_count(each) for each in dims) if isinstance(dims[0], list) else math.prod(dims)


def _product(call: Call) -> Product | None:
    shapes = [dims for dims in call.dims if isinstance(dims, list) and dims and not isinstance(dims[0], list)]
    name = _short(call.name)
    if len(shapes) > 1 and "attention" in name:
        return _attention(name, shapes)
    if "moe" in name:
        return _experts(shapes)
    if "convolution" in name or name.startswith("conv"):
        return _convolution(call, shapes)
    matrices = [shape for shape in shapes if len(shape) >= 2][-2:]
    if len(matrices) < 2:
        return None
    a, b = matrices
    if name in ("linear", "mkldnn_linear"):
        b = [b[1], b[0]]
    batch, m, k, n = math.prod(a[:-2]) if len(b) > 2 else 1, a[-2], a[-1], b[-1]
    m = m if len(b) > 2 else math.prod(a[:-1])
    text = f"[{m}x{k}] x [{k}x{n}]" + (f", {batch} of them" if batch > 1 else "")
    known = [zip(each, by, strict=False) for each, by in zip(call.dims, call.strides, strict=False) if len(by) > 1]
    beside = [size for each in known for size, by in each if by == 1 and size > 1]
    return Product(batch, m, n, k, "product", text, tuple(dict.fromkeys([n, *(beside or [k])])))


def _attention(name: str, shapes: list[Any]) -> Product | None:
    if len(shapes[0]) != 4:
        return None
    batch, one, two, width = shapes[0]
    heads, length = (two, one) if name.startswith(("_flash", "_efficient")) else (one, two)
    text = f"attention over {length}, {heads} heads of {width}"
    return Product(batch * heads, length, length, width, "attention", text, (width,), 2.0)


def _experts(shapes: list[Any]) -> Product | None:
    weights = [shape for shape in shapes if len(shape) == 3]
    if not weights or len(shapes[0]) != 2:
        return None
    tokens, width = shapes[0]
    chosen = shapes[-1][-1] if len(shapes[-1]) == 2 else 1
    experts, inner, _ = weights[0]
    text = f"{tokens:,} tokens to {chosen} of {experts} experts of {width}x{inner}"
    times = sum(map(math.prod, weights)) / math.prod(weights[0])
    return Product(1, tokens * chosen, inner, width, "experts", text, (width, inner), times)


def _convolution(call: Call, shapes: list[Any]) -> Product | None:
    name = _short(call.name)
    images = [shape for shape in shapes if len(shape) >= 3]
    x, weight = (images[1], images[2]) if "backward" in name and len(images) > 2 else (*images, None, None)[:2]
    if x is None or weight is None or len(x) != len(weight):
        return None
    args = next((c for c in call.chain() if _short(c.name) in _WITH_STRIDE), call).concrete["backward" in name :][3:]
    turned = args[3:4] == ["True"]
    window = weight[2:]
    groups = max(1, x[1] // (weight[0] if turned else weight[1]))
    told = "".join(args[:1]).strip("()[]").replace(" ", "")
    stride = [int(part) or 1 for part in told.split(",")] if told.replace(",", "").isdigit() else [1]
    stride = stride * len(window) if len(stride) == 1 else stride
    spots = math.prod(x[2:]) if turned else math.prod(-(-size // by) for size, by in zip(x[2:], stride, strict=False))
    into, out = weight[1], weight[0] // groups
    text = "transposed " if turned else "depthwise " if groups > 1 and into == 1 else ""
    made = weight[1] * groups if turned else weight[0]
    text += f"{'x'.join(map(str, window))} convolution of {x[1]} channels to {made}"
    m, k = x[0] * spots, into * math.prod(window)
    aligned = () if groups > 1 and into == 1 else (into, out)
    return Product(groups * (1 + ("backward" in name)), m, out, k, "convolution", text, aligned)
