"""Op casting of some device types: ops on tensors there are cast, and everywhere else nothing happens.

"cuda" here is a fake device, see ``fake_cuda``; that the device types are named makes them independent of the machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from halfstep import OpLists, amp
from halfstep.casting.scope import OpCasting, begin_session
from tests.support.fake_cuda import fake_cuda
from tests.support.worlds import BF16, FP32

PLACES = ("cpu", "cuda", "meta")

# An op on a 2x2 matrix, what it is given, and what it gives where it is cast; what it gives elsewhere is what it takes.
OPS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], torch.dtype, torch.dtype]] = {
    "matmul": (lambda x: x @ x, FP32, BF16),
    "linear": (lambda x: F.linear(x, nn.Parameter(x)), FP32, BF16),
    "mv, of CUDA's lists alone": (lambda x: torch.mv(x, x[0]), FP32, BF16),
    "exp": (torch.exp, BF16, FP32),
    "softmax": (lambda x: F.softmax(x, 1), BF16, FP32),
    "trace, of the CPU's lists alone": (torch.trace, BF16, FP32),
    "a composite": (lambda x: F.gumbel_softmax(x, dim=1), BF16, FP32),
}


@pytest.fixture(autouse=True)
def device() -> Iterator[None]:
    with fake_cuda():
        yield


def matrix(place: str, dtype: torch.dtype = FP32) -> torch.Tensor:
    return torch.eye(2, device=place).to(dtype)


def product(place: str) -> torch.dtype:
    return (matrix(place) @ matrix(place)).dtype


@contextmanager
def process_wide(devices: tuple[str, ...]) -> Iterator[None]:
    """What a session of O1 does."""
    begin_session(OpCasting(BF16, devices=devices))
    try:
        yield
    finally:
        amp.deactivate()


SCOPES: dict[str, Callable[[tuple[str, ...]], AbstractContextManager[Any]]] = {
    "OpCasting": lambda devices: OpCasting(BF16, devices=devices),
    "auto_cast": lambda devices: amp.auto_cast(dtype=BF16, device_type=devices),
    "session": process_wide,
    "native lists": lambda devices: OpCasting(BF16, OpLists.native(), devices=devices),
}


@pytest.mark.parametrize("devices", [("cpu",), ("cuda",), ("cpu", "cuda")], ids=" ".join)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("scope", ["OpCasting", "auto_cast", "session"])
def test_an_op_is_cast_on_the_devices_named(scope: str, op: str, place: str, devices: tuple[str, ...]) -> None:
    call, given, cast = OPS[op]
    with SCOPES[scope](devices):
        assert call(matrix(place, given)).dtype is (cast if place in devices else given)
    assert call(matrix(place, given)).dtype is given


@pytest.mark.parametrize("scope", SCOPES)
def test_products_on_each_device(scope: str) -> None:
    for devices in (("cpu",), ("cuda",), ("cpu", "cuda")):
        with SCOPES[scope](devices):
            assert [product(place) for place in PLACES] == [BF16 if p in devices else FP32 for p in PLACES]


@pytest.mark.parametrize("devices", [("cpu",), ("cuda",)], ids=" ".join)
@pytest.mark.parametrize("place", ["cpu", "cuda"])
def test_refusals_are_of_the_devices_named(place: str, devices: tuple[str, ...]) -> None:
    x = matrix(place, BF16)
    calls = {"banned": lambda: F.binary_cross_entropy(x, x), "in place": lambda: x.clone().exp_()}
    with amp.auto_cast(dtype=BF16, device_type=devices):
        for name, call in calls.items():
            if place in devices:
                with pytest.raises(amp.UnsafeOpError):
                    call()
            else:
                assert call().dtype is BF16, name


def test_device_type_is_one_name_or_several() -> None:
    for given in ("cuda", ["cuda"], ("cuda",), {"cuda"}):
        with amp.auto_cast(dtype=BF16, device_type=given):
            assert [product(place) for place in PLACES] == [FP32, BF16, FP32]


@pytest.mark.parametrize(("enabled", "expected"), [(True, BF16), (False, FP32)])
def test_autocast_takes_the_arguments_of_torch_and_of_paddle(enabled: bool, expected: torch.dtype) -> None:
    for where in ({"device_type": "cuda"}, {"enable": "cuda"}):
        with amp.autocast(**where, dtype=BF16, enabled=enabled, cache_enabled=True):
            assert [product(place) for place in PLACES] == [FP32, expected, FP32]


def test_a_scope_inside_another_replaces_it_on_every_device() -> None:
    def on(*devices: str) -> amp.auto_cast:
        return amp.auto_cast(dtype=BF16, device_type=devices)

    def found() -> list[torch.dtype]:
        return [product("cpu"), product("cuda")]

    with on("cpu"):
        with on("cuda"):
            assert found() == [FP32, BF16]
            with on("cpu", "cuda"):
                assert found() == [BF16, BF16]
            with amp.disable_casts():
                assert found() == [FP32, FP32]
            assert found() == [FP32, BF16]
        assert found() == [BF16, FP32]
    assert found() == [FP32, FP32]


def test_native_autocast_of_another_device_is_left_as_it_is() -> None:
    with torch.autocast("cpu", torch.float16), amp.auto_cast(dtype=BF16, device_type="cuda"):
        assert (product("cpu"), product("cuda")) == (torch.float16, BF16)


@pytest.mark.parametrize("devices", [("cpu",), ("cuda",)], ids=" ".join)
def test_tensors_of_two_devices_in_one_call(devices: tuple[str, ...]) -> None:
    """A 0-dim tensor of the CPU may meet any device; it is not cast for the sake of the other."""
    scalar = torch.ones((), dtype=torch.float64)
    with amp.auto_cast(dtype=BF16, device_type=devices):
        assert (matrix("cuda") * scalar).dtype is FP32
        assert (matrix("cuda", BF16) + torch.ones(())).dtype is BF16


def test_a_block_with_a_default_device_that_ends_while_casting_is_on() -> None:
    with torch.device("meta"):
        begin_session(OpCasting(BF16, devices=("cpu",)))
    assert torch.ones(1).device.type == "cpu"
    assert torch.exp(matrix("cpu", BF16)).dtype is FP32
    torch.set_default_device("meta")
    amp.deactivate()
    begin_session(OpCasting(BF16, devices=("cpu",)))
    torch.set_default_device(None)
    assert torch.ones(1).device.type == "cpu"
    assert torch.exp(matrix("cpu", BF16)).dtype is FP32
