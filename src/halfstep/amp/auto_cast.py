"""``amp.auto_cast``: Paddle's context manager for op casting, with custom op lists."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, NoReturn, TypeVar

import torch

from ..casting.emulation import Emulate, check_emulate
from ..casting.scope import OpCasting
from ..core.checks import check_flag, is_device
from ..core.dtypes import HALF_DTYPES, default_half, parse_dtype
from ..core.errors import ArgumentTypeError, ArgumentValueError
from ..core.hardware import accelerator, warn_if_absent, warn_if_slow
from ..core.oplists import OpLists
from ..torch_internals.compiler_compat import not_by_itself, traced_as_constant
from .arguments import RecipeChoice
from .options import lists_of

__all__ = ["auto_cast", "autocast"]

F = TypeVar("F", bound=Callable[..., Any])


@traced_as_constant
def _printed(op_lists: Any, custom: Any, **settings: Any) -> str:
    """Return the lists as text. Dynamo calls this function while it traces, and keeps the text as a constant."""
    return str(lists_of(op_lists, custom, **settings))


def _devices(given: str | Iterable[str] | None) -> tuple[str, ...] | None:
    if given is None:
        return None
    if not isinstance(given, (str, Iterable)):
        raise ArgumentTypeError(f"device_type={given!r} must be a type of device, such as 'cuda', or a list of them.")
    names = (given,) if isinstance(given, str) else tuple(given)
    for name in names:
        if not is_device(name) or torch.device(name).type != name:
            raise ArgumentValueError(
                f"device_type={given!r}: {name!r} is not a device type; use 'cpu', 'cuda', 'xpu', 'mps', 'npu' or a "
                "list of device types, without an index, or leave it out."
            )
    if not names:
        raise ArgumentValueError("device_type=[] casts nowhere; pass enable=False for a scope without casts.")
    return names


class _AutoCastType(type):
    """Refuses ``with amp.auto_cast:`` without parentheses."""

    def __enter__(cls) -> NoReturn:
        raise ArgumentTypeError("`with amp.auto_cast:` lacks parentheses; write `with amp.auto_cast():`.")

    def __exit__(cls, *exc: object) -> None:
        """Do nothing: ``with`` requires the method, but never calls it because ``__enter__`` raises."""


class auto_cast(metaclass=_AutoCastType):  # noqa: N801 - it reads as the function that Paddle has
    """A context manager and decorator in which each op computes in the precision of its op list.

    ::

        with amp.auto_cast(custom_black_list=["exp"], level="O1"):
            loss = loss_fn(model(x), y)
        loss.backward()

    It applies to the calling thread. An inner block replaces the outer block, and inside a block, models from
    ``amp.initialize`` compute as the block specifies. Backward passes are not cast. float64 and integer tensors are
    never cast.

    Args:
        enable: False disables all casts in the block. A device type, which is torch's first argument, counts as
            ``device_type``.
        custom_white_list: ops to run in 16 bits: names or torch functions, in a list, tuple or set. It overrides the
            lists of the level.
        custom_black_list: ops to run in fp32.
        custom_wide_list: matrix products that read 16-bit operands and return an fp32 result, such as "linear" for a
            router or the logits.
        level: "O1" runs the half list in 16 bits, the float list in fp32, and other ops in the widest dtype of their
            inputs. "O2" reduces the float list to embedding, interpolation and scatter. "OD" runs only matrix products,
            convolutions and the white list in 16 bits, and everything else in fp32. "O0" casts nothing. Any case.
        dtype: torch.float16, torch.bfloat16 or their names; None means float16 with CUDA, and bfloat16 otherwise.
        use_promote: False to run ops without a list in 16 bits at O2, even if an input is fp32.
        device_type: "cpu", "cuda" or another device type of torch, or a list of device types: tensors on other devices
            are not cast. None means the CPU and the accelerator of this machine. A device that the machine does not
            have causes a ``PrecisionWarning``, once per process, because nothing would be cast.
        emulate: "auto" runs 16-bit matrix products, convolutions, attention and recurrent layers in fp32 kernels with
            rounded inputs and outputs, if the device has no 16-bit units; True does so on every device, False on none.
        enabled: torch's name of ``enable``.
        products: a ``halfstep.formats.Recipe`` or the name of one: ``linear``, ``matmul``, ``mm``, ``bmm``, ``addmm``,
            ``baddbmm`` and ``grouped_mm`` round their operands to its formats, where the blocks divide their sizes; at
            level "O0" with fp32 results. ``amp.set_products`` does so for chosen layers.
        cache_enabled: ignored; for compatibility with torch. Casts of weights are cached until the outermost block
            ends.
        opt_level: Apex's name of ``level``.
        op_lists: the precision of each op as a ``halfstep.OpLists``, such as the answer of ``halfstep.search``. It
            replaces the lists of the level, and with them ``use_promote``. Do not pass it with a custom list.

    Attributes:
        casting: the op casting of the block, which is also a context manager.

    Warns:
        PrecisionWarning: once, if the hardware has no units for the dtype and ``emulate=False``.

    Raises:
        ArgumentValueError: for an unknown level, dtype or op, or an op on both lists.
        ArgumentTypeError: for a list that is a string or not a collection, ``op_lists`` that are no ``OpLists``, or a
            flag that is neither True nor False.
        UsageError: for ``op_lists`` with a custom list.

    Source: Paddle's AMP guide, section 2.1.2.
    """

    @not_by_itself
    def __init__(
        self,
        enable: bool | str = True,
        custom_white_list: Iterable[object] | None = None,
        custom_black_list: Iterable[object] | None = None,
        level: str = "O1",
        dtype: torch.dtype | str | None = None,
        use_promote: bool = True,
        *,
        device_type: str | Iterable[str] | None = None,
        custom_wide_list: Iterable[object] | None = None,
        emulate: Emulate = "auto",
        enabled: bool | None = None,
        cache_enabled: bool | None = None,
        products: RecipeChoice = None,
        opt_level: str | None = None,
        op_lists: OpLists | None = None,
    ) -> None:
        if callable(enable):
            raise ArgumentTypeError(
                f"@amp.auto_cast without parentheses took {enable!r} for its first argument; write @amp.auto_cast()."
            )
        if isinstance(enable, str) and is_device(enable):
            device_type, enable = enable if device_type is None else device_type, True
        enabled = check_flag("enable", enable) and (enabled is None or check_flag("enabled", enabled))
        check_flag("use_promote", use_promote)
        level = level.upper() if isinstance(level := opt_level or level, str) else level
        if level not in ("O0", "OD", "O1", "O2"):
            raise ArgumentValueError(f"level={level!r}, but level should be O0, OD, O1 or O2.")
        devices = _devices(device_type)
        on_cuda = torch.cuda.is_available() if devices is None else "cuda" in devices
        half = default_half("cuda" if on_cuda else "cpu") if dtype is None else parse_dtype(dtype)
        casts, products = enabled and level != "O0", products if enabled else None
        if half not in HALF_DTYPES:
            if casts:
                raise ArgumentValueError(
                    f"dtype={dtype!r}: If enable amp, dtype should be 'float16' or 'bfloat16'; for fp32 pass "
                    "enable=False or level='O0'."
                )
            half = torch.bfloat16
        check_emulate(emulate)
        if casts and not torch.compiler.is_dynamo_compiling():
            warn_if_absent(devices or ("cpu",))
            if emulate is False:
                warn_if_slow(torch.device(devices[-1] if devices else accelerator() or "cpu"), half)
        make: Any = _printed if torch.compiler.is_dynamo_compiling() else lists_of
        custom = {"white": custom_white_list, "black": custom_black_list, "wide": custom_wide_list}
        lists = make(op_lists, custom, level="O1" if level == "O0" else level, use_promote=use_promote)
        if products is not None:
            from ..formats.recipe import text_of  # imported when asked for

            products = text_of(products)
        self.casting = OpCasting(half, lists, enabled=casts, devices=devices, emulate=emulate, products=products)

    def __repr__(self) -> str:
        at = self.casting
        return f"auto_cast(enable={at.enabled}, level={at.lists.level!r}, dtype={at.dtype}, device_type={at.devices})"

    def __enter__(self) -> auto_cast:
        self.casting.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self.casting.__exit__(*exc)

    def __call__(self, function: F) -> F:
        """Decorate a function so that it runs in the block.

        Raises:
            ArgumentTypeError: for a value that is not a function, such as a tensor.
            ArgumentValueError: for a generator or a coroutine.
        """
        if not callable(function):
            raise ArgumentTypeError(f"{type(function)} is not a function; write `with amp.auto_cast():`.")
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
"""An alias with torch's name."""
