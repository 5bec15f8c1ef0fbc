"""The backend "halfstep" of ``torch.compile``."""

from ..graph.compile_backend import halfstep

__all__ = ["halfstep"]
