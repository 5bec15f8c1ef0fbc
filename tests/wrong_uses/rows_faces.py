"""Wrong uses of Model, TrainStep, check, watch, op lists, policies and numerics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

import halfstep
from halfstep import OpLists, Policy, numerics, oplists, parallel
from halfstep.core.errors import ArgumentTypeError, ArgumentValueError, UsageError
from halfstep.numerics import Row

from .worlds import World, Wrong, net, networked, nothing, plain, stepping

__all__ = ["ROWS"]

VALUE, TYPE = ArgumentValueError, ArgumentTypeError


def _garbage(name: str) -> str:
    Path(name).write_bytes(b"no checkpoint")
    return name


def _prepare(name: str, error: Any, *words: str, **options: Any) -> Wrong:
    return Wrong(
        f"Model.prepare {name}",
        networked,
        lambda w: w.network.prepare(**{"optimizer": w.optimizer, "loss": nn.CrossEntropyLoss(), **options}),
        error,
        words,
    )


_SINGLES: Any = DataLoader([(torch.ones(4), 1)], batch_size=None)  # type: ignore[arg-type]


def _fit(name: str, error: Any, *words: str, **options: Any) -> Wrong:
    return Wrong(
        f"Model.fit {name}",
        networked,
        lambda w: w.network.fit(**{"train_data": w.data, "verbose": 0, **options}),
        error,
        words,
    )


_MODEL = [
    Wrong("Model(3)", nothing, lambda w: halfstep.Model(3), TYPE, ("torch.nn.Module", "int")),
    _prepare("optimizer='adam'", TYPE, "torch.optim.Optimizer", "str", optimizer="adam"),
    _prepare("loss='mse'", TYPE, "callable", "str", loss="mse"),
    _prepare("metrics=3", TYPE, "metric", "int", metrics=3),
    _prepare("amp_configs='O3'", VALUE, "'O3'", "'O0', 'O1' or 'O2'", amp_configs="O3"),
    _prepare("amp_configs=3", TYPE, "a level or a dict", "int", amp_configs=3),
    _prepare("an unknown key", VALUE, "'lvl'", "'level'", amp_configs={"lvl": "O1"}),
    _prepare("use_pure_fp16", VALUE, "'use_pure_fp16'", "'level': 'O2'", amp_configs={"use_pure_fp16": True}),
    _prepare("a wrong dtype", VALUE, "'int8'", "use one of", amp_configs={"level": "O2", "dtype": "int8"}),
    _prepare("a wrong scale", VALUE, "init_scale=0", "above 0", amp_configs={"level": "O2", "init_loss_scaling": 0}),
    _prepare("a wrong list", TYPE, "'exp'", "list", amp_configs={"level": "O2", "custom_black_list": "exp"}),
    Wrong(
        "Model.fit before prepare",
        plain,
        lambda w: halfstep.Model(w.model).fit([], verbose=0),
        UsageError,
        ("optimizer and a loss", "Model.prepare"),
    ),
    Wrong(
        "Model.evaluate before prepare",
        networked,
        lambda w: halfstep.Model(w.model).evaluate(w.data, verbose=0),
        UsageError,
        ("no loss", "Model.prepare"),
    ),
    _fit("epochs=0", VALUE, "epochs=0", "1 or more", epochs=0),
    _fit("epochs='2'", VALUE, "epochs='2'", "whole number", epochs="2"),
    _fit("epochs=1.5", VALUE, "epochs=1.5", "whole number", epochs=1.5),
    _fit("batch_size=0", VALUE, "batch_size=0", "1 or more", batch_size=0),
    _fit("log_freq=0", VALUE, "log_freq=0", "1 or more", log_freq=0),
    _fit("accumulate_grad_batches=0", VALUE, "accumulate_grad_batches=0", "1 or more", accumulate_grad_batches=0),
    _fit("verbose=5", VALUE, "verbose=5", "0, 1 or 2", verbose=5),
    _fit("callbacks=3", TYPE, "callbacks", "Callback", "int", callbacks=3),
    _fit("callbacks=[print]", TYPE, "callbacks", "Callback", callbacks=[print]),
    _fit("num_workers=-1", VALUE, "num_workers=-1", "0 or more", num_workers=-1),
    _fit("a number as data", TYPE, "dataset", "int", train_data=3),
    _fit("None as data", TYPE, "dataset", "NoneType", train_data=None),
    _fit("a number as eval_data", TYPE, "dataset", "int", eval_data=3),
    _fit("a loader of samples", TYPE, "label", "int", "tensor", train_data=_SINGLES),
    _fit("batches of one part", VALUE, "a label", "1 part", train_data=[torch.ones(3, 4)]),
    Wrong(
        "Model.evaluate batches of one part",
        networked,
        lambda w: w.network.evaluate([torch.ones(3, 4)], verbose=0),
        VALUE,
        ("a label", "1 part"),
    ),
    Wrong("Model.predict(3)", networked, lambda w: w.network.predict(3, verbose=0), TYPE, ("dataset", "int")),
    Wrong(
        "Model.load of something else",
        networked,
        lambda w: w.network.load(_garbage("x.pt")[:-3]),
        VALUE,
        ("x.pt", "Model.save"),
    ),
    Wrong(
        "Model.load of weights alone",
        networked,
        lambda w: w.network.load(_weights_alone(w)),
        VALUE,
        ("x.pt", "Model.save"),
    ),
    Wrong(
        "Model.load of another network",
        networked,
        lambda w: w.network.load(_of_another()),
        VALUE,
        ("x.pt", "shape (3, 4)", "Nothing was loaded"),
    ),
]


def _weights_alone(w: World) -> str:
    torch.save(w.model.state_dict(), "x.pt")
    return "x"


def _of_another() -> str:
    other = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    halfstep.Model(other).save("x")
    return "x"


def _train_step(name: str, error: Any, *words: str, **options: Any) -> Wrong:
    return Wrong(
        f"TrainStep {name}",
        plain,
        lambda w: halfstep.TrainStep(
            **{"model": w.model, "loss_fn": nn.MSELoss(), "optimizer": w.optimizer, **options}
        ),
        error,
        words,
    )


def _without_gradients(w: World) -> None:
    with torch.no_grad():
        w.step(w.x, w.x)


_TRAIN_STEP = [
    _train_step("model=3", TYPE, "model must be", "int", model=3),
    _train_step("loss_fn='mse'", TYPE, "loss_fn must be", "str", loss_fn="mse"),
    _train_step("optimizer=3", TYPE, "torch.optim.Optimizer", "int", optimizer=3),
    _train_step("scaler=8.0", TYPE, "scaler must be", "float", scaler=8.0),
    _train_step("max_grad_norm='1'", VALUE, "max_grad_norm='1'", "above 0", max_grad_norm="1"),
    _train_step("max_grad_norm=-1", VALUE, "max_grad_norm=-1", "above 0", max_grad_norm=-1.0),
    _train_step("max_grad_norm=nan", VALUE, "max_grad_norm=nan", "above 0", max_grad_norm=float("nan")),
    _train_step("max_grad_norm=True", VALUE, "max_grad_norm=True", "above 0", max_grad_norm=True),
    _train_step("accumulate=0", VALUE, "accumulate=0", "1 or more", accumulate=0),
    _train_step("accumulate=1.5", VALUE, "accumulate=1.5", "whole number", accumulate=1.5),
    _train_step("accumulate=True", VALUE, "accumulate=True", "whole number", accumulate=True),
    Wrong(
        "TrainStep LBFGS",
        plain,
        lambda w: halfstep.TrainStep(w.model, None, torch.optim.LBFGS(w.model.parameters())),
        TYPE,
        ("LBFGS", "without a closure"),
    ),
    Wrong(
        "TrainStep an optimizer of another model",
        plain,
        lambda w: halfstep.TrainStep(w.model, None, torch.optim.SGD(net().parameters(), 0.1)),
        VALUE,
        ("none of the model's parameters", "Make the optimizer from"),
    ),
    Wrong("TrainStep a batch without target", stepping, lambda w: w.step(w.x), TYPE, ("1 came", "step(x, y)")),
    Wrong(
        "TrainStep under no_grad", stepping, _without_gradients, UsageError, ("gradients are off", "where they are on")
    ),
    Wrong(
        "TrainStep a loss that is a vector",
        plain,
        lambda w: halfstep.TrainStep(_wide, None, w.optimizer)(w.x),
        VALUE,
        ("shape (3, 4)", "mean()"),
    ),
    Wrong(
        "TrainStep a loss that is a number",
        plain,
        lambda w: halfstep.TrainStep(_number, None, w.optimizer)(w.x),
        TYPE,
        ("floating tensor", "float"),
    ),
    Wrong(
        "TrainStep a loss without gradient",
        plain,
        lambda w: halfstep.TrainStep(_detached, None, w.optimizer)(w.x),
        UsageError,
        ("requires no gradient", "detach"),
    ),
]


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x


def _number(x: torch.Tensor) -> float:
    return 3.0


def _detached(x: torch.Tensor) -> torch.Tensor:
    return x.mean()


_FINDINGS = [
    Wrong("check(3)", nothing, lambda w: halfstep.check(3), TYPE, ("torch.nn.Module", "int")),
    Wrong("check optimizer=3", plain, lambda w: halfstep.check(w.model, 3), TYPE, ("torch.optim.Optimizer", "int")),
    Wrong("check scaler=8.0", plain, lambda w: halfstep.check(w.model, scaler=8.0), TYPE, ("GradScaler", "float")),
    Wrong(
        "check policy='O2'", plain, lambda w: halfstep.check(w.model, policy="O2"), TYPE, ("halfstep.Policy", "'O2'")
    ),
    Wrong(
        "check accumulate=0",
        plain,
        lambda w: halfstep.check(w.model, accumulate=0),
        VALUE,
        ("accumulate=0", "1 or more"),
    ),
    Wrong("check batch=3", plain, lambda w: halfstep.check(w.model, batch=3), TYPE, ("batch", "3", "function")),
    Wrong("watch(3)", nothing, lambda w: halfstep.watch(3), TYPE, ("torch.optim.Optimizer", "int")),
    Wrong("watch every=0", plain, lambda w: halfstep.watch(w.optimizer, every=0), VALUE, ("every=0", "1 or more")),
    Wrong(
        "watch every='a'", plain, lambda w: halfstep.watch(w.optimizer, every="a"), VALUE, ("every='a'", "whole number")
    ),
]

_VALUES = [
    Wrong("OpLists('O9')", nothing, lambda w: OpLists("O9"), VALUE, ("level='O9'", "O1")),
    Wrong("OpLists white='softmax'", nothing, lambda w: OpLists("O1", white="softmax"), TYPE, ("'softmax'", "tuple")),
    Wrong(
        "OpLists an unknown op",
        nothing,
        lambda w: OpLists("O1", black=("sofmax",)),
        VALUE,
        ("'sofmax'", "OpLists.custom"),
    ),
    Wrong(
        "OpLists.custom level='O3'", nothing, lambda w: OpLists.custom(level="O3"), VALUE, ("level='O3'", "use one of")
    ),
    Wrong(
        "OpLists.custom native with a list",
        nothing,
        lambda w: OpLists.custom(["exp"], level="native"),
        VALUE,
        ("level='native'", "'O1'"),
    ),
    Wrong("OpLists.parse('bla')", nothing, lambda w: OpLists.parse("bla"), VALUE, ("'bla'", "LEVEL+op-op")),
    Wrong("OpLists.parse(3)", nothing, lambda w: OpLists.parse(3), VALUE, ("3", "O1+gelu-linear")),
    Wrong(
        "OpLists.parse an unknown op",
        nothing,
        lambda w: OpLists.parse("O1+sofmax"),
        VALUE,
        ("'sofmax'", "Did you mean"),
    ),
    Wrong(
        "OpLists.rule('sofmax')",
        nothing,
        lambda w: OpLists.default().rule("sofmax"),
        VALUE,
        ("Did you mean 'softmax'",),
    ),
    Wrong("OpLists.rule(3)", nothing, lambda w: OpLists.default().rule(3), TYPE, ("name or as a torch function", "3")),
    Wrong(
        "OpLists.rule(print)",
        nothing,
        lambda w: OpLists.default().rule(print),
        VALUE,
        ("no op of torch", "half_function"),
    ),
    Wrong("oplists.resolve('')", nothing, lambda w: oplists.resolve(""), VALUE, ("no op of torch",)),
    Wrong("Policy.from_level('O9')", nothing, lambda w: Policy.from_level("O9"), VALUE, ("'O9'", "Options are")),
    Wrong(
        "Policy.from_level in int8",
        nothing,
        lambda w: Policy.from_level("O2", torch.int8),
        VALUE,
        ("torch.int8", "use one of"),
    ),
    Wrong("Policy.parse('bla')", nothing, lambda w: Policy.parse("bla"), VALUE, ("'bla'", "name=value")),
    Wrong("Policy.parse(3)", nothing, lambda w: Policy.parse(3), TYPE, ("3", "name=value")),
    Wrong(
        "Policy.parse an integer dtype",
        nothing,
        lambda w: Policy.parse("param_dtype=int8"),
        VALUE,
        ("param_dtype='int8'", "use one of"),
    ),
    Wrong(
        "Policy.parse master_weights=yes",
        nothing,
        lambda w: Policy.parse("master_weights=yes"),
        VALUE,
        ("'yes'", "True or False"),
    ),
    Wrong(
        "Policy.parse loss_scale=big", nothing, lambda w: Policy.parse("loss_scale=big"), VALUE, ("'big'", '"dynamic"')
    ),
    Wrong(
        "convert_syncbn_model(3)", nothing, lambda w: parallel.convert_syncbn_model(3), TYPE, ("torch.nn.Module", "int")
    ),
]


def _rows_and(name: str, *lines: str) -> str:
    numerics.save_rows(name, [Row(0, "m", "grad")])
    with Path(name).open("a", encoding="utf-8") as file:
        file.write("\n".join(lines))
    return name


def _run(w: World) -> torch.Tensor:
    return w.model(w.x).sum()


_NUMERICS = [
    Wrong(
        "load_rows of a file that was cut short",
        nothing,
        lambda w: numerics.load_rows(_rows_and("cut.jsonl", '{"step": 1, "mod')),
        VALUE,
        ("Line 3 of cut.jsonl", "cut short", "save it again"),
    ),
    Wrong(
        "load_rows of a row without fields",
        nothing,
        lambda w: numerics.load_rows(_rows_and("empty.jsonl", "", "{}")),
        VALUE,
        ("Line 4 of empty.jsonl", "'step', 'module', and 'tensor'"),
    ),
    Wrong(
        "numerics.compare of a line that is a number",
        nothing,
        lambda w: numerics.compare([Row(0, "m", "grad")], _rows_and("number.jsonl", "3")),
        VALUE,
        ("Line 3 of number.jsonl", "delete the line"),
    ),
    *(
        Wrong(
            f"compare_step(samples={samples})",
            plain,
            lambda w, samples=samples: numerics.compare_step(lambda: _run(w), w.model, samples=samples),
            VALUE,
            (f"samples={samples}", "1 or more"),
        )
        for samples in (0, -1, 1.5)
    ),
    Wrong(
        "op_table(step, 'x')",
        plain,
        lambda w: numerics.op_table(lambda: _run(w), "x"),
        TYPE,
        ("torch.nn.Module", "str"),
    ),
]

ROWS = [*_MODEL, *_TRAIN_STEP, *_FINDINGS, *_VALUES, *_NUMERICS]
