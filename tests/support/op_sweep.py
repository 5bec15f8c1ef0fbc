"""Every op of torch that has an ``OpInfo``, called with 16-bit tensors alone and with some tensors in fp32.

What it should give is what the op gives in fp32 on the same numbers. How far it may be off is measured: the inputs and
the gradients that come in are moved by the rounding of the dtype, and the result by what it says.

    python -m tests.support.op_sweep O1
    python -m tests.support.op_sweep native --all
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils import _pytree

from halfstep.casting.current import thread
from halfstep.casting.scope import OpCasting
from halfstep.core.errors import HalfstepError
from tests.support.sweeps import Found, command
from tests.support.worlds import HALVES

__all__ = ["SCOPES", "Case", "Reference", "problem_of"]


@contextlib.contextmanager
def recorded(casting: OpCasting) -> Iterator[None]:
    """The casts of code that ``torch.compile`` traces, done at once: no op is called again."""
    with casting:
        thread.mode.plan = thread.mode.plan._replace(table=thread.mode.plan.recorded, call_again=None)
        yield


MIXES: dict[str, Callable[[int], bool]] = {  # which of the fp32 tensors are given in 16 bits, by their place
    "all": lambda place: True,
    "first": lambda place: place == 0,
    "others": lambda place: place > 0,
}
SCOPES: dict[str, Callable[[torch.dtype], Any]] = {
    "O1": OpCasting,
    "O2": lambda half: OpCasting(half, enabled=False, retries=True),
    "O1, recorded": lambda half: recorded(OpCasting(half)),
    "O2, recorded": lambda half: recorded(OpCasting(half, enabled=False, retries=True)),
    "native": lambda half: torch.autocast("cpu", half),
    "none": lambda half: contextlib.nullcontext(),
}
RANDOM = ("normal", "normal.in_place", "uniform", "rand_like", "randn_like", "empty_like", "new_empty")
"""Ops that give other numbers in another dtype, or any, also where their samples set the seed."""

LARGEST = 20_000
"""Samples with more elements are left out."""


@dataclasses.dataclass
class Case:
    """One call of an op.

    Attributes:
        name: of the op.
        tensors: its fp32 tensors; those that require a gradient get one.
        call: the op, as a function of such tensors.
        form: "function", "method", or "in place", where the first tensor is written to.
    """

    name: str
    tensors: list[torch.Tensor]
    call: Callable[[list[torch.Tensor]], Any]
    form: str = "function"


# ---- the cases


def cases(names: frozenset[str], every: bool) -> Iterator[Case]:
    """The cases of torch's own table, and those of ``op_sweep_more`` for ops that are not in it.

    Args:
        names: of the ops; empty for all.
        every: several samples of each op and all its forms, instead of one or two samples of the function.
    """
    from torch.testing._internal import common_utils, opinfo
    from torch.testing._internal.common_methods_invocations import op_db

    from tests.support.op_sweep_more import MORE

    for module in (common_utils, opinfo.core):
        module.extract_test_fn = lambda: None  # it would look for a unittest among all frames, for each sample
    for op in op_db:
        name = f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name
        if not names or name in names:
            torch.manual_seed(0)
            forms = {"function": op.op, "method": op.method_variant, "in place": op.inplace_variant}
            for sample in _samples(op, 6 if every else 1):
                for form, function in forms.items():
                    if function is not None and (every or form == "function"):
                        yield _case(name, function, sample, form)
    for name, (tensors, call) in MORE.items():
        if not names or name in names:
            yield Case(name, [t.clone().requires_grad_() for t in tensors], functools.partial(_spread, call))


def _spread(call: Callable[..., Any], tensors: list[torch.Tensor]) -> Any:
    return call(*tensors)


def _samples(op: Any, most: int) -> list[Any]:
    found = []
    for sample in op.sample_inputs("cpu", torch.float32, requires_grad=op.supports_autograd):
        count = len(_fp32(sample))
        size = sum(t.numel() for t in _pytree.tree_leaves(_parts(sample)) if isinstance(t, torch.Tensor))
        if count and 0 < size < LARGEST and sample.kwargs.get("dtype") in (None, torch.float32):
            found.append((count, sample))
        if len(found) == 12 * most:
            break
    if not found:
        return []
    chosen = [sample for _, sample in found[:: max(1, len(found) // most)]][:most]
    fullest = max(found, key=lambda item: item[0])  # with most tensors that may mix
    return chosen if fullest[0] == max(len(_fp32(s)) for s in chosen) else [*chosen, fullest[1]]


def _parts(sample: Any) -> Any:
    return (sample.input, sample.args, sample.kwargs)


def _fp32(sample: Any) -> list[torch.Tensor]:
    return [t for t in _pytree.tree_leaves(_parts(sample)) if _is_fp32(t)]


def _is_fp32(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype is torch.float32


def _case(name: str, function: Callable[..., Any], sample: Any, form: str) -> Case:
    leaves, spec = _pytree.tree_flatten(_parts(sample))

    def call(tensors: list[torch.Tensor]) -> Any:
        given = iter(tensors)
        first, args, kwargs = _pytree.tree_unflatten([next(given) if _is_fp32(v) else v for v in leaves], spec)
        result = function(first.clone() if form == "in place" else first, *args, **kwargs)
        return sample.output_process_fn_grad(result)

    return Case(name, [v.detach().requires_grad_(v.requires_grad) for v in leaves if _is_fp32(v)], call, form)


# ---- one case


class Reference:
    """What an op gives in fp32, for all scopes.

    Args:
        case: the call.
        half: the 16-bit dtype.
        mix: which of the tensors are in 16 bits.

    Attributes:
        given: the tensors of the call under a scope.
        wants: which of them get a gradient.
        wanted: results and gradients in fp32 of the same numbers.

    Raises:
        RuntimeError: and others, if the op fails in fp32.
    """

    def __init__(self, case: Case, half: torch.dtype, mix: str) -> None:
        low = MIXES[mix]
        self.case, self.half = case, half
        self._numbers = [t.detach().to(half).float() if low(i) else t.detach() for i, t in enumerate(case.tensors)]
        self.given = [t.to(half) if low(i) else t for i, t in enumerate(self._numbers)]
        self.wants = [t.requires_grad for t in case.tensors]
        try:
            self.wanted = _run(case, self._numbers, self.wants, half)
        except RuntimeError:  # no gradient in fp32 either
            self.wants = [False] * len(self.wants)
            self.wanted = _run(case, self._numbers, self.wants, half)

    @functools.cached_property
    def _moved(self) -> list[Any]:
        """What the op gives for numbers that were moved by the rounding of the dtype."""
        found = []
        for _ in range(2):
            with contextlib.suppress(RuntimeError, ValueError):  # ValueError: outside of a domain
                numbers = [_moved(t, self.half) for t in self._numbers]
                found.append(_run(self.case, numbers, self.wants, self.half, moved=True))
        return found

    def spread(self, what: int, i: int) -> float:
        """How far the rounding of the inputs moves a result (``what`` is 0) or a gradient (1)."""
        moved = (each[what] for each in self._moved)
        return max((_far(each[i], self.wanted[what][i]) for each in moved if i < len(each)), default=0.0)

    @functools.cached_property
    def is_random(self) -> bool:
        """True if another seed gives other results."""
        others, _ = _run(self.case, self._numbers, [False] * len(self.wants), self.half, seed=5)
        return any(_far(a, b) for a, b in zip(self.wanted[0], others, strict=True)) or self.case.name in RANDOM


def problem_of(case: Case, half: torch.dtype, reference: Reference, scope: Callable[[], Any]) -> str:
    """What is wrong with an op under a scope, in a few words; "" if nothing, "refused" for halfstep's own error."""
    try:
        found = _run(case, reference.given, reference.wants, half, scope)
    except HalfstepError:
        return "refused"
    except Exception as error:  # noqa: BLE001 - any of torch's
        return f"{type(error).__name__}: {str(error)[:150]}"
    if (problem := _problem(reference, found)) and reference.is_random:
        return "" if [t.shape for t in found[0]] == [t.shape for t in reference.wanted[0]] else "shapes"
    return problem


def _problem(reference: Reference, found: Any) -> str:
    """The problem of what an op gives, if the op is not random."""
    given, wanted = reference.given, reference.wanted
    if reference.case.form == "in place" and found[0][0].dtype is not given[0].dtype:
        return f"dtype of the result: {found[0][0].dtype}"
    for gradient, tensor in zip(found[1], itertools.compress(given, reference.wants), strict=False):
        if gradient is not None and gradient.dtype is not tensor.dtype:
            return f"dtype of a gradient: {gradient.dtype}"
    for what in (0, 1):
        for i, right in enumerate(wanted[what]):
            spread = functools.partial(reference.spread, what, i)
            if wrong := _compare(found[what][i], right, spread, reference.half):
                return f"{('result', 'gradient')[what]} {i}: {wrong}"
    return ""


def _moved(tensor: torch.Tensor, half: torch.dtype) -> torch.Tensor:
    if tensor.layout is not torch.strided:
        return tensor
    return tensor * (1 + torch.finfo(half).eps * (torch.randint(0, 2, tensor.shape) * 2 - 1))


def _run(
    case: Case,
    numbers: list[torch.Tensor],
    wants: list[bool],
    half: torch.dtype,
    scope: Callable[[], Any] = contextlib.nullcontext,
    *,
    seed: int = 0,
    moved: bool = False,
) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    """The tensors that an op gives, and the gradients of its inputs."""
    torch.manual_seed(seed)
    leaves = [t.clone().requires_grad_(wanted) for t, wanted in zip(numbers, wants, strict=True)]
    with scope():
        results = [t for t in _pytree.tree_leaves(case.call(leaves)) if isinstance(t, torch.Tensor)]
    outputs = [t for t in results if t.requires_grad]
    inputs = [t for t in leaves if t.requires_grad]
    if not outputs or not inputs:
        return results, []
    generator, weights = torch.Generator().manual_seed(1), []
    for output in outputs:
        weight = torch.randn(output.shape, generator=generator).to(half).float()
        weight = _moved(weight, half) if moved else weight
        weights.append((torch.complex(weight, weight) if output.is_complex() else weight).to(output.dtype))
    return results, list(torch.autograd.grad(outputs, inputs, weights, allow_unused=True))


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    return (torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor).double()


def _far(a: torch.Tensor | None, b: torch.Tensor | None) -> float:
    """The greatest distance of two tensors; infinite for shapes that differ, and beside a NaN."""
    if a is None or b is None:
        return 0.0 if a is b else float("inf")
    a, b = _dense(a), _dense(b)
    if a.shape != b.shape:
        return float("inf")
    far = (a - b).abs().masked_fill((a == b) | (a.isnan() & b.isnan()), 0.0).nan_to_num(float("inf"))
    return far.max().item() if far.numel() else 0.0


def _compare(
    found: torch.Tensor | None, wanted: torch.Tensor | None, spread: Callable[[], float], half: torch.dtype
) -> str:
    if found is None or wanted is None:
        other = wanted if found is None else found
        return "" if other is None or not other.any() else "missing"
    if not (wanted.is_floating_point() or wanted.is_complex()) and found.dtype is not wanted.dtype:
        return f"{found.dtype} instead of {wanted.dtype}"
    size = _dense(wanted).nan_to_num(0.0, 0.0, 0.0).abs().max().item() if wanted.numel() else 0.0
    if found.dtype is torch.float16 and size > torch.finfo(torch.float16).max:
        return ""  # its own overflow
    far, bound = _far(found, wanted), 6 * torch.finfo(half).eps * size + 1e-6
    if far > bound:  # only then does it matter how far the rounding of the inputs moves the result
        bound += 6 * spread()
    return f"off by {far:.3g}, above {bound:.3g}" if far > bound else ""


# ---- all


def sweep(hows: list[str], names: frozenset[str], every: bool) -> Found:
    """Run the cases. In place an op of the fp32 list is always refused, and not named."""
    found: dict[str, Any] = {how: {"cases": 0, "refused": set(), "wrong": {}} for how in hows}
    for case in cases(names, every):
        # One dtype in turn by the name, so that a run is the same as the one before.
        halves = HALVES if every else (HALVES[zlib.crc32(case.name.encode()) % 2],)
        for half in halves:
            for mix in MIXES if len(case.tensors) > 1 else ("all",):
                try:
                    reference = Reference(case, half, mix)
                except Exception:  # noqa: BLE001 - what fails in fp32, too, is no case
                    continue
                for how, row in found.items():
                    problem = problem_of(case, half, reference, functools.partial(SCOPES[how], half))
                    row["cases"] += 1
                    if problem == "refused":
                        row["refused"].update([case.name] if case.form != "in place" else [])
                    elif problem:
                        text = f"{case.form}, {str(half)[6:]}, {mix} in 16 bits: {problem}"
                        row["wrong"].setdefault(case.name, []).append(text)
    return {how: {**row, "refused": sorted(row["refused"])} for how, row in found.items()}


if __name__ == "__main__":
    command(sweep, SCOPES)
