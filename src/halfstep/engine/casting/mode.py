"""Op lists at work: a function mode that looks each call up in a table, on top of native ``torch.autocast``.

The table holds only the callables that need something; any other call costs one dictionary lookup. It is built once for
each choice of lists. Where it would be empty, ``ops`` pushes no mode at all.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._C import _len_torch_function_stack
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode
from torch.utils._device import DeviceContext

from ...core.oplists import OpLists
from ...core.oplists.names import spellings
from ...core.oplists.tables import BANNED, INNER_PRODUCT, NATIVE, words
from . import rules
from .cache import WeightCache
from .rules import Rule
from .twins import needs_twin, twin_rule

__all__ = ["CastMode", "build_table", "install", "uninstall"]

_SELF_PROMOTING = words("""
    add sub mul div eq ne ge gt le lt equal maximum minimum fmax fmin where hypot copysign remainder fmod outer kron
    addcmul addcdiv atan2 cat stack hstack vstack dstack column_stack""")
"""Ops of which torch promotes the inputs by itself, without autocast."""

_SELF_MATCHING = words("add sub mul div eq ne ge gt le lt addcmul addcdiv atan2 remainder fmod copysign")
"""Ops whose in-place form takes other dtypes by itself."""


_is_autocast_enabled = torch.is_autocast_enabled


class CastMode(TorchFunctionMode):
    """The mode of one thread. Scopes change its fields; it is on the stack while any of them needs it."""

    def __init__(self) -> None:
        super().__init__()
        self.table: dict[Callable[..., Any], Rule] = {}
        self.dtype = torch.bfloat16
        self.devices: tuple[str, ...] = ("cpu",)
        self.cache: WeightCache | None = None
        self.verbose = False
        self.allow_banned = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one call of an op under its rule."""
        rule = self.table.get(func)
        if rule is None:
            return func(*args, **kwargs) if kwargs else func(*args)
        return rule(self, func, args, kwargs or {})

    def casts(self, tensor: torch.Tensor) -> bool:
        """Whether native autocast is on for the tensor's device: someone may have turned it off inside our scope."""
        if tensor.is_cpu:
            return _is_autocast_enabled("cpu")
        return not tensor.is_cuda or _is_autocast_enabled("cuda")

    def native_on(self) -> bool:
        """Whether native autocast is on for any device."""
        return any(_is_autocast_enabled(device) for device in self.devices)

    def weight(self, tensor: torch.Tensor) -> torch.Tensor:
        """The 16-bit copy of a weight; anything but fp32 comes back as it is."""
        if tensor.dtype is not torch.float32 or self.cache is None or not self.casts(tensor):
            return tensor
        return self.cache.get(tensor, self.dtype)

    def clear_cache(self) -> None:
        """Forget the 16-bit copies."""
        if self.cache is not None:
            self.cache.clear()


def install(mode: CastMode) -> None:
    """Put a mode under all others but the default device, so that no one's ``with`` pops it instead of his own."""
    others = [_pop_mode() for _ in range(_len_torch_function_stack())]
    bottom = [others.pop()] if others and isinstance(others[-1], DeviceContext) else []
    for each in [*bottom, mode, *reversed(others)]:
        _push_mode(each)


def uninstall(mode: CastMode) -> None:
    """Take a mode off the stack, wherever it is."""
    others = [_pop_mode() for _ in range(_len_torch_function_stack())]
    for each in reversed(others):
        if each is not mode:
            _push_mode(each)


@functools.lru_cache(maxsize=64)
def build_table(lists: OpLists, devices: tuple[str, ...], verbose: bool) -> dict[Callable[..., Any], Rule]:
    """What to do with each callable of torch under some lists; callables to leave alone are not in it."""
    if lists.level == "native":
        return {}
    by_op: dict[tuple[str, bool], Rule | None] = {}
    table: dict[Callable[..., Any], Rule] = {}
    for func, (name, inplace) in spellings().items():
        key = (name, inplace)
        if key not in by_op:
            by_op[key] = _rule_for(name, inplace, lists, devices, verbose)
        rule = by_op[key]
        if rule is not None:
            table[func] = rule
    listed = {name for (name, _), rule in by_op.items() if rule is not None}
    for func in spellings():
        if func not in table and needs_twin(func, frozenset(listed)):
            table[func] = twin_rule(func)
    table[torch.Tensor.data.__get__] = rules.forget  # type: ignore[attr-defined]
    table[torch.Tensor.backward] = table[torch.autograd.backward] = table[torch.autograd.grad] = rules.backward
    return table


def _rule_for(name: str, inplace: bool, lists: OpLists, devices: tuple[str, ...], verbose: bool) -> Rule | None:
    rule = lists.rule_of(name)
    native = {next((r for r, names in NATIVE[d].items() if name in names), "free") for d in devices}
    chosen = name in lists.white or name in lists.black
    if inplace:
        if rule == "float":
            return rules.make_rule(rules.float_inplace, name, False)
        strict = rule == "half" or (rule == "promote" and name not in _SELF_MATCHING)
        return rules.match_self if strict else None
    if rule == "half":
        if native == {"half"} and not verbose:
            return rules.half_native
        return rules.make_rule(rules.to_half, name, bool(native & {"float", "banned"}))
    if rule == "float":
        return rules.make_rule(
            rules.to_float, name, chosen or name in INNER_PRODUCT or bool(native & {"half", "banned"})
        )
    if rule == "banned":
        return rules.make_rule(rules.banned, name, True, BANNED[name])
    off = name in INNER_PRODUCT or bool(native & {"half", "float", "banned"})
    if rule == "promote" and (off or name not in _SELF_PROMOTING):
        return rules.make_rule(rules.promote, name, off)
    return rules.without_native if off and native != {"free"} else None
