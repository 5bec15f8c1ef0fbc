"""``diagnose``: runs a few steps of a training on copies, and says what is wrong, where it begins and what to do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..amp.session import scale_loss
from ..core.checks import check_kind
from ..core.errors import ArgumentTypeError, ArgumentValueError, HalfstepError, LossScaleCollapsed, UsageError
from ..core.inner_optimizers import unwrap
from ..diagnostics.findings import Finding
from ..diagnostics.findings.forward import same_random_numbers
from ..diagnostics.numerics import Comparison, compare_step
from ..formats.findings import RULES as OF_FORMATS
from ..stepping.attached import attached_to
from .answer import Diagnosis
from .copies import copied
from .observed import Ended, Observed
from .rules import apply

__all__ = ["diagnose", "of_run"]

_RANK = (
    *("HS122", "HS123", "HS132", "HS115", "HS124", "HS126", "HS125", "HS106", "HS104", "HS118", "HS105"),
    *("HS128", "HS129", "HS130", "HS131"),  # a recipe that loses numbers shows as lost updates and divergence, too
    *("HS120", "HS107", "HS101", "HS102", "HS103", "HS109", "HS117", "HS121", "HS111"),
)
"""Codes in the order in which one is the cause of a later one; codes that are not here come before HS111."""

_WHY = {"overflow": "HS116", "underflow": "HS117", "fp32 op in 16 bits": "HS105", "fp32 in name only": "HS112"}
_FIX = "compute it in fp32: {} of x.float(); or scale what goes into it; an overflow of float16 also ends in bfloat16"


def diagnose(
    step_or_script: Callable[[], Any] | str | os.PathLike[str], model: nn.Module | None = None, optimizer: Any = None
) -> Diagnosis:
    """Run a few steps of a training on copies, and say what is wrong, where it begins and what to do.

    ::

        print(halfstep.diagnose(step, model, optimizer))

    Model, optimizer, random state and loss scale are as before afterwards: the step runs on deep copies of both and of
    all that it reaches. Iterators cannot be copied; a step that calls ``next`` takes batches from the real one.

    Args:
        step_or_script: a function without arguments that runs one training step, or that returns its loss; or the path
            of a script, which runs in another process until its eighth step (``halfstep doctor``).
        model: the model of the step; None for the modules that the step calls.
        optimizer: the optimizer of the model, or a list of them; None for all that have parameters of the model.

    Raises:
        ArgumentTypeError: for an argument of another type.
        ArgumentValueError: for a script that does not exist.
        UsageError: for a model that cannot be copied, a step that trains no model, or a script that fails.
    """
    if isinstance(step_or_script, (str, os.PathLike)):
        return _of_script(Path(step_or_script), model, optimizer)
    if not callable(step_or_script):
        what = "a function without arguments that runs a step, or the path of a script"
        raise ArgumentTypeError(f"diagnose takes {what}, not {type(step_or_script).__name__}.")
    if model is not None:
        check_kind("model", model, nn.Module, "a torch.nn.Module")
    optimizers = list(optimizer) if isinstance(optimizer, (list, tuple)) else [] if optimizer is None else [optimizer]
    for each in optimizers:
        check_kind("optimizer", unwrap(each), torch.optim.Optimizer, "a torch.optim.Optimizer")
    step, model, optimizers = copied(step_or_script, model, optimizers)
    seen = Observed(model, optimizers)
    with same_random_numbers(model or nn.Identity()):
        with suppress(LossScaleCollapsed), seen.observing():
            while seen.wants_more():
                _take(step, optimizers, seen)
                if seen.model is None:
                    raise UsageError("The step called no model that an optimizer trains: give model= and optimizer=.")
        return _answer(seen, step, about="; on copies: model and optimizer are as before")


def of_run(run: Callable[[], Any]) -> Diagnosis | None:
    """Diagnose what a function trains, and end it after its eighth step, for ``halfstep doctor``.

    Args:
        run: runs a script; errors of the script pass through, but for a loss scale that collapses.

    Returns:
        The diagnosis; None if no optimizer stepped on a model that was called.
    """
    seen = Observed(ends=True)
    with suppress(Ended, LossScaleCollapsed), seen.observing():
        run()
    return _answer(seen) if seen.steps else None


def _take(step: Callable[[], Any], optimizers: Sequence[Any], seen: Observed) -> None:
    """Take a step; the backward pass and the optimizer's step run here if ``step`` only returns a loss."""
    before = seen.steps
    loss = step()
    if seen.steps <= 1:
        seen.note_loss(loss)
    if seen.steps == before and isinstance(loss, torch.Tensor) and loss.grad_fn is not None and loss.numel() == 1:
        with suppress(RuntimeError):  # the step ran the backward pass, and the optimizer is elsewhere
            if optimizers and all(map(attached_to, optimizers)):
                with scale_loss(loss, list(optimizers)) as scaled:
                    scaled.backward()
            else:
                loss.backward()
        for each in optimizers:
            each.step()
            each.zero_grad()
    seen.end_step()


def _of_script(path: Path, model: Any, optimizer: Any) -> Diagnosis:
    if model is not None or optimizer is not None:
        raise ArgumentValueError("diagnose finds model and optimizer of a script itself: leave both out.")
    if not path.is_file():
        raise ArgumentValueError(f"{str(path)!r} is no file; give the path of a script, or a function.")
    command = [sys.executable, "-m", "halfstep", "doctor", "--json", str(path)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode not in (0, 1) or not ran.stdout.startswith("{"):
        raise UsageError(f"{path.name} failed:\n{ran.stderr[-2000:]}")
    known = json.loads(ran.stdout)
    findings = [Finding(**each) for each in known["findings"]]
    return Diagnosis(
        findings, known["steps"], list(map(float, known["losses"])), known["skipped"], "; in a process of its own"
    )


def _answer(seen: Observed, step: Callable[[], Any] | None = None, *, about: str = "") -> Diagnosis:
    """Sort what a run has shown, and compare the first bad step with fp32.

    Args:
        seen: the record of the run, whose models may change now.
        step: the function that runs a step; None for the forward pass alone.
        about: a remark, what the first line says of how the steps ran.
    """
    found = [*seen.found, *apply(seen)]
    # check has looked at formats in the first step, when delayed scales are current ones; monitors look at the latest
    known_codes = OF_FORMATS.keys() & {each.code for each in found}
    found += [each for monitor in seen.monitors for each in monitor.findings() if each.code not in known_codes]
    overflow = next((each for each in found if each.code == "HS116" and each.severity == "error"), None)
    known = [each for each in found if each.severity != "note" and each.code != "HS111"]
    if not known or (overflow in known and "HS120" not in overflow.fix and all(e.code != "HS122" for e in known)):
        compared = _compared(seen, step)
        if overflow is not None and compared is not None:
            found[found.index(overflow)] = _explained(overflow, compared)
        elif compared is not None:
            found += _diverging(compared)
    root = f"{type(seen.model).__name__}."  # a watch without names calls modules so
    found = [replace(each, where=each.where.removeprefix(root)) for each in found]
    unique = {(each.code, each.message): each for each in found}
    return Diagnosis(sorted(unique.values(), key=_order), seen.steps, seen.history, seen.skipped, about)


def _order(finding: Finding) -> tuple[int, int]:
    code = "HS120" if finding.code == "HS116" else finding.code  # the monitor has put the two in order
    rank = _RANK.index(code) if code in _RANK else len(_RANK) - 1.5
    return ("error", "warning", "note").index(finding.severity), int(2 * rank)


def _compared(seen: Observed, step: Callable[[], Any] | None) -> Comparison | None:
    """Compare the first bad step with fp32; None if the model cannot run on copies of its weights."""
    bad, model = seen.bad or seen.first, seen.model
    if bad is None or model is None:
        return None
    bad.put_back()
    torch.set_rng_state(bad.random)
    with suppress(HalfstepError, TypeError):  # a hook of all modules does not see a script's keyword arguments
        return compare_step(step or (lambda: model(*bad.args, **bad.kwargs)), model)
    return None


def _diverging(compared: Comparison) -> Iterator[Finding]:
    """Make a finding of the first op whose result in 16 bits is another one than in fp32."""
    first = compared.first()
    if first is not None and not compared.not_finite:
        text = f"{first.op} in {first.dtype} has another result than in fp32: {first.why or 'it amplifies roundoff'}"
        yield Finding(_WHY.get(first.why, "HS127"), "error", first.module, text, {}, _FIX.format(first.op))


def _explained(finding: Finding, compared: Comparison) -> Finding:
    """Add to an overflow the op at which it begins, and what fp32 says."""
    if compared.not_finite:
        text = f"{finding.message}; in fp32 as well: {compared.not_finite}"
        fix = "no dtype helps: look at a mask with whole rows of -inf, a division by 0, the log of a negative number"
        return replace(finding, message=text, fix=fix)
    first = next((each for each in compared.entries if each.error == float("inf")), None)
    if first is None:
        return finding
    text = f"{finding.message}; the first op is {first.op} in {first.dtype} of {first.module}, finite in fp32"
    return replace(finding, message=text, fix=_FIX.format(first.op))
