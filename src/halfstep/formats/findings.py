"""Rules of ``halfstep.check`` for layers with a recipe: what rounding lost in the latest pass that was measured.

Passes are measured on request (``measuring``). The diagnostics room calls these rules, and makes its findings of what
they yield: severity, place, message, evidence and fix.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from ..core.text import listed
from .torchao_products import MULTIPLE

__all__ = ["RULES"]

_SATURATED = 0.01
_FLUSHED = 0.1
_LEAST_RATIO = math.sqrt(3)
"""The least ratio of a gradient to its noise with which quantized training goes on (arXiv 2505.19115)."""

Yielded = tuple[str, str, str, Mapping[str, Any], str]


def _layers(facts: Any) -> list[tuple[str, Any, Any]]:
    """The layers with a recipe: the qualified name, the module, and the mark with its recipe and its history."""
    marks = ((module, vars(module).get("_products")) for module in facts.module_names)
    return [(facts.name_of(module), module, mark) for module, mark in marks if mark]


def _by(facts: Any) -> str:
    """The recipes of a model, for a message."""
    return f" (products={listed(list(dict.fromkeys(str(mark.recipe) for _, _, mark in _layers(facts))))})"


def _worst(facts: Any, column: int, least: float) -> dict[str, float]:
    """Return the shares of one kind of loss that are above ``least``, by operand; each device is read once."""
    found = {
        f"{name}: {place}": losses[column]
        for name, _, mark in _layers(facts)
        for place, losses in mark.history.losses.items()
    }
    shares = zip(found, _read(list(found.values())), strict=True)
    return {place: share for place, share in shares if share > least}


def _read(numbers: list[torch.Tensor]) -> list[float]:
    return torch.stack([each.cpu() for each in numbers]).tolist() if numbers else []


def saturating_tensors(facts: Any) -> Iterator[Yielded]:
    """HS128: operands of which more than 1 % of the numbers are above the greatest number of their block."""
    if shares := _worst(facts, 0, _SATURATED):
        text = f"Up to {max(shares.values()):.1%} of the numbers of an operand saturate in its format{_by(facts)}."
        yield "warning", listed(list(shares)), text, {"saturated": shares}, ""


def flushed_blocks(facts: Any) -> Iterator[Yielded]:
    """HS129: operands in which more than 10 % of the blocks lose more than half of their numbers to zero."""
    if shares := _worst(facts, 1, _FLUSHED):
        text = f"In up to {max(shares.values()):.1%} of the blocks of an operand most numbers become 0{_by(facts)}."
        yield "warning", listed(list(shares)), text, {"flushed": shares}, ""


def gradients_below_the_noise(facts: Any) -> Iterator[Yielded]:
    """HS130: gradients whose norm is below sqrt(3) times the norm of the noise that rounding adds to them."""
    noise = {f"{name}: {at}": pair for name, _, mark in _layers(facts) for at, pair in mark.history.noise.items()}
    numbers = _read([part for pair in noise.values() for part in pair])
    pairs = zip(noise, numbers[::2], numbers[1::2], strict=True)
    ratios = {name: norm / added for name, norm, added in pairs if norm < _LEAST_RATIO * added}
    if ratios:
        text = f"A gradient is {min(ratios.values()):.2g} times its rounding noise{_by(facts)}; it needs 1.73 times."
        yield "warning", listed(list(ratios)), text, {"ratio": ratios}, ""


def sizes_without_a_kernel(facts: Any) -> Iterator[Yielded]:
    """HS131: layers of a size that the emulation takes, and ``torch._scaled_mm`` does not."""
    sizes: dict[str, int] = {}
    for name, module, mark in _layers(facts):
        given = {"inputs": module.in_features, "outputs": module.out_features}
        if any(mark.recipe.weight_gradient):
            given["tokens"] = mark.history.tokens
        sizes |= {f"{name}: {size} {what}": size for what, size in given.items() if size % MULTIPLE}
    if sizes:
        text = f"{MULTIPLE} does not divide a size, as kernels need it{_by(facts)}; here it is emulated."
        yield "note", listed(list(sizes)), text, {"sizes": sizes}, ""


RULES: dict[str, tuple[Callable[[Any], Iterator[Yielded]], str]] = {
    "HS128": (
        saturating_tensors,
        "Take current scales (amax='current') and scale_rule='rceil', with which nothing saturates.",
    ),
    "HS129": (
        flushed_blocks,
        "Take smaller blocks, a format with more exponents, or a Hadamard transform; or leave the layer out: "
        "amp.set_products(layer, None).",
    ),
    "HS130": (
        gradients_below_the_noise,
        "Stop rounding in the backward pass: amp.set_products(model, None, passes='backward').",
    ),
    "HS131": (sizes_without_a_kernel, "Pad the size to a multiple of 16 before you train on a chip with these units."),
}
"""The rules by code, each with its fix."""
