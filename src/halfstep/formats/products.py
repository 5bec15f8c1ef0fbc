"""The products of a linear layer with rounded operands: quantized and dequantized, multiplied in fp32, rounded once.

What a chip with units for a format computes is the sum of exact products of its codes, times the scales. The fp32
kernel gives the same but for the order of the additions, because ``round_to`` returns the dequantized numbers.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..core.errors import UsageError
from ..torch_internals import torch_compat
from ..torch_internals.torch_compat import functorch_level
from .format import EDEN_GROUP, Format
from .history import AmaxHistory
from .measuring import is_measuring, losses_of
from .quantize import round_to
from .recipe import Products, divisor
from .torchao_products import MULTIPLE, scaled_product

__all__ = ["OP", "RoundedTo", "linear", "matmul", "refuse_torchscript", "rounded_to", "unrounded"]

_SIGNS = 0x5EED
"""The seed of the random signs of Hadamard transforms: the same in each step and on each rank."""


class _Scratch(threading.local):
    """Two buffers of a thread for the operands of one product, since a fresh large tensor costs page faults."""

    def __init__(self) -> None:
        self.buffers: list[Tensor] = [torch.empty(0, dtype=torch.float32, device="cpu")] * 2

    def take(self, at: int, shape: torch.Size) -> Tensor:
        """An fp32 tensor of a shape, whose numbers the next operand at this place overwrites."""
        size = shape.numel()
        if self.buffers[at].numel() < size:
            with torch.inference_mode(False):  # an inference tensor cannot be written once that mode has ended
                self.buffers[at] = torch.empty(size, dtype=torch.float32, device="cpu")
        return self.buffers[at][:size].view(shape)


_scratch = _Scratch()


@functools.lru_cache(maxsize=32)
def _hadamard(size: int, device: torch.device, seed: int) -> Tensor:
    """The orthogonal Hadamard matrix of a size with random signs of its columns."""
    matrix = torch.ones(1, 1, dtype=torch.float32, device="cpu")
    for _ in range(size.bit_length() - 1):
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    seeded = torch.Generator("cpu").manual_seed(seed)
    signs = torch.randint(0, 2, (size,), generator=seeded, device="cpu", dtype=torch.float32) * 2 - 1
    return (matrix * signs / math.sqrt(size)).to(device)


def _operand(
    tensor: Tensor,
    format: Format | None,
    dim: int,
    at: int,
    half: torch.dtype,
    amax: Tensor | None,
    hadamard: Tensor | None,
    losses: dict[int, Tensor] | None,
) -> Tensor:
    """One operand in fp32: transformed, and rounded to its format, or without one to the dtype of the product."""
    tensor = tensor.detach()
    if format is None and hadamard is None:
        return (tensor if tensor.dtype is half else tensor.to(half)).float()
    if hadamard is not None:
        rows = tensor.float().unflatten(dim, (-1, len(hadamard)))
        tensor = (hadamard @ rows if dim == -2 else rows @ hadamard.mT).flatten(dim - 1, dim)
        if format is None:
            return tensor.to(half).float()
    assert format is not None
    exact = tensor = tensor.contiguous()
    out = _scratch.take(at, tensor.shape) if tensor.is_cpu else None
    if tensor.dtype is not torch.float32:  # rounded in fp32: the numbers of few formats are numbers of 16 bits
        tensor = tensor.float() if out is None else out.copy_(tensor)
    rounded = round_to(tensor, format, dim=dim, amax=amax, out=out)
    if losses is not None:
        losses[at] = losses_of(exact, rounded, format, dim, amax)
    return rounded


def _product(
    a: Tensor,
    b: Tensor,
    dim_a: int,
    dim_b: int,
    formats: str,
    dtype: torch.dtype,
    hadamard: int = 0,
    bias: Tensor | None = None,
    amax_a: Tensor | None = None,
    amax_b: Tensor | None = None,
    losses: dict[int, Tensor] | None = None,
) -> Tensor:
    """The product of two matrices, or batches of matrices, with the operands rounded to formats.

    Args:
        a: the first operand; it is transposed if ``dim_a`` is -2.
        b: the second operand; it is transposed if ``dim_b`` is -1.
        dim_a: the dimension of ``a`` that the product sums over.
        dim_b: the dimension of ``b`` that the product sums over.
        formats: the formats of the operands, and what computes it; see ``Recipe.products``.
        dtype: the dtype of the result.
        hadamard: the size of the transform along the sum; 0 for none.
        bias: added in fp32.
        amax_a: the largest value that the scale of the whole first operand allows for; None reads it from the operand.
        amax_b: the same for the second operand.
        losses: receives what each rounded operand has lost, by its index, if the product is measured.
    """
    pair, backend, first = _pair(formats)
    rotation, is_fresh = None, any(each is not None and each.scale_rule == "eden" for each in pair)
    if size := EDEN_GROUP if is_fresh else hadamard:
        rotation = _hadamard(size, a.device, int(torch.randint(2**31, (), device="cpu")) if is_fresh else _SIGNS)
    if first is not None:
        b = round_to(b.detach().float(), first, dim=-3 - dim_b)
    if pair == (None, None) and (dtype is torch.float64 or not a.is_cpu):
        a, b = a.to(dtype), b.to(dtype)
    else:
        fit = math.lcm(size or 1, MULTIPLE if backend else 1, *map(divisor, pair))
        if short := -a.shape[dim_a] % fit:  # with zeros, which change neither scales nor sums
            sides = [(0, short) if dim == -1 else (0, 0, 0, short) for dim in (dim_a, dim_b)]
            a, b = map(torch.nn.functional.pad, (a, b), sides)
        if backend and pair != (None, None):
            return scaled_product(a if dim_a == -1 else a.mT, b if dim_b == -1 else b.mT, pair, dtype, bias)
        a = _operand(a, pair[0], dim_a, 0, dtype, amax_a, rotation, losses)
        b = _operand(b, pair[1], dim_b, 1, dtype, amax_b, rotation, losses)
    a, b = a if dim_a == -1 else a.mT, b if dim_b == -2 else b.mT
    if bias is None:
        return torch.matmul(a, b).to(dtype)
    return torch.addmm(bias.to(a.dtype), a, b).to(dtype)


# Compilers, and what watches a step, see one op in a product, and do not look into it.
_ops = torch.library.Library("halfstep", "FRAGMENT")
_ops.define(
    "format_product(Tensor a, Tensor b, int dim_a, int dim_b, str formats, ScalarType dtype, int hadamard, "
    "Tensor? bias, Tensor? amax_a=None, Tensor? amax_b=None) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


@functools.lru_cache(maxsize=256)
def _pair(text: str) -> tuple[tuple[Format | None, Format | None], str, Format | None]:
    """The formats of a product, the back end (empty for the emulation), and a first format of the second operand."""
    backend, _, formats = text.rpartition(": ")
    first, _, formats = formats.rpartition(" > ")
    a, b = (None if each == "None" else Format.parse(each) for each in formats.split(" @ "))
    return (a, b), backend, Format.parse(first) if first else None


def _without_numbers(a: Tensor, b: Tensor, dim_a: int, dim_b: int, formats: str, dtype: Any, *rest: Any) -> Tensor:
    rows, columns = a.shape[-3 - dim_a], b.shape[-3 - dim_b]
    return a.new_empty((*a.shape[:-2], rows, columns), dtype=dtype)


def _of_each(info: Any, dims: Any, a: Tensor, b: Tensor, *rest: Any) -> tuple[Tensor, int]:
    """The products of a batch of ``torch.vmap``, one by one: each has scales of its own."""
    *facts, bias = rest
    given = ((a, dims[0]), (b, dims[1]), (bias, dims[-1]))
    each = zip(*([t] * info.batch_size if dim is None else t.unbind(dim) for t, dim in given), strict=True)
    return torch.stack([OP(x, y, *facts, z) for x, y, z in each]), 0


_ops.impl("format_product", _product, "CompositeExplicitAutograd")
torch.library.register_fake("halfstep::format_product", _without_numbers, lib=_ops)
torch.library.register_vmap("halfstep::format_product", _of_each, lib=_ops)
OP: Any = torch.ops.halfstep.format_product.default


class RoundedTo(NamedTuple):
    """The formats of a product, as a report shows them.

    Attributes:
        name: their names without further fields, and what computes the product, such as "mxfp8 (emulated)".
        roundoff: the largest relative error of a normal number in the less precise of them.
    """

    name: str
    roundoff: float

    def __str__(self) -> str:
        return self.name


def rounded_to(args: Sequence[Any]) -> RoundedTo | None:
    """The formats in the arguments of a call of ``OP``; None if it rounds no operand to one."""
    pair, backend, _ = _pair(args[4])
    formats = [each for each in pair if each is not None]
    names = " @ ".join(dict.fromkeys(str(each).partition(",")[0] for each in formats))
    roundoffs = [2.0 ** -(each.numbers.mantissa + (each.rounding != "stochastic")) for each in formats]
    return RoundedTo(f"{names} ({backend or 'emulated'})", max(roundoffs)) if formats else None


def unrounded(op: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of a call of an op; for ``OP``, of the same product without formats."""
    return (*args[:4], "None @ None", args[5], 0, args[7]) if op is OP else args


def _run(
    a: Tensor,
    b: Tensor,
    dim_a: int,
    dim_b: int,
    formats: str,
    dtype: torch.dtype,
    hadamard: int = 0,
    bias: Tensor | None = None,
    places: tuple[str, str] = ("", ""),
    history: AmaxHistory | None = None,
) -> Tensor:
    """``_product``, as one op where a compiler or a watch looks; with a history, measured and with delayed scales.

    Tensors without numbers (on the meta device, or in a ``FakeTensorMode``) also go through the op, which has their
    shapes; no buffer is made of one. So do tensors inside ``torch.func``, for which the op has a rule.
    """
    if _is_traced(a):
        return OP(a, b, dim_a, dim_b, formats, dtype, hadamard, bias)  # type: ignore[no-any-return]
    device = a.device.type
    casts = torch.is_autocast_enabled(device)
    torch.set_autocast_enabled(device, False)
    try:
        with torch_compat.DisableTorchFunction():  # or the op casts of O1 would round the operands again
            amax = (None, None) if history is None or hadamard else history.scales((a, b), _pair(formats)[0], places)
            losses: dict[int, Tensor] | None = {} if history is not None and is_measuring() else None
            if losses is None and _is_watched():
                return OP(a, b, dim_a, dim_b, formats, dtype, hadamard, bias, *amax)  # type: ignore[no-any-return]
            product = _product(a, b, dim_a, dim_b, formats, dtype, hadamard, bias, amax[0], amax[1], losses)
            if history is not None and losses is not None:
                history.losses |= {places[at]: lost for at, lost in losses.items()}
                if (gradient := _GRADIENTS.get(places)) and losses:
                    exact = _product(a, b, dim_a, dim_b, "None @ None", torch.float32)
                    history.noise[gradient] = torch.stack([exact.norm(), (exact - product).norm()])
                history.tokens = a.shape[dim_a] if gradient == "weight" else history.tokens
            return product
    finally:
        torch.set_autocast_enabled(device, casts)


def refuse_torchscript(is_asked: bool = False) -> None:
    """Raise a UsageError while ``torch.jit.trace`` records, or if TorchScript asks for a module."""
    if is_asked or torch_compat.jit_tracing_state() is not None:
        raise UsageError(
            "TorchScript has no products of rounded operands. Call amp.set_products(model, None) before torch.jit, and "
            "leave out products= of amp.auto_cast; or use torch.export or torch.compile."
        )


def _is_traced(tensor: Tensor) -> bool:
    """True while a graph is recorded, inside of a transform of ``torch.func``, and for a tensor without numbers."""
    make_fx = torch_compat.BuiltinModes.PROXY
    is_recorded = torch.compiler.is_compiling() or torch_compat.builtin_dispatch_mode(make_fx) is not None
    return is_recorded or functorch_level() is not None or torch_compat.is_fake(tensor)


def _is_watched() -> bool:
    """True if a mode of halfstep watches ops. Other modes, such as torch's counters of flops, see all ops."""
    modes = map(torch_compat.dispatch_mode_at, range(torch_compat.dispatch_mode_count()))
    return any(hasattr(mode, "only_watches") for mode in modes)


_PLACES = (("input", "weight"), ("gradient", "weight, backward"), ("gradient, tokens", "input, tokens"))
"""The operands of the three products, as a history calls them."""

_GRADIENTS = {_PLACES[1]: "input", _PLACES[2]: "weight"}
"""The gradients that are products, by their operands."""


class _Product(torch.autograd.Function):
    """``x w^T + bias`` of matrices, or ``x w^T`` of equal batches; each product rounds its operands its own way.

    Autograd keeps the operands as they were given, since blocks lie along other dimensions in the backward pass.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor, w: Tensor, bias: Tensor | None, products: Products, dtype: torch.dtype, history: AmaxHistory | None
    ) -> Tensor:
        return _run(x, w, -1, -1, products[0], dtype, 0, bias, _PLACES[0], history)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, bias, ctx.products, _, ctx.history = inputs
        ctx.save_for_backward(x, weight)
        ctx.bias_dtype = None if bias is None else bias.dtype

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        _, input_gradient, weight_gradient, size = ctx.products
        history = None if _is_traced(grad) else ctx.history
        dx = dw = db = None
        if ctx.needs_input_grad[0]:  # not in the first layer of a model
            dx = _run(grad, weight, -1, -2, input_gradient, x.dtype, 0, None, _PLACES[1], history)
        if ctx.needs_input_grad[1]:
            dw = _run(grad, x, -2, -2, weight_gradient, weight.dtype, size, None, _PLACES[2], history)
        if ctx.needs_input_grad[2]:
            db = grad.float().sum(0).to(ctx.bias_dtype)
        if history is not None:
            for places, tensors in zip(_PLACES, ((x, weight), (grad, weight), (grad, x)), strict=True):
                history.note(tensors, places)
        return dx, dw, db, None, None, None


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    products: Products,
    dtype: torch.dtype,
    history: AmaxHistory | None = None,
) -> Tensor:
    """Compute ``torch.nn.functional.linear`` with operands rounded as a recipe says.

    Args:
        x: the input, of any number of dimensions.
        weight: the weight, of the shape (outputs, inputs).
        bias: the bias of the outputs, or None.
        products: the formats; see ``Recipe.products``.
        dtype: the dtype of the result.
        history: the layer's, for delayed scales and for what is measured.
    """
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])  # a compiler knows this product of symbols
    found: Any = _Product.apply(rows, weight, bias, products, dtype, history)  # type: ignore[no-untyped-call]
    return found.view(*x.shape[:-1], weight.shape[0])  # type: ignore[no-any-return]


def matmul(a: Tensor, b: Tensor, products: Products, dtype: torch.dtype) -> Tensor:
    """Compute ``a @ b`` with ``a`` as the input and ``b`` as the weight of a recipe.

    Args:
        a: a matrix, or matrices in any number of dimensions.
        b: a matrix, or matrices in any number of dimensions, which are broadcast as in ``torch.matmul``.
        products: the formats; see ``Recipe.products``.
        dtype: the dtype of the result.
    """
    if b.dim() == 2:
        return linear(a, b.mT, None, products, dtype)
    batch: Any = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    a, b = (each.expand(*batch, *each.shape[-2:]) for each in (a, b))
    return _Product.apply(a, b.mT, None, products, dtype, None)  # type: ignore[no-untyped-call, no-any-return]
