"""Programs on disk: what an inference needs of one, and that nothing in a file is unpickled."""

from __future__ import annotations

import io
import json
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from halfstep import static
from halfstep.core.errors import ArgumentValueError, UsageError


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Dropout(0.5), nn.Flatten(), nn.Linear(144, 3)
    )


def trained(level: str = "O1") -> tuple[nn.Module, static.Program]:
    """A model in training mode and its program, after two steps."""
    model, inputs = network(), (torch.randn(4, 1, 8, 8), torch.randint(3, (4,)))
    program = static.capture(model, nn.CrossEntropyLoss(), inputs)
    optimizer = static.amp.decorate(torch.optim.SGD(model.parameters(), lr=0.1), level=level, dtype="bfloat16")
    optimizer.minimize(program.loss)
    for _ in range(2):
        static.Executor().run(program, dict(zip(program.feed_names, inputs, strict=True)))
    return model, program


# ---- saving for inference


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_the_saved_model_is_the_trained_one_in_evaluation_mode(level: str, tmp_path: Path) -> None:
    model, program = trained(level)
    executor = static.Executor()
    static.save_inference_model(tmp_path / "net", "input", program.outputs, executor)
    assert [each.name for each in tmp_path.iterdir()] == ["net.pt2"]
    loaded, feed_names, targets = static.load_inference_model(tmp_path / "net", executor)
    x = torch.randn(7, 1, 8, 8)  # another batch size
    (found,) = executor.run(loaded, feed={feed_names[0]: x}, fetch_list=targets)
    torch.testing.assert_close(found, model.float().eval()(x).detach(), atol=1e-2 if level == "O2" else 1e-6, rtol=0)
    assert {p.dtype for p in loaded.parameters()} == {torch.float32}
    before = {name: value.clone() for name, value in loaded.graph_module.state_dict().items()}
    assert torch.equal(executor.run(loaded, feed={feed_names[0]: x}, fetch_list=targets)[0], found)
    assert all(torch.equal(value, before[name]) for name, value in loaded.graph_module.state_dict().items())
    with pytest.raises(UsageError, match="captured without a loss"):
        assert loaded.loss


@pytest.mark.exhaustive
def test_torch_reads_the_file_without_halfstep(tmp_path: Path) -> None:
    model, program = trained()
    static.save_inference_model(tmp_path / "net", ["input"], program.outputs[0])
    x = torch.randn(2, 1, 8, 8)
    exported = torch.export.load(tmp_path / "net.pt2")
    torch.testing.assert_close(exported.module()(x)[0], model.eval()(x))
    assert not exported.example_inputs[0][0].any(), "what the program was captured with is not in the file"


@pytest.fixture
def static_mode() -> Any:
    static.enable_static()
    yield
    static.disable_static()


def test_what_paddle_s_names_save_in_static_mode(static_mode: Any, tmp_path: Path) -> None:
    model, exe = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)), static.Executor("cpu")
    with static.program_guard(static.Program()):
        image = static.data(name="img", shape=[None, 4], dtype="float32")
        label = static.data(name="label", shape=[None, 2], dtype="float32")
        predict = model(image)
        scaled = predict * 2
        loss = nn.MSELoss()(predict, label)
        torch.optim.SGD(model.parameters(), lr=0.1).minimize(loss)
    static.save_inference_model(str(tmp_path / "fit_a_line"), [image], [predict, scaled], exe)
    program, names, targets = static.load_inference_model(str(tmp_path / "fit_a_line"), exe)
    assert names == ["img"]
    x = torch.randn(5, 4)
    found, doubled = exe.run(program, feed={names[0]: x}, fetch_list=targets)
    torch.testing.assert_close(found, model(x).detach())
    torch.testing.assert_close(doubled, 2 * found)


class Stochastic(nn.Module):
    """One of each kind of op that computes otherwise in training."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True)
        self.lstm = nn.LSTM(8, 8, num_layers=2, dropout=0.5, batch_first=True)
        self.norm = nn.InstanceNorm1d(4, track_running_stats=True)
        self.alpha, self.leaky = nn.AlphaDropout(0.5), nn.RReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.attention(x, x, x, need_weights=False)[0]
        return self.leaky(self.alpha(self.norm(self.lstm(x)[0])))


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:The tensor attributes")  # torch.export on an LSTM
def test_no_op_computes_as_in_training(tmp_path: Path) -> None:
    model, x = Stochastic(), torch.randn(3, 4, 8)
    program = static.capture(model, None, [x])
    static.save_inference_model(tmp_path / "net", ["x"], program.outputs)
    loaded, _, targets = static.load_inference_model(tmp_path / "net")
    (found,) = static.Executor().run(loaded, {"x": x}, targets)
    torch.testing.assert_close(found, model.eval()(x).detach())


def test_inputs_come_in_the_order_that_is_asked_for(tmp_path: Path) -> None:
    class Net(nn.Module):
        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return a - 2 * b

    program = static.capture(Net(), None, [torch.randn(2), torch.randn(2)])
    static.save_inference_model(tmp_path / "net", ["b", "a"], program.outputs)
    loaded, names, targets = static.load_inference_model(tmp_path / "net")
    assert names == ["b", "a"]
    assert static.Executor().run(loaded, {"a": torch.ones(2), "b": torch.zeros(2)}, targets)[0].tolist() == [1, 1]


# ---- nothing is unpickled


UNPICKLED: list[int] = []


class Attack:
    """Pickled, it notes that it was unpickled."""

    def __reduce__(self) -> Any:
        return note, ()


def note() -> nn.Parameter:
    UNPICKLED.append(1)
    return nn.Parameter(torch.zeros(2, 4))


class Labelled(torch.Tensor):
    pass


def pickled() -> bytes:
    return pickle.dumps(Attack())


def torch_pickled() -> bytes:
    buffer = io.BytesIO()
    torch.save(Attack(), buffer)
    return buffer.getvalue()


Files = dict[str, bytes]


def weight(files: Files) -> None:
    config = json.loads(files["data/weights/model_weights_config.json"])
    next(iter(config["config"].values()))["use_pickle"] = True
    files["data/weights/model_weights_config.json"] = json.dumps(config).encode()
    files["data/weights/weight_0"] = torch_pickled()


def constant(path: str, content: Callable[[], bytes]) -> Callable[[Files], None]:
    def change(files: Files) -> None:
        meta = {"path_name": path, "is_param": False, "use_pickle": True, "tensor_meta": None}
        files["data/constants/model_constants_config.json"] = json.dumps({"config": {"c": meta}}).encode()
        files[f"data/constants/{path}"] = content()

    return change


def examples(files: Files) -> None:
    files["data/sample_inputs/model.pt"] = torch_pickled()


def old_weights(files: Files) -> None:
    files["data/weights/model.pt"] = torch_pickled()


def old_archive(files: Files) -> None:
    program = files["models/model.json"]
    files.clear()
    files |= {"version": b"8.14", "serialized_exported_program.json": program}
    files |= {f"serialized_{name}.pt": torch_pickled() for name in ("state_dict", "constants", "example_inputs")}


ATTACKS: dict[str, Callable[[Files], None]] = {
    "weight": weight,
    "tensor constant": constant("tensor_0", torch_pickled),
    "object": constant("opaque_obj_0", pickled),
    "custom object": constant("custom_obj_0", pickled),
    "example inputs": examples,
    "weights as of old": old_weights,
    "archive as of old": old_archive,
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_file_with_pickled_objects_is_refused(attack: str, tmp_path: Path) -> None:
    program = static.capture(nn.Linear(4, 2), None, [torch.randn(3, 4)])
    static.save_inference_model(tmp_path / "net", ["input"], program.outputs)
    path = tmp_path / "net.pt2"
    with zipfile.ZipFile(path) as saved:
        files = {name.partition("/")[2]: saved.read(name) for name in saved.namelist()}
    ATTACKS[attack](files)
    root = "" if attack == "archive as of old" else "archive/"
    with zipfile.ZipFile(path, "w") as changed:
        for name, content in files.items():
            changed.writestr(root + name, content)
    UNPICKLED.clear()
    for load in (static.load, lambda path: static.load_inference_model(path.with_suffix(""))):
        with pytest.raises(ArgumentValueError, match=r"net\.pt2 (was not loaded|is no file)"):
            load(path)
    assert UNPICKLED == []
    if attack == "weight":  # one of them shows that this would be dangerous otherwise
        assert torch.export.load(path)
        assert UNPICKLED == [1]


def test_a_program_of_pickled_tensors_is_not_saved(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("offset", torch.zeros(2).as_subclass(Labelled))
    exported = torch.export.export(model, (torch.randn(3, 2),), strict=False)
    with pytest.raises(UsageError, match=r"torch\.export would pickle offset"):
        static.Program(exported, ["input"]).save(tmp_path / "net.pt2")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", [b"", b"nothing", pickled()], ids=["empty", "text", "pickle"])
def test_other_files_are_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.pt2").write_bytes(content)
    with pytest.raises(ArgumentValueError, match=r"is no file that Program\.save wrote"):
        static.load(tmp_path / "x.pt2")
    with pytest.raises(FileNotFoundError):
        static.load_inference_model(tmp_path / "none")
