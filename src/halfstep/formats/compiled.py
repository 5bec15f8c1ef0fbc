"""Rounding to a format in one pass over memory, in C++ for the CPU; ``reference.py`` has the same arithmetic.

The loops are plain and the compiler vectorizes them, so nothing in them branches: a choice is a mask or a minimum of
integers. The bits of magnitudes are compared as integers, where a NaN is above infinity and every order is kept. The
functions of the source, from its top:

- ``even`` rounds to the nearest even by an addition: ``|y|`` in ``[2^e, 2^(e+1))`` plus ``2^(e+23-M)`` keeps exactly M
  fraction bits. ``e`` is held at the least exponent or above, which makes the subnormal numbers.
- ``element`` rounds one scaled number, and ``scales`` computes, for one block, the factor ``before`` rounding and the
  factor ``after`` it.
- ``bits_at`` reads a magnitude as an integer of the size of the number, ``widened`` gives its bits in fp32, and
  ``largest`` finds the largest magnitude of a tensor.
- ``lost`` is the squared error of a block, and ``choose`` takes the scale with the smaller one (``"4over6"``).
- ``rows`` rounds blocks that follow each other in memory, SOME at a time, so that their scales are vectors too;
  ``columns`` rounds blocks down the columns of matrices, TOGETHER columns in a block and SOME columns at a time.
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
from .reference import GREATEST_INVERSE, LEAST_BLOCK_SCALE, LEAST_TENSOR_SCALE, greatest_scale, rule_addend

__all__ = ["round_to"]

_SERIAL = 32768  # fewer elements than this are not worth waking threads for

_SOURCE = """
typedef int32_t i32; typedef int64_t i64; typedef uint32_t u32;
static inline i32 ib(float x) { return (i32)bits_of(x); }
static inline float fb(i32 u) { return of_bits((u32)u); }
static inline i32 least(i32 a, i32 b) { return a < b ? a : b; }
static inline i32 most(i32 a, i32 b) { return a > b ? a : b; }
const i32 ABS = 0x7fffffff, INF = 0x7f800000, SIGN = INT32_MIN, NAN_BITS = 0x7fc00000;
struct Run { i32 addend, infinite; float of_tensor, inverse; u32 seed; };

template <int M, int LEAST> static inline float even(float held) {
  const float k = fb(most(ib(held) & INF, (LEAST + 127) << 23) + ((23 - M) << 23));
  return (held + k) - k;
}
static inline u32 random_bits(u32 i, u32 seed) {
  u32 h = i * 0x9e3779b1u + seed;
  h = (h ^ (h >> 15)) * 0x2c1b3c6du;
  h = (h ^ (h >> 12)) * 0x297a2d39u;
  return (h ^ (h >> 15)) >> 8;
}
static inline float element(float y, u32 i, u32 seed) {
  const i32 b = ib(y), a = b & ABS, held = least(a, %(cap)d);
#if %(even)d
  i32 r = ib(even<%(mantissa)d, %(least)d>(fb(held)));
#else
  const i32 spacing = most(held & INF, (%(least)d + 127) << 23) - (%(mantissa)d << 23);
  const float t = fb(held) * fb((254 << 23) - spacing);  // exact
  const i32 whole = (i32)t;
  const float rest = t - (float)whole;
  const i32 up = %(up)s;
  i32 r = ib((float)(whole + up) * fb(spacing));
#endif
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
  after = stored * run.of_tensor;
#elif %(e8m0)d
  i32 e = (i32)((((u32)am + (u32)run.addend) >> 23) - %(top)d);
  const i32 infinite = -(i32)(am == INF) & run.infinite, poison = -(i32)(am > %(poison)d);
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
  return w & (Whole)(((Whole)1 << (8 * sizeof w - 2)) * 2 - 1);
}
static inline Whole most_of(Whole a, Whole b) { return a > b ? a : b; }
static inline i32 widened(Whole w) {
  T x;
  memcpy(&x, &w, sizeof w);
  return ib(wide(x)) & ABS;
}
static i32 largest(const T* x, i64 n, int threads) {
  const i64 piece = 16384, pieces = (n + piece - 1) / piece;
  Whole r = 0;
  #pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1) reduction(max:r)
  for (i64 c = 0; c < pieces; ++c) {
    const i64 end = n - c * piece < piece ? n - c * piece : piece;
    Whole here = 0;
    for (i64 i = 0; i < end; ++i) here = most_of(here, bits_at(x + c * piece + i));
    r = most_of(r, here);
  }
  return widened(r);
}
static inline double lost(const T* x, i64 n, i64 width, i64 together, float before, float after) {
  double sum = 0.0;
  for (i64 i = 0; i < n; ++i)
    for (i64 j = 0; j < together; ++j) {
      const float a = fb(ib(wide(x[i * width + j])) & ABS);
      const double d = a - even<%(mantissa)d, %(least)d>(fb(least(ib(a * before), %(cap)d))) * after;
      sum += d * d;
    }
  return sum;
}
static inline void choose(const T* x, i64 n, i64 width, i64 together, i32 am, const Run& run, float& b6, float& a6) {
  float b4, a4;
  scales(am, run, 1.5f, b4, a4);
  if (lost(x, n, width, together, b4, a4) < lost(x, n, width, together, b6, a6)) b6 = b4, a6 = a4;
}
static inline void pass(const T* x, T* y, i64 n, float before, float after, u32 place, u32 seed) {
  #pragma omp simd
  for (i64 i = 0; i < n; ++i) y[i] = narrow<T>(element(wide(x[i]) * before, place + (u32)i, seed) * after);
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
    T* yc = y + c * SOME * side;
    for (int b = 0; b < m; ++b) {
      Whole r = 0;
      for (i64 i = 0; i < side; ++i) r = most_of(r, bits_at(xc + b * side + i));
      am[b] = widened(r);
    }
    #pragma omp simd
    for (int b = 0; b < m; ++b) scales(am[b], run, 1.0f, before[b], after[b]);
    for (int b = 0; b < %(four_over_six)d * m; ++b)
      choose(xc + b * side, side, 1, 1, am[b], run, before[b], after[b]);
    for (int b = 0; b < m; ++b)
      pass(xc + b * side, yc + b * side, side, before[b], after[b], (u32)((c * SOME + b) * side), run.seed);
  }
}
template <int TOGETHER> static void columns(const T* x, T* y, i64 blocks, i64 side, i64 width, Run run, int threads) {
  const int SOME = 256;
  const i64 windows = (width + SOME - 1) / SOME;
  #pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (i64 c = 0; c < blocks * windows; ++c) {
    const i64 left = c %% windows * SOME, start = c / windows * side * width + left;
    const int m = (int)(width - left < SOME ? width - left : SOME);
    Whole top[SOME] = {};
    i32 am[SOME];
    float before[SOME], after[SOME];
    for (i64 i = 0; i < side; ++i) {
      const T* xi = x + start + i * width;
      for (int j = 0; j < m; ++j) top[j] = most_of(top[j], bits_at(xi + j));
    }
    for (int j = 0; j < m; ++j) am[j] = widened(top[j]);
    if (TOGETHER > 1) {
      for (int k = 0; k < m / TOGETHER; ++k) {
        i32 r = 0;
        for (int j = 0; j < TOGETHER; ++j) r = most(r, am[k * TOGETHER + j]);
        am[k] = r;
      }
    }
    #pragma omp simd
    for (int k = 0; k < m / TOGETHER; ++k) scales(am[k], run, 1.0f, before[k], after[k]);
    for (int k = 0; k < %(four_over_six)d * m / TOGETHER; ++k)
      choose(x + start + k * TOGETHER, side, width, TOGETHER, am[k], run, before[k], after[k]);
    if (TOGETHER > 1) {
      for (int k = m / TOGETHER - 1; k >= 0; --k) {
        const float b = before[k], a = after[k];
        for (int j = 0; j < TOGETHER; ++j) before[k * TOGETHER + j] = b, after[k * TOGETHER + j] = a;
      }
    }
    for (i64 i = 0; i < side; ++i) {
      const T* xi = x + start + i * width;
      T* yi = y + start + i * width;
      const u32 place = (u32)(start + i * width);
      #pragma omp simd
      for (int j = 0; j < m; ++j)
        yi[j] = narrow<T>(element(wide(xi[j]) * before[j], place + (u32)j, run.seed) * after[j]);
    }
  }
}
extern "C" void run(const T* x, T* y, i64 outer, i64 n, i64 inner, i32 addend, i32 infinite, float amax, u32 seed,
                    int threads) {
  Run run = {addend, infinite, 1.0f, 1.0f, seed};
  const i64 all = outer * n * inner;
#if %(tensor)d
  float before, after;
  scales(amax < 0.0f ? largest(x, all, threads) : ib(amax), run, 1.0f, before, after);
  const i64 piece = 16384;
  #pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (i64 i = 0; i < all; i += piece)
    pass(x + i, y + i, all - i < piece ? all - i : piece, before, after, (u32)i, seed);
#else
#if %(e4m3)d
  const i32 most_of_all = largest(x, all, threads);
  const float s = fb(most_of_all) / %(max_twice)s;
  run.of_tensor = most_of_all == 0 ? 1.0f : (s < %(least_tensor)s ? %(least_tensor)s : s);
  run.inverse = 1.0f / run.of_tensor;
#endif
  const i64 side = %(side)d ? %(side)d : n;
  if (inner == 1 && !%(square)d) rows<%(side)d>(x, y, all / side, side, run, threads);
  else columns<%(together)d>(x, y, outer * n / side, side, inner, run, threads);
#endif
}
"""


def round_to(tensor: torch.Tensor, out: torch.Tensor, format: Format, dim: int, amax: float | None, seed: int) -> bool:
    """Round a tensor into ``out``, both contiguous.

    Returns:
        True if it was done; False if the library cannot be built, the sides of squares are not along the last two
        dimensions, or the rule is "eden". Then nothing was written.
    """
    square = format.sides is not None and format.sides[0] > 1
    dim %= max(1, tensor.dim())
    if (square and dim < tensor.dim() - 2) or format.scale_rule == "eden":
        return False
    try:
        run = _run(format if format.scale_rule == "4over6" else format.replace(scale_rule="floor"), tensor.dtype)
    except compiler.FAILURES as error:
        compiler.give_up(error)
        return False
    if format.block == "tensor":
        tensor, dim = tensor.view(-1), 0
    dim = tensor.dim() - 2 if square else dim
    n, inner = tensor.shape[dim], tensor.shape[dim + 1 :].numel()
    run(
        tensor.data_ptr(),
        out.data_ptr(),
        *(tensor.numel() // (n * inner), n, inner),
        rule_addend(format),
        -(format.scale_rule == "rceil"),
        -1.0 if amax is None else amax,
        seed,
        torch.get_num_threads() if tensor.numel() >= _SERIAL else 1,
    )
    return True


@functools.cache
def _run(format: Format, dtype: torch.dtype) -> ctypes._NamedFuncPointer:
    run = compiler.build("format", source(format, dtype)).run
    pointer, integer, short = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
    run.argtypes = [pointer] * 2 + [integer] * 3 + [short] * 2 + [ctypes.c_float, ctypes.c_uint32, ctypes.c_int]
    run.restype = None
    return run


def source(format: Format, dtype: torch.dtype) -> str:
    """Print the C++ source that rounds tensors of a dtype to a format; a scale rule is an argument of it."""
    element = format.numbers
    greatest = _bits(element.greatest)
    sides = format.sides or (1, 0)
    facts = {
        "mantissa": element.mantissa,
        "least": element.least_exponent,
        "top": element.greatest_exponent,
        "max": _literal(element.greatest),
        "max_twice": _literal(greatest_scale(format) * element.greatest),
        "four_over_six": format.scale_rule == "4over6",
        "greatest": greatest,
        "cap": greatest if format.saturate else _bits(2 * element.greatest),
        "saturate": format.saturate,
        "overflow": _bits(0.0 if element.overflow is None else element.overflow),
        "poison": 0x7F800000 - (element.greatest_exponent == 0),
        "even": format.rounding == "even",
        "up": "rest >= 0.5f" if format.rounding == "away" else "(i32)(rest * 16777216.0f) > (i32)random_bits(i, seed)",
        "no_minus_zero": " + 0.0f" if element.dtype is torch.int8 else "",
        "e4m3": format.scale == "e4m3",
        "e8m0": format.scale == "e8m0",
        "least_block": _literal(LEAST_BLOCK_SCALE),
        "least_tensor": _literal(LEAST_TENSOR_SCALE),
        "most_inverse": _literal(GREATEST_INVERSE),
        "tensor": format.block == "tensor",
        "square": sides[0] > 1,
        "side": sides[1],
        "together": sides[0],
    }
    return (
        PRELUDE % {"acc": "float"}
        + f"typedef {C_TYPES[dtype]} T;\ntypedef int{8 * dtype.itemsize}_t Whole;\n"
        + _SOURCE % facts
    )


def _bits(number: float) -> int:
    return int(struct.unpack("<i", struct.pack("<f", number))[0])


def _literal(number: float) -> str:
    return number.hex() + "f"
