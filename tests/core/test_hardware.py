"""What each device supports, by the rules of core.hardware, and the warning that says so once."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import halfstep
from halfstep import amp
from halfstep.core import hardware
from halfstep.core.errors import ArgumentTypeError, ArgumentValueError
from tests.support.worlds import BF16, FP16, with_optimizer

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
UNITS = {"none": [], "avx512": ["avx512_bf16"], "arm": ["fp16_arith", "bf16"], "amx": ["amx_bf16", "avx512_fp16"]}

PretendCPU = Callable[..., None]
PretendGPUs = Callable[..., None]


@pytest.fixture(autouse=True)
def nothing_said_yet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    hardware.warn_if_slow.cache_clear()
    yield
    hardware.warn_if_slow.cache_clear()


@pytest.fixture
def pretend_cpu(monkeypatch: pytest.MonkeyPatch) -> PretendCPU:
    def pretend(*units: str) -> None:
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: dict.fromkeys(units, True), raising=False)

    return pretend


def has_gpus(monkeypatch: pytest.MonkeyPatch, *gpus: tuple[str, tuple[int, int]]) -> None:
    def which(device: Any = None) -> tuple[str, tuple[int, int]]:
        return gpus[torch.device(device).index or 0]

    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(gpus))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: which(device)[0])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: which(device)[1])


@pytest.fixture
def pretend_gpus(monkeypatch: pytest.MonkeyPatch) -> PretendGPUs:
    return functools.partial(has_gpus, monkeypatch)


# ---- what is supported where

# GPU, compute capability, float16, bfloat16; the first four are those that Paddle's gates were recorded with.
# Its queries are looser than its gates there (float16 from 5.3 on); ours has one rule for both.
GPUS = [
    ("Tesla K40m", (3, 5), False, False),
    ("Tesla V100-SXM2-16GB", (7, 0), True, False),
    ("Tesla T4", (7, 5), True, False),
    ("NVIDIA A100-SXM4-40GB", (8, 0), True, True),
    ("Tesla P100", (6, 0), False, False),
    ("NVIDIA H200", (9, 0), True, True),
    ("NVIDIA B200", (10, 0), True, True),
]


@pytest.mark.parametrize(("name", "capability", "fp16", "bf16"), GPUS, ids=[row[0] for row in GPUS])
def test_a_gpu_by_compute_capability(
    pretend_gpus: PretendGPUs, name: str, capability: tuple[int, int], fp16: bool, bf16: bool
) -> None:
    pretend_gpus((name, capability))
    for device in (None, "cuda", "cuda:0", 0, "gpu", "gpu:0", CUDA):
        assert amp.is_float16_supported(device) is fp16
        assert amp.is_bfloat16_supported(device) is bf16
    for half, supported in ((FP16, fp16), (BF16, bf16)):
        reason = hardware.slow_reason(CUDA, half)
        if supported:
            assert reason is None
        else:
            assert reason is not None
            assert reason.startswith(f"{name} has compute capability {capability[0]}.{capability[1]} ")
            # what to do: the other half format if that is fast here, else fp32
            assert ("use dtype=torch.float16" if fp16 else 'opt_level="O0"') in reason


def test_each_gpu_by_itself(pretend_gpus: PretendGPUs) -> None:
    pretend_gpus(("Tesla T4", (7, 5)), ("NVIDIA A100-SXM4-40GB", (8, 0)))
    assert [amp.is_bfloat16_supported(i) for i in range(2)] == [False, True]


def test_rocm_numbers_its_capabilities_otherwise(pretend_gpus: PretendGPUs, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(("gfx", (6, 0)))
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert amp.is_float16_supported("cuda")
    assert amp.is_bfloat16_supported("cuda")


@pytest.mark.parametrize(
    ("units", "fp16", "bf16", "advice"),
    [
        ("none", False, False, 'Train in fp32 (opt_level="O0"), or on a GPU'),
        ("avx512", False, True, "use dtype=torch.bfloat16"),
        ("arm", True, True, None),
        ("amx", True, True, None),
    ],
)
def test_a_cpu_by_its_units(
    pretend_cpu: PretendCPU, pretend_gpus: PretendGPUs, units: str, fp16: bool, bf16: bool, advice: str | None
) -> None:
    pretend_cpu(*UNITS[units])
    pretend_gpus()
    for device in (None, "cpu", "cpu:0", CPU):
        assert amp.is_float16_supported(device) is fp16
        assert amp.is_bfloat16_supported(device) is bf16
    reason = hardware.slow_reason(CPU, FP16)
    assert reason is None if advice is None else reason is not None and advice in reason


def test_a_torch_without_get_capabilities(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    for name, found in (("avx512_bf16", True), ("amx_tile", False), ("amx_fp16", False)):
        monkeypatch.setattr(torch.cpu, f"_is_{name}_supported", lambda found=found: found, raising=False)
    assert hardware.cpu_units(BF16) == ["avx512_bf16"]
    assert hardware.cpu_units(FP16) == []
    monkeypatch.delattr(torch.cpu, "_is_avx512_bf16_supported")
    assert hardware.cpu_units(BF16) == []


@pytest.mark.parametrize("half", [FP16, BF16])
def test_this_cpu_trains_in_both_formats(half: torch.dtype) -> None:
    # False means slow, never impossible.
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 2)).to(half)
    model(torch.ones(1, 1, 4, 4, dtype=half)).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_this_gpu_agrees_with_torch() -> None:
    assert amp.is_bfloat16_supported() is torch.cuda.is_bf16_supported(including_emulation=False)


@pytest.mark.parametrize(
    ("device", "error", "message"),
    [
        ("tpu", ArgumentValueError, r"device='tpu' is no device; here there are: cpu, cuda:0\."),
        ("cuda:-1", ArgumentValueError, r"device='cuda:-1' is no device"),
        (-1, ArgumentValueError, r"device=-1 is no device"),
        ("cuda:1", ArgumentValueError, r"device='cuda:1' is not there; here there are: cpu, cuda:0\."),
        ("gpu:3", ArgumentValueError, r"device='gpu:3' is not there"),
        (1, ArgumentValueError, r"device=1 is not there"),
        ("mps", ArgumentValueError, r"device='mps' is neither CPU nor CUDA"),
        (True, ArgumentTypeError, r"device=True must be a torch\.device"),
        (1.0, ArgumentTypeError, r"device=1\.0 must be a torch\.device"),
    ],
)
def test_unknown_devices(pretend_gpus: PretendGPUs, device: Any, error: type[Exception], message: str) -> None:
    pretend_gpus(("Tesla T4", (7, 5)))
    for query in (amp.is_float16_supported, amp.is_bfloat16_supported):
        with pytest.raises(error, match=message):
            query(device)


def test_cuda_asked_for_where_there_is_none(pretend_gpus: PretendGPUs) -> None:
    pretend_gpus()
    with pytest.raises(ArgumentValueError, match=r"device='cuda' is not there; here there are: cpu\."):
        amp.is_float16_supported("cuda")


# ---- the warning


def begin(model: Any, optimizer: Any, half: torch.dtype | None, face: str, level: str, emulate: Any) -> None:
    if face == "initialize":
        amp.initialize(model, optimizer, opt_level=level, dtype=half, verbosity=0, emulate=emulate)
    else:
        amp.decorate(model, optimizer, level=level, dtype=half, emulate=emulate)


def start(
    half: torch.dtype | None, face: str = "initialize", level: str = "O2", device: str = "cpu", emulate: Any = False
) -> nn.Module:
    model, optimizer = with_optimizer(nn.Linear(2, 2, device=device), torch.optim.SGD, lr=0.1)
    begin(model, optimizer, half, face, level, emulate)
    return model


@pytest.mark.parametrize("face", ["initialize", "decorate"])
def test_warns_once_for_each_dtype_and_goes_on(pretend_cpu: PretendCPU, face: str) -> None:
    pretend_cpu()
    with pytest.warns(amp.PrecisionWarning, match="This CPU has no float16 units.* emulate=False") as said:
        assert start(FP16, face).weight.dtype is FP16
    assert [warning.filename for warning in said] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert start(FP16, face).weight.dtype is FP16
    with pytest.warns(amp.PrecisionWarning, match="no bfloat16 units.* many times as long"):
        start(None, face)  # the default on a CPU; slow is slow, asked for or not


def test_once_for_both_faces_together(pretend_cpu: PretendCPU) -> None:
    pretend_cpu()
    with pytest.warns(amp.PrecisionWarning):
        start(BF16, "initialize", "O1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        start(BF16, "decorate")


def by_auto_cast() -> None:
    with amp.auto_cast(dtype=BF16, emulate=False):
        pass


def by_model_prepare() -> None:
    halfstep.Model(nn.Linear(2, 2)).prepare(amp_configs={"level": "O1", "dtype": "bfloat16", "emulate": False})


def by_handle() -> None:
    amp.init(dtype=BF16, emulate=False)._deactivate()


FACES = [by_auto_cast, by_model_prepare, by_handle]


@pytest.mark.parametrize("first", FACES)
def test_the_line_of_the_script_is_named_whichever_face_it_called_and_no_other_face_repeats_it(
    pretend_cpu: PretendCPU, first: Callable[[], None]
) -> None:
    pretend_cpu()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        first()
        for face in FACES:
            face()
        start(BF16, "initialize")
    (only,) = said
    assert only.category is amp.PrecisionWarning
    assert only.filename == __file__
    begins = first.__code__.co_firstlineno
    assert begins < only.lineno <= begins + 2


@pytest.mark.parametrize(
    ("units", "half", "face", "level", "emulate"),
    [
        ("avx512", BF16, "initialize", "O1", False),
        ("avx512", None, "initialize", "O2", False),
        ("avx512", BF16, "decorate", "O2", False),
        ("arm", FP16, "initialize", "O2", False),
        ("none", FP16, "initialize", "O0", False),  # nothing runs in 16 bits
        ("none", FP16, "decorate", "O1", False),  # nor here, until auto_cast
        ("none", FP16, "initialize", "O2", "auto"),  # fp32 kernels are not slow
        ("none", BF16, "decorate", "O2", True),
    ],
)
def test_silent_where_there_is_nothing_to_say(
    pretend_cpu: PretendCPU, units: str, half: torch.dtype | None, face: str, level: str, emulate: Any
) -> None:
    pretend_cpu(*UNITS[units])
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        start(half, face, level, emulate=emulate)
    assert not said


def test_of_other_devices_nothing_is_said() -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model = start(FP16, device="meta")
    assert not said
    assert model.weight.dtype is FP16


def test_disabled_is_silent(pretend_cpu: PretendCPU) -> None:
    pretend_cpu()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model = amp.initialize(nn.Linear(2, 2), enabled=False, dtype=FP16)
    assert not said
    assert model.weight.dtype is torch.float32


@pytest.mark.parametrize("face", ["initialize", "decorate"])
def test_as_an_error_it_leaves_everything_unchanged(pretend_cpu: PretendCPU, face: str) -> None:
    pretend_cpu()
    model, optimizer = with_optimizer(nn.Linear(2, 2), torch.optim.SGD, lr=0.1)
    for _ in range(2):  # what was raised has not been said
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(amp.PrecisionWarning):
                begin(model, optimizer, FP16, face, "O2", False)
        assert model.weight.dtype is torch.float32
        assert not hasattr(optimizer, "_amp_stash")
