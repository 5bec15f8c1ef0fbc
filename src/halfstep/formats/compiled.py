"""Rounding to a format in one pass over memory, in C++ for the CPU; ``reference.py`` has the same arithmetic.

The loops are plain and the compiler vectorizes them, so nothing in them branches: a choice is a mask or a minimum of
integers. The bits of magnitudes are compared as integers, where a NaN is above infinity and every order is kept. The
functions of the source, from its top:

- ``even`` rounds to the nearest even by an addition: ``|y|`` in ``[2^e, 2^(e+1))`` plus ``2^(e+23-M)`` keeps exactly M
  fraction bits. ``e`` is held at the least exponent or above, which makes the subnormal numbers.
- ``steps_up`` rounds by counting steps, one more where the rest is above a bar: half a step, or random.
- ``element`` rounds one scaled number, and ``scales`` computes, for one block, the factor ``before`` rounding and the
  factor ``after`` it.
- ``bits_at`` reads a magnitude as an integer of the size of the number, ``widened`` gives its bits in fp32, and
  ``largest`` finds the largest magnitude of a tensor.
- ``lost`` is the squared error of a number; the scale with the smaller sum is taken (``"4over6"``).
- ``add`` and ``corrected`` are for the rule ``"eden"``: two sums over a GROUP of blocks, in the order of
  ``reference.in_order``, and the scale of a block that is corrected by their quotient.
- ``soon`` asks memory for numbers that are read and written next.
- ``rows`` rounds blocks that follow each other in memory, SOME at a time, so that their scales are vectors too;
  ``columns`` rounds blocks down the columns of matrices, TOGETHER columns in a block and SOME columns at a time. Sums
  over a block in ``columns`` are vectors over SOME columns.
- ``run`` rounds a tensor of ``outer`` matrices with ``n`` rows (the dimension of the blocks) and ``inner`` columns.
"""

from __future__ import annotations

import ctypes
import functools
import struct

import torch

from ..kernels.backends import compiler
from ..kernels.backends.cpp import C_TYPES, PRELUDE
from .format import Format
from .reference import GREATEST_INVERSE, LEAST_BLOCK_SCALE, LEAST_TENSOR_SCALE, greatest_of, greatest_scale, rule_addend

__all__ = ["round_to"]

_SERIAL = 32768  # fewer elements than this are not worth waking threads for

_SOURCE = """
typedef int32_t i32;
typedef int64_t i64;
typedef uint32_t u32;
static inline i32 ib(float x) { return (i32)bits_of(x); }
static inline float fb(i32 u) { return of_bits((u32)u); }
static inline i32 least(i32 a, i32 b) { return a < b ? a : b; }
template <class I> static inline I most(I a, I b) { return a > b ? a : b; }
const int LANES = 16, GROUP = %(eden)d ? 8 : 1;  // of the rule "eden": numbers of a block, blocks of a group
const i32 ABS = 0x7fffffff, INF = 0x7f800000, SIGN = INT32_MIN, NAN_BITS = 0x7fc00000;
struct Run { i32 addend, infinite; float of_tensor, inverse; u32 seed; i64 each; };

template <int M, int LEAST> static inline float even(float held) {
  const float k = fb(most(ib(held) & INF, (LEAST + 127) << 23) + ((23 - M) << 23));
  return (held + k) - k;
}
static inline i32 random_bits(u32 i, u32 seed) { return (i32)(mix(i * 0x9e3779b1u + seed) >> 8); }
template <int M, int LEAST> static inline float steps_up(float held, i32 bar) {
  const i32 spacing = most(ib(held) & INF, (LEAST + 127) << 23) - (M << 23);
  const float t = held * fb((254 << 23) - spacing);  // exact
  const i32 whole = (i32)t, up = (i32)((t - (float)whole) * 16777216.0f) > bar;
  return (float)(whole + up) * fb(spacing);
}
static inline float element(float y, u32 i, u32 seed) {
  const i32 b = ib(y), a = b & ABS;
  const float held = fb(least(a, %(cap)d));
  i32 r = ib(%(rounded)s);
#if !%(saturate)d
  const i32 over = -(i32)(r > %(greatest)d);
  r = (r & ~over) | (%(overflow)d & over);
#endif
  const i32 nan = -(i32)(a > INF);
  return fb(((r | (b & SIGN)) & ~nan) | (b & nan))%(no_minus_zero)s;
}
static inline float power(i32 e) { return fb(most(e << 23, 1 << 22)); }  // 2^-127 is subnormal
static inline void scales(i32 am, const Run& run, float times, float& before, float& after) {
#if %(e4m3)d
  float s = (fb(am) / %(max)s) / run.of_tensor * times;
  s = s < %(least_block)s ? %(least_block)s : s;
  s = s > 448.0f ? 448.0f : s;
  const float stored = even<3, -6>(s);
  before = run.inverse / stored;
  after = %(eden)d ? stored : stored * run.of_tensor;
#elif %(e8m0)d
  i32 e = (i32)((((u32)am + (u32)run.addend) >> 23) - %(top)d);
  const i32 infinite = -(i32)(am == INF) & run.infinite, poison = -(i32)(am > INF - (%(top)d == 0));
  e = most(least((e & ~infinite) | (254 & infinite), 254), 0);
  before = fb((ib(power(254 - e)) & ~poison) | (NAN_BITS & poison));
  after = fb((ib(power(e)) & ~poison) | (NAN_BITS & poison));
#else
  float s = %(max)s / fb(am);
  s = s > %(most_inverse)s ? %(most_inverse)s : s;
  before = am == 0 ? 1.0f : s;
  after = 1.0f / before;
#endif
}
static inline Whole bits_at(const T* x) {
  Whole w;
  memcpy(&w, x, sizeof w);
  return w & std::numeric_limits<Whole>::max();
}
static inline i32 widened(Whole w) {
  T x;
  memcpy(&x, &w, sizeof w);
  return ib(wide(x)) & ABS;
}
static i32 largest(const T* x, i64 n, int threads) {
  Whole r = 0;
  #pragma omp parallel for simd schedule(static) num_threads(threads) if (parallel: threads > 1) reduction(max:r)
  for (i64 i = 0; i < n; ++i) r = most(r, bits_at(x + i));
  return widened(r);
}
static inline double lost(T x, float before, float after) {
  const float a = fb(ib(wide(x)) & ABS);
  const double d = a - even<%(mantissa)d, %(least)d>(fb(least(ib(a * before), %(cap)d))) * after;
  return d * d;
}
static inline double lost_by(const T* x, i64 n, float before, float after) {
  double sum = 0.0;
  for (i64 i = 0; i < n; ++i) sum += lost(x[i], before, after);
  return sum;
}
static inline void add(float y, float& exact, float& kept) {
  exact += y * y;
  kept += y * element(y, 0, 0);
}
static inline float corrected(float stored, float exact, float kept, i64 block, const Run& run) {
  const float wanted = stored * (kept == 0.0f ? 1.0f : exact / kept), held = fb(least(ib(wanted), ib(448.0f)));
  return steps_up<3, -6>(held, random_bits((u32)block, run.seed)) * run.of_tensor;
}
static inline void soon(const T* x, const T* y, i64 start, i64 n) {
  for (i64 i = start; i < start + n; i += 64 / sizeof(T)) __builtin_prefetch(x + i), __builtin_prefetch(y + i, 1);
}
template <int SIDE> static void rows(const T* x, T* y, i64 count, i64 n, Run run, int threads) {
  const int SOME = SIDE ? 64 : 1;
  const i64 side = SIDE ? SIDE : n, chunks = (count + SOME - 1) / SOME;
  #pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (i64 c = 0; c < chunks; ++c) {
    i32 am[SOME];
    float before[SOME], after[SOME];
    const int m = (int)(count - c * SOME < SOME ? count - c * SOME : SOME);
    const T* xc = x + c * SOME * side;
    for (int b = 0; b < m; ++b) {
      Whole r = 0;
      for (i64 i = 0; i < side; ++i) r = most(r, bits_at(xc + b * side + i));
      am[b] = widened(r);
    }
    #pragma omp simd
    for (int b = 0; b < m; ++b) scales(am[b], run, 1.0f, before[b], after[b]);
    for (int b = 0; b < %(four_over_six)d * m; ++b) {
      float b4, a4;
      scales(am[b], run, 1.5f, b4, a4);
      const T* xb = xc + b * side;
      if (lost_by(xb, side, b4, a4) < lost_by(xb, side, before[b], after[b])) before[b] = b4, after[b] = a4;
    }
    for (int g = 0; g < %(eden)d * m; g += GROUP) {
      float exact[LANES] = {}, kept[LANES] = {};
      for (int b = g; b < g + GROUP; ++b)
        for (int i = 0; i < LANES; ++i) add(wide(xc[b * side + i]) * before[b], exact[i], kept[i]);
      for (int i = 1; i < LANES; ++i) exact[0] += exact[i], kept[0] += kept[i];
      for (int b = g; b < g + GROUP; ++b) after[b] = corrected(after[b], exact[0], kept[0], c * SOME + b, run);
    }
    for (int b = 0; b < m; ++b) {
      const i64 start = (c * SOME + b) * side;
      soon(x, y, start + SOME * side, side);
      #pragma omp simd
      for (i64 i = start; i < start + side; ++i)
        y[i] = narrow<T>(element(wide(x[i]) * before[b], (u32)i, run.seed) * after[b]);
    }
  }
}
template <int TOGETHER> static void columns(const T* x, T* y, i64 blocks, i64 side, i64 width, Run run, int threads) {
  const int SOME = 256;
  const i64 windows = (width + SOME - 1) / SOME;
  #pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (i64 c = 0; c < blocks / GROUP * windows; ++c) {
    const i64 left = c %% windows * SOME, first = c / windows * GROUP, start = first * side * width + left;
    const int m = (int)(width - left < SOME ? width - left : SOME);
    float before[GROUP][SOME], after[GROUP][SOME];
    for (int g = 0; g < GROUP; ++g) {
      const T* xg = x + start + g * side * width;
      Whole top[SOME] = {};
      i32 am[SOME];
      for (i64 i = 0; i < side; ++i) {
        soon(x, y, start + (g * side + i + 2) * width, m);
        for (int j = 0; j < m; ++j) top[j] = most(top[j], bits_at(xg + i * width + j));
      }
      for (int j = 0; j < m; j += TOGETHER) {
        for (int k = 1; k < TOGETHER; ++k) top[j] = most(top[j], top[j + k]);
        for (int k = 0; k < TOGETHER; ++k) am[j + k] = widened(top[j]);
      }
      #pragma omp simd
      for (int j = 0; j < m; ++j) scales(am[j], run, 1.0f, before[g][j], after[g][j]);
#if %(four_over_six)d
      double six[SOME] = {}, four[SOME] = {};
      float b4[SOME], a4[SOME];
      for (int j = 0; j < m; ++j) scales(am[j], run, 1.5f, b4[j], a4[j]);
      for (i64 i = 0; i < side; ++i)
        for (int j = 0; j < m; ++j) {
          six[j] += lost(xg[i * width + j], before[g][j], after[g][j]);
          four[j] += lost(xg[i * width + j], b4[j], a4[j]);
        }
      for (int j = 0; j < m; j += TOGETHER) {
        for (int k = 1; k < TOGETHER; ++k) six[j] += six[j + k], four[j] += four[j + k];
        for (int k = 0; k < TOGETHER && four[j] < six[j]; ++k) before[g][j + k] = b4[j], after[g][j + k] = a4[j];
      }
#endif
    }
#if %(eden)d
    float exact[SOME] = {}, kept[SOME] = {};
    for (i64 i = 0; i < LANES; ++i) {
      float exact_i[SOME] = {}, kept_i[SOME] = {};
      for (int g = 0; g < GROUP; ++g)
        for (int j = 0; j < m; ++j)
          add(wide(x[start + (g * side + i) * width + j]) * before[g][j], exact_i[j], kept_i[j]);
      for (int j = 0; j < m; ++j) exact[j] += exact_i[j], kept[j] += kept_i[j];
    }
    for (int g = 0; g < GROUP; ++g) {
      const i64 row = first / run.each * width + left, at = first %% run.each + g;
      for (int j = 0; j < m; ++j)
        after[g][j] = corrected(after[g][j], exact[j], kept[j], (row + j) * run.each + at, run);
    }
#endif
    for (int g = 0; g < GROUP; ++g)
      for (i64 i = g * side; i < (g + 1) * side; ++i) {
        const i64 row = start + i * width;
        #pragma omp simd
        for (int j = 0; j < m; ++j)
          y[row + j] = narrow<T>(element(wide(x[row + j]) * before[g][j], (u32)(row + j), run.seed) * after[g][j]);
      }
  }
}
extern "C" void run(const T* x, T* y, i64 outer, i64 n, i64 inner, i32 addend, i32 infinite, float amax, u32 seed,
                    int threads) {
  const i64 all = outer * n * inner, side = %(side)d ? %(side)d : n;
  Run run = {addend, infinite, 1.0f, 1.0f, seed, n / side};
#if %(tensor)d
  float before, after;
  scales(amax < 0.0f ? largest(x, all, threads) : ib(amax), run, 1.0f, before, after);
  #pragma omp parallel for simd schedule(static) num_threads(threads) if (parallel: threads > 1)
  for (i64 i = 0; i < all; ++i) y[i] = narrow<T>(element(wide(x[i]) * before, (u32)i, seed) * after);
#else
#if %(e4m3)d
  const i32 most_of_all = largest(x, all, threads);
  const float s = fb(most_of_all) / %(max_twice)s;
  run.of_tensor = most_of_all == 0 ? 1.0f : (s < %(least_tensor)s ? %(least_tensor)s : s);
  run.inverse = 1.0f / run.of_tensor;
#endif
  if (inner == 1 && %(together)d == 1) rows<%(side)d>(x, y, all / side, side, run, threads);
  else columns<%(together)d>(x, y, outer * n / side, side, inner, run, threads);
#endif
}
"""


def round_to(tensor: torch.Tensor, out: torch.Tensor, format: Format, dim: int, amax: float | None, seed: int) -> bool:
    """Round a tensor into ``out``, both contiguous.

    Returns:
        True if it was done; False if the library cannot be built, or the sides of squares are not along the last two
        dimensions. Then nothing was written.
    """
    square = format.sides is not None and format.sides[0] > 1
    dim %= max(1, tensor.dim())
    if square and dim < tensor.dim() - 2:
        return False
    try:
        run = _run(format, tensor.dtype)
    except compiler.FAILURES as error:
        compiler.give_up(error)
        return False
    if format.block == "tensor":
        tensor, dim = tensor.view(-1), 0
    dim = tensor.dim() - 2 if square else dim
    n, inner = tensor.shape[dim], tensor.shape[dim + 1 :].numel()
    sizes = tensor.numel() // (n * inner), n, inner
    rule = rule_addend(format), -(format.scale_rule == "rceil")
    threads = torch.get_num_threads() if tensor.numel() >= _SERIAL else 1
    run(tensor.data_ptr(), out.data_ptr(), *sizes, *rule, -1.0 if amax is None else amax, seed, threads)
    return True


@functools.cache
def _run(format: Format, dtype: torch.dtype) -> ctypes._NamedFuncPointer:
    plain = format if format.scale_rule in ("4over6", "eden") else format.replace(scale_rule="floor")
    run = compiler.build("format", source(plain, dtype)).run
    pointer, integer, short = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
    run.argtypes = [pointer] * 2 + [integer] * 3 + [short] * 2 + [ctypes.c_float, ctypes.c_uint32, ctypes.c_int]
    run.restype = None
    return run


def source(format: Format, dtype: torch.dtype) -> str:
    """Print the C++ source that rounds tensors of a dtype to a format; a scale rule is an argument of it."""
    element = format.numbers
    greatest = _bits(element.greatest)
    bar = {"away": ", 0x7fffff", "stochastic": ", random_bits(i, seed)"}.get(format.rounding, "")
    sides = format.sides or (1, 0)
    facts = {
        "mantissa": element.mantissa,
        "least": element.least_exponent,
        "top": element.greatest_exponent,
        "max": _literal(greatest_of(format)),
        "max_twice": _literal(greatest_scale(format) * greatest_of(format)),
        "four_over_six": format.scale_rule == "4over6",
        "eden": format.scale_rule == "eden",
        "greatest": greatest,
        "cap": greatest if format.saturate else _bits(2 * element.greatest),
        "saturate": format.saturate,
        "overflow": _bits(0.0 if element.overflow is None else element.overflow),
        "rounded": f"{'steps_up' if bar else 'even'}<{element.mantissa}, {element.least_exponent}>(held{bar})",
        "no_minus_zero": " + 0.0f" if element.dtype is torch.int8 else "",
        "e4m3": format.scale == "e4m3",
        "e8m0": format.scale == "e8m0",
        "least_block": _literal(LEAST_BLOCK_SCALE),
        "least_tensor": _literal(LEAST_TENSOR_SCALE),
        "most_inverse": _literal(GREATEST_INVERSE),
        "tensor": format.block == "tensor",
        "side": sides[1],
        "together": sides[0],
    }
    types = f"typedef {C_TYPES[dtype]} T;\ntypedef int{8 * dtype.itemsize}_t Whole;\n"
    return PRELUDE % {"acc": "float"} + types + _SOURCE % facts


def _bits(number: float) -> int:
    return int(struct.unpack("<i", struct.pack("<f", number))[0])


def _literal(number: float) -> str:
    return number.hex() + "f"
