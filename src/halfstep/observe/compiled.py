"""Compiled code runs eagerly while somebody looks at modules or ops, which it would hide."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["compiled_code_eager"]


class _CompiledCodeEager:
    """Compiled code runs eagerly, in this process, until all that have entered this have left it, in any order.

    A stance that somebody else sets or ends meanwhile is left as it is.
    """

    def __init__(self) -> None:
        self._inside = 0
        self._stance: Any = None

    def __enter__(self) -> None:
        self._inside += 1
        if self._inside == 1:
            self._stance = torch.compiler.set_stance("force_eager")

    def __exit__(self, *_: object) -> None:
        self._inside -= 1
        if self._inside:
            return
        probe = torch.compiler.set_stance("default")  # which knows the one before
        probe.__exit__(None, None, None)
        if probe.prev.stance == "force_eager":
            self._stance.__exit__(None, None, None)


compiled_code_eager = _CompiledCodeEager()
"""Entered by all that look at modules or ops."""
