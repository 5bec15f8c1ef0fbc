"""Section 3.2 of Paddle's guide, as it is typed there: see ``amp/test_paddle_amp_guide.py`` for the guide.

What differs are names of modules (``paddle.static`` is ``static``, ``paddle.nn`` and ``paddle.optimizer`` are torch's,
with torch's names for ``learning_rate`` and ``parameters``), the place, ``loader()`` without its brackets, and sizes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from halfstep import static
from tests.support.worlds import unscaled_step

epochs = 2
input_size = 32
output_size = 32
batch_size = 8
nums_batch = 4


class SimpleNet(nn.Module):
    def __init__(self, input_size: int, output_size: int) -> None:
        super().__init__()
        self.linears = nn.ModuleList([nn.Linear(input_size, output_size) for i in range(9)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, _l in enumerate(self.linears):
            x = self.linears[i](x)
        return x


class GuardedNet(SimpleNet):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, _l in enumerate(self.linears):
            if i > 0:
                # Through fp16_guard controls the calculation range using float16
                with static.amp.fp16_guard():
                    x = self.linears[i](x)
            else:
                x = self.linears[i](x)
        return x


class RandomDataset(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    def __init__(self, num_samples: int) -> None:
        self.data = torch.rand(2, num_samples, input_size, generator=torch.Generator().manual_seed(100))

    def __getitem__(self, idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.data[0, idx], self.data[1, idx]

    def __len__(self) -> int:
        return self.data.shape[1]


dataset = RandomDataset(nums_batch * batch_size)
loader = DataLoader(dataset, batch_size=batch_size, shuffle=False, drop_last=True, num_workers=0)
place = torch.device("cpu")


@pytest.fixture(autouse=True)
def static_mode() -> Iterator[None]:
    torch.manual_seed(100)
    static.enable_static()
    yield
    static.disable_static()


def eager_fp32_losses(lr: float) -> list[float]:
    """What the network of the guide gives without a static graph."""
    torch.manual_seed(100)
    model, losses = SimpleNet(input_size, output_size), []
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for _ in range(epochs):
        for train_data, train_label in loader:
            loss = nn.functional.mse_loss(model(train_data), train_label)
            unscaled_step(loss, optimizer)
            losses.append(loss.item())
    return losses


def test_fp32_training_mode_of_static_graph() -> None:
    """Section 3.2.1."""
    # Define the static program
    main_program = static.default_main_program()
    startup_program = static.default_startup_program()
    # Define a neural network consisting of 9 layers of linear
    model = SimpleNet(input_size, output_size)
    # Define loss function
    mse_loss = nn.MSELoss()

    # Define training data and labels
    data = static.data(name="data", shape=[batch_size, input_size], dtype="float32")
    label = static.data(name="label", shape=[batch_size, input_size], dtype="float32")
    # forward
    predict = model(data)
    # compute loss
    loss = mse_loss(predict, label)
    # Define optimizer
    optimizer: Any = torch.optim.SGD(lr=0.05, params=model.parameters())
    optimizer.minimize(loss)
    # Define static diagram executor
    exe = static.Executor(place)
    exe.run(startup_program)

    losses = []
    train_time = 0.0  # Record total training duration
    for _epoch in range(epochs):
        for train_data, train_label in loader:
            start_time = time.time()  # Record start time
            # Executive Training
            train_loss = exe.run(
                main_program,
                feed={data.name: train_data, label.name: train_label},
                fetch_list=[loss.name],
                use_program_cache=True,
            )
            # Record training duration
            train_time += time.time() - start_time
            losses.append(train_loss[0].item())

    assert losses == pytest.approx(eager_fp32_losses(lr=0.05), rel=1e-5)
    assert train_time > 0


def built(kind: type[SimpleNet]) -> tuple[nn.Module, torch.Tensor, torch.Tensor, Any]:
    """The network as in section 3.2.1, what it predicts, the loss and the optimizer."""
    model = kind(input_size, output_size)
    data = static.data(name="data", shape=[batch_size, input_size], dtype="float32")
    label = static.data(name="label", shape=[batch_size, input_size], dtype="float32")
    predict = model(data)
    return model, predict, nn.MSELoss()(predict, label), torch.optim.SGD(lr=0.05, params=model.parameters())


def trained(exe: static.Executor, loss: torch.Tensor) -> list[torch.Tensor]:
    """The losses of the training of section 3.2.1."""
    program = static.default_main_program()
    feeds = [{"data": x, "label": y} for _epoch in range(epochs) for x, y in loader]
    return [exe.run(program, feed=feed, fetch_list=[loss.name], use_program_cache=True)[0] for feed in feeds]


def test_amp_o1_training_mode_of_static_graph() -> None:
    """Section 3.2.2."""
    _, predict, loss, optimizer = built(SimpleNet)

    # 1) use `CustomOpLists` to define Black and white lists
    amp_list = static.amp.CustomOpLists(custom_white_list=["elementwise_add"])

    # 2)decorate the optimizer for amp:
    optimizer = static.amp.decorate(
        optimizer=optimizer, amp_lists=amp_list, init_loss_scaling=128.0, use_dynamic_loss_scaling=True
    )

    optimizer.minimize(loss)
    # Define static diagram executor
    exe = static.Executor(place)
    exe.run(static.default_startup_program())

    losses = trained(exe, loss)
    assert losses[-1].dtype is torch.float32
    assert [loss.item() for loss in losses] == pytest.approx(eager_fp32_losses(lr=0.05), rel=0.01)
    assert optimizer.get_loss_scaling() == 128.0
    feed = dict(zip(("data", "label"), next(iter(loader)), strict=True))
    (output,) = exe.run(static.default_main_program(), feed, [predict], train=False)
    assert output.dtype is torch.float16


@pytest.mark.parametrize("use_fp16_guard", [False, True])
def test_amp_o2_training_mode_of_static_graph(use_fp16_guard: bool) -> None:
    """Section 3.2.3, without and with fp16_guard."""
    model, _, loss, optimizer = built(GuardedNet if use_fp16_guard else SimpleNet)

    # 1)decorate the optimizer for amp:
    optimizer = static.amp.decorate(
        optimizer=optimizer,
        init_loss_scaling=128.0,
        use_dynamic_loss_scaling=True,
        use_pure_fp16=True,
        use_fp16_guard=use_fp16_guard,
    )

    optimizer.minimize(loss)

    exe = static.Executor(place)
    exe.run(static.default_startup_program())

    # 2) use `amp_init` convert FP32 parameters of the network to FP16
    optimizer.amp_init(place, scope=static.global_scope())

    losses = trained(exe, loss)
    assert [loss.item() for loss in losses] == pytest.approx(eager_fp32_losses(lr=0.05), rel=0.02)
    expected = torch.float32 if use_fp16_guard else torch.float16  # as the guide prints them
    assert losses[-1].dtype is expected
    half = 16 if use_fp16_guard else 18
    assert [p.dtype for p in model.parameters()] == [torch.float32] * (18 - half) + [torch.float16] * half
