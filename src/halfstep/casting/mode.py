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

from ..core.oplists import OpLists
from ..core.oplists.names import spellings
from ..core.oplists.op_lists import native_rule
from ..core.oplists.tables import BANNED, CLASS_OF, INNER_PRODUCT, NATIVE, SELF_MATCHING, SELF_PROMOTING
from . import rules
from .composites import needs_twin, twin_rule
from .emulation import EmulatedKinds
from .rules import Rule
from .weight_cache import WeightCache

__all__ = ["CastMode", "build_table", "install", "uninstall"]

_is_autocast_enabled = torch.is_autocast_enabled


class CastMode(TorchFunctionMode):
    """The mode of one thread. Scopes change its fields; it is on the stack while any of them needs it.

    Attributes:
        table: what is done to which callable.
        dtype: the 16-bit dtype.
        devices: types of the devices whose tensors are cast.
        native: those of them on which native autocast does a part of the work. Where someone turns it off, nothing is
            cast.
        explicit: whether the table leaves nothing to native autocast, which may be on or off, for other lists.
        emulated: which 16-bit ops run in fp32 kernels.
        cache: copies of weights, or None to keep none.
        verbose: whether each cast is logged.
        allow_banned: whether banned ops run in fp32.
    """

    def __init__(self) -> None:
        super().__init__()
        self.table: dict[Callable[..., Any], Rule] = {}
        self.dtype = torch.bfloat16
        self.devices: tuple[str, ...] = ()
        self.native: tuple[str, ...] = ()
        self.explicit = False
        self.emulated: EmulatedKinds = frozenset()
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
        """Whether a tensor is cast: its device is one of ours, and nobody turned native autocast off inside."""
        kind = "cpu" if tensor.is_cpu else tensor.device.type
        return _is_autocast_enabled(kind) if kind in self.native else kind in self.devices

    def native_on(self) -> list[str]:
        """The device types on which native autocast is on at the moment."""
        return [device for device in self.devices if device in NATIVE and _is_autocast_enabled(device)]

    def on(self) -> bool:
        """Whether anything may be cast on any device."""
        return len(self.native) < len(self.devices) or bool(self.native_on())

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
    """Put a mode under all others but the default device, so that no one's ``with`` pops it instead of his own.

    ``torch.set_default_device`` enters its context, which insists on the bottom of the stack; ``with torch.device``
    pushes one that was not entered, and takes off whatever is on top (torch 2.11 to 2.13).
    """
    others = [_pop_mode() for _ in range(_len_torch_function_stack())]
    last = others[-1] if others else None
    bottom = [others.pop()] if isinstance(last, DeviceContext) and hasattr(last, "old_device") else []
    for each in [*bottom, mode, *reversed(others)]:
        _push_mode(each)


def uninstall(mode: CastMode) -> None:
    """Take a mode off the stack, wherever it is."""
    others = [_pop_mode() for _ in range(_len_torch_function_stack())]
    for each in reversed(others):
        if each is not mode:
            _push_mode(each)


@functools.lru_cache(maxsize=64)
def build_table(
    lists: OpLists | None,
    devices: tuple[str, ...],
    kinds: frozenset[str] = frozenset(),
    *,
    explicit: bool = False,
    verbose: bool = False,
) -> dict[Callable[..., Any], Rule]:
    """What to do with each callable of torch under some lists; callables to leave alone are not in it.

    Args:
        lists: None casts nothing.
        devices: types of the devices that are cast on.
        kinds: the classes of ops that are emulated somewhere.
        explicit: leave nothing to native autocast, which may be on or off, for other lists.
        verbose: log casts; native autocast cannot.
    """
    if (lists is None or lists.level == "native") and not kinds and not explicit:
        return {}
    by_op: dict[tuple[str, bool, str], Rule | None] = {}
    table: dict[Callable[..., Any], Rule] = {}
    for func, (name, inplace) in spellings().items():
        # 2 / x is written as x.reciprocal() * 2, and native autocast runs reciprocal in fp32 on CUDA.
        within = "reciprocal" if func is torch.Tensor.__rdiv__ else name
        key = (name, inplace, within)
        if key not in by_op:
            by_op[key] = _rule_for(name, inplace, within, lists, devices, kinds, explicit, verbose)
        rule = by_op[key]
        if rule is not None:
            table[func] = rule
    listed = {name for (name, _, _), rule in by_op.items() if rule is not None}
    for func in spellings():
        if func not in table and needs_twin(func, frozenset(listed)):
            table[func] = twin_rule(func)
    table[torch.Tensor.data.__get__] = rules.forget  # type: ignore[attr-defined]
    table[torch.Tensor.backward] = table[torch.autograd.backward] = table[torch.autograd.grad] = rules.backward
    return table


def _rule_for(
    name: str,
    inplace: bool,
    within: str,
    lists: OpLists | None,
    devices: tuple[str, ...],
    kinds: frozenset[str],
    explicit: bool,
    verbose: bool,
) -> Rule | None:
    """What to do with an op; ``within`` is what native autocast sees of it."""
    natively = {native_rule(within, device) for device in devices}
    rule = _cast_rule(name, inplace, natively, lists, explicit, verbose)
    kind = CLASS_OF.get(name)
    listed = "free" if lists is None else lists.rule_of(name)
    if lists is not None and lists.level == "native":
        listed = next((native_rule(name, device) for device in devices if device in NATIVE), "free")
    if inplace or kind not in kinds or listed in ("float", "banned"):
        return rule
    lowers = listed == "half"
    return functools.partial(rules.emulated, name=name, kind=kind, lowers=lowers, otherwise=rule)


def _cast_rule(
    name: str, inplace: bool, natively: set[str], lists: OpLists | None, explicit: bool, verbose: bool
) -> Rule | None:
    """The rule that casts an op as the lists say, given what native autocast makes of it; None if nothing is to do."""
    if lists is None or lists.level == "native":
        return rules.without_native if explicit and lists is None and natively != {"free"} else None
    rule = lists.rule_of(name)
    if explicit and natively != {"free"}:
        natively |= {"half", "float"}  # it must be off, whatever the op is
    chosen = name in lists.white or name in lists.black
    if inplace:
        if rule == "float":
            return rules.make_rule(rules.float_inplace, name, False)
        strict = rule == "half" or (rule == "promote" and name not in SELF_MATCHING)
        return rules.match_self if strict else None
    if rule == "half":
        if natively == {"half"} and not verbose:
            return rules.half_native
        return rules.make_rule(rules.to_half, name, bool(natively & {"float", "banned"}))
    if rule == "float":
        return rules.make_rule(
            rules.to_float, name, chosen or name in INNER_PRODUCT or bool(natively & {"half", "banned"})
        )
    if rule == "banned":
        return rules.make_rule(rules.banned, name, True, BANNED[name])
    off = name in INNER_PRODUCT or bool(natively & {"half", "float", "banned"})
    if rule == "promote" and (off or name not in SELF_PROMOTING):
        return rules.make_rule(rules.promote, name, off)
    return rules.without_native if off else None
