"""Training scripts that are broken on purpose: 21 faults, each in three variants of model, level and dtype.

A fault is a table of slots of one script. ``<<broken||mended>>`` in a slot is what is wrong, and what the printed fix
says to write. ``cause`` is a pattern that the first finding must match, as "code severity where message", and ``fix``
one that its fix must match. The causes were written down before ``diagnose`` was.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["SCRIPTS", "Script"]

SCRIPT = """\
import copy
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from halfstep import amp

torch.manual_seed(0)


@FIRST@


class Part(nn.Module):
@PART@


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.part, self.last = First(), Part(), nn.Linear(32, 4)

    def forward(self, x, *more):
        h = @HIDDEN@
        return self.last(self.part(h, *more))


x = torch.randn(64, 16)
y = x @ torch.randn(16, 4)
@BATCH@
model = Net()
@BEFORE@
optimizer = @OPTIMIZER@
@START@
@AFTER_START@


def step():
    @CLEAR@
    @FIRST_OF_STEP@
    @COMPUTE@
    @BACKWARD@
    @LAST_OF_STEP@
    return loss


losses = [float(step().detach()) for _ in range(@STEPS@)]
"""

MODELS = {
    "mlp": "def First():\n    return nn.Sequential(nn.Linear(16, 32), nn.Tanh())",
    "cnn": """
        def First():
            conv = nn.Conv2d(1, 4, 3, padding=1)
            return nn.Sequential(nn.Unflatten(1, (1, 4, 4)), conv, nn.Tanh(), nn.Flatten(), nn.Linear(64, 32))
        """,
    "attention": """
        class First(nn.Module):
            def __init__(self):
                super().__init__()
                self.qkv, self.out = nn.Linear(4, 12), nn.Linear(16, 32)

            def forward(self, x):
                q, k, v = self.qkv(x.view(-1, 4, 4)).chunk(3, -1)
                return self.out(F.scaled_dot_product_attention(q, k, v).flatten(1))
        """,
}

DEFAULTS = {
    "PART": "def forward(self, h):\n    return h",
    "HIDDEN": "self.first(x)",
    "BATCH": "",
    "BEFORE": "",
    "OPTIMIZER": "torch.optim.SGD(model.parameters(), lr=0.05)",
    "AFTER_START": "",
    "CLEAR": "optimizer.zero_grad()",
    "FIRST_OF_STEP": "",
    "OUTPUT": "model(x)",
    "LOSS": "F.mse_loss(out.float(), y)",
    "INSIDE": "",
    "LAST_OF_STEP": "",
}
_COMPUTE = "out = @OUTPUT@\nloss = @LOSS@"
_BLOCK = "with amp.scale_loss(loss, @OPTIMIZERS@) as scaled:\n    scaled.backward()\n    @INSIDE@\noptimizer.step()"


def _initialized(level: str) -> dict[str, str]:
    start = f'model, optimizer = amp.initialize(model, optimizer, opt_level="{level}"@OPTIONS@, verbosity=0)'
    return {
        "START": start,
        "COMPUTE": _COMPUTE,
        "BACKWARD": _BLOCK,
        "OPTIONS": ", dtype=@DTYPE@",
        "OPTIMIZERS": "optimizer",
    }


def _scaled(scaler: str, autocast: str) -> dict[str, str]:
    return {
        "START": f"scaler = {scaler}",
        "COMPUTE": f"with {autocast}:\n" + textwrap.indent(_COMPUTE, "    "),
        "BACKWARD": "scaler.scale(loss).backward()\n@INSIDE@\nscaler.step(optimizer)\nscaler.update()",
        "SCALE": "256.0",
    }


_PLAIN = {"COMPUTE": _COMPUTE, "BACKWARD": "loss.backward()\n@INSIDE@\noptimizer.step()"}
LEVELS = {
    "plain": {**_PLAIN, "START": "model, x = model.to(@DTYPE@), x.to(@DTYPE@)"},
    "O0": {**_PLAIN, "START": ""},
    **{level: _initialized(level) for level in ("O1", "O2", "O3")},
    "autocast": _scaled('torch.amp.GradScaler("cpu", init_scale=@SCALE@)', 'torch.autocast("cpu", dtype=@DTYPE@)'),
    "GradScaler": _scaled("amp.GradScaler(init_loss_scaling=@SCALE@)", "amp.auto_cast(dtype=@DTYPE@)"),
}
TO_MASTERS = {
    "START": '<<@BAD_START@||model, optimizer = amp.initialize(model, optimizer, opt_level="O2", dtype=@DTYPE@)>>'
}
FP16, BF16, FP32 = "float16", "bfloat16", "float32"
WIDER = "<<torch.float16||torch.bfloat16>>"


@dataclass(frozen=True)
class Script:
    """A broken script.

    Attributes:
        fault: what is wrong.
        model: a key of ``MODELS``.
        level: a key of ``LEVELS``.
        dtype: the 16-bit dtype.
        slots: what the script has in its places.
        cause: a pattern of the first finding.
        fix: a pattern of what it says to do.
        names: the optimizers, by their names in the script.
    """

    fault: str
    model: str
    level: str
    dtype: str
    slots: dict[str, str]
    cause: str
    fix: str
    names: tuple[str, ...] = ("optimizer",)

    @property
    def name(self) -> str:
        return f"{self.fault}, {self.model}, {self.level}, {self.dtype}"

    def text(self, *, mended: bool = False, steps: int = 0) -> str:
        """The script, broken or mended, which takes so many steps."""
        found = SCRIPT
        slots = {"FIRST": MODELS[self.model], "DTYPE": f"torch.{self.dtype}", **DEFAULTS, **LEVELS[self.level]}
        slots |= {"BAD_START": slots["START"]} | self.slots | {"STEPS": str(steps)}
        while match := re.search(r"^( *)(.*?)@([A-Z_]+)@", found, re.MULTILINE):
            indent = "    " if match[3] == "PART" else match[1]
            lines = textwrap.dedent(slots[match[3]]).strip().splitlines() or [""]
            value = ("\n" + indent).join(lines) if not match[2] else "\n".join(lines)
            start = match.end() - len(match[3]) - 2
            found = found[:start] + (indent if match[3] == "PART" else "") + value + found[match.end() :]
        return re.sub(r"<<(.*?)\|\|(.*?)>>", r"\2" if mended else r"\1", found, flags=re.DOTALL)


def _attention(scores: str) -> str:
    return f"""
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, h):
            t = h.view(-1, 4, 8)
            q, k, v = self.q(t), self.k(t), self.v(t)
            mask = torch.ones(4, 4, dtype=torch.bool).triu(<<0||1>>)
            scores = {scores}
            return (scores.softmax(-1) @ v).flatten(1)
        """


_LARGE = {"PART": _attention("(600 * q) @ (600 * k).transpose(1, 2) / 600**2"), "DTYPE": WIDER}
_EPS = {
    "PART": "def forward(self, h):\n    h = h*(x[:, :1] > 0)\n    return h / (h.norm(dim=1)[:, None] + h.new([1e-8]))",
    "DTYPE": WIDER,
}
_ADAM = {"OPTIMIZER": "torch.optim.Adam(model.parameters(), lr=0.003)"}
_SCALED_ADAM = {**_ADAM, **TO_MASTERS, "OPTIONS": ", dtype=@DTYPE@, loss_scale=64.0"}
_SMALL = "torch.optim.{}(model.parameters(), lr={})"
_MASKED = {"PART": _attention("(q @ k.transpose(1, 2)).masked_fill(mask, -torch.inf)")}
_TIME = {
    "PART": "def forward(self, h, t):\n    return h + (t.float()[:, None] / 1000).sin().to(h.dtype)",
    "BATCH": "t = torch.arange(64) * 13",
    "OUTPUT": "model(x, <<t.to(torch.bfloat16)||t>>)",
}
_ROTARY = {
    "PART": """
        def __init__(self):
            super().__init__()
            self.register_buffer("inv_freq", 10000.0 ** (-torch.arange(32) / 32))

        def forward(self, h):
            angle = torch.arange(64)[:, None] * self.inv_freq
            return h * angle.cos().to(h.dtype)
        """,
    "AFTER_START": "model.part.inv_freq = <<model.part.inv_freq.to(@DTYPE@)||10000.0 ** (-torch.arange(32) / 32)>>",
}
_BATCH_NORM = {
    "PART": """
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(32)

        def forward(self, h):
            return self.norm(h)
        """,
    "AFTER_START": "<<model.part.norm.to(@DTYPE@)||model.part.norm.float()>>",
}
_CLIP = "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)"
_UNSCALED = {"INSIDE": f"<<||scaler.unscale_(optimizer)>>\n{_CLIP}"}
_CLIPPED = {"INSIDE": f"<<{_CLIP}||>>", "OPTIONS": ", dtype=@DTYPE@, loss_scale=4096.0"}
_RMS = """
    def forward(self, h):
        h = 400 * h
        return h * (h<<||.float()>>.square().mean(-1, keepdim=True) + 1e-3).rsqrt().to(h.dtype)
    """
_SUM = {"LOSS": "<<50 * (out.half() - y.half()).square().sum()||F.mse_loss(out.float(), y)>>"}
_MEAN = (
    "def forward(self, h):\n    h = 5000 * h.abs() + 3000\n    return h / (h<<||.float()>>.sum(-1, keepdim=True) / 32)"
)
_CUT = "the graph|no gradient"
_EMA = "get_ema_multi_avg_fn(0.999)"
_AVERAGED = {
    "AFTER_START": f"ema = AveragedModel(<<model||amp.master_model(model)>>, multi_avg_fn={_EMA})",
    "LAST_OF_STEP": "ema.update_parameters(<<model||amp.master_model(model)>>)",
}
_OWN_EMA = {
    "AFTER_START": """
        class Ema(nn.Module):
            def __init__(self, model, decay=0.999):
                super().__init__()
                self.module, self.decay = copy.deepcopy(model), decay

        ema = Ema(<<model||amp.master_model(model)>>)
        """,
    "LAST_OF_STEP": """
        with torch.no_grad():
            for a, p in zip(ema.module.parameters(), <<model||amp.master_model(model)>>.parameters()):
                a.lerp_(p, 1 - ema.decay)
        """,
}
_IN_BF16 = {"LOSS": "F.mse_loss(<<out.bfloat16(), y.bfloat16()||out.float(), y>>)"}
_ENTROPY = {"BATCH": "y = y.argmax(1)", "LOSS": "F.cross_entropy(<<out.bfloat16()||out.float()>>, y)"}
_TINY = {"LOSS": "1e-6 * F.mse_loss(out.float(), y)", "OPTIMIZER": _SMALL.format("Adam", 0.01)}
_STATIC = {**_TINY, "OPTIONS": ', dtype=@DTYPE@, loss_scale=<<8.0||"dynamic">>'}
_SAVED = """
    model.load_state_dict({k: v<<.half()||>> for k, v in model.state_dict().items()})
    """
_SECOND = "second = torch.optim.SGD(model.last.parameters(), lr=0.05)"
_TWO = {"OPTIMIZER": "torch.optim.SGD(model.first.parameters(), lr=0.05)"}
_FORGOTTEN = {
    **_TWO,
    "BEFORE": _SECOND,
    "FIRST_OF_STEP": "second.zero_grad()",
    "INSIDE": "<<second.step()||scaler.step(second)>>",
}
_DROPOUT = {
    "PART": "def forward(self, h):\n    return F.dropout(h, 0.2, self.training)",
    "FIRST_OF_STEP": "<<torch.manual_seed(0)||>>",
}
_STATES = {"BATCH": "state = torch.get_rng_state()", "FIRST_OF_STEP": "<<torch.set_rng_state(state)||>>"}
_RANKS = """
    import os, tempfile
    import torch.distributed as dist
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    """
_DDP = {
    "BATCH": _RANKS,
    "AFTER_START": "model = nn.parallel.DistributedDataParallel(model)",
    "OUTPUT": "<<model.module(x)||model(x)>>",
}
_NO_SYNC = {
    **_DDP,
    "OUTPUT": "model(x)",
    "COMPUTE": "<<with model.no_sync():||if True:>>\n    out = model(x)\n    loss = @LOSS@",
}
_UNCLEARED = {"CLEAR": "<<||optimizer.zero_grad()>>"}
_RAW = {"BATCH": "x, more = <<1e5 * x||x>>, ()"}

FAULTS: dict[str, list[tuple[str, str, str, dict[str, str], str, str]]] = {
    "overflow in attention": [
        ("mlp", "O1", FP16, _LARGE, "HS116 error part.* bmm in float16", "bfloat16"),
        ("attention", "O2", FP16, _LARGE, "HS116 error part", "bfloat16"),
        ("cnn", "autocast", FP16, _LARGE, "HS116 error part", "bfloat16"),
    ],
    "eps lost": [
        ("mlp", "plain", FP16, {**_ADAM, **TO_MASTERS}, "HS106 error", "O2"),
        ("cnn", "O3", FP16, _SCALED_ADAM, "HS106 error", "O2"),
        ("attention", "O2", FP16, _EPS, "HS116 error part", "bfloat16"),
    ],
    "learning rate": [
        ("mlp", "O0", FP32, {"OPTIMIZER": _SMALL.format("SGD", "<<20.0||0.05>>")}, "HS120", "lower the learning rate"),
        ("attention", "O1", BF16, {"OPTIMIZER": _SMALL.format("AdamW", "<<1.0||0.01>>")}, "HS120", "lower the lear"),
        ("cnn", "O2", FP16, {"OPTIMIZER": _SMALL.format("SGD", "<<20.0||0.05>>")}, "HS120", "lower the learning rate"),
    ],
    "lost updates": [
        ("mlp", "plain", BF16, {"OPTIMIZER": _SMALL.format("AdamW", 2e-4), **TO_MASTERS}, "HS101 error", "O2"),
        ("cnn", "O3", BF16, {"OPTIMIZER": _SMALL.format("SGD", 1e-4), **TO_MASTERS}, "HS101 error", "O2"),
        ("attention", "O3", BF16, {"OPTIMIZER": _SMALL.format("Adam", 1e-4), **TO_MASTERS}, "HS101 error", "O2"),
    ],
    "mask": [
        ("mlp", "O0", FP32, _MASKED, "error part.*softmax", "mask"),
        ("attention", "O1", BF16, _MASKED, "error part.*softmax", "mask"),
        ("cnn", "O2", FP16, _MASKED, "error part.*softmax", "mask"),
    ],
    "time steps": [
        ("mlp", "O2", BF16, _TIME, "HS118 (error|warning)", "fp32|integers"),
        ("cnn", "O3", BF16, _TIME, "HS118 (error|warning)", "fp32|integers"),
        ("attention", "plain", BF16, _TIME, "HS118 (error|warning)", "fp32|integers"),
    ],
    "buffers": [
        ("mlp", "O2", BF16, _ROTARY, "HS104 error .*inv_freq", "fp32"),
        ("attention", "O2", FP16, _ROTARY, "HS104 error .*inv_freq", "fp32"),
        ("cnn", "O2", BF16, _BATCH_NORM, "HS104 .*norm", "fp32"),
    ],
    "forgotten scale": [
        ("mlp", "plain", FP16, TO_MASTERS, "HS107 error", "loss scale"),
        ("cnn", "O2", FP16, {"OPTIONS": ', dtype=@DTYPE@, loss_scale=<<1.0||"dynamic">>'}, "HS107 error", "loss_scale"),
        ("attention", "O1", FP16, {"OPTIONS": ', dtype=@DTYPE@, loss_scale=<<1.0||"dynamic">>'}, "HS107", "loss_scale"),
    ],
    "clip before unscale": [
        ("mlp", "autocast", FP16, {**_UNSCALED, "SCALE": "65536.0"}, "(?i)clip.*scale", "unscale_"),
        ("cnn", "GradScaler", FP16, {**_UNSCALED, "SCALE": "65536.0"}, "(?i)clip.*scale", "unscale_"),
        ("attention", "O2", FP16, _CLIPPED, "(?i)clip.*scale", "after the block"),
    ],
    "sum in fp16": [
        ("mlp", "O2", FP16, _SUM, "HS1(05|16).* loss", "float"),
        ("attention", "O2", FP16, {"PART": _MEAN}, "HS116 error part.*sum", "fp32|float"),
        ("cnn", "O2", FP16, {"PART": _RMS}, "HS104 error part", "fp32"),
    ],
    "frozen part": [
        ("mlp", "O0", FP32, {"AFTER_START": "<<model.last = nn.Linear(32, 4)||>>"}, "HS115", "model.parameters"),
        ("cnn", "O1", BF16, {"HIDDEN": "self.first(x)<<.detach()||>>"}, f"first.*({_CUT})", "detach|no_grad"),
        (
            "attention",
            "O2",
            FP16,
            {"HIDDEN": "<<torch.no_grad()(self.first)||self.first>>(x)"},
            f"first.*({_CUT})",
            "detach|no_grad",
        ),
    ],
    "stale EMA": [
        ("mlp", "O2", BF16, _AVERAGED, "HS109 error", "master_model"),
        ("cnn", "O2", FP16, _AVERAGED, "HS109 error", "master_model"),
        ("attention", "O3", BF16, _OWN_EMA, "HS109 error", "master_model"),
    ],
    "wrong loss dtype": [
        ("mlp", "O2", BF16, _ENTROPY, "HS105", "float"),
        ("cnn", "O3", BF16, _IN_BF16, "HS105", "float"),
        ("attention", "plain", BF16, {**_ENTROPY, "OPTIMIZER": _SMALL.format("SGD", 0.5)}, "HS105", "float"),
    ],
    "forgotten zero_grad": [
        ("mlp", "O0", FP32, _UNCLEARED, "HS132 error", "zero_grad"),
        ("cnn", "O2", FP16, _UNCLEARED, "HS132 error", "zero_grad"),
        ("attention", "autocast", FP16, {**_UNCLEARED, "SCALE": "256.0"}, "HS132 error", "zero_grad"),
    ],
    "bad batch": [
        ("mlp", "O0", FP32, {"BATCH": "x[3, 5] = <<torch.nan||0.0>>"}, "batch.*NaN", "batch"),
        ("cnn", "O1", BF16, {"BATCH": "y[7, 1] = <<torch.nan||0.0>>"}, "the loss.*NaN", "target"),
        ("attention", "O2", FP16, {"BATCH": "x[3, 5] = <<torch.inf||0.0>>"}, "batch.*inf", "batch"),
    ],
    "denormals": [
        ("mlp", "O2", FP16, _STATIC, "HS1(17|21)", "loss scale"),
        ("cnn", "O1", FP16, _STATIC, "HS1(17|21)", "loss scale"),
        ("attention", "autocast", FP16, {**_TINY, "SCALE": "<<2.0||65536.0>>"}, "HS1(17|21)", "loss scale"),
    ],
    "fp16 checkpoint": [
        ("mlp", "O0", FP32, {"LAST_OF_STEP": _SAVED}, "HS112", "load_state_dict"),
        ("cnn", "O1", BF16, {"LAST_OF_STEP": _SAVED}, "HS112", "load_state_dict"),
        ("attention", "autocast", FP16, {"LAST_OF_STEP": _SAVED}, "HS112", "load_state_dict"),
    ],
    "two optimizers": [
        ("mlp", "autocast", FP16, {**_FORGOTTEN, "SCALE": "65536.0"}, "loss scale|scaled", "scaler.step"),
        ("cnn", "GradScaler", FP16, {**_FORGOTTEN, "SCALE": "65536.0"}, "loss scale|scaled", "scaler.step"),
        (
            *("attention", "O1", FP16),
            {
                **_TWO,
                "BEFORE": _SECOND,
                "START": "<<model, optimizer||model, [optimizer, second]>> = amp.initialize(model, "
                "<<optimizer||[optimizer, second]>>, opt_level='O1', dtype=@DTYPE@, verbosity=0)",
                "FIRST_OF_STEP": "second.zero_grad()",
                "OPTIMIZERS": "<<optimizer||[optimizer, second]>>",
                "LAST_OF_STEP": "second.step()",
            },
            *("loss scale|scaled", "initialize|scale_loss"),
        ),
    ],
    "dropout of seeds": [
        ("mlp", "O0", FP32, _DROPOUT, "random numbers", "seed"),
        ("cnn", "O1", BF16, _DROPOUT, "random numbers", "seed"),
        ("attention", "O2", FP16, {**_DROPOUT, **_STATES}, "random numbers", "seed"),
    ],
    "DDP without sync": [
        ("mlp", "O0", FP32, _DDP, "DistributedDataParallel", "call the wrapper|model\\(x\\)"),
        ("cnn", "O1", BF16, _DDP, "DistributedDataParallel", "call the wrapper|model\\(x\\)"),
        ("attention", "O0", FP32, _NO_SYNC, "DistributedDataParallel|no_sync", "no_sync"),
    ],
    "data": [
        ("mlp", "O1", FP16, _RAW, "(batch|input).*(65504|largest|inf)", "(?i)normali[sz]e"),
        ("attention", "O2", FP16, _RAW, "(batch|input).*(65504|largest|inf)", "(?i)normali[sz]e"),
        ("cnn", "autocast", FP16, _RAW, "(batch|input).*(65504|largest|inf)", "(?i)normali[sz]e"),
    ],
}


def _scripts() -> Iterator[Script]:
    for fault, variants in FAULTS.items():
        for variant in variants:
            yield Script(
                fault, *variant, names=("optimizer", "second") if fault == "two optimizers" else ("optimizer",)
            )


SCRIPTS = list(_scripts())
