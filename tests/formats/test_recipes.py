"""Recipes as values: names, texts, fields, and which layers of a model they choose."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from halfstep import amp
from halfstep.core.errors import ArgumentTypeError, ArgumentValueError, UsageError
from halfstep.formats.format import Format
from halfstep.formats.layers import choose, recipe_of
from halfstep.formats.recipe import RECIPES, Recipe
from tests.support.worlds import read_back

NESTED = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")


def blocks(count: int, width: int = 64) -> nn.Sequential:
    """A first layer, some blocks of two layers, and a last layer."""
    made = [nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)) for _ in range(count)]
    return nn.Sequential(nn.Linear(width, width), nn.Sequential(*made), nn.Linear(width, 8))


# ---- values


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_prints_as_its_name_and_parses_back(name: str) -> None:
    recipe = Recipe.parse(name)
    assert recipe is RECIPES[name]
    assert str(recipe) == name
    changed = recipe.replace(hadamard=64, amax="delayed", layers="all")
    assert changed != recipe
    assert Recipe.parse(str(changed)) == changed
    assert Recipe.parse(f"{name}; hadamard=64; amax=delayed; layers=all") == changed
    assert Recipe.of(recipe) is Recipe.of(name) is recipe


def test_the_fields_of_a_recipe_take_names_of_formats() -> None:
    recipe = Recipe(("mxfp8", "mxfp4"), weight_gradient=(None, "nvfp4"))  # type: ignore[arg-type]
    assert recipe.forward == (Format.parse("mxfp8"), Format.parse("mxfp4"))
    assert Recipe.parse(str(recipe)) == recipe
    assert Recipe.parse(str(Recipe())) == Recipe()
    assert recipe.formats == [*recipe.forward, Format.parse("nvfp4")]


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ("fp9", ArgumentValueError, "'fp9' is not a recipe. There are fp8_tensorwise, fp8_rowwise"),
        ("mxfp8; size=3", ArgumentValueError, "'size=3' is not a field of a recipe; write name=value: forward,"),
        ("mxfp8; hadamard=x", ArgumentValueError, "hadamard=x must have a number"),
        ("mxfp8; hadamard=3", ArgumentValueError, "hadamard=3 must be a power of 2"),
        ("mxfp8; amax=old", ArgumentValueError, 'amax=\'old\' must be "current" or "delayed"'),
        ("mxfp8; last_blocks=2", ArgumentValueError, "last_blocks=2.0 must be a number from 0 to below 1"),
        ("mxfp8; layers=some", ArgumentValueError, 'layers=\'some\' must be "auto", "all", or a function'),
        ("mxfp8; forward=mxfp8", ArgumentTypeError, "forward must be a pair of formats"),
        ("mxfp8; forward=mxfp8 @ mxfp9", ArgumentValueError, "'mxfp9' is not a format"),
        (8, ArgumentTypeError, "A recipe must be a Recipe or the name of one, not 8 of type int"),
    ],
)
def test_a_recipe_that_does_not_exist_is_refused(given: Any, error: type[Exception], words: str) -> None:
    model = blocks(1)
    for call in (lambda: amp.set_products(model, given), lambda: amp.initialize(model, products=given, verbosity=0)):
        with pytest.raises(error) as caught:
            call()
        assert words in str(caught.value)
    assert not any(recipe_of(module) for module in model.modules())


def test_passes_have_other_formats_one_by_one() -> None:
    layer: Any = (model := blocks(2))[1][0][0]
    amp.set_products(model, "mxfp8")
    amp.set_products(model, None, passes="forward")
    assert recipe_of(layer) == RECIPES["mxfp8"].replace(forward=(None, None), layers="auto")
    table = amp.set_products(model, "nvfp4", passes="forward")
    changed: Any = recipe_of(layer)
    assert {layer.recipe for layer in table if layer.recipe} == {changed}
    assert (changed.forward, changed.weight_gradient) == (RECIPES["nvfp4"].forward, RECIPES["mxfp8"].weight_gradient)
    assert changed.hadamard == 0
    amp.set_products(model, None)
    assert (recipe_of(layer), type(layer)) == (None, nn.Linear)
    assert "_products" not in vars(layer)


# ---- which layers


def test_auto_leaves_out_the_ends_the_last_blocks_and_sizes_that_do_not_fit() -> None:
    model = blocks(7)
    model[1][2][2] = nn.Linear(64, 63)
    model[1][3][0] = nn.Linear(63, 64)
    table = choose(model, RECIPES["nvfp4"])
    reasons = {layer.name: layer.reason for layer in table if layer.recipe is None}
    assert reasons == {
        "0": "the first layer",
        "1.2.2": "63 outputs, which blocks of 16 do not divide",
        "1.3.0": "63 inputs, which blocks of 16 do not divide",
        "1.6.0": "in the last 15% of the blocks",
        "1.6.2": "in the last 15% of the blocks",
        "2": "the last layer",
    }
    printed = str(amp.set_products(model, "nvfp4")).splitlines()
    assert len(printed) == len(table) == 16
    assert printed[0].split() == ["0", "64", "x", "64", "the", "first", "layer"]
    assert printed[1].split() == ["1.0.0", "64", "x", "64", "nvfp4"]
    assert [name for name, m in model.named_modules() if recipe_of(m)] == [x.name for x in table if x.recipe]
    assert all(layer.recipe for layer in choose(blocks(2), RECIPES["mxfp8"].replace(layers="all")) if layer.name != "2")


def test_the_recipes_whose_blocks_are_rows_take_any_size() -> None:
    model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))
    for name in ("fp8_tensorwise", "fp8_rowwise", "fp8_rowwise_hp_wgrad"):
        assert all(layer.recipe for layer in choose(model, RECIPES[name]))


def test_a_function_chooses_a_recipe_for_each_layer() -> None:
    model = blocks(2)
    asked = []

    def layers(module: nn.Module, name: str) -> str | None:
        asked.append((name, module))
        return {"0": "fp8_rowwise", "1.1.0": "mxfp8"}.get(name)

    table = amp.set_products(model, layers)
    assert asked == [(name, m) for name, m in model.named_modules() if type(m).__name__ == "Linear"]
    assert {layer.name: str(layer.recipe) for layer in table if layer.recipe} == {"0": "fp8_rowwise", "1.1.0": "mxfp8"}
    assert {layer.reason for layer in table if layer.recipe is None} == {"the function says None"}
    read_back(model, weights_only=False)  # although the function is not pickled
    amp.initialize(blocks(2), opt_level="O0", products=layers, verbosity=0)
    assert len(asked) == 3 * len(table)  # initialize chooses for all of its models before it changes one


def test_a_dict_has_recipes_by_the_names_of_layers() -> None:
    model = blocks(2)
    table = amp.set_products(model, {"0": "fp8_rowwise", "1.1.0": RECIPES["mxfp8"]})
    assert {layer.name: str(layer.recipe) for layer in table if layer.recipe} == {"0": "fp8_rowwise", "1.1.0": "mxfp8"}


class Attending(nn.Module):
    """A model whose attention reads the weight of a linear layer by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.last = nn.MultiheadAttention(32, 2), nn.Linear(32, 32)


@pytest.mark.parametrize(
    ("model", "recipe", "words"),
    [
        (nn.Sequential(nn.Conv2d(1, 1, 1)), "mxfp8", "This Sequential has no linear layers, and products= is for"),
        (nn.Linear(30, 30), "mxfp8", "30 inputs, which blocks of 32 do not divide"),
        (nn.Linear(32, 30), "nvfp4", "30 outputs, which blocks of 16 do not divide"),
        (nn.Linear(30, 30), Recipe(layers=lambda m, name: "mxfp8"), "does not fit: 30 inputs"),
        (blocks(1), Recipe(layers=lambda m, name: None), "the function says None"),
        (Attending().attention, "mxfp8", "MultiheadAttention reads its weight itself"),
    ],
    ids=lambda value: str(value)[:12],
)
def test_a_model_without_a_layer_that_fits_is_refused(model: nn.Module, recipe: Any, words: str) -> None:
    before = copy.deepcopy([type(module) for module in model.modules()])
    for call in (lambda: amp.set_products(model, recipe), lambda: amp.decorate(model, products=recipe)):
        with pytest.raises(UsageError) as caught:
            call()
        assert words in str(caught.value)
    assert [type(module) for module in model.modules()] == before
    amp.set_products(model, None)  # no formats suit every model


# ---- the layers as modules


def test_copies_and_pickles_compute_as_the_layer_does() -> None:
    model = blocks(2)
    amp.set_products(model, "fp8_tensorwise; amax=delayed")
    keys, x = list(model.state_dict()), torch.randn(4, 64)
    model(x)
    for twin in (copy.deepcopy(model), read_back(model, weights_only=False)):
        assert list(twin.state_dict()) == keys == list(blocks(2).state_dict())
        assert recipe_of(twin[1][0][0]) == recipe_of(model[1][0][0])
        assert isinstance(twin[1][0][0], nn.Linear)
        assert type(twin[1][0][0]) is type(model[1][0][0])
        assert torch.equal(twin(x), model(x))
        amp.set_products(twin, None)
        assert recipe_of(model[1][0][0]) is not None  # type: ignore[index]
        assert not torch.equal(twin(x), model(x))


@pytest.mark.parametrize("first", ["recipe", "norm"])
def test_a_parametrized_layer_computes_by_its_recipe_as_long_as_it_has_one(first: str) -> None:
    model, x = blocks(2), torch.randn(4, 64)
    plain, layer = copy.deepcopy(model), model[1][0][0]
    if first == "recipe":
        amp.set_products(model, "mxfp8")
        parametrizations.weight_norm(layer)
    else:
        parametrizations.weight_norm(layer)
        amp.set_products(model, "mxfp8")
    expected = copy.deepcopy(plain)
    amp.set_products(expected, "mxfp8")
    torch.testing.assert_close(model(x), expected(x))
    assert layer in [each.module for each in amp.set_products(model, "mxfp8")]
    parametrize.remove_parametrizations(layer, "weight")
    torch.testing.assert_close(model(x), expected(x))
    amp.set_products(model, None)
    torch.testing.assert_close(model(x), plain(x))
    assert type(layer) is nn.Linear
    assert not any("_products" in vars(each) or each._forward_pre_hooks for each in model.modules())


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        (nn.LazyLinear(64), "not known before its first forward pass"),
        (nn.Linear(64, 64, dtype=torch.complex64), "its weight is complex64"),
    ],
)
def test_a_layer_that_cannot_round_has_its_reason(layer: nn.Linear, words: str) -> None:
    model = nn.Sequential(nn.Linear(64, 64), layer)
    table = amp.set_products(model, "mxfp8; layers=all")
    assert [each.recipe is None for each in table] == [False, True]
    assert words in table[1].reason
    amp.set_products(model, RECIPES["mxfp8"].replace(layers=lambda module, name: "mxfp8" if name == "0" else None))


def test_a_forward_that_others_have_replaced() -> None:
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), torch.randn(4, 64)
    plain, wrapped = model(x), model[1].forward
    model[1].forward = lambda x: wrapped(x)  # as hooks of Accelerate do
    assert "its forward was replaced" in amp.set_products(model, "mxfp8; layers=all")[1].reason
    amp.set_products(model[0], None)
    del model[1].forward
    amp.set_products(model[1], "mxfp8")
    rounded = model[1].forward
    model[1].forward = lambda x: rounded(x)
    assert not torch.equal(model(x), plain)
    assert amp.set_products(model[1], "mxfp8")[0].recipe
    amp.set_products(model, None)
    assert torch.equal(model(x), plain)


@NESTED
def test_an_evaluation_rounds_what_the_training_rounds() -> None:
    """``nn.TransformerEncoderLayer`` has a fused kernel for evaluations, which reads the weights of its layers."""
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
    model, x = nn.TransformerEncoder(layer, 2), torch.randn(2, 8, 64)
    padded = torch.arange(8) > torch.tensor([[8], [4]])
    amp.set_products(model, "mxfp8; layers=all")
    for twin in (model, copy.deepcopy(model)):
        trained = twin(x, src_key_padding_mask=padded).detach()
        with torch.no_grad():
            evaluated = twin.eval()(x, src_key_padding_mask=padded)
        torch.testing.assert_close(evaluated[~padded], trained[~padded], rtol=1e-4, atol=1e-4)


def test_the_choice_of_layers_runs_no_parametrization() -> None:
    """Spectral norm moves its vectors whenever the weight is read in training."""
    model = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(64, 64)))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    amp.initialize(model, opt_level="O0", products="mxfp8", verbosity=0)
    assert recipe_of(model[0]) is not None
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
