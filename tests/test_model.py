"""``halfstep.Model`` against a loop written by hand, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import halfstep
from halfstep import amp
from halfstep.model import Callback


class Accuracy:
    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.right, self.seen = 0, 0

    def update(self, outputs: torch.Tensor, label: torch.Tensor) -> None:
        assert outputs.dtype == torch.float32
        self.right += int((outputs.argmax(1) == label).sum())
        self.seen += len(label)

    def compute(self) -> float:
        return self.right / self.seen


def digits() -> TensorDataset:
    data = load_digits()
    return TensorDataset(torch.tensor(data.images, dtype=torch.float32) / 8 - 1, torch.tensor(data.target))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(1), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))


def prepared(configs: Any, lr: float = 0.1) -> halfstep.Model:
    model = halfstep.Model(network())
    optimizer = torch.optim.SGD(model.network.parameters(), lr=lr, momentum=0.9)
    model.prepare(optimizer, nn.CrossEntropyLoss(), Accuracy(), amp_configs=configs)
    return model


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_digits(level: str, dtype: str) -> None:
    configs = {
        "level": level,
        "dtype": dtype,
        "custom_white_list": {"conv2d"},
        "use_dynamic_loss_scaling": True,
    }
    model = prepared(configs)
    model.fit(digits(), epochs=2, batch_size=32, verbose=0)
    found = model.evaluate(digits(), batch_size=64, verbose=0)
    assert found["Accuracy"] > 0.9
    half = getattr(torch, dtype)
    assert model.network[1].weight.dtype == (half if level == "O2" else torch.float32)
    assert model.predict(digits(), batch_size=600, verbose=0)[0].dtype == half


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_windows_are_averaged_the_last_one_over_what_is_left(level: str) -> None:
    batches = [(torch.randn(4, 8, 8), torch.randint(10, (4,))) for _ in range(5)]
    configs = level if level == "O0" else {"level": level, "dtype": "bfloat16"}
    model = prepared(configs)
    model.fit(batches, verbose=0, accumulate_grad_batches=3)
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    if level == "O2":
        amp.decorate(net, optimizer, level="O2", dtype="bfloat16")
    for window in (batches[:3], batches[3:]):
        for x, y in window:
            with amp.auto_cast(enable=level != "O0", level=level, dtype="bfloat16"):
                loss = nn.functional.cross_entropy(net(x).float(), y)
            (loss / len(window)).backward()
        optimizer.step()
        optimizer.zero_grad()
    for ours, theirs in zip(model.network.state_dict().values(), net.state_dict().values(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_resumed_training_is_the_same_training(level: str, tmp_path: Path) -> None:
    batches = [(torch.randn(4, 8, 8), torch.randint(10, (4,))) for _ in range(4)]
    configs = {"level": level, "dtype": "float16", "incr_every_n_steps": 1, "init_loss_scaling": 8.0}
    whole, first, second = prepared(configs), prepared(configs), prepared(configs)
    whole.fit(batches, verbose=0)
    first.fit(batches[:2], verbose=0, save_dir=tmp_path)
    second.load(tmp_path / "final")
    assert second._scaler.get_scale() == 32.0
    second.fit(batches[2:], verbose=0)
    for ours, theirs in zip(second.network.state_dict().values(), whole.network.state_dict().values(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_the_loss_is_fp32_and_callbacks_are_called() -> None:
    seen: list[Any] = []

    class Recorder(Callback):
        def on_batch_end(self, step: int, logs: Any) -> None:
            seen.append((step, logs["loss"].dtype))

        def on_epoch_end(self, epoch: int, logs: Any) -> None:
            seen.append((epoch, sorted(logs)))

    batches = [(torch.randn(4, 8, 8), torch.randint(10, (4,)))]
    prepared({"level": "O2", "dtype": "bfloat16"}).fit(batches, batches, verbose=1, callbacks=Recorder())
    assert seen == [(0, torch.float32), (0, ["Accuracy", "eval_Accuracy", "eval_loss", "loss"])]


@pytest.mark.parametrize(
    ("configs", "message"),
    [
        ("O3", "The level of amp_configs should be 'O0', 'O1' or 'O2'"),
        ({"level": "o1"}, r"amp_configs\['level'\] should be"),
        ({"foo": 1}, "unknown keys"),
        ({"use_pure_fp16": True}, "'level': 'O2'"),
        ({"level": "O2", "use_fp16_guard": True}, "static graph mode only"),
        ({"level": "O2", "custom_white_list": ["no_such_op"]}, "no_such_op"),
        ({"level": "O2", "init_loss_scaling": -1.0}, "-1"),
        (3, "a level or a dict"),
    ],
)
def test_refusals_change_nothing(configs: Any, message: str) -> None:
    model = halfstep.Model(network())
    optimizer = torch.optim.SGD(model.network.parameters(), lr=0.1)
    with pytest.raises(halfstep.HalfstepError, match=message):
        model.prepare(optimizer, nn.CrossEntropyLoss(), amp_configs=configs)
    assert all(param.dtype == torch.float32 for param in model.network.parameters())
    with pytest.raises(halfstep.HalfstepError, match="needs an optimizer and a loss"):
        model.fit([], verbose=0)
