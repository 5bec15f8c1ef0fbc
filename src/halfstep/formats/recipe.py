"""A ``Recipe`` says to which formats the operands of a linear layer are rounded. The published recipes have names.

A linear layer has three products. Each sums over another dimension, along which the blocks of its operands lie:

- forward, ``y = x w^T``: the input ``x`` and the weight ``w``, over the features of the input;
- input gradient, ``dx = g w``: the gradient ``g`` of the output and the weight, over the features of the output;
- weight gradient, ``dw = g^T x``: the gradient and the input, over the tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from types import NoneType
from typing import Any, Literal, Union, cast

from torch import nn

from ..core.checks import check_kind, check_switch
from ..core.errors import ArgumentTypeError, ArgumentValueError
from ..torch_internals.compiler_compat import traced_as_constant
from .format import Format
from .torchao_products import MULTIPLE, Pair, check_products

__all__ = [
    "PASSES",
    "PRODUCTS",
    "RECIPES",
    "ByName",
    "LayerChoice",
    "Passes",
    "Products",
    "Recipe",
    "RecipeChoice",
    "divisor",
    "text_of",
]

Products = tuple[str, str, str, int]
"""The formats of the products of one layer, and the size of their transform: see ``Recipe.products``."""

LayerChoice = Callable[[nn.Module, str], "Recipe | str | None"]
"""A function that is called with a linear layer and its name, and returns a recipe, or None for no formats."""

RecipeChoice = Union["Recipe", str, LayerChoice, Mapping[str, "Recipe | str"], None]
"""A value for ``products=``: a recipe, its name, a choice for each layer, a dict of recipes by the names of layers, or
None for no formats."""


class ByName(dict[str, Any]):
    """A choice for each layer, by the recipes of the names in it; other layers have no formats."""

    def __call__(self, module: nn.Module, name: str) -> Recipe | str | None:
        """The recipe of a layer."""
        return self.get(name)


Passes = Literal["forward", "backward", "all"]

PASSES: dict[str, tuple[str, ...]] = {
    "forward": ("forward",),
    "backward": ("input_gradient", "weight_gradient", "hadamard", "requantize"),
}
PASSES["all"] = (*PASSES["forward"], *PASSES["backward"])
"""The fields of a recipe that belong to the forward pass, to the backward pass, and to both."""

PRODUCTS = ("forward", "input_gradient", "weight_gradient")
_SWITCHES = ("attention", "requantize")


@dataclass(frozen=True)
class Recipe:
    """The formats of the operands of a linear layer, and which layers have them.

    A recipe prints as its name, as the nearest name with the fields in which it differs, or as its fields. It parses
    back, ``Recipe.parse(str(recipe)) == recipe``, unless ``layers`` is a function.

    Attributes:
        forward: the formats of input and weight in the forward product.
        input_gradient: the formats of the gradient of the output and of the weight in the product for the gradient of
            the input.
        weight_gradient: the formats of the gradient of the output and of the input in the product for the gradient of
            the weight.
        hadamard: the size of the random Hadamard transform along the tokens of both operands of the weight gradient, a
            power of 2; 0 for none. It spreads outliers, and the product of two transformed operands is the same.
        requantize: True if the backward products read the input and the weight as the forward product has rounded
            them, as a chip does that keeps only those. They are rounded again, since blocks lie along other dimensions.
        amax: ``"current"`` computes the scale of a whole tensor from this tensor; ``"delayed"`` from the largest value
            of the latest 16 tensors in its place, as chips do that read a tensor only once. Compiled code always takes
            the current one.
        backend: ``"emulate"`` rounds the operands and multiplies them in fp32, on any device. ``"torchao"`` runs MXFP8
            and fp8 on the kernels of a device: torchao's ``to_mx`` and ``torch.nn.functional.scaled_mm``. It needs
            torchao 0.18, and a CUDA device of capability 10.0 for MXFP8 or 8.9 for fp8. A CPU has these functions too;
            there MXFP8 operands are multiplied in fp32.
        attention: True if ``amp.auto_cast(products=)`` also rounds the operands of both products of
            ``scaled_dot_product_attention``: queries and keys, and the softmax and the values.
        last_blocks: the part of the blocks of a model, counted from its end, that ``layers="auto"`` leaves out.
        layers: ``"auto"`` leaves out the first and the last linear layer of a model that has more than two, the
            ``last_blocks``, and layers whose sizes no block divides; ``"all"`` only the last of these. A function
            ``layers(module, name)`` returns the recipe of each layer or None.
    """

    forward: Pair = (None, None)
    input_gradient: Pair = (None, None)
    weight_gradient: Pair = (None, None)
    hadamard: int = 0
    requantize: bool = False
    amax: Literal["current", "delayed"] = "current"
    backend: Literal["emulate", "torchao"] = "emulate"
    attention: bool = False
    last_blocks: float = 0.0
    layers: Literal["auto", "all"] | LayerChoice = "auto"

    def __post_init__(self) -> None:
        for name in PRODUCTS:
            pair = getattr(self, name)
            if not isinstance(pair, tuple) or len(pair) != 2:
                raise ArgumentTypeError(f"{name} must be a pair of formats, one for each operand, not {pair!r}.")
            formats = tuple(Format.parse(each) if isinstance(each, str) else each for each in pair)
            for each in formats:
                check_kind(f"Each operand of {name}", each, (Format, NoneType), "a Format, the name of one, or None")
            object.__setattr__(self, name, formats)
        if type(self.hadamard) is not int or self.hadamard & (self.hadamard - 1):
            raise ArgumentValueError(
                f"hadamard={self.hadamard!r} must be a power of 2, such as 16, the number of tokens that are "
                "transformed together; 0 transforms none."
            )
        for name, (one, other) in {"amax": ("current", "delayed"), "backend": ("emulate", "torchao")}.items():
            if getattr(self, name) not in (one, other):
                raise ArgumentValueError(f'{name}={getattr(self, name)!r} must be "{one}" or "{other}".')
        if self.backend == "torchao":
            check_products([getattr(self, name) for name in PRODUCTS], self.hadamard, self.amax)
        for name in _SWITCHES:
            check_switch(name, getattr(self, name))
        if not isinstance(self.last_blocks, (int, float)) or not 0 <= self.last_blocks < 1:
            raise ArgumentValueError(f"last_blocks={self.last_blocks!r} must be a number from 0 to below 1.")
        if self.layers not in ("auto", "all") and not callable(self.layers):
            raise ArgumentValueError(
                f'layers={self.layers!r} must be "auto", "all", or a function that is called with (module, name) and '
                "returns a recipe or None."
            )

    @classmethod
    def of(cls, value: object) -> Recipe:
        """A recipe as a user gave it: a ``Recipe``, a text for ``parse``, or what chooses for each layer."""
        value = ByName(value) if isinstance(value, Mapping) else value
        if callable(value):
            return cls(layers=value)
        return value if isinstance(value, Recipe) else cls.parse(cast(str, value))

    def replace(self, **changes: Any) -> Recipe:
        """Copy the recipe with some fields changed."""
        return replace(self, **changes)

    def only(self, passes: object, otherwise: Recipe) -> Recipe:
        """Copy the recipe, with the products of all other passes from another recipe.

        If the recipe has no formats, its remaining fields are also from the other recipe.

        Raises:
            ArgumentValueError: if ``passes`` is none of ``PASSES``.
        """
        if not isinstance(passes, str) or passes not in PASSES:
            raise ArgumentValueError(f"passes={passes!r} must be one of {', '.join(map(repr, PASSES))}.")
        if not self.formats:
            return otherwise.replace(**{name: getattr(self, name) for name in PASSES[passes]})
        kept = [name for name in PASSES["all"] if name not in PASSES[passes]]
        return self.replace(**{name: getattr(otherwise, name) for name in kept})

    @property
    def formats(self) -> list[Format]:
        """The formats of all operands."""
        return [each for name in PRODUCTS for each in getattr(self, name) if each is not None]

    @property
    def by_inputs(self) -> int:
        """The number that divides the inputs of a layer if blocks fill them."""
        return self._divisor(self.forward, self.input_gradient)

    @property
    def by_outputs(self) -> int:
        """The number that divides the outputs of a layer if blocks fill them."""
        return self._divisor(self.input_gradient, self.forward)

    def _divisor(self, along: Pair, across: Pair) -> int:
        multiple = MULTIPLE if self.backend == "torchao" else 1
        return math.lcm(*map(divisor, along), divisor(across[1], along=False), multiple)

    @property
    def products(self) -> Products:
        """The formats of each product as a text, and the size of the Hadamard transform: constants for a compiler.

        The text of a product on kernels has the back end before the formats: ``"torchao: mxfp8 @ mxfp8"``. A format
        before ``>`` rounds the second operand first, along its other dimension: ``"mxfp8 > mxfp4 @ mxfp4"``.
        """
        backend = "" if self.backend == "emulate" else f"{self.backend}: "
        first = ["", *(f"{each} > " if self.requantize and each else "" for each in reversed(self.forward))]
        forward, input_gradient, weight_gradient = (
            backend + before + _shown(getattr(self, name)) for before, name in zip(first, PRODUCTS, strict=True)
        )
        return forward, input_gradient, weight_gradient, self.hadamard

    def __str__(self) -> str:
        def differences(other: Recipe) -> list[str]:
            names = (field.name for field in fields(self) if getattr(self, field.name) != getattr(other, field.name))
            return [f"{name}={_shown(getattr(self, name))}" for name in names]

        named = ([name, *differences(recipe)] for name, recipe in RECIPES.items())
        return "; ".join(sorted((differences(Recipe()), *named), key=len)[0]) or "layers=auto"

    @classmethod
    def parse(cls, text: str) -> Recipe:
        """Parse a name, fields as a recipe prints, or a name and fields that differ: ``"nvfp4; hadamard=128"``.

        Raises:
            ArgumentTypeError: if ``text`` is not a string.
            ArgumentValueError: for an unknown name, field or value.
        """
        check_kind("A recipe", text, str, "a Recipe or the name of one")
        first, *rest = parts = [part.strip() for part in text.split(";")]
        base, known = cls(), [field.name for field in fields(cls)]
        if "=" not in first:
            if first not in RECIPES:
                raise ArgumentValueError(
                    f"{first!r} is not a recipe. There are {', '.join(RECIPES)}; Recipe(forward=...) makes another."
                )
            base, parts = RECIPES[first], rest
        changes: dict[str, Any] = {}
        for part in parts:
            name, _, value = part.partition("=")
            if name not in known or not value:
                raise ArgumentValueError(f"{part!r} is not a field of a recipe; write name=value: {', '.join(known)}.")
            changes[name] = _read(name, value)
        return base.replace(**changes) if changes else base


def divisor(format: Format | None, along: bool = True) -> int:
    """Return the number that divides a dimension of an operand if blocks fill it.

    Args:
        format: the format of the operand.
        along: True for the dimension of the sum, along which blocks lie; False for the other one.
    """
    across, length = (format and format.sides) or (1, 1)
    return length if along else across


@traced_as_constant
def text_of(value: RecipeChoice) -> str:
    """Check a recipe for a block, and return it as a text without a choice of layers.

    Raises:
        ArgumentTypeError: for a function, which chooses layers.
    """
    check_kind("products", value, (Recipe, str), "a Recipe or the name of one in a block, which has no layers")
    return str(Recipe.of(value).replace(layers="auto"))


def _shown(value: Any) -> str:
    return " @ ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _read(name: str, value: str) -> Any:
    """The value of a field from a text."""
    if name in PRODUCTS:
        return tuple(None if each == "None" else Format.parse(each) for each in value.split(" @ "))
    try:
        if name in _SWITCHES:
            return {"True": True, "False": False}.get(value, value)
        return {"hadamard": int, "last_blocks": float}.get(name, str)(value)
    except ValueError:
        raise ArgumentValueError(f"{name}={value} must have a number.") from None


def _published() -> dict[str, Recipe]:
    tensor, gradient, mx = Format.parse("fp8_e4m3"), Format.parse("fp8_e5m2"), Format.parse("mxfp8")
    row = tensor.replace(block="row")
    fp4 = Format.parse("nvfp4")
    square, stochastic = fp4.replace(block="16x16"), fp4.replace(rounding="stochastic")
    nvfp4 = Recipe((fp4, square), (stochastic, square), (stochastic, fp4), hadamard=16, last_blocks=0.15)
    none, corrected = (None, None), (fp4.replace(scale_rule="eden"),) * 2
    least = {name: tuple(each.replace(scale_rule="4over6") for each in getattr(nvfp4, name)) for name in PRODUCTS}
    return {
        "fp8_tensorwise": Recipe((tensor, tensor), (gradient, tensor), (gradient, tensor)),
        "fp8_rowwise": Recipe((row, row), (row, row), (row, row)),
        "fp8_rowwise_hp_wgrad": Recipe((row, row), (row, tensor), none),
        "mxfp8": Recipe((mx, mx), (mx, mx), (mx, mx)),
        "mxfp8_hp_wgrad": Recipe((mx, mx), (mx, mx), none),
        "nvfp4": nvfp4,
        "fp4_backward": nvfp4.replace(forward=none, last_blocks=0.0),
        "4over6": nvfp4.replace(**least),
        "quartet2": Recipe((fp4.replace(scale_rule="4over6"),) * 2, corrected, corrected, requantize=True),
    }


RECIPES = _published()
"""The published recipes by name.

- ``fp8_tensorwise``: one scale for each tensor, gradients in e5m2 (arXiv 2209.05433; torchao's ``tensorwise``).
- ``fp8_rowwise``: one scale for each row along the sum, everything in e4m3 (torchao's ``rowwise``).
- ``fp8_rowwise_hp_wgrad``: the same with weight gradients in the dtype of the model (torchao's ``rowwise_with_gw_hp``).
- ``mxfp8``: blocks of 32 with a power of 2 each, rounded up, everything in e4m3 (arXiv 2506.08027).
- ``mxfp8_hp_wgrad``: the same with weight gradients in the dtype of the model.
- ``nvfp4``: blocks of 16, weights in squares of 16x16, gradients rounded stochastically, a random Hadamard transform
  of 16 tokens in weight gradients, the last 15 % of the blocks left out (arXiv 2509.25149).
- ``fp4_backward``: only its backward pass. Most of the published loss gap of NVFP4 comes from the forward pass (arXiv
  2601.22813).
- ``4over6``: ``nvfp4`` with ``scale_rule="4over6"`` for all six operands (arXiv 2512.02010). As in the authors' code,
  the tensor scale leaves room up to 256 and the error is the sum of squares. The choice is by the error of rounding to
  the nearest also where gradients are rounded stochastically, so that their mean stays right; the authors' code
  compares the errors of both random roundings.
- ``quartet2``: Quartet II (arXiv 2601.22813). The forward product has blocks of 16 for input and weight, with
  ``scale_rule="4over6"``; ``"quartet2; forward=nvfp4 @ nvfp4"`` is without. Both backward products have
  ``scale_rule="eden"`` for both operands, after a Hadamard transform of 128 numbers along the sum with fresh random
  signs in each product, and read input and weight as the forward product has rounded them. The authors' code draws the
  signs once in each backward pass of a layer, for both products; it has a least scale of a block of 2^-9 where torchao
  and this have 2^-6. All linear layers but the first and the last have it; sizes that 128 does not divide are padded
  with zeros.
"""
