"""Op casting held to the recorded Apex: every cast of its lists, in every spelling, but for its defects.

Apex had one set of lists for all devices; so every row is run on CUDA as well, a fake one where there is none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from halfstep.casting.scope import OpCasting
from halfstep.core.dtypes import dtype_name
from halfstep.core.oplists import OpLists
from tests.support.apex_recording import golden, grid
from tests.support.fake_cuda import DEVICES, NOT_ON_FAKES, on, skip_unless_it_runs
from tests.support.op_calls import call_of

FACTS = golden("apex_casts")
GROUPS = (
    "fp16_list",
    "fp32_list",
    "promote_list",
    "unlisted",
    "inplace",
    "bmm_family (lists of a CUDA >= 9.1 build: fp16)",
    "attention (lists of a CUDA >= 9.1 build)",
)
ROWS = [
    pytest.param(
        group,
        spelling,
        id=f"{group.split(' ')[0]}-{spelling}",
        marks=[pytest.mark.every_combination] if spelling.rpartition(".")[2] in NOT_ON_FAKES else [],
    )
    for group in GROUPS
    for spelling in FACTS[group]
]

# What we do otherwise, and why. A value is the dtype of every column, or one for each column.
NEWER = "later libraries list it: torch.autocast, Paddle, or both"
SAME_OP = "one op, one rule: Apex patched only the F. spelling"
DIFFERENT: dict[str, tuple[Any, str]] = {
    **dict.fromkeys(("torch.softmax", "Tensor.softmax", "torch.log_softmax", "torch.layer_norm"), ("float32", SAME_OP)),
    **dict.fromkeys(("torch.linalg.norm", "torch.mean", "Tensor.mean"), ("float32", NEWER)),
    **dict.fromkeys(("F.embedding", "F.huber_loss"), ("float32", NEWER)),
    **dict.fromkeys(("F.scaled_dot_product_attention", "torch.einsum"), ("float16", NEWER)),
    "nn.PReLU(x)": ("float16", "Apex missed the module, which held an unpatched reference"),
    "nn.Bilinear(x,y)": ("promote", "Apex missed the module; with fp32 weights the widest is fp32"),
    "2 / x": ("promote", "the reflected division of Apex went through the fp32-listed reciprocal"),
    "Tensor.cpu": ("promote", "a copy between devices is no arithmetic"),
    "torch.cat(tensors=)": ("promote", "Apex did not know the keyword"),
    **{f"a {sign}= b": ("self", "in place is in place: Apex bound a new tensor") for sign in "+-*/"},
    "a **= 2": ("refused", "as pow_: fp32 cannot be written into 16 bits"),
}


def expected(group: str, spelling: str, column: str) -> str:
    recorded = FACTS[group][spelling][column]
    first = {"fp16": "float16", "fp32": "float32"}[column.partition(",")[0]]
    if spelling not in DIFFERENT:
        return recorded
    ours = DIFFERENT[spelling][0]
    if ours == "promote":
        if spelling == "nn.Bilinear(x,y)":
            return "float32"
        return "float16" if column == "fp16" else "float32"
    if ours == "self":
        return first
    if ours == "refused":
        return "raises NotImplementedError" if first == "float16" else "float32"
    return ours


def outcome(result: Any) -> Any:
    if isinstance(result, list):
        return [outcome(item) for item in result]
    return dtype_name(result.dtype) if isinstance(result, torch.Tensor) else type(result).__name__


def slots(shapes: tuple[tuple[int, ...], ...], column: str, half: torch.dtype) -> list[torch.Tensor]:
    first, _, others = column.partition(",")
    dtypes = {"fp16": half, "fp32": torch.float32}
    return [
        grid(shape, 61 + s, 0.3, 0.5).to(dtypes[first if s == 0 else others or first]) for s, shape in enumerate(shapes)
    ]


@pytest.mark.exhaustive
@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("group", "spelling"), ROWS)
def test_every_recorded_cast(group: str, spelling: str, device: str, half: torch.dtype) -> None:
    skip_unless_it_runs(spelling.rpartition(".")[2], device)
    shapes, call = call_of(spelling)
    for column in FACTS[group][spelling]:
        made = slots(shapes, column, half)
        with on(device) as where, OpCasting(half, devices=(where,)):
            try:
                found = outcome(call(*[t.to(where) for t in made]))
            except NotImplementedError:
                found = "raises NotImplementedError"
        wanted = expected(group, spelling, column)
        if isinstance(wanted, str):
            wanted = wanted.removesuffix(", same object")
            wanted = wanted.replace("float16", dtype_name(half))
        else:
            wanted = [w.replace("float16", dtype_name(half)) for w in wanted]
        in_fp32 = half is torch.float16 and spelling.endswith(".dot")  # its sum may overflow, as one of torch.sum
        assert found == ("float32" if in_fp32 else wanted), f"{spelling} {column}"


def test_differences_are_differences() -> None:
    """A row of the table that agrees with the recording has no business there."""
    for spelling in DIFFERENT:
        group = next(g for g in GROUPS if spelling in FACTS[g])
        row = FACTS[group][spelling]
        assert any(expected(group, spelling, c) != row[c].removesuffix(", same object") for c in row), spelling


@pytest.mark.parametrize("allow", [False, True])
def test_banned(allow: bool) -> None:
    key = "banned F.binary_cross_entropy" + (", allow_banned=True" if allow else "")
    for column, wanted in FACTS["special"][key].items():
        shapes, call = call_of("F.binary_cross_entropy")
        tensors = slots(shapes, column, torch.float16)
        with OpCasting(torch.float16, allow_banned=allow):
            if column == "fp32,fp16" and not allow:  # fp32 probabilities beside 16-bit targets are safe
                assert (wanted, outcome(call(*tensors))) == ("raises NotImplementedError", "float32")
            elif wanted == "raises NotImplementedError":
                with pytest.raises(NotImplementedError, match="binary_cross_entropy_with_logits"):
                    call(*tensors)
            else:
                assert outcome(call(*tensors)) == wanted, column


MODULES: dict[str, tuple[Callable[[], nn.Module], torch.dtype]] = {
    "nn.Embedding": (lambda: nn.Embedding(4, 4), torch.float32),
    "nn.GRUCell": (lambda: nn.GRUCell(4, 4), torch.float16),
    "nn.LSTMCell": (lambda: nn.LSTMCell(4, 4), torch.float16),
    "nn.RNNCell": (lambda: nn.RNNCell(4, 4), torch.float16),
    "nn.RNN": (lambda: nn.RNN(4, 4), torch.float16),
    "nn.MultiheadAttention": (lambda: nn.MultiheadAttention(4, 2), torch.float16),
    "nn.TransformerEncoderLayer": (lambda: nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), torch.float32),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", FACTS["special"]["modules, fp32 in"])
def test_modules_with_fp32_input(name: str, device: str) -> None:
    """Apex meant 16 bits for all RNNs; its nn.RNN was not reached any more, nor its attention without CUDA."""
    skip_unless_it_runs({"nn.GRUCell": "gru_cell"}.get(name, name), device)
    make, wanted = MODULES[name]
    with on(device) as where, OpCasting(torch.float16, devices=(where,)):
        x = torch.tensor([0, 1]) if name == "nn.Embedding" else torch.rand(2, 4)
        args = (x, x, x) if "Attention" in name else (x if name != "nn.TransformerEncoderLayer" else x[None],)
        result = make()(*args)
    result = result[0] if isinstance(result, tuple) else result
    assert result.dtype == wanted
    better = {"nn.RNN", "nn.MultiheadAttention"}
    assert (FACTS["special"]["modules, fp32 in"][name] == dtype_name(wanted)) == (name not in better)


def test_float64_and_integers_are_left_alone() -> None:
    x = torch.rand(4, 4, dtype=torch.float64)
    i = torch.arange(4)
    with OpCasting(torch.float16, OpLists.default()):
        for op in (torch.exp, torch.softmax, torch.mm, torch.nn.functional.linear):
            args = (x, x) if op in (torch.mm, torch.nn.functional.linear) else (x, 0) if op is torch.softmax else (x,)
            assert op(*args).dtype == torch.float64
        assert (x + x.half()).dtype == torch.float64
        assert torch.sum(i).dtype == torch.pow(i, 2).dtype == torch.cat([i, i]).dtype == torch.int64
        assert (i + x.half()[0]).dtype == torch.cat([i, x.half()[0]]).dtype == torch.float16
