"""The names of modules in all that is told of a run."""

from __future__ import annotations

from torch import nn

__all__ = ["OPTIMIZER", "OUTSIDE", "ROOT", "owner_of", "qualified_names"]

OUTSIDE = "(step)"
"""Where ops are that no module runs: the loss, in most scripts."""

ROOT = "(root)"
"""The model itself."""

OPTIMIZER = "(optimizer)"
"""Where the ops of an optimizer's step are."""

_PARALLEL = (nn.parallel.DistributedDataParallel, nn.DataParallel)


def qualified_names(model: nn.Module) -> dict[nn.Module, str]:
    """The names of the modules of a model, as ``Monitor`` has them: "(root)" is the model.

    The wrappers of ``torch.compile`` and of DDP leave no trace in them.
    """
    names = {module: name for name, module in model.named_modules()}
    inside = "module" if isinstance(model, _PARALLEL) else ""
    return {module: _clean(name, inside) or ROOT for module, name in names.items()}


def owner_of(param: str) -> str:
    """The name of the module that has a parameter, by the name of the parameter."""
    return param.rpartition(".")[0] or ROOT


def _clean(name: str, inside: str) -> str:
    parts = [part for part in name.split(".") if part != "_orig_mod"]
    return ".".join(parts[1:] if inside and parts[:1] == [inside] else parts)
