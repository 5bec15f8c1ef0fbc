"""The names of torch that halfstep replaces, and its hooks on everything. Run as a program, it prints them as JSON.

Torch is looked at before halfstep is imported, in use, and when the last session has ended. It is a program of its own
because a process that ran other tests has sessions, and has imported halfstep.
"""

from __future__ import annotations

import gc
import json
import pkgutil
import sys
import warnings
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import torch
import torch._dynamo
import torch.distributed.checkpoint.state_dict
import torch.nn.parallel
import torch.utils.checkpoint
from torch import nn

Scan = dict[str, Any]

HOOKS = ("torch.nn.modules.module", "torch.optim.optimizer", "torch.autograd.graph")
"""Where torch keeps hooks that are called for every module, optimizer or tensor."""

SETTINGS = ("torch._functorch.config", "torch._dynamo.config", "torch._inductor.config")

WORKING = ("torch._dynamo", "torch._inductor", "torch.fx", "torch._subclasses", "torch.ops", "torch._classes")
"""Parts of torch that replace names of their own while they work."""


def scan() -> Scan:
    """Functions, classes and descriptors of torch by dotted name, its settings, and hooks on everything."""
    found: Scan = {}
    for name, module in sorted(sys.modules.items()):
        if name.partition(".")[0] == "torch" and not name.startswith(WORKING):
            for key, value in list(vars(module).items()):
                if callable(value):
                    found[f"{name}.{key}"] = value
                if issubclass(type(value), type) and value.__module__ == name:  # isinstance asks the value
                    found.update({f"{name}.{key}.{part}": member for part, member in _members(value)})
    for name in SETTINGS:
        settings = sys.modules[name].get_config_copy() if name in sys.modules else {}
        found.update({f"{name}.{key}": value for key, value in settings.items()})
    for name in HOOKS:
        for key, hooks in vars(sys.modules[name]).items():
            if key.endswith("hooks") and isinstance(hooks, dict):
                found.update({f"{name}.{key}: {_name(hook)}": None for hook in hooks.values()})
    return found


def changed(before: Scan, now: Scan) -> list[str]:
    """The names that stand for something else, those that a class got, and the hooks that came."""
    new = {name for name in now.keys() - before.keys() if ": " in name or name.rpartition(".")[0] in before}
    other = {name for name in now.keys() & before.keys() if now[name] is not before[name] and now[name] != before[name]}
    return sorted(new | other)


def _members(kind: type) -> Iterator[tuple[str, Any]]:
    return (
        (name, value)
        for name, value in list(vars(kind).items())
        if callable(value) or hasattr(type(value), "__get__") or isinstance(value, torch._C._ImperativeEngine)
    )


def _name(hook: Any) -> str:
    return getattr(hook, "__qualname__", type(hook).__qualname__)


def warm_up() -> None:
    """Let torch replace what it replaces itself: around the steps of optimizers, and when it first compiles."""
    for name in torch.optim.__all__:
        kind = getattr(torch.optim, name)
        if isinstance(kind, type) and name not in ("Optimizer", "Muon"):
            kind([nn.Parameter(torch.ones(2, 2))], lr=0.1)
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1))


def main() -> None:
    warnings.simplefilter("ignore")
    warm_up()
    before = scan()
    seen: set[str] = set()

    def see(*_: Any) -> None:
        seen.update(changed(before, scan()))

    import halfstep

    for module in pkgutil.walk_packages(halfstep.__path__, "halfstep."):
        if module.name.split(".")[1] not in ("__main__", "cli", "compat", "integrations"):
            import_module(module.name)
    at_import = changed(before, scan())
    use(see)
    gc.collect()
    after = changed(before, scan())
    print(json.dumps({"at_import": at_import, "seen": sorted(seen), "after": after}))


def use(see: Any) -> None:
    """Train in every way that replaces something, and look meanwhile."""
    from halfstep import amp, static
    from halfstep.torch_internals.compiler_compat import compile_with_autograd

    x, y, loss_fn = torch.ones(4, 8), torch.arange(4) % 3, nn.CrossEntropyLoss()
    own_step: Any = type("OwnStep", (torch.optim.SGD,), {"step": torch.optim.SGD.step})
    for level, kind in (("O1", torch.optim.AdamW), ("O2", torch.optim.SGD), ("O2", own_step)):
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
        optimizer = kind(model.parameters(), lr=0.1)
        amp.initialize(model, optimizer, opt_level=level, emulate=True, verbosity=0)
        model[0].register_forward_hook(see)
        optimizer.register_step_pre_hook(see)
        with amp.scale_loss(loss_fn(model(x), y), optimizer) as scaled_loss:
            see()
            scaled_loss.backward()
        optimizer.step()
    with amp.auto_cast(dtype="bfloat16"):
        see()
    amp.decorate(nn.Linear(1, 1), level="O2")
    see()
    handle = amp.init()
    see()
    handle._deactivate()
    static.enable_static()
    see()
    static.disable_static()

    class Doubled:
        def double(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    def backend(graph: Any, inputs: Any) -> Any:
        see()
        return graph

    double = compile_with_autograd(Doubled().double, backend=backend)  # type: ignore[arg-type]
    if double is not None:
        double(x)


if __name__ == "__main__":
    main()
