"""Torch's private names are used in ``torch_internals`` only: a new torch is checked there.

That is: private names in what is imported from torch, and private attributes that the sources do not define themselves,
as ``x._name`` or by ``getattr``.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

SOURCES = Path(__file__).parents[2] / "src" / "halfstep"
HOMES = tuple(SOURCES / "torch_internals" / name for name in ("torch_compat.py", "compiler_compat.py"))
FILES = sorted(SOURCES.rglob("*.py"))

ALLOWED = {
    "_version": "torch's notes on autograd document it",
    "_step_supports_amp_scaling": "by it optimizers of anybody tell scalers of anybody that they skip steps themselves",
    "_opt_called": "by it wrappers of optimizers tell torch's schedulers that a step was taken",
    "_wrapped_by_lr_sched": "the same; torch's schedulers put it on the step of any optimizer",
    "_fields": "Python's documented name of the fields of a named tuple",
    "_asdict": "Python's documented method of a named tuple",
    "_replace": "the same",
    "_getframe": "Python's; the documentation of sys has it",
    "_NamedFuncPointer": "a type of ctypes, for mypy only",
    "_original_forward": "Accelerate's, in its adapter",
    "_after_closure": "Lightning's, in its adapter",
    "_load_from_checkpoint": "Transformers', in its adapter",
    "_amp_stash": "ours, and Apex's: scripts look for it",
    "_loss_scale": "in files that Apex saved",
    "_unskipped": "in files that Apex saved",
}
"""Names with an underscore that may be used, and why; so may ``_foreach_*``, which the kernels are made of."""


BY_TEXT = ("getattr", "hasattr", "setattr", "delattr", "attrgetter", "methodcaller", "pop", "get")
"""Functions that are given the names of attributes as texts."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith(("__", "_foreach_")) and name.strip("_") != ""


def torch_attributes() -> set[str]:
    """Private attributes of torch's objects, some of which have the names of ours."""
    param = nn.Parameter(torch.ones(1))
    modules = [nn.Module(), nn.RNN(1, 1), nn.parallel.DistributedDataParallel]
    ops = [torch.ops.aten.mm, torch.ops.aten.mm.default, torch.fx.Graph()]
    steps = [torch.optim.SGD([param]), torch.amp.GradScaler("cpu")]
    objects = [param, param.untyped_storage(), *modules, *ops, *steps]
    return {name for thing in objects for name in dir(thing) if is_private(name)}


TORCHS = torch_attributes()


def is_own(owner: ast.expr) -> bool:
    """Whether something is ``self``, ``cls`` or ``super()``."""
    return ast.unparse(owner) in ("self", "cls", "super()")


def defined(tree: ast.AST) -> Iterator[str]:
    """The names that a text defines: functions, classes, arguments, variables, and attributes of ``self``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_own(node.value):
            yield node.attr


@functools.cache
def defined_here() -> frozenset[str]:
    """The names that the sources define outside of ``torch_internals``."""
    return frozenset(name for path in FILES if path not in HOMES for name in defined(ast.parse(path.read_text())))


def private_names(text: str) -> Iterator[str]:
    """Private names of torch in a text: imported, below ``torch``, and attributes that are not ours."""
    tree = ast.parse(text)
    ours = defined_here().union(defined(tree))
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.partition(".")[0] == "torch"]
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            foreign = node.attr not in ours or (node.attr in TORCHS and not is_own(node.value))
            names = [ast.unparse(node)] if foreign or ast.unparse(node).startswith("torch.") else []
        elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in BY_TEXT:
            texts = [arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
            names = [text for text in texts if text not in ours or text in TORCHS]
        yield from (name for name in names if any(is_private(x) and x not in ALLOWED for x in name.split(".")))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCES)))
def test_private_names_of_torch_have_one_home(path: Path) -> None:
    found = sorted(set(private_names(path.read_text())))
    assert (found != []) if path in HOMES else (found == [])


def test_every_name_that_is_allowed_is_used() -> None:
    text = "".join(path.read_text() for path in FILES)
    assert [name for name in ALLOWED if name not in text] == []


@pytest.mark.parametrize(
    "text",
    [
        "from torch._ops import OpOverload",
        "from torch.overrides import TorchFunctionMode, _push_mode",
        "import torch._dynamo",
        "torch.amp.grad_scaler._refresh_per_optimizer_state()",
        "x = torch._C._nn",
        "model._forward_hooks.clear()",
        "del self._backward_hooks",
        "optimizer._patch_step_function()",
        "def f():\n    _parameters = 1\n    return module._parameters",
        "scaler._per_optimizer_states[1]",
        "getattr(model, '_orig_mod', None)",
        "setattr(function, '_torchdynamo_disable', True)",
        "operator.attrgetter('_modules')",
        "vars(wrapper).pop('_authoritative_rank')",
    ],
)
def test_a_private_name_is_found_wherever_it_stands(text: str) -> None:
    assert list(private_names(text))


@pytest.mark.parametrize(
    "text",
    [
        "import torch",
        "torch._foreach_add_(xs, ys)",
        "from torch.overrides import Mode",
        "tensor._version",
        "self._mine = 1\nother._mine",
        "for _ in x: _.y",
        "getattr(optimizer, '_step_supports_amp_scaling', False)",
    ],
)
def test_public_names_are_not(text: str) -> None:
    assert not list(private_names(text))
