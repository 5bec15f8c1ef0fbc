"""``compare``: two saved runs, aligned row by row, and the module to blame."""

from __future__ import annotations

import copy
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from halfstep import amp, numerics
from halfstep.numerics import Monitor, Row, compare, save_rows
from tests.numerics.faults import draw
from tests.numerics.models import MODELS, Trial
from tests.support.worlds import HALVES, unscaled_step

PROBE = tuple(math.sin(i) for i in range(1, 65))
RMS = math.hypot(*PROBE) / 8.0


def row(module: str, tensor: str = "output", *, error: float = 0.0, step: int = 0, **changes: Any) -> Row:
    """A row whose values are off by a relative error."""
    made = Row(step, module, tensor, numel=64, amax=1.0, rms=RMS, probe=PROBE)
    values = tuple(x + error * RMS * (-1) ** i for i, x in enumerate(PROBE))
    return replace(made, **{"probe": values, **changes})


def outputs(*errors: float) -> list[Row]:
    return [row(name, error=error) for name, error in zip("abcdef", errors, strict=False)]


# ---- rows


def test_the_first_error_of_some_size_is_blamed_and_those_after_it_are_not() -> None:
    found = compare(outputs(0, 0, 0, 0), [replace(r, dtype="bfloat16") for r in outputs(1e-3, 1e-3, 0.5, 0.6)])
    first, top = found.first(), found.modules()[0]
    assert first is not None
    assert first.module == top.module == "c"
    assert first.error == pytest.approx(0.5)
    assert first.inherited == pytest.approx(1e-3)
    assert top.excess == pytest.approx(0.499 / (2**-8 + 1e-3))


@pytest.mark.parametrize(
    ("bad_in", "said"),
    [((), ""), (("candidate",), ""), (("reference",), ""), (("reference", "candidate"), "NaN, from b.norm: output")],
)
def test_a_nan_in_both_runs_is_no_matter_of_precision(bad_in: tuple[str, ...], said: str) -> None:
    runs = {name: outputs(0, 0, 0) for name in ("reference", "candidate")}
    for name in bad_in:
        runs[name][1] = replace(runs[name][1], amax=math.nan, nan=0.5, began_in="b.norm")
    found = compare(runs["reference"], runs["candidate"])
    assert found.not_finite == said
    assert ("precision is not the cause. It began at b.norm: output" in str(found)) is bool(said)


def test_an_overflow_is_infinitely_large_and_inherited() -> None:
    b = outputs(0, 0, 0)
    b[1:] = [replace(r, amax=math.inf, probe=(math.nan,) * 64) for r in b[1:]]
    found = compare(outputs(0, 0, 0), b)
    assert [(e.module, e.excess, e.why) for e in found.entries] == [
        ("a", 0.0, ""),
        ("b", math.inf, "overflow"),
        ("c", 0.0, ""),
    ]


def test_what_overflows_in_both_is_no_error() -> None:
    both = [row("a", amax=math.inf)]
    assert compare(both, both).first() is None


def test_rows_of_several_steps_and_calls_are_aligned() -> None:
    a = [row("a"), row("a", call=1), row("a", step=10), row("b", step=10)]
    b = [row("a"), row("a", call=1, error=0.5), row("a", step=10), row("c", step=20)]
    found = compare(a, b)
    first = found.first()
    assert first is not None
    assert (first.module, first.occurrence, first.step) == ("a", 1, 0)
    assert found.about == {"rows of one run only": 2}


def test_where_shapes_differ_magnitudes_are_compared() -> None:
    fine = compare([row("a")], [row("a", numel=32, probe=PROBE[:32])])
    assert [entry.error for entry in fine.entries] == [0.0]
    twice = compare([row("a")], [row("a", numel=32, probe=(), rms=2 * RMS)])
    assert [entry.error for entry in twice.entries] == [pytest.approx(1.0)]


def test_the_gradient_of_an_output_is_blamed_on_the_backward_pass_before_it() -> None:
    grads = [row(name, "output_grad", error=e) for name, e in (("c", 0.0), ("b", 0.0), ("a", 0.7))]
    found = compare([replace(r, probe=PROBE) for r in grads], grads)
    assert [(e.module, e.op) for e in found.entries] == [
        ("(step)", "output_grad of c"),
        ("c", "output_grad of b"),
        ("b", "output_grad of a"),
    ]
    assert found.modules()[0].module == "b"


def test_gradients_and_updates_belong_to_the_module_of_their_parameter() -> None:
    names = [("a.weight", "grad"), ("a.weight", "update"), ("scale", "grad")]
    found = compare([row(*name) for name in names], [row(*name) for name in names])
    assert [(e.module, e.op) for e in found.entries] == [
        ("a", "grad of weight"),
        ("a", "update of weight"),
        ("(root)", "grad of scale"),
    ]


@pytest.mark.parametrize("merged", [False, True])
def test_the_gradient_of_a_bias_that_is_noise_alone_is_none(merged: bool) -> None:
    """Rows that were added up have no probe, and the noise of 16 bits is larger than that of fp32."""
    noise = () if merged else tuple(1e-9 * x for x in PROBE)
    a = [row("a.weight", "grad"), row("a.bias", "grad", probe=noise, rms=1e-9, amax=1e-9)]
    b = [row("a.weight", "grad"), row("a.bias", "grad", probe=noise[::-1], rms=1e-5, amax=1e-5)]
    assert max(entry.error for entry in compare(a, b).entries) < 1e-4


@pytest.mark.parametrize(("tensor", "why"), [("output_grad", "underflow"), ("output", "")])
def test_zeros_are_lost_in_gradients_only(tensor: str, why: str) -> None:
    found = compare([row("a", tensor, zeros=0.5)], [row("a", tensor, zeros=0.75)])
    (entry,) = found.entries
    assert (entry.why, entry.error) == (why, 0.5 if why else 0.0)


def test_a_negative_zero_is_no_difference() -> None:
    half = [0.0, *PROBE[1:]]
    found = compare([row("a", "output_grad", probe=tuple(half))], [row("a", "output_grad", probe=(-0.0, *half[1:]))])
    assert [entry.error for entry in found.entries] == [0.0]


def test_runs_whose_tensors_lie_in_memory_in_another_order_are_compared_at_the_same_places() -> None:
    runs = []
    for memory in (torch.contiguous_format, torch.channels_last):
        model = torch.nn.ReLU()
        x = torch.randn(4, 8, 16, 16, generator=torch.Generator().manual_seed(0)).to(memory_format=memory)
        with Monitor(model, every=1, sample=256) as monitor:
            assert model(x).is_contiguous(memory_format=memory)
        runs.append(monitor.rows())
    assert [entry.error for entry in compare(*runs).entries] == [0.0]


# ---- files


def test_files_are_compared_and_named(tmp_path: Path) -> None:
    save_rows(tmp_path / "fp32.jsonl", outputs(0, 0))
    save_rows(tmp_path / "bf16.jsonl", outputs(0, 0.5))
    found = compare(tmp_path / "fp32.jsonl", str(tmp_path / "bf16.jsonl"))
    assert found.names == ("fp32.jsonl", "bf16.jsonl")
    assert found.modules()[0].module == "b"
    assert str(found).startswith("bf16.jsonl against fp32.jsonl: 2 tensors in 2 modules\nfirst divergence: b: output ")


# ---- real runs


def watched(trial: Trial, dtype: torch.dtype | None, steps: int) -> list[Row]:
    before = copy.deepcopy(trial.model.state_dict())
    optimizer = torch.optim.SGD(trial.model.parameters(), lr=0.1)
    monitor = Monitor(trial.model, optimizer, every=1)
    with monitor:
        for _ in range(steps):
            with amp.auto_cast(enable=dtype is not None, dtype=dtype or "bfloat16"):
                loss = trial.step()
            unscaled_step(loss, optimizer)
    trial.model.load_state_dict(before)
    return monitor.rows()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", HALVES)
def test_healthy_runs_do_not_diverge(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    trial = MODELS[name]()
    found = numerics.compare(watched(trial, None, 3), watched(trial, dtype, 3))
    assert found.first() is None, str(found)
    assert max(entry.error for entry in found.entries) > 0.0


@pytest.mark.exhaustive
@pytest.mark.parametrize("why", ["overflow", "cancellation", "underflow"])
def test_faults_are_found_in_saved_runs(why: str, request: pytest.FixtureRequest) -> None:
    """``make combinations`` draws 20 faults of each kind, and ``make test`` 8."""
    dice, count = random.Random(0), 20 if request.config.getoption("combinations") == "all" else 8
    right = 0
    for _ in range(count):
        fault = draw(dice, why)
        found = compare(watched(fault.trial, None, 1), watched(fault.trial, fault.dtype, 1))
        right += found.modules()[0].module == fault.module
    assert right >= int(0.9 * count)


def test_a_run_against_itself_has_no_error() -> None:
    trial = MODELS["mlp"]()
    runs = [watched(trial, torch.bfloat16, 2) for _ in range(2)]
    assert {entry.error for entry in compare(*runs).entries} == {0.0}
