"""Torch's private names are used in ``core/torch_compat.py`` only, so that a new torch is checked in one place."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[2] / "src" / "halfstep"
HOME = SOURCES / "core" / "torch_compat.py"


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith(("__", "_foreach_"))


def private_names(text: str) -> Iterator[str]:
    """Dotted names below ``torch`` that have a private part, wherever a text imports or reads them."""
    for node in ast.walk(ast.parse(text)):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.partition(".")[0] == "torch"]
        elif isinstance(node, ast.Attribute):
            names = [name for name in [ast.unparse(node)] if name.startswith("torch.") and is_private(node.attr)]
        yield from (name for name in names if any(map(is_private, name.split("."))))


@pytest.mark.parametrize("path", sorted(SOURCES.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCES)))
def test_private_names_of_torch_have_one_home(path: Path) -> None:
    found = sorted(set(private_names(path.read_text())))
    assert (found != []) if path == HOME else (found == [])


@pytest.mark.parametrize(
    "text",
    [
        "from torch._ops import OpOverload",
        "from torch.overrides import TorchFunctionMode, _push_mode",
        "import torch._dynamo",
        "torch.amp.grad_scaler._refresh_per_optimizer_state()",
        "x = torch._C._nn",
    ],
)
def test_a_private_name_is_found_wherever_it_stands(text: str) -> None:
    assert list(private_names(text))


@pytest.mark.parametrize("text", ["import torch", "torch._foreach_add_(xs, ys)", "from torch.overrides import Mode"])
def test_public_names_are_not(text: str) -> None:
    assert not list(private_names(text))
