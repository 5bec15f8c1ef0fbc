"""What is done to ops, as a value: which dtype by which lists on which devices, and what is emulated."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, TypeVar

import torch

from ..core.hardware import accelerator
from ..core.oplists import OpLists
from ..core.oplists.tables import NATIVE
from . import compiled
from .emulation import Emulate, EmulatedKinds, emulated_kinds
from .mode import CastMode, build_table
from .weight_cache import WeightCache

__all__ = ["CastingSpec", "facts_of", "restored"]


def present_devices() -> tuple[str, ...]:
    """The types of the devices of this machine."""
    found = accelerator()
    return ("cpu",) if found in (None, "cpu") else ("cpu", found)


@functools.lru_cache(maxsize=64)
def facts_of(
    dtype: torch.dtype | None,
    lists: OpLists,
    enabled: bool,
    cache: bool,
    verbose: bool,
    allow_banned: bool,
    devices: tuple[str, ...],
    emulate: Emulate,
    lenient: bool,
) -> tuple[str, tuple[str, ...], EmulatedKinds]:
    """What follows from the settings of a casting: a key, where native autocast takes part, and what is emulated."""
    key = str((dtype, str(lists), enabled, cache, verbose, allow_banned, devices, emulate, lenient))
    native: tuple[str, ...] = ()
    if enabled and lists.level == "native":
        native = tuple(d for d in devices if torch.amp.is_autocast_available(d))
    elif enabled:
        native = tuple(d for d in devices if d in NATIVE)
    return key, native, emulated_kinds(devices, dtype, emulate)


class CastingSpec:
    """What is done to ops.

    Args:
        dtype: the 16-bit dtype of the ops on the half list. None is for scopes that cast nothing: they emulate both.
        lists: which ops run in which precision.
        enabled: False casts nothing.
        cache: cast each fp32 parameter at most once between two backward passes or calls of ``clear_cache``.
        verbose: log each cast at level INFO of the logger "halfstep".
        allow_banned: run banned ops in fp32 instead of refusing 16-bit inputs.
        devices: types of the devices whose tensors are cast; None means the CPU and the accelerator of this machine.
        emulate: where 16-bit products run in fp32 kernels; see ``emulation.Emulate``.
        lenient: let a plain ``torch.autocast`` around a model be.
    """

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
        lenient: bool = False,
    ) -> None:
        if torch.compiler.is_dynamo_compiling():
            self.key = _key_of(dtype, lists, enabled, allow_banned, devices, emulate)
        else:
            self._fill(dtype, lists, enabled, cache, verbose, allow_banned, devices, emulate, lenient)

    def _fill(
        self,
        dtype: torch.dtype | None,
        lists: OpLists | None,
        enabled: bool,
        cache: bool,
        verbose: bool,
        allow_banned: bool,
        devices: Iterable[str] | None,
        emulate: Emulate,
        lenient: bool = False,
    ) -> None:
        self.lenient = lenient
        self.dtype = dtype or torch.bfloat16
        self.lists = lists or OpLists.default()
        self.enabled = enabled
        self.cache = cache
        self.verbose = verbose
        self.allow_banned = allow_banned
        self.devices = present_devices() if devices is None else tuple(sorted(devices))
        self.settings = (dtype, self.lists, enabled, cache, verbose, allow_banned, self.devices, emulate, lenient)
        self.key, self.native, self.emulated = facts_of(*self.settings)
        self.inert = not enabled and not self.emulated
        compiled.known.setdefault(self.key, self)

    def __reduce__(self) -> tuple[Any, ...]:
        return restored, (type(self), *self.settings)  # what is emulated is for the machine to say that reads it

    def set_up(self, mode: CastMode, cache: WeightCache | None, *, explicit: bool = False) -> None:
        """Make a mode do this.

        Args:
            mode: the mode.
            cache: where to keep copies of weights.
            explicit: leave nothing to native autocast; see ``build_table``. An exported graph must hold every cast,
                and native autocast leaves no trace in it.
        """
        mode.emulated = self.emulated
        mode.table = build_table(
            self.lists if self.enabled else None,
            self.devices,
            frozenset(kind for _, _, kind in mode.emulated),
            explicit=explicit,
            verbose=self.verbose,
        )
        mode.dtype = self.dtype
        mode.devices = self.devices
        mode.native = self.native
        mode.explicit = explicit
        mode.cache = cache if self.cache else None
        mode.verbose = self.verbose
        mode.allow_banned = self.allow_banned


S = TypeVar("S", bound=CastingSpec)


def restored(kind: type[S], *settings: Any) -> S:
    """A spec with some settings, also while Dynamo traces."""
    spec = kind.__new__(kind)
    spec._fill(*settings)
    return spec


def _key_of(
    dtype: torch.dtype | None,
    lists: Any,
    enabled: bool,
    allow_banned: bool,
    devices: Any,
    emulate: Emulate,
) -> str:
    """The key of a casting that traced code makes, whose lists are text there.

    Dynamo calls this and takes the key for a constant.
    """
    chosen = OpLists.parse(lists) if isinstance(lists, str) else lists
    return restored(CastingSpec, dtype, chosen, enabled, True, False, allow_banned, devices, emulate).key


_key_of._dynamo_marked_constant = True  # type: ignore[attr-defined]
