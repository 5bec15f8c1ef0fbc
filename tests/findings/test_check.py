"""What ``check`` returns, refuses, leaves as it is, and reads."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import halfstep
from halfstep import Finding, amp, optimizers
from halfstep.diagnostics.findings.finding import grouped, share
from tests.support.worlds import HALVES, scaled_step, with_optimizer


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.5))
        self.head = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


OPTIMIZERS = [getattr(torch.optim, name) for name in ["SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "NAdam"]]
OPTIMIZERS += [getattr(optimizers, f"Fused{name}") for name in ["SGD", "Adam", "Adagrad", "LAMB", "NovoGrad"]]
RECIPES = ["plain", "autocast", "auto_cast", "O1", "O2", "decorate"]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_right_recipes_are_healthy(
    recipe: str, kind: Any, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer = with_optimizer(Net(), kind, lr=1e-3)
    scope: Any = nullcontext()
    scaler: Any = None
    with caplog.at_level(logging.INFO, "halfstep"):
        if recipe in ("O1", "O2"):
            model, optimizer = amp.initialize(model, optimizer, opt_level=recipe, dtype=dtype)
        elif recipe == "autocast":
            scope, scaler = torch.autocast("cpu", dtype), torch.amp.GradScaler("cpu", enabled=dtype is torch.float16)
        elif recipe != "plain":
            level = "O2" if recipe == "decorate" else "O1"
            model, optimizer = amp.decorate(model, optimizer, level=level, dtype=dtype)
            scope, scaler = amp.auto_cast(level=level, dtype=dtype), amp.GradScaler(enable=dtype is torch.float16)
    assert "halfstep.check" not in caplog.text
    y = torch.randint(4, (8,))

    def loss() -> torch.Tensor:
        with scope:
            output = model(torch.randn(8, 16))
        return nn.functional.cross_entropy(output.float(), y)

    def healthy() -> bool:
        return halfstep.check(model, optimizer, scaler=scaler, batch=loss) == []

    assert healthy()
    for _ in range(2):
        if recipe in ("O1", "O2"):
            scaled_step(loss(), optimizer)
        elif scaler is None:
            loss().backward()
            optimizer.step()
        else:
            scaled_step(loss(), optimizer, scaler)
        optimizer.zero_grad()
    assert healthy()


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    state = [t for entry in optimizer.state.values() for t in entry.values() if isinstance(t, torch.Tensor)]
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return [*model.state_dict().values(), *state, *grads, torch.get_rng_state()]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("with_batch", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, optimizers.FusedAdam])
@pytest.mark.filterwarnings("ignore:.*rounds away")
def test_nothing_changes(kind: Any, with_batch: bool, dtype: torch.dtype) -> None:
    model, optimizer = with_optimizer(Net().to(dtype), kind, lr=1e-4, eps=1e-3)
    model(torch.randn(8, 16).to(dtype)).float().square().mean().backward()
    optimizer.step()
    batch = torch.randn(8, 16).to(dtype) if with_batch else None
    before = [t.clone() for t in everything(model, optimizer)]
    modules = [dict(module.__dict__) for module in model.modules()]
    versions = [t._version for t in model.parameters()]
    assert halfstep.check(model, optimizer, batch=batch) != []
    after = everything(model, optimizer)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert versions == [t._version for t in model.parameters()]
    assert modules == [dict(module.__dict__) for module in model.modules()]


def test_the_random_state_is_put_back_after_a_batch() -> None:
    model, x = Net(), torch.randn(8, 16)
    state = torch.get_rng_state()
    halfstep.check(model, batch=lambda: model(x + torch.randn(8, 16)).mean())
    assert torch.equal(state, torch.get_rng_state())


def test_after_an_error_in_the_batch_everything_is_put_back() -> None:
    model, x = Net(), torch.randn(8, 16)
    before = {name: value.clone() for name, value in model.state_dict().items()}

    def fails() -> torch.Tensor:
        model(x)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        halfstep.check(model, batch=fails)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Every call that would make the host wait for a device."""
    called: list[str] = []

    def counted(name: str) -> Any:
        own = getattr(torch.Tensor, name)

        def call(self: torch.Tensor, *args: Any) -> Any:
            called.append(name)
            return own(self, *args)

        return call

    for name in ("item", "tolist", "__bool__", "numpy", "cpu"):
        monkeypatch.setattr(torch.Tensor, name, counted(name))
    return called


@pytest.mark.filterwarnings("ignore:.*rounds away")
def test_the_device_is_read_once_at_most(reads: list[str]) -> None:
    model, optimizer = with_optimizer(Net().bfloat16(), optimizers.FusedAdam, lr=torch.tensor(1e-4))
    model(torch.randn(8, 16).bfloat16()).float().square().mean().backward()
    optimizer.step()
    reads.clear()
    assert halfstep.check(model, optimizer) != []
    assert reads == ["tolist"]


def test_a_model_that_has_not_stepped_is_not_read(reads: list[str]) -> None:
    model = Net()
    assert halfstep.check(model, torch.optim.AdamW(model.parameters())) == []
    assert reads == []


# ---- arguments


def test_a_batch_is_what_the_model_takes() -> None:
    class Two(nn.Module):
        def forward(self, a: torch.Tensor, b: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": (a * b).sum()}

    half = torch.ones(3, dtype=torch.bfloat16)
    for batch in ((half, half), [half, half], {"a": half, "b": half}):
        assert [each.code for each in halfstep.check(Two(), batch=batch)] == ["HS105"]


def test_wrapped_and_compiled_models() -> None:
    model, optimizer = with_optimizer(Net().bfloat16(), torch.optim.SGD, lr=1.0)
    compiled = torch.compile(model, backend="eager")
    (found,) = halfstep.check(compiled, optimizer, batch=torch.randn(8, 16).bfloat16())[:1]
    assert found.where == "body.*, head.* (4 tensors, 128 weights)"
    assert len(halfstep.check(nn.DataParallel(model), optimizer)) == 2
    halfstep.check(model, optimizer, batch=lambda: torch.func.vmap(model.head)(torch.randn(8, 80, 32).bfloat16()))


def test_errors_come_first() -> None:
    model = Net().bfloat16()
    found = halfstep.check(model, torch.optim.AdamW(model.parameters(), lr=1e-6))
    assert [(each.severity, each.code) for each in found] == [
        ("error", "HS101"),
        ("error", "HS102"),
        ("error", "HS103"),
        ("warning", "HS104"),
        ("warning", "HS104"),
    ]


# ---- text


def test_a_finding_prints_as_a_paragraph() -> None:
    finding = Finding("HS101", "error", "layers.*.mlp (224 tensors)", "Too bad. " * 15, {"lost": 1.0}, "Mend it.")
    lines = str(finding).splitlines()
    assert lines[0].startswith("HS101 error    Too bad.")
    assert [line.strip()[:6] for line in lines[-2:]] == ["where:", "fix: M"]
    assert all(len(line) <= 120 for line in lines)


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ({"head.weight": 12}, "head.weight (1 tensor, 12 weights)"),
        ({"a.0.w": 5, "a.1.w": 5}, "a.* (2 tensors, 10 weights)"),
        ({f"layers.{i}.mlp.{j}": 10**7 for i in range(32) for j in "ab"}, "layers.*.mlp (64 tensors, 6.4e+08 weights)"),
        ({f"{name}.w": n for n, name in enumerate("abcde", 1)}, "e, d, c and 2 more (5 tensors, 15 weights)"),
    ],
    ids=["one", "two", "many", "groups"],
)
def test_names_are_grouped(sizes: dict[str, int], text: str) -> None:
    assert grouped(sizes) == text


@pytest.mark.parametrize(
    ("fraction", "text"), [(1.0, "100 %"), (0.99999, "99.9 %"), (0.987, "98.7 %"), (0.5, "50 %"), (0.0901, "9.01 %")]
)
def test_a_share_is_never_rounded_up_to_all(fraction: float, text: str) -> None:
    assert share(fraction) == text


# ---- the line of initialize and decorate


def test_initialize_logs_one_line_of_what_is_wrong(caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer = with_optimizer(Net(), torch.optim.AdamW, lr=1e-6)
    with caplog.at_level(logging.INFO, "halfstep"):
        amp.initialize(model, optimizer, opt_level="O3", dtype="bfloat16")
    lines = [record for record in caplog.records if record.message.startswith("halfstep.check: ")]
    assert [record.levelname for record in lines] == ["WARNING"]
    assert "HS101 error at " in lines[0].message
    caplog.clear()
    amp.initialize(Net(), opt_level="O3", dtype="bfloat16", verbosity=0)
    assert caplog.text == ""


def test_decorate_logs_one_line_of_what_is_wrong(caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer = with_optimizer(Net(), torch.optim.AdamW, lr=1e-6)
    amp.decorate(model, optimizer, level="O2", dtype="float16", master_weight=False)
    (record,) = caplog.records
    assert "HS101" in record.message
    assert "HS107" not in record.message  # its scaler comes later


@pytest.mark.parametrize(
    ("level", "given", "codes"), [("O2", False, ["HS101", "HS106"]), ("O2", True, []), ("O1", False, [])]
)
def test_a_scaler_logs_what_an_optimizer_loses_that_decorate_was_not_given(
    level: str, given: bool, codes: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Paddle's guide decorates the model alone. Adam in float16 makes weights inf then, and nothing had said so."""
    model, scaler = Net(), amp.GradScaler(init_loss_scaling=1024)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-5)
    amp.decorate(model, optimizer if given else None, level=level, dtype="float16")
    for _ in range(2):
        with amp.auto_cast(level=level, dtype="float16"):
            loss = model(torch.randn(8, 16)).square().mean()
        scaler.scale(loss).backward()
        scaler.minimize(optimizer)
        optimizer.zero_grad()
    lines = [record.message for record in caplog.records]
    assert len(lines) == bool(codes)
    assert all(code in lines[0] for code in codes)


def test_a_model_without_values_is_not_sampled() -> None:
    with torch.device("meta"):
        model = Net().bfloat16()
    found = halfstep.check(model, torch.optim.AdamW(model.parameters(), lr=1e-6))
    assert [each.code for each in found] == ["HS102", "HS103", "HS104", "HS104"]


def test_initialize_reads_no_fake_tensor() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        model = Net()
        amp.initialize(model, torch.optim.AdamW(model.parameters()), opt_level="O3", dtype="bfloat16")
        assert next(model.parameters()).dtype is torch.bfloat16
