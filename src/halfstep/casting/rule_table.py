"""The table of rules: for each callable of torch, the rule that casts its calls under some op lists."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from ..core.names_above import NAMES_ABOVE
from ..core.oplists import OpLists
from ..core.oplists.dtypes import FIRST, FLOAT, HALF, WIDEST, read_in
from ..core.oplists.names import dispatcher_spellings, spellings
from ..core.oplists.tables import NATIVE, Op, row_of
from ..torch_internals.compiler_compat import show_to_modes
from . import rules
from .composites import composite_rule, is_composite_of
from .dispatch import ByNumbers, Rule, method_name
from .finite import finite_rule
from .logits import from_logits, remember_logits
from .meeting import refused_rule

__all__ = ["OpRules", "build_table"]

_ASSIGNMENT = Op("__setitem__", numbers="number")
_TAKES_SPARSE = ("mm", "addmm", "matmul")


class OpRules(NamedTuple):
    """The settings that decide on the rule of each op. A rule of None leaves a call unchanged.

    Args:
        lists: the op lists; None casts nothing.
        devices: the device types on which ops are cast.
        kinds: the kinds of ops that are emulated on one of the devices.
        retries: True to retry ops that torch refuses. Ops that torch should refuse but does not get a rule.
        verbose: log casts, which native autocast cannot do.
        products: the recipe by which products round their operands; None rounds none.
        explicit: True to leave nothing to native autocast, because it may be off, or on for other lists.
        recorded: True if ops are recorded to run later. They cannot be retried then, so with ``retries`` the ops that
            torch refuses get a rule.
    """

    lists: OpLists | None
    devices: tuple[str, ...]
    kinds: frozenset[str]
    retries: bool
    verbose: bool
    products: str | None
    explicit: bool
    recorded: bool

    @property
    def level(self) -> str:
        """The level of the lists."""
        return "none" if self.lists is None else self.lists.level

    @property
    def casts(self) -> bool:
        """True if any op may be cast."""
        return self.lists is not None or self.retries

    def row(self, name: str) -> Op:
        """Return the row of an op under the lists, of which the native ones differ between devices."""
        if self.lists is not None and self.level != "native":
            return self.lists.row(name)
        natively = (
            row_of(name).native(device) for device in self.devices if self.level == "native" and device in NATIVE
        )
        return row_of(name)._replace(list=next(natively, "free"))

    def called_as(self, func: Callable[..., Any], name: str, inplace: bool) -> Rule | ByNumbers | None:
        """Return the rule of one of torch's callables: the rule of its op, and what the callable itself needs."""
        # torch computes 2 / x as x.reciprocal() * 2, and native autocast on CUDA runs reciprocal in fp32.
        op = self.row(name)
        rule: Any = self.listed(op, inplace, "reciprocal" if func is torch.Tensor.__rdiv__ else name)
        rule = self.in_range(op, inplace, self.accepted(op, inplace, rule))
        if name == "sigmoid" and rule is None and self.casts and not (inplace or self.recorded):
            return remember_logits
        if rule is not None and func is F.binary_cross_entropy:
            return rules.bind(from_logits, rule)
        return rules.bind(rules.dense_only, name, rule) if rule is not None and name in _TAKES_SPARSE else rule

    def listed(self, op: Op, inplace: bool, within: str) -> Rule | None:
        """Return the rule that the lists and the emulation give an op, given the op that native autocast sees."""
        rule = self._cast(op, inplace, {row_of(within).native(device) for device in self.devices})
        if inplace or (op.kind not in self.kinds and op.list != "wide") or op.list in ("float", "banned"):
            return rule
        return rules.bind(rules.emulated, op.name, op.kind, op.list, rule)

    def _cast(self, op: Op, inplace: bool, natively: set[str]) -> Rule | None:
        """Return the rule that casts an op, given its row and the rules of native autocast."""
        if self.level in ("native", "none") and op.reason != "custom":
            return rules.without_native if self.explicit and self.level == "none" and natively != {"free"} else None
        if self.explicit and natively != {"free"}:
            natively |= {"half", "float"}  # native autocast must be off for any op
        name, read = op.name, read_in(op, inplace)
        if inplace:
            if read == FLOAT:
                return rules.bind(rules.float_inplace, name)
            return rules.match_self if read == FIRST and op.list != "free" else None
        if read == HALF:
            if natively == {"half"} and not self.verbose and self.level != "none":
                return rules.half_native
            return rules.bind(rules.to_half, name, native_off=bool(natively & {"float", "banned"}))
        if op.list == "banned":
            return rules.bind(rules.banned, name, op.note, native_off=True)
        off = bool(op.inside or natively & {"half", "banned"})
        if op.list == "float":
            return rules.bind(rules.to_float, name, native_off=off or op.reason == "custom")
        # Native promotion on a CPU refuses 16-bit tensors of another dtype than its own.
        off = off or bool(natively & {"float", "promote"})
        if op.list == "promote" and (off or read == WIDEST):
            return rules.bind(rules.promote, name, native_off=off)
        return rules.without_native if off else None

    def accepted(self, op: Op, inplace: bool, rule: Rule | None) -> Rule | None:
        """Also cast what torch refuses, if it is recorded and so not retried, or computes wrong without an error."""
        if not self.retries or op.reason == "custom":
            return rule
        if self.recorded:
            refused = self.level == "none" or (rule is None and not inplace and op.kernels in ("none", "one"))
        else:
            refused = self.level == "none" and op.kernels in ("wrong", "one")
        return refused_rule(op.name, inplace, rule) if refused else rule

    def in_range(self, op: Op, inplace: bool, rule: Rule | None) -> Rule | ByNumbers | None:
        """Compute in fp32 what 16 bits have no number for."""
        return finite_rule(op, inplace, rule, self.recorded) if self.casts else rule


@functools.lru_cache(maxsize=64)
def build_table(ops: OpRules) -> dict[Callable[..., Any] | str, Rule | ByNumbers]:
    """Build the table of the rules of torch's callables. Callables without a rule are not cast.

    Methods that ``torch.Tensor`` has in Python are also keyed by their names (``method_name``). Ops called as
    ``torch.ops.aten.mm`` are keyed by their dispatcher names only, ``aten::mm``.
    """
    by_torch = ops.lists is None or ops.level == "native"
    if by_torch and not (ops.kinds or ops.explicit or ops.retries or ops.products):
        return {}
    found = {func: ops.called_as(func, name, inplace) for func, (name, inplace) in spellings().items()}
    table: dict[Callable[..., Any] | str, Any] = {func: rule for func, rule in found.items() if rule is not None}
    if ops.level != "none" or (ops.retries and ops.recorded):
        table |= {func: rules.bind(rules.dense_only, name, None) for func, name in rules.SPARSE_PRODUCTS.items()}
    if ops.products:
        table |= NAMES_ABOVE["rules_of_products"]()(ops.products, table)
    cast = frozenset(name for func, (name, _) in spellings().items() if func in table)
    table |= {func: composite_rule(func) for func in spellings() if func not in table and is_composite_of(func, cast)}
    for dispatched, (name, inplace) in dispatcher_spellings().items():
        op = ops.row(name)
        if (rule := ops.in_range(op, inplace, ops.listed(op, inplace, name))) is not None:
            table[dispatched] = rule
    if ops.casts:
        table[torch.Tensor.__setitem__] = finite_rule(_ASSIGNMENT, True, rules.match_self, ops.recorded)
    # The forward pass chose the dtypes of the ops in a backward pass.
    table |= dict.fromkeys((torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad), rules.without_native)
    table[torch.Tensor.unflatten] = rules.unflatten
    table |= {method: rule for func, rule in table.items() if callable(func) and (method := method_name(func))}
    show_to_modes(func for func in table if callable(func))
    return table
