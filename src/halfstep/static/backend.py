"""The backend "halfstep" of ``torch.compile``."""

from ..casting.graph.compile_backend import halfstep

__all__ = ["halfstep"]
