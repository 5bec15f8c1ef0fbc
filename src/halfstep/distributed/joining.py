"""The end of ``DistributedDataParallel.join``, where all ranks get the weights of one that was active to the end."""

from __future__ import annotations

import weakref
from typing import Any

from torch.distributed.algorithms.join import JoinHook
from torch.nn.parallel import DistributedDataParallel

from ..core.torch_compat import join_facts
from ..gradients.master_registry import keeper_of
from .flat_buckets import share_masters

__all__ = ["is_joining", "share_masters_after_join"]


def share_masters_after_join(wrapper: DistributedDataParallel) -> None:
    """At every end of a ``join`` of this wrapper, broadcast the masters of that rank as well.

    This is the last moment at which all ranks are there. Afterwards each may read its masters without the others.
    """
    wrapper.join_hook = _HookMaker(wrapper)  # type: ignore[method-assign]


def is_joining(wrapper: DistributedDataParallel) -> bool:
    """Whether this is inside of ``join``, where some ranks may have run out of inputs."""
    maker: Any = wrapper.join_hook
    return isinstance(maker, _HookMaker) and maker.open and join_facts(wrapper)[0]


class _HookMaker:
    """The ``join_hook`` method of one wrapper. It refers to the wrapper weakly, and a copied wrapper gets its own.

    Attributes:
        open: whether a ``join`` has begun and not ended.
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
        """Give all ranks the weights and the masters of one of them."""
        wrapper = self._wrapper
        self._hook.post_hook(is_last_joiner)
        ignored = set(wrapper.parameters_to_ignore)
        params = [p for name, p in wrapper.module.named_parameters() if name not in ignored]
        replicated = [p for p in params if (keeper := keeper_of(p)) is not None and keeper.replicated]
        share_masters(replicated, wrapper.process_group, join_facts(wrapper)[1] or 0)
        wrapper.join_hook.open = False
