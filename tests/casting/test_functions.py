"""Functions of the user's own under op casting: decorated, registered before and after, and put back in any order."""

from __future__ import annotations

import itertools
import types
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from halfstep import amp
from tests.support.worlds import BF16, FP32

X, H = torch.ones(2, 2), torch.ones(2, 2, dtype=torch.bfloat16)


def dtypes(*args: Any, **kwargs: Any) -> list[torch.dtype]:
    return [t.dtype for t in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]


@pytest.fixture
def backend() -> types.SimpleNamespace:
    return types.SimpleNamespace(run=lambda *a, **k: dtypes(*a, **k))


ROWS = {  # decorator -> dtypes of (fp32, 16-bit, [fp32], {16-bit}, fp64, int)
    "half_function": [BF16, BF16, BF16, BF16, torch.float64, torch.int64],
    "float_function": [FP32, FP32, FP32, FP32, torch.float64, torch.int64],
}


@pytest.mark.parametrize("name", ROWS)
def test_decorator(name: str) -> None:
    decorated = getattr(amp, name)(dtypes)
    args = (X, H, [X], {"a": H}, X.double(), X.long())
    plain = [t.dtype for t in torch.utils._pytree.tree_leaves(args)]
    assert decorated(*args) == plain
    with amp.auto_cast(dtype=BF16):
        assert decorated(*args) == ROWS[name]
        assert decorated(*args[:2], key=H) == [*ROWS[name][:2], ROWS[name][1]]
        with amp.disable_casts():
            assert decorated(*args) == plain
    assert decorated.__name__ == "dtypes"


@pytest.mark.parametrize(("args", "wanted"), [((X, H), FP32), ((H, H), BF16), ((X, X), FP32), ((H, [X]), FP32)])
def test_promote(args: Any, wanted: torch.dtype) -> None:
    with amp.auto_cast(dtype=BF16):
        assert set(amp.promote_function(dtypes)(*args)) == {wanted}


def test_ops_inside_of_an_object_that_has_no_hash_follow_the_lists(backend: types.SimpleNamespace) -> None:
    class Product:
        __hash__ = None  # type: ignore[assignment]

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return x @ x

    backend.run = Product()
    amp.register_promote_function(backend, "run")
    with amp.auto_cast(dtype=BF16):
        assert backend.run(X).dtype is BF16


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_undone_in_any_order(backend: types.SimpleNamespace, order: tuple[int, ...]) -> None:
    own = backend.run
    made = [
        amp.register_half_function(backend, "run"),
        amp.register_float_function(backend, "run"),
        amp.register_half_function(backend, "run"),
    ]
    rules = ["half", "float", "half"]
    left = [0, 1, 2]
    for which in order:
        with amp.auto_cast(dtype=BF16):
            assert backend.run(X, H) == ([BF16, BF16] if rules[left[-1]] == "half" else [FP32, FP32])
        made[which].remove()
        made[which].remove()
        left.remove(which)
    assert backend.run is own


def test_after_initialize(backend: types.SimpleNamespace) -> None:
    model = nn.Linear(2, 2)
    amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O1", dtype=BF16, verbosity=0)
    with amp.register_half_function(backend, "run"):
        assert backend.run(X) == [BF16]
    assert backend.run(X) == [FP32]


class Kernels:
    def method(self, x: torch.Tensor) -> torch.dtype:
        return x.dtype

    @staticmethod
    def static(x: torch.Tensor) -> torch.dtype:
        return x.dtype

    @classmethod
    def by_class(cls, x: torch.Tensor) -> torch.dtype:
        assert cls is Kernels
        return x.dtype


@pytest.mark.parametrize("name", ["method", "static", "by_class"])
def test_methods_of_a_class(name: str) -> None:
    before = vars(Kernels)[name]
    with amp.register_half_function(Kernels, name), amp.auto_cast(dtype=BF16):
        assert getattr(Kernels(), name)(X) is BF16
    assert vars(Kernels)[name] is before


@pytest.mark.parametrize(
    ("space", "name"), [(torch, "sigmoid"), (torch.Tensor, "sigmoid"), (F, "relu"), (torch, "relu")]
)
def test_functions_of_torch(space: Any, name: str) -> None:
    own = getattr(space, name)
    with amp.register_float_function(space, name), amp.auto_cast(dtype=BF16):
        assert getattr(space, name)(H).dtype is FP32
        assert torch.tanh(H).dtype is BF16
    assert getattr(space, name) is own


def test_a_registered_op_inside_a_module() -> None:
    with amp.register_half_function(F, "layer_norm"), amp.auto_cast(dtype=BF16):
        assert nn.LayerNorm(2)(X).dtype is BF16
    with amp.auto_cast(dtype=BF16):
        assert nn.LayerNorm(2)(X).dtype is FP32


def test_a_function_in_python_sees_names_that_are_replaced_later(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = torch.ones(2, 1, 4), torch.ones(12, 4)
    arguments = (x, x, x, 4, 2, weight, None, None, None, False, 0.0, torch.ones(4, 4), None)
    own, called = F._in_projection_packed, []  # type: ignore[attr-defined]
    with amp.auto_cast(dtype="bfloat16"):
        F.multi_head_attention_forward(*arguments)
        monkeypatch.setattr(F, "_in_projection_packed", lambda *args: called.append(1) or own(*args))
        F.multi_head_attention_forward(*arguments)
    assert called == [1]
