"""Every error and warning that halfstep raises on purpose, each with a message that says what to do."""

__all__ = [
    "ArgumentIndexError",
    "ArgumentTypeError",
    "ArgumentValueError",
    "HalfstepError",
    "LossScaleCollapsed",
    "PrecisionWarning",
    "UnsafeOpError",
    "UsageError",
]


class HalfstepError(RuntimeError):
    """The base of all of them, so that one ``except`` catches what this library refuses."""


class ArgumentIndexError(HalfstepError, IndexError):
    """An index is outside of what there is."""


class ArgumentValueError(HalfstepError, ValueError):
    """An argument of the right type has a value that is not allowed."""


class ArgumentTypeError(HalfstepError, TypeError):
    """An argument has the wrong type."""


class UsageError(HalfstepError):
    """Calls that are fine by themselves came in an order, or on objects, that cannot work."""


class LossScaleCollapsed(HalfstepError):  # noqa: N818 - the name says what happened
    """A dynamic loss scale sits at its floor and the gradients still overflow."""


class UnsafeOpError(HalfstepError, NotImplementedError):
    """An op that needs fp32 was asked to work on 16-bit tensors in a way that casting cannot help."""


class PrecisionWarning(UserWarning):
    """The training is right and slower than it need be, because the hardware has no units for the dtype."""
