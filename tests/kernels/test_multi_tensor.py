"""The multi-tensor operations against float64, whatever the lists hold, and the groups that they are split into."""

from __future__ import annotations

import gc
import math
import weakref
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halfstep.kernels import backend, multi_tensor
from halfstep.kernels.multi_tensor import TensorGroups
from halfstep.parameters.unscale import Unscaler
from tests.support.worlds import BF16, FP16, FP32, FP64

DTYPES = [FP16, BF16, FP32, FP64]
LAYOUTS = ["contiguous", "transposed", "every second", "reversed dims", "offset"]


class Kind(NamedTuple):
    """One tensor of a list."""

    shape: tuple[int, ...]
    layout: str
    dtype: torch.dtype
    seed: int

    def make(self, dtype: torch.dtype | None = None, salt: int = 0) -> torch.Tensor:
        values = torch.randn(self.shape, dtype=FP64, generator=torch.Generator().manual_seed(self.seed + salt))
        return self.lay(values.to(dtype or self.dtype))

    def lay(self, values: torch.Tensor) -> torch.Tensor:
        """The same values in another layout of memory."""
        if self.layout == "offset":
            room = values.new_zeros(values.numel() + 1)
            return room[1:].view(values.shape).copy_(values)
        if values.dim() == 0 or self.layout == "contiguous":
            return values.contiguous()
        if self.layout == "every second":
            return values.repeat_interleave(2, dim=-1)[..., ::2]
        order = [*range(values.dim())]
        order = order[::-1] if self.layout == "reversed dims" else [*order[:-2], *order[-2:][::-1]]
        return values.permute(order).contiguous().permute([order.index(i) for i in range(values.dim())])


SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)
KINDS = st.lists(
    st.builds(Kind, SHAPES, st.sampled_from(LAYOUTS), st.sampled_from(DTYPES), st.integers(0, 1000)),
    min_size=1,
    max_size=8,
)
SCALES = st.sampled_from([1.0, 0.5, 2.0**-16, 1 / 3, 1e-3, 8.0])
few = settings(max_examples=50)


def flag() -> torch.Tensor:
    return torch.zeros(())


def assert_close(ours: torch.Tensor, reference: torch.Tensor, magnitude: torch.Tensor | None = None) -> None:
    """Within two roundings of ``ours.dtype``, or of fp32 for wider ones, from a float64 reference."""
    assert ours.shape == reference.shape
    info = torch.finfo(ours.dtype)
    error = (ours.double() - reference).abs()
    size = reference.abs() if magnitude is None else magnitude
    eps = max(info.eps, torch.finfo(FP32).eps)  # a scale is a float32 number
    assert (error <= 2 * eps * size + info.smallest_normal * info.eps).all()


# ---- copy


@few
@given(KINDS, st.data())
def test_copy_is_a_cast(kinds: list[Kind], data: st.DataObject) -> None:
    sources = [kind.make() for kind in kinds]
    targets = [kind._replace(dtype=data.draw(st.sampled_from(DTYPES))).make(salt=1) for kind in kinds]
    before = [source.clone() for source in sources]
    multi_tensor.copy(sources, targets)
    for source, was, target in zip(sources, before, targets, strict=True):
        assert torch.equal(target, source.to(target.dtype))
        assert torch.equal(source, was)


# ---- unscale


@few
@given(KINDS, SCALES)
def test_unscale_in_place(kinds: list[Kind], inv_scale: float) -> None:
    tensors = [kind.make() for kind in kinds]
    pointers = [tensor.data_ptr() for tensor in tensors]
    inv, found_inf = torch.tensor(inv_scale), flag()
    references = [tensor.double() * inv.double() for tensor in tensors]
    multi_tensor.unscale_(tensors, inv, found_inf)
    for tensor, reference in zip(tensors, references, strict=True):
        assert_close(tensor, reference)
    assert [tensor.data_ptr() for tensor in tensors] == pointers
    assert found_inf.item() == 0.0
    assert found_inf.dtype is FP32


@few
@given(KINDS, SCALES, st.booleans(), st.booleans())
def test_unscale_into_fp32(kinds: list[Kind], inv_scale: float, scaled: bool, accumulate: bool) -> None:
    sources = [kind.make() for kind in kinds]
    targets = [kind.make(FP32, salt=1) for kind in kinds]
    before = [source.clone() for source in sources]
    inv, found_inf = torch.tensor(inv_scale) if scaled else None, flag()
    factor = 1.0 if inv is None else inv.double()
    added = [source.double() * factor for source in sources]
    held = [target.double() if accumulate else torch.zeros_like(target, dtype=FP64) for target in targets]
    multi_tensor.unscale_into(sources, targets, inv, found_inf, accumulate=accumulate)
    for target, had, new in zip(targets, held, added, strict=True):
        assert_close(target, had + new, had.abs() + new.abs())
    assert all(torch.equal(source, was) for source, was in zip(sources, before, strict=True))
    assert found_inf.item() == 0.0


BAD = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}
SIZES = [1, 7, 64, 1000]  # below, at and above what a vector holds


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("accumulate", [None, False, True])
def test_finds_what_is_not_finite_anywhere(dtype: torch.dtype, bad: str, size: int, accumulate: bool | None) -> None:
    for which in range(3):  # the first, a middle and the last tensor
        for position in {0, size // 2, size - 1}:
            tensors = [torch.ones(size, dtype=dtype) for _ in range(3)]
            tensors[which][position] = BAD[bad]
            found_inf = flag()
            if accumulate is None:
                multi_tensor.unscale_(tensors, torch.tensor(0.5), found_inf)
            else:
                targets = [torch.ones(size) for _ in range(3)]
                multi_tensor.unscale_into(tensors, targets, torch.tensor(0.5), found_inf, accumulate=accumulate)
            assert found_inf.item() == 1.0, (which, position)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("bad", BAD)
def test_finds_it_in_any_layout(layout: str, bad: str) -> None:
    tensor = Kind((3, 4, 5), layout, FP16, 0).make()
    tensor[1, 3, 2] = BAD[bad]
    for tensors in ([tensor], [torch.ones((), dtype=FP32), torch.ones(0), tensor]):
        found_inf = flag()
        multi_tensor.unscale_(tensors, torch.tensor(1.0), found_inf)
        assert found_inf.item() == 1.0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_numbers_are_finite(dtype: torch.dtype, sign: int) -> None:
    info = torch.finfo(dtype)
    values = [sign * info.max, info.smallest_normal, info.smallest_normal * info.eps, 0.0]
    for inv_scale in (1.0, 0.5):
        tensors, found_inf = [torch.tensor(values, dtype=dtype)], flag()
        multi_tensor.unscale_(tensors, torch.tensor(inv_scale), found_inf)
        assert found_inf.item() == 0.0
        assert tensors[0][0].item() == sign * info.max * inv_scale


def test_a_copy_without_scale_looks_for_nothing() -> None:
    for accumulate in (False, True):
        grad, target, found_inf = torch.tensor([math.inf], dtype=FP16), torch.zeros(1), flag()
        multi_tensor.unscale_into([grad], [target], None, found_inf, accumulate=accumulate)
        assert target.item() == math.inf
        assert found_inf.item() == 0.0


def test_empty_lists() -> None:
    found_inf = flag()
    multi_tensor.copy([], [])
    multi_tensor.unscale_([], torch.tensor(1.0), found_inf)
    multi_tensor.unscale_into([], [], torch.tensor(1.0), found_inf, accumulate=True)
    multi_tensor.scale_([], torch.tensor(1.0))
    assert found_inf.item() == 0.0
    for per_tensor in (False, True):
        norm, each = multi_tensor.l2norm([], per_tensor=per_tensor)
        assert (norm.item(), norm.shape) == (0.0, ())
        assert each is None if not per_tensor else each.shape == (0,)


@pytest.mark.parametrize("bad", [*BAD, None])
@pytest.mark.parametrize(("scaled", "accumulate"), [(True, True), (False, True), (True, False)])
@pytest.mark.parametrize("on", ["eager", "torch", "compiled"])
def test_large_sixteen_bit_gradients_are_widened(on: str, scaled: bool, accumulate: bool, bad: str | None) -> None:
    """A compiled backend does this in one pass over the memory."""
    generator = torch.Generator().manual_seed(0)
    grad = torch.randn(multi_tensor._LARGE + 1, generator=generator).to(BF16)
    target = torch.randn(grad.shape, generator=generator)
    if bad is not None:
        grad[-1] = BAD[bad]
    expected = target.double() * accumulate + grad.double() * (1 / 3 if scaled else 1.0)
    found_inf = flag()
    with backend(on):
        inv_scale = torch.tensor(1 / 3) if scaled else None
        multi_tensor.unscale_into([grad], [target], inv_scale, found_inf, accumulate=accumulate)
    assert found_inf.item() == float(scaled and bad is not None)
    size = expected.abs() + grad.double().abs()
    assert_close(target[:-1], expected[:-1], size[:-1])
    assert target[-1].isfinite() == (bad is None)


def test_a_scale_of_another_dtype_is_rounded_to_fp32() -> None:
    grad, found_inf = torch.full((2,), 3.0), flag()
    multi_tensor.unscale_([grad], torch.tensor(1 / 3, dtype=FP64), found_inf)
    assert torch.equal(grad, torch.full((2,), 3.0) * torch.tensor(1 / 3))
    assert found_inf.item() == 0.0


# ---- norm and scale


@few
@given(KINDS, st.sampled_from([1.0, 2.0, 3.0, math.inf]))
def test_norm_is_of_one_long_vector(kinds: list[Kind], p: float) -> None:
    tensors = [kind.make() for kind in kinds]
    found = multi_tensor.norm(tensors, p)
    everything = torch.cat([tensor.double().flatten() for tensor in tensors])
    reference = torch.linalg.vector_norm(everything, p) if everything.numel() else torch.zeros((), dtype=FP64)
    assert found.dim() == 0
    assert found.dtype is (FP64 if any(t.dtype is FP64 and t.numel() for t in tensors) else FP32)
    assert found.item() == pytest.approx(reference.item(), rel=2e-6, abs=0)


@pytest.mark.parametrize("bad", BAD)
def test_norm_of_what_is_not_finite(bad: str) -> None:
    tensors = [torch.ones(5, dtype=FP16), torch.tensor([1.0, BAD[bad], 1.0])]
    assert not multi_tensor.norm(tensors).isfinite()


@few
@given(KINDS, SCALES)
def test_scale_in_place(kinds: list[Kind], factor: float) -> None:
    tensors = [kind.make() for kind in kinds]
    held = torch.tensor(factor)
    references = [tensor.double() * held.double() for tensor in tensors]
    multi_tensor.scale_(tensors, held)
    for tensor, reference in zip(tensors, references, strict=True):
        assert_close(tensor, reference)


# ---- kernels on lists


@pytest.mark.parametrize("on", ["eager", "torch", "compiled"])
def test_kernels_on_lists_find_what_is_not_finite(on: str) -> None:
    for bad, place in ((math.inf, "xs"), (math.nan, "ys"), (None, "")):
        lists = {"xs": [torch.ones(3), torch.ones(2, dtype=BF16)], "ys": [torch.ones(3), torch.ones(2, dtype=FP64)]}
        if bad is not None:
            lists[place][1][0] = bad
        targets = [torch.zeros(3), torch.zeros(2)]
        found_inf = torch.zeros(1)
        with backend(on):
            multi_tensor.axpby(2.0, lists["xs"], 3.0, lists["ys"], targets, found_inf)
        assert found_inf.tolist() == [0.0 if bad is None else 1.0], "in any group, in a flag of any shape"
        assert targets[0].tolist() == [5.0] * 3
        with backend(on):
            multi_tensor.axpby(2.0, lists["xs"], 3.0, lists["ys"], targets)
        assert targets[0].tolist() == [5.0] * 3


@pytest.mark.parametrize("on", ["eager", "torch", "compiled"])
def test_a_number_of_each_row_goes_with_its_row(on: str) -> None:
    sources = [torch.full((3,), float(i), dtype=dtype) for i, dtype in enumerate([FP32, FP16, FP32, BF16, FP16])]
    targets = [torch.empty(3) for _ in sources]
    factors = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0], dtype=FP64)
    with backend(on):
        multi_tensor.run(multi_tensor.scale_kernel, {"factor": factors}, source=sources, target=targets)
    assert [target.tolist() for target in targets] == [[i * 2.0**i] * 3 for i in range(5)]


@pytest.mark.parametrize("on", ["eager", "torch", "compiled"])
def test_parameters_are_written_and_autograd_is_told(on: str) -> None:
    param = torch.nn.Parameter(torch.ones(3))
    with backend(on):
        writes = [
            lambda: multi_tensor.copy([torch.full((3,), 2.0, dtype=BF16)], [param]),
            lambda: multi_tensor.scale([param], [param], 2.0),
        ]
        for write, expected in zip(writes, (2.0, 4.0), strict=True):
            version = param._version
            write()
            assert param.tolist() == [expected] * 3
            assert param._version > version


# ---- groups


@few
@given(KINDS, st.data())
def test_groups_sort_rows_and_lose_none(kinds: list[Kind], data: st.DataObject) -> None:
    first = [kind.make() for kind in kinds]
    second = [kind._replace(dtype=data.draw(st.sampled_from(DTYPES))).make() for kind in kinds]
    groups = TensorGroups(first, second).split(first, second)
    rows = [(id(a), id(b)) for lefts, rights in groups for a, b in zip(lefts, rights, strict=True)]
    assert sorted(rows) == sorted((id(a), id(b)) for a, b in zip(first, second, strict=True))
    pairs = [{(a.dtype, b.dtype) for a, b in zip(lefts, rights, strict=True)} for lefts, rights in groups]
    assert all(len(found) == 1 for found in pairs)
    assert len(set.union(*pairs)) == len(groups)  # as few groups as there are kinds


def test_groups_keep_the_order_within_a_group_and_of_groups() -> None:
    tensors = [torch.ones(1, dtype=dtype) for dtype in (FP32, FP16, FP32, BF16, FP16)]
    groups = [group for (group,) in TensorGroups(tensors).split(tensors)]
    places = {id(tensor): i for i, tensor in enumerate(tensors)}
    assert [[places[id(tensor)] for tensor in group] for group in groups] == [[0, 2], [1, 4], [3]]


def test_groups_serve_later_tensors_of_the_same_kind() -> None:
    kinds = (FP16, FP32, FP16)
    groups = TensorGroups([torch.ones(2, dtype=dtype) for dtype in kinds])
    later = [torch.full((2,), 4.0, dtype=dtype) for dtype in kinds]
    multi_tensor.unscale_(later, torch.tensor(0.25), flag(), groups=groups)
    assert all(torch.equal(t, torch.ones_like(t)) for t in later)


def test_groups_keep_no_tensor() -> None:
    tensor = torch.ones(3)
    gone = weakref.ref(tensor)
    groups = TensorGroups([tensor])
    del tensor
    gc.collect()
    assert gone() is None
    assert groups.split([torch.ones(1)])


def test_devices_are_groups_too() -> None:
    tensors = [torch.ones(1), torch.ones(1, device="meta"), torch.ones(1)]
    assert [len(group) for (group,) in TensorGroups(tensors).split(tensors)] == [2, 1]


def test_columns_of_unequal_length() -> None:
    with pytest.raises(ValueError, match="shorter"):
        TensorGroups([torch.ones(1), torch.ones(1)], [torch.ones(1)])


def test_the_cache_returns_the_same_groups_while_the_owners_are_the_same() -> None:
    cache = Unscaler()
    owners = [torch.ones(1), torch.ones(1)]
    groups = cache.get("slot", owners, owners)
    assert cache.get("slot", list(owners), [torch.ones(1), torch.ones(1)]) is groups
    assert cache.get("other slot", owners, owners) is not groups
    assert cache.get("slot", owners, owners) is groups


def test_the_cache_groups_anew_for_other_owners() -> None:
    cache = Unscaler()
    a, b, c = (torch.ones(1) for _ in range(3))
    groups = cache.get("slot", [a, b], [a, b])
    seen = [groups]
    for owners in ([a], [b, a], [a, b, c], [c]):  # fewer, another order, more, others
        again = cache.get("slot", owners, owners)
        assert again is not seen[-1]
        assert sum(len(group) for (group,) in again.split(owners)) == len(owners)
        seen.append(again)


@pytest.mark.exhaustive
def test_the_cache_keeps_its_owners_so_that_an_identity_is_not_reused() -> None:
    cache = Unscaler()
    owner = torch.ones(1)
    alive = weakref.ref(owner)
    cache.get("slot", [owner], [owner])
    del owner
    gc.collect()
    assert alive() is not None
    other = torch.ones(1)
    cache.get("slot", [other], [other])
    gc.collect()
    assert alive() is None  # and no longer than its groups


@pytest.mark.parametrize("became", DTYPES, ids=str)
def test_gradients_that_changed_dtype_under_old_groups(became: torch.dtype) -> None:
    # model.float() keeps the identity of every parameter, so the cache does not see it.
    cache = Unscaler()
    owners = [torch.ones(2), torch.ones(2)]
    for dtypes in ((FP16, FP32), (became, became), (became, FP16)):
        grads = [torch.full((2,), 8.0, dtype=dtype) for dtype in dtypes]
        targets = [torch.empty(2), torch.empty(2)]
        found_inf = flag()
        groups = cache.get("slot", owners, grads)
        multi_tensor.unscale_(grads, torch.tensor(0.5), found_inf, groups=groups)
        assert [grad.tolist() for grad in grads] == [[4.0, 4.0]] * 2
        both = cache.get("into", owners, grads, targets)
        multi_tensor.unscale_into(grads, targets, torch.tensor(0.5), found_inf, accumulate=False, groups=both)
        assert [target.tolist() for target in targets] == [[2.0, 2.0]] * 2
        assert found_inf.item() == 0.0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("home", ["cpu", "cuda"])
def test_lists_over_two_devices(dtype: torch.dtype, home: str) -> None:
    tensors = [torch.full((5,), 4.0, dtype=dtype, device=device) for device in ("cpu", "cuda", "cpu")]
    inv, found_inf = torch.tensor(0.5, device=home), torch.zeros((), device=home)
    groups = TensorGroups(tensors)
    multi_tensor.unscale_(tensors, inv, found_inf, groups=groups)
    assert all((t == 2.0).all() for t in tensors)
    assert found_inf.item() == 0.0
    assert multi_tensor.norm(tensors, groups=groups).item() == pytest.approx(60**0.5, rel=1e-6)
    tensors[1][2] = math.inf
    multi_tensor.unscale_(tensors, inv, found_inf, groups=groups)
    assert found_inf.item() == 1.0
