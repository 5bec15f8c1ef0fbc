"""``amp.auto_cast``: Paddle's scope of op casting, with the op lists at hand."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch

from ..core.errors import ArgumentValueError, PrecisionWarning
from ..core.formats import HALF_DTYPES, default_half, parse_dtype
from ..core.hardware import slow_reason
from ..core.oplists import OpLists
from ..engine.casting.ops import OpCasting

__all__ = ["auto_cast", "autocast"]

F = TypeVar("F", bound=Callable[..., Any])

_LEVELS = ("O0", "OD", "O1", "O2")


@functools.cache
def _slow(half: torch.dtype) -> str | None:
    return slow_reason(torch.device("cuda" if torch.cuda.is_available() else "cpu"), half)


def _printed(white: Any, black: Any, level: str, use_promote: bool) -> str:
    """Lists as text, which Dynamo can hold: it calls this while it traces and takes the text for a constant."""
    return str(OpLists.custom(white, black, level=level, use_promote=use_promote))


_printed._dynamo_marked_constant = True  # type: ignore[attr-defined]


class auto_cast:  # noqa: N801 - it reads as the function that Paddle has
    """A scope, or a decorated function, in which each op computes in the precision its list says.

    ::

        with amp.auto_cast(custom_black_list=["exp"], level="O1"):
            loss = loss_fn(model(x), y)
        loss.backward()

    It holds for the calling thread, on the CPU and CUDA alike. A scope inside another replaces it. Backward passes
    are not cast. float64 and integer tensors are never touched.

    Args:
        enable: False is a scope without casts.
        custom_white_list: ops to run in 16 bits; names or torch functions, in a list, tuple or set. Wins over the
            lists of the level.
        custom_black_list: ops to run in fp32.
        level: "O1": the half list in 16 bits, the float list in fp32, the rest in the widest dtype of its inputs.
            "O2": the float list is down to embedding, interpolation and scatter. "OD": only matrix products,
            convolutions and the white list in 16 bits, everything else in fp32. "O0": no casts. Any case.
        dtype: torch.float16, torch.bfloat16 or their names; None means float16 where there is CUDA, else bfloat16.
        use_promote: at O2, False runs the ops that are on no list in 16 bits whatever their inputs are.

    Warns:
        PrecisionWarning: once, where the hardware has no units for the dtype.

    Raises:
        ArgumentValueError: an unknown level, dtype or op, or an op on both lists.
        ArgumentTypeError: a list that is a bare string, or no collection.

    Source: Paddle's AMP guide, section 2.1.2.
    """

    def __init__(
        self,
        enable: bool = True,
        custom_white_list: Iterable[object] | None = None,
        custom_black_list: Iterable[object] | None = None,
        level: str = "O1",
        dtype: torch.dtype | str | None = None,
        use_promote: bool = True,
    ) -> None:
        level = level.upper() if isinstance(level, str) else level
        if level not in _LEVELS:
            raise ArgumentValueError(f"level={level!r}, but level should be O0, OD, O1 or O2.")
        half = default_half("cuda" if torch.cuda.is_available() else "cpu") if dtype is None else parse_dtype(dtype)
        enabled = bool(enable) and level != "O0"
        if half not in HALF_DTYPES:
            if enabled:
                raise ArgumentValueError(
                    f"dtype={dtype!r}: If enable amp, dtype should be 'float16' or 'bfloat16'; for fp32 pass "
                    "enable=False or level='O0'."
                )
            half = torch.bfloat16
        if enabled and not torch.compiler.is_compiling() and (reason := _slow(half)) is not None:
            warnings.warn(reason, PrecisionWarning, stacklevel=2)
        level = "O1" if level == "O0" else level
        if torch.compiler.is_compiling():
            lists: Any = _printed(custom_white_list, custom_black_list, level, use_promote)
        else:
            lists = OpLists.custom(custom_white_list, custom_black_list, level=level, use_promote=use_promote)
        self._casting = OpCasting(half, lists, enabled=enabled)

    def __enter__(self) -> auto_cast:
        self._casting.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self._casting.__exit__(*exc)

    def __call__(self, function: F) -> F:
        """Decorate a function: it runs inside the scope."""
        if inspect.isgeneratorfunction(function) or inspect.iscoroutinefunction(function):
            raise ArgumentValueError(
                f"{function.__name__} is a generator or coroutine, which would leave the scope between its steps; "
                "use `with amp.auto_cast(...)` inside it."
            )

        @functools.wraps(function)
        def cast(*args: Any, **kwargs: Any) -> Any:
            with self:
                return function(*args, **kwargs)

        return cast  # type: ignore[return-value]


autocast = auto_cast
"""The same under torch's name for it."""
