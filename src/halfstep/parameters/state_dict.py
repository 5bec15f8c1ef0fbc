"""A patch for ``torch.distributed.checkpoint``, which creates optimizer states for parameters with fp32 gradients."""

from __future__ import annotations

import functools
import sys
from importlib.machinery import ModuleSpec
from typing import Any

from ..torch_internals.torch_compat import HAS_GRAD_DTYPE, STATE_INIT, STATE_MODULE

__all__ = ["patch_state_init"]

_PATCHED = "_halfstep_patched"


def patch_state_init() -> None:
    """Wrap the function of this module that puts zeros of the parameter's dtype into ``p.grad`` (torch 2.13).

    Importing the module takes longer than importing halfstep. If no code has imported the module yet, its function is
    wrapped at the first import.
    """
    if not HAS_GRAD_DTYPE:
        return
    module = sys.modules.get(STATE_MODULE)
    if module is not None:
        _patch(module)
    elif _AtImport not in sys.meta_path:
        sys.meta_path.insert(0, _AtImport)


class _AtImport:
    """A finder that patches the module when it is imported, and finds nothing else."""

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return the module's spec from the other finders, with a loader that patches the module."""
        if name != STATE_MODULE:
            return None
        others = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not cls)
        spec = next((spec for spec in others if spec is not None), None)
        loader: Any = None if spec is None else spec.loader
        if loader is not None:
            own = loader.exec_module

            def exec_module(module: Any) -> None:
                own(module)
                _patch(module)
                if cls in sys.meta_path:
                    sys.meta_path.remove(cls)

            loader.exec_module = exec_module
        return spec


def _patch(module: Any) -> None:
    own = getattr(module, STATE_INIT, None)
    if own is None or hasattr(module, _PATCHED):  # the function is missing while another thread imports the module
        return

    @functools.wraps(own)
    def init(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        attached = getattr(optimizer, "_amp_stash", None)
        if attached is None:
            return own(optimizer, *args, **kwargs)
        attached.window.gradients.expect(scaled=True)
        result = own(optimizer, *args, **kwargs)
        attached.window.gradients.expect()
        return result

    setattr(module, STATE_INIT, init)
    setattr(module, _PATCHED, True)
