"""The report of a run's rows: what its pictures show, and that it can be read everywhere."""

from __future__ import annotations

import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

from halfstep.core.errors import ArgumentValueError
from halfstep.diagnostics.numerics.overview import tensors_of
from halfstep.numerics import Row, write_report


def exponents_of(values: torch.Tensor) -> dict[int, int]:
    """How many magnitudes have an exponent, by ``frexp``."""
    found = torch.frexp(values[values != 0].double()).exponent - 1
    return {int(at): int(count) for at, count in zip(*found.unique(return_counts=True), strict=True)}


def row(step: int, module: str, tensor: str, values: torch.Tensor, dtype: str = "float32", **given: object) -> Row:
    facts = {"amax": float(values.abs().max()), "zeros": float((values == 0).float().mean()), "numel": values.numel()}
    return Row(step, module, tensor, dtype=dtype, exponents=exponents_of(values), **{**facts, **given})  # type: ignore[arg-type]


class Reader(HTMLParser):
    """What a page has in it; fails where an element is not closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    def all(self, **wanted: str) -> list[tuple[str, dict[str, str | None]]]:
        return [
            (tag, given) for tag, given in self.found if all(given.get(name) == value for name, value in wanted.items())
        ]


def run(name: str = "layer") -> list[Row]:
    """Three steps of an fp16 run, of which the last one overflows."""
    torch.manual_seed(0)
    rows = []
    for step in (0, 100, 200):
        output = torch.randn(1000) * 2.0 ** (step / 20)
        grad = torch.randn(1000) * 2.0**-35
        rows += [
            row(step, name, "output", output, "float16", amax=math.inf if step == 200 else float(output.abs().max())),
            row(step, name, "output_grad", grad, "float16", scale=2.0**16),
            row(step, f"{name}.weight", "grad", grad, "float16", scale=2.0**16),
            row(step, f"{name}.weight", "weight", torch.randn(1000), "bfloat16"),
            row(step, f"{name}.weight", "update", 2.0**-9 * (torch.arange(1000) < 400), "bfloat16"),
        ]
    return rows


@pytest.fixture
def page(tmp_path: Path) -> str:
    write_report(run(), tmp_path / "deep" / "report.html", title="train.py")
    return (tmp_path / "deep" / "report.html").read_text(encoding="utf-8")


def test_every_picture_has_a_name_a_description_and_a_table(page: str) -> None:
    reader = Reader(page)
    images = reader.all(role="img")
    assert len(images) == 5  # four kinds of tensors, headroom
    labels = [given["aria-label"] for tag, given in images if tag == "div"]
    assert all(label and "numbers" in label.lower() for label in labels)
    assert page.count("<title>Headroom over time</title><desc>") == 1
    assert len([tag for tag, _ in reader.found if tag == "details"]) == 5
    assert len([tag for tag, _ in reader.found if tag == "table"]) == 5


def test_nothing_is_loaded_and_the_page_is_light_or_dark(page: str) -> None:
    reader = Reader(page)
    assert not any({"src", "href"} & given.keys() for _, given in reader.found)
    assert "url(" not in page
    assert "<script" not in page
    assert "prefers-color-scheme: dark" in page
    assert reader.all(name="viewport")


def test_what_stands_out_is_said_first(page: str) -> None:
    said = re.findall(r"<li>(.*?)</li>", page[: page.index("Outputs: the distribution")])
    assert said[0].startswith("HS116 error at layer: at step 200 the output of layer holds inf or NaN; it is the first")
    assert "Fix: keep the module in float32" in said[0]
    assert said[-1] == "60 % of the weights of layer.weight, in bfloat16, are the same after an update as before."


def test_a_healthy_run_is_said_to_be_one(tmp_path: Path) -> None:
    rows = [row(0, "layer", "output", torch.randn(1000), "float16"), row(1, "layer", "output", torch.randn(1000))]
    write_report(rows, tmp_path / "report.html")
    assert "No findings: no overflow" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_names_are_escaped(tmp_path: Path) -> None:
    name = '<script>alert("&")</script>'
    write_report(run(name), tmp_path / "report.html", title=name)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "<script" not in page
    assert name in "".join(Reader(page).text)


def test_the_range_of_the_dtype_is_moved_by_the_loss_scale(page: str) -> None:
    """At 2**16, what float16 holds reaches from 2**-40 to 1, and without the scale from 2**-24."""
    figure = page[page.index("Gradients of outputs: the distribution") :]
    figure = figure[: figure.index("</figure>")]
    ticks = [(float(x), text) for x, text in re.findall(r'<text x="([\d.]+)%"[^>]*>(.*?)</text>', figure)]
    superscripts = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")
    known = [(x, float(text[1:].translate(superscripts))) for x, text in ticks]
    per_doubling = (known[-1][0] - known[0][0]) / (known[-1][1] - known[0][1])

    def exponent(percent: float) -> float:
        return known[0][1] + (percent - known[0][0]) / per_doubling

    start, width = map(float, re.search(r'<rect x="([\d.]+)%"[^>]*band subnormal" width="([\d.]+)%"', figure).groups())  # type: ignore[union-attr]
    edge = float(re.search(r'<line x1="([\d.]+)%"[^>]*class="edge"', figure)[1])  # type: ignore[index]
    assert exponent(start) == pytest.approx(-40, abs=0.05)
    assert exponent(start + width) == pytest.approx(-30, abs=0.05)
    assert exponent(edge) == pytest.approx(-24, abs=0.05)


def test_a_tensor_has_the_worst_of_its_steps() -> None:
    (tensor, second) = tensors_of(
        [
            row(5, "layer", "output", torch.tensor([1.0, 4.0]), "float16"),
            row(0, "layer", "output", torch.tensor([1024.0, 0.0]), "float16"),
            row(0, "layer", "output", torch.tensor([1.0]), "float16", call=1),
        ]
    )
    assert [each.step for each in tensor.rows] == [0, 5]
    assert tensor.headroom == pytest.approx(math.log2(65504 / 1024))
    assert tensor.exponents == {0: 1, 2: 1, 10: 1}
    assert tensor.mean(lambda each: each.zeros) == 0.25
    assert second.name == "layer #1"


def test_more_tensors_than_fit_are_said_to_be_left_out(tmp_path: Path) -> None:
    rows = [row(0, f"layer{i}", "output", torch.full((4,), 2.0**i), "bfloat16") for i in range(60)]
    write_report(rows, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "These are the 48 of 60 with the least headroom." in page
    assert page.count('class="strip"') == 48
    assert "Values of 60 tensors" in page


def test_rows_without_histograms_still_have_headroom(tmp_path: Path) -> None:
    rows = [Row(step, "layer", "output", dtype="float16", numel=4, amax=2.0**step) for step in range(3)]
    write_report(rows, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "Headroom over time" in page
    assert "the distribution of exponents" not in page


def test_no_rows_make_no_report(tmp_path: Path) -> None:
    with pytest.raises(ArgumentValueError, match="There are no rows to report on"):
        write_report([], tmp_path / "report.html")
    assert not list(tmp_path.iterdir())
