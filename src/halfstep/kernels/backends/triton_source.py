"""Source code of Triton kernels."""

from __future__ import annotations

import textwrap

import torch

from ...core.dtypes import dtype_name
from ..blockwise import BLOCK
from ..codegen import Layout
from ..expr import ElementwiseKernel, trace
from ..storage import Storage
from .blockwise_source import TRITON_PRELUDE, suffix

__all__ = ["source"]

# bfloat16 is rounded by its bits, which agree with the other backends'; the interpreter's own cast truncates.
_PRELUDE = """
import triton
import triton.language as tl


@triton.jit
def bits_of(x):
    return x.to(tl.uint32, bitcast=True)


@triton.jit
def quiet(u):
    return (u >> 16) | 0x40


@triton.jit
def is_nan(u):
    return (u & 0x7FFFFFFF) > 0x7F800000


@triton.jit
def as_bf16(high):
    return high.to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def nearest(x):
    u = bits_of(x.to(tl.float32))
    return as_bf16(tl.where(is_nan(u), quiet(u), (u + 0x7FFF + ((u >> 16) & 1)) >> 16))


@triton.jit
def wide(x):
    if x.dtype == tl.bfloat16:  # the interpreter's own cast drops subnormals
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def after_writes(master, rounded, weight):
    kept = wide(rounded)
    found = wide(weight)
    return tl.where((kept == found) | ((kept != kept) & (found != found)), master, found)


@triton.jit
def half_away(x):
    u = bits_of(x)
    return as_bf16(tl.where(is_nan(u), quiet(u), (u >> 16) + ((u >> 15) & 1)))


@triton.jit
def low_bits(x):
    return (bits_of(x) & 0xFFFF).to(tl.uint16).to(tl.int16, bitcast=True)


@triton.jit
def join(weight, remainder):
    high = weight.to(tl.uint16, bitcast=True).to(tl.uint32)
    low = remainder.to(tl.int32)
    magnitude = high & 0x7FFF
    foreign = ((magnitude == 0) & (low < 0)) | ((magnitude == 0x7F80) & (low > 0))
    low = tl.where(magnitude > 0x7F80, low & 0xFFFF, tl.where(foreign, 0, low))
    return ((high << 16) + low.to(tl.uint32, bitcast=True)).to(tl.float32, bitcast=True)


@triton.jit
def mix(h):
    h = (h ^ (h >> 16)) * 0x85EBCA6B
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    return h ^ (h >> 16)


@triton.jit
def stochastic(x, seed, element):
    u = bits_of(x)
    noisy = u + (mix(element.to(tl.uint32) * 0x9E3779B9 + seed) & 0xFFFF)
    finite = (u & 0x7F800000) != 0x7F800000
    overflow = (noisy & 0x7F800000) == 0x7F800000
    high = tl.where(overflow, ((u >> 16) & 0x8000) | 0x7F7F, noisy >> 16)
    return as_bf16(tl.where(finite, high, tl.where(is_nan(u), quiet(u), u >> 16)))


@triton.jit
def sum_of_squares(x):
    # In fp32 within a chunk: many chips do fp64 at 1/64 of its rate. fp64 tables stay in fp64.
    total = tl.sum(x * x)
    exact = total.to(tl.float64)
    if x.dtype == tl.float32:
        if (total <= 1e-20) | (total >= 1e30):  # squares may have vanished or overflowed; NaN stays NaN
            exponent = bits_of(tl.max(tl.abs(x))) & 0x7F800000
            if exponent < 0x7F800000:
                exponent = tl.minimum(tl.maximum(exponent, 0x00800000), 0x7E800000)
                scaled = x * (0x7F000000 - exponent).to(tl.float32, bitcast=True)
                back = exponent.to(tl.float32, bitcast=True).to(tl.float64)
                exact = tl.sum(scaled * scaled).to(tl.float64) * back
                exact = exact * back
    return exact


@triton.jit
def add_up(partial, results, first, done, row, rows, chunks, SUMS: tl.constexpr,
           WIDTH: tl.constexpr = 1024):
    begin = tl.load(first + row)
    end = tl.load(first + row + 1)
    # The order of memory at an atomic (acquire and release) makes the stores of the other programs seen by the last.
    if tl.atomic_add(done + row, 1) == end - begin - 1:
        for which in tl.static_range(SUMS):
            total = tl.zeros((WIDTH,), tl.float64)
            at = begin
            while at < end:  # a range of loaded numbers is beyond the interpreter
                i = at + tl.arange(0, WIDTH)
                found = tl.load(partial + which * chunks + i, mask=i < end, other=0.0, cache_modifier=".cg")
                total = total + found
                at += WIDTH
            tl.store(results + which * rows + row, tl.sum(total))
        tl.store(done + row, 0)
"""

# A chunk whose tensors are aligned and whose length fills vectors is moved in vectors, any other element by element.
_ENTRY = """

@triton.jit
def update(%(pointers)s, row, begin, count, chunk, scalars, skip, found, partial, rows, chunks,
           VECTORS: tl.constexpr, BLOCK: tl.constexpr):
    count = tl.where(tl.load(skip) == 0.0, count, 0)
    if VECTORS:
        count = tl.multiple_of(count, %(vector)d)
    i = tl.arange(0, BLOCK)
    alive = i < count
%(body)s


@triton.jit(do_not_specialize=["rows", "chunks", "skip", "found"])
def kernel(chunk_row, chunk_start, chunk_count, first, table, scalars, skip, found, partial, results, done, rows,
           chunks, BLOCK: tl.constexpr):
    chunk = tl.program_id(0)
    row = tl.load(chunk_row + chunk)
    begin = tl.load(chunk_start + chunk)
    count = tl.load(chunk_count + chunk).to(tl.int32)
%(setup)s
    if (((%(bits)s) & 15) | (count & %(vector)d - 1)) == 0:
        update(%(pointers)s, row, begin, count, chunk, scalars, skip, found, partial, rows, chunks, True, BLOCK)
    else:
        update(%(pointers)s, row, begin, count, chunk, scalars, skip, found, partial, rows, chunks, False, BLOCK)
%(finish)s
"""

_OPERATIONS = {
    "add": "{} + {}",
    "sub": "{} - {}",
    "mul": "{} * {}",
    "div": "{} / {}",
    "sqrt": "tl.sqrt({})",
    "maximum": "tl.maximum({}, {}, propagate_nan=tl.PropagateNan.ALL)",
}


def source(kernel: ElementwiseKernel, layout: Layout) -> str:
    """Print the Triton source of a kernel.

    Args:
        kernel: the computation for each element.
        layout: the layout of its columns.
    """
    traced = trace(kernel)
    names = layout.scalars
    acc = _type(layout.compute_dtype)
    parts = [
        (f"{name}{part}", slot + part, dtype)
        for name, slot, storage in layout.columns
        for part, dtype in enumerate(storage.dtypes)
    ]
    # How many elements a thread moves at once: 16 bytes of the widest column, as many elements of any other. So all
    # columns are spread alike over the threads, and none is passed from thread to thread through shared memory.
    each = (dtype for *_, storage in layout.columns for dtype in storage.dtypes[: storage.elementwise])
    vector = 16 // max(dtype.itemsize for dtype in each)
    setup = [f"{pointer} = tl.load(table + {slot} * rows + row)" for pointer, slot, _ in parts]
    beside = {
        f"{name}{storage.elementwise + i}": place
        for name, _, storage in layout.columns
        for i, place in enumerate([f" + begin // {BLOCK}", ""][: len(storage.dtypes) - storage.elementwise])
    }
    body = []
    for pointer, _, dtype in parts:
        body.append(f"{pointer} = {pointer}.to(tl.pointer_type({_type(dtype)})){beside.get(pointer, ' + begin')}")
        if pointer in beside:
            continue
        body.append(f"if VECTORS:\n    {pointer} = tl.multiple_of({pointer}, {vector * dtype.itemsize})")
    if "seed" in names:
        body.append(f"seed = bits_of(tl.load(scalars + {names.index('seed')} * rows + row))")
    storages = {name: storage for name, _, storage in layout.columns}
    for i, node in enumerate(traced.nodes):
        body.extend(_lines(i, node.op, node.args, storages, names, acc))
    for name, index in traced.stores.items():
        body.extend(_stores(name, storages[name], f"v{index}"))
    coded = any(storage.kind == "blockwise" for storage in storages.values())
    for i, index in enumerate(traced.squares):
        body.append(f"square{index} = sum_of_squares(tl.where(alive, v{index}, 0.0))")
        body.append(f"tl.store(partial + {i} * chunks + chunk, square{index})")
    for index in traced.checks:
        # The sum of squares of finite fp32 values is finite; the sum for fp64 values can overflow.
        seen = f"square{index}" if index in traced.squares and acc == "tl.float32" else f"v{index}"
        body.append(f"odd{index} = ({seen} != {seen}) | (tl.abs({seen}) == float('inf'))")
        if seen.startswith("v"):
            body.append(f"odd{index} = tl.sum((alive & odd{index}).to(tl.int32)) > 0")
        body.append(f"tl.store(found, 1.0, mask=odd{index})")
    finish = []
    if traced.squares:
        finish = [f"add_up(partial, results, first, done, row, rows, chunks, {len(traced.squares)})"]
    pointers = [pointer for pointer, _, _ in parts]
    entry = _ENTRY % {
        "vector": vector,
        "pointers": ", ".join(pointers),
        "bits": " | ".join(pointers),
        "setup": _indented(setup),
        "body": _indented(body),
        "finish": _indented(finish),
    }
    return _PRELUDE + (TRITON_PRELUDE if coded else "") + entry


def _indented(lines: list[str]) -> str:
    return textwrap.indent("\n".join(lines), "    ")


def _lines(
    i: int, op: str, args: tuple[int | float | str, ...], storages: dict[str, Storage], names: tuple[str, ...], acc: str
) -> list[str]:
    if op == "load":
        return _loads(i, str(args[0]), storages[str(args[0])], acc)
    if op == "scalar":
        return [f"v{i} = tl.load(scalars + {names.index(str(args[0]))} * rows + row)"]
    if op == "const":
        return [f"v{i} = tl.full((1,), {float(args[0])!r}, {acc})"]
    # The plain forms are approximate in fp32; fp64 has only exact ones.
    exact = {"div": "tl.div_rn({}, {})", "sqrt": "tl.sqrt_rn({})"} if acc == "tl.float32" else {}
    return [f"v{i} = {exact.get(op, _OPERATIONS[op]).format(*(f'v{a}' for a in args))}"]


def _loads(i: int, name: str, storage: Storage, acc: str) -> list[str]:
    """Load each part on a separate line, so that the compiler's notes tell the column of an access."""
    if storage.kind == "blockwise":
        return [
            f"{name}_code = tl.load({name}0 + i, mask=alive, other=0)",
            f"{name}_scale = tl.load({name}1 + i // {BLOCK}, mask=alive, other=0.0)",
            f"v{i} = (tl.load({name}2 + {name}_code, mask=alive, other=0.0) * {name}_scale).to({acc})",
        ]
    if storage.kind not in ("split", "plain"):
        return [f"v{i} = tl.load({name}0 + i, mask=alive, other=0).to({acc})"]
    lines = [f"{name}{part}_in = tl.load({name}{part} + i, mask=alive, other=0)" for part in range(2)]
    if storage.kind == "split":
        return [*lines, f"v{i} = join({name}0_in, {name}1_in)"]
    rounded = _rounded(f"{name}0_in", storage.dtypes[1])
    return [*lines, f"v{i} = after_writes({name}0_in, {rounded}, {name}1_in).to({acc})"]


def _stores(name: str, storage: Storage, value: str) -> list[str]:
    if storage.kind == "blockwise":
        return [
            f"{name}_codes, {name}_absmax = encode_{suffix(storage)}({value}, alive, BLOCK)",
            f"tl.store({name}0 + i, {name}_codes, mask=alive)",
            f"blocks = tl.arange(0, BLOCK // {BLOCK})",
            f"tl.store({name}1 + blocks, {name}_absmax, mask=blocks * {BLOCK} < count)",
        ]
    if storage.kind == "split":
        forms = [f"half_away({value})", f"low_bits({value})"]
    elif storage.kind == "stochastic":
        forms = [f"stochastic({value}, seed, begin + i)"]
    else:
        if storage.kind == "plain":  # the weight is the master rounded, not a float64 value rounded once
            value += ".to(tl.float32)"
        forms = [_rounded(value, dtype) for dtype in storage.dtypes]
    return [f"tl.store({name}{part} + i, {form}, mask=alive)" for part, form in enumerate(forms)]


def _type(dtype: torch.dtype) -> str:
    return f"tl.{dtype_name(dtype)}"


def _rounded(value: str, dtype: torch.dtype) -> str:
    return f"nearest({value})" if dtype is torch.bfloat16 else f"{value}.to({_type(dtype)})"
