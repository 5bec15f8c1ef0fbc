"""``CastingConfig``: a casting of ops as a value, with its dtype, op lists, devices and emulation."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable
from typing import Any

import torch

from ..core.checks import arguments
from ..core.dtypes import dtype_name, parse_dtype
from ..core.hardware import accelerator
from ..core.oplists import OpLists
from ..core.oplists.tables import NATIVE
from ..torch_internals.compiler_compat import not_by_itself, traced_as_constant
from .emulation import Emulate, EmulatedKinds, emulated_kinds

__all__ = ["NOTHING", "CastingConfig", "config_of", "derive", "dtype_of"]


def config_of(key: str) -> CastingConfig:
    """Return the config with a key. Dynamo can treat the key as a constant, but not the config."""
    settings = ast.literal_eval(key)
    dtype, lists = settings["dtype"], settings["lists"]
    return CastingConfig(**{**settings, "dtype": dtype and parse_dtype(dtype), "lists": lists and OpLists.parse(lists)})


@traced_as_constant
def dtype_of(key: str) -> torch.dtype | None:
    """Return the dtype of activations under the config with a key; None if it casts nothing."""
    return _dtype_of(key)


@functools.lru_cache(maxsize=64)
def _dtype_of(key: str) -> torch.dtype | None:
    found = ast.literal_eval(key or '{"dtype": None}')
    return parse_dtype(found["dtype"]) if found["dtype"] and (found["enabled"] or found["retries"]) else None


def _present_devices() -> tuple[str, ...]:
    """Return the device types of this machine."""
    found = accelerator()
    return ("cpu",) if found in (None, "cpu") else ("cpu", found)


@functools.lru_cache(maxsize=64)
def derive(**settings: Any) -> tuple[str, tuple[str, ...], EmulatedKinds]:
    """Derive from the settings of a config its key, the devices with native autocast, and the emulated kinds."""
    devices, enabled = settings["devices"], settings["enabled"]
    by_torch = enabled and settings["lists"].level == "native"
    has_lists = torch.amp.is_autocast_available if by_torch else NATIVE.__contains__
    native = tuple(filter(has_lists, devices)) if enabled else ()
    dtype = settings["dtype"] and dtype_name(settings["dtype"])
    key = str({**settings, "dtype": dtype, "lists": settings["lists"] and str(settings["lists"])})
    return key, native, emulated_kinds(devices, settings["dtype"], settings["emulate"])


class CastingConfig:
    """The settings by which ops are cast.

    Args:
        dtype: the 16-bit dtype of the ops on the half list. None is for scopes that cast nothing: they emulate both
            16-bit dtypes. With ``retries``, the dtype of the weights, which is fp32 in an island.
        lists: the lists that give each op its precision. None means the lists of O1, or no lists if not ``enabled``.
        enabled: False casts nothing, except for ops on ``lists`` under ``retries``.
        cache: cast each fp32 parameter at most once per call of the outermost model, or per block.
        verbose: log each cast at level INFO of the logger "halfstep".
        allow_banned: run banned ops in fp32 instead of refusing 16-bit inputs.
        devices: types of the devices whose tensors are cast; None means the CPU and the accelerator of this machine.
        emulate: the devices on which 16-bit products run in fp32 kernels; see ``emulation.Emulate``.
        keeps_autocast: leave a plain ``torch.autocast`` around a model unchanged.
        retries: True to call an op again with cast arguments if torch refuses their dtypes (see ``meeting``); None uses
            the value of ``enabled``.
        products: the recipe, as text, by which products round their operands; see ``halfstep.formats``.

    Attributes:
        settings: the arguments.
        key: the settings as text; ``config_of`` rebuilds the config from it.
        native: types of the devices on which native autocast does part of the work.
        emulated: the 16-bit ops that run in fp32 kernels.
        is_noop: True if it changes no op.
        rules: the first fields of an ``OpRules``.
        plans: the plans of modes (``current.plan_of``), for ops that run now and for recorded ops.
        reaches_later: True if checkpoints and threads follow it or do not need to; see ``scope.checkpoint_patches``.
        by_call: True for halfstep's own scopes, which exist as long as the process: only halfstep's functions enter
            them, and leave them before they return. After an interrupt before ``__exit__``, the next scope or op sees
            that the frame of the function has ended. User code may enter its scope in a helper that returns, so the
            frame says nothing there.
    """

    by_call = False

    @not_by_itself
    def __init__(
        self,
        dtype: torch.dtype | None,
        lists: OpLists | None = None,
        *,
        enabled: bool = True,
        cache: bool = True,
        verbose: bool = False,
        allow_banned: bool = False,
        devices: Iterable[str] | None = None,
        emulate: Emulate = "auto",
        keeps_autocast: bool = False,
        retries: bool | None = None,
        products: str | None = None,
    ) -> None:
        if torch.compiler.is_dynamo_compiling():
            settings = {"enabled": enabled, "allow_banned": allow_banned, "devices": devices, "emulate": emulate}
            self.key = _key_of(dtype, lists, **settings, products=products)
            return
        self.dtype = dtype or torch.bfloat16
        lists = lists or (OpLists.default() if enabled else None)
        self.lists: Any = lists
        self.enabled = enabled
        self.cache = cache
        self.verbose = verbose
        self.allow_banned = allow_banned
        self.devices = _present_devices() if devices is None else tuple(sorted(devices))
        self.keeps_autocast = keeps_autocast
        self.settings = {**arguments(locals()), "devices": self.devices}
        self.key, self.native, self.emulated = derive(**self.settings)
        self.retries = enabled if retries is None else retries
        self.is_noop = self.reaches_later = not (enabled or self.emulated or self.retries or products)
        kinds = frozenset(kind for _, _, kind in self.emulated)
        self.plans: dict[tuple[bool, bool], Any] = {}
        self.rules = lists if enabled or self.retries else None, self.devices, kinds, self.retries, verbose, products

    def __reduce__(self) -> tuple[Any, ...]:
        # The machine that loads a pickle decides what it emulates.
        return functools.partial(type(self), **self.settings), ()


@traced_as_constant
def _key_of(dtype: torch.dtype | None, lists: Any, **settings: Any) -> str:
    """Return the key of a config that traced code creates; traced code has the lists as text.

    Dynamo calls this function without tracing it, and treats the key as a constant.
    """
    return CastingConfig(dtype, OpLists.parse(lists) if isinstance(lists, str) else lists, **settings).key


NOTHING = CastingConfig(None, enabled=False, emulate=False, devices=NATIVE)
"""The config of a mode that does nothing."""
