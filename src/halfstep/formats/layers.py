"""The linear layers of a model: which of them compute by a recipe, and how they change.

Such a layer gets a subclass of its class, made on the fly, the recipe as an attribute, and a hook that does nothing.
Its parameters, its ``state_dict`` and its type for ``isinstance`` stay as they are. Its copies and pickles compute by
the recipe too.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Iterable, Mapping
from types import NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils.parametrize import is_parametrized

from ..casting.config import config_of
from ..casting.current import thread
from ..casting.emulation import has_own_ops
from ..core.checks import check_kind
from ..core.dtypes import dtype_name
from ..core.errors import UsageError
from ..core.text import listed
from ..kernels.shards import is_sharded
from ..torch_internals.compiler_compat import traced_as_constant
from ..torch_internals.subclasses import Mixin, subclass_with, superclass_of
from ..torch_internals.torch_compat import hook_tables
from .history import AmaxHistory
from .products import linear, refuse_torchscript
from .recipe import ByName, Passes, Products, Recipe, RecipeChoice

__all__ = ["Layer", "LayerTable", "choose", "give_products", "set_products"]

logger = logging.getLogger("halfstep")


class Layer(NamedTuple):
    """One linear layer of a model.

    Attributes:
        name: the qualified name.
        module: the layer.
        recipe: the recipe by which it computes; None without formats.
        reason: the reason for no formats; empty if it has formats.
    """

    name: str
    module: nn.Module
    recipe: Recipe | None
    reason: str = ""


class LayerTable(list[Layer]):
    """The linear layers of a model; it prints as a table."""

    def __str__(self) -> str:
        rows = [(layer.name or "(the model)", _sizes(layer.module), layer.recipe or layer.reason) for layer in self]
        width = max((len(name) for name, _, _ in rows), default=0)
        return "\n".join(f"  {name:<{width}}  {sizes:>13}  {outcome}" for name, sizes, outcome in rows)


class Marked(NamedTuple):
    """The mark on a layer that computes by a recipe.

    Attributes:
        recipe: the recipe.
        products: the formats, as constants.
        history: the operands of earlier steps.
    """

    recipe: Recipe
    products: Products
    history: AmaxHistory


class _Rounded(Mixin):
    """The base of the subclasses of linear layers, which looks for the mark."""

    _products: Marked | None = None

    def forward(self, x: Tensor) -> Tensor:
        """The layer's result."""
        mark = self._products
        if mark is None or not x.is_floating_point():  # torch says what is wrong with other inputs
            return super().forward(x)  # type: ignore[misc, no-any-return]
        refuse_torchscript()
        if x.is_nested:
            return _of_nested(functools.partial(_Rounded.forward, self), x)
        x = x if x.layout is torch.strided else x.to_dense()
        module: Any = self
        weight = module.weight
        if is_sharded(weight):
            raise UsageError(
                "The weight of this linear layer is a DTensor in its forward pass, as tensor parallelism has it, and "
                "products= rounds whole weights. Leave the layer out: amp.set_products(layer, None)."
            )
        return linear(x, weight, module.bias, mark.products, result_dtype(x, weight), mark.history)

    def __prepare_scriptable__(self) -> nn.Module:
        """Refuse ``torch.jit.script``, which calls this method of each module."""
        refuse_torchscript(self._products is not None)
        return self  # type: ignore[return-value]

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced: Any = super().__reduce_ex__(protocol)
        make, args, *rest = reduced
        args = tuple([superclass_of(each, _Rounded) if each is type(self) else each for each in args])
        return _remake, (make, *args), *rest


def _remake(make: Callable[..., Any], *args: Any) -> Any:
    """A copy, or a layer from a pickle."""
    return _with_class(make(*args))


def _with_class(module: nn.Module) -> nn.Module:
    kind: Any = type(module)
    if isinstance(module, _Rounded):
        pass
    elif is_parametrized(module):  # torch has made its class for it alone, and takes it away again by its base
        kind.__bases__ = (subclass_with(_Rounded, kind.__bases__[0], {}),)
    else:
        object.__setattr__(module, "__class__", subclass_with(_Rounded, kind, {}))
    return module


def _of_nested(compute: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Compute a nested tensor from one, by a function of the rows of all its parts."""
    nested: Any = torch.nested
    if x.layout is torch.jagged:
        jagged: Any = x
        y = compute(jagged.values())
        return nested.nested_tensor_from_jagged(y, jagged.offsets(), lengths=jagged.lengths())  # type: ignore[no-any-return]
    parts = x.unbind()
    rows = compute(torch.cat(parts)).split([len(part) for part in parts])
    return nested.as_nested_tensor(list(rows))  # type: ignore[no-any-return]


def _called(module: nn.Module, args: Any) -> None:
    """Do nothing: a hook shows that a layer has to be called.

    In an evaluation ``nn.TransformerEncoderLayer`` runs a fused kernel on the weights of its layers, unless one of
    these has hooks.
    """


def mark(module: nn.Module, recipe: Recipe | None) -> None:
    """Let a linear layer compute by a recipe, or with None as before."""
    if recipe is not None and recipe.formats:
        _with_class(module)
        recipe = recipe.replace(layers="all") if callable(recipe.layers) else recipe  # a layer is pickled with it
        vars(module)["_products"] = Marked(recipe, recipe.products, AmaxHistory(recipe.amax == "delayed"))
        if _called not in hook_tables(module)[0].values():
            module.register_forward_pre_hook(_called)
    elif isinstance(module, _Rounded):
        if "forward" not in vars(module):  # user code or a parametrization has wrapped this one
            object.__setattr__(module, "__class__", superclass_of(type(module), _Rounded))
        vars(module).pop("_products", None)  # the class stays if others have made one of it, as FSDP2 does
        hooks = hook_tables(module)[0]
        for key in [key for key, hook in hooks.items() if hook is _called]:
            del hooks[key]


def recipe_of(module: nn.Module) -> Recipe | None:
    """The recipe of a linear layer, or None."""
    computes = vars(module).get("_products")
    return computes.recipe if isinstance(computes, Marked) else None


def set_products(model: nn.Module, recipe: RecipeChoice, passes: Passes = "all") -> LayerTable:
    """Let the linear layers of a model compute with operands rounded to formats, or no longer; also while it trains.

    ::

        amp.set_products(model, "nvfp4")
        amp.set_products(model, None, passes="forward")  # before the learning rate decays, as arXiv 2509.25149 does

    Parameters, optimizers and ``state_dict`` do not change. Call it before or after the model is wrapped. A compiled
    model is compiled again.

    Args:
        model: the model, on any device; its linear layers are changed in place.
        recipe: a ``Recipe``, the name of one (``halfstep.formats.RECIPES``), None for no formats, a function that is
            called with each linear layer and its name and returns one of these, or a dict of recipes by the qualified
            names of layers; other layers have no formats then.
        passes: the passes whose products change: ``"forward"``, ``"backward"`` or ``"all"``. Other products stay as
            they are.

    Returns:
        The linear layers, with the recipe of each or the reason why it has none; it prints as a table.

    Raises:
        ArgumentTypeError: for something else than a module, or a recipe of another type.
        ArgumentValueError: for an unknown recipe or passes.
        UsageError: for a model without linear layers, or none that the recipe fits. Nothing has been changed then.
    """
    check_kind("model", model, nn.Module, "a torch.nn.Module")
    if recipe is None:
        marked = [(name, module) for name, module in model.named_modules() if recipe_of(module)]
        table = LayerTable(Layer(name, module, Recipe()) for name, module in marked)
    else:
        table = choose(model, Recipe.of(recipe))
    for at, layer in enumerate(table):
        changed = (layer.recipe or Recipe()).only(passes, recipe_of(layer.module) or Recipe())
        table[at] = layer._replace(recipe=changed if changed.formats or not layer.reason else None)
    for layer in table:
        mark(layer.module, layer.recipe)
    logger.info("products=%s, passes=%s:\n%s", recipe, passes, table)
    return table


def give_products(models: Iterable[nn.Module], recipe: RecipeChoice, chosen: Mapping[nn.Module, torch.dtype]) -> None:
    """``set_products`` for the models of a face, which have none yet if a recipe is refused; None changes nothing.

    Modules for which the user has ``chosen`` fp32 compute in fp32, regardless of the recipe.
    """
    if recipe is not None:
        recipe = Recipe.of(recipe)
        for model in models:
            choose(model, recipe)
        for model in models:
            set_products(model, recipe)
    for module in [each for wide, dtype in chosen.items() if dtype is torch.float32 for each in wide.modules()]:
        mark(module, None)


# ---- the dtype of a result


def result_dtype(x: Tensor, weight: Tensor) -> torch.dtype:
    """The dtype that ``torch.nn.functional.linear`` gives, under the casts that are current."""
    device = x.device.type
    listed = _listed(thread.key) if thread.key else None
    if x.dtype is torch.float64:
        return x.dtype
    if listed is not None and device in listed[2] and (torch.compiler.is_compiling() or thread.mode.casts(x)):
        return listed[1] if listed[0] == "half" else torch.float32
    if device != "meta" and torch.is_autocast_enabled(device):  # torch raises an error about the meta device
        return torch.get_autocast_dtype(device)
    return weight.dtype


@functools.lru_cache(maxsize=64)
def _read(key: str) -> tuple[str, torch.dtype, tuple[str, ...]] | None:
    """The list of ``linear`` under a casting, the 16-bit dtype, and the types of devices that are cast."""
    config = config_of(key)
    return (config.lists.row("linear").list, config.dtype, config.devices) if config.enabled else None


@traced_as_constant
def _listed(key: str) -> tuple[str, torch.dtype, tuple[str, ...]] | None:
    return _read(key)


# ---- which layers


def is_linear(module: nn.Module) -> bool:
    """True if a module computes what ``torch.nn.Linear`` does, by the ``forward`` of its class."""
    own = (cls for cls in type(module).__mro__ if cls is not _Rounded and "forward" in vars(cls))
    return next(own, None) is nn.Linear


def choose(model: nn.Module, recipe: Recipe) -> LayerTable:
    """Choose the layers of a model that compute by a recipe. Nothing changes yet.

    Raises:
        UsageError: if the model has no linear layers, or none that the recipe fits, or a function of the user's gave a
            recipe to a layer that it does not fit.
    """
    layers = [(name, module) for name, module in model.named_modules() if is_linear(module)]
    if not layers:
        raise UsageError(
            f"This {type(model).__name__} has no linear layers, and products= is for their products. Leave it out, or "
            "use `with amp.auto_cast(products=...)`, which takes every call of linear, matmul, mm and bmm."
        )
    by_name = recipe.layers if isinstance(recipe.layers, ByName) else ()
    if unknown := [name for name in by_name if name not in dict(layers)]:
        raise UsageError(
            f"products= has a recipe for {unknown[0]!r}, which is not a linear layer of this {type(model).__name__}. "
            f"Its linear layers are {listed([name for name, _ in layers])}."
        )
    attention = {id(m.out_proj) for m in model.modules() if isinstance(m, nn.MultiheadAttention)}
    last = _last_blocks(model, recipe.last_blocks)
    table = LayerTable()
    for at, (name, module) in enumerate(layers):
        reason, chosen = "", recipe
        if callable(recipe.layers):
            given = recipe.layers(module, name)
            check_kind(f"products= for {name}", given, (Recipe, str, NoneType), "a Recipe, the name of one or None")
            chosen = Recipe() if given is None else Recipe.of(given)
            reason = "" if given else "the function says None"
            if not reason and (misfit := unfit(module, chosen)):
                raise UsageError(f"The recipe of {name} does not fit: {misfit}. Return None for this layer.")
        elif recipe.layers == "auto" and len(layers) > 2 and at in (0, len(layers) - 1):
            reason = "the last layer" if at else "the first layer"
        elif recipe.layers == "auto" and id(module) in last:
            reason = f"in the last {recipe.last_blocks:.0%} of the blocks"
        elif id(module) in attention:
            reason = "MultiheadAttention reads its weight itself"
        reason = reason or unfit(module, chosen)
        table.append(Layer(name, module, None if reason else chosen, reason))
    if not any(layer.recipe for layer in table):
        raise UsageError(f"No linear layer of this {type(model).__name__} can compute by the recipe {recipe}:\n{table}")
    return table


def unfit(module: Any, recipe: Recipe) -> str:
    """Find the reason why a layer cannot compute by a recipe; empty if it can."""
    if isinstance(module, LazyModuleMixin):
        return "its sizes are not known before its first forward pass"
    if "forward" in vars(module) and not isinstance(module, _Rounded):
        return "its forward was replaced; call amp.set_products before"
    weight = _stored_weight(module)
    if has_own_ops(weight):
        return f"its weight is a {type(weight).__name__}, which computes products its own way"
    if not weight.is_floating_point():
        return f"its weight is {dtype_name(weight.dtype)}"
    sizes = ("inputs", module.in_features, recipe.by_inputs), ("outputs", module.out_features, recipe.by_outputs)
    for what, size, by in sizes:
        if size % by:
            return f"{size} {what}, which blocks of {by} do not divide"
    return ""


def _stored_weight(module: Any) -> Tensor:
    """The weight, or what a parametrization computes it from: reading it would run the parametrization."""
    if is_parametrized(module, "weight"):
        stored: nn.Module = module.parametrizations["weight"]
        return next(itertools.chain(stored.parameters(recurse=False), stored.buffers(recurse=False)))
    weight: Tensor = module.weight
    return weight


def _sizes(module: Any) -> str:
    return f"{module.in_features} x {module.out_features}"


def _last_blocks(model: nn.Module, part: float) -> set[int]:
    """The modules in the last blocks of a model, by identity: blocks are what its longest list of modules has."""
    lists = [each for each in model.modules() if isinstance(each, (nn.ModuleList, nn.Sequential))]
    deep = [[b for b in each if any(m is not b and is_linear(m) for m in b.modules())] for each in lists]
    blocks = max(deep, key=len, default=[])
    last = blocks[len(blocks) - round(part * len(blocks)) :]
    return {id(module) for block in last for module in block.modules()}
