"""Casts against the lists: every op of torch's own database, on its own samples, against the same call cast by hand."""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import Phase
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule
from torch.nn import functional as F
from torch.utils._pytree import tree_flatten, tree_map

from halfstep import OpLists, amp
from halfstep.core.errors import ArgumentValueError, UnsafeOpError
from halfstep.core.oplists.dtypes import needs_fp32, numbers_kind
from halfstep.core.oplists.names import resolve
from tests.support.worlds import FP32

__all__ = ["Casts"]

LEVELS = ["O1", "O2", "OD"]


@functools.cache
def database() -> list[Any]:
    """The ops of torch's database that take float32 on a CPU and that a list can name.

    Left out are those whose results are not defined by their inputs (the last bits of LAPACK's least squares change
    with where its inputs lie), and functions in Python on no list: the ops inside of them follow the lists.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db  # takes seconds

    found = []
    for op in op_db:
        try:
            OpLists.default().rule(op.op)
        except ArgumentValueError:
            continue
        if FP32 in op.dtypes and op.name not in _LEFT_OUT and not isinstance(op.op, torch._ops.OpOverloadPacket):
            found.append(op)
    return found


_LEFT_OUT = {
    *("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided", "as_strided"),
    *("lu", "linalg.lstsq", "__rdiv__", "nn.functional.unfold", "nn.functional.max_unpool1d", "nn.functional.softsign"),
    *("nn.functional.threshold", "nn.functional.triplet_margin_with_distance_loss"),
}

# Deprecated names, which torch does not show to function modes: the entry of what they call decides.
_CALLS = dict.fromkeys((F.upsample_bilinear, F.upsample_nearest), F.interpolate)


def by_hand(rule_of: str, half: torch.dtype, args: Any) -> Any:
    """The arguments of a call, cast by a rule."""
    narrow = (torch.float16, torch.bfloat16, FP32)
    target = {"half": half, "float": FP32, "promote": FP32, "sequence-promote": FP32}.get(rule_of)
    if "promote" in rule_of:
        floats = [leaf for leaf in tree_flatten(args)[0] if isinstance(leaf, torch.Tensor) and leaf.dtype in narrow]
        counted = [leaf for leaf in floats if leaf.dim()] or floats  # a number does not widen, as in torch
        if len({leaf.dtype for leaf in counted}) < 2:
            return args

    def cast(leaf: Any) -> Any:
        return leaf.to(target) if target and isinstance(leaf, torch.Tensor) and leaf.dtype in narrow else leaf

    return tree_map(cast, args)


def outcome(call: Callable[[], Any]) -> Any:
    """What a call returns, or the class of what it raises."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return call()
        except Exception as error:  # noqa: BLE001 - torch raises all kinds where it has no kernel
            return error


def same(a: Any, b: Any) -> bool:
    """Whether two outcomes are equal, NaN being equal to NaN."""
    if isinstance(b, Exception):
        return True  # there is no kernel; ours may have widened the call then
    if isinstance(a, Exception):
        return False
    (ours, shape), (theirs, other) = tree_flatten(a), tree_flatten(b)
    if shape != other:
        return False
    for x, y in zip(ours, theirs, strict=True):
        if isinstance(x, torch.Tensor):
            if x.dtype is not y.dtype or x.shape != y.shape or (x.layout is torch.strided and not _same_numbers(x, y)):
                return False
        elif x != y and not (x != x and y != y):
            return False
    return True


def _same_numbers(x: torch.Tensor, y: torch.Tensor) -> bool:
    if x.is_complex():
        x, y = torch.view_as_real(x.resolve_conj()), torch.view_as_real(y.resolve_conj())
    return bool(((x == y) | ((x != x) & (y != y))).all())


class Casts(RuleBasedStateMachine):
    """Calls of random ops under ``amp.auto_cast``."""

    cases = 0
    steps = 20
    phases = tuple(Phase)

    @rule(
        which=st.integers(0, 10_000),
        sample=st.integers(0, 4),
        level=st.sampled_from(LEVELS),
        half=st.sampled_from([torch.float16, torch.bfloat16]),
        given=st.sampled_from(["fp32", "half", "first half"]),
        moved=st.sampled_from(["", "", "white", "black"]),
    )
    def call(self, which: int, sample: int, level: str, half: torch.dtype, given: str, moved: str) -> None:
        """One op on one of its samples."""
        Casts.cases += 1
        op = database()[which % len(database())]
        torch.manual_seed(sample)
        # Not op.sample_inputs: that walks the call stack, at a tenth of a second or more, to find torch's own tests.
        samples = list(itertools.islice(op.sample_inputs_func(op, "cpu", FP32, requires_grad=False), 5))
        chosen = samples[sample % len(samples)]
        args = (chosen.input, *chosen.args)
        if given == "half":
            args = by_hand("half", half, args)
        elif given == "first half":
            args = (by_hand("half", half, args[0]), *args[1:])
        lists = {f"custom_{moved}_list": [op.op]} if moved else {}
        oplists = OpLists.custom(*([op.op] if moved == each else () for each in ("white", "black")), level=level)
        rule_of = oplists.rule(_CALLS.get(op.op, op.op))
        kinds = {numbers_kind(oplists.row(name)) for name in resolve(_CALLS.get(op.op, op.op))}
        fresh = tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, (args, chosen.kwargs))

        def ours() -> Any:
            with amp.auto_cast(level=level, dtype=half, emulate=False, **lists):
                return op.op(*args, **chosen.kwargs)

        def theirs() -> Any:
            positional, named = by_hand(rule_of, half, fresh)
            result = op.op(*positional, **named)
            is_half = half in {getattr(leaf, "dtype", None) for leaf in tree_flatten((positional, named))[0]}
            if is_half and any(needs_fp32(kind, half, positional, named, result) for kind in kinds):
                positional, named = by_hand("float", half, fresh)
                result = op.op(*positional, **named)
            return result

        found = outcome(ours)
        if rule_of == "banned":
            assert isinstance(found, UnsafeOpError) or given == "fp32", op.name
            return
        expected = outcome(theirs)
        assert same(found, expected), (op.name, rule_of, found, expected)
