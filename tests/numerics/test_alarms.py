"""What a monitor says is wrong: which module, and which cause comes first."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from halfstep import Finding, amp
from halfstep.diagnostics.numerics.alarms import Alarms, findings_in
from halfstep.numerics import Monitor, Row, load_rows, save_rows, write_report
from tests.numerics.models import MODELS
from tests.support.worlds import Made, advance, unscaled_step, with_optimizer


def monitored(model: nn.Module, *args: Any, **kwargs: Any) -> list[Finding]:
    with Monitor(model, every=1) as monitor:
        model(*args, **kwargs)
    return monitor.findings()


# ---- HS116: the module in which an overflow begins


class Overflows(nn.Module):
    """Is too large in float16 before its healthy layers run, in a way of its own."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.act = nn.ReLU(inplace=True)
        self.way = way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.way == "positional":
            return self.inner(x * 1e4 * 1e4)
        if self.way == "keyword":
            return self.inner(input=x * 1e4 * 1e4)
        if self.way == "in place":
            return self.inner(self.act(x.abs() * 1e4 * 1e4))
        if self.way == "after":
            return self.inner(x) * 1e4 * 1e4
        if self.way == "in its own memory":
            x = self.inner(x)
            return x.mul_(1e4).mul_(1e4)
        return self.inner(x)


WAYS = ["positional", "keyword", "in place", "after", "in its own memory"]


@pytest.mark.parametrize("way", WAYS)
def test_the_module_in_whose_forward_an_overflow_begins_is_named(way: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), Overflows(way), nn.Linear(8, 8)).half()
    (finding,) = monitored(model, torch.randn(16, 4).half())
    assert finding.where.split(", ")[0] == "1"
    own = "the output of 1 holds inf or NaN; its inputs are finite"
    inside = "inf or NaN begins in 1, whose inputs are finite; the inputs of 1."
    assert finding.message.startswith(f"at step 0 {own if way in ('after', 'in its own memory') else inside}")
    assert finding.evidence["module"] == "1"


def test_a_layer_that_overflows_itself_is_named_and_not_the_block_around_it() -> None:
    model = nn.Sequential(nn.Linear(4, 8), Overflows("nowhere")).half()
    nn.init.constant_(model[1].inner.weight, 6e4)
    (finding,) = monitored(model, torch.full((16, 4), 100.0).half())
    assert finding.where.split(", ")[0] == "1.inner"


def test_a_bad_batch_is_no_fault_of_a_module() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8))
    (finding,) = monitored(model, torch.full((2, 4), math.nan))
    assert "check the batch" in finding.message
    assert finding.where.split(", ")[0] == "0"


def test_a_mask_of_zeros_and_minus_inf_is_meant_to_be_so() -> None:
    attention = Made(lambda self, x, mask: (x * 1e4 * 1e4 + mask).softmax(-1))
    model = Made(lambda self, x, mask: self.out(self.attention(x, mask=mask)), attention=attention, out=nn.Linear(8, 8))
    mask = torch.zeros(8, 8).masked_fill(torch.ones(8, 8).triu(1).bool(), -math.inf).half()
    (finding,) = monitored(model.half(), torch.randn(8, 8).half(), mask=mask)
    assert finding.where.split(", ")[0] == "attention"
    assert "its inputs are finite" in finding.message


def test_weights_that_an_earlier_step_made_inf_or_nan_are_named() -> None:
    model, optimizer = with_optimizer(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)), torch.optim.SGD, lr=0.1)
    with torch.no_grad():
        model[1].weight.fill_(math.nan)
    with Monitor(model, optimizer, every=1) as monitor:
        model(torch.randn(3, 4)).sum().backward()
        optimizer.step()
    finding = monitor.findings()[0]
    assert finding.where.split(", ")[0] == "1"
    assert "an earlier step had already written inf or NaN to its weight" in finding.message


def test_inputs_are_told_apart_after_an_error_and_in_a_second_pass() -> None:
    class Fails(nn.Module):
        fails = True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.fails:
                raise RuntimeError
            return x

    model = nn.Sequential(nn.Linear(4, 8), Fails(), Overflows("positional")).half()
    with Monitor(model, every=1) as monitor:
        with pytest.raises(RuntimeError):
            model(torch.randn(2, 4).half())
        model[1].fails = False
        model(torch.randn(2, 4).half())
    assert monitor.findings()[0].where.split(", ")[0] == "2"


def test_where_an_overflow_began_is_in_the_rows_in_a_file_and_on_the_page(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), Overflows("positional")).half()
    with Monitor(model, every=1) as monitor:
        model(torch.randn(16, 4).half())
    assert {row.module: row.began_in for row in monitor.rows()} == {"0": "", "1.inner": "1"}
    save_rows(tmp_path / "rows.jsonl", monitor.rows())
    assert [row.began_in for row in load_rows(tmp_path / "rows.jsonl")] == ["", "1"]
    monitor.report(tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "at step 0 inf or NaN begins in 1, whose inputs are finite" in page


def test_of_outputs_near_the_largest_number_the_one_that_came_there_first_is_named() -> None:
    model = nn.Sequential(*(Made(lambda self, x: x * self.factor, factor=1.0) for _ in range(2)))
    with Monitor(model, every=1) as monitor:
        for factors in ((1.0, 50000.0), (40000.0, 1.0)):
            model[0].factor, model[1].factor = factors
            model(torch.ones(2, 4, dtype=torch.float16))
    (finding,) = monitor.findings()
    assert finding.where == "1, 0"
    assert "at step 0 the output of 1 has" in finding.message


# ---- HS120: a learning rate that is too high

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda params, times: torch.optim.SGD(params, lr=0.1 * times),
    "SGD with momentum": lambda params, times: torch.optim.SGD(params, lr=0.1 * times, momentum=0.9),
    "AdamW": lambda params, times: torch.optim.AdamW(params, lr=1e-3 * times),
    "RMSprop": lambda params, times: torch.optim.RMSprop(params, lr=1e-3 * times),
}
LEVELS = [("O0", None), ("O1", torch.float16), ("O1", torch.bfloat16), ("O2", torch.bfloat16)]


def trained(name: str, level: str, dtype: torch.dtype | None, kind: str, times: float, steps: int = 6) -> Monitor:
    torch.manual_seed(1)
    trial = MODELS[name]()
    optimizer = OPTIMIZERS[kind](trial.model.parameters(), times)
    trial.model, optimizer = amp.initialize(trial.model, optimizer, opt_level=level, dtype=dtype, verbosity=0)
    with Monitor(trial.model, optimizer, every=1) as monitor:
        for _ in range(steps):
            advance(trial.step(), optimizer)
    return monitor


@pytest.mark.parametrize(("level", "dtype"), LEVELS)
@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
def test_a_learning_rate_that_is_too_high_comes_first(
    kind: str, level: str, dtype: torch.dtype | None, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    with caplog.at_level(logging.INFO, "halfstep"):
        monitor = trained("mlp", level, dtype, kind, 100.0)
    first = monitor.findings()[0]
    assert (first.code, first.severity) == ("HS120", "error")
    lines = [each.getMessage() for each in caplog.records if "numerics.Monitor" in each.getMessage()]
    assert lines[0].startswith("halfstep.numerics.Monitor: HS120 error at ")
    assert "lower the learning rate" in lines[0]
    monitor.report(tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "the learning rate is too high" in page[page.index("What stands out") :].split("</li>")[0]


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_healthy_learning_rate_is_no_finding(kind: str) -> None:
    assert "HS120" not in {each.code for each in trained("mlp", "O1", torch.bfloat16, kind, 1.0).findings()}


@pytest.mark.exhaustive
@pytest.mark.parametrize(("level", "dtype"), LEVELS)
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("name", [name for name in MODELS if name != "residual"])
def test_learning_rates_of_all_models(name: str, kind: str, level: str, dtype: torch.dtype | None) -> None:
    assert "HS120" not in {each.code for each in trained(name, level, dtype, kind, 1.0).findings()}
    assert trained(name, level, dtype, kind, 100.0).findings()[0].code == "HS120"


def rows_of(step: int, sizes: dict[str, tuple[float, float]], **given: Any) -> list[Row]:
    """Rows of weights and updates, by the rms of both."""
    return [
        Row(step, name, tensor, numel=100, rms=rms, amax=rms, zeros=float(rms == 0), **given)
        for name, pair in sizes.items()
        for tensor, rms in zip(("weight", "update"), pair, strict=True)
    ]


NONE: list[str] = []
SIZES: list[tuple[str, list[dict[str, tuple[float, float]]], list[str]]] = [
    ("healthy", [{"a": (0.1, 1e-3)}] * 3, NONE),
    ("a quarter", [{"a": (0.1, 0.026)}], ["HS120"]),
    ("of a few weights", [{"a": (0.1, 1e-3), "b": (0.1, 1e-3), "scale": (1e-6, 1e-3)}], NONE),
    ("from zero on", [{"b": (x, 1e-3), "c": (x, 1e-3), "a": (0.1, 1e-4)} for x in (0.0, 1e-3)], NONE),
    ("growing", [{"a": (1.0, 0.01)}, {"a": (1.0, 0.03)}, {"a": (1.0, 0.12)}], ["HS120"]),
    ("growing in one layer", [{"a": (1.0, x), "b": (1.0, 0.01), "c": (1.0, 0.01)} for x in (0.01, 0.1, 1.0)], NONE),
    ("growing in a warmup", [{"a": (1.0, 0.0)}, {"a": (1.0, 1e-4)}, {"a": (1.0, 2e-4)}, {"a": (1.0, 9e-4)}], NONE),
    ("growing slowly", [{"a": (1.0, 0.06)}, {"a": (1.0, 0.08)}, {"a": (1.0, 0.12)}], NONE),
    ("NaN", [{"a": (0.1, math.nan)}], NONE),
]


@pytest.mark.parametrize(("steps", "codes"), [each[1:] for each in SIZES], ids=[each[0] for each in SIZES])
def test_what_is_too_large_and_what_grows(
    steps: list[dict[str, tuple[float, float]]], codes: list[str], tmp_path: Path
) -> None:
    rows = [row for i, sizes in enumerate(steps) for row in rows_of(i, sizes)]
    write_report(rows, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert ("the learning rate is too high" in page) is bool(codes)


def test_updates_of_an_embedding_are_measured_where_there_are_any() -> None:
    """All but one of 100 rows have no update, so the root mean square of all is a tenth of that of the one."""
    weight = Row(0, "a", "weight", numel=100, amax=1.0, rms=1.0)
    update = Row(0, "a", "update", numel=100, amax=0.5, rms=0.05, zeros=0.99)
    assert [each.code for each in findings_in([weight, update])] == ["HS120"]


@pytest.mark.parametrize(("noise", "before", "found"), [(0.0, 0, [12]), (0.0, 200, [17]), (3.0, 0, [])])
def test_a_trend_is_one_if_it_is_steeper_than_its_noise(noise: float, before: int, found: list[int]) -> None:
    """Outputs of float16 with 7.0 to 4.5 doublings left, half a doubling less at each of the last steps."""
    signs = (1, -1, 1, 1, -1, 1)
    sizes = [9.0] * before + [9.0 + step / 2 - noise * (sign < 0) for step, sign in enumerate(signs)]
    alarms = Alarms()
    for step, size in enumerate(sizes):
        alarms.add([Row(step, "a", "output", dtype="float16", numel=4, amax=2.0**size, rms=1.0)])
    assert [round(each.evidence["steps_left"]) for each in alarms.news()] == found
    assert alarms.news() == []


def test_an_overflow_after_a_step_that_was_too_large_is_not_blamed_on_its_module() -> None:
    torch.manual_seed(0)
    first, grows = nn.Linear(8, 8), Made(lambda self, x: self.layer(x) * 1e3, layer=nn.Linear(8, 8))
    model, optimizer = with_optimizer(nn.Sequential(first, grows), torch.optim.SGD, lr=10.0)
    with Monitor(model, optimizer, every=1) as monitor:
        for _ in range(30):
            unscaled_step(model(torch.ones(4, 8)).square().mean(), optimizer)
    codes = [each.code for each in monitor.findings()]
    assert codes[:2] == ["HS120", "HS116"]
    assert monitor.findings()[1].fix == "lower the learning rate first: HS120 came before"


# ---- HS121: gradients that are zero from the start


class Cut(torch.autograd.Function):
    """Multiplies a gradient by a factor and divides it again."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return (grad * ctx.factor) / (ctx.factor or 1.0), None


def with_cut(place: int, factor: float) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    if place >= 0:
        layer = model[place]
        forward = layer.forward
        layer.forward = lambda x: Cut.apply(forward(x), factor)
    return model


def steps_of(model: nn.Module, dtype: torch.dtype, factor: float, steps: int = 2) -> list[Finding]:
    model, optimizer = with_optimizer(model.to(dtype), torch.optim.SGD, lr=1e-3)
    with Monitor(model, optimizer, every=1) as monitor:
        for _ in range(steps):
            unscaled_step(model(torch.randn(16, 8).to(dtype)).float().square().mean() * factor, optimizer)
    return [each for each in monitor.findings() if each.code == "HS121"]


ZERO: list[tuple[int, float, float, torch.dtype, list[tuple[str, str]]]] = [
    (-1, 1.0, 1.0, torch.float32, []),
    (-1, 1.0, 0.0, torch.float32, [("error", "(step)")]),
    (-1, 1.0, 1e-12, torch.float16, [("error", "(step)")]),
    (-1, 1.0, 1e-12, torch.bfloat16, []),
    (4, 0.0, 1.0, torch.float32, [("error", "4")]),
    (2, 0.0, 1.0, torch.float32, [("warning", "2")]),
    (2, 2.0**-40, 1.0, torch.float16, [("warning", "2")]),
    (2, 2.0**-40, 1.0, torch.bfloat16, []),
]


@pytest.mark.parametrize(("place", "cut", "factor", "dtype", "found"), ZERO)
def test_gradients_that_are_zero_from_the_start(
    place: int, cut: float, factor: float, dtype: torch.dtype, found: list[tuple[str, str]]
) -> None:
    findings = steps_of(with_cut(place, cut), dtype, factor)
    assert [(each.severity, each.evidence["module"]) for each in findings] == found


def test_gradients_that_come_later_were_not_zero_from_the_start() -> None:
    model, optimizer = with_optimizer(nn.Linear(8, 4), torch.optim.SGD, lr=1e-3)
    with Monitor(model, optimizer, every=1) as monitor:
        for factor in (0.0, 1.0):
            unscaled_step(model(torch.randn(16, 8)).square().mean() * factor, optimizer)
    assert monitor.findings() == []
