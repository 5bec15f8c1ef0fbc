"""Scripts that are slow in one known way each, and public traces that are named after their fault, with their causes.

The causes were written down before the rules that find them. A cause is the code of the first finding, and a pattern of
its text.
"""

from __future__ import annotations

import gzip
import itertools
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import torch

from halfstep.profiling.accounts import RunSettings
from halfstep.profiling.answer import Profile, profile_of
from halfstep.profiling.machine import Machine
from halfstep.profiling.trace import trace_of

__all__ = ["RECORDED", "SCRIPTS", "TRACES", "Slow"]

RECORDED = Path(__file__).parents[1] / "golden" / "slow_scripts"

TRACES = {
    "conv_01_large_spatial_small_ch": ("HS202", "3 channels"),
    "conv_03_asymmetric_kernel": ("HS217", "1x7"),
    "conv_05_pointwise_1x1": ("HS217", "1x1"),
    "conv_07_transposed": ("HS217", "transposed"),
    "gemm_01_compute_few_tiles": ("HS217", "tile"),
    "gemm_03_compute_misaligned": ("HS202", "4097"),
    "moe_01_many_experts_few_tokens": ("HS217", "16 tokens.*64 experts"),
    "moe_03_top1_sparse": ("HS217", "512 tokens.*16 experts"),
    "moe_05_large_capacity": ("HS217", "4,096 tokens.*8 experts"),
    "sdpa_01_long_seq_low_eff": ("HS217", "attention.*32768"),
    "sdpa_03_short_seq_overhead": ("HS217|HS201", "attention.*128|launch"),
}
"""Code and text of the first finding of each public trace."""


class Slow(NamedTuple):
    """A slow script: it defines ``model``, ``optimizer`` and ``step``.

    Attributes:
        name: what makes it slow.
        cause: the code of its first finding.
        text: the script after ``PRELUDE``.
    """

    name: str
    cause: str
    text: str

    @property
    def file(self) -> Path:
        """Return the file of ``RECORDED`` with steps of this script."""
        name = re.sub(r"[^\w-]+", "_", self.name).strip("_")
        return RECORDED / f"{name}.json.gz"

    @property
    def is_long(self) -> bool:
        """True if its recorded steps have many ops."""
        return self.file.stat().st_size > 8_000

    def run(self) -> dict[str, object]:
        """Run the script, and return its names."""
        names: dict[str, object] = {"__name__": "__main__"}
        exec(compile(PRELUDE + self.text, self.name, "exec"), names)
        return names

    def recorded(self) -> Profile:
        """Profile the steps that ``RECORDED`` has of this script."""
        known: Any = json.loads(gzip.decompress(self.file.read_bytes()))
        tables, (names, cats, threads, starts, times, args) = known["events"]["tables"], known["events"]["columns"]
        events = [
            {
                **{key: tables[key][at] for key, at in zip(("name", "cat", "tid", "args"), row, strict=True)},
                "ph": "X",
                "pid": 1,
                "ts": start / 10,
                "dur": duration / 10,
            }
            for *row, start, duration in zip(
                names, cats, threads, args, itertools.accumulate(starts), times, strict=True
            )
        ]
        denormal = {tuple(size): share for size, share in known["settings"]["denormal"]}
        facts = {**known["settings"], "device": torch.device("cpu"), "denormal": denormal}
        settings = RunSettings(**{key: tuple(fact) if isinstance(fact, list) else fact for key, fact in facts.items()})
        return profile_of(trace_of(events), Machine(**known["machine"]), settings, "recorded")


PRELUDE = """
import time, torch
from torch import nn
from torch.nn import functional as F
from halfstep import amp
torch.manual_seed(0)
def take(loss, **how):
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(**how)
def mlp(width, layers, dtype=torch.float32):
    each = [part for _ in range(layers) for part in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*each).to(dtype)
def sgd(model, lr=1e-3):
    return torch.optim.SGD(model.parameters(), lr)
"""

SCRIPTS = [
    Slow("300 tiny layers", "HS201", """
model = mlp(8, 150); optimizer = torch.optim.AdamW(model.parameters(), fused=True); x = torch.randn(4, 8)
def step(): take(model(x).sum())
"""),
    Slow("a loop over rows", "HS201", """
model = nn.Linear(16, 16); optimizer = sgd(model); x = torch.randn(400, 16)
def step(): take(sum(model(row).square().mean() for row in x))
"""),
    Slow("a hand-written LSTM over 200 steps", "HS201", """
model = nn.LSTMCell(16, 16); optimizer = sgd(model); x = torch.randn(200, 2, 16)
def step():
    state = None
    for each in x: state = model(each, state)
    take(state[0].sum())
"""),
    Slow("bfloat16 products of odd width", "HS202", """
model = mlp(1021, 3, torch.bfloat16); optimizer = sgd(model); x = torch.randn(255, 1021, dtype=torch.bfloat16)
def step(): take(model(x).float().sum())
"""),
    Slow("an output of 4,099 words", "HS202", """
model = nn.Linear(512, 4099).bfloat16(); optimizer = sgd(model); x = torch.randn(256, 512, dtype=torch.bfloat16)
def step(): take(model(x).sum())
"""),
    Slow("layouts back and forth", "HS203", """
class Net(nn.Module):
    def __init__(self):
        super().__init__(); self.parts = nn.ModuleList(nn.Conv2d(16, 16, 1, groups=16) for _ in range(6))
    def forward(self, x):
        for part in self.parts:
            x = part(x.contiguous(memory_format=torch.channels_last))
            x = x.contiguous(memory_format=torch.contiguous_format)
            x = x.contiguous(memory_format=torch.channels_last).contiguous()
        return x
model = Net(); optimizer = sgd(model); x = torch.randn(8, 16, 96, 96)
def step(): take(model(x).sum())
"""),
    Slow("permutes of images", "HS203", """
class Net(nn.Module):
    def __init__(self):
        super().__init__(); self.norms = nn.ModuleList(nn.LayerNorm(32) for _ in range(4))
        self.convs = nn.ModuleList(nn.Conv2d(32, 32, 1, groups=32) for _ in range(4))
    def forward(self, x):
        for norm, conv in zip(self.norms, self.convs):
            x = conv(norm(x.permute(0, 2, 3, 1).contiguous()).permute(0, 3, 1, 2).contiguous())
        return x
model = Net(); optimizer = sgd(model); x = torch.randn(8, 32, 64, 64)
def step(): take(model(x).sum())
"""),
    Slow("an fp32 island: softmax", "HS204", """
class Net(nn.Module):
    def __init__(self):
        super().__init__(); self.a = nn.Linear(64, 2048); self.b = nn.Linear(2048, 64)
    def forward(self, x):
        h = self.a(x).float()
        h = ((h.sigmoid() * h).tanh() + h.softmax(-1)).exp().log1p()
        return self.b(h.to(x.dtype))
model = Net().bfloat16(); optimizer = sgd(model); x = torch.randn(1024, 64, dtype=torch.bfloat16)
def step(): take(model(x).float().square().mean())
"""),
    Slow("an fp32 island: gelu by hand", "HS204", """
class Gelu(nn.Module):
    def forward(self, x):
        h = x.float()
        return (0.5 * h * (1 + torch.tanh(0.8 * (h + 0.04 * h * h * h)))).to(x.dtype)
model = nn.Sequential(nn.Linear(32, 1024), Gelu(), nn.Linear(1024, 32)).bfloat16(); optimizer = sgd(model)
x = torch.randn(2048, 32, dtype=torch.bfloat16)
def step(): take(model(x).float().sum())
"""),
    Slow("an fp32 product in a bfloat16 model", "HS205", """
class Net(nn.Module):
    def __init__(self):
        super().__init__(); self.body = mlp(256, 2, torch.bfloat16); self.head = nn.Linear(256, 4096)
    def forward(self, x): return self.head(self.body(x).float())
model = Net(); optimizer = sgd(model); x = torch.randn(512, 256, dtype=torch.bfloat16)
def step(): take(model(x).sum())
"""),
    Slow("autocast off around the wide layers", "HS205", """
class Net(nn.Module):
    def __init__(self):
        super().__init__(); self.body = mlp(128, 2); self.wide = mlp(768, 2); self.into = nn.Linear(128, 768)
    def forward(self, x):
        h = self.into(self.body(x))
        with torch.autocast("cpu", enabled=False): return self.wide(h.float())
model = Net(); optimizer = sgd(model); x = torch.randn(512, 128)
def step():
    with torch.autocast("cpu", torch.bfloat16): loss = model(x).sum()
    take(loss)
"""),
    Slow("weights cast for one row", "HS207", """
model = mlp(1536, 4); optimizer = sgd(model); x = torch.randn(1, 1536)
def step():
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad(): model(x)
"""),
    Slow("casts there and back", "HS207", """
model = nn.Linear(64, 2048).bfloat16(); optimizer = sgd(model); x = torch.randn(1024, 64, dtype=torch.bfloat16)
def step():
    h = model(x)
    for _ in range(8): h = h.float().bfloat16()
    take(h.sum())
"""),
    Slow("a metric read sample by sample", "HS208", """
model = nn.Linear(64, 10); optimizer = sgd(model); x, y = torch.randn(2000, 64), torch.randint(10, (2000,))
def step():
    out = model(x); loss = F.cross_entropy(out, y); best = out.argmax(-1)
    right = sum(best[i].item() == y[i].item() for i in range(2000))
    take(loss)
"""),
    Slow("a gradient norm read by parameter", "HS208", """
model = mlp(8, 4); optimizer = sgd(model); x = torch.randn(64, 8)
def step():
    loss = model(x).sum(); loss.backward()
    seen = [value.item() for p in model.parameters() for value in p.grad.flatten()]
    seen = [float(value) for p in model.parameters() for value in p.flatten()]
    optimizer.step(); optimizer.zero_grad()
"""),
    Slow("Adam in a Python loop", "HS209", """
model = mlp(24, 100); optimizer = torch.optim.Adam(model.parameters(), foreach=False, fused=False)
x = torch.randn(8, 24)
def step(): take(model(x).sum())
"""),
    Slow("AdamW of many weights", "HS209", """
model = mlp(768, 6); optimizer = torch.optim.AdamW(model.parameters()); x = torch.randn(16, 768)
def step(): take(model(x).sum())
"""),
    Slow("an optimizer written by hand", "HS209", """
model = mlp(512, 8); x = torch.randn(8, 512)
class Mine(torch.optim.Optimizer):
    def __init__(self, params): super().__init__(params, {})
    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            m, v = self.state[p].setdefault("mv", (torch.zeros_like(p), torch.zeros_like(p)))
            m.mul_(0.9).add_(p.grad, alpha=0.1); v.mul_(0.99).add_(p.grad * p.grad, alpha=0.01)
            p.sub_(1e-3 * m / (v.sqrt() + 1e-8))
optimizer = Mine(model.parameters())
def step(): take(model(x).sum())
"""),
    Slow("gradients zeroed and kept", "HS210", """
model = nn.EmbeddingBag(200_000, 32); optimizer = sgd(nn.Linear(4, 4)); x = torch.randint(200_000, (16, 4))
def step():
    model(x).sum().backward()
    for p in model.parameters(): p.grad.zero_()
"""),
    Slow("zero_grad(set_to_none=False)", "HS210", """
model = nn.Sequential(nn.Linear(2048, 1024), nn.Linear(1024, 2048)); x = torch.randn(1, 2048)
optimizer = torch.optim.SGD(model.parameters(), 1e-3, fused=True)
def step():
    for _ in range(3): model.zero_grad(set_to_none=False)
    take(model(x).sum(), set_to_none=False)
"""),
    Slow("a data set that sleeps", "HS211", """
class Slow(torch.utils.data.Dataset):
    def __len__(self): return 10_000
    def __getitem__(self, i): time.sleep(0.002); return torch.randn(64)
batches = iter(torch.utils.data.DataLoader(Slow(), 8)); model = mlp(64, 2); optimizer = sgd(model)
def step(): take(model(next(batches)).sum())
"""),
    Slow("a data set that computes", "HS211", """
class Slow(torch.utils.data.Dataset):
    def __len__(self): return 10_000
    def __getitem__(self, i): return torch.tensor([(i * k) % 97 / 97 for k in range(20_000)])[:64]
batches = iter(torch.utils.data.DataLoader(Slow(), 8)); model = mlp(64, 2); optimizer = sgd(model)
def step(): take(model(next(batches)).sum())
"""),
    Slow("a convolution in float16 on a CPU", "HS212", """
model = nn.Conv2d(16, 16, 3, padding=1).half(); optimizer = sgd(model); x = torch.randn(1, 16, 20, 20).half()
def step(): take(model(x).float().sum())
"""),
    Slow("attention in float16 on a CPU", "HS212", """
model = nn.Linear(128, 128).half(); optimizer = sgd(model); x = torch.randn(256, 128).half()
def step():
    for _ in range(3): h = model(x); h = (h @ h.t()).softmax(-1) @ h
    take(h.float().sum())
"""),
    Slow("eight threads on two cores", "HS213", """
torch.set_num_threads(16); model = mlp(192, 6); optimizer = sgd(model); x = torch.randn(192, 192)
def step(): take(model(x).sum())
"""),
    Slow("sixty-four threads", "HS213", """
torch.set_num_threads(64); model = mlp(256, 4); optimizer = sgd(model); x = torch.randn(512, 256)
def step(): take(model(x).sum())
"""),
    Slow("float16 that is emulated", "HS214", """
model = mlp(512, 3); optimizer = sgd(model); x = torch.randn(512, 512)
model, optimizer = amp.initialize(model, optimizer, opt_level="O2", dtype="float16", verbosity=0)
def step():
    with amp.scale_loss(model(x).sum() * 1e-6, optimizer) as scaled: scaled.backward()
    optimizer.step(); optimizer.zero_grad()
"""),
    Slow("weights that are denormal", "HS215", """
class Net(nn.Module):
    def __init__(self):
        super().__init__(); self.w = nn.Parameter(torch.full((512, 512), 1e-40))
    def forward(self):
        y = self.w
        for _ in range(12): y = y * 0.99
        return y
model = Net(); optimizer = sgd(nn.Linear(1, 1))
def step(): model().sum().backward(); model.zero_grad()
"""),
    Slow("an average that is denormal", "HS215", """
model = nn.Linear(256, 256); optimizer = sgd(model); x = torch.zeros(1, 256)
averaged = nn.Linear(1024, 512); model.averaged = averaged
with torch.no_grad(): averaged.weight.fill_(1e-40)
def step():
    take(model(x).sum())
    with torch.no_grad():
        for _ in range(16): averaged.weight.mul_(1.0)
"""),
    Slow("fp32 gradients of a bfloat16 model sent", "HS216", """
import torch.distributed as dist, tempfile
if not dist.is_initialized():
    dist.init_process_group("gloo", init_method=f"file://{tempfile.mktemp()}", rank=0, world_size=1)
model = mlp(1024, 4, torch.bfloat16); optimizer = sgd(model); x = torch.randn(4, 1024, dtype=torch.bfloat16)
flat = torch.zeros(8 * 1024 * 1024)
def step():
    for _ in range(4): dist.all_reduce(flat)
    take(model(x).float().sum())
"""),
]  # fmt: skip
"""Thirty scripts."""
