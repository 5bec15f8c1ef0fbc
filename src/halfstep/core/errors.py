"""The errors and warnings of halfstep. Every message names a remedy."""

__all__ = [
    "ArgumentIndexError",
    "ArgumentTypeError",
    "ArgumentValueError",
    "HalfstepError",
    "LossScaleCollapsed",
    "MissingModuleError",
    "MissingNameError",
    "NotScriptableError",
    "PrecisionWarning",
    "UnsafeOpError",
    "UsageError",
]


class HalfstepError(RuntimeError):
    """The base class of all errors of halfstep."""


class ArgumentIndexError(HalfstepError, IndexError):
    """An index is out of range."""


class ArgumentValueError(HalfstepError, ValueError):
    """An argument of the right type has a value that is not allowed."""


class ArgumentTypeError(HalfstepError, TypeError):
    """An argument has the wrong type."""


class UsageError(HalfstepError):
    """A valid call came in the wrong order, or on an object that it does not support."""


class MissingNameError(HalfstepError, ImportError):
    """A name of Apex has no counterpart here."""

    def __init__(self, message: str, *, name: str | None = None) -> None:
        ImportError.__init__(self, message, name=name)


class NotScriptableError(HalfstepError, AttributeError):
    """``torch.jit.script`` was given a model whose inputs, outputs or weights were cast."""


class LossScaleCollapsed(HalfstepError):  # noqa: N818 - the name says what happened
    """A dynamic loss scale is at its minimum and the gradients still overflow."""


class MissingModuleError(HalfstepError, ModuleNotFoundError):
    """A module of Apex that halfstep does not have."""


class UnsafeOpError(HalfstepError, NotImplementedError):
    """An op that needs fp32 was called on 16-bit tensors, and a cast would not make it safe."""


class PrecisionWarning(UserWarning):
    """Training is correct but slow, because the hardware has no units for the dtype."""
