"""Generated source for 8-bit codes: functions that compute the codes of a block; see ``kernels.blockwise``."""

from __future__ import annotations

from ..blockwise import BLOCK, OFFSET, PER_WIDTH, SIGNED, TINY, UNSIGNED, Grid, grid
from ..storage import Storage

__all__ = ["CPP_PRELUDE", "TRITON_PRELUDE", "suffix"]


def suffix(storage: Storage) -> str:
    """Return the suffix of the function names for a storage."""
    return "signed" if storage.signed else "unsigned"


def _float(number: float) -> str:
    return number.hex() + "f"


def _cpp(storage: Storage) -> str:
    """Print the function that writes the codes and the ``absmax`` of a block."""
    rule: Grid = grid(storage)
    decades = "\n    ".join(
        f"power = a >= {_float(lowest)} ? all({_float(power)}) : power, "
        f"width = a >= {_float(lowest)} ? all({_float(width)}) : width;"
        for lowest, power, width in rule.decades[1:]
    )
    ends = (
        f"code = a < {_float(rule.zero)} ? ints{{}} : code;\n"
        "    code = 127 + (q < 0.0f ? (code < 127 ? -code : ints{} - 127) : code);"
        if storage.signed
        else "code = (a == 0.0f ? ints{} + 1 : (code < 2 ? ints{} + 2 : code)) - 1;"
    )
    return f"""
static inline void encode_{suffix(storage)}(float* x, int64_t n, uint8_t* codes, float* absmax) {{
  constexpr int64_t width_of_vectors = sizeof(floats) / sizeof(float);
  for (int64_t i = n; i < {BLOCK}; ++i) x[i] = 0.0f;
  uint32_t largest = 0;  // of the bits without the sign: NaN is above infinity there
  #pragma omp simd reduction(max:largest)
  for (int64_t i = 0; i < {BLOCK}; ++i) {{
    const uint32_t u = bits_of(x[i]) & 0x7fffffffu;
    largest = u > largest ? u : largest;
  }}
  const float scale = of_bits(largest), inverse = 1.0f / (scale < {_float(TINY)} ? {_float(TINY)} : scale);
  *absmax = scale;
  uint8_t all_codes[{BLOCK}];
  for (int64_t i = 0; i < {BLOCK}; i += width_of_vectors) {{
    const floats q = *(const floats*)(x + i) * inverse, a = (floats)((ints)q & 0x7fffffff);
    floats power = all({_float(rule.decades[0][1])}), width = all({_float(rule.decades[0][2])});
    {decades}
    const floats last = width + width - 1.0f;
    floats y = ((a * power - {_float(OFFSET)}) * {_float(PER_WIDTH)} + 1.0f) * width;
    y = y < last ? y : last;
    y = a > {_float(rule.top)} ? all({_float(2 * rule.decades[-1][2])}) : y;
    ints code = __builtin_convertvector(y, ints);
    {ends}
    const bytes narrow = __builtin_convertvector(code, bytes);
    std::memcpy(all_codes + i, &narrow, sizeof narrow);
  }}
  std::memcpy(codes, all_codes, n);
}}
"""


def _triton(storage: Storage) -> str:
    """Print the function that computes the codes and the ``absmax`` of a program's blocks."""
    rule = grid(storage)
    decades = "\n".join(
        f"    width = tl.where(a >= {lowest!r}, {width!r}, width)\n"
        f"    power = tl.where(a >= {lowest!r}, {power!r}, power)"
        for lowest, power, width in rule.decades[1:]
    )
    ends = (
        f"    y = tl.where(a < {rule.zero!r}, 0.0, y)\n"
        "    y = tl.where(q < 0.0, 127.0 - tl.where(y < 127.0, y, 127.0), 127.0 + y)"
        if storage.signed
        else "    y = tl.where(a == 0.0, 1.0, tl.where(y < 2.0, 2.0, y)) - 1.0"
    )
    return f"""

@triton.jit
def encode_{suffix(storage)}(x, alive, SIZE: tl.constexpr):
    x = tl.where(alive, x.to(tl.float32), 0.0)
    bits = (bits_of(x) & 0x7FFFFFFF).to(tl.int32)  # NaN is above infinity there
    absmax = tl.max(tl.reshape(bits, (SIZE // {BLOCK}, {BLOCK})), axis=1).to(tl.float32, bitcast=True)
    inverse = tl.div_rn(1.0, tl.where(absmax < {TINY!r}, {TINY!r}, absmax))
    q = x * tl.reshape(tl.broadcast_to(inverse[:, None], (SIZE // {BLOCK}, {BLOCK})), (SIZE,))
    a = tl.abs(q)
    power = tl.full((SIZE,), {rule.decades[0][1]!r}, tl.float32)
    width = tl.full((SIZE,), {rule.decades[0][2]!r}, tl.float32)
{decades}
    y = ((a * power - {OFFSET!r}) * {PER_WIDTH!r} + 1.0) * width
    last = width + width - 1.0
    y = tl.where(y < last, y, last).to(tl.int32).to(tl.float32)
    y = tl.where(a > {rule.top!r}, {2 * rule.decades[-1][2]!r}, y)
{ends}
    return y.to(tl.int32).to(tl.uint8), absmax
"""


_VECTORS = """
// Vectors by hand: of chains of conditions compilers make branches, which keep a loop from being vectorized.
typedef float floats __attribute__((vector_size(VECTOR), aligned(sizeof(float)), may_alias));
typedef int32_t ints __attribute__((vector_size(VECTOR)));
typedef uint8_t bytes __attribute__((vector_size(VECTOR / 4)));
static inline floats all(float x) { return floats{} + x; }
"""

CPP_PRELUDE = _VECTORS + _cpp(SIGNED) + _cpp(UNSIGNED)
TRITON_PRELUDE = _triton(SIGNED) + _triton(UNSIGNED)
