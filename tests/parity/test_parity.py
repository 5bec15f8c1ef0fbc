"""The first op at which two sides round differently, and why, for differences that were injected."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from click.testing import CliRunner
from torch import nn
from torch.nn import functional as F

from halfstep import HalfstepError
from halfstep.cli.app import app
from halfstep.numerics import parity
from halfstep.parity.result import KINDS, Parity

from .injected import MODELS, Case, cases


def is_right(case: Case) -> bool:
    first = parity(case.plain, case.other, case.inputs).first
    return first is not None and (first.module, first.kind) == (case.place, case.kind)


@pytest.mark.parametrize("count", [5, pytest.param(60, marks=pytest.mark.exhaustive)])
def test_the_first_op_and_kind_of_injected_differences(count: int) -> None:
    wrong = [case.name for case in cases(count) if not is_right(case)]
    assert len(wrong) <= count // 20, wrong


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_equal_sides_have_no_difference(name: str, dtype: torch.dtype) -> None:
    make, shape = MODELS[name]
    model = make().to(dtype)
    found = parity(model, copy.deepcopy(model), torch.randn(shape).to(dtype))
    assert found
    assert found.first is None
    assert found.ops
    assert not any(op.ulps for op in found.ops)
    assert str(found).endswith("equal bit for bit")


def test_another_way_to_the_same_bits_is_no_difference() -> None:
    x = torch.randn(4, 8)
    assert parity(lambda x: (x * 2).relu(), lambda x: (x + x).clone().relu() + 0 * (x.exp().sum() > 0), x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("places", [[0], [1], [299_999], [1, 70_001]])
def test_one_bit_in_a_large_tensor_is_a_difference(places: list[int], dtype: torch.dtype) -> None:
    x = torch.randn(300_000, generator=torch.Generator().manual_seed(0)).to(dtype)
    ones = torch.ones_like(x)
    ones[places] += torch.finfo(dtype).eps
    first = parity(lambda x: x * 1.0, lambda x: x * ones, x).first
    assert first is not None
    assert round(first.share * len(x)) == len(places)
    assert parity(lambda x: x * 1.0, lambda x: x * 1.0 + 0.0, x)


def test_integers_that_are_one_number_in_float32_differ() -> None:
    assert not parity(lambda i: i + 2**24, lambda i: i + 2**24 + (i == 3), torch.arange(8))


@dataclass
class Out:
    logits: torch.Tensor


@pytest.mark.parametrize(
    ("a", "b", "x", "kind"),
    [
        (lambda x: x * 1e300, lambda x: x * 2e300, torch.ones(3).double(), "arguments"),
        (lambda i: i, lambda i: i + 1, torch.tensor([2**60]), "fused"),
        (lambda i: i, lambda i: i.flip(0), torch.tensor([2**53, 2**53 + 1]), "order"),
        (lambda x: x > 0, lambda x: x < 0, torch.tensor([1.0]), "fused"),
        (lambda x: x.argmax(-1), lambda x: (-x).argmax(-1), torch.arange(3.0), "fused"),
        (lambda x: (x.sum(), Out(x * 2)), lambda x: (x.sum(), Out(x * 3)), torch.ones(3), "arguments"),
        (lambda x: F.dropout(x, 0.5), lambda x: F.dropout(x, 0.3), torch.ones(64), "arguments"),
    ],
    ids=["float64", "int64", "neighbors", "bool", "argmax", "dataclass", "dropout"],
)
def test_numbers_of_all_dtypes(a: Any, b: Any, x: torch.Tensor, kind: str) -> None:
    first = parity(a, b, x).first
    assert first is not None
    assert first.kind == kind or (kind == "order" and first.kind in ("kernel", "fused"))
    assert first.ulps


def test_what_a_side_is_given_and_draws_is_the_same_for_both() -> None:
    batch = SimpleNamespace(x=torch.ones(3))
    assert parity(lambda b: b.x.mul_(2), lambda b: b.x * 2, batch)
    assert torch.equal(batch.x, torch.ones(3))
    assert parity(*[lambda x: x + float(numpy.random.rand())] * 2, X)
    assert parity(lambda x: torch.vmap(lambda row: row.sum() * 2)(x), lambda x: x.sum(-1) * 2, X)
    assert parity(*[lambda x: torch.fft.fft(x).conj()] * 2, X)
    with pytest.raises(HalfstepError, match=r"Output 0 is torch\.sparse_coo"):
        parity(*[torch.Tensor.to_sparse] * 2, X)


def test_a_record_is_of_its_time() -> None:
    model = mlp().eval()
    before = parity.record(model, X)
    with torch.no_grad():
        model[4].weight.mul_(1.5)
    first = parity(before, model, X).first
    assert first is not None
    assert (first.kind, bool(first.ulps)) == ("inputs", True)


def test_code_that_is_compiled_inside_of_a_side_is_compared() -> None:
    inner = torch.compile(lambda x: x * 2, backend=lambda run, inputs: lambda x: [each + 1e-3 for each in run(x)])
    first = parity(lambda x: x * 2, lambda x: inner(x), X.abs() + 1).first
    assert first is not None
    assert (first.module, first.kind) == ("(output)", "kernel")
    assert 0 < first.ulps < 1e6


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 4))


X = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))


def test_what_is_said_of_a_difference() -> None:
    """One more rounding: by how much, in which module, on which side, and which side is nearer to float64."""

    def plain(x: torch.Tensor) -> torch.Tensor:
        return (x @ x.T).tanh().sum(-1)

    def rounded(x: torch.Tensor) -> torch.Tensor:
        return (x @ x.T).bfloat16().float().tanh().sum(-1)

    found = parity(plain, rounded, X)
    first = found.first
    assert first is not None
    assert (first.module, first.op, first.kind, first.more, first.nearer) == (
        "(step)",
        "cast",
        "rounding",
        "rounded",
        "plain",
    )
    assert (first.a, first.b) == ((), ("_to_copy:bfloat16", "_to_copy:float32"))
    assert 2**14 < first.ulps <= 2**16
    assert not first.inputs_differed
    assert "first difference: (step): cast, rounding" in str(found)
    assert "ulps  inputs" in str(found), "numbers end below the end of their header"
    assert parity(plain, rounded, X, reference=None).first == replace(first, nearer="")


def test_other_weights_are_inputs_that_differ() -> None:
    other = mlp()
    with torch.no_grad():
        other[4].bias[1] += 1e-3
    other[0].register_parameter("unused", nn.Parameter(torch.ones(1)))  # rows of one side only
    first = parity(mlp().eval(), other.eval(), X).first
    assert first is not None
    assert (first.module, first.op, first.kind, first.inputs_differed) == ("4", "bias", "inputs", True)
    assert first.nearer == ""


@pytest.mark.parametrize(
    ("a", "b", "kind"),
    [
        (lambda x: F.gelu(x), lambda x: F.gelu(x, approximate="tanh"), "arguments"),
        (lambda x: F.layer_norm(x, (16,)), lambda x: F.layer_norm(x, (16,), eps=1e-3), "eps"),
        (
            lambda x: x / x.square().sum(-1, True).add_(1e-3).sqrt_(),
            lambda x: x / (x.norm(dim=-1, keepdim=True) + 1e-3),
            "eps",
        ),
        (  # what is added below the root is lost in rounding
            lambda x: x / (x.square().sum(-1, True) * 1e4 + 1e-3).sqrt(),
            lambda x: x / ((x.square().sum(-1, True) * 1e4).sqrt() + 1e-3),
            "eps",
        ),
        (lambda x: x.bfloat16().sum(-1), lambda x: x.bfloat16().float().cumsum(-1)[:, -1], "cast"),
        (lambda x: torch.addcdiv(x, x, x.exp(), value=0.3), lambda x: x + 0.3 * (x / x.exp()), "fused"),
        (lambda x: x.sum(), lambda x: x.flip(0).sum(), "order"),
    ],
)
def test_kinds_of_functions(a: Callable[..., Any], b: Callable[..., Any], kind: str) -> None:
    first = parity(a, b, 3 * X).first
    assert first is not None
    assert first.kind == kind or (kind == "cast" and first.kind in ("fused", "accumulation"))
    if kind == "order":  # ulps of the sums, not of numbers that were moved
        assert first.op == "sum"
        assert first.ulps < 1e3


def test_ulps_of_complex_numbers_are_ulps_of_their_parts() -> None:
    first = parity(torch.fft.fft, lambda x: torch.fft.fft(x.double()).to(torch.complex64), X).first
    assert first is not None
    assert 0 < first.ulps < 1e5


def test_everything_is_as_before() -> None:
    model, other = mlp(), mlp()
    model(X).sum().backward()
    before, state = copy.deepcopy(model), torch.get_rng_state()
    x, grads = X.clone(), [p.grad.clone() for p in model.parameters() if p.grad is not None]

    def step(x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(x.mul_(2)).sum()
        loss.backward()
        with torch.no_grad():
            model[0].weight.add_(1)
        return loss

    assert parity(step, step, x)
    assert parity(model, other, x)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(x, X)
    for a, b in zip(model.state_dict().values(), before.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    for p, grad in zip(model.parameters(), grads, strict=True):
        assert p.grad is not None
        assert torch.equal(p.grad, grad)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_a_function_of_a_model_aligns_with_the_model() -> None:
    model = mlp().eval()
    found = parity(model, lambda x: model(x), X)
    assert found
    assert [op.module for op in found.ops] == ["0", "1", "2", "4"]


def test_runs_of_other_processes(tmp_path: Path) -> None:
    case = next(iter(cases(1)))
    parity.record(case.plain, case.inputs, name="trainer").save(tmp_path / "a.pt")
    parity.record(case.other, case.inputs, name="sampler").save(tmp_path / "b.pt")
    found = parity(tmp_path / "a.pt", str(tmp_path / "b.pt"))
    assert found.first is not None
    assert (found.names, found.first.module, found.first.kind) == (("trainer", "sampler"), case.place, case.kind)
    assert parity(tmp_path / "a.pt", case.plain, case.inputs)
    found.report(tmp_path / "parity.html")
    assert KINDS[case.kind] in (tmp_path / "parity.html").read_text()


def test_a_row_in_a_batch() -> None:
    def last(x: torch.Tensor) -> torch.Tensor:
        x = x.relu()
        return x @ x.new_ones(16, 4) if len(x) == 1 else (x.double() @ x.new_ones(16, 4).double()).float()

    found: Parity = parity.batch_invariance(last, X.exp())
    assert found.first is not None
    assert (found.first.kind, found.names) == ("accumulation", ("row 0 alone", "row 0 of 8"))
    assert [(op.op, bool(op.ulps)) for op in found.ops] == [("relu", False), ("matmul", True)]
    assert parity.batch_invariance(nn.Sequential(nn.ReLU(), nn.LayerNorm(16)), X)
    for inputs, rows in ((X[:1], 1), (3.0, 0)):
        with pytest.raises(HalfstepError, match=f"{rows} rows: give a batch of 2"):
            parity.batch_invariance(mlp(), inputs)


def test_a_row_with_its_padding_and_without() -> None:
    mask = torch.arange(8)[:, None] < torch.tensor([5, 8, 2])[:, None, None]
    x, alone = torch.randn(3, 8, 16), mask[:1, :5]
    invariance = parity.batch_invariance
    assert invariance(lambda x, mask: (x.tanh() * mask).cumsum(1), (x, mask), alone=(x[:1, :5], alone))
    first = invariance(lambda x, mask: (x.tanh() * mask).mean(1), (x, mask), alone=(x[:1, :5], alone)).first
    assert first is not None
    assert (first.op, first.inputs_differed) == ("mean", False)


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler imports what it deprecates
def test_compiled_code() -> None:
    torch.compiler.reset()  # after many models of a class torch compiles no more, and runs them eagerly
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 8), nn.Softmax(-1)).bfloat16()
    # Code with wider vectors than torch's own kernels has an erf and exp with other last digits.
    options: dict[str, Any] = {"cpp.simdlen": 512 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 256}
    first = parity(model, torch.compile(model, options=options), X.bfloat16()).first
    assert first is not None
    assert (first.module, first.kind, first.more) == ("1", "rounding", "Sequential")
    assert "100%" in first.note
    unchanged = torch.compile(model, backend="eager")
    assert parity(model, unchanged, X.bfloat16())
    first = parity(torch.compile(model, options=options), unchanged, X.bfloat16()).first
    assert first is not None
    assert (first.kind, first.more) == ("rounding", "Sequential (compiled) (b)")

    def refuses(x: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros(8, 8, dtype=x.dtype)
        return F.scaled_dot_product_attention(x.exp(), x.sin(), x.cos(), attn_mask=mask).exp().sin()

    first = parity(refuses, torch.compile(refuses, options=options), X.bfloat16()[None, None]).first
    assert first is not None
    assert (first.module, first.kind) == ("(output)", "rounding")
    assert "roundings that Inductor leaves out explain 100%" in first.note


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("step", "compiled", "kind"),
    [
        (lambda x: (100 * x.exp().sin()).long(), lambda run: lambda x: run(x.float()), "rounding"),
        (lambda x: x * 0, lambda run: lambda x: [-each for each in run(x)], "kernel"),
    ],
    ids=["integers", "signed zeros"],
)
def test_what_compiled_code_computes_otherwise(step: Any, compiled: Any, kind: str) -> None:
    first = parity(step, torch.compile(step, backend=lambda run, inputs: compiled(run)), X.abs().bfloat16()).first
    assert first is not None
    assert first.kind == kind


@pytest.mark.parametrize(
    ("a", "b", "text"),
    [
        (mlp(), 3, "3 must be a callable"),
        (mlp(), lambda x: None, "<lambda> returns NoneType without a tensor"),
        (mlp(), lambda x: x.no_such_name, "<lambda> raised AttributeError.*Call it with these inputs by itself"),
        (mlp(), lambda x: (x, x), "The outputs differ in structure: Sequential returns .*<lambda>"),
        (mlp(), nn.ModuleDict({"a": nn.Linear(16, 4)})["a"], None),
        (
            nn.Sequential(nn.Linear(16, 4)),
            type("M", (nn.Module,), {"forward": lambda s, x: s.z(x)})(),
            "No module has the same",
        ),
        (mlp(), "text.pt", "text.pt has no run .halfstep parity 4.; parity.record"),
        (mlp(), "no.pt", "no.pt has no run"),
        (mlp(), "old.pt", "old.pt has no run .halfstep parity 4"),
    ],
)
def test_what_is_refused(a: Any, b: Any, text: str | None, tmp_path: Path) -> None:
    if isinstance(b, nn.Module) and not isinstance(b, nn.Linear):
        b.add_module("z", nn.Linear(16, 4))
    if isinstance(b, str):
        (tmp_path / "text.pt").write_text("no")
        torch.save(("halfstep parity 2", "model", [], {}, []), tmp_path / "old.pt")
        b = tmp_path / b
    if text is None:
        assert not parity(a, b, X)
        return
    with pytest.raises(HalfstepError, match=text):
        parity(a, b, X)


def test_the_reference_is_float64() -> None:
    with pytest.raises(HalfstepError, match="reference='float32' must be"):
        parity(mlp(), mlp(), X, reference="float32")


def test_the_command(tmp_path: Path) -> None:
    text = "import torch\ninputs = torch.ones(2, 3) / 3\ndef f(x):\n    return (x{}).exp()\n"
    (tmp_path / "a.py").write_text(text.format(""))
    (tmp_path / "b.py").write_text(text.format(".bfloat16().float()"))
    a, b, html = f"{tmp_path}/a.py:f", f"{tmp_path}/b.py:f", tmp_path / "c.html"
    assert CliRunner().invoke(app, ["parity", a, a]).exit_code == 0
    found = CliRunner().invoke(app, ["parity", a, b, "--html", str(html)])
    assert found.exit_code == 1
    assert "(step): cast, rounding" in found.output
    assert "halfstep parity" in html.read_text()
    assert "no file" in CliRunner().invoke(app, ["parity", a, f"{tmp_path}/no.py:f"]).output
