"""Wrong uses of graph mode."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from halfstep import static
from halfstep.core.errors import ArgumentTypeError, ArgumentValueError, UsageError

from .worlds import Wrong, captured, nothing, plain

__all__ = ["ROWS"]

VALUE, TYPE = ArgumentValueError, ArgumentTypeError


def _capture(name: str, error: Any, *words: str, **options: Any) -> Wrong:
    return Wrong(
        f"capture {name}",
        plain,
        lambda w: static.capture(
            **{"model": w.model, "loss_fn": nn.MSELoss(), "example_inputs": (w.x, torch.ones(3, 2)), **options}
        ),
        error,
        words,
    )


def _static_decorate(name: str, error: Any, *words: str, **options: Any) -> Wrong:
    return Wrong(
        f"static.amp.decorate {name}", captured, lambda w: static.amp.decorate(w.optimizer, **options), error, words
    )


def _run(name: str, error: Any, use: Any, *words: str) -> Wrong:
    return Wrong(f"Executor.run {name}", captured, use, error, words)


class Unexportable(nn.Module):
    """Its forward pass depends on values."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.sum() > 0 else -x


def _garbage(name: str) -> str:
    Path(name).write_bytes(b"no checkpoint")
    return name


ROWS = [
    _capture("a string as model", TYPE, "torch.nn.Module", "str", model="net"),
    _capture("a string as loss", TYPE, "loss_fn", "'mse'", loss_fn="mse"),
    _capture("no inputs", TYPE, "example_inputs must be tensors", "then the label", example_inputs=()),
    _capture("a number as input", TYPE, "example_inputs must be tensors", "then the label", example_inputs=(1, 2)),
    _capture(
        "one tensor as inputs",
        TYPE,
        "example_inputs must be a tuple or list",
        "Tensor",
        example_inputs=torch.ones(3, 4),
    ),
    _capture("None as inputs", TYPE, "example_inputs", "NoneType", example_inputs=None),
    _capture("no label", VALUE, "example_inputs", "label", example_inputs=(torch.ones(3, 4),)),
    _capture(
        "a model that branches",
        UsageError,
        "torch.export cannot capture Unexportable",
        model=Unexportable(),
        loss_fn=None,
        example_inputs=(torch.ones(3, 4),),
    ),
    Wrong(
        "program.loss without one",
        plain,
        lambda w: static.capture(w.model, None, (w.x,)).loss,
        UsageError,
        ("without a loss", "loss_fn"),
    ),
    Wrong("program.minimize(3)", captured, lambda w: w.program.minimize(3), TYPE, ("torch.optim.Optimizer", "int")),
    Wrong(
        "static.load of something else",
        nothing,
        lambda w: static.load(_garbage("x.pt")),
        VALUE,
        ("x.pt", "Program.save"),
    ),
    _run("a model", TYPE, lambda w: static.Executor().run(w.model, w.feed), "Program", "Linear"),
    _run("nothing fed", VALUE, lambda w: static.Executor().run(w.program, {}), "feed has nothing", "input, label"),
    _run("a list as feed", TYPE, lambda w: static.Executor().run(w.program, [w.feed]), "feed", "list", "input, label"),
    _run(
        "an unknown name fed", VALUE, lambda w: static.Executor().run(w.program, {"x": 1}), "feed has x", "input, label"
    ),
    _run(
        "a string fed",
        TYPE,
        lambda w: static.Executor().run(w.program, {**w.feed, "input": "x"}),
        "feed['input']",
        "str",
    ),
    _run(
        "an unknown name fetched",
        VALUE,
        lambda w: static.Executor().run(w.program, w.feed, ["los"]),
        "los",
        "program.outputs",
    ),
    _run("a number fetched", TYPE, lambda w: static.Executor().run(w.program, w.feed, [3]), "fetch_list", "3"),
    _run(
        "a string as fetch_list",
        TYPE,
        lambda w: static.Executor().run(w.program, w.feed, "loss"),
        "fetch_list",
        "'loss'",
    ),
    Wrong("Executor('gpux')", nothing, lambda w: static.Executor("gpux"), VALUE, ("device='gpux'", "'cpu'")),
    Wrong("static.amp.decorate(3)", nothing, lambda w: static.amp.decorate(3), TYPE, ("torch.optim.Optimizer", "int")),
    _static_decorate("level='O3'", VALUE, "level='O3'", "'O1' or 'O2'", level="O3"),
    _static_decorate("dtype='float32'", VALUE, "dtype='float32'", "'float16' or 'bfloat16'", dtype="float32"),
    _static_decorate(
        "names of both signatures",
        TYPE,
        "use_pure_fp16 and level",
        "different signatures",
        level="O1",
        use_pure_fp16=True,
    ),
    _static_decorate("an unknown name", TYPE, "'levl'", "level", levl="O1"),
    _static_decorate("amp_lists=['exp']", TYPE, "amp_lists", "CustomOpLists", amp_lists=["exp"]),
    _static_decorate("emulate='yes'", VALUE, "emulate='yes'", "True", emulate="yes"),
    _static_decorate("incr_ratio=1", VALUE, "growth_factor=1", "above 1", incr_ratio=1.0),
    Wrong(
        "CustomOpLists an unknown op",
        nothing,
        lambda w: static.amp.CustomOpLists(["sofmax"]),
        VALUE,
        ("'sofmax'", "Did you mean"),
    ),
    Wrong(
        "CustomOpLists a bare string",
        nothing,
        lambda w: static.amp.CustomOpLists("softmax"),
        TYPE,
        ("'softmax'", "list"),
    ),
    Wrong("minimize(3)", captured, lambda w: static.amp.decorate(w.optimizer).minimize(3), TYPE, ("program.loss",)),
    Wrong(
        "minimize an output",
        captured,
        lambda w: static.amp.decorate(w.optimizer).minimize(w.program.outputs[0]),
        TYPE,
        ("program.loss",),
    ),
    Wrong(
        "amp_init before minimize",
        captured,
        lambda w: static.amp.decorate(w.optimizer).amp_init(),
        UsageError,
        ("minimize method first",),
    ),
    Wrong(
        "get_loss_scaling before minimize",
        captured,
        lambda w: static.amp.decorate(w.optimizer).get_loss_scaling(),
        UsageError,
        ("minimize()",),
    ),
]
