"""The table of rules: for each callable of torch, the rule that casts its calls under some op lists."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from ..core.names_above import NAMES_ABOVE
from ..core.oplists import OpLists
from ..core.oplists.dtypes import FIRST, FLOAT, HALF, WIDEST, read_in
from ..core.oplists.names import dispatcher_spellings, spellings
from ..core.oplists.tables import NATIVE, Op, row_of
from . import rules
from .composites import composite_rule, is_composite_of
from .dispatch import ByNumbers, Rule, method_name
from .finite import finite_rule
from .logits import from_logits, remember_logits
from .meeting import refused_rule

__all__ = ["build_table"]

_ASSIGNMENT = Op("__setitem__", numbers="number")


@functools.lru_cache(maxsize=64)
def build_table(
    lists: OpLists | None,
    devices: tuple[str, ...],
    kinds: frozenset[str],
    retries: bool,
    verbose: bool,
    products: str | None,
    explicit: bool,
    recorded: bool,
) -> dict[Callable[..., Any] | str, Rule | ByNumbers]:
    """Build the table of the rules of torch's callables under some lists. Callables without a rule are not cast.

    Methods that ``torch.Tensor`` has in Python are also keyed by their names (``method_name``). Ops called as
    ``torch.ops.aten.mm`` are keyed by their dispatcher names only, ``aten::mm``.

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
    if (lists is None or lists.level == "native") and not (kinds or explicit or retries or products):
        return {}

    @functools.cache
    def row(name: str) -> Op:
        if lists is not None and lists.level != "native":
            return lists.row(name)
        natively = [row_of(name).native(device) for device in devices if lists is not None and device in NATIVE]
        return row_of(name)._replace(list=natively[0] if natively else "free")

    @functools.cache
    def rule_of(name: str, inplace: bool, within: str) -> Rule | None:
        op, natively = row(name), {row_of(within).native(device) for device in devices}
        rule = _cast_rule(op, inplace, natively, lists, explicit, verbose)
        if inplace or (op.kind not in kinds and op.list != "wide") or op.list in ("float", "banned"):
            return rule
        return rules.bind(rules.emulated, name, op.kind, op.list, rule)

    no_lists, casts = lists is None or lists.level == "none", lists is not None or retries
    table: dict[Callable[..., Any] | str, Rule | ByNumbers] = {}
    for func, (name, inplace) in spellings().items():
        # torch computes 2 / x as x.reciprocal() * 2, and native autocast on CUDA runs reciprocal in fp32.
        rule: Any = rule_of(name, inplace, "reciprocal" if func is torch.Tensor.__rdiv__ else name)
        known = (
            ("none", "one") if recorded else ("wrong", "one")
        )  # in eager mode torch itself refuses if it has no kernel
        asked = retries and row(name).reason != "custom" and (no_lists or (recorded and rule is None and not inplace))
        if asked and (row(name).kernels in known or (recorded and no_lists)):
            rule = refused_rule(name, inplace, rule)
        rule = finite_rule(row(name), inplace, rule, recorded) if casts else rule
        if name == "sigmoid" and rule is None and casts and not (inplace or recorded):
            rule = remember_logits
        if func is F.binary_cross_entropy and rule is not None:
            rule = rules.bind(from_logits, rule)
        if rule is not None and name in ("mm", "addmm", "matmul"):
            rule = rules.bind(rules.dense_only, name, rule)
        if rule is not None:
            table[func] = rule
    if not no_lists or (retries and recorded):
        table |= {func: rules.bind(rules.dense_only, name, None) for func, name in rules.SPARSE_PRODUCTS.items()}
    if products:
        table |= NAMES_ABOVE["rules_of_products"]()(products, table)
    cast = frozenset(name for func, (name, _) in spellings().items() if func in table)
    for func in spellings():
        if func not in table and is_composite_of(func, cast):
            table[func] = composite_rule(func)
    for name, (canonical, inplace) in dispatcher_spellings().items():
        rule = rule_of(canonical, inplace, canonical)
        rule = finite_rule(row(canonical), inplace, rule, recorded) if casts else rule
        if rule is not None:
            table[name] = rule
    if casts:
        table[torch.Tensor.__setitem__] = finite_rule(_ASSIGNMENT, True, rules.match_self, recorded)
    table[torch.Tensor.backward] = table[torch.autograd.backward] = table[torch.autograd.grad] = rules.backward
    table[torch.Tensor.unflatten] = rules.unflatten
    table |= {method: rule for func, rule in table.items() if callable(func) and (method := method_name(func))}
    return table


def _cast_rule(
    op: Op, inplace: bool, natively: set[str], lists: OpLists | None, explicit: bool, verbose: bool
) -> Rule | None:
    """Return the rule that casts an op, given its row and the rules of native autocast; None if no cast is needed."""
    level = lists.level if lists is not None else "none"
    if level in ("native", "none") and op.reason != "custom":
        return rules.without_native if explicit and level == "none" and natively != {"free"} else None
    if explicit and natively != {"free"}:
        natively |= {"half", "float"}  # native autocast must be off for any op
    name, read = op.name, read_in(op, inplace)
    if inplace:
        if read == FLOAT:
            return rules.bind(rules.float_inplace, name)
        return rules.match_self if read == FIRST and op.list != "free" else None
    if read == HALF:
        if natively == {"half"} and not verbose and level != "none":
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
