"""The CUDA backend: a kernel printed for Triton over a table of pointers, one launch for a table of any size.

Under ``TRITON_INTERPRET=1`` the same kernels run on a CPU, slowly: so their numerics are tested without a GPU.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import os
from contextlib import AbstractContextManager
from typing import Any

import torch

from ...core.files import cache_directory, replacing
from ..codegen import GeneratedLauncher, Layout, layout_of, scalar_names
from ..expr import ElementwiseKernel, trace
from ..storage import Storage
from ..tensor_table import TensorTable
from . import autotune
from .autotune import LaunchConfig

__all__ = ["TritonLauncher"]

_SCRATCH = 2**20  # elements of each of the four rows that a kernel is timed on
_WORTHWHILE = 2**22  # a table of fewer elements is not worth measuring for
_TYPES = {
    torch.float32: "tl.float32",
    torch.float64: "tl.float64",
    torch.float16: "tl.float16",
    torch.bfloat16: "tl.bfloat16",
    torch.int16: "tl.int16",
}

# bfloat16 is rounded by its bits: the interpreter's own cast truncates, and the bits are the other backends'.
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
def honoured(master, rounded, weight):
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
def row_sums(first, partial, sums, chunks, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    which = tl.program_id(1).to(tl.int64)
    begin = tl.load(first + row)
    end = tl.load(first + row + 1)
    total = tl.zeros((BLOCK,), tl.float64)
    at = begin
    while at < end:  # a range of loaded numbers is beyond the interpreter
        i = at + tl.arange(0, BLOCK)
        total += tl.load(partial + which * chunks + i, mask=i < end, other=0.0)
        at += BLOCK
    tl.store(sums + which * tl.num_programs(0) + row, tl.sum(total))
"""

_ENTRY = """

@triton.jit
def kernel(row, start, count, table, scalars, skip, found, partial, rows, chunks,
           ALIGNED: tl.constexpr, BLOCK: tl.constexpr):
    chunk = tl.program_id(0)
    r = tl.load(row + chunk)
    begin = tl.load(start + chunk)
    i = tl.arange(0, BLOCK)
    alive = i < tl.where(tl.load(skip) == 0.0, tl.load(count + chunk), 0)
%s
"""

_OPERATIONS = {
    "add": "{} + {}",
    "sub": "{} - {}",
    "mul": "{} * {}",
    "maximum": "tl.maximum({}, {}, propagate_nan=tl.PropagateNan.ALL)",
}


class TritonLauncher(GeneratedLauncher):
    """One kernel over one table: one launch, and a second small one where squares are summed."""

    def __init__(self, kernel: ElementwiseKernel, table: TensorTable, config: LaunchConfig | None = None) -> None:
        layout = layout_of(kernel, table)
        self._module = _module(kernel, layout, _interpreted())
        self._config = config or _config(kernel, table, layout)
        super().__init__(kernel, layout, table, self._config.elements)
        self._device = table.device
        self._zero = torch.zeros((), device=table.device)

    def _run(
        self, numbers: torch.Tensor, skip: torch.Tensor | None, found: torch.Tensor | None, sums: torch.Tensor
    ) -> None:
        pointers, partial = self._pointers, self._partial
        # Where nobody looks at the flag, the checks still need somewhere to write.
        seen = found if found is not None else torch.empty_like(self._zero)
        with _on(self._device):
            self._module.kernel[(pointers.chunks,)](
                pointers.row,
                pointers.start,
                pointers.count,
                pointers.addresses,
                numbers,
                self._zero if skip is None else skip,
                seen,
                partial,
                self._rows,
                pointers.chunks,
                ALIGNED=pointers.aligned,
                BLOCK=self._config.elements,
                num_warps=self._config.warps,
            )
            if partial.numel():
                self._module.row_sums[(self._rows, partial.shape[0])](
                    pointers.first, partial, sums, pointers.chunks, BLOCK=256
                )


def _on(device: torch.device) -> AbstractContextManager[None]:
    """Triton launches on the current device, which need not be that of the tensors."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def _config(kernel: ElementwiseKernel, table: TensorTable, layout: Layout) -> LaunchConfig:
    """The launch configuration for a table. Kernels write in place, so they are timed on tensors of our own."""
    first = next(iter(table.columns.values()))[1][0]
    if _interpreted() or sum(t.numel() for t in first) < _WORTHWHILE or torch.cuda.is_current_stream_capturing():
        return autotune.DEFAULT
    from triton import __version__ as version
    from triton.runtime.errors import OutOfResources
    from triton.testing import do_bench

    def tensors(dtype: torch.dtype) -> list[torch.Tensor]:
        return [torch.ones(_SCRATCH, dtype=dtype, device=table.device) for _ in range(4)]

    def measure(config: LaunchConfig) -> float:
        launcher = TritonLauncher(kernel, scratch, config)
        try:
            return float(do_bench(lambda: launcher(scalars), return_mode="median"))
        except OutOfResources:
            return float("inf")

    with _on(table.device):
        columns = {name: (storage, tuple(map(tensors, storage.dtypes))) for name, (storage, _) in table.columns.items()}
        scratch = TensorTable(columns, table.compute_dtype)
        scalars = dict.fromkeys(scalar_names(kernel, layout), 0.5)
        gpu = torch.cuda.get_device_name(table.device)
        return autotune.fastest("\n".join((source(kernel, layout), gpu, version)), measure)


@functools.cache
def _module(kernel: ElementwiseKernel, layout: Layout, interpreted: bool) -> Any:
    """The generated module, which Triton compiles or interprets for good when it is loaded.

    It is written to the cache because Triton reads the source of its kernels from their file.
    """
    text = source(kernel, layout)
    path = cache_directory() / f"{kernel.name}-{hashlib.sha256(text.encode()).hexdigest()[:20]}.py"
    if not path.exists():
        with replacing(path, shared=True) as unfinished:
            unfinished.write_text(text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(f"halfstep_kernels_{path.stem.replace('-', '_')}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def source(kernel: ElementwiseKernel, layout: Layout) -> str:
    """The Triton source of a kernel."""
    traced = trace(kernel)
    names = scalar_names(kernel, layout)
    acc = _TYPES[layout.compute_dtype]
    lines = []
    storages = {name: storage for name, _, storage in layout.columns}
    for name, slot, storage in layout.columns:
        for part, dtype in enumerate(storage.dtypes):
            pointer = f"{name}{part}"
            address = f"tl.load(table + {slot + part} * rows + r)"
            lines.append(f"{pointer} = {address}.to(tl.pointer_type({_TYPES[dtype]})) + begin")
            lines.append(f"if ALIGNED:\n        {pointer} = tl.multiple_of({pointer}, 16)")
    if "seed" in names:
        lines.append(f"seed = bits_of(tl.load(scalars + {names.index('seed')} * rows + r))")
    for i, node in enumerate(traced.nodes):
        lines.append(_line(i, node.op, node.args, storages, names, acc))
    for name, index in traced.stores.items():
        lines.extend(_stores(name, storages[name], f"v{index}"))
    for i, index in enumerate(traced.squares):
        lines.append(f"wide{i} = tl.where(alive, v{index}, 0.0).to(tl.float64)")
        lines.append(f"tl.store(partial + {i} * chunks + chunk, tl.sum(wide{i} * wide{i}))")
    for index in traced.checks:
        lines.append(f"odd{index} = (v{index} != v{index}) | (tl.abs(v{index}) == float('inf'))")
        lines.append(f"bad{index} = tl.sum((alive & odd{index}).to(tl.int32))")
        lines.append(f"tl.store(found, 1.0, mask=bad{index} > 0)")
    return _PRELUDE + _ENTRY % "\n".join(f"    {line}" for line in lines if line)


def _line(
    i: int,
    op: str,
    args: tuple[int | float | str, ...],
    storages: dict[str, Storage],
    names: tuple[str, ...],
    acc: str,
) -> str:
    if op == "load":
        name = str(args[0])
        first = f"tl.load({name}0 + i, mask=alive, other=0)"
        second = f"tl.load({name}1 + i, mask=alive, other=0)"
        if storages[name].kind == "split":
            return f"v{i} = join({first}, {second})"
        if storages[name].kind == "plain":
            rounded = _rounded(f"m{i}", storages[name].dtypes[1])
            return f"m{i} = {first}\n    v{i} = honoured(m{i}, {rounded}, {second}).to({acc})"
        return f"v{i} = {first}.to({acc})"
    if op == "scalar":
        return f"v{i} = tl.load(scalars + {names.index(str(args[0]))} * rows + r)"
    if op == "const":
        return f"v{i} = tl.full((1,), {float(args[0])!r}, {acc})"
    operands = [f"v{a}" for a in args]
    # The plain forms are approximate in fp32; fp64 has only exact ones.
    if op == "div":
        return f"v{i} = {'tl.div_rn({}, {})' if acc == 'tl.float32' else '{} / {}'}".format(*operands)
    if op == "sqrt":
        return f"v{i} = {'tl.sqrt_rn({})' if acc == 'tl.float32' else 'tl.sqrt({})'}".format(*operands)
    return f"v{i} = {_OPERATIONS[op].format(*operands)}"


def _stores(name: str, storage: Storage, value: str) -> list[str]:
    if storage.kind == "split":
        forms = [f"half_away({value})", f"low_bits({value})"]
    elif storage.kind == "stochastic":
        forms = [f"stochastic({value}, seed, begin + i)"]
    else:
        if storage.kind == "plain":  # the weight is the master rounded, not a float64 value rounded once
            value += ".to(tl.float32)"
        forms = [_rounded(value, dtype) for dtype in storage.dtypes]
    return [f"tl.store({name}{part} + i, {form}, mask=alive)" for part, form in enumerate(forms)]


def _rounded(value: str, dtype: torch.dtype) -> str:
    return f"nearest({value})" if dtype is torch.bfloat16 else f"{value}.to({_TYPES[dtype]})"
