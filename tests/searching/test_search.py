"""What must stay in fp32 is found, exactly, in few guarded runs, and nothing is changed by the search."""

from __future__ import annotations

import copy
import math
import random
import re
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import halfstep
from halfstep import Guard, HalfstepError, OpLists, SearchResult, amp
from halfstep.cli.app import app
from halfstep.formats.layers import recipe_of
from halfstep.formats.recipe import RECIPES, Recipe
from halfstep.searching.finder import Finder
from halfstep.searching.guard import Outcome, compared
from halfstep.searching.scores import Score
from tools import search_picture

from .planted import KINDS, Chain, Planted, planted, step

Batch = tuple[torch.Tensor, torch.Tensor]


def search(case: Planted, **options: Any) -> SearchResult:
    return halfstep.search(case.model, step, case.batches, **{"level": "O2", "progress": False} | options)


def check_found(kind: str, seed: int, count: int | None = None) -> None:
    case = planted(kind, seed, count)
    result = search(case)
    assert (result.status, set(result.keep)) == ("found", case.faults), str(result)
    k = len(case.faults)
    assert len(result.runs) <= 2 * math.log2(k) + k + 2 + 2, str(result)  # two more where an innocent unit ranks high


EXHAUSTIVE = pytest.mark.exhaustive


@pytest.mark.parametrize(("kind", "count"), [("lstm", 1), *(pytest.param(kind, 3, marks=EXHAUSTIVE) for kind in KINDS)])
def test_planted_faults_are_found(kind: str, count: int) -> None:
    check_found(kind, 7, count)


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", [1079, 1080, 2056], ids=["gradients overflow", "they overflow", "fresh batches fail"])
def test_a_unit_that_the_loss_of_the_batches_does_not_show_is_found(seed: int) -> None:
    check_found("lstm", seed)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("seed", "kind"), [*enumerate([*KINDS] * 3)])
def test_planted_faults_are_found_at_more_places(seed: int, kind: str) -> None:
    check_found(kind, seed)


@pytest.mark.parametrize(("kind", "level"), [("cnn", "O2"), ("transformer", "O2"), ("lstm", "O1")])
def test_in_healthy_models_nothing_must_stay(kind: str, level: str) -> None:
    result = search(planted(kind, 0, 0), dtype="bfloat16", level=level)
    assert (result.status, result.keep, len(result.runs)) == ("found", (), 2)
    assert "nothing must stay in fp32" in str(result)
    assert result.options == {"opt_level": level, "dtype": "bfloat16"}
    units = list(result.flops)
    assert sorted(row["unit"] for row in result.table()) == sorted(units)  # which would be next is known all the same
    assert all(row["forward"] + row["backward"] < math.inf for row in result.table())


@pytest.mark.exhaustive
def test_where_no_unit_is_guilty_alone_a_set_is_found() -> None:
    torch.manual_seed(0)
    chain = Chain(24)
    batches = [torch.randn(4, 4, 16) for _ in range(8)]

    def square(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch).square().mean()

    guard = Guard(tolerance=3e-3)
    result = halfstep.search(chain, square, batches, guard=guard, progress=False)
    assert result.status == "found"
    assert 1 < len(result.keep) < 24
    assert result.outcome is not None
    assert abs(result.outcome.difference) <= 3e-3


@pytest.mark.parametrize("level", ["O1", pytest.param("O2", marks=EXHAUSTIVE)])
def test_the_answer_goes_into_initialize(level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = planted("cnn", 2, 1) if level == "O2" else Planted(*_exploding(), faults={"1"})
    result = search(case, level=level)
    assert set(result.keep) == case.faults
    result.save(tmp_path / "search.json")
    loaded = SearchResult.load(tmp_path / "search.json")
    assert (loaded.keep, loaded.scores, loaded.runs) == (result.keep, result.scores, result.runs)
    monkeypatch.setitem(sys.modules, "halfstep.searching", None)  # a saved answer needs no search
    check_ways(case, loaded, tmp_path / "search.json")
    wide = {name for name, module in case.model.named_modules() if loaded.module_filter(module, name)}
    assert wide >= case.faults == {name for name in wide if name.rpartition(".")[0] not in wide}


def check_ways(case: Planted, result: SearchResult, file: Path) -> None:
    """Bring a model to an answer in every way: each has the loss of fp32, and without the answer none has."""
    plain = {"opt_level": result.level, "dtype": result.dtype}
    parts = {"module_filter": result.module_filter, "products": result.recipe}

    def initialized(**options: Any) -> float:
        return loss(lambda model: amp.initialize(model, verbosity=0, **options))

    def decorated(given: dict[str, Any], **scope: Any) -> float:
        return loss(lambda model: amp.decorate(model, **plain | given), lambda: amp.auto_cast(**plain | scope))

    def loss(make: Any, scope: Any = nullcontext) -> float:
        model = make(copy.deepcopy(case.model))
        with scope():
            found = step(model, case.batches[0]).item()
        amp.deactivate()
        return found

    ways = {
        "initialize(**options)": initialized(**result.options),
        "initialize(precision=file)": initialized(precision=file),
        "initialize(precision=options)": initialized(precision=result.options),
        "initialize(policy=)": initialized(policy=result.policy, **parts),
        "initialize(op_lists=)": initialized(op_lists=result.op_lists, **plain, **parts),
        "decorate, auto_cast(op_lists=)": decorated(parts, op_lists=result.op_lists),
    }
    if result.unit == "module":
        ways["decorate(**options)"] = decorated(result.options)
    else:
        ways["auto_cast(**options)"] = loss(lambda model: model, lambda: amp.auto_cast(**result.options))
        ways["auto_cast(op_lists=)"] = decorated({}, op_lists=result.op_lists)
    expected = loss(lambda model: model)
    for way, found in ways.items():
        assert found == pytest.approx(expected, rel=1e-3), way
    for found in (initialized(**plain), decorated({})):
        assert found != pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("given", [{"op_lists": OpLists.default(), "custom_black_list": ["exp"]}, {"op_lists": "O1"}])
def test_a_block_takes_op_lists_alone(given: dict[str, Any]) -> None:
    with pytest.raises(HalfstepError, match="op_lists"):
        amp.auto_cast(**given)


class Exploding(nn.Module):
    """Overflows in float16 at O1, too: products and sums of what a product gave stay in 16 bits there."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return ((y * 3e4 * 10 + 5e4) / 5e4 / 2).view(x.shape)  # an attribute, which is no op


def _exploding() -> tuple[nn.Module, list[Batch]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Exploding(), nn.Linear(8, 5))
    return model, [(torch.randn(16, 8), torch.randint(5, (16,))) for _ in range(16)]


@pytest.mark.exhaustive
def test_ops_are_found(tmp_path: Path) -> None:
    model, batches = _exploding()
    result = halfstep.search(model, step, batches, unit="op", progress=False)
    assert result.status == "found"
    assert set(result.keep) <= {"mul", "add", "div", "linear"}
    assert result.op_lists.black == result.keep
    result.save(tmp_path / "search.json")
    check_ways(Planted(model, batches, set()), result, tmp_path / "search.json")
    case = planted("cnn", 2, 0)
    assert search(case, unit="op", level="O1").keep == ()


class Gate(nn.Module):
    """Its gradient s (1 - s) loses half of its digits in float16, its result next to none."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), 8.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.weight).sigmoid()


@pytest.mark.parametrize(("unit", "name", "level"), [("module", "0", "O2"), ("op", "sigmoid", "O1")])
def test_a_backward_score_is_how_far_gradients_diverge(unit: str, name: str, level: str) -> None:
    torch.manual_seed(0)
    model, batches = nn.Sequential(Gate()), [torch.rand(6, 4) * 0.1 + 1.0 for _ in range(4)]
    options: dict[str, Any] = {"unit": unit, "level": level, "progress": False}
    found = halfstep.search(model, lambda model, batch: model(batch).sum(), batches, **options).scores[name]
    expected = 0.0
    for batch in batches[:2]:  # the half that is scored
        pair = []
        for dtype in (torch.float32, torch.float16):
            gate = Gate().to(dtype)
            product = batch.to(dtype) * gate.weight if unit == "module" else (batch * gate.weight).to(dtype)
            product.retain_grad()
            product.sigmoid().sum().backward()
            pair.append((product, product.grad) if unit == "op" else (gate.weight, gate.weight.grad))
        (operand, exact), (_, low) = pair
        expected += (1e-3 * operand.norm() * (low.float() - exact).norm()).item() ** 2
    assert found.backward == pytest.approx(expected, rel=1e-3)
    assert found.backward > 0.0


def language() -> tuple[nn.Module, Any, list[Batch]]:
    """A model of the next token that has trained, and whose linear layers lose much of it in NVFP4."""
    torch.manual_seed(0)
    parts = [nn.Embedding(64, 32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32), nn.LayerNorm(32), nn.Linear(32, 64)]
    model, following = nn.Sequential(*parts), torch.randperm(64)

    def batch() -> Batch:
        x = torch.randint(64, (64,))
        return x, torch.where(torch.rand(64) < 0.8, following[x], torch.randint(64, (64,)))

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        step(model, batch()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, step, [batch() for _ in range(16)]


@pytest.mark.exhaustive
def test_layers_that_must_not_have_formats_are_found() -> None:
    model, _, batches = language()
    options: dict[str, Any] = {"dtype": "bfloat16", "products": "nvfp4", "progress": False}
    result = halfstep.search(model, step, batches, **options)
    assert (result.status, set(result.keep)) == ("found", {"1", "3", "5"}), str(result)
    assert "3 linear layers must stay in bfloat16" in str(result)
    assert result.options == {"opt_level": "O1", "dtype": "bfloat16"}
    one = halfstep.search(model, step, batches, **options, keep=["1", "5"], guard=Guard(tolerance=0.1))
    assert (one.keep, one.recipe, len(one.runs)) == (("1", "5"), {"3": "nvfp4"}, 2)
    chosen = halfstep.search(model, step, batches, **options | {"products": {"3": "mxfp8"}}, guard=Guard(tolerance=0.1))
    assert (chosen.keep, chosen.recipe) == ((), {"3": "mxfp8"})


@pytest.mark.exhaustive
def test_products_that_must_not_have_formats_are_found(tmp_path: Path) -> None:
    named = [f"{__name__}:language", "--dtype=bfloat16", "--products=nvfp4", "--passes"]
    files = [f"--save={tmp_path / 'search.json'}", f"--report={tmp_path / 'page.html'}"]
    said = CliRunner().invoke(app, ["search", *named, *files])
    assert "products must stay in bfloat16" in said.output
    assert "--products=nvfp4 --passes" in (tmp_path / "page.html").read_text()
    result = SearchResult.load(tmp_path / "search.json")
    assert {"1.forward", "3.forward", "5.forward"} <= set(result.keep)
    assert len(result.keep) < 6
    ranks = list(result.scores)
    assert ranks[0] == "5.forward"  # the head
    assert all(name.endswith("forward") for name in ranks[:3])  # and forward before backward
    for name, recipe in result.recipe.items():
        for which in ("forward", "input_gradient", "weight_gradient"):
            wide = f"{name}.{which}" in result.keep
            assert getattr(Recipe.parse(recipe), which) == ((None, None) if wide else getattr(RECIPES["nvfp4"], which))
    model, _, batches = language()
    expected = step(model, batches[0])
    brought = amp.initialize(model, verbosity=0, precision=tmp_path / "search.json")
    assert step(brought, batches[0]).item() == pytest.approx(expected.item(), rel=2e-3)
    assert [str(recipe_of(model[place])) for place in (1, 3, 5)] == [
        str(Recipe.parse(result.recipe[name])) for name in ("1", "3", "5")
    ]
    amp.deactivate()


def test_what_is_kept_is_not_searched() -> None:
    case = planted("cnn", 2, 1)
    (fault,) = case.faults
    result = search(case, keep=[fault])
    assert (result.keep, len(result.runs)) == ((fault,), 2)


def test_a_budget_ends_a_search() -> None:
    result = search(planted("transformer", 0, 4), budget=2)
    assert (result.status, len(result.runs)) == ("cannot", 2)
    assert "budget of 2 guarded runs" in str(result)


def of_five(losses: Any, early: set[str]) -> Finder:
    """A search over units of which the first have the highest scores."""
    trials: Any = SimpleNamespace(losses=losses, setting=SimpleNamespace(products=None))
    scores = {name: Score(5.0 - i, 0.0) for i, name in enumerate("abcde")}
    given: Any = Guard(), ([0, 0], [0, 0]), [*"abcde"], [], lambda: scores, early, None, None, lambda *_: None
    return Finder(trials, *given)


def test_what_is_not_needed_is_left_out_and_what_comes_early_is_tried_first() -> None:
    def losses(batches: list[Any], runs: int, wide: Any = "bd") -> list[list[float]]:
        return [[1.0 if {"b", "d"} <= {*wide} else 2.0] * 2] * runs

    search = of_five(losses, {"e"})
    assert search.find() == ["b", "d"]
    assert "".join(search.scores) == "eabcd"


def test_random_numbers_with_which_fp32_overflows_are_refused() -> None:
    with pytest.raises(HalfstepError, match="not finite in fp32"):
        of_five(lambda *_: [[1.0, 1.0], [math.inf, math.inf]], set()).find()


@pytest.mark.parametrize(("freedom", "quantile"), [(1, 12.706), (2, 4.303), (15, 2.13145), (31, 2.03951)])
def test_the_interval_of_a_guard_is_one_of_students_t(freedom: int, quantile: float) -> None:
    count = freedom + 1  # of differences, one of which is 1: the standard error of their mean is 1 / count
    spread = compared([1.0, *[0.0] * freedom], [0.0] * count, 0.0).spread
    assert spread * count == pytest.approx(quantile, rel=2e-5)


@pytest.mark.exhaustive
def test_random_numbers_are_paired() -> None:
    case = planted("cnn", 1, 0)
    noisy = nn.Sequential(nn.Dropout(0.2), case.model)
    result = halfstep.search(noisy, step, case.batches, dtype="bfloat16", level="O2", progress=False)
    assert result.keep == ()
    outcome = result.runs[0][1]
    assert abs(outcome.difference) + outcome.spread < result.tolerance / 3


def state_of(model: nn.Module) -> dict[str, Any]:
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    return {
        "state": {name: value.clone() for name, value in model.state_dict().items()},
        "more": [hooks, model.training, grads, [id(p) for p in model.parameters()]],
        "random": [torch.get_rng_state(), torch.tensor(random.getstate()[1])],
    }


@pytest.mark.parametrize("ending", [pytest.param("well", marks=EXHAUSTIVE), "an error", "Ctrl-C"])
def test_nothing_changes(ending: str) -> None:
    case = planted("cnn", 2, 1)
    for p in case.model.parameters():
        p.grad = torch.ones_like(p)
    before, calls = state_of(case.model), 0

    def counted(model: nn.Module, batch: Batch) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 40 and ending != "well":
            raise KeyboardInterrupt if ending == "Ctrl-C" else ValueError("of the user")
        return step(model, batch)

    run = lambda: halfstep.search(case.model, counted, case.batches, level="O2", progress=False)  # noqa: E731
    if ending == "an error":
        with pytest.raises(ValueError, match="of the user"):
            run()
    else:
        assert run().status == ("interrupted" if ending == "Ctrl-C" else "found")
    torch.testing.assert_close(state_of(case.model), before, rtol=0, atol=0)


@pytest.mark.exhaustive
def test_a_checkpoint_goes_on(tmp_path: Path) -> None:
    case, file = planted("lstm", 1, 3), tmp_path / "known.json"
    whole = search(case)
    cut = search(case, checkpoint=file, budget=4)
    assert cut.status == "cannot"
    said: list[str] = []
    rest = search(case, checkpoint=file, progress=lambda stage, runs, known: said.append(stage))
    assert (rest.keep, rest.runs) == (whole.keep, whole.runs)
    assert len(said) == 1 + len(whole.runs) - 4  # fp32, and the runs that were not known
    with pytest.raises(halfstep.HalfstepError, match="of another search"):
        search(case, checkpoint=file, dtype="bfloat16")
    file.write_text("{}")
    with pytest.raises(halfstep.HalfstepError, match="no checkpoint of a search"):
        search(case, checkpoint=file)


@pytest.mark.exhaustive
def test_a_page_and_a_table(tmp_path: Path) -> None:
    case = planted("cnn", 3)
    result = search(case)
    result.report(tmp_path / "search.html", "halfstep search a:b")
    page = (tmp_path / "search.html").read_text()
    assert all(text in page for text in ("What must stay in fp32", "Guarded runs", "halfstep search a:b", "Scores"))
    assert all(f'title="{unit}"' in page for unit in result.scores)  # each bar has the name of its unit
    rows = result.table()
    assert {row["unit"] for row in rows if row["fp32"]} == case.faults
    (share, loss), *more = SearchResult(
        *("found", (), "O2", "float16", "module"),
        flops={"a": 1, "b": 1, "c": 2},
        runs=[
            (tuple(wide), Outcome(True, 1.0 + d, 1.0, d, 0.0))
            for wide, d in (((), 0.4), ("a", 0.1), ("b", -0.3), ("c", 0.2))
        ]
        + [(("a", "b"), Outcome(True, 1.01, 1.0, 0.01, 0.0)), (("a",), Outcome(True, 2.1, 2.0, 0.0, 0.0))],
    ).frontier()
    assert (share, loss, more) == (0.5, 1.01, [(0.75, 1.1), (1.0, 1.4)])


def test_the_picture_of_the_page_is_of_its_saved_result() -> None:
    saved = SearchResult.load(search_picture.IMAGES / "search.json")
    assert (search_picture.IMAGES / "search.svg").read_text() == search_picture.draw(saved)
    assert saved.keep == ("middle.1",)


def not_finite(model: nn.Module, batch: Batch) -> torch.Tensor:
    return step(model, batch) * math.nan


def with_backward(model: nn.Module, batch: Batch) -> torch.Tensor:
    step(model, batch).backward()
    return step(model, batch)


def flat(model: nn.Module, batch: Batch) -> torch.Tensor:
    return model(batch[0]).mean()


def without_gradient(model: nn.Module, batch: Batch) -> torch.Tensor:
    return step(model, batch) + (next(model.parameters()).sum() * 0.0).sqrt()


OTHER, BAD = nn.Linear(4, 5), nn.Conv2d(5, 5, 1)
BAD.weight.data.fill_(math.nan)
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no batches": ({"batches": []}, "0 batches"),
    "one batch": ({"batches": iter([1])}, "1 batches"),
    "a tensor of batches": ({"batches": torch.zeros(3)}, "list of batches"),
    "no scalar": ({"step": lambda model, batch: model(batch[0])}, r"shape \(16, 5\)"),
    "no loss": ({"step": lambda model, batch: None}, "'NoneType'"),
    "a backward pass": ({"step": with_backward}, "ran a backward pass"),
    "another model": ({"step": lambda model, batch: OTHER(torch.ones(4)).sum()}, "did not call the model"),
    "no gradient": ({"step": lambda model, batch: step(model, batch).detach()}, "no gradient"),
    "NaN in fp32": ({"step": not_finite}, "not finite in fp32.*step computes it"),
    "NaN in a gradient": ({"step": without_gradient}, "a gradient, is not finite in fp32"),
    "NaN in a module": ({"model": nn.Sequential(nn.Conv2d(8, 5, 1), BAD), "step": flat}, "1 is the first module"),
    "a progress": ({"progress": 3}, "progress=3"),
    "keep of no unit": ({"keep": ["nope"]}, "'nope' is no unit"),
    "no parameters": ({"model": nn.Sequential(nn.ReLU())}, "no parameters"),
    "16 bits": ({"model": nn.Linear(2, 2).half()}, "in 16 bits already"),
    "no model": ({"model": 3}, "torch.nn.Module"),
    "no step": ({"step": 3}, "function of"),
    "a level": ({"level": "O3"}, "O1"),
    "a unit": ({"unit": "layer"}, "module"),
    "ops at O2": ({"unit": "op"}, "only O1"),
    "a dtype": ({"dtype": "float8"}, "float8"),
    "a recipe that fits no layer": ({"products": "nvfp4"}, "No linear layer"),
    "ops of a recipe": ({"products": "nvfp4", "unit": "op", "level": "O1"}, "leave one"),
    "passes without a recipe": ({"passes": True}, "give products="),
    "passes in float16": ({"products": "fp8_rowwise", "passes": True}, "dtype='bfloat16'"),
    "a guard": ({"guard": 0.1}, "halfstep.Guard"),
    "keep as a name": ({"keep": "0"}, "keep="),
    "score batches": ({"score_batches": 0}, "score_batches=0 must"),
    "a budget": ({"budget": 0}, "budget"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_uses_are_refused(case: str) -> None:
    given, message = WRONG[case]
    good = planted("cnn", 0, 0, batches=4)
    options = {"model": good.model, "step": step, "batches": good.batches, "level": "O2", "progress": False} | given
    with pytest.raises(HalfstepError, match=message):
        halfstep.search(options.pop("model"), options.pop("step"), options.pop("batches"), **options)


@pytest.mark.exhaustive
def test_a_guard_with_a_metric() -> None:
    case = planted("cnn", 2, 1)

    def error(model: nn.Module, batch: Batch) -> float:
        return float((model(batch[0]).argmax(-1) != batch[1]).float().mean())

    result = search(case, guard=Guard(metric=error, tolerance=0.05))
    assert set(result.keep) <= case.faults
    for wrong in ({"metric": 3}, {"tolerance": -1.0}, {"runs": 0}):
        with pytest.raises(HalfstepError):
            Guard(**wrong)


@pytest.mark.parametrize("terminal", [False, pytest.param(True, marks=EXHAUSTIVE)], ids=["module", "file, terminal"])
def test_the_command_prints_the_answer(terminal: bool, tmp_path: Path) -> None:
    name = f"{__name__}:healthy"
    if terminal:
        file = tmp_path / "case.py"
        file.write_text(f"from {__name__} import healthy\n")
        name = f"{file}:healthy"
    files = [f"--report={tmp_path / 'a.html'}", f"--save={tmp_path / 'a.json'}"]
    env = {"FORCE_COLOR": "1"} if terminal else {}  # for rich, a terminal
    result = CliRunner().invoke(app, ["search", name, "--dtype=bfloat16", "--level=O2", *files], env=env)
    assert result.exit_code == 0, result.output
    assert "nothing must stay in fp32" in result.output
    assert ("search: fp32, 0 guarded runs, 14 units\n" in result.output) == (not terminal)
    assert re.search(r"search: confirm, 1 guarded runs, 0 of 14 in fp32; 0 are enough", result.output)
    assert SearchResult.load(tmp_path / "a.json").keep == ()
    assert (tmp_path / "a.html").exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such:f", "no file or module"),
        (f"{__name__}:Batch3", "no name 'Batch3'"),
        (f"{__name__}:nothing", "must return"),
        (f"{__name__}:empty", "0 batches"),
    ],
)
def test_the_command_refuses_with_one_error(name: str, message: str) -> None:
    result = CliRunner().invoke(app, ["search", name])
    assert result.exit_code in (1, 2)
    assert result.output.count("Error:") == 1
    assert message in result.output


def healthy() -> tuple[nn.Module, Any, list[Batch]]:
    case = planted("cnn", 0, 0)
    return case.model, step, case.batches


def empty() -> tuple[nn.Module, Any, list[Batch]]:
    return planted("cnn", 0, 0).model, step, []


def nothing() -> None:
    pass
