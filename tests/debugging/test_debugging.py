"""``amp.debugging`` against what Paddle's prints, returns and raises, and where it is better."""

from __future__ import annotations

import csv
import math
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from halfstep import amp, numerics
from halfstep.amp import debugging
from halfstep.amp.debugging import DebugMode, TensorCheckerConfig
from halfstep.core.errors import ArgumentTypeError, ArgumentValueError, HalfstepError
from halfstep.torch_internals.torch_compat import dispatch_mode_count
from tests.support.apex_recording import golden
from tests.support.worlds import BF16, FP16, FP32, in_a_thread

FACTS = golden("paddle_debugging")


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    yield
    debugging.disable_operator_stats_collection()
    debugging.disable_tensor_checker()
    assert dispatch_mode_count() == 0
    assert compiler_stance() == "default"


def compiler_stance() -> str:
    """The stance in force: torch tells only what was there before another one."""
    probe = torch.compiler.set_stance("default")
    probe.__exit__(None, None, None)
    return probe.prev.stance


def counts_in(text: str) -> dict[str, list[int]]:
    """The rows of a printed table."""
    rows = (line.split("|") for line in text.splitlines() if not line.startswith("<"))
    return {cells[0].strip(): [int(cell) for cell in cells[1:]] for cells in rows}


# ---- operator stats


def conv_relu_softmax(x: torch.Tensor, conv: nn.Module) -> torch.Tensor:
    return torch.softmax(torch.relu(conv(x)).flatten(1), -1).sum()


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_counts_are_paddles(level: str, capsys: pytest.CaptureFixture[str]) -> None:
    conv: Any = nn.Conv2d(3, 4, 3)
    if level == "O2":
        conv = amp.decorate(conv, level="O2", dtype="float16")
    x = torch.randn(2, 3, 8, 8)
    with debugging.collect_operator_stats() as counts:
        with amp.auto_cast(level=level, dtype="float16", emulate=False):
            loss = conv_relu_softmax(x, conv)
        loss.backward()
    printed = capsys.readouterr().out
    assert counts_in(printed) == counts
    recorded = FACTS[f"collect_operator_stats, conv-relu-softmax {level} float16, with backward"]["stdout"]
    theirs = counts_in("\n".join(recorded))
    # At O1 theirs adds a bias in fp32, and at O2 a sum in float16 gives an fp32 number here.
    ops = ["conv2d", "softmax", "relu" if level == "O2" else "reduce_sum"]
    assert {op: counts[op] for op in ops} == {op: theirs[op] for op in ops}


def test_the_table_is_paddles(capsys: pytest.CaptureFixture[str]) -> None:
    recorded = FACTS["collect_operator_stats, conv-relu-softmax O1 float16, with backward"]["stdout"]
    with debugging.collect_operator_stats() as counts:
        counts.update(counts_in("\n".join(recorded)))
    assert capsys.readouterr().out.splitlines() == recorded


def test_casts_are_counted_by_the_dtype_before() -> None:
    with debugging.collect_operator_stats() as counts:
        torch.ones(2).to(FP16).to(BF16).to(FP32).to(FP32)
    assert counts["cast"] == [1, 1, 1, 0]


def test_names_are_paddles_where_they_have_one_there() -> None:
    x = torch.randn(2, 4)
    with debugging.collect_operator_stats() as counts:
        nn.Linear(4, 4)(x), x @ x.T, x + x, x - x, x * x, x / (x + 1), F.layer_norm(x, (4,)), F.gelu(x)
        F.embedding(torch.tensor([0]), x), x.T, x.to(torch.int64) + 1, torch.special.i0(x)
    names = set(counts) - {"uniform_random"}
    assert names == {
        *("linear_v2", "matmul_v2", "elementwise_add", "elementwise_sub", "elementwise_mul", "elementwise_div"),
        *("layer_norm", "gelu", "lookup_table_v2", "cast", "i0"),
    }
    assert counts["elementwise_add"] == [0, 0, 2, 1]


def test_the_backward_pass_is_not_counted() -> None:
    x = torch.randn(3, requires_grad=True)
    loss = x.exp().sum()
    with debugging.collect_operator_stats() as counts:
        loss.backward()
    assert counts.keys() <= {"fill_any_like"}  # of the gradient that the backward pass begins with


def test_disable_without_enable_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    debugging.disable_operator_stats_collection()
    assert capsys.readouterr().out == ""


def test_enabled_twice_is_one_collection(capsys: pytest.CaptureFixture[str]) -> None:
    debugging.enable_operator_stats_collection()
    debugging.enable_operator_stats_collection()
    torch.ones(2).exp()
    debugging.disable_operator_stats_collection()
    assert counts_in(capsys.readouterr().out)["exp"] == [0, 0, 1, 0]


def test_an_error_ends_the_collection(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyError), debugging.collect_operator_stats():
        {}[torch.ones(2).exp()]
    assert "exp" in capsys.readouterr().out
    assert dispatch_mode_count() == 0


def test_a_block_in_a_block_and_one_in_another_thread_count_for_themselves() -> None:
    def other() -> None:
        with debugging.collect_operator_stats() as found:
            torch.ones(2).tan()
        in_thread.update(found)

    in_thread: dict[str, list[int]] = {}
    with debugging.collect_operator_stats() as outer:
        in_a_thread(other)
        with debugging.collect_operator_stats() as inner:
            torch.ones(2).exp()
        torch.ones(2).sin()
    assert [set(counts) & {"tan", "exp", "sin"} for counts in (in_thread, inner, outer)] == [
        {"tan"}, {"exp"}, {"exp", "sin"},
    ]  # fmt: skip
    assert dispatch_mode_count() == 0


def test_compiled_modules_are_counted_op_by_op() -> None:
    compiled = torch.compile(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), backend="eager")
    x = torch.randn(2, 4)
    compiled(x)
    with debugging.collect_operator_stats() as counts:
        compiled(x)
    assert counts == {"linear_v2": [0, 0, 1, 0], "tanh": [0, 0, 1, 0]}


# ---- check_numerics


VALUES = {
    "finite": [3.0, 0.0, 1.0],
    "nan and inf": [math.nan, math.inf, 0.0, 1.0, -2.0],
    "beyond float16 range": [1e5, 1e-9, 1.0],
}


def recorded(name: str) -> tuple[Any, list[str]]:
    fact = FACTS[name]
    return (fact["returns"], fact["C++ prints"]) if isinstance(fact, dict) else (fact, [])


def parsed(line: str) -> tuple[str, list[float]]:
    """The line without the values of its tensor, and these: Paddle adds them up in another order."""
    text, *values = re.split(r"(?:max|min|mean)=([^,]+)", line)
    return text, [float(value) for value in values[::2]]


@pytest.mark.parametrize("mode", list(DebugMode))
@pytest.mark.parametrize("kind", VALUES)
def test_check_numerics(mode: DebugMode, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    tensor = torch.tensor(VALUES[kind])
    returned, printed = recorded(f"check_numerics {mode.name} {kind}")
    if isinstance(returned, dict):
        with pytest.raises(HalfstepError, match=f"^{re.escape(returned['message'])}$"):
            debugging.check_numerics(tensor, "my_op", "my_var", mode)
    else:
        counts, numbers = debugging.check_numerics(tensor, "my_op", "my_var", mode)
        assert (counts.dtype, numbers.dtype) == (torch.int64, FP32)
        assert counts.tolist() == returned[0]
        expected = torch.tensor([float(value) for value in returned[1]])
        torch.testing.assert_close(numbers, expected, rtol=1e-6, atol=0, equal_nan=True)
    assert list(map(parsed, capsys.readouterr().out.splitlines())) == [
        (text, pytest.approx(numbers, rel=1e-6, nan_ok=True)) for text, numbers in map(parsed, printed)
    ]


@pytest.mark.parametrize(("dtype", "name"), [(FP16, "float16"), (BF16, "bfloat16")])
def test_check_numerics_in_16_bits(dtype: torch.dtype, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    tensor = torch.tensor(VALUES["nan and inf"], dtype=dtype)
    debugging.check_numerics(tensor, "my_op", "my_var", DebugMode.CHECK_NAN_INF)
    assert capsys.readouterr().out.splitlines() == recorded(f"check_numerics {name} input")[1]


def test_check_numerics_of_nothing_and_of_nan_only() -> None:
    counts, _ = debugging.check_numerics(torch.empty(0), "op", "name")
    assert counts.tolist() == [0, 0, 0]
    counts, numbers = debugging.check_numerics(torch.tensor([math.nan]), "op", "name", DebugMode.CHECK_NAN_INF)
    assert counts.tolist() == [1, 0, 0]
    assert numbers[2].isnan()


def test_zeros_have_no_sign(capsys: pytest.CaptureFixture[str]) -> None:
    counts, _ = debugging.check_numerics(torch.tensor([-0.0, -0.0]), "op", "name", DebugMode.CHECK_ALL)
    assert counts.tolist() == [0, 0, 2]
    assert "num_zero=2, max=0.000000e+00, min=0.000000e+00, mean=0.000000e+00" in capsys.readouterr().out


def test_modes_are_paddles() -> None:
    assert {mode.name: mode.value for mode in DebugMode} == FACTS["DebugMode"]


# ---- the tensor checker


def pow_divide_sum() -> None:
    """What was recorded: a power, a division by 0, a sum, and its backward pass."""
    x = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    (x ** torch.tensor([1.0, 0.0, 0.5]) / torch.tensor([0.0, 1.0, 1.0])).sum().backward()


@pytest.mark.parametrize("mode", list(DebugMode))
def test_lines_are_paddles(mode: DebugMode, capsys: pytest.CaptureFixture[str]) -> None:
    fact = FACTS[f"TensorCheckerConfig {mode.name}, pow then divide by zero, backward"]
    debugging.enable_tensor_checker(TensorCheckerConfig(True, mode))
    if mode is DebugMode.CHECK_NAN_INF_AND_ABORT:
        with pytest.raises(HalfstepError, match=f"^{re.escape(fact['returns']['result']['message'])}$"):
            pow_divide_sum()
    else:
        pow_divide_sum()
    debugging.disable_tensor_checker()
    ours = iter(capsys.readouterr().out.splitlines())
    theirs = [line for line in fact["C++ prints"] if "op=sum_grad" not in line]  # a view in torch
    assert all(line in ours for line in theirs), "theirs are among ours, in their order"


def test_no_generator_is_reseeded() -> None:
    torch.manual_seed(5), random.seed(5)
    before = torch.get_rng_state(), random.getstate()
    debugging.enable_tensor_checker(TensorCheckerConfig(True))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]


def test_debug_step_works_also_from_1() -> None:
    def checking(debug_step: list[int], calls: int) -> list[bool]:
        config = TensorCheckerConfig(True, debug_step=debug_step)
        found = []
        for _ in range(calls):
            debugging.enable_tensor_checker(config)
            found.append(dispatch_mode_count() > 0)
        return found

    theirs = FACTS["debug_step=[0,2] over four enable calls"]["result"]
    assert checking([0, 2], 4) == [row[1] for row in theirs]
    assert checking([1, 3], 5) == [False, True, True, False, False]  # Paddle never checks


def test_it_can_be_off() -> None:
    debugging.enable_tensor_checker(TensorCheckerConfig(False))
    assert torch.ones(1).div(0).isinf()


def test_a_new_config_takes_the_place_of_the_old_one(capsys: pytest.CaptureFixture[str]) -> None:
    for checked in (["exp"], ["log"]):  # in Paddle the lists add up, for the whole process
        debugging.enable_tensor_checker(TensorCheckerConfig(True, DebugMode.CHECK_ALL, checked_op_list=checked))
        torch.ones(1).exp().log()
    debugging.disable_tensor_checker()
    torch.ones(1).exp()
    assert re.findall(r"op=(\w+)", capsys.readouterr().out) == ["exp", "log"]


@pytest.mark.parametrize("name", ["elementwise_div", "divide", "div", "aten::div.Tensor"])
def test_lists_take_the_names_of_lists_and_of_logs(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    debugging.enable_tensor_checker(TensorCheckerConfig(True, skipped_op_list=[name, "sum"], checked_op_list=None))
    (torch.ones(2, requires_grad=True) / 0).sum().backward()
    debugging.enable_tensor_checker(TensorCheckerConfig(True, DebugMode.CHECK_NAN_INF, checked_op_list=[name]))
    (torch.ones(2, requires_grad=True) / 0).sum().backward()
    assert set(re.findall(r"op=(\w+)", capsys.readouterr().out)) == {"divide", "divide_grad"}


@pytest.mark.parametrize("name", ["elementwise_div_grad", "divide_grad", "div_grad"])
def test_lists_take_the_names_of_gradients_as_logs_have_them(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The example of Paddle's own documentation checks elementwise_pow_grad."""
    for lists, seen in (
        ({"checked_op_list": [name]}, {"divide_grad"}),
        ({"skipped_op_list": [name]}, {"divide", "sum"}),
    ):
        debugging.enable_tensor_checker(TensorCheckerConfig(True, DebugMode.CHECK_NAN_INF, **lists))
        (torch.ones(2, requires_grad=True) / 0).sum().backward()
        assert set(re.findall(r"op=(\w+)", capsys.readouterr().out)) == seen


@pytest.mark.parametrize(
    ("options", "error", "name"),
    [
        ({"debug_step": 3}, ArgumentValueError, "debug_step=3"),
        ({"checked_op_list": "relu"}, ArgumentValueError, "checked_op_list='relu'"),
        ({"skipped_op_list": "relu"}, ArgumentValueError, "skipped_op_list='relu'"),
        ({"stack_height_limit": "x"}, ArgumentValueError, "stack_height_limit='x'"),
        ({"debug_step": [2, 1]}, ArgumentValueError, None),  # Paddle's has no message
        ({"debug_mode": 1}, ArgumentTypeError, None),  # Paddle's says that an int has no name
        ({"checked_op_list": ["rleu"]}, ArgumentValueError, None),
        ({"checked_op_list": ["rleu_grad"]}, ArgumentValueError, None),
    ],
)
def test_other_values_are_refused(options: dict[str, Any], error: type[Exception], name: str | None) -> None:
    fact = FACTS.get(name, {})
    theirs = fact.get("result", fact).get("message", "")
    ours = r"debug_mode must be a DebugMode|Did you mean 'relu'|debug_step=\[2, 1\] must be \(start, end\)"
    with pytest.raises(error, match=re.escape(theirs) or ours):
        TensorCheckerConfig(True, **options)


def test_after_an_error_nothing_is_checked() -> None:
    debugging.enable_tensor_checker(TensorCheckerConfig(True))
    with pytest.raises(HalfstepError, match="op=divide"):
        torch.ones(2) / 0
    assert (torch.ones(2) / 0).isinf().all()


@pytest.mark.parametrize(("level", "dtype"), [("O1", "bfloat16"), ("O2", "bfloat16"), ("O1", "float16")])
def test_the_op_that_overflows_is_named_under_amp(level: str, dtype: str) -> None:
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    with torch.no_grad():
        model[2].weight.fill_(3e38 if dtype == "bfloat16" else 6e4)
        model[0].bias.fill_(100.0)
    if level == "O2":
        model = amp.decorate(model, level="O2", dtype=dtype)
    debugging.enable_tensor_checker(TensorCheckerConfig(True))
    with pytest.raises(HalfstepError, match=r"num_inf=2, .*op=linear, tensor=, dtype=(bf16|fp16|fp32)\]"):
        with amp.auto_cast(level=level, dtype=dtype, emulate=False):
            model(torch.ones(2, 4))
    debugging.disable_tensor_checker()


def test_lines_go_to_a_file_for_each_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "logs" / "fp32"
    debugging.enable_tensor_checker(TensorCheckerConfig(True, DebugMode.CHECK_ALL, output_dir=str(folder)))
    torch.ones(2).exp()
    debugging.disable_tensor_checker()
    assert [path.name for path in folder.iterdir()] == FACTS["files written"]["fp32"]
    assert "op=exp" in (folder / "worker_cpu").read_text()
    assert capsys.readouterr().out == ""


def test_memory_that_has_no_values_yet_is_not_checked() -> None:
    debugging.enable_tensor_checker(TensorCheckerConfig(True))
    for _ in range(20):
        torch.empty(1000)
        torch.empty_like(torch.empty(10))
    assert dispatch_mode_count() == 1


# ---- several at once


CHECK_ALL = TensorCheckerConfig(True, DebugMode.CHECK_NAN_INF)
TOOLS = {
    "stats": (debugging.enable_operator_stats_collection, debugging.disable_operator_stats_collection),
    "checker": (lambda: debugging.enable_tensor_checker(CHECK_ALL), debugging.disable_tensor_checker),
}


@pytest.mark.parametrize("first", TOOLS)
def test_the_tool_that_began_first_may_end_first(first: str, capsys: pytest.CaptureFixture[str]) -> None:
    second = next(name for name in TOOLS if name != first)
    TOOLS[first][0]()
    TOOLS[second][0]()
    one = torch.ones(2).exp()
    TOOLS[first][1]()
    assert dispatch_mode_count() == 1
    assert compiler_stance() == "force_eager"
    (one * torch.inf).exp()
    TOOLS[second][1]()
    out = capsys.readouterr().out
    assert counts_in(out)["exp"] == [0, 0, 1 if first == "stats" else 2, 0]
    assert ("op=exp" in out) == (first == "stats")


@pytest.mark.parametrize("order", [("checker", "stats"), ("stats", "checker")])
def test_the_ops_of_a_checker_are_in_no_table(order: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    x = torch.ones(2)
    for name in order:
        TOOLS[name][0]()
    x.exp()
    for name in order:
        TOOLS[name][1]()
    assert list(counts_in(capsys.readouterr().out)) == ["exp"]
    debugging.enable_tensor_checker(CHECK_ALL)
    assert [row.op for row in numerics.op_table(x.exp).rows()] == ["exp"]


@pytest.mark.parametrize("name", TOOLS)
def test_a_mode_of_the_user_stays_when_a_tool_beneath_it_ends(name: str) -> None:
    x = torch.ones(2, 2)
    begin, end = TOOLS[name]
    begin()
    with FlopCounterMode(display=False) as flops:
        x.mm(x)
        end()
        assert dispatch_mode_count() == 1
        x.mm(x)
    x.mm(x)
    assert flops.get_total_flops() == 2 * 16


@pytest.mark.parametrize("name", TOOLS)
def test_a_mode_of_the_user_that_ends_before_a_tool_above_it_does_not_stay(name: str) -> None:
    x = torch.ones(2, 2)
    begin, end = TOOLS[name]
    with FlopCounterMode(display=False):
        begin()
        x.mm(x)
    end()
    assert dispatch_mode_count() == 0
    torch._dynamo.reset()  # in a long run of tests its limit of compilations may have been reached
    frames = []
    torch.compile(torch.exp, backend=lambda graph, _: frames.append(graph) or graph.forward)(x)
    assert len(frames) == 1  # torch compiles again


def test_a_collection_may_begin_in_an_op_table_and_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    x = torch.ones(2)
    numerics.op_table(debugging.enable_operator_stats_collection)
    x.exp()
    debugging.disable_operator_stats_collection()
    assert list(counts_in(capsys.readouterr().out)) == ["exp"]


def test_a_stance_that_ended_meanwhile_does_not_come_back() -> None:
    with torch.compiler.set_stance("eager_on_recompile"):
        debugging.enable_tensor_checker(CHECK_ALL)
    debugging.disable_tensor_checker()
    assert compiler_stance() == "default"
    with torch.compiler.set_stance("eager_on_recompile"):
        debugging.enable_tensor_checker(CHECK_ALL)
        debugging.disable_tensor_checker()
        assert compiler_stance() == "eager_on_recompile"


# ---- layers


class Layer(nn.Module):
    """Divides, and multiplies by a matrix."""

    def __init__(self, divisor: float) -> None:
        super().__init__()
        self.divisor = divisor

    @debugging.check_layer_numerics
    def forward(self, x: torch.Tensor, *, weight: torch.Tensor | None = None) -> torch.Tensor:
        """The result has three columns."""
        return (x / self.divisor) @ torch.ones(2, 3)


def test_a_healthy_layer() -> None:
    x = torch.ones(2, 2)
    assert list(Layer(1.0)(x, weight=None).shape) == FACTS["check_layer_numerics, healthy"]
    assert not x.requires_grad
    assert Layer.forward.__doc__ == "The result has three columns."


def test_a_layer_with_inf_is_named_and_nothing_stays_on() -> None:
    with pytest.raises(HalfstepError, match=r"num_inf=4, num_zero=0.*op=divide"):
        Layer(0.0)(torch.ones(2, 2))
    assert (torch.ones(2) / 0).isinf().all()


@pytest.mark.parametrize(
    ("fact", "args", "kwargs"),
    [("no arguments", (), {}), ("keyword argument only", (), {"x": torch.ones(2, 2)}), ("list first", ([1.0],), {})],
)
def test_what_a_checked_layer_must_be_given(fact: str, args: Any, kwargs: Any) -> None:
    with pytest.raises(HalfstepError, match=re.escape(FACTS[f"check_layer_numerics, {fact}"]["message"])):
        Layer(1.0)(*args, **kwargs)


# ---- compare_accuracy


def write(folder: Path, lines: list[str], worker: str = "worker_cpu") -> Path:
    folder.mkdir(parents=True)
    (folder / worker).write_text("\n".join(lines) + "\n")
    return folder


def line(op: str, dtype: str, tensor: str = "", **facts: object) -> str:
    given = ", ".join(f"{name}={value}" for name, value in facts.items())
    return f"[PRECISION] in [device=gpu:0, op={op}, tensor={tensor}, dtype={dtype}], {given}"


def compare(tmp_path: Path, **options: Any) -> list[dict[str, str]]:
    debugging.compare_accuracy(str(tmp_path / "a"), str(tmp_path / "b"), str(tmp_path / "out.xlsx"), **options)
    with (tmp_path / "out.csv").open() as file:
        return list(csv.DictReader(file))


def test_the_numbers_are_those_of_paddles_sheet(tmp_path: Path) -> None:
    write(tmp_path / "a", FACTS["lines in fp32"])
    write(tmp_path / "b", FACTS["lines in fp16"])
    rows = compare(tmp_path)
    sheet = FACTS["excel sheets"]["worker_cpu"]["rows"][2:]
    assert len(rows) == len(sheet)
    for ours, theirs in zip(rows, sheet, strict=True):
        assert [ours["op_type"], ours["tensor_name"], int(ours["numel"])] == theirs[:3]
        for name, at in (("reference", 4), ("other", 9)):
            assert ours[f"{name} dtype"] == theirs[at]
            for i, what in enumerate(("max_value", "min_value", "mean_value", "num_zero"), 1):
                assert float(ours[f"{name} {what}"]) == pytest.approx(float(theirs[at + i]), rel=1e-4, abs=1e-6)
        for i, what in enumerate(("max_value", "min_value", "mean_value")):
            assert float(ours[f"ratio {what}"]) == pytest.approx(float(theirs[16 + i]), rel=1e-4)


def test_gradients_are_held_against_the_loss_scale(tmp_path: Path) -> None:
    """The recording's hand-written logs, with what Paddle gets wrong: it lost what only the fp32 run has."""
    facts = {"numel": 4, "num_zero": 0}
    write(
        tmp_path / "a",
        [
            line("matmul_v2", "fp32", **{**facts, "num_zero": 1}, max=2.0, min=-2.0, mean=0.5),
            line("exp", "fp32", **facts, max=1e6, min=1.0, mean=10.0),
            line("only32", "fp32", **facts, max=1.0, min=0.0, mean=0.5),
            line("matmul_v2_grad", "fp32", "w@GRAD", **facts, max=0.5, min=-0.5, mean=0.1),
        ],
    )
    write(
        tmp_path / "b",
        [
            line("matmul_v2", "fp16", **{**facts, "num_zero": 2}, max=2.0, min=-2.0, mean=0.4),
            line("exp", "fp16", "", numel=4, num_nan=0, num_inf=2, num_zero=0, max="inf", min=1.0, mean="inf"),
            line("matmul_v2_grad", "fp16", "w.cast_fp16@GRAD", **facts, max=64.0, min=-64.0, mean=12.8),
            line("only16", "fp16", **facts, max=1.0, min=0.0, mean=0.5),
        ],
    )
    rows = compare(tmp_path, loss_scale=128)
    assert [(row["op_type"], row["infinite"]) for row in rows] == [
        *(("matmul_v2", "0"), ("exp", "1"), ("only32", "0"), ("matmul_v2_grad", "0"), ("only16", "0"))
    ]
    assert [rows[0]["reference num_zero"], rows[0]["other num_zero"]] == ["1", "2"]
    assert rows[3]["tensor_name"] == "w@GRAD#0"
    assert float(rows[3]["ratio mean_value"]) == pytest.approx(128)
    assert rows[2]["other dtype"] == rows[4]["reference dtype"] == "--"
    assert [rows[0]["ratio mean_value"], rows[1]["ratio mean_value"]] == ["0.8", "inf"]


def test_bfloat16_has_a_range_of_its_own(tmp_path: Path) -> None:
    facts = {"numel": 4, "num_zero": 0, "min": 1.0, "mean": 1.0}
    write(tmp_path / "a", [line("exp", "fp32", **facts, max=1e6)])
    write(tmp_path / "b", [line("exp", "bf16", **facts, max=1e6)])
    rows = compare(tmp_path)
    assert rows[0]["infinite"] == "0"


def test_folders_without_logs_in_common_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentValueError, match="has no logs, whose names contain 'worker_'"):
        debugging.compare_accuracy(str(tmp_path / "a"), str(tmp_path / "b"), "out")
    write(tmp_path / "a", [], "worker_cpu")
    write(tmp_path / "b", [], "worker_gpu.0")
    with pytest.raises(ArgumentValueError, match="no log is in both"):
        debugging.compare_accuracy(str(tmp_path / "a"), str(tmp_path / "b"), "out")
    with pytest.raises(ArgumentValueError, match="dump_all_tensors=True is not supported"):
        debugging.compare_accuracy(str(tmp_path / "a"), str(tmp_path / "b"), "out", dump_all_tensors=True)


def test_what_the_checker_writes_can_be_compared(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(2, 4)
    for folder, enabled in (("a", False), ("b", True)):
        config = TensorCheckerConfig(True, DebugMode.CHECK_ALL, str(tmp_path / folder), ["linear", "tanh"])
        debugging.enable_tensor_checker(config)
        with amp.auto_cast(enable=enabled, level="O1", dtype="bfloat16", emulate=False):
            model(x)
        debugging.disable_tensor_checker()
    rows = compare(tmp_path)
    assert [(row["op_type"], row["reference dtype"], row["other dtype"]) for row in rows] == [
        ("linear", "fp32", "bf16"),
        ("tanh", "fp32", "bf16"),
    ]
