"""The dynamic-graph examples of Paddle's guide (1.2, 2.1, 2.2, 3.1 and V).

The guide is "Automatic Mixed Precision Training (AMP)",
https://www.paddlepaddle.org.cn/documentation/docs/en/guides/performance_improving/amp_en.html; its section
3.2 is in ``casting/graph/test_paddle_static_guide.py``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import halfstep
from halfstep import amp
from tests.support.digits import digits
from tests.support.processes import Ranks

SIZE, BATCH, BATCHES, EPOCHS = 32, 8, 6, 2


class SimpleNet(nn.Module):
    def __init__(self, input_size: int, output_size: int) -> None:
        super().__init__()
        self.linears = nn.ModuleList([nn.Linear(input_size, output_size) for _ in range(9)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for linear in self.linears:
            x = linear(x)
        return x


class RandomDataset(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    def __init__(self, num_samples: int) -> None:
        self.data = torch.rand(2, num_samples, SIZE, generator=torch.Generator().manual_seed(100))

    def __getitem__(self, idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.data[0, idx], self.data[1, idx]

    def __len__(self) -> int:
        return self.data.shape[1]


@pytest.fixture
def loader() -> DataLoader[tuple[torch.Tensor, torch.Tensor]]:
    return DataLoader(RandomDataset(BATCHES * BATCH), batch_size=BATCH, shuffle=False, drop_last=True)


def net() -> tuple[SimpleNet, torch.optim.Optimizer, nn.MSELoss]:
    torch.manual_seed(100)
    model = SimpleNet(SIZE, SIZE)
    return model, torch.optim.SGD(model.parameters(), lr=0.05), nn.MSELoss()


@pytest.fixture
def fp32_loss(loader: DataLoader[tuple[torch.Tensor, torch.Tensor]]) -> float:
    model, optimizer, mse = net()
    for _ in range(EPOCHS):
        for data, label in loader:
            loss = mse(model(data), label)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return loss.item()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_o1(loader: DataLoader[tuple[torch.Tensor, torch.Tensor]], fp32_loss: float, dtype: str) -> None:
    """Section 2.1.2."""
    model, optimizer, mse = net()
    scaler = amp.GradScaler(init_loss_scaling=1024)
    for _ in range(EPOCHS):
        for data, label in loader:
            with amp.auto_cast(custom_white_list={"elementwise_add"}, level="O1", dtype=dtype):
                output = model(data)
                loss = mse(output, label)
            scaled = scaler.scale(loss)
            scaled.backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert output.dtype is getattr(torch, dtype)
    assert loss.dtype is torch.float32
    assert loss.item() == pytest.approx(fp32_loss, rel=0.01)
    assert scaler.get_scale() == 1024


@pytest.mark.parametrize("masters", [False, True], ids=["as written", "optimizer decorated too"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_o2(loader: DataLoader[tuple[torch.Tensor, torch.Tensor]], fp32_loss: float, dtype: str, masters: bool) -> None:
    """Section 2.1.3."""
    model, optimizer, mse = net()
    if masters:
        model, optimizer = amp.decorate(models=model, optimizers=optimizer, level="O2", dtype=dtype)
    else:
        model = amp.decorate(models=model, level="O2", dtype=dtype)
    scaler = amp.GradScaler(init_loss_scaling=1024)
    for _ in range(EPOCHS):
        for data, label in loader:
            with amp.auto_cast(level="O2", dtype=dtype):
                output = model(data)
                loss = mse(output, label)
            scaled = scaler.scale(loss)
            scaled.backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert model.linears[0].weight.dtype is output.dtype is getattr(torch, dtype)
    assert loss.item() == pytest.approx(fp32_loss, rel=0.02 if masters else 0.1)


def test_gradient_accumulation(loader: DataLoader[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Section 3.1: as many batches as there are in an epoch make one step."""
    model, optimizer, mse = net()
    large, reference, _ = net()
    scaler = amp.GradScaler(init_loss_scaling=1024)
    accumulate_batchs_num = 3
    for i, (data, label) in enumerate(loader):
        with amp.auto_cast(level="O1", dtype="bfloat16"):
            loss = mse(model(data), label)
        scaler.scale(loss).backward()
        mse(large(data), label).backward()
        if (i + 1) % accumulate_batchs_num == 0:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            reference.step()
            reference.zero_grad()
    for p, q in zip(model.parameters(), large.parameters(), strict=True):
        torch.testing.assert_close(p, q, atol=2e-3, rtol=0)


def test_the_loss_scale_moves_as_in_section_1_2_2() -> None:
    scaler = amp.GradScaler()
    assert scaler.get_init_loss_scaling() == 2**15
    assert (scaler.get_incr_ratio(), scaler.get_decr_ratio()) == (2.0, 0.5)
    assert (scaler.get_incr_every_n_steps(), scaler.get_decr_every_n_nan_or_inf()) == (1000, 2)
    scaler.set_incr_every_n_steps(3)
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    scales = []
    for factor in (1.0, 1.0, 1.0, float("nan"), 1.0, float("inf"), float("inf"), 1.0):
        scaler.scale(weight.sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale() / 2**15)
    assert scales == [1, 1, 2, 2, 2, 2, 1, 1]  # grown after three finite steps, shrunk after two others in a row


def decorated_before_data_parallel(rank: int) -> tuple[set[torch.dtype], torch.Tensor]:
    """Section V: ``decorate`` comes before the distributed model."""
    torch.manual_seed(100)
    model = SimpleNet(SIZE, SIZE)
    model = amp.decorate(models=model, level="O2", dtype="bfloat16")
    dp_model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(dp_model.parameters(), lr=0.05)
    for _ in range(3):
        with amp.auto_cast(level="O2", dtype="bfloat16"):
            loss = dp_model(torch.full((4, SIZE), 1.0 + rank)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {p.dtype for p in model.parameters()}, torch.cat([p.detach().float().flatten() for p in model.parameters()])


def test_o2_with_distributed_training(ranks: Ranks) -> None:
    """Section V, question 2; the other order is refused, see ``test_decorate_errors.py``."""
    (dtypes, first), (_, second) = ranks.run(decorated_before_data_parallel)
    assert dtypes == {torch.bfloat16}
    assert torch.equal(first, second)


class Digits(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    def __init__(self, mode: str, transform: Any) -> None:
        assert mode == "train"
        images, self.labels = digits()
        self.images = images[:512] * 255 / 16
        self.transform = transform

    def __getitem__(self, idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.transform(self.images[idx]), self.labels[idx]

    def __len__(self) -> int:
        return len(self.images)


@pytest.mark.exhaustive
def test_high_level_api(capsys: pytest.CaptureFixture[str]) -> None:
    """Section 2.2, on digits of 64 pixels where the guide has MNIST's 784."""
    net = nn.Sequential(nn.Flatten(1), nn.Linear(64, 200), nn.Tanh(), nn.Linear(200, 10))
    model = halfstep.Model(net)
    optim = torch.optim.SGD(lr=1e-3, params=model.parameters())
    amp_configs = {"level": "O1", "custom_white_list": {"conv2d"}, "use_dynamic_loss_scaling": True}
    model.prepare(optim, torch.nn.CrossEntropyLoss(), halfstep.metrics.Accuracy(), amp_configs=amp_configs)
    data = Digits(mode="train", transform=lambda image: (image - 127.5) / 127.5)
    before = model.evaluate(data, batch_size=512, verbose=0)
    model.fit(data, epochs=2, batch_size=32, verbose=1)
    after = model.evaluate(data, batch_size=512, verbose=0)
    assert after["loss"] < before["loss"]
    assert after["acc"] > before["acc"]
    assert "epoch 2/2" in capsys.readouterr().out
