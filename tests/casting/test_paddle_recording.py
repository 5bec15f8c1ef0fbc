"""``amp.auto_cast`` held to the recorded Paddle: each op at each level and mix of inputs, and custom lists."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from halfstep import amp
from halfstep.core.dtypes import dtype_name
from tests.support.apex_recording import golden, grid
from tests.support.fake_cuda import DEVICES, on
from tests.support.op_calls import beside

FACTS = golden("paddle_ops")
LEVELS = ("O1", "O2", "O2 use_promote=False", "OD")
B = (3, 4)
I = torch.tensor([0, 2, 1])  # noqa: E741

CALLS: dict[str, tuple[tuple[tuple[int, ...], ...], Callable[..., Any]]] = {
    "matmul": ((B, (4, 5)), torch.matmul),
    "mm": ((B, (4, 5)), torch.mm),
    "bmm": (((2, 3, 4), (2, 4, 5)), torch.bmm),
    "mv": ((B, (4,)), torch.mv),
    "dot": (((4,), (4,)), torch.dot),
    "addmm": (((3, 5), B, (4, 5)), torch.addmm),
    "F.linear(no bias)": ((B, (5, 4)), F.linear),
    "F.linear(bias)": ((B, (5, 4), (5,)), F.linear),
    "F.conv1d": (((2, 3, 8), (4, 3, 3)), F.conv1d),
    "F.conv2d(no bias)": (((2, 3, 8, 8), (4, 3, 3, 3)), F.conv2d),
    "F.conv2d(bias)": (((2, 3, 8, 8), (4, 3, 3, 3), (4,)), F.conv2d),
    "F.conv2d(groups=channels)": (((2, 3, 8, 8), (3, 1, 3, 3)), lambda x, w: F.conv2d(x, w, groups=3)),
    "F.conv2d_transpose": (((2, 3, 4, 4), (3, 4, 3, 3)), F.conv_transpose2d),
    "F.conv3d": (((1, 2, 4, 4, 4), (3, 2, 3, 3, 3)), F.conv3d),
    "F.scaled_dot_product_attention": (((1, 2, 3, 4),) * 3, F.scaled_dot_product_attention),
    **{name: ((B, B), getattr(torch, name)) for name in ("add", "minimum", "maximum", "atan2")},
    **dict(
        zip(("multiply", "subtract", "divide"), (((B, B), op) for op in (torch.mul, torch.sub, torch.div)), strict=True)
    ),
    "pow(tensor)": ((B, B), torch.pow),
    "x*2 (scale)": ((B,), lambda x: x * 2),
    "x+1 (scale)": ((B,), lambda x: x + 1),
    "pow(2.0)": ((B,), lambda x: x.pow(2.0)),
    "pow(3.0)": ((B,), lambda x: x**3.0),
    "clip": ((B,), lambda x: x.clip(0.1, 0.5)),
    **{f.__name__: ((B,), f) for f in (F.tanhshrink, F.gelu, F.relu6, F.softplus, F.hardswish, F.mish, F.elu)},
    "softmax": ((B,), lambda x: F.softmax(x, -1)),
    "log_softmax": ((B,), lambda x: F.log_softmax(x, -1)),
    "max": ((B,), torch.max),
    "logsumexp": ((B,), lambda x: torch.logsumexp(x, 0)),
    "cumsum": ((B,), lambda x: torch.cumsum(x, 0)),
    "cumprod": ((B,), lambda x: torch.cumprod(x, 0)),
    "norm(p=2)": ((B,), lambda x: torch.linalg.vector_norm(x, 2)),
    "norm(fro)": ((B,), lambda x: torch.linalg.matrix_norm(x)),
    "renorm": ((B,), lambda x: torch.renorm(x, 2, 0, 1.0)),
    "argmax": ((B,), torch.argmax),
    "topk": ((B,), lambda x: torch.topk(x, 2)[0]),
    "sort": ((B,), lambda x: torch.sort(x)[0]),
    "layer_norm": ((B,), lambda x: F.layer_norm(x, (4,))),
    "group_norm": ((B,), lambda x: F.group_norm(x, 2)),
    "batch_norm": ((B,), lambda x: F.batch_norm(x, torch.zeros(4, dtype=stats(x)), torch.ones(4, dtype=stats(x)))),
    "local_response_norm": (((2, 3, 4, 4),), lambda x: F.local_response_norm(x, 3)),
    "normalize": ((B,), F.normalize),
    "transpose": ((B,), lambda x: x.transpose(0, 1)),
    "squeeze": (((1, 4),), torch.squeeze),
    "reshape": ((B,), lambda x: x.reshape(4, 3)),
    "split": ((B,), lambda x: x.split(2)[0]),
    "pad": ((B,), lambda x: F.pad(x, (1, 1))),
    "tile": ((B,), lambda x: x.tile(2)),
    "flip": ((B,), lambda x: x.flip(0)),
    "gather": ((B,), lambda x: x.gather(0, torch.zeros(1, 4, dtype=torch.int64))),
    "index_select": ((B,), lambda x: x.index_select(0, beside(x, I))),
    "dropout(p=.5)": ((B,), F.dropout),
    "cast to float32": ((B,), lambda x: x.float()),
    "max_pool2d": (((1, 2, 4, 4),), lambda x: F.max_pool2d(x, 2)),
    "max_pool2d(return_mask)": (((1, 2, 4, 4),), lambda x: F.max_pool2d(x, 2, return_indices=True)[0]),
    "avg_pool2d": (((1, 2, 4, 4),), lambda x: F.avg_pool2d(x, 2)),
    "adaptive_avg_pool2d": (((1, 2, 4, 4),), lambda x: F.adaptive_avg_pool2d(x, 2)),
    "interpolate nearest": (((1, 2, 4, 4),), lambda x: F.interpolate(x, scale_factor=2)),
    "interpolate bilinear": (((1, 2, 4, 4),), lambda x: F.interpolate(x, scale_factor=2, mode="bilinear")),
    "embedding": ((B,), lambda w: F.embedding(beside(w, I), w)),
    "cross_entropy": ((B,), lambda x: F.cross_entropy(x, beside(x, I))),
    "cross_entropy(soft_label)": ((B, B), lambda x, y: F.cross_entropy(x, F.softmax(y, -1))),
    "concat": ((B, B), lambda a, b: torch.cat([a, b])),
    "stack": ((B, B), lambda a, b: torch.stack([a, b])),
    "add_n": ((B, B), lambda a, b: a + b),
    "where": ((B, B), lambda a, b: torch.where(torch.ones(B, dtype=torch.bool), a, b)),
    "scatter": ((B, B), lambda a, b: a.scatter(0, torch.zeros(1, 4, dtype=torch.int64), b)),
    "dist(p=2)": ((B, B), torch.dist),
    "lerp": ((B, B), lambda a, b: torch.lerp(a, b, 0.5)),
    "equal": ((B, B), torch.eq),
    "less_than": ((B, B), torch.lt),
    "prelu": ((B, (4,)), F.prelu),
    "smooth_l1_loss": ((B, B), F.smooth_l1_loss),
    "bce_with_logits": ((B, B), F.binary_cross_entropy_with_logits),
    "binary_cross_entropy": ((B, B), F.binary_cross_entropy),
    "kl_div": ((B, B), lambda a, b: F.kl_div(a, b, reduction="sum")),
}
UNARY = (
    "exp expm1 log log2 log10 log1p reciprocal rsqrt sqrt acos asin sinh cosh atanh sign relu sigmoid tanh mean prod"
    " var sin cos tan erf erfinv floor"
)
for _name in UNARY.split(" "):
    CALLS[_name] = ((B,), getattr(torch, _name))


def stats(x: torch.Tensor) -> torch.dtype:
    """The dtype of running statistics beside an input."""
    return torch.float64 if x.dtype is torch.float64 else torch.float32


def scope(level: str, half: torch.dtype, **lists: Any) -> amp.auto_cast:
    return amp.auto_cast(level=level.split()[0], dtype=half, use_promote="False" not in level, **lists)


def tensors(name: str, column: str, half: torch.dtype) -> list[torch.Tensor]:
    dtypes = {"f32": torch.float32, "low": half, "f64": torch.float64}
    first, _, other = column.partition(",")
    shapes = CALLS[name][0]
    return [
        grid(shape, 61 + s, 0.3, 0.5).to(dtypes[first if s == 0 else other or first]) for s, shape in enumerate(shapes)
    ]


def found(name: str, level: str, column: str, half: torch.dtype, device: str, **lists: Any) -> str:
    made = tensors(name, column, half)
    with on(device) as where, scope(level, half, device_type=where, **lists):
        try:
            return dtype_name(CALLS[name][1](*[t.to(where) for t in made]).dtype)
        except amp.UnsafeOpError:
            return "refused"


def letters(text: str) -> str:
    """A dtype as one letter: h(alf), f(loat32), d(ouble)."""
    names = {"float16": "h", "bfloat16": "h", "float32": "f", "float64": "d"}
    return names.get(text.removesuffix("*"), "ERROR" if text.startswith("ERROR") else text)


def row(name: str, level: str, half: torch.dtype, device: str) -> tuple[str, str]:
    """What Paddle does and what we do, a letter for each column."""
    recorded = FACTS["ops"][name][dtype_name(half)][level]
    columns = [c for c in recorded if not recorded[c].startswith("ERROR")]
    theirs = " ".join(letters(recorded[c]) for c in columns)
    return theirs, " ".join(letters(found(name, level, c, half, device)) for c in columns)


# ---- the documented differences

PAGE = (Path(__file__).resolve().parents[2] / "docs/precision.md").read_text().partition("{ #paddle }")[2]
DIFFERENT_OPS, DIFFERENT_LISTS = (
    {name for row in table.splitlines() if row.startswith("| `") for name in re.findall("`(.+?)`", row.split("|")[1])}
    for table in PAGE.split("For custom lists, these rows differ:")
)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", FACTS["ops"])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_op(name: str, half: torch.dtype, device: str) -> None:
    for level in LEVELS:
        theirs, ours = row(name, level, half, device)
        if name not in DIFFERENT_OPS:
            assert ours == theirs, level


@pytest.mark.exhaustive
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", sorted(DIFFERENT_OPS))
def test_documented_difference_is_one(name: str, device: str) -> None:
    """The same on every device, where the CPU has a 16-bit kernel for what is inside."""
    rows = [
        (row(name, level, half, device), row(name, level, half, "cpu"))
        for level in LEVELS
        for half in (torch.float16, torch.bfloat16)
    ]
    assert any(ours != theirs for (theirs, ours), _ in rows)
    assert name == "local_response_norm" or all(here == on_the_cpu for here, on_the_cpu in rows)


CUSTOM = {key: key.removesuffix("]").partition(" [")[::2] for key in FACTS["custom_lists"]}
"""The op and Paddle's name of it for each recording of a custom list."""
ALL_NAMES = {name for _, name in CUSTOM.values()}
"""Paddle recorded a list of one name for each op. Here one list has all names: an op looks up only its own."""


def custom_row(key: str, device: str) -> tuple[list[str], list[str]]:
    """What Paddle does with an op on a custom list and what we do, column by column."""
    op, _ = CUSTOM[key]
    ours = []
    for column in FACTS["custom_lists"][key]:
        level = "O2 use_promote=False" if "no promote" in column else column[:2]
        which = "custom_white_list" if "white" in column else "custom_black_list"
        first = "f32" if "float32 in" in column else "low"
        ours.append(found(op, level, first, torch.float16, device, **{which: ALL_NAMES}))
    return [text.removesuffix("*") for text in FACTS["custom_lists"][key].values()], ours


@pytest.mark.exhaustive
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("key", FACTS["custom_lists"])
def test_custom_list(key: str, device: str) -> None:
    theirs, ours = custom_row(key, device)
    assert (ours != theirs) == (key in DIFFERENT_LISTS)


def test_every_recorded_op_is_walked() -> None:
    assert set(FACTS["ops"]) <= set(CALLS)
    assert {*DIFFERENT_OPS} <= set(CALLS)
    assert {*DIFFERENT_LISTS} <= set(FACTS["custom_lists"])
