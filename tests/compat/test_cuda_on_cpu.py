"""``halfstep run --device cpu``: what a script asks of CUDA is answered by the CPU, and given back afterwards."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from halfstep import amp
from halfstep.compat import cuda_shim
from halfstep.compat.cuda_shim import cuda_on_cpu
from tests.support.processes import Ranks


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(cuda_shim, "_logged", set())
    with cuda_on_cpu():
        yield


def asked_by_a_script(what: str, **names: Any) -> Any:
    """The value of an expression in a module that is neither torch's nor halfstep's."""
    return eval(what, {"__name__": "__main__", "torch": torch, **names})


@pytest.mark.parametrize(
    "move",
    [
        lambda m: m.to(0), lambda m: m.to("cuda:0"), lambda m: m.to(device=0), lambda m: m.cuda(0),
        lambda m: m.to(torch.device("cuda", 1)), lambda m: m.to(device="cuda", dtype=torch.float64),
    ],
)  # fmt: skip
def test_modules_and_tensors_stay(on_cpu: None, move: Any) -> None:
    assert move(nn.Linear(2, 2)).weight.device.type == "cpu"
    if move.__code__.co_names[0] != "cuda":
        assert move(torch.ones(2)).device.type == "cpu"


def test_numbers_of_devices(on_cpu: None) -> None:
    x = torch.ones(2, device=0)
    assert x.device.type == "cpu"
    assert torch.zeros(2, device=asked_by_a_script("x.get_device()", x=x)).device.type == "cpu"
    assert torch.device(1).type == "cpu"
    assert x.new_zeros(3, device="cuda:1").device.type == "cpu"
    assert nn.Linear(2, 2).to(torch.float64).weight.dtype is torch.float64


def test_other_threads(on_cpu: None) -> None:
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(lambda: torch.ones(2).cuda(non_blocking=True).pin_memory()).result()
        assert pool.submit(torch.cuda.device_count).result() == 1
    assert found.device.type == "cpu"


def test_data_parallel(on_cpu: None) -> None:
    model: Any = nn.DataParallel(nn.Linear(4, 2), device_ids=[0, 1]).cuda()
    x = torch.ones(3, 4).cuda()
    assert torch.equal(model(x), model.module(x))
    assert list(model.state_dict()) == ["module.weight", "module.bias"]
    model(x).sum().backward()
    assert model.module.weight.grad is not None


def test_streams_events_and_devices(on_cpu: None) -> None:
    stream, event = torch.cuda.Stream(), torch.cuda.Event(enable_timing=True)
    with torch.cuda.stream(stream), torch.cuda.device(0), torch.cuda.device_of(torch.ones(1)):
        x = torch.ones(2).cuda(non_blocking=True)
        event.record()
    stream.wait_event(event)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.default_stream().synchronize()
    x.record_stream(torch.cuda.current_stream())
    assert stream.query()
    assert event.elapsed_time(stream.record_event()) >= 0  # type: ignore[arg-type]
    assert stream.device.type == "cpu"
    torch.cuda.synchronize()


def test_what_is_known_of_the_device(on_cpu: None) -> None:
    properties = torch.cuda.get_device_properties(0)
    assert properties.total_memory > 2**20
    assert (properties.major, properties.minor) == torch.cuda.get_device_capability()
    assert torch.cuda.mem_get_info()[1] == properties.total_memory
    assert torch.cuda.is_bf16_supported()
    assert float(str(torch.version.cuda)) >= 9.1
    assert torch.cuda.current_device() == 0


def test_random_numbers(on_cpu: None) -> None:
    state = torch.cuda.get_rng_state()
    first = torch.rand(2)
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(2), first)
    torch.cuda.set_rng_state_all([state])
    assert torch.equal(torch.rand(2), first)
    assert torch.equal(torch.cuda.get_rng_state_all()[0], torch.get_rng_state())
    torch.cuda.manual_seed(3)
    assert torch.cuda.initial_seed() == torch.initial_seed() == 3
    one, two = (torch.Generator(device="cuda").manual_seed(3) for _ in range(2))
    assert isinstance(one, torch.Generator)
    assert torch.equal(torch.rand(2, generator=one, device="cuda"), torch.rand(2, generator=two))
    assert torch.Generator().device.type == "cpu"


def test_types(on_cpu: None) -> None:
    x = torch.ones(2)
    assert x.type("torch.cuda.HalfTensor").dtype is torch.float16
    assert x.type(torch.cuda.DoubleTensor).dtype is torch.float64
    assert nn.Linear(1, 1).type("torch.cuda.HalfTensor").weight.dtype is torch.float16
    assert isinstance(x, torch.cuda.FloatTensor)


def test_checkpoints(on_cpu: None, tmp_path: Path) -> None:
    torch.cuda.set_device(0)
    torch.save(torch.cuda.FloatTensor(2).fill_(1.0), tmp_path / "ones.pt")
    places: list[Any] = ["cuda", torch.device("cuda", 0), lambda storage, location: storage.cuda(0)]
    for place in places:
        assert torch.load(tmp_path / "ones.pt", map_location=place).tolist() == [1.0, 1.0]


def test_tensors_say_that_they_are_on_the_device(on_cpu: None) -> None:
    x = torch.ones(2).cuda()
    assert asked_by_a_script("x.is_cuda and x.get_device() == 0", x=x)
    torch_says = eval("x.is_cuda, x.get_device()", {"__name__": "torch.nn.modules.rnn", "x": x})
    assert torch_says == (False, -1)
    layer: Any = nn.LSTM(2, 2).cuda()
    layer.flatten_parameters()
    assert layer(torch.ones(1, 2))[0].shape == (1, 2)


def test_they_say_so_within_a_model_at_o1(on_cpu: None) -> None:
    seen = []

    class Model(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(asked_by_a_script("x.is_cuda", x=x))
            return super().forward(x)

    model: Any = Model(2, 2)
    model = amp.initialize(model, opt_level="O1", dtype=torch.float16, verbosity=0)
    assert model(torch.ones(1, 2).cuda()).dtype is torch.float16
    assert seen == [True]
    amp.deactivate()


def test_native_amp(on_cpu: None) -> None:
    layer = nn.Linear(2, 2).cuda()
    scaler = torch.amp.GradScaler("cuda", init_scale=4.0)
    with torch.autocast("cuda"):
        loss = layer(torch.ones(1, 2)).sum()
    scaler.scale(loss).backward()
    assert layer.bias.grad is not None
    assert layer.bias.grad.tolist() == [4.0, 4.0]


AUTOCASTS = {
    "torch": lambda: torch.autocast("cuda"),
    "by name": lambda: torch.autocast(device_type="cuda", dtype=torch.float16),
    "torch.amp": lambda: torch.amp.autocast("cuda", torch.float16, True),
    "torch.cuda.amp": lambda: torch.cuda.amp.autocast(),
}


@pytest.mark.filterwarnings("ignore:.*torch.cuda.amp.autocast:FutureWarning")
@pytest.mark.parametrize("make", AUTOCASTS.values(), ids=AUTOCASTS)
def test_torchs_autocast_casts(on_cpu: None, make: Callable[[], Any]) -> None:
    layer, x = nn.Linear(2, 2), torch.ones(1, 2)
    with make():
        assert layer(x).dtype is torch.float16
        with torch.autocast("cuda", enabled=False):
            assert layer(x).dtype is torch.float32
    assert layer(x).dtype is torch.float32


@pytest.mark.parametrize(("dtype", "name"), [("float16", "Half"), ("float32", "Float"), ("int64", "Long")])
def test_the_name_of_a_type_is_that_of_the_device(on_cpu: None, dtype: str, name: str) -> None:
    """WaveGlow chooses by it what it makes; torch itself and halfstep need the truth."""
    x = torch.zeros(2, dtype=getattr(torch, dtype)).cuda()
    assert asked_by_a_script("x.type()", x=x) == f"torch.cuda.{name}Tensor"
    assert asked_by_a_script("torch.ones(2).type(x.type()).dtype", x=x) is x.dtype
    assert eval("x.type()", {"__name__": "torch._utils", "x": x}) == f"torch.{name}Tensor"


def test_the_profiler_and_the_libraries(on_cpu: None) -> None:
    with torch.cuda.profiler.profile():
        torch.cuda.profiler.start()
        torch.cuda.profiler.stop()
    cudart: Any = torch.cuda.cudart()
    assert cudart.cudaProfilerStart() == cudart.cudaProfilerStop() == 0
    assert torch.cuda.nccl.version() >= (2, 0, 0)


def test_nvtx_is_silent(on_cpu: None) -> None:
    nvtx: Any = torch.cuda.nvtx
    with nvtx.range("block"):
        nvtx.mark("here")
    assert nvtx.range_push("one") == nvtx.range_pop() == 0


def test_what_cannot_be_answered_says_so_once(on_cpu: None, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "halfstep"):
        for _ in range(2):
            assert torch.cuda.max_memory_allocated() == 0
            assert torch.cuda.memory_summary() == ""
    assert [record.getMessage() for record in caplog.records] == [
        "torch.cuda.max_memory_allocated is always 0 on the CPU.",
        "torch.cuda.memory_summary is always '' on the CPU.",
    ]


def share_statistics(rank: int) -> None:
    """What torch's SyncBatchNorm in a group of NCCL's gives, against one BatchNorm over both batches."""
    x = torch.arange(16.0).view(4, 2, 2)
    with cuda_on_cpu():
        group = dist.new_group(backend="nccl")
        norm = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(2)), group).cuda()
        assert isinstance(norm[0], nn.SyncBatchNorm)
        assert (
            nn.SyncBatchNorm(2, process_group=group, device="cuda", dtype=torch.float64).weight.dtype is torch.float64
        )
        found = nn.parallel.DistributedDataParallel(norm, device_ids=[0])(x[2 * rank :][:2])
    torch.testing.assert_close(found, nn.BatchNorm1d(2)(x)[2 * rank :][:2])


def test_groups_of_nccl_and_torchs_sync_batchnorm(ranks: Ranks) -> None:
    ranks.run(share_statistics)


def test_the_default_group_of_nccl_is_one_of_gloo(on_cpu: None) -> None:
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.get_backend() == "gloo"
    dist.destroy_process_group()


def test_everything_is_given_back(caplog: pytest.LogCaptureFixture) -> None:
    cuda = torch.cuda, torch.cuda.nvtx, torch.cuda.profiler, torch.cuda.nccl
    owners = torch, *cuda, torch.version, torch.Tensor, nn.Module, nn.DataParallel
    before = [dict(vars(owner)) for owner in owners]
    with cuda_on_cpu():
        torch.ones(1).cuda()
    after = [dict(vars(owner)) for owner in owners]
    for one, two in zip(before, after, strict=True):
        assert {key: value for key, value in two.items() if one.get(key) is not value} == {}
    assert caplog.text.count("asks for CUDA runs on the CPU") == 1
