"""The CPU backend: prints a kernel as one C++ loop over a table of pointers, built once by the system's compiler.

One call covers every row of a table, so a small tensor costs a few nanoseconds instead of a dispatcher call.
"""

from __future__ import annotations

import ctypes
import functools

import torch

from ..blockwise import BLOCK
from ..codegen import GeneratedLauncher, Layout, layout_of
from ..expr import ElementwiseKernel, Trace, trace
from ..storage import Storage
from ..tensor_table import Scalars, TensorTable
from . import compiler
from .blockwise_source import CPP_PRELUDE, suffix

__all__ = ["C_TYPES", "PRELUDE", "CppLauncher"]

_CHUNK = 32768  # elements: 128 KiB of fp32, so that a thread's piece stays in its L2 cache
_SERIAL = 65536  # fewer elements than this are not worth waking threads for
_RUN = 512  # elements whose squares are summed at once
_AHEAD = 4096  # elements: the prefetch distance of a kernel that only reads
_LINE = 16  # elements of fp32 in a cache line
C_TYPES = {
    torch.float32: "float",
    torch.float64: "double",
    torch.float16: "half",
    torch.bfloat16: "uint16_t",
    torch.int16: "int16_t",
    torch.uint8: "uint8_t",
}

PRELUDE = """
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
typedef %(acc)s acc;
struct half { uint16_t bits; };
static inline uint32_t bits_of(float x) { uint32_t u; std::memcpy(&u, &x, 4); return u; }
static inline float of_bits(uint32_t u) { float x; std::memcpy(&x, &u, 4); return x; }
template <class T> static inline acc wide(T x) { return x; }
// float16 by its bits: compilers do not vectorize the conversions of their own _Float16.
static inline acc wide(half x) {
  const uint32_t u = (uint32_t)(x.bits & 0x7fffu) << 13, normal = u + 0x38000000u;
  const uint32_t tiny = bits_of(of_bits(u + 0x38800000u) - of_bits(0x38800000u));
  const uint32_t odd = (u + 0x70000000u) | (u > 0x0f800000u ? 0x00400000u : 0u);
  const uint32_t magnitude = u >= 0x0f800000u ? odd : (u < 0x00800000u ? tiny : normal);
  return of_bits(magnitude | (uint32_t)(x.bits & 0x8000u) << 16);
}
static inline acc wide(uint16_t x) { return of_bits((uint32_t)x << 16); }
template <class T> static inline T narrow(acc x) { return (T)x; }
template <> inline half narrow<half>(acc x) {
  const uint32_t all = bits_of((float)x), u = all & 0x7fffffffu;
  const uint32_t normal = (u - 0x38000000u + 0xfffu + ((u >> 13) & 1u)) >> 13;
  const uint32_t tiny = bits_of(of_bits(u) + 0.5f) - 0x3f000000u;
  const uint32_t odd = u > 0x7f800000u ? 0x7e00u | ((u >> 13) & 0x3ffu) : 0x7c00u;
  const uint32_t magnitude = u >= 0x47800000u ? odd : (u < 0x38800000u ? tiny : normal);
  return {(uint16_t)(magnitude | (all >> 16 & 0x8000u))};
}
// Here and below, a choice between floats is one blend; compilers make more of a choice between 16-bit numbers.
template <> inline uint16_t narrow<uint16_t>(acc x) {
  const float f = (float)x;
  const uint32_t u = bits_of(f), even = u + 0x7fffu + ((u >> 16) & 1u);
  return (uint16_t)(bits_of(f != f ? of_bits(u | 0x00400000u) : of_bits(even)) >> 16);
}
// The sum of both halves is NaN exactly where the weight is NaN, or is zero or infinite with a remainder of another
// weight. Then a NaN keeps its low bits, and the others are the weight.
static inline float join(uint16_t weight, int16_t remainder) {
  const uint32_t high = (uint32_t)weight << 16, low = (uint16_t)remainder;
  const float sum = of_bits(high + (uint32_t)(int32_t)remainder), alone = of_bits(high);
  const float careful = alone != alone ? of_bits(high | low) : alone;
  return sum != sum ? careful : sum;
}
template <class T> static inline acc after_writes(float master, T weight) {
  const acc kept = wide(narrow<T>((acc)master)), found = wide(weight);
  return (kept == found || (kept != kept && found != found)) ? (acc)master : found;
}
static inline uint16_t half_away(uint32_t u) {
  const float x = of_bits(u);
  return (uint16_t)(bits_of(x != x ? of_bits(u | 0x00400000u) : of_bits(u + 0x8000u)) >> 16);
}
static inline uint32_t mix(uint32_t h) {
  h = (h ^ (h >> 16)) * 0x85ebca6bu;
  h = (h ^ (h >> 13)) * 0xc2b2ae35u;
  return h ^ (h >> 16);
}
static inline uint16_t stochastic(float x, uint32_t seed, uint32_t element) {
  uint32_t u = bits_of(x), noisy = u + (mix(element * 0x9e3779b9u + seed) & 0xffffu);
  bool finite = (u & 0x7f800000u) != 0x7f800000u;
  uint32_t high = (noisy & 0x7f800000u) == 0x7f800000u ? ((u >> 16) & 0x8000u) | 0x7f7fu : noisy >> 16;
  return (uint16_t)(finite ? high : (x != x ? (u >> 16) | 0x40u : u >> 16));
}
#if defined(__AVX512F__)
#define VECTOR 64
#elif defined(__AVX__)
#define VECTOR 32
#else
#define VECTOR 16
#endif
typedef acc lanes __attribute__((vector_size(VECTOR), aligned(sizeof(acc)), may_alias));
// fp32 sums vectorize twice as wide as double ones; where one overflows or loses digits, double is taken after all.
// A sum in range also shows that every value is finite. Four vectors, because an addition waits for the one before it.
static inline double sum_of_squares(const acc* x, int64_t n, int* wrong) {
  constexpr int64_t width = sizeof(lanes) / sizeof(acc);
  lanes a = {}, b = {}, c = {}, d = {};
  int64_t done = 0;
  for (; done + 4 * width <= n; done += 4 * width) {
    const lanes* y = (const lanes*)(x + done);
    a += y[0] * y[0];
    b += y[1] * y[1];
    c += y[2] * y[2];
    d += y[3] * y[3];
  }
  a = (a + b) + (c + d);
  acc fast = 0;
  for (int64_t i = 0; i < width; ++i) fast += a[i];
  for (; done < n; ++done) fast += x[done] * x[done];
  if (fast > (acc)1e-20 && fast < (acc)1e30) return (double)fast;
  double exact = 0;
  int bad = 0;
  #pragma omp simd reduction(+:exact) reduction(|:bad)
  for (int64_t i = 0; i < n; ++i) {
    exact += (double)x[i] * (double)x[i];
    bad |= !(std::fabs(x[i]) <= std::numeric_limits<acc>::max());
  }
  if (wrong) *wrong |= bad;
  return exact;
}
static inline acc larger(acc a, acc b) { return (a > b || a != a) ? a : b; }
"""

_ENTRY = """
extern "C" void run(int64_t chunks, const int64_t* row, const int64_t* start, const int64_t* count, int64_t rows,
                    void* const* table, const acc* scalars, const float* skip, float* found, double* partial,
                    int threads) {
  if (skip && *skip != 0.0f) return;
  int bad = 0;
  #pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1) reduction(|:bad)
  for (int64_t c = 0; c < chunks; ++c) {
    const int64_t r = row[c], begin = start[c], n = count[c];
%(setup)s
%(loops)s
%(finish)s
  }
  if (found && bad) *found = 1.0f;
}
"""

_OPERATIONS = {
    "add": "{} + {}",
    "sub": "{} - {}",
    "mul": "{} * {}",
    "div": "{} / {}",
    "sqrt": "std::sqrt({})",
    "maximum": "larger({}, {})",
}


class CppLauncher(GeneratedLauncher):
    """One kernel over one table, as a call into a library.

    Raises:
        subprocess.SubprocessError: if the compiler refuses the source.
    """

    def __init__(self, kernel: ElementwiseKernel, table: TensorTable) -> None:
        layout = layout_of(kernel, table)
        super().__init__(kernel, layout, table, _CHUNK)
        pointers = self._pointers
        self._elements = int(pointers.count.sum())
        addresses = map(torch.Tensor.data_ptr, (pointers.row, pointers.start, pointers.count))
        self._chunks = pointers.chunks, *addresses
        self._library_call = _library_call(kernel, layout)

    def __call__(
        self, scalars: Scalars, *, skip: torch.Tensor | None = None, found: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Run the kernel; see ``Launcher``."""
        pointers, partial, memory = self._pointers, self._partial, self._pointers.memory
        results = torch.zeros_like(self._results) if self._finds else self._results
        if not pointers.chunks:
            return results
        if memory.staged:
            memory.stage_in()
        if skip is not None and self._finds:
            partial.zero_()  # a skipped call writes nothing
        self._library_call(
            *self._chunks,
            self._rows,
            memory.values.data_ptr(),
            self._scalars.fill(scalars).data_ptr(),
            None if skip is None else skip.data_ptr(),
            None if found is None else found.data_ptr(),
            partial.data_ptr(),
            torch.get_num_threads() if self._elements >= _SERIAL else 1,
        )
        if self._finds:
            results.index_add_(1, pointers.row, partial)
        if memory.staged:
            memory.stage_out(self._written)
        return results


@functools.cache
def _library_call(kernel: ElementwiseKernel, layout: Layout) -> ctypes._NamedFuncPointer:
    library = compiler.build(kernel.name, source(kernel, layout))
    run = library.run
    pointer, integer = ctypes.c_void_p, ctypes.c_int64
    run.argtypes = [integer, *[pointer] * 3, integer, *[pointer] * 5, ctypes.c_int]
    run.restype = None
    return run


def source(kernel: ElementwiseKernel, layout: Layout) -> str:
    """Print the C++ source of a kernel."""
    traced = trace(kernel)
    names = layout.scalars
    setup = [f"const acc s_{name} = scalars[{i} * rows + r];" for i, name in enumerate(names) if name != "seed"]
    if "seed" in names:
        setup.append(f"const uint32_t seed = bits_of((float)scalars[{names.index('seed')} * rows + r]);")
    for name, slot, storage in layout.columns:
        for part, dtype in enumerate(storage.dtypes):
            kind = C_TYPES[dtype]
            place = "begin" if part < storage.elementwise else (f"begin / {BLOCK}", "0")[part - storage.elementwise]
            setup.append(f"{kind}* const {name}{part} = ({kind}*)table[{slot + part} * rows + r] + {place};")
    storages = {name: storage for name, _, storage in layout.columns}
    body = [_line(i, node.op, node.args, storages) for i, node in enumerate(traced.nodes)]
    for name, index in traced.stores.items():
        body.extend(_stores(name, storages[name], f"v{index}"))
    clauses, finish = "", []
    if traced.checks:
        setup.append("int wrong = 0;")
        finish.append("bad |= wrong;")
    if unsummed := [i for i in traced.checks if i not in traced.squares]:
        body.extend(f"wrong |= !(std::fabs(v{i}) <= std::numeric_limits<acc>::max());" for i in unsummed)
        clauses = " reduction(|:wrong)"
    setup.extend(f"double q{i} = 0.0;" for i in range(len(traced.squares)))
    finish.extend(f"partial[{i} * chunks + c] = q{i};" for i in range(len(traced.squares)))
    coded = {name: storage for name, storage in storages.items() if storage.kind == "blockwise"}
    if traced.squares or coded:
        loops = _loops_over_runs(traced, clauses, body, _prefetches(traced, storages), coded)
    else:
        loops = _loop("0", "n", clauses, body)
    parts = {"setup": _indent(setup, 4), "loops": _indent(loops, 4), "finish": _indent(finish, 4)}
    acc = C_TYPES[layout.compute_dtype]
    return PRELUDE % {"acc": acc} + (CPP_PRELUDE if coded else "") + _ENTRY % parts


def _loop(begin: str, end: str, clauses: str, body: list[str]) -> list[str]:
    return [
        f"#pragma omp simd{clauses}",
        f"for (int64_t i = {begin}; i < {end}; ++i) {{",
        *(f"  {line}" for line in body if line),
        "}",
    ]


def _prefetches(traced: Trace, storages: dict[str, Storage]) -> list[str]:
    """Prefetch the memory of a kernel that only reads.

    The processor prefetches only to the end of a page, which is too short for a single stream. For many streams, as in
    an update, its own prefetching is best.
    """
    if traced.stores:
        return []
    parts = [f"{name}{part}" for name in traced.loads for part in range(len(storages[name].dtypes))]
    ahead = [f"__builtin_prefetch({part} + {_AHEAD} + i);" for part in parts]
    return [f"for (int64_t i = from; i < to; i += {_LINE}) {{", *_indent(ahead, 2).splitlines(), "}"]


def _loops_over_runs(
    traced: Trace, clauses: str, body: list[str], prefetches: list[str], coded: dict[str, Storage]
) -> list[str]:
    """Loop over short runs whose values stay in L1, where their squares are summed (the sums of runs add up in double),
    or where a block at a time becomes 8-bit codes.
    """
    count, run = range(len(traced.squares)), BLOCK if coded else _RUN
    kept = [f"run{i}[i - from] = v{index};" for i, index in enumerate(traced.squares)]
    flags = ["&wrong" if index in traced.checks else "nullptr" for index in traced.squares]
    encoded = [name for name in traced.stores if name in coded]
    return [
        *(f"acc run{i}[{run}];" for i in count),
        *(f"float {name}_new[{run}];" for name in encoded),
        f"for (int64_t from = 0; from < n; from += {run}) {{",
        f"  const int64_t to = from + {run} < n ? from + {run} : n;",
        *(f"  const float {name}_scale = {name}1[from / {run}];" for name in traced.loads if name in coded),
        *_indent(prefetches, 2).splitlines(),
        *_indent(_loop("from", "to", clauses, [*body, *kept]), 2).splitlines(),
        *(f"  q{i} += sum_of_squares(run{i}, to - from, {flags[i]});" for i in count),
        *(
            f"  encode_{suffix(coded[name])}({name}_new, to - from, {name}0 + from, {name}1 + from / {run});"
            for name in encoded
        ),
        "}",
    ]


def _line(i: int, op: str, args: tuple[int | float | str, ...], storages: dict[str, Storage]) -> str:
    if op == "load":
        name = str(args[0])
        if storages[name].kind == "blockwise":
            return f"const acc v{i} = {name}2[{name}0[i]] * {name}_scale;"
        both = {"split": "join", "plain": "after_writes"}.get(storages[name].kind)
        return f"const acc v{i} = " + (f"{both}({name}0[i], {name}1[i]);" if both else f"wide({name}0[i]);")
    if op == "scalar":
        return f"const acc v{i} = s_{args[0]};"
    if op == "const":
        return f"const acc v{i} = (acc){float(args[0]).hex()};"
    return f"const acc v{i} = {_OPERATIONS[op].format(*(f'v{a}' for a in args))};"


def _stores(name: str, storage: Storage, value: str) -> list[str]:
    if storage.kind == "split":
        return [f"{name}0[i] = half_away(bits_of({value}));", f"{name}1[i] = (int16_t)bits_of({value});"]
    if storage.kind == "stochastic":
        return [f"{name}0[i] = stochastic({value}, seed, (uint32_t)(begin + i));"]
    if storage.kind == "blockwise":
        return [f"{name}_new[i - from] = (float){value};"]
    kinds = [C_TYPES[dtype] for dtype in storage.dtypes]
    if storage.kind == "plain":  # the weight is the rounded master, not a float64 value rounded once
        return [f"{name}0[i] = (float){value};", f"{name}1[i] = narrow<{kinds[1]}>({name}0[i]);"]
    return [f"{name}{part}[i] = narrow<{kind}>({value});" for part, kind in enumerate(kinds)]


def _indent(lines: list[str], width: int) -> str:
    return "\n".join(" " * width + line for line in lines)
