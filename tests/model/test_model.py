"""``halfstep.Model`` against a loop written by hand, and what it refuses."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import halfstep
from halfstep import amp
from halfstep.core.errors import ArgumentTypeError
from halfstep.model import Callback
from halfstep.paddle.model.configs import read_configs
from tests.support import digits as sklearn_digits
from tests.support.worlds import Applies, assert_equal, step_and_clear, with_optimizer

RECORDED = json.loads((Path(__file__).parents[1] / "golden/paddle_hapi.json").read_text())


def accuracy() -> Any:
    return sklearn_digits.accuracy(average="micro")


def digits() -> TensorDataset:
    images, labels = sklearn_digits.digits()
    return TensorDataset(images / 8 - 1, labels)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(1), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))


def prepared(configs: Any, lr: float = 0.1) -> halfstep.Model:
    model = halfstep.Model(network())
    optimizer = torch.optim.SGD(model.network.parameters(), lr=lr, momentum=0.9)
    model.prepare(optimizer, nn.CrossEntropyLoss(), accuracy(), amp_configs=configs)
    return model


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_digits(level: str, dtype: str) -> None:
    configs = {"level": level, "dtype": dtype, "custom_white_list": {"conv2d"}, "use_dynamic_loss_scaling": True}
    model = prepared(configs)
    model.fit(digits(), epochs=2, batch_size=32, verbose=0)
    found = model.evaluate(digits(), batch_size=64, verbose=0)
    assert found["MulticlassAccuracy"] > 0.9
    half = getattr(torch, dtype)
    assert model.network[1].weight.dtype == (half if level == "O2" else torch.float32)
    assert model.predict(digits(), batch_size=600, verbose=0)[0].dtype == half


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_windows_are_averaged_the_last_one_over_what_is_left(level: str) -> None:
    batches = [(torch.randn(4, 8, 8), torch.randint(10, (4,))) for _ in range(5)]
    configs = level if level == "O0" else {"level": level, "dtype": "bfloat16"}
    model = prepared(configs)
    model.fit(batches, verbose=0, accumulate_grad_batches=3)
    net, optimizer = with_optimizer(network(), torch.optim.SGD, lr=0.1, momentum=0.9)
    if level == "O2":
        amp.decorate(net, optimizer, level="O2", dtype="bfloat16")
    for window in (batches[:3], batches[3:]):
        for x, y in window:
            with amp.auto_cast(enable=level != "O0", level=level, dtype="bfloat16"):
                loss = nn.functional.cross_entropy(net(x).float(), y)
            (loss / len(window)).backward()
        step_and_clear(optimizer)
    torch.testing.assert_close([*model.network.state_dict().values()], [*net.state_dict().values()], rtol=0, atol=0)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_resumed_training_is_the_same_training(level: str, tmp_path: Path) -> None:
    batches = [(torch.randn(4, 8, 8), torch.randint(10, (4,))) for _ in range(4)]
    configs = {"level": level, "dtype": "float16", "incr_every_n_steps": 1, "init_loss_scaling": 8.0}
    whole, first, second = prepared(configs), prepared(configs), prepared(configs)
    whole.fit(batches, verbose=0)
    first.fit(batches[:2], verbose=0, save_dir=tmp_path)
    second.load(tmp_path / "final")
    assert second.scaler.get_scale() == 32.0
    second.fit(batches[2:], verbose=0)
    for ours, theirs in zip(second.network.state_dict().values(), whole.network.state_dict().values(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


class Recorder(Callback):
    """Writes down what it is told, with the names of what the logs hold."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, ...]] = []
        for name in dir(Callback):
            if name.startswith("on_"):
                setattr(self, name, lambda *args, name=name: self.seen.append((name, *args[:-1], sorted(args[-1]))))


def test_callbacks_hear_of_everything_in_order() -> None:
    batches, fit, others = [(torch.randn(4, 8, 8), torch.randint(10, (4,)))], Recorder(), Recorder()
    model = prepared("O0")
    model.fit(batches, batches, verbose=0, callbacks=fit)
    after = ["MulticlassAccuracy", "eval_MulticlassAccuracy", "eval_loss", "loss"]
    assert fit.params == {"epochs": 1, "steps": 1}
    assert fit.model is model
    evaluation = [
        ("on_eval_begin", []),
        ("on_eval_batch_end", 0, ["loss"]),
        ("on_eval_end", ["MulticlassAccuracy", "loss"]),
    ]
    assert fit.seen == [
        ("on_train_begin", []),
        ("on_epoch_begin", 0, []),
        ("on_train_batch_begin", 0, []),
        ("on_train_batch_end", 0, ["loss"]),
        *evaluation,
        ("on_epoch_end", 0, after),
        ("on_train_end", after),
    ]
    model.evaluate(batches, verbose=0, callbacks=[others])
    model.predict(batches, verbose=0, callbacks=others)
    prediction = [("on_predict_begin", []), ("on_predict_batch_end", 0, ["outputs"]), ("on_predict_end", [])]
    assert others.seen == [*evaluation, *prediction]


@pytest.mark.parametrize("after", ["batch", "epoch"])
def test_a_callback_ends_the_training(after: str) -> None:
    class Stop(Recorder):
        def __init__(self) -> None:
            super().__init__()
            event = "on_train_batch_end" if after == "batch" else "on_epoch_end"
            setattr(self, event, lambda *args: setattr(self.model, "stop_training", True))

    batches, stop = [(torch.randn(4, 8, 8), torch.randint(10, (4,)))] * 3, Stop()
    model = prepared("O0")
    model.fit(batches, epochs=4, verbose=0, callbacks=stop)
    seen = [event[0] for event in stop.seen]
    assert seen.count("on_train_batch_begin") == (1 if after == "batch" else 3)
    assert (seen.count("on_epoch_begin"), seen[-1]) == (1, "on_train_end")
    model.fit(batches, verbose=0, callbacks=(again := Recorder()))
    assert len([event for event in again.seen if event[0] == "on_train_batch_end"]) == 3, "it trains again"


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_evaluation_has_the_precision_of_training_and_the_loss_is_fp32(level: str) -> None:
    dtypes: list[tuple[bool, torch.dtype]] = []
    losses: list[torch.dtype] = []
    model = halfstep.Model(network())
    model.network.register_forward_hook(lambda net, args, out: dtypes.append((net.training, out.dtype)))

    def loss(out: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        losses.append(out.dtype)
        return nn.functional.cross_entropy(out, label)

    model.prepare(torch.optim.SGD(model.parameters(), 0.1), loss, amp_configs={"level": level, "dtype": "float16"})
    batches = [(torch.randn(4, 8, 8), torch.randint(10, (4,)))]
    model.fit(batches, verbose=0)
    model.evaluate(batches, verbose=0)
    model.predict(batches, verbose=0)
    assert dtypes == [(True, torch.float16), (False, torch.float16), (False, torch.float16)]
    assert losses == [torch.float32] * 2


def test_a_window_is_one_batch_of_all_its_samples() -> None:
    """Batches of 4, 4 and 1: each sample weighs the same."""
    x, y = torch.randn(9, 8, 8), torch.randint(10, (9,))
    whole, parts = prepared("O0"), prepared("O0")
    whole.fit([(x, y)], verbose=0)
    parts.fit(TensorDataset(x, y), batch_size=4, accumulate_grad_batches=3, shuffle=False, verbose=0)
    torch.testing.assert_close([*parts.parameters()], [*whole.parameters()], rtol=1e-6, atol=1e-7)


def test_metrics_and_their_names() -> None:
    import torchmetrics  # takes seconds, see support/digits.py

    batches = [(torch.randn(4, 8, 8), torch.randint(10, (4,)))]
    model, loss = halfstep.Model(network()), nn.CrossEntropyLoss()
    model.prepare(None, loss, [accuracy(), accuracy()])
    assert sorted(model.evaluate(batches, verbose=0)) == ["MulticlassAccuracy", "MulticlassAccuracy_1", "loss"]
    model.prepare(None, loss, {"top1": accuracy()})
    assert sorted(model.evaluate(batches, verbose=0)) == ["loss", "top1"]
    model.prepare(None, loss, torchmetrics.MetricCollection({"a": accuracy(), "b": accuracy()}))
    assert sorted(model.evaluate(batches, verbose=0)) == ["a", "b", "loss"]
    assert model.evaluate([], verbose=0) == {}
    with pytest.raises(ArgumentTypeError, match="int does not"):
        model.prepare(None, loss, [3])


def set_columns(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    """Make the terminal so wide. Bars are on rich's own console, which may have been made by another test."""
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr("rich._console", None)


def test_bars_and_lines(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_columns(monkeypatch, 200)
    data, model = TensorDataset(torch.randn(12, 8, 8), torch.randint(10, (12,))), prepared("O0")
    model.fit(data, data, epochs=2, batch_size=4, verbose=1)
    model.evaluate(data, batch_size=4)
    model.predict(data, batch_size=4)
    shown = capsys.readouterr().out
    for text in ("epoch 1/2", "epoch 2/2", "3/3", "eval_MulticlassAccuracy", "evaluate", "predict"):
        assert text in shown
    with caplog.at_level(logging.INFO, logger="halfstep"):
        model.fit(data, batch_size=4, log_freq=2, verbose=2)
    assert [r.getMessage().rpartition(" loss")[0] for r in caplog.records] == [
        "epoch 1 step 0",
        "epoch 1 step 2",
        "epoch 1",
    ]
    model.fit(data, verbose=0)
    assert capsys.readouterr().out == ""


def test_lines_are_seen_where_nobody_set_up_logging(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logging.root, "handlers", [])
    data = TensorDataset(torch.randn(12, 8, 8), torch.randint(10, (12,)))
    prepared("O0").fit(data, batch_size=4, log_freq=2, verbose=2)
    lines = capsys.readouterr().err.splitlines()
    assert [line.rpartition(" loss")[0] for line in lines] == ["epoch 1 step 0", "epoch 1 step 2", "epoch 1"]


@pytest.mark.parametrize("columns", [20, 80])
def test_no_result_is_cut_off_where_the_line_is_short(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_columns(monkeypatch, columns)
    data, model = TensorDataset(torch.randn(12, 8, 8), torch.randint(10, (12,))), prepared("O0")
    model.fit(data, data, epochs=2, batch_size=4)
    _, first, _, second = capsys.readouterr().out.splitlines()
    names = ["loss", "MulticlassAccuracy", "eval_loss", "eval_MulticlassAccuracy"]
    for line in (first, second):
        assert line.split()[::2] == names
        assert all(float(value) >= 0 for value in line.split()[1::2])


LABELS: dict[str, Any] = {"int": int, "tensor of no dimensions": torch.tensor, "numpy number": np.int64}


@pytest.mark.parametrize("kind", LABELS)
def test_a_list_of_samples_is_a_dataset(kind: str) -> None:
    images, labels = torch.randn(12, 8, 8), torch.randint(10, (12,))
    samples = [(image, LABELS[kind](label)) for image, label in zip(images, labels.tolist(), strict=True)]
    trained = []
    for data in (samples, tuple(samples), TensorDataset(images, labels)):
        model, recorder = prepared("O0"), Recorder()
        model.fit(data, data, batch_size=4, shuffle=False, verbose=0, callbacks=recorder)
        assert [event[1] for event in recorder.seen if event[0] == "on_train_batch_end"] == [0, 1, 2]
        trained.append(model.network[1].weight)
    assert torch.equal(trained[0], trained[2])
    assert torch.equal(trained[1], trained[2])


def test_a_list_of_batches_is_a_loader() -> None:
    model, recorder = prepared("O0"), Recorder()
    model.fit([(torch.randn(4, 8, 8), torch.randint(10, (4,)))] * 3, batch_size=2, verbose=0, callbacks=recorder)
    assert [event[1] for event in recorder.seen if event[0] == "on_train_batch_end"] == [0, 1, 2]


class Failing(Dataset[Any]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> Any:
        if i == 3:
            raise KeyError("a broken file")
        return torch.randn(8, 8), 1


class CannotClose(Callback):
    def close(self) -> None:
        raise OSError("the disk is full")


def test_a_failure_comes_through_and_leaves_the_terminal_and_the_optimizer_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = prepared("O0")
    with pytest.raises(KeyError, match="a broken file"):
        model.fit(Failing(), shuffle=False, callbacks=[CannotClose(), halfstep.model.CheckPrecision()])
    optimizer: Any = model.optimizer
    assert not optimizer._optimizer_step_pre_hooks
    with pytest.raises(OSError, match="the disk is full"):
        model.evaluate([], verbose=0, callbacks=CannotClose())
    model.evaluate([(torch.randn(4, 8, 8), torch.randint(10, (4,)))])  # a second live display would be refused
    assert "evaluate" in capsys.readouterr().out


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        yield from ((torch.randn(8, 8), torch.tensor(1)) for _ in range(6))


def test_a_stream_has_no_length() -> None:
    model, recorder = prepared("O0"), Recorder()
    model.fit(Stream(), batch_size=4, verbose=1, callbacks=recorder)
    assert [event[1] for event in recorder.seen if event[0] == "on_train_batch_end"] == [0, 1]


def test_saving_is_all_or_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = prepared("O1")
    model.save(tmp_path / "new" / "model")
    before = (tmp_path / "new" / "model.pt").read_bytes()

    def interrupted(state: Any, file: Any) -> None:
        file.write(b"half of")
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", interrupted)
    with pytest.raises(KeyboardInterrupt):
        model.save(tmp_path / "new" / "model")
    assert (tmp_path / "new" / "model.pt").read_bytes() == before
    monkeypatch.undo()
    model.save(tmp_path / "new" / "model")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["model.pt"]


def test_summary(capsys: pytest.CaptureFixture[str]) -> None:
    model = halfstep.Model(network())
    model.network[1].weight.requires_grad_(False)
    model.prepare(None, None, amp_configs={"level": "O2", "dtype": "bfloat16"})
    found = model.summary((2, 8, 8))
    assert (found["total_params"], found["trainable_params"]) == (64 * 32 + 32 + 320 + 10, 32 + 320 + 10)
    assert [layer["output_shape"] for layer in found["layers"]] == [(2, 64), (2, 32), (2, 32), (2, 10)]
    assert [layer["dtype"] for layer in found["layers"]] == [None, "bfloat16", None, "bfloat16"]
    assert [layer["params"] for layer in found["layers"]] == [0, 2080, 0, 330]
    shown = capsys.readouterr().out
    assert "2,410 parameters, 362 of them trainable" in shown
    assert "[2, 10]" in shown
    assert model.network.training
    assert model.summary(verbose=0)["layers"][1]["output_shape"] is None
    assert capsys.readouterr().out == ""


# ---- against the recording of Paddle

SCALER = {
    "init_loss_scaling": 512.0,
    "incr_ratio": 3.0,
    "decr_ratio": 0.25,
    "incr_every_n_steps": 7,
    "decr_every_n_nan_or_inf": 3,
    "use_dynamic_loss_scaling": True,
}
TUTORIAL = {"level": "O1", "custom_white_list": {"conv2d"}, "use_dynamic_loss_scaling": True}
CONFIGS: dict[str, Any] = {
    "None": None,
    "{}": {},
    **{repr(level): level for level in ("O0", "O1", "O2", "O3", "OD", "o1")},
    **{f"{{'level': '{level}'}}": {"level": level} for level in ("O3", "OD", "o1")},
    "no level, init_loss_scaling": {"init_loss_scaling": 512.0},
    "all scaler keys": SCALER,
    "tutorial": TUTORIAL,
    "unknown key": {"foo": 1},
    "two unknown keys": {"foo": 1, "bar": 2},
    **{key: {key: True} for key in ("dtype", "enable", "use_promote", "master_weight", "use_pure_fp16")},
    "use_fp16_guard": {"use_fp16_guard": True},
    "custom_black_varnames": {"custom_black_varnames": ["x"]},
    "level O0 with unknown key": {"level": "O0", "foo": 1},
    "white and black overlap": {"level": "O1", "custom_white_list": ["relu"], "custom_black_list": ["relu"]},
    "a list": ["O1"],
    "True": True,
    "1": 1,
}
DEPARTURES = {
    "dtype": "bfloat16 is there to be chosen",
    "custom_black_varnames": "has no effect in dynamic mode: refused instead of ignored",
    "level O0 with unknown key": "a misspelt key is refused at every level",
}


def test_every_recorded_configuration_is_here() -> None:
    assert CONFIGS.keys() == RECORDED["validation"].keys()
    assert DEPARTURES.keys() <= CONFIGS.keys()


@pytest.mark.parametrize("name", CONFIGS)
def test_configs_are_read_as_paddle_reads_them(name: str) -> None:
    recorded = RECORDED["validation"][name]
    if (name in DEPARTURES) != ("raises" in recorded):
        with pytest.raises(halfstep.HalfstepError) as refusal:
            read_configs(CONFIGS[name])
        if recorded.get("raises") == "ValueError":
            assert isinstance(refusal.value, ValueError)
            if "level" in name or name.startswith("'"):
                assert recorded["message"].rstrip(".") in str(refusal.value)
        for word in ("foo", "bar"):
            assert (word in str(recorded)) <= (word in str(refusal.value))
        return
    level, found = read_configs(CONFIGS[name])
    if name not in DEPARTURES:
        assert level == recorded["level"]
        lists = {key: sorted(value) for key, value in found.items() if "list" in key}
        assert lists == recorded["lists"]
        assert {k: str(v) for k, v in found.items() if k not in lists} == recorded["scaler configs"]


@pytest.mark.parametrize(
    ("options", "seen"),  # of each epoch, the sizes of its batches
    [
        ({}, [[4, 4, 2], [4, 4, 2]]),
        ({"drop_last": True}, [[4, 4], [4, 4]]),
        ({"num_iters": 2}, [[4, 4]]),
        ({"num_iters": 4}, [[4, 4, 2], [4]]),
        ({"num_iters": 4, "accumulate_grad_batches": 2}, [[4, 4, 2], [4]]),
        ({"num_iters": 4, "drop_last": True}, [[4, 4], [4, 4]]),
        ({"num_iters": 100}, [[4, 4, 2], [4, 4, 2]]),
    ],
)
def test_fit_ends_after_so_many_batches(options: dict[str, Any], seen: list[list[int]]) -> None:
    sizes: list[list[int]] = []
    net = network()
    net.register_forward_pre_hook(lambda module, args: sizes[-1].append(len(args[0])))

    class Epochs(Callback):
        def on_epoch_begin(self, epoch: int, logs: Any) -> None:
            sizes.append([])

    model = halfstep.Model(net)
    model.prepare(torch.optim.SGD(net.parameters(), lr=0.1), nn.CrossEntropyLoss())
    data = TensorDataset(torch.randn(10, 8, 8), torch.randint(10, (10,)))
    model.fit(data, epochs=2, batch_size=4, verbose=0, callbacks=Epochs(), **options)
    assert sizes == seen
    sizes.append([])
    shown = Recorder()
    model.evaluate(data, batch_size=4, verbose=0, callbacks=shown, num_iters=options.get("num_iters"))
    assert sizes[-1] == [4, 4, 2][: options.get("num_iters")]
    assert shown.params["steps"] == len(sizes[-1])


def test_outputs_can_be_stacked() -> None:
    two = Applies(lambda x: (x, x.sum(1)))
    x = torch.randn(10, 3)
    for net, expected in ((nn.Identity(), [x]), (two, [x, x.sum(1)])):
        found = halfstep.Model(net).predict(TensorDataset(x), batch_size=4, stack_outputs=True, verbose=0)
        assert_equal(found, expected)
    assert len(halfstep.Model(two).predict(TensorDataset(x), batch_size=4, verbose=0)) == 3
    with pytest.raises(halfstep.HalfstepError, match="stack_outputs=True needs a network whose outputs are tensors"):
        halfstep.Model(Applies(torch.mean)).predict([x], stack_outputs=True, verbose=0)


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_weights_that_do_not_match_can_be_skipped(level: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved = prepared(level)
    saved.save(tmp_path / "x")
    body = saved.network[1].weight
    for head in (nn.Linear(32, 3), nn.Sequential(nn.Linear(32, 10))):  # another shape, other names
        net = nn.Sequential(nn.Flatten(1), nn.Linear(64, 32), nn.Tanh(), head)
        model = halfstep.Model(net)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        model.prepare(optimizer, nn.CrossEntropyLoss(), amp_configs=level)
        before = [p.clone() for p in head.parameters()]
        with pytest.raises(halfstep.HalfstepError, match=r"x.pt does not match this network: .*Nothing was loaded"):
            model.load(tmp_path / "x")
        assert not torch.equal(net[1].weight, body)
        caplog.clear()
        model.load(tmp_path / "x", skip_mismatch=True)
        assert torch.equal(net[1].weight, body)
        assert all(map(torch.equal, head.parameters(), before))
        (line,) = [record.getMessage() for record in caplog.records]
        assert re.search(r"3\S*\.weight has shape .* These weights, the optimizer and the loss scaler stay", line)
        assert not optimizer.state


@pytest.mark.parametrize("name", RECORDED["scales"])
def test_scales_move_as_paddles_do(name: str) -> None:
    configs = {"level": "O1", "dtype": "float16", "init_loss_scaling": 256.0, "incr_every_n_steps": 2}
    if "static" in name:
        configs = {**configs, "init_loss_scaling": 128.0, "use_dynamic_loss_scaling": False}
    scales: list[float] = []

    class Watch(Callback):
        def on_train_batch_end(self, step: int, logs: Any) -> None:
            scales.append(self.model.scaler.get_scale())

    batches = [(torch.randn(4, 8, 8), torch.randint(10, (4,))) for _ in range(3)]
    window = 2 if "accumulate" in name else 1
    prepared(configs).fit(batches, epochs=2, verbose=0, callbacks=Watch(), accumulate_grad_batches=window)
    assert scales == RECORDED["scales"][name]


def test_what_was_prepared_can_be_read() -> None:
    model = halfstep.Model(network())
    assert model.optimizer is None
    assert not model.scaler.is_enabled()
    optimizer = torch.optim.SGD(model.network.parameters(), lr=0.1)
    model.prepare(optimizer, nn.CrossEntropyLoss(), amp_configs={"level": "O2", "dtype": "float16"})
    assert model.optimizer is optimizer
    assert model.scaler.is_enabled()
