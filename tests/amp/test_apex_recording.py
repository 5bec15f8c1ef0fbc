"""The real Apex's runs, replayed: scales, skips and dtypes exactly, values within 1e-3.

Recorded on a CPU in float16. What the recording's notes call defects is not imitated; each such case is named here.
"""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from halfstep import amp
from halfstep.core.dtypes import dtype_name
from tests.support.apex_recording import assert_near, batch, branch, flat, golden, grid, net, numbers, optimizer
from tests.support.worlds import advance, scaled_backward, start_amp, step_and_clear

FACTS = golden("apex_amp")


def dtypes(named: Any) -> dict[str, str]:
    return {name: dtype_name(tensor.dtype) for name, tensor in named}


def start(level: str, make: str = "sgd", **options: Any) -> tuple[Any, Any]:
    return start_amp(net(), partial(optimizer, make), level, dtype=torch.float16, **options)


def scaler_entry(i: int = 0) -> dict[str, Any]:
    return amp.state_dict()[f"loss_scaler{i}"]


LOSSES = {
    "ce": lambda out, y, z: F.cross_entropy(out, y),
    "mse": lambda out, y, z: F.mse_loss(out, z),
    "ce*64": lambda out, y, z: 64 * F.cross_entropy(out, y),
}


def train(case: dict[str, Any], level: str, opt: str, loss_name: str, inject: list[int], **options: Any) -> None:
    """Train as the recording did and compare every recorded fact."""
    model = net()
    if level == "O2":  # masters start from the fp32 weights, in Apex from the rounded ones: start from what is both
        for module in (m for m in model.modules() if not isinstance(m, torch.nn.modules.batchnorm._BatchNorm)):
            for p in module.parameters(recurse=False):
                p.data = p.data.half().float()
    model, optim = amp.initialize(
        model, optimizer(opt, model.parameters()), opt_level=level, dtype=torch.float16, verbosity=0, **options
    )
    # A static scale with an injected overflow: Apex let the weights go to NaN, ours skips the step.
    skips = case["skipped_steps"] if amp._amp_state.loss_scalers[0].dynamic else inject
    # fp16 state and fp16 updates: "compare losses and weights loosely".
    loose = 1e-3 if level != "O3" else 1e-2
    for t in range(len(case["loss"])):
        x, y, z = batch(t)
        out = model(x)
        loss = LOSSES[loss_name](out, y, z)
        if t in inject:
            loss = loss * math.inf
        assert scaler_entry()["loss_scale"] == case["scale_used"][t]
        before = [p.detach().clone() for p in model.parameters()]
        with amp.scale_loss(loss, optim) as scaled_loss:
            scaled_loss.backward()
        if t == 0:
            assert dtype_name(scaled_loss.dtype) == case["scaled_loss_dtype"]
            named = zip(model.named_parameters(), amp.master_params(optim), strict=True)
            for (name, param), master in named:
                if "step0_master_grads" in case:  # left out of some cases
                    assert_near(flat(master.grad), case["step0_master_grads"][name], loose, f"gradient of {name}")
                    # Apex left a 16-bit gradient of the model beside its master's; here there is one gradient.
                    kind = "float32" if master is not param else case["step0_model_grad_dtypes"][name]
                    assert dtype_name(param.grad.dtype) == kind
        step_and_clear(optim)
        unchanged = all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        assert unchanged == (t in skips), f"step {t}"
        assert scaler_entry() == {"loss_scale": case["scale_after"][t], "unskipped": case["unskipped"][t]}
        if not (set(skips) - set(case["skipped_steps"])):
            assert_near([loss.item()], [case["loss"][t]], loose, f"loss of step {t}")

    assert amp.steps_skipped(optim) == len(skips)
    assert dtype_name(out.dtype) == case["output_dtype"]
    assert dtype_name(loss.dtype) == case["loss_dtype"]
    assert dtypes(model.named_parameters()) == case["param_dtypes"]
    assert dtypes(model.named_buffers()) == case["buffer_dtypes"]
    assert dtypes(model.state_dict().items()) == case["state_dict_dtypes"]
    assert amp.state_dict() == case["amp_state_dict"]
    masters = dict(zip(dict(model.named_parameters()), amp.master_params(optim), strict=True))
    assert dtypes(masters.items()) == case["master_dtypes"]
    assert {n: masters[n] is p for n, p in model.named_parameters()} == case["master_is_model_param"]
    # Keyed by the model's parameters, where Apex had masters; a fused step keeps those in its state.
    state = {n: {k: dtype_name(v.dtype) for k, v in optim.state[p].items()} for n, p in model.named_parameters()}
    assert {n: {k: v for k, v in s.items() if k not in ("step", "master")} for n, s in state.items()} == {
        n: {k: v for k, v in s.items() if k != "step"} for n, s in case["optimizer_state_dtypes"].items()
    }
    if set(skips) - set(case["skipped_steps"]):
        assert all(m.isfinite().all() for m in masters.values())
        return
    for name, param in model.named_parameters():
        assert_near(flat(param), case["final_params"][name], loose, name)
        assert_near(flat(masters[name]), case["final_masters"][name], loose, f"master of {name}")
    for name, buffer in model.named_buffers():
        assert_near(flat(buffer), case["final_buffers"][name], loose, name)
    model.eval()
    with torch.no_grad():
        assert_near(flat(model(batch(99)[0][:2])), case["eval_output_rows01"], loose, "eval output")


@pytest.mark.parametrize("key", FACTS["levels"]["cases"])
def test_level(key: str) -> None:
    level, opt, loss_name, scale, *rest = key.split("/")
    inject = [int(t) for t in rest[0].removeprefix("inf@").split(",")] if rest else []
    options = {} if scale == "default" else {"loss_scale": scale}
    train(FACTS["levels"]["cases"][key], level, opt, loss_name, inject, **options)


OVERRIDES: dict[str, dict[str, Any]] = {
    "O0/cast_model_outputs=float16": {"cast_model_outputs": torch.float16},
    "O2/cast_model_outputs=float16": {"cast_model_outputs": torch.float16},
    "O2/cast_model_type=float32": {"cast_model_type": torch.float32},
    "O2/dynamic,max_loss_scale=1024": {"max_loss_scale": 1024.0},
    "O2/dynamic,min_loss_scale=32768,inf": {"min_loss_scale": 32768.0},
    "O2/keep_batchnorm_fp32=False": {"keep_batchnorm_fp32": False},
    "O2/master_weights=False": {"master_weights": False},
    "O3/keep_batchnorm_fp32=True": {"keep_batchnorm_fp32": True},
}


@pytest.mark.parametrize("key", FACTS["levels"]["overrides"])
def test_override(key: str) -> None:
    case = FACTS["levels"]["overrides"][key]
    scale = "dynamic" if "dynamic" in key else str(case["scale_used"][0])
    inject = [1, 2, 4] if key.endswith(",inf") else []
    train(case, key[:2], "sgd", "ce", inject, loss_scale=scale, **OVERRIDES[key])


@pytest.mark.parametrize("key", FACTS["multi"]["cases"])
def test_several_losses_and_optimizers(key: str) -> None:
    case = FACTS["multi"]["cases"][key]
    level, layout, losses, *rest = key.split("/")
    variant = rest[0] if rest else ""
    a, b = branch(10), branch(20)
    if layout == "one_optimizer":
        groups = [{"params": list(a.parameters())}, {"params": list(b.parameters()), "lr": 0.05}]
        optimizers = [torch.optim.SGD(groups, lr=0.1, momentum=0.9)]
        served = [optimizers, optimizers, optimizers]
    else:
        optimizers = [optimizer("sgd", a.parameters()), optimizer("adam", b.parameters())]
        alone_a, alone_b, both = optimizers[:1], optimizers[1:], optimizers
        served = [alone_a, alone_b, both] if layout == "separate" else [alone_a, both, alone_b]
    num_losses = int(losses.removeprefix("num_losses="))
    ceiling = {"": 1024.0, "window=3": 4096.0}.get(variant, 2.0**24)
    amp.initialize(
        [a, b],
        optimizers,
        opt_level=level,
        dtype=torch.float16,
        num_losses=num_losses,
        loss_scale=128.0 if variant == "static128" else "dynamic",
        max_loss_scale=ceiling,
        verbosity=0,
    )
    if variant == "window=3":
        for scaler in amp._amp_state.loss_scalers:
            scaler.rule = replace(scaler.rule, growth_interval=3)
    inject = {"window=3": {(1, 2), (0, 5), (1, 5)}, "static128": set()}.get(variant, {(1, 2)})

    for t in range(len(case["stepped"])):
        x, z = batch(t)[0], grid((8, 2), 300 + 3 * t)
        order = "a b ab" if layout != "shared" else "a ab b"
        for i, parts in enumerate(order.split()):
            out = sum(model(x) for name, model in (("a", a), ("b", b)) if name in parts)
            loss = 0.25 * F.mse_loss(out, z)
            if (i, t) in inject:
                loss = loss * math.inf
            assert_near([loss.item()], [case["losses"][t][i]], 2e-3, f"loss {i} of step {t}")
            scaled_backward(loss, served[i], loss_id=i if num_losses > 1 else 0)
        skipped = [amp.steps_skipped(o) for o in optimizers]
        for o in optimizers:
            o.step()
        stepped = [amp.steps_skipped(o) == before for o, before in zip(optimizers, skipped, strict=True)]
        for o in optimizers:
            o.zero_grad()
        assert stepped == case["stepped"][t]
        entries = [scaler_entry(i) for i in range(num_losses)]
        assert [e["loss_scale"] for e in entries] == case["scales_after_step"][t]
        assert [e["unskipped"] for e in entries] == case["unskipped_after_step"][t]
    assert amp.state_dict() == case["amp_state_dict"]
    loose = 1e-2 if level == "O3" else 1e-3
    for model, recorded in ((a, case["final_a"]), (b, case["final_b"])):
        for param, values in zip(model.parameters(), recorded, strict=True):
            assert_near(flat(param), values, loose)


# Static 1.0 lost the gradients of fp32 parameters; a first delayed window without zero_grad lost them too.
LOST_GRADIENTS = {"O2/1.0/plain", "O2/2.0/delay/no_zero_grad_first"}


@pytest.mark.parametrize("key", [*FACTS["accumulation"]["cases"], *FACTS["accumulation"]["no_zero_grad_first"]])
def test_accumulation(key: str) -> None:
    facts = FACTS["accumulation"]
    level, scale, how, *rest = key.split("/")
    case = facts["no_zero_grad_first" if rest else "cases"][key]
    right = facts["plain_fp32"] if key in LOST_GRADIENTS else None
    model, optim = start(level, loss_scale=scale, max_loss_scale=1024.0)
    if not rest:
        optim.zero_grad()
    loose = 2e-2 if level == "O3" else 2e-3
    for s in range(3):
        for j in range(3):
            t = 3 * s + j
            x, y, _ = batch(t)
            loss = F.cross_entropy(model(x), y)
            scaled_backward(loss, optim, delay_unscale=how == "delay" and j < 2)
            if right is None:
                assert_near([loss.item()], [case["loss"][t]], loose)
                if s == 0:
                    for (name, param), master in zip(model.named_parameters(), amp.master_params(optim), strict=True):
                        waits = how == "delay" and j < 2  # Apex left these scaled, and not on masters
                        recorded = case["model_grads" if waits else "master_grads"][j][name]
                        by = scaler_entry()["loss_scale"] if waits else 1.0
                        assert_near(flat(master.grad * by), recorded, loose, f"{name} after pass {j}")
                        assert master.grad is param.grad, "Apex had two"
            assert scaler_entry()["loss_scale"] == case["scale_after"][t]
        skipped = amp.steps_skipped(optim)
        optim.step()
        assert (amp.steps_skipped(optim) == skipped) == case["stepped"][s]
        optim.zero_grad()
    final = right["final_params"] if right else case["final_masters"]
    for (name, _), master in zip(model.named_parameters(), amp.master_params(optim), strict=True):
        assert_near(flat(master), final[name], 1e-2 if right or level == "O3" else 1e-3, name)


@pytest.mark.parametrize("key", FACTS["clip"]["cases"])
def test_clip(key: str) -> None:
    case = FACTS["clip"]["cases"][key]
    level, arguments = key.split("/")
    max_norm, norm_type = (float(part.split("=")[1]) for part in arguments.split(","))
    model, optim = start(level, loss_scale=128.0)
    loose = 2e-2 if level == "O3" else 1e-3
    for t, recorded in enumerate(case["steps"]):
        x, y, _ = batch(t)
        scaled_backward(F.cross_entropy(model(x), y), optim)
        norm = torch.nn.utils.clip_grad_norm_(amp.master_params(optim), max_norm, norm_type)
        assert_near([norm.item()], [recorded["norm"]], loose, f"norm of step {t}")
        step_and_clear(optim)
    for master, values in zip(amp.master_params(optim), case["final_masters"], strict=True):
        assert_near(flat(master), values, loose)


@pytest.mark.parametrize("key", FACTS["checkpoint"]["cases"])
def test_checkpoint(key: str) -> None:
    """Apex lost the masters and rounded the optimizer state at O2; ours resumes bit for bit at every level."""
    case, level = FACTS["checkpoint"]["cases"][key], key[:2]

    def run(model: nn.Module, optim: torch.optim.Optimizer, steps: range) -> list[float]:
        losses = []
        for t in steps:
            x, y, _ = batch(t)
            loss = F.cross_entropy(model(x), y)
            losses.append(loss.item())
            advance(loss * math.inf if t == 1 else loss, optim)
        return losses

    loose = 1e-2 if level == "O3" else 1e-3
    how: Any = {"make": "adam", "loss_scale": "dynamic", "max_loss_scale": 1024.0}
    model, optim = start(level, **how)
    assert_near(run(model, optim, range(4)), case["before"], loose)
    saved = copy.deepcopy({"model": model.state_dict(), "optimizer": optim.state_dict(), "amp": amp.state_dict()})
    assert saved["amp"] == case["saved_amp"]
    straight = run(model, optim, range(4, 8))
    assert_near(straight, case["straight"], loose)

    again, again_optim = start(level, **how)
    if "after_first_zero_grad" in key:
        again_optim.zero_grad()
    again.load_state_dict(saved["model"])
    again_optim.load_state_dict(saved["optimizer"])
    amp.load_state_dict(saved["amp"])
    assert amp.state_dict() == case["loaded_amp"]
    again_optim.zero_grad()
    assert run(again, again_optim, range(4, 8)) == straight
    assert all(torch.equal(a, b) for a, b in zip(amp.master_params(optim), amp.master_params(again_optim), strict=True))
    assert numbers(straight).isfinite().all()
