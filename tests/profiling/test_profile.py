"""``halfstep.profile`` and ``Profile.from_trace``: times, causes, and what both say of bad input."""

from __future__ import annotations

import functools
import gzip
import inspect
import json
import os
import re
import subprocess
import sys
import tracemalloc
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity
from torch.utils._python_dispatch import TorchDispatchMode

import halfstep
from benchmarks.profiling import FIXES
from halfstep import amp
from halfstep.diagnostics.findings import Finding
from halfstep.profiling import Profile
from halfstep.profiling.accounts import Account, RunSettings
from halfstep.profiling.machine import CHIPS, machine_of
from halfstep.profiling.ops import KINDS
from halfstep.profiling.rules import RULES
from halfstep.profiling.trace import covered, minus, overlap, trace_of, union
from halfstep.torch_internals.torch_compat import profiler_enabled

from .slow_scripts import SCRIPTS, TRACES, Slow

GOLDEN = Path(__file__).parents[1] / "golden" / "traces"
MISSED = [
    "eight threads on two cores",
    "sixty-four threads",
    "fp32 gradients of a bfloat16 model sent",
]
"""Recorded scripts whose cause is not first."""


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    amp.deactivate()
    yield
    torch.set_num_threads(before)


@functools.cache
def golden(name: str) -> Profile:
    return Profile.from_trace(GOLDEN / f"{name}.json.gz")


def findings(script: Slow) -> list[Finding]:
    torch.set_num_threads(1)
    amp.deactivate()
    names: Any = script.run()
    try:
        return halfstep.profile(
            names["step"], model=names["model"], optimizer=names["optimizer"], warmup=1, steps=2
        ).findings
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


# ---- causes


ALWAYS = ("a data set that sleeps", "an fp32 island: gelu by hand", "AdamW of many weights")
"""Slow scripts that are slow on every machine; others are fast on a CPU without 16-bit units, or with a slow memory."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.exhaustive] if name != ALWAYS[0] else []) for name in FIXES]
)
def test_the_fix_of_a_cause_takes_its_finding_away(name: str) -> None:
    script = next(each for each in SCRIPTS if each.name == name)
    text = script.text
    for old, new in FIXES[name]:
        assert old in text
        text = text.replace(old, new)
    before, after = (
        [f for f in findings(each) if f.code == script.cause] for each in (script, script._replace(text=text))
    )
    assert before or name not in ALWAYS
    assert all(each.fix for each in before)
    assert sum(each.evidence["ms"] for each in after) <= sum(each.evidence["ms"] for each in before) / 2


AVX2 = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
"""A CPU without units of 16 bits."""


WITHOUT_UNITS = {
    "a convolution in float16 on a CPU": (".half()", ""),
    "float16 that is emulated": ('"O2"', '"O0"'),
}


@pytest.mark.exhaustive
def test_the_fix_of_a_dtype_without_units() -> None:
    code = "from tests.profiling import test_profile; test_profile.show_findings_without_units()"
    ran = subprocess.run([sys.executable, "-c", code], env={**os.environ, **AVX2}, stdout=subprocess.PIPE)
    found = json.loads(ran.stdout.splitlines()[-1])
    for name in WITHOUT_UNITS:
        script = next(each for each in SCRIPTS if each.name == name)
        before, after = map(dict, found[name])
        assert "opt_level='O0'" in before[script.cause]
        assert script.cause not in after


def show_findings_without_units() -> None:
    """Print codes and fixes of the findings of each script, before and after its fix."""
    found = {}
    for name, fix in WITHOUT_UNITS.items():
        script = next(each for each in SCRIPTS if each.name == name)
        both = script, script._replace(text=script.text.replace(*fix))
        found[name] = [[(each.code, each.fix) for each in findings(one)] for one in both]
    print(json.dumps(found))


@pytest.mark.exhaustive
def test_the_rates_of_a_script_at_o1_are_measured_without_its_casts() -> None:
    dtypes = set()

    class Ops(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            dtypes.update({args[0].dtype} if func is torch.ops.aten.mm.default else ())
            return func(*args, **(kwargs or {}))

    with amp.auto_cast(level="O1", dtype="bfloat16"), Ops():  # type: ignore[no-untyped-call]
        machine_of.__wrapped__(torch.device("cpu"), 1)
    assert torch.float32 in dtypes


@pytest.mark.parametrize(("inside", "fix"), [("aten::linear", "torch.compile(model), "), ("Torch-Compiled Region", "")])
def test_the_fix_of_a_host_that_is_too_slow(inside: str, fix: str) -> None:
    launches = [each for i in range(1, 6) for each in launched("aten::mm", i, 10 * i, 10 * i + 1)]
    known = account(launches, [event(f"{inside}: 0/0", 0, 99, "cpu_op", 1)])
    assert fix_of("HS201", known) == fix + "a larger batch, or halfstep.TrainStep(..., cuda_graph=True) on a GPU"
    assert "cuda_graph" in inspect.signature(halfstep.TrainStep).parameters


def fix_of(code: str, known: Account) -> str:
    rule, fix = RULES[code]
    return next(iter(rule(known))).fix or fix


def test_fixes_that_are_calls_run() -> None:
    """HS206 and HS213, on accounts of devices that this machine is not."""
    before = torch.get_float32_matmul_precision()
    try:
        exec(fix_of("HS206", account(launched("aten::mm", 1, 10, 50), tf32_off=True)))
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)
    mark = event("halfstep.step", 0, 99, "user_annotation", 1)
    on_cpu = account([mark, event("aten::mm", 10, 50, "cpu_op", 1)], threads=16, cores=1, thread_cost=3.0)
    exec(fix_of("HS213", on_cpu))
    assert torch.get_num_threads() == 1


def test_the_fix_of_a_shape_is_one_product_of_several() -> None:
    fix = golden("gemm_01_compute_few_tiles").findings[0].fix
    assert "nn.Linear(k, 3 * n) in place of three" in fix
    three, x = [nn.Linear(8, 4) for _ in range(3)], torch.randn(2, 8)
    one = nn.Linear(8, 3 * 4)
    for name, part in one.named_parameters():
        part.data = torch.cat([each.get_parameter(name).data for each in three])
    torch.testing.assert_close(one(x), torch.cat([each(x) for each in three], -1))


def test_the_fix_of_communication_in_float32_sends_16_bits(tmp_path: Path) -> None:
    """On a GPU it is a hook, which needs NCCL; on a CPU it is O2."""
    step = event("halfstep.step", 0, 99, "user_annotation", 1)
    sent = event("gloo:all_reduce", 60, 90, "user_annotation", 1)
    call = event("c10d::allreduce_", 55, 58, "cpu_op", 1, **{"Input type": ["float"], "Input Dims": [[512]]})
    known = account([step, sent, call, launched("aten::mm", 1, 10, 50, "c10::BFloat16")[0]])
    given = eval(f"dict({fix_of('HS216', known).partition(',')[0]})")
    model: Any = amp.initialize(nn.Linear(8, 4), dtype="bfloat16", verbosity=0, **given)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/x", rank=0, world_size=1)
    try:
        ddp = nn.parallel.DistributedDataParallel(model)
        ddp(torch.randn(1, 8)).sum().backward()
        assert {p.grad.dtype for p in ddp.parameters() if p.grad is not None} == {torch.bfloat16}
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    "script",
    [pytest.param(each, marks=[pytest.mark.exhaustive] if each.is_long else [], id=each.name) for each in SCRIPTS],
)
def test_the_cause_of_a_recorded_slow_script_is_first(script: Slow) -> None:
    """Which cause is first depends on times, and so on the machine: these are two steps each, of one busy machine."""
    first = [each.code for each in script.recorded().findings][:1]
    assert (first == [script.cause]) == (script.name not in MISSED)


def test_the_faults_of_public_traces_are_first() -> None:
    wrong = []
    for name, (code, text) in TRACES.items():
        found = golden(name).findings
        said = f"{found[0].message} {found[0].where}" if found else ""
        wrong += [] if found and re.search(code, found[0].code) and re.search(text, said) else [name]
    assert wrong == ["moe_05_large_capacity"]  # which reaches three quarters of the rate of an H100


def test_a_fault_has_a_fix_in_code_and_the_milliseconds_that_it_brings() -> None:
    found = golden("mi300_resnet_training").findings
    assert [each.code for each in found] == ["HS216", "HS203"]
    assert [each.evidence["ms"] for each in found] == sorted((each.evidence["ms"] for each in found), reverse=True)
    assert "channels_last" in found[1].fix


def test_every_code_has_a_row_in_the_documentation() -> None:
    text = (Path(__file__).parents[2] / "docs" / "findings-201-to-217.md").read_text()
    assert re.findall(r"^\| (HS\d+) \|", text, re.MULTILINE) == list(RULES)


# ---- times


@pytest.mark.parametrize(
    ("name", "busy", "idle", "total"),
    [
        ("h100_bert_small", 0.30943774, 3.59838721, 3.90782495),
        ("sdpa_01_long_seq_low_eff", 658.45982, 0.00036, 658.46018),
    ],
)
def test_busy_and_idle_time_are_those_of_the_reference(name: str, busy: float, idle: float, total: float) -> None:
    found = golden(name)
    times = found.device_busy_ms, found.device_idle_ms, found.total_ms
    assert times == pytest.approx((busy, idle, total), rel=1e-3, abs=1e-5)


def test_communication_and_layouts_of_a_training_are_those_of_the_reference() -> None:
    found = golden("mi300_resnet_training")
    assert found.steps == 3
    sent = found.kinds["communication, hidden"] + found.kinds["communication, exposed"]
    kernels = sent + sum(
        ms for kind, ms in found.kinds.items() if kind in ("products", "memory-bound ops", "not named")
    )
    assert sent * 3 == pytest.approx(71.517, rel=1e-3)  # the kernels of NCCL
    assert sent / kernels == pytest.approx(0.735, abs=0.03)
    layouts = next(each for each in found.findings if each.code == "HS203")
    assert 0.058 * 97.3 / 3 < layouts.evidence["ms"] < 1.4 * 0.069 * 97.3 / 3  # transposes, and casts beside them


@pytest.mark.parametrize("name", [*TRACES, "h100_bert_small", "mi300_resnet_training"])
def test_the_kinds_add_up_to_the_step(name: str) -> None:
    found = golden(name)
    assert list(found.kinds) == list(KINDS)
    shown = sum(ms for kind, ms in found.kinds.items() if kind != "communication, hidden")
    assert shown == pytest.approx(found.total_ms, rel=1e-6)
    assert found.device_busy_ms + found.device_idle_ms == pytest.approx(found.total_ms, rel=1e-9)


def event(name: str, start: float, end: float, cat: str = "kernel", tid: int = 7, **args: Any) -> dict[str, Any]:
    pid = 0 if cat == "kernel" else 1
    return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": end - start, "pid": pid, "tid": tid, "args": args}


def launched(op: str, number: int, start: float, end: float, dtype: str = "float", **more: Any) -> list[dict[str, Any]]:
    """An op of two matrices, its launch, and its kernel."""
    dims = {"Input Dims": [[512, 512], [512, 512]], "Input type": [dtype, dtype]}
    return [
        event(op, number, number + 0.9, "cpu_op", 1, **{**dims, **more}),
        event("cudaLaunchKernel", number + 0.1, number + 0.2, "cuda_runtime", 1, correlation=number),
        event("k", start, end, correlation=number, tid=more.get("stream", 7)),
    ]


def test_the_batch_of_a_weight_gradient_lies_side_by_side_in_no_matrix() -> None:
    dims = {"Input Dims": [[1024, 4], [4, 1024]], "Input Strides": [[1, 1024], [1024, 1]]}
    known = account(launched("aten::mm", 1, 10, 50, "c10::BFloat16", **dims)).works[0]
    assert known.product is not None
    assert known.product.aligned == (1024,)
    assert known.bytes == 2 * (2 * 4 * 1024 + 1024 * 1024)  # what it writes is larger than what it reads


def test_the_weight_of_a_linear_op_lies_transposed() -> None:
    known = account(launched("aten::linear", 1, 10, 50, **{"Input Dims": [[32, 16], [8, 16], []]})).works[0].product
    assert known is not None
    assert (known.m, known.k, known.n) == (32, 16, 8)


CONV = ["", "", "", "[2, 2]", "[0, 0]", "[1, 1]", "False"]


@pytest.mark.parametrize(
    ("name", "inner", "inner_args", "args", "dims"),
    [
        ("convolution", "mkldnn_convolution", ["", "", "", "[0, 0]", "[2, 2]"], CONV, []),
        ("convolution_backward", "convolution_backward", ["", *CONV], ["", *CONV], [[4, 16, 5, 5]]),
        ("convolution_backward", "convolution_backward", ["", "", "", "[0]", *CONV[3:]], ["", *CONV], [[4, 16, 5, 5]]),
    ],
)
def test_the_stride_of_a_convolution(name: str, inner: str, inner_args: Any, args: Any, dims: Any) -> None:
    more = {"Input Dims": [*dims, [4, 8, 10, 10], [16, 8, 1, 1]], "Input type": ["float"] * (2 + len(dims))}
    outer = event(f"aten::{name}", 0.9, 2, "cpu_op", 1, **more, **{"Concrete Inputs": args})
    known = account([outer], launched(f"aten::{inner}", 1, 10, 50, **more, **{"Concrete Inputs": inner_args})).works[0]
    assert known.product is not None
    assert known.product.m == 4 * 5 * 5


@pytest.mark.parametrize(
    ("x", "weight", "turned", "batch", "k", "text"),
    [
        ([4, 16, 10, 10], [16, 8, 1, 1], "True", 1, 8, "transposed 1x1 convolution of 16 channels to 8"),
        ([2, 16, 10, 10], [12, 4, 3, 3], "False", 4, 36, "3x3 convolution of 16 channels to 12"),
    ],
)
def test_the_groups_of_a_convolution(x: Any, weight: Any, turned: str, batch: int, k: int, text: str) -> None:
    given = {"Input Dims": [x, weight], "Input type": ["float"] * 2, "Concrete Inputs": [*CONV[:6], turned]}
    product = account(launched("aten::convolution", 1, 10, 50, **given)).works[0].product
    assert product is not None
    assert (product.batch, product.k, product.text) == (batch, k, text)


def account(*events: list[dict[str, Any]], **settings: Any) -> Account:
    return Account(trace_of([each for one in events for each in one]), CHIPS["A100"], RunSettings(**settings))


def test_what_runs_at_the_same_time_counts_once() -> None:
    events = [*launched("aten::mm", 1, 10, 50), *launched("aten::relu", 2, 30, 70, stream=8)]
    sent = [event("nccl:all_reduce", 3, 4, "user_annotation", 1), event("ncclKernel", 40, 100, tid=9)]
    found = account(events, sent)
    assert found.kinds["products"] == 40
    assert found.kinds["memory-bound ops"] == 20
    assert (found.kinds["communication, hidden"], found.kinds["communication, exposed"]) == (30, 30)
    assert (found.busy, found.idle) == (90, 0)


def test_an_op_that_begins_as_another_ends_is_not_inside_it() -> None:
    matrices = {"Input Dims": [[512, 512], [512, 512]], "Input type": ["float", "float"]}
    before = event("aten::linear", 0.5, 1, "cpu_op", 1, **matrices)
    assert [each.kind for each in account([before], launched("aten::relu", 1, 10, 50)).works] == ["memory-bound ops"]


def test_a_kernel_is_named_by_its_op_and_not_by_its_name() -> None:
    found = account(launched("aten::mm", 1, 10, 50, "c10::BFloat16"), [event("sgemm", 60, 70)])
    first, second = found.works
    assert (first.kind, first.op, first.dtype) == ("products", "mm", "bfloat16")
    assert first.product is not None
    assert first.product.flops == 2 * 512**3
    assert second.kind == "not named"


OPS: list[tuple[str, dict[str, Any], str]] = [
    ("aten::mm", {}, "products"),
    ("aten::copy_", {"Input type": ["c10::BFloat16", "float"]}, "casts"),
    ("aten::copy_", {}, "memory-bound ops"),
    ("aten::_fused_adamw_", {}, "optimizer"),
    ("aten::_amp_foreach_non_finite_check_and_unscale_", {}, "loss scale"),
    ("aten::scaled_dot_product_attention", {}, "products"),
    ("aten::gelu", {}, "memory-bound ops"),
    ("c10d::allreduce_", {}, "communication, exposed"),
]


@pytest.mark.parametrize(("op", "args", "kind"), OPS)
def test_an_op_has_a_kind(op: str, args: dict[str, Any], kind: str) -> None:
    assert account(launched(op, 1, 10, 50, **args)).works[0].kind == kind


def test_a_read_waits_until_the_device_has_work_again() -> None:
    wait = event("cudaStreamSynchronize", 40, 60, "cuda_runtime", 1)
    found = account(launched("aten::mm", 1, 10, 50), launched("aten::mm", 2, 80, 90), [wait])
    assert found.kinds["waits for the device"] == 30
    assert found.kinds["host"] == 0


def test_a_read_includes_the_views_that_select_its_value() -> None:
    times = [("unbind", 10, 40), ("item", 40, 41), ("mm", 50, 60), *(("item", i, i + 1) for i in range(60, 70))]
    ops = [event(f"aten::{name}", start, end, "cpu_op", 1) for name, start, end in times]
    found = account(ops, [event("k", 1, 99)])
    assert found.reads == [(10, 70)]


STEPPED = [event("Optimizer.step#SGD.step", 0, 99, "user_annotation", 1)]
STEPPED += [each for i in range(1, 6) for each in launched("aten::add_", i, 10 * i, 10 * i + 8)]


@pytest.mark.parametrize(
    ("code", "events", "settings", "prices"),
    [
        ("HS206", launched("aten::mm", 1, 10, 50), {"tf32_off": True}, [40 * (1 - 19.5 / 156)]),
        ("HS206", launched("aten::mm", 1, 10, 50), {}, []),
        # what four fifths of an A100's 312 TFLOPS would take, and one fused pass over 28 bytes of each weight
        ("HS217", launched("aten::mm", 1, 10, 50, "c10::BFloat16"), {}, [40 - 2 * 512**3 / 312e6 / 0.8]),
        ("HS209", STEPPED, {"weights": 10**6}, [40 - 28e6 / 2.039e6]),
    ],
)
def test_the_price_of_a_cause_is_what_its_fix_saves(code: str, events: Any, settings: Any, prices: list[float]) -> None:
    assert [each.us for each in RULES[code][0](account(events, **settings))] == pytest.approx(prices)


def test_intervals() -> None:
    merged = union([(5, 7), (1, 3), (2, 4), (6, 6)])
    assert merged == [(1, 4), (5, 7)]
    assert minus(merged, [(2, 3), (6, 9)]) == [(1, 2), (3, 4), (5, 6)]
    assert overlap(merged, [(0, 2), (3, 6)]) == [(1, 2), (3, 4), (5, 6)]
    assert covered(merged) == 5


# ---- steps


def training() -> tuple[Any, nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    x = torch.randn(32, 64)

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, model, optimizer


@pytest.mark.exhaustive
def test_steps_that_are_recorded_one_by_one_count_like_steps_in_one_go(monkeypatch: pytest.MonkeyPatch) -> None:
    step, model, _ = training()
    quick = halfstep.profile(step, model=model, warmup=1, steps=2)
    monkeypatch.setattr("halfstep.profiling.run._CYCLE", 0.0)
    slow = halfstep.profile(step, model=model, warmup=1, steps=2)
    calls = [sorted((*row[:3], row[4]) for row in found.ops if row[3] == "products") for found in (quick, slow)]
    assert slow.steps == 2
    assert calls[0] == calls[1] != []


@pytest.mark.exhaustive
def test_a_compiled_model_is_profiled_without_a_warning() -> None:
    model: Any = torch.compile(nn.Linear(4, 4), backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert halfstep.profile(lambda: model(torch.ones(2, 4)), model=model, warmup=1, steps=2).steps == 2


def test_sparse_gradients_have_no_denormal_numbers() -> None:
    model = nn.Embedding(4, 2, sparse=True)
    optimizer = torch.optim.SparseAdam(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        model(torch.tensor([1])).sum().backward()
        optimizer.step()

    assert halfstep.profile(step, model=model, optimizer=optimizer, warmup=0, steps=1).kinds["optimizer"] > 0


def test_a_profile_is_one_screen_and_a_page(tmp_path: Path) -> None:
    step, model, optimizer = training()
    found = halfstep.profile(step, model=model, optimizer=[optimizer], warmup=1, steps=2)
    assert found.steps == 2
    assert 1.0 <= found.ceiling < 100.0
    text = str(found).splitlines()
    assert len(text) <= 30
    assert text[0].startswith("halfstep.profile: a step takes")
    found.report(tmp_path / "x.html", "halfstep profile train.py")
    page = (tmp_path / "x.html").read_text()
    assert all(f"{each.code}" in page for each in found.findings)
    assert "Time by kind" in page


@pytest.mark.exhaustive
def test_an_op_takes_a_few_kilobytes(tmp_path: Path) -> None:
    peaks = []
    for count in (200, 1_000):
        events = [each for i in range(count) for each in launched("aten::mm", i, 5 * i, 5 * i + 3)]
        path = write(tmp_path / "x.json", {"traceEvents": events})
        tracemalloc.start()
        assert Profile.from_trace(path).ops[0][4] == f"{count:,}"
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert (peaks[1] - peaks[0]) / 800 < 5_000  # 3 kB on Python 3.11


# ---- bad input


def write(path: Path, known: Any) -> Path:
    path.write_text(json.dumps(known))
    return path


def test_a_trace_that_is_none_says_so(tmp_path: Path) -> None:
    for text in ("no trace", "{}", "[1, 2]", '{"traceEvents": [{"ph": "X", "cat": "kernel"}]}', '{"traceEvents": 3}'):
        path = tmp_path / "x.json"
        path.write_text(text)
        refused = r"not a Chrome trace.*export_chrome_trace|no events of a device"
        with pytest.raises(halfstep.HalfstepError, match=refused):
            Profile.from_trace(path)
    (tmp_path / "x.json.gz").write_bytes(gzip.compress(b"{}")[:-4])
    with pytest.raises(ValueError, match="not a Chrome trace"):
        Profile.from_trace(tmp_path / "x.json.gz")
    with pytest.raises(ValueError, match="is not a file"):
        Profile.from_trace(tmp_path / "nowhere.json")
    with pytest.raises(TypeError, match="path must be a path, not b'x"):
        Profile.from_trace(b"x.json")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("times", "error"),
    [
        ((0, 0), "no events of a device that take time"),
        (("a", 1), "not a Chrome trace"),
        ((float("nan"), 1), "not a Chrome trace.*'k' at nan for 1"),
        ((0, float("inf")), "not a Chrome trace.*'k' at 0 for inf"),
        (("0.5", "10"), None),
    ],
)
def test_the_times_of_a_trace(tmp_path: Path, times: Any, error: str | None) -> None:
    start, duration = times
    path = write(tmp_path / "x.json", {"traceEvents": [{**event("k", 0, 1), "ts": start, "dur": duration}]})
    if error is None:
        assert Profile.from_trace(path).total_ms == 0.01
        return
    with pytest.raises(halfstep.HalfstepError, match=error):
        Profile.from_trace(path)


def test_a_trace_without_a_device_says_how_to_record_one(tmp_path: Path) -> None:
    with torch.profiler.profile(activities=[ProfilerActivity.CPU]) as recorded:
        torch.ones(2).add_(1)
    recorded.export_chrome_trace(str(tmp_path / "cpu.json"))
    with pytest.raises(halfstep.HalfstepError, match=r"cpu.json has no events of a device.*ProfilerActivity.CUDA"):
        Profile.from_trace(tmp_path / "cpu.json")


def test_what_a_trace_lacks_is_said(tmp_path: Path) -> None:
    path = write(tmp_path / "x.json", {"traceEvents": [event("k", 1, 2)]})
    assert "no chip named" in str(Profile.from_trace(path))
    assert "no shapes" in str(Profile.from_trace(path))
    assert "MI300X" in Profile.from_trace(path, chip="MI300X").about
    with pytest.raises(ValueError, match=r"chip='Z80' is not known; there are H200, "):
        Profile.from_trace(path, chip="Z80")
    with pytest.raises(ValueError, match="chip=3 is not known"):
        Profile.from_trace(path, chip=3)  # type: ignore[arg-type]


@pytest.mark.parametrize("warmup", [0, 1])
def test_a_step_that_raises_is_named_and_its_error_is_the_cause(warmup: int) -> None:
    def step() -> None:
        raise ValueError("no batch left")

    with pytest.raises(halfstep.HalfstepError, match="Step 1 raised ValueError: no batch left") as raised:
        halfstep.profile(step, warmup=warmup)
    assert isinstance(raised.value.__cause__, ValueError)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_frees_the_profiler(error: type[BaseException]) -> None:
    def step() -> None:
        raise error

    with pytest.raises((halfstep.HalfstepError, KeyboardInterrupt)):
        halfstep.profile(step, warmup=0)
    assert not profiler_enabled()


def test_another_profiler_is_refused() -> None:
    def step() -> None:
        with torch.profiler.profile(activities=[ProfilerActivity.CPU]):
            torch.ones(2)

    with pytest.raises(halfstep.HalfstepError, match="torch runs one profiler at a time"):
        halfstep.profile(step)
    with (
        torch.profiler.profile(activities=[ProfilerActivity.CPU]),
        pytest.raises(halfstep.HalfstepError, match="torch runs one profiler at a time"),
    ):
        halfstep.profile(training()[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"step": 3}, "step must be a function"),
        ({"warmup": -1}, "warmup=-1 must be a whole number, 0 or more"),
        ({"steps": 0}, "steps=0 must be a whole number, 1 or more"),
        ({"model": 3}, "model must be a torch.nn.Module"),
        ({"optimizer": 3}, "optimizer must be a torch.optim.Optimizer"),
        ({"device": "foo"}, "device='foo' runs no steps here"),
        ({"device": "cuda:99"}, "device='cuda:99' runs no steps here"),
        ({"model": nn.Linear(1, 1, device="meta")}, "device='meta' runs no steps here"),
    ],
)
def test_wrong_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(halfstep.HalfstepError, match=message):
        halfstep.profile(**{"step": lambda: None, **options})
