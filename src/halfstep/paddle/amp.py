"""``static.amp``: mixed precision for captured programs, under Paddle's names."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.fx.traceback import annotate

from ..amp.grad_scaler import GradScaler
from ..casting.emulation import Emulate, check_emulate
from ..casting.graph.cast_pass import GUARD, cast_graph
from ..core.checks import check_flag, check_kind, check_optimizer_state
from ..core.dtypes import parse_dtype, parse_half
from ..core.errors import ArgumentTypeError, ArgumentValueError, UsageError
from ..core.oplists import OpLists
from ..stepping.attached import attach
from .capture import Program, Trainer, Value, loss_of
from .tape import Variable

__all__ = ["CustomOpLists", "MixedPrecisionOptimizer", "decorate", "fp16_guard"]

_OLD = ("use_pure_fp16", "use_fp16_guard", "use_bf16")
_NEW = ("level", "dtype", "master_weight", "master_grad", "use_amp_guard")


def fp16_guard() -> AbstractContextManager[Any]:
    """Open a block whose ops may run in 16 bits under ``decorate(use_pure_fp16=True, use_fp16_guard=True)``.

    Ops outside the block then run in fp32. Outside ``static.capture`` the block has no effect.
    """
    return annotate({GUARD: True})


class CustomOpLists:
    """Ops that run in another precision than the default lists choose.

    Args:
        custom_white_list: names of ops that run in 16 bits.
        custom_black_list: names of ops that run in fp32.
        custom_black_varnames: names of values to compute in fp32: variables computed from ``static.data``, or nodes as
            ``Program.explain`` names them.
        dtype: accepted; the lists of both 16-bit dtypes are the same.
        custom_wide_list: names of matrix products of 16-bit operands whose result is fp32.

    Raises:
        ArgumentValueError: for an unknown op, an op on two lists, or a wide op that is not a matrix product.
        ArgumentTypeError: if a list is a bare string, or a name is not a string.
    """

    def __init__(
        self,
        custom_white_list: Iterable[str] | None = None,
        custom_black_list: Iterable[str] | None = None,
        custom_black_varnames: Iterable[str] | None = None,
        dtype: torch.dtype | str = "float16",
        custom_wide_list: Iterable[str] | None = None,
    ) -> None:
        self.lists = OpLists.custom(custom_white_list, custom_black_list, wide=custom_wide_list)
        parse_half(dtype)
        names = () if custom_black_varnames is None else custom_black_varnames
        if isinstance(names, str) or not isinstance(names, Iterable) or not all(isinstance(n, str) for n in names):
            raise ArgumentTypeError(f"custom_black_varnames={names!r} must be a list of names; write [loss.name].")
        self.black_varnames = frozenset(names)


_MAY_BE_NONE = {"master_weight", "use_fp16_guard", "use_dynamic_loss_scaling"}
_SWITCHES = _MAY_BE_NONE | {"master_grad", "use_amp_guard", "use_pure_fp16", "use_bf16", "use_promote"}


def decorate(
    optimizer: torch.optim.Optimizer, amp_lists: CustomOpLists | None = None, *args: Any, **kwargs: Any
) -> Any:
    """Let an optimizer train a captured program in mixed precision. There are two signatures.

    The newer signature::

        decorate(optimizer, amp_lists=None, level="O1", dtype="float16", master_weight=None, master_grad=False,
                 init_loss_scaling=2**16, incr_every_n_steps=2000, decr_every_n_nan_or_inf=1, incr_ratio=2.0,
                 decr_ratio=0.5, use_dynamic_loss_scaling=None, use_amp_guard=False, use_promote=False)

    The older signature, recognized by ``use_pure_fp16``, ``use_fp16_guard``, ``use_bf16`` or a loss scale as third
    argument::

        decorate(optimizer, amp_lists=None, init_loss_scaling=2**15, incr_every_n_steps=1000,
                 decr_every_n_nan_or_inf=2, incr_ratio=2.0, decr_ratio=0.8, use_dynamic_loss_scaling=True,
                 use_pure_fp16=False, use_fp16_guard=None, use_bf16=False, use_promote=False)

    In the older signature ``use_fp16_guard`` defaults to the value of ``use_pure_fp16``.

    Both signatures take ``emulate``, as ``amp.auto_cast`` does.

    Args:
        optimizer: an optimizer over parameters of the captured model.
        amp_lists: ``CustomOpLists``.
        *args: positional arguments of either signature.
        **kwargs: keyword arguments of either signature. In bfloat16 losses are scaled only with
            ``use_dynamic_loss_scaling=True``. ``master_grad`` has no effect: parameters with masters always have fp32
            gradients.

    Returns:
        A ``MixedPrecisionOptimizer``.

    Raises:
        ArgumentTypeError: for names of both signatures, a name of neither, or a switch that is neither True nor False.
        ArgumentValueError: for an invalid level, dtype or number.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ArgumentTypeError(f"optimizer must be a torch.optim.Optimizer, not {type(optimizer).__name__}.")
    if amp_lists is not None:
        check_kind("amp_lists", amp_lists, CustomOpLists, "a static.amp.CustomOpLists")
    old = [name for name in _OLD if name in kwargs]
    new = [name for name in _NEW if name in kwargs]
    if old and new:
        raise ArgumentTypeError(f"{', '.join(old)} and {', '.join(new)} belong to different signatures of decorate.")
    emulate = check_emulate(kwargs.pop("emulate", "auto"))
    by_number = bool(args) and isinstance(args[0], (int, float)) and not isinstance(args[0], bool)
    make = _decorate_old if old or by_number else _decorate_new
    allowed = list(inspect.signature(make).parameters)[2:]
    if unknown := [name for name in kwargs if name not in allowed]:
        raise ArgumentTypeError(f"decorate takes no {', '.join(map(repr, unknown))}, only {', '.join(allowed)}.")
    given = inspect.signature(make).bind(optimizer, amp_lists, *args, **kwargs).arguments
    for name in _SWITCHES & given.keys():
        if given[name] is not None or name not in _MAY_BE_NONE:
            check_flag(name, given[name])
    decorated = make(optimizer, amp_lists, *args, **kwargs)
    decorated.emulate = emulate
    return decorated


def _decorate_old(
    optimizer: torch.optim.Optimizer,
    amp_lists: CustomOpLists | None = None,
    init_loss_scaling: float = 2.0**15,
    incr_every_n_steps: int = 1000,
    decr_every_n_nan_or_inf: int = 2,
    incr_ratio: float = 2.0,
    decr_ratio: float = 0.8,
    use_dynamic_loss_scaling: bool = True,
    use_pure_fp16: bool = False,
    use_fp16_guard: bool | None = None,
    use_bf16: bool = False,
    use_promote: bool = False,
) -> MixedPrecisionOptimizer:
    half = torch.bfloat16 if use_bf16 else torch.float16
    guarded = use_pure_fp16 if use_fp16_guard is None else use_fp16_guard
    rule = (init_loss_scaling, incr_ratio, decr_ratio, incr_every_n_steps, decr_every_n_nan_or_inf)
    scaler = GradScaler(not use_bf16, *rule, use_dynamic_loss_scaling)
    level = "O2" if use_pure_fp16 else "O1"
    return MixedPrecisionOptimizer(optimizer, amp_lists, scaler, half, level, guarded and use_pure_fp16, use_promote)


def _decorate_new(
    optimizer: torch.optim.Optimizer,
    amp_lists: CustomOpLists | None = None,
    level: str = "O1",
    dtype: str = "float16",
    master_weight: bool | None = None,
    master_grad: bool = False,
    init_loss_scaling: float = 2.0**16,
    incr_every_n_steps: int = 2000,
    decr_every_n_nan_or_inf: int = 1,
    incr_ratio: float = 2.0,
    decr_ratio: float = 0.5,
    use_dynamic_loss_scaling: bool | None = None,
    use_amp_guard: bool = False,
    use_promote: bool = False,
) -> MixedPrecisionOptimizer:
    if level not in ("O0", "O1", "O2", "OD"):
        raise ArgumentValueError(f"level={level!r} should be 'O0', 'OD', 'O1' or 'O2'.")
    half = parse_dtype(dtype)
    if half not in (torch.float16, torch.bfloat16):
        raise ArgumentValueError(f"dtype={dtype!r} should be 'float16' or 'bfloat16'.")
    scaled = half is torch.float16 if use_dynamic_loss_scaling is None else True
    rule = (init_loss_scaling, incr_ratio, decr_ratio, incr_every_n_steps, decr_every_n_nan_or_inf)
    scaler = GradScaler(scaled and level != "O0", *rule, use_dynamic_loss_scaling is not False)
    masters = master_weight is not False
    return MixedPrecisionOptimizer(optimizer, amp_lists, scaler, half, level, use_amp_guard, use_promote, masters)


class MixedPrecisionOptimizer(Trainer):
    """An optimizer that trains a captured program in mixed precision; ``decorate`` makes it.

    Attributes:
        optimizer: the decorated optimizer.
        scaler: the loss scaler, an ``amp.GradScaler``.
        emulate: the devices on which 16-bit products run in fp32 kernels.
    """

    emulate: Emulate = "auto"

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        amp_lists: CustomOpLists | None,
        scaler: GradScaler,
        half: torch.dtype,
        level: str,
        guarded: bool,
        use_promote: bool,
        masters: bool = True,
    ) -> None:
        lists = amp_lists or CustomOpLists()
        super().__init__(optimizer, scaler)
        self._half, self._level, self._guarded, self._masters = half, level, guarded, masters
        self._black = lists.black_varnames
        level = level if level != "O0" else "O1"
        self._lists = lists.lists.replace(level=level, promote=use_promote or level != "O2")
        self._program: Program | None = None
        self._initialized = False

    def minimize(self, loss: Value | Variable, startup_program: Program | None = None) -> None:
        """Insert casts into the program of a loss, and train the program with this optimizer.

        Args:
            loss: ``program.loss``, or a value computed from ``static.data``.
            startup_program: accepted without effect.

        Raises:
            ArgumentTypeError: for any other loss.
            ArgumentValueError: if ``custom_black_varnames`` has a name that the program does not have.
        """
        program, casting = loss_of(loss).program, None
        if self._level != "O0":
            casting = cast_graph(
                program.graph_module,
                self._lists,
                self._half,
                guarded=self._guarded,
                outside=self._level == "O2",
                black_values=program.nodes_of(self._black, "custom_black_varnames"),
                emulate=self.emulate,
            )
        program.train_with(self, casting)
        self._program = program

    def amp_init(
        self,
        place: Any = None,
        scope: Any = None,
        test_program: Any = None,
        use_fp16_test: bool = False,
        rewrite_master_weight: bool = False,
    ) -> None:
        """Cast the parameters that the graph reads in 16 bits at O2, with fp32 masters in the optimizer.

        Args:
            place: accepted without effect; parameters stay on their device.
            scope: accepted without effect.
            test_program: accepted without effect: a test program runs the same graph.
            use_fp16_test: accepted without effect.
            rewrite_master_weight: accepted without effect: masters always start from the fp32 parameters.

        Raises:
            UsageError: before ``minimize``.
        """
        if self._program is None:
            raise UsageError("Please call the minimize method first: amp_init casts the parameters of its program.")
        casting = self._program.casting
        if casting is None or self._initialized or not casting.half_params:
            return
        for name, param in self._program.graph_module.named_parameters():
            if name in casting.half_params:
                param.data = param.data.to(self._half)
        attach(self.optimizer, masters=self._masters)
        self._initialized = True
        from ..diagnostics.findings.checking import log_findings  # imported at first use

        log_findings([self._program.graph_module], [self.optimizer], scaling_is_known=False)

    def get_loss_scaling(self) -> float:
        """Return the loss scale.

        Raises:
            UsageError: before ``minimize``.
        """
        if self._program is None:
            raise UsageError("Please call minimize() before calling get_loss_scaling().")
        return float(self.scaler.get_scale())

    def prepare(self) -> None:
        """Call ``amp_init`` at O2; a second call does nothing."""
        if self._level == "O2":
            self.amp_init()

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state, at O2 with masters, and the loss scaler's state as ``"scaler"``."""
        return {**self.optimizer.state_dict(), "scaler": self.scaler.state_dict()}

    def set_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state dict; at O2, call ``amp_init`` first. Without ``"scaler"`` the loss scale does not change.

        Raises:
            ArgumentTypeError: if the state dict is not a mapping.
            ArgumentValueError: if it has no ``state`` or ``param_groups``. Nothing is loaded.
        """
        check_optimizer_state(self.optimizer, state_dict)
        self.optimizer.load_state_dict(dict(state_dict))
        if state_dict.get("scaler"):
            self.scaler.load_state_dict(state_dict["scaler"])
