"""The module that Python imports at the start of each child process of a script under ``halfstep run``.

It does not import halfstep until the process imports Apex.
"""

from __future__ import annotations

import atexit
import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any


class _UntilApex:
    """Calls ``install`` at the first import of Apex, and then steps aside."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Find Apex and its extensions; None for other modules. The finder that it puts last has ``torch._six``."""
        if name == "torch._six":
            from halfstep.compat.torch_past import bring_back_six

            bring_back_six()
            return None
        if name not in ("apex", "amp_C", "apex_C", "syncbn"):
            return None
        sys.meta_path.remove(self)
        from halfstep.compat.cuda_shim import cuda_on_cpu
        from halfstep.compat.install import install

        install()
        if os.environ.get("HALFSTEP_RUN_DEVICE") == "cpu":
            self.on_cpu = cuda_on_cpu()
            self.on_cpu.__enter__()
            atexit.register(self.on_cpu.__exit__, None, None, None)  # keeps it until the process ends
        return importlib.util.find_spec(name)


sys.meta_path.insert(0, _UntilApex())

# Import the sitecustomize that this module shadows.
_here = os.path.dirname(os.path.abspath(__file__))
_next = PathFinder.find_spec("sitecustomize", [place for place in sys.path if os.path.abspath(place) != _here])
if _next is not None and _next.loader is not None:
    _next.loader.exec_module(importlib.util.module_from_spec(_next))
