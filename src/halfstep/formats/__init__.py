"""Number formats of eight bits and fewer (fp8, MX, NVFP4), and products whose operands are rounded to them."""

from .format import Format
from .measuring import measuring
from .quantize import dequantize, error, quantize
from .recipe import RECIPES, Recipe

__all__ = ["RECIPES", "Format", "Recipe", "dequantize", "error", "measuring", "quantize"]
__dir__ = __all__.copy
