"""What people use beside halfstep works as it does without it: at O2, on a CPU, with the real packages."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.optim import lr_scheduler as schedulers
from torch.optim import swa_utils

from halfstep import amp
from tests.integrations import direct_loop as direct
from tests.support.worlds import step_and_clear, unscaled_step, with_optimizer


def missing(package: str) -> str:
    return f"{package} is not installed; `make integrations` installs it"


def fit(model: nn.Module, optimizer: Any, steps: int = 4, after_step: Callable[[], None] | None = None) -> list[float]:
    """A few steps of bfloat16 O2 on one batch; returns the losses."""
    x, y = direct.batches(1)[0]
    losses = []
    for _ in range(steps):
        with amp.auto_cast(level="O2", dtype="bfloat16"):
            loss = F.cross_entropy(model(x), y)
        unscaled_step(loss, optimizer)
        if after_step is not None:
            after_step()
        losses.append(loss.item())
    return losses


def assert_trains_on_masters(model: nn.Module, optimizer: Any, **options: Any) -> None:
    amp.decorate(model, optimizer, level="O2", dtype="bfloat16", **options)
    losses = fit(model, optimizer, 8)
    assert losses[-1] < losses[0]
    assert {p.dtype for p in amp.master_params(optimizer)} == {torch.float32}


def trained(model: nn.Module | None = None, steps: int = 4) -> nn.Module:
    model = direct.classifier() if model is None else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    amp.decorate(model, optimizer, level="O2", dtype="bfloat16")
    fit(model, optimizer, steps)
    model.optimizer = optimizer  # whose masters the model is saved from
    return model


# ---- torch


def warmup_and_decay(optimizer: Any) -> list[Any]:
    return [schedulers.ConstantLR(optimizer, 0.1, 2), schedulers.ExponentialLR(optimizer, 0.9)]


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: schedulers.LambdaLR(o, lambda step: 0.9**step),
    "MultiplicativeLR": lambda o: schedulers.MultiplicativeLR(o, lambda step: 0.9),
    "StepLR": lambda o: schedulers.StepLR(o, 2),
    "MultiStepLR": lambda o: schedulers.MultiStepLR(o, [1, 3]),
    "ConstantLR": lambda o: schedulers.ConstantLR(o, 0.5, 3),
    "LinearLR": lambda o: schedulers.LinearLR(o, 0.1, total_iters=4),
    "ExponentialLR": lambda o: schedulers.ExponentialLR(o, 0.9),
    "SequentialLR": lambda o: schedulers.SequentialLR(o, warmup_and_decay(o), [2]),
    "CosineAnnealingLR": lambda o: schedulers.CosineAnnealingLR(o, 5),
    "ChainedScheduler": lambda o: schedulers.ChainedScheduler(warmup_and_decay(o)),
    "ReduceLROnPlateau": lambda o: schedulers.ReduceLROnPlateau(o, patience=1),
    "CyclicLR": lambda o: schedulers.CyclicLR(o, 1e-4, 1e-2, step_size_up=2),
    "CosineAnnealingWarmRestarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 3),
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, 1e-2, total_steps=8),
    "PolynomialLR": lambda o: schedulers.PolynomialLR(o, 5),
}


def test_every_scheduler_of_torch_is_here() -> None:
    assert set(SCHEDULERS) == set(schedulers.__all__) - {"LRScheduler"}


@pytest.mark.parametrize("made", ["before", "after"])
@pytest.mark.parametrize("name", list(SCHEDULERS))
def test_schedulers_go_on_and_resume(name: str, made: str) -> None:
    def run(decorated: bool) -> tuple[list[Any], Any]:
        model, optimizer = with_optimizer(direct.classifier(), torch.optim.SGD, lr=1e-2, momentum=0.9)
        scheduler = SCHEDULERS[name](optimizer) if made == "before" else None
        if decorated:
            amp.decorate(model, optimizer, level="O2", dtype="bfloat16")
        scheduler = scheduler or SCHEDULERS[name](optimizer)
        groups: list[Any] = []

        def advance() -> None:
            scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
            groups.append([{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups])

        fit(model, optimizer, 5, advance)
        return groups, scheduler

    expected, _ = run(decorated=False)
    groups, scheduler = run(decorated=True)
    assert [[group["lr"] for group in row] for row in groups] == [[group["lr"] for group in row] for row in expected]
    assert [row[0]["momentum"] for row in groups] == [row[0]["momentum"] for row in expected]
    again = run(decorated=True)[1]
    again.load_state_dict(scheduler.state_dict())
    assert again.state_dict() == scheduler.state_dict()


def test_averages_of_weights_are_fp32_means_of_the_masters() -> None:
    model, optimizer = with_optimizer(direct.classifier(), torch.optim.AdamW, lr=1e-2)
    amp.decorate(model, optimizer, level="O2", dtype="bfloat16")
    average = swa_utils.AveragedModel(amp.master_model(model))
    schedule = swa_utils.SWALR(optimizer, swa_lr=1e-3, anneal_epochs=2)
    seen: list[list[torch.Tensor]] = []

    def update() -> None:
        average.update_parameters(amp.master_model(model))
        schedule.step()
        seen.append([p.detach().clone() for p in amp.master_params(optimizer)])

    fit(model, optimizer, 4, update)
    for value, *steps in zip(average.module.parameters(), *seen, strict=True):
        assert value.dtype is torch.float32
        torch.testing.assert_close(value.detach(), torch.stack(steps).mean(0))
    swa_utils.update_bn([direct.batches(1)[0][0]], average)
    assert average(torch.randn(2, 12)).dtype is torch.float32


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning")  # torch 2.11, of its own copy
def test_a_trained_model_is_exported() -> None:
    model = trained().eval()
    x = torch.randn(3, 12).bfloat16()
    program = torch.export.export(model, (x,))
    torch.testing.assert_close(program.module()(x), model(x), rtol=0, atol=0)
    with io.BytesIO() as file:
        torch.export.save(program, file)
        file.seek(0)
        torch.testing.assert_close(torch.export.load(file).module()(x), model(x), rtol=0, atol=0)


@pytest.mark.parametrize("name", ["weight_norm", "spectral_norm"])
def test_parametrizations_train(name: str) -> None:
    model = nn.Sequential(getattr(parametrizations, name)(nn.Linear(12, 16)), nn.Tanh(), nn.Linear(16, 5))
    assert_trains_on_masters(*with_optimizer(model, torch.optim.AdamW, lr=1e-2))


def test_orthogonal_has_the_digits_of_the_dtype_that_it_is_kept_in() -> None:
    """Its decomposition has no bfloat16 kernel. Where ops are cast it runs in fp32, on the 16-bit weight."""

    def model() -> tuple[nn.Module, Any]:
        layer = parametrizations.orthogonal(nn.Linear(12, 12), orthogonal_map="householder")
        net = nn.Sequential(layer, nn.Linear(12, 5))
        return net, torch.optim.SGD(net.parameters(), lr=0.1)

    net, optimizer = model()
    assert_trains_on_masters(net, optimizer)
    with amp.auto_cast(dtype="bfloat16"):
        weight = net[0].weight.float()
    torch.testing.assert_close(weight @ weight.T, torch.eye(12), rtol=0, atol=2e-2)
    net, optimizer = model()
    assert_trains_on_masters(net, optimizer, excluded_layers=net[0])
    weight = net[0].weight
    torch.testing.assert_close(weight @ weight.T, torch.eye(12), rtol=0, atol=1e-5)


# ---- packages


def test_metrics_are_the_same_inside_and_outside_of_a_scope() -> None:
    torchmetrics = pytest.importorskip("torchmetrics", reason=missing("torchmetrics"))
    model, (x, y) = trained(), direct.batches(1)[0]
    with amp.auto_cast(level="O2", dtype="bfloat16"):
        scores = model(x)
    for metric in (
        torchmetrics.Accuracy(task="multiclass", num_classes=5),
        torchmetrics.F1Score(task="multiclass", num_classes=5),
        torchmetrics.MeanMetric(),
    ):
        arguments = (scores.float().mean(),) if isinstance(metric, torchmetrics.MeanMetric) else (scores.float(), y)
        outside = metric(*arguments)
        metric.reset()
        with amp.auto_cast(level="O2", dtype="bfloat16"):
            inside = metric(*arguments)
        assert inside.dtype is torch.float32
        assert torch.equal(inside, outside)


def test_tensorboard_shows_masters(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason=missing("TensorBoard"))
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    model = trained()
    masters = amp.master_model(model)
    with SummaryWriter(str(tmp_path)) as writer:
        for name, param in masters.named_parameters():
            writer.add_histogram(name, param, 1)
    events = EventAccumulator(str(tmp_path)).Reload()
    weight = masters.state_dict()["0.weight"]
    assert events.Histograms("0.weight")[0].histogram_value.max == pytest.approx(weight.max().item())


@pytest.mark.exhaustive
@pytest.mark.parametrize("precision", ["masters", "16-bit weights"])
def test_onnx_of_a_trained_model(precision: str, tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx", reason=missing("onnx"))
    pytest.importorskip("onnxscript", reason=missing("onnxscript"))
    from onnx.reference import ReferenceEvaluator

    model = trained()
    model = copy.deepcopy(amp.master_model(model) if precision == "masters" else model).eval()
    x = torch.randn(3, 12)
    torch.onnx.export(model, (x,), str(tmp_path / "model.onnx"), dynamo=True, verbose=False)
    file = onnx.load(tmp_path / "model.onnx")
    onnx.checker.check_model(file)
    (found,) = ReferenceEvaluator(file).run(None, {file.graph.input[0].name: x.numpy()})
    digits = {"rtol": 1e-4, "atol": 1e-5} if precision == "masters" else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(torch.from_numpy(found.astype("float32")), model(x).detach().float(), **digits)


def test_safetensors_hold_the_masters(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch", reason=missing("safetensors"))
    model = trained()
    safetensors.save_file(model.state_dict(), tmp_path / "model.safetensors")
    loaded = safetensors.load_file(tmp_path / "model.safetensors")
    other = trained(steps=1)
    other.load_state_dict(loaded)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(other.state_dict()[name], value, rtol=0, atol=0)
    safetensors.save_model(model, tmp_path / "by model.safetensors")
    assert safetensors.load_file(tmp_path / "by model.safetensors").keys() == loaded.keys()


def large() -> nn.Module:
    """With a weight that 8-bit optimizers quantize the state of: 4,096 numbers or more."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(12, 512), nn.GELU(), nn.Linear(512, 5))


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore")
def test_8_bit_optimizers_of_torchao_step_on_masters() -> None:
    optim = pytest.importorskip("torchao.optim", reason=missing("torchao"))
    model = large()
    optimizer = optim.AdamW8bit(model.parameters(), lr=1e-3)
    with torch.compiler.set_stance("force_eager"):  # it compiles a step for each shape, which takes half a minute
        assert_trains_on_masters(model, optimizer)
    state = optimizer.state[model[0].weight]
    assert type(state["exp_avg"]).__name__ == "OptimState8bit"


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("emulate", [True, False])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_float8_linears_of_torchao_train(level: str, dtype: str, emulate: bool) -> None:
    float8 = pytest.importorskip("torchao.float8", reason=missing("torchao"))
    losses = []
    for options in ({"opt_level": "O0"}, {"opt_level": level, "dtype": dtype, "emulate": emulate, "loss_scale": 64.0}):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 16))
        if options["opt_level"] != "O0":
            model = float8.convert_to_float8_training(model, config=float8.Float8LinearConfig(emulate=True))
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
        model, optimizer = amp.initialize(model, optimizer, verbosity=0, **options)
        data, seen = torch.randn(10, 64, 64, generator=torch.Generator().manual_seed(1)), []
        for x in data:
            loss = (model(x).float() - x[:, :16]).square().mean()
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            step_and_clear(optimizer)
            seen.append(loss.item())
        losses.append(seen)
    assert losses[1] == pytest.approx(losses[0], rel=0.02)


@pytest.mark.filterwarnings("ignore")
def test_a_trained_model_takes_int8_weights_of_torchao() -> None:
    quantization = pytest.importorskip("torchao.quantization", reason=missing("torchao"))
    model = copy.deepcopy(amp.master_model(trained(large()))).eval()
    x = torch.randn(3, 12)
    before = model(x)
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    assert type(model[0].weight.data).__name__ != "Tensor"
    torch.testing.assert_close(model(x), before, rtol=0.05, atol=0.05)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["AdamW8bit", "Lion8bit", "AdamW"])
def test_optimizers_of_bitsandbytes_step_on_masters(name: str) -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes", reason=missing("bitsandbytes"))
    model = large()
    optimizer = getattr(bitsandbytes.optim, name)(model.parameters(), lr=1e-3)
    assert_trains_on_masters(model, optimizer)
    if name.endswith("8bit"):
        assert optimizer.state[model[0].weight]["state1"].dtype is torch.uint8
