"""The end of ``DistributedDataParallel.join``, where all ranks get the weights of a rank that was active to the end."""

from __future__ import annotations

import weakref
from typing import Any

from torch.distributed.algorithms.join import JoinHook
from torch.nn.parallel import DistributedDataParallel

from ...parameters.master_registry import keeper_of
from ...torch_internals.torch_compat import join_facts
from .flat_buckets import share_masters

__all__ = ["is_joining", "share_masters_after_join"]


def share_masters_after_join(wrapper: DistributedDataParallel) -> None:
    """Broadcast the masters together with the weights at the end of every ``join`` of this wrapper.

    All ranks still take part in collective operations there. Later, a rank may read its masters alone.
    """
    wrapper.join_hook = _HookMaker(wrapper)  # type: ignore[method-assign]


def is_joining(wrapper: Any) -> bool:
    """True in ``join`` of a wrapper, where some ranks may have run out of inputs; False for None."""
    maker: Any = getattr(wrapper, "join_hook", None)
    return isinstance(maker, _HookMaker) and maker.open and join_facts(wrapper)[0]


class _HookMaker:
    """The ``join_hook`` method of one wrapper, with a weak reference to the wrapper. A copied wrapper gets a new one.

    Attributes:
        open: True from the beginning to the end of a ``join``.
    """

    def __init__(self, wrapper: Any) -> None:
        self._wrapper = weakref.ref(wrapper)
        self.open = False

    def __call__(self, **kwargs: Any) -> JoinHook:
        wrapper: Any = self._wrapper()
        self.open = True
        return _WithMasters(wrapper, type(wrapper).join_hook(wrapper, **kwargs))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._wrapper(),)


class _WithMasters(JoinHook):
    """The join hook of a wrapper, followed by a broadcast of the masters of its weights."""

    def __init__(self, wrapper: Any, hook: JoinHook) -> None:
        self._wrapper = wrapper
        self._hook = hook

    def main_hook(self) -> None:
        """Take part in the collective operations of a pass, on a rank without inputs."""
        self._hook.main_hook()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Broadcast the weights and masters of one rank to all ranks."""
        wrapper = self._wrapper
        self._hook.post_hook(is_last_joiner)
        ignored = set(wrapper.parameters_to_ignore)
        params = [p for name, p in wrapper.module.named_parameters() if name not in ignored]
        replicated = [p for p in params if (keeper := keeper_of(p)) is not None and keeper.replicated]
        share_masters(replicated, wrapper.process_group, join_facts(wrapper)[1] or 0)
        wrapper.join_hook.open = False
