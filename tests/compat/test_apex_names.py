"""Every name of Apex: it is here, or who asks for it is told what to use.

The rows lie in ``apex_names.txt``.
"""

from __future__ import annotations

import importlib
import inspect
import pickle
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from halfstep import apex as tree
from halfstep.cli.migrate import migrate
from halfstep.core.errors import MissingNameError
from tests.support.python import python


def table(section: str) -> dict[str, list[str]]:
    """A section of ``apex_names.txt``: owner -> names. What begins with spaces goes on with the line above."""
    text = Path(__file__).with_name("apex_names.txt").read_text().replace("\n    ", " ")
    lines = text.partition(f"[{section}]\n")[2].partition("\n[")[0].splitlines()
    split = (line.split(" = ") for line in lines if line and not line.startswith("#"))
    return {owner: names.split() for owner, names in split}


@pytest.fixture(autouse=True)
def _installed() -> Iterator[None]:
    tree.install()
    yield
    tree.uninstall()


@pytest.mark.parametrize(("module", "names"), table("present").items())
def test_the_names_of_a_module_are_here(module: str, names: list[str]) -> None:
    space: dict[str, Any] = {}
    migrated: dict[str, Any] = {}
    line = f"from {module} import {', '.join(names)}\n"
    exec(line, space)
    exec(migrate(line).after, migrated)
    for name in names:
        assert space[name] is getattr(importlib.import_module(module), name)
        own = isinstance(space[name], ModuleType) or name in ("__version__", "init", "initialize")  # other defaults
        assert own or migrated[name] is space[name], name


@pytest.mark.parametrize(("module", "names"), table("refused").items())
def test_a_name_is_refused_by_saying_what_to_use(module: str, names: list[str]) -> None:
    for name in names:
        with pytest.raises(ImportError, match=rf"^{module}\.{name} is not in halfstep\. .*(Use|use) ?") as caught:
            exec(f"from {module} import {name}")
        assert isinstance(caught.value, MissingNameError)
        assert caught.value.name == name
    with pytest.raises(AttributeError, match="nothing_like_it"):
        _ = importlib.import_module(module).nothing_like_it


def found(path: str) -> Any:
    module, _, names = path.partition(":")
    value = importlib.import_module(module)
    for name in names.split("."):
        value = getattr(value, name)
    return value


ABSENT = {
    "transformer": "Megatron-LM",
    "contrib.fmha": "scaled_dot_product_attention",
    "contrib.groupbn": "SyncBatchNorm",
    "contrib.multihead_attn": "MultiheadAttention",
    "contrib.sparsity": "to_sparse_semi_structured",
    "pyprof.parse": "torch.profiler",
}


@pytest.mark.parametrize("path", ABSENT)
def test_a_module_that_is_not_here_says_what_to_use(path: str) -> None:
    import apex

    parent = apex
    said = f"^halfstep does not have apex.{path}. Use .*{ABSENT[path]}"
    *above, name = path.split(".")
    for part in above:
        parent = getattr(parent, part)
    with pytest.raises(AttributeError, match=said):
        getattr(parent, name)
    assert not hasattr(parent, name)
    lines = (
        f"import apex.{path}",
        f"import halfstep.apex.{path}.part",
        f"from {'.'.join(['apex', *above])} import {name}",
    )
    for line in lines:
        with pytest.raises(ModuleNotFoundError, match=said):
            exec(line)


@pytest.mark.parametrize(("owner", "names"), table("members").items())
def test_the_members_of_a_class_are_here(owner: str, names: list[str]) -> None:
    assert [name for name in names if not hasattr(found(owner), name)] == []


@pytest.mark.parametrize(("path", "expected"), table("parameters").items())
def test_parameters_have_the_names_and_order_of_the_original(path: str, expected: list[str]) -> None:
    given = found(path)
    # Python 3.10 shows the parameters of an inherited `__new__` for a class.
    names = list(inspect.signature(given.__init__).parameters)[1:] if isinstance(given, type) else ()
    assert [*(names or inspect.signature(given).parameters)][: len(expected)] == expected


# ---- what holds for all of them


def test_a_submodule_that_shares_its_name_with_an_object() -> None:
    """``amp._amp_state`` is the state; the module of that name is found by importing it."""
    import apex
    from apex.amp import _amp_state
    from apex.amp._amp_state import _amp_state as state

    assert _amp_state is state is apex.amp._amp_state
    importlib.import_module("apex.amp._amp_state")
    assert apex.amp._amp_state is state
    assert inspect.ismodule(apex.normalization.fused_layer_norm)


def test_classes_are_pickled_by_either_name() -> None:
    from apex.normalization.fused_layer_norm import FusedLayerNorm
    from apex.optimizers.fused_adam import FusedAdam

    assert FusedAdam.__module__.startswith("halfstep.")
    assert pickle.loads(pickle.dumps(FusedAdam)) is FusedAdam
    assert pickle.loads(b"capex.normalization.fused_layer_norm\nFusedLayerNorm\n.") is FusedLayerNorm
    module: Any = pickle.loads(pickle.dumps(FusedLayerNorm(4)))
    assert type(module) is FusedLayerNorm


@pytest.mark.exhaustive
def test_the_public_path_and_a_fresh_process() -> None:
    script = (
        "import warnings; warnings.simplefilter('error')\n"
        "import halfstep.apex.optimizers.fused_adam as one\n"
        "import halfstep.apex\n"
        "halfstep.apex.install()\n"
        "import importlib.util\n"
        "assert importlib.util.find_spec('apex.optimizers.fused_lamb') is not None\n"
        "import apex.optimizers.fused_adam as other, apex.amp.lists.functional_overrides\n"
        "import apex.normalization.fused_layer_norm, apex.contrib.optimizers.fused_sgd\n"
        "assert one is other\n"
    )
    python("-c", script).check_returncode()


# ---- what computes


def test_functions_by_apply() -> None:
    from apex.mlp.mlp import MLP, MlpFunction
    from apex.normalization import fused_layer_norm as module

    x, weight, bias = (torch.randn(3, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    weight, bias = weight[0], bias[0]
    layer = nn.functional.layer_norm(x, (4,), weight, bias, 1e-3)
    rms = nn.functional.rms_norm(x, (4,), weight, 1e-3)
    torch.testing.assert_close(module.FusedLayerNormAffineFunction.apply(x, weight, bias, (4,), 1e-3), layer)
    torch.testing.assert_close(
        module.FusedLayerNormAffineMixedDtypesFunction.apply(x, weight, bias, (4,), 1e-3, True), layer
    )
    torch.testing.assert_close(module.FusedRMSNormAffineFunction.apply(x, weight, (4,), 1e-3), rms)
    torch.testing.assert_close(module.FusedRMSNormAffineMixedDtypesFunction.apply(x, weight, (4,), 1e-3, False), rms)
    plain = nn.functional.layer_norm(x, (4,), None, None, 1e-3), nn.functional.rms_norm(x, (4,), None, 1e-3)
    torch.testing.assert_close(module.FusedLayerNormFunction.apply(x, (4,), 1e-3), plain[0])
    torch.testing.assert_close(module.FusedRMSNormFunction.apply(x, (4,), 1e-3), plain[1])

    mlp = MLP([4, 8, 2])
    assert [tuple(w.shape) for w in mlp.weights] == [(8, 4), (2, 8)]
    assert [tuple(b.shape) for b in mlp.biases] == [(8,), (2,)]
    assert MLP([4, 2], bias=False).biases == []
    y = torch.randn(3, 4)
    for number, name in enumerate(("none", "relu", "sigmoid")):
        mlp.activation = name
        for activation in (number, name):
            assert torch.equal(MlpFunction.apply(True, activation, y, *mlp.weights, *mlp.biases), mlp(y))


def test_fused_dense_functions() -> None:
    from apex import fused_dense

    x, w1, b1, w2, b2 = (torch.randn(4, 4) for _ in range(5))
    hidden = nn.functional.linear(x, w1, b1[0])
    assert torch.equal(fused_dense.fused_dense_function(x, w1, b1[0]), hidden)
    assert torch.equal(fused_dense.dense_no_bias_function(x, w1), nn.functional.linear(x, w1))
    expected = nn.functional.linear(nn.functional.gelu(hidden), w2, b2[0])
    assert torch.equal(fused_dense.fused_dense_gelu_dense_function(x, w1, b1[0], w2, b2[0]), expected)


def test_a_multiplicative_lstm_by_its_function() -> None:
    from apex.RNN import cells, models

    torch.manual_seed(0)
    cell = cells.mLSTMRNNCell(4, 3, 5, bias=True)
    x, h, c = torch.randn(2, 3), torch.randn(2, 5), torch.randn(2, 5)
    weights = (cell.w_ih, cell.w_hh, cell.w_mih, cell.w_mhh, cell.b_ih, cell.b_hh)
    after = cells.mLSTMCell(x, (h, c), *weights)
    stack = models.toRNNBackend(cell, 1)
    stack.rnns[0].hidden = [h, c]
    _, hiddens = stack(x[None])
    torch.testing.assert_close(after[0], hiddens[0][0])
    torch.testing.assert_close(after[1], hiddens[1][0])
    assert type(models.toRNNBackend(cells.mLSTMRNNCell(4, 3, 5), 1, bidirectional=True)) is models.bidirectionalRNN


def test_mixed_norms_take_the_argument_of_the_original() -> None:
    from apex.normalization import MixedFusedLayerNorm, MixedFusedRMSNorm

    for kind in (MixedFusedLayerNorm, MixedFusedRMSNorm):
        assert kind(4, elementwise_affine=True).weight is not None
        with pytest.raises(RuntimeError, match=f"elementwise_affine=False use {kind.__name__.removeprefix('Mixed')}"):
            kind(4, elementwise_affine=False)
