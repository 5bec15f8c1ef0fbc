"""The generated Triton kernels, compiled for GPUs that are not there, and what their assembly says.

For each kernel, storage and target: the bytes that each element moves, the width of each access, registers, spills,
occupancy, and whether an instruction in the main path is slow (fp64) or approximate. Nothing runs: these are facts
about compiled programs and no timings.

The main path is the one of a chunk whose tensors are aligned. The compiler's line notes (``.loc``) say which column an
access belongs to, and in which of the two paths it lies.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from halfstep.cli.machine import describe_machine
from halfstep.kernels import multi_tensor
from halfstep.kernels.backends import launch_config, triton, triton_source
from halfstep.kernels.backends.launch_config import LaunchConfig
from halfstep.kernels.blockwise import BLOCK, SIGNED, UNSIGNED
from halfstep.kernels.codegen import Layout
from halfstep.kernels.expr import ElementwiseKernel, trace
from halfstep.kernels.storage import SPLIT, Storage, dense, plain, stochastic
from halfstep.optimizers import adagrad, adam, lamb, muon, novograd, sgd

__all__ = ["KERNELS", "KNOWN", "STORAGES", "TARGETS", "Compiled", "Facts", "compile_for", "facts", "layout_for"]

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


class Chip(NamedTuple):
    """What a target has, for the figures of occupancy.

    Attributes:
        backend: as Triton names it.
        arch: as Triton names it.
        lanes: threads of a warp.
        warps: that fit on a multiprocessor (compute unit).
        blocks: that fit on it.
        registers: of 32 bits, on it.
        shared: bytes of shared memory on it.
    """

    backend: str
    arch: int | str
    lanes: int
    warps: int
    blocks: int
    registers: int
    shared: int


# NVIDIA: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability". AMD: LLVM's assembly names the
# occupancy itself, in waves of a SIMD unit out of 8 (CDNA 3) and 16 (RDNA 3).
TARGETS = {
    "sm_70": Chip("cuda", 70, 32, 64, 32, 65536, 96 << 10),
    "sm_80": Chip("cuda", 80, 32, 64, 32, 65536, 164 << 10),
    "sm_90": Chip("cuda", 90, 32, 64, 32, 65536, 228 << 10),
    "sm_100": Chip("cuda", 100, 32, 64, 32, 65536, 228 << 10),
    "gfx942": Chip("hip", "gfx942", 64, 8, 0, 0, 64 << 10),
    "gfx1100": Chip("hip", "gfx1100", 32, 16, 0, 0, 64 << 10),
}
"""By the name of the architecture: V100, A100, H100, B200, MI300X and RX 7900."""

STORAGES: dict[str, tuple[torch.dtype, Storage, Storage, Storage]] = {
    "fp32": (F32, dense(F32), dense(F32), dense(F32)),
    "fp16 + master": (F16, plain(F16), dense(F32), dense(F32)),
    "bf16 split": (BF16, SPLIT, dense(F32), dense(F32)),
    "bf16 moments": (BF16, SPLIT, dense(BF16), dense(F32)),
    "stochastic": (BF16, stochastic(BF16), dense(F32), dense(F32)),
    "8-bit moments": (BF16, SPLIT, SIGNED, UNSIGNED),
}
"""The dtype of gradients, and the storage of weights, of first moments and of second ones."""

KERNELS: dict[str, ElementwiseKernel] = {
    kernel.name: kernel
    for kernel in (
        multi_tensor.read_gradients,
        adam.adam,
        adam.amsgrad,
        sgd.sgd,
        sgd.momentum_sgd,
        lamb.lamb_moments,
        lamb.lamb_apply,
        novograd.novograd,
        adagrad.adagrad,
        muon.muon_direction,
        muon.muon_apply,
        multi_tensor.scale_kernel,
        multi_tensor.axpby_kernel,
    )
}

KNOWN = {"amsgrad, stochastic, sm_70: spills: 8"}
"""Faults that are let pass: ptxas for Volta puts 4 bytes of a thread on its stack, in a frame of 8."""

_SIXTEEN_BITS = ("grad", "source", "x", "direction")  # columns of the dtype of gradients
_FIRST_MOMENTS = ("exp_avg", "momentum_buffer")
_SECOND_MOMENTS = ("exp_avg_sq", "max_exp_avg_sq")

_SIGNATURE = {
    "chunk_row": "*i64", "chunk_start": "*i64", "chunk_count": "*i64", "first": "*i64", "table": "*i64",
    "skip": "*fp32", "found": "*fp32", "partial": "*fp64", "results": "*fp64", "done": "*i32",
    "rows": "i32", "chunks": "i32", "BLOCK": "constexpr",
}  # fmt: skip


class Compiled(NamedTuple):
    """A kernel compiled for a target."""

    kernel: ElementwiseKernel
    layout: Layout
    target: str
    config: LaunchConfig
    source: str
    assembly: str
    cubin: bytes | None


@dataclass(frozen=True)
class Facts:
    """What the assembly of a kernel says.

    Attributes:
        needed: bytes that an element moves at least: what the update reads and writes.
        moved: bytes that it moves, with its share of the pointers and numbers that a program loads.
        widths: bytes of the narrowest access of each part of each column, in the main path.
        codes: those of 8-bit codes, of which a thread may have four at once: more make too many registers.
        registers: of a thread.
        spills: bytes of a thread that did not find a register.
        shared: bytes of shared memory of a program; only the path that is not the main one passes values through it.
        occupancy: the share of the warps of a multiprocessor that can be there at once.
        in_flight: bytes that the warps of one multiprocessor can have asked for at once.
        fp64: fp64 instructions for each element; those done once a chunk are not counted.
        approximate: approximate divisions and roots; on AMD divisions only.
        fused: multiplications fused with additions, which round once; 0 on AMD, where exact divisions have them.
    """

    needed: float
    moved: float
    widths: dict[str, int]
    codes: list[str]
    registers: int
    spills: int
    shared: int
    occupancy: float
    in_flight: int
    fp64: int
    approximate: int
    fused: int

    def faults(self) -> list[str]:
        """What is not as it should be; nothing for a kernel that is as fast as its memory."""
        narrow = {column: width for column, width in self.widths.items() if width < (4 if column in self.codes else 8)}
        found = [f"accesses of less than 8 bytes: {narrow}"] if narrow else []
        # A program also loads the addresses of all parts of a column, of which 8-bit moments have three.
        if self.moved > (1.06 if self.codes else 1.05) * self.needed:
            found.append(f"{self.moved:.2f} bytes an element are moved where {self.needed} are needed")
        for what in ("spills", "fp64", "approximate", "fused"):
            if getattr(self, what):
                found.append(f"{what}: {getattr(self, what)}")
        return found


def layout_for(kernel: ElementwiseKernel, storage: str) -> Layout:
    """The layout in which a fused optimizer has the columns of a kernel."""
    grads, weights, first, second = STORAGES[storage]
    slots = itertools.count()
    columns = []
    for name in trace(kernel).columns:
        if name == "param":
            form = weights
        elif name in _SIXTEEN_BITS:
            form = dense(grads)
        else:
            form = first if name in _FIRST_MOMENTS else second if name in _SECOND_MOMENTS else dense(F32)
        columns.append((name, next(slots), form))
        for _ in form.dtypes[1:]:
            next(slots)
    seed = ("seed",) if weights.kind == "stochastic" else ()
    return Layout(tuple(columns), trace(kernel).scalars + seed, F32)


def combinations() -> Iterator[tuple[ElementwiseKernel, str]]:
    """Every kernel with every storage that makes another program of it."""
    for kernel in KERNELS.values():
        seen = set()
        for storage in STORAGES:
            layout = layout_for(kernel, storage)
            if layout not in seen:
                seen.add(layout)
                yield kernel, storage


def compile_for(kernel: ElementwiseKernel, layout: Layout, target: str, config: LaunchConfig | None = None) -> Compiled:
    """Compile a kernel for one of ``TARGETS``, whatever GPU is here.

    Args:
        kernel: what to compile.
        layout: of its columns.
        target: its name.
        config: how it is launched; by default as it is where nothing was measured.

    Raises:
        SystemExit: under TRITON_INTERPRET, where Triton has no compiler.
    """
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise SystemExit("triton_offline compiles kernels; unset TRITON_INTERPRET.")
    from triton import compile as triton_compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    chip = TARGETS[target]
    config = config or launch_config.default(kernel)
    function = triton._module(kernel, layout, False).kernel
    scalars = "*fp64" if layout.compute_dtype is torch.float64 else "*fp32"
    signature = {name: {**_SIGNATURE, "scalars": scalars}[name] for name in function.arg_names}
    program = triton_compile(
        ASTSource(function, signature, {"BLOCK": config.elements}),
        target=GPUTarget(chip.backend, chip.arch, chip.lanes),
        options={"num_warps": config.warps, **triton.OPTIONS},
    )
    assembly = program.asm["ptx" if chip.backend == "cuda" else "amdgcn"]
    return Compiled(
        kernel,
        layout,
        target,
        config,
        triton_source.source(kernel, layout),
        assembly,
        program.asm.get("cubin"),
    )


class _Access(NamedTuple):
    """An instruction that moves data: the column it belongs to, if any, its bytes, and whether it stores."""

    column: str | None
    width: int
    stores: bool


def facts(compiled: Compiled) -> Facts:
    """What the assembly of a compiled kernel says."""
    chip, config = TARGETS[compiled.target], compiled.config
    threads = config.warps * chip.lanes
    columns = _columns(compiled.source)
    vectors = next(i for i, line in enumerate(compiled.source.splitlines(), 1) if line.endswith("True, BLOCK)"))
    accesses: list[_Access] = []
    arithmetic: Counter[tuple[str, int, tuple[int, ...]]] = Counter()
    for line, path, instruction in _instructions(compiled.assembly):
        access = _access(instruction)
        if access is not None and line in columns and vectors in path:
            accesses.append(_Access(columns[line], *access))
        elif access is not None and line not in columns and not access[1]:
            accesses.append(_Access(None, *access))
        elif vectors in path:
            arithmetic[instruction.split()[0], line, path] += 1
    moved = sum(a.width * threads / config.elements if a.column else a.width / config.elements for a in accesses)
    loaded = sum(a.width for a in accesses if a.column and not a.stores)
    # What is done for each element appears once for each element of a thread.
    each = [name for (name, *_), count in arithmetic.items() if count >= config.elements // threads]
    registers, spills, shared, occupancy = _resources(compiled)
    return Facts(
        needed=_needed(compiled),
        moved=round(moved, 3),
        widths={c: min(a.width for a in accesses if a.column == c) for c in dict.fromkeys(columns.values())},
        codes=[f"{name}0" for name, _, storage in compiled.layout.columns if storage.kind == "blockwise"],
        registers=registers,
        spills=spills,
        shared=shared,
        occupancy=occupancy,
        in_flight=int(loaded * occupancy * chip.warps * chip.lanes * (4 if chip.backend == "hip" else 1)),
        fp64=sum(".f64" in name or name.endswith("_f64") for name in each),
        approximate=_approximate(arithmetic),
        fused=sum(count for (name, *_), count in arithmetic.items() if name.startswith("fma.")),
    )


def _columns(source: str) -> dict[int, str]:
    """Line of the source -> the part of a column that is loaded or stored there."""
    found = ((i, re.search(r"tl\.(?:load|store)\((\w+) \+ i,", line)) for i, line in enumerate(source.splitlines(), 1))
    return {i: match[1] for i, match in found if match and match[1] != "partial"}


def _needed(compiled: Compiled) -> float:
    traced = trace(compiled.kernel)
    storages = {name: storage for name, _, storage in compiled.layout.columns}
    read = [dtype for name in traced.loads for dtype in _read(storages[name])]
    written = [dtype for name in traced.stores for dtype in storages[name].dtypes[: storages[name].elementwise]]
    coded = [name for name in (*traced.loads, *traced.stores) if storages[name].kind == "blockwise"]
    return sum(dtype.itemsize for dtype in [*read, *written]) + len(coded) * 4 / BLOCK


def _read(storage: Storage) -> tuple[torch.dtype, ...]:
    return storage.dtypes if storage.kind in ("split", "plain") else storage.dtypes[:1]


_LOCATION = re.compile(r"\s*\.loc\s+\d+\s+(\d+)")
_PLACE = re.compile(r"\.py:(\d+):\d+")


def _instructions(assembly: str) -> Iterator[tuple[int, tuple[int, ...], str]]:
    """Each instruction with the line it comes from and the lines of the calls that brought it there."""
    line = 0
    path: tuple[int, ...] = ()
    for text in assembly.splitlines():
        location = _LOCATION.match(text)
        if location:
            line = int(location[1])
            path = tuple(int(place) for place in _PLACE.findall(text))[1:]
        elif text.startswith(("\t", " ")) and not text.strip().startswith((".", ";", "//")):
            code = re.sub(r"^@!?%\w+\s+", "", text.strip())
            if code:
                yield line, path, code


_PTX = re.compile(r"(ld|st)(?:\.\w+)*?\.global\S*?(?:\.v(\d))?\.[a-z]+(\d+)\s")
_AMD = re.compile(r"(?:global|buffer|flat)_(load|store)_(?:d16_)?(?:hi_)?(\w+)")
_AMD_WIDTHS = {
    "dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16, "ushort": 2, "short": 2, "sshort": 2, "ubyte": 1, "byte": 1,
    "b16": 2, "u16": 2, "i16": 2, "b32": 4, "b64": 8, "b96": 12, "b128": 16, "u8": 1, "b8": 1,
    "short_d16": 2, "short_d16_hi": 2,
}  # fmt: skip


def _access(instruction: str) -> tuple[int, bool] | None:
    """The bytes that an instruction moves from or to global memory, and whether it stores."""
    match = _PTX.match(instruction)
    if match:
        return int(match[2] or 1) * int(match[3]) // 8, match[1] == "st"
    match = _AMD.match(instruction)
    return (_AMD_WIDTHS[match[2]], match[1] == "store") if match else None


def _approximate(arithmetic: Counter[tuple[str, int, tuple[int, ...]]]) -> int:
    """PTX says it by name. On AMD an exact division ends with a fix-up of what its reciprocal began.

    Roots are not looked at there: exact and approximate ones begin with the same instruction.
    """
    names: Counter[str] = Counter()
    for (name, *_), count in arithmetic.items():
        names[re.sub(r"_e(32|64)$", "", name)] += count
    ptx = sum(count for name, count in names.items() if re.match(r"(div|sqrt|rsqrt|rcp)\.(approx|full)", name))
    reciprocals = names["v_rcp_f32"] + names["v_rcp_iflag_f32"] - names["v_div_fixup_f32"]
    return ptx + max(0, reciprocals)


def _resources(compiled: Compiled) -> tuple[int, int, int, float]:
    """Registers of a thread, bytes of it that were spilled, shared memory of a program, and occupancy."""
    chip, config = TARGETS[compiled.target], compiled.config
    if compiled.cubin is None:
        figure = {name: int(value) for name, value in re.findall(r"[;.]\s*(\w+):\s+(\d+)", compiled.assembly)}
        spills = figure["ScratchSize"] + figure["vgpr_spill_count"] + figure["sgpr_spill_count"]
        shared = figure["group_segment_fixed_size"]
        return figure["NumVgprs"], spills, shared, figure["Occupancy"] / chip.warps
    from triton.knobs import nvidia

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.cubin)
        file.flush()
        command = [nvidia.cuobjdump.path, "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    figure = {name: int(value) for name, value in re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", usage)}
    shared = figure["SHARED"]
    # Registers are given to warps in pieces of 256.
    warp = -(-figure["REG"] * 32 // 256) * 256
    fits = [chip.warps // config.warps, chip.blocks, chip.registers // (warp * config.warps)]
    fits.append(chip.shared // shared if shared else chip.blocks)
    return figure["REG"], figure["STACK"] + figure["LOCAL"], shared, min(fits) * config.warps / chip.warps


# ---- the command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=list(KERNELS), metavar="NAME")
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS), metavar="NAME")
    parser.add_argument("--storages", nargs="+", choices=STORAGES, default=list(STORAGES), metavar="NAME")
    parser.add_argument("--part", nargs=2, type=int, default=(0, 1), metavar=("K", "N"), help="every Nth from the Kth")
    parser.add_argument("--config", nargs=2, type=int, metavar=("ELEMENTS", "WARPS"), help="of a program")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to a file")


def run(args: argparse.Namespace) -> int:
    """Print a line for each kernel and storage, and every fault; the status is 1 if there is one."""
    config = LaunchConfig(*args.config) if args.config else None
    records: list[dict[str, Any]] = []
    faults: list[str] = []
    heads = [f"{name:>15}" for name in args.targets]
    print(f"{'kernel':<15} {'storage':<14} {'moved':>6} {'needed':>6} {'32-bit':>6} {'16-bit':>6}", *heads)
    chosen = [(k, storage) for k, storage in combinations() if k.name in args.kernels and storage in args.storages]
    first, every = args.part
    for kernel, storage in chosen[first::every]:
        found = {}
        for target in args.targets:
            compiled = compile_for(kernel, layout_for(kernel, storage), target, config)
            found[target] = facts(compiled)
            names = {"kernel": kernel.name, "storage": storage, "target": target, **asdict(compiled.config)}
            records.append({**names, **asdict(found[target])})
            faults.extend(f"{kernel.name}, {storage}, {target}: {fault}" for fault in found[target].faults())
        print(_line(kernel, storage, found), flush=True)
    print("In the columns of the targets: registers of a thread, occupancy, KiB in flight on a multiprocessor.")
    known, faults = [f for f in faults if f in KNOWN], [f for f in faults if f not in KNOWN]
    print(*(f"{fault} (known)" for fault in known), sep="\n", end="\n" if known else "")
    print(*(faults or ["Spills, fp64 instructions for each element, approximate or fused operations: none."]), sep="\n")
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        record = {"benchmark": "triton_offline", "triton": _version(), "machine": describe_machine(torch.device("cpu"))}
        args.json.write_text(json.dumps({**record, "kernels": records}, indent=2) + "\n", encoding="utf-8")
    return int(bool(faults))


def _line(kernel: ElementwiseKernel, storage: str, found: dict[str, Facts]) -> str:
    any_target = next(iter(found.values()))
    sizes = _sizes(kernel, storage)
    widths = {
        size: min((f.widths[c] for f in found.values() for c in f.widths if sizes[c] == size), default=None)
        for size in (4, 2)
    }
    cells = [f"{f.registers:>5} {100 * f.occupancy:>3.0f}% {f.in_flight / 1024:>4.0f}" for f in found.values()]
    moved = max(f.moved for f in found.values())
    shown = [f"{widths[size] or '-':>6}" for size in (4, 2)]
    return " ".join(
        [
            f"{kernel.name:<15} {storage:<14} {moved:>6.2f} {any_target.needed:>6.4g}",
            *shown,
            *(f"{c:>15}" for c in cells),
        ]
    )


def _sizes(kernel: ElementwiseKernel, storage: str) -> dict[str, int]:
    layout = layout_for(kernel, storage)
    return {f"{name}{i}": d.itemsize for name, _, form in layout.columns for i, d in enumerate(form.dtypes)}


@functools.cache
def _version() -> str:
    from triton import __version__

    return str(__version__)
