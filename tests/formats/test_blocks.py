"""Blocks with scales: against torchao where it is installed, against the mathematics, and between back ends."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch

from halfstep import kernels
from halfstep.formats import Format, dequantize, error, quantize
from halfstep.formats.format import FORMATS
from halfstep.formats.quantize import round_to

from ..support.backends import needs_compiler
from .test_elements import differ

NAN, INF = float("nan"), float("inf")


def tensors() -> dict[str, torch.Tensor]:
    """Blocks of 32 of many kinds, for each a matrix of 512 x 128."""
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(512, 128, generator=generator)
    rows = torch.arange(512)
    top = torch.tensor([448.0, 6.0, 1.0, 1.75, 1.5, 28.0, 7.5])[rows % 7] * torch.exp2((rows % 61 - 30).float())
    aside = torch.nextafter(top, torch.where(rows % 3 == 1, 1e30, 0.0))
    top = torch.where(rows % 3 == 0, top, aside)  # at and beside powers of two times the greatest numbers
    edge = normal.clamp(-1, 1) * top[:, None]
    edge[:, 5::32] = top[:, None]
    odd = normal.clone()
    odd[0, 3], odd[1, 40], odd[2, 70] = NAN, INF, -INF
    odd[3], odd[4], odd[5, :64] = 0.0, -0.0, 3.4e38
    wild = torch.randint(-(2**31), 2**31 - 1, (512, 128), generator=generator).to(torch.int32).view(torch.float32)
    return {
        "normal": normal,
        "spread": normal * torch.exp2(torch.randint(-40, 40, (512, 128), generator=generator).float()),
        "ties": torch.randint(-64, 65, (512, 128), generator=generator) / 8.0,
        "edge": edge,
        "tiny": normal * torch.exp2(-100.0 - rows % 49)[:, None],
        "odd": odd,
        "wild": wild,
    }


TENSORS = tensors()


def plain(scales: Any) -> torch.Tensor:
    assert isinstance(scales, torch.Tensor)
    return scales


def pair(scales: Any) -> tuple[torch.Tensor, torch.Tensor]:
    assert isinstance(scales, tuple)
    return scales


# ---- torchao


def mx_tensor() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("torchao", reason="needs torchao, of the extra `integrations`")
        return pytest.importorskip("torchao.prototype.mx_formats.mx_tensor", reason="this torchao has no MX formats")


AT_TORCHAO = {
    "mxfp8": torch.float8_e4m3fn,
    "mxfp8,element=float8_e5m2": torch.float8_e5m2,
    "mxfp6_e2m3": "fp6_e2m3",
    "mxfp6_e3m2": "fp6_e3m2",
    "mxfp4": torch.float4_e2m1fn_x2,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rule", ["floor", "rceil", "ceil", "even"])
@pytest.mark.parametrize("name", AT_TORCHAO)
def test_mx_blocks_are_those_of_torchao(name: str, rule: str, dtype: torch.dtype) -> None:
    """Bit for bit, but for the two differences that docs/formats.md names."""
    module = mx_tensor()
    format = Format.parse(name).replace(scale_rule=rule)
    mode = module.ScaleCalculationMode[rule.upper()]
    for kind, numbers in TENSORS.items():
        numbers = numbers.to(dtype)
        scales, codes = module.to_mx(numbers, AT_TORCHAO[name], 32, mode)
        ours, our_scales = quantize(numbers, format)
        theirs = scales.view(torch.uint8).int()
        mine = plain(our_scales).view(torch.uint8).int()
        largest = numbers.float().view(512, 4, 32).abs().amax(-1)
        least = theirs == 0  # torchao divides these blocks by another number than 2**-127
        power = largest / format.numbers.greatest  # torchao takes fp32's log2 of it, which is an integer too early
        fraction = power.view(torch.int32) & 0x7FFFFF
        beside = (fraction > 0) & (fraction < 64) & (rule == "rceil")
        finite = largest.isfinite()
        assert ((mine - theirs)[beside & finite & ~least] >= 0).all(), kind
        apart = (least | beside) & finite
        assert torch.equal(mine[~apart], theirs[~apart]), (kind, rule)
        packed = codes.view(torch.uint8)
        if name == "mxfp4":
            packed = torch.stack([packed & 15, packed >> 4], -1).view(512, 128)
        same = ours.view(torch.uint8) == packed
        kept = ~(apart | largest.isnan() | least)
        assert same.view(512, 4, 32)[kept].all(), (kind, rule)


def test_the_two_differences_to_torchao_are_there() -> None:
    module = mx_tensor()
    beside = torch.zeros(1, 32)
    beside[0, 0] = torch.nextafter(torch.tensor(448.0 * 1024), torch.tensor(1e9))
    scales, _ = module.to_mx(beside, torch.float8_e4m3fn, 32, module.ScaleCalculationMode.RCEIL)
    _, ours = quantize(beside, "mxfp8")
    assert (scales.float().item(), plain(ours).float().item()) == (1024.0, 2048.0)  # 448 times 1024 is below the number
    small = torch.full((1, 32), 1.5 * 2.0**-120)
    scales, codes = module.to_mx(small, torch.float8_e4m3fn, 32, module.ScaleCalculationMode.FLOOR)
    our_codes, ours = quantize(small, "mxfp8,scale_rule=floor")
    assert torch.equal(scales.view(torch.uint8), plain(ours).view(torch.uint8))
    assert torch.equal(dequantize(our_codes, ours, "mxfp8"), small)
    assert torch.equal(codes.float() * 2, our_codes.float())


GRID = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def nvfp4(blocks: torch.Tensor, greatest: float, scale: float, times: float = 1.0) -> tuple[torch.Tensor, ...]:
    """The tensor scale, e4m3 scales, scaled numbers and codes without a sign: each number is rounded exactly once.

    Each quotient is rounded once to fp32, each scale once to e4m3, each number once to e2m1.
    """
    whole = (blocks.abs().max().double() / torch.tensor(greatest * scale).double()).float()
    wanted = (blocks.abs().amax(-1).double() / torch.tensor(greatest).double()).float()
    scales = ((wanted.double() / whole.double()).float() * times).clamp(2**-6, 448).to(torch.float8_e4m3fn)
    factor = ((1 / whole.double()).float().double() / scales.double()).float()
    scaled = (blocks.double() * factor[..., None].double()).float()
    place = (scaled.abs()[..., None] - GRID).abs()
    index = place.argmin(-1)  # of two equally near numbers the one with the even code
    tie = (place == place.amin(-1, keepdim=True)).sum(-1) == 2
    return whole, scales, scaled, torch.where(tie & (index % 2 == 1), index + 1, index)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["normal", "ties", "spread", "edge"])
@pytest.mark.parametrize("rule", ["rceil", "4over6"])
def test_nvfp4_is_the_one_rounding_chain(rule: str, kind: str, dtype: torch.dtype) -> None:
    """4/6 maps the largest number of a block to 6 or to 4: what has the smaller squared error (arXiv 2512.02010)."""
    numbers = TENSORS[kind].to(dtype)
    blocks = numbers.float().view(512, 8, 16)
    whole, scales, _, index = nvfp4(blocks, 6.0, 448.0 if rule == "rceil" else 256.0)
    if rule == "4over6":
        _, fours, _, at_four = nvfp4(blocks, 6.0, 256.0, times=1.5)
        after = [(each.float() * whole)[..., None] for each in (scales, fours)]
        lost = [blocks.abs() - GRID[at] * scale for at, scale in zip((index, at_four), after, strict=True)]
        six, four = (each.double().square().sum(-1) for each in lost)
        scales, index = scales.where(six <= four, fours), index.where((six <= four)[..., None], at_four)
        assert (four < six).any()
    codes, found = quantize(numbers, f"nvfp4,scale_rule={rule}")
    stored, of_tensor = pair(found)
    assert of_tensor == whole
    assert torch.equal(stored.view(torch.uint8), scales.view(torch.uint8))
    assert torch.equal((codes & 7).long().view(512, 8, 16), index)
    if rule == "rceil":
        mx_tensor()
        from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize

        theirs, packed = nvfp4_quantize(numbers, 16, whole)
        packed = torch.stack([packed & 15, packed >> 4], -1).view(512, 128)
        assert torch.equal(theirs.view(torch.uint8), stored.view(torch.uint8))
        assert torch.equal(packed, codes)


@pytest.mark.exhaustive
def test_eden_corrects_the_scales_of_128_numbers_and_rounds_them_stochastically() -> None:
    numbers = TENSORS["normal"].clone()
    numbers[7] = 0.0
    blocks = numbers.view(512, 8, 16)
    whole, scales, scaled, index = nvfp4(blocks, 6 / (17 / 16 * 0.93), 256.0)
    rounded = GRID[index].copysign(scaled)
    factor = scaled.double().square().sum((1, 2)) / (scaled.double() * rounded).sum((1, 2))
    wanted = scales.double() * factor.nan_to_num(1.0)[:, None]
    found = [quantize(numbers, "nvfp4,scale_rule=eden", generator=torch.Generator().manual_seed(i)) for i in range(64)]
    assert all(torch.equal((codes & 7).long().view(512, 8, 16), index) for codes, _ in found)
    drawn = torch.stack([pair(each)[0].double() for _, each in found])
    spacing = torch.exp2(torch.frexp(wanted).exponent.clamp(min=-5) - 4.0)
    assert ((drawn - wanted).abs() <= spacing * 1.001).all()
    z = (drawn.mean(0) - wanted) / (spacing / 16)  # at most half a spacing of deviation, and 64 draws
    assert z.abs().max() < 6
    assert abs(z.mean()) < 0.05
    assert len({float(each) for each in drawn[:, 0, 0]}) == 2
    assert pair(found[0][1])[1] == whole


# ---- the mathematics


@pytest.mark.parametrize("rule", ["floor", "rceil", "ceil", "even"])
@pytest.mark.parametrize("name", ["mxfp8", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp4", "mxint8"])
def test_a_scale_rule_is_what_it_says(name: str, rule: str) -> None:
    format = Format.parse(name).replace(scale_rule=rule)
    element = format.numbers
    for kind in ("normal", "edge", "ties"):
        numbers = TENSORS[kind]
        largest = numbers.view(512, 4, 32).abs().amax(-1).double()
        _, scales = quantize(numbers, format)
        exponent = torch.frexp(largest).exponent - 1
        fraction = largest / torch.exp2(exponent.double())
        if rule == "ceil":
            exponent = exponent + (fraction > 1)
        if rule == "rceil":
            exponent = exponent + (fraction > element.greatest / 2.0**element.greatest_exponent)
        if rule == "even":
            exponent = exponent + (fraction >= 2 - 2.0 ** -(element.mantissa + 1))
        expected = torch.exp2((exponent - element.greatest_exponent).double().clamp(min=-127))
        live = largest > 0
        assert torch.equal(plain(scales).double()[live], expected[live]), (kind, rule)


def test_tensorwise_fp8_is_torchs_own_cast_of_the_scaled_tensor() -> None:
    for name, greatest in (("fp8_e4m3", 448.0), ("fp8_e5m2", 57344.0)):
        for kind in ("normal", "ties", "edge"):
            numbers = TENSORS[kind]
            factor = torch.tensor(greatest) / numbers.abs().max()
            codes, scale = quantize(numbers, name)
            expected = (numbers * factor).clamp(-greatest, greatest).to(codes.dtype)
            assert torch.equal(codes.view(torch.uint8), expected.view(torch.uint8))
            assert plain(scale) == 1 / factor


@pytest.mark.parametrize("name", [*FORMATS, "nvfp4,scale_rule=4over6", "nvfp4,scale_rule=eden"])
def test_quantize_and_dequantize_are_what_one_pass_does(name: str) -> None:
    numbers = torch.randn(2, 128, 128, generator=torch.Generator().manual_seed(3))
    for rounding in ("even",) if "eden" in name else ("even", "away", "stochastic"):
        format = Format.parse(name).replace(rounding=rounding)
        for dim in (-1, 1, 2, -2):
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                seeds = [torch.Generator().manual_seed(5) for _ in range(2)]
                codes, scales = quantize(numbers.to(dtype), format, dim=dim, generator=seeds[0])
                both = dequantize(codes, scales, format, dim=dim, dtype=dtype)
                once = round_to(numbers.to(dtype), format, dim=dim, generator=seeds[1])
                assert once.dtype is dtype
                assert not differ(both, once).any()


@pytest.mark.parametrize("block", ["row", "1x32", "1x16", "16x16", "128x128"])
@pytest.mark.parametrize("scale", ["fp32", "e8m0", "e4m3"])
def test_blocks_lie_along_any_dimension(block: str, scale: str) -> None:
    numbers = torch.randn(128, 128, 128, generator=torch.Generator().manual_seed(1))
    format = Format("e2m1", block, scale)
    for dim in (0, -1):
        expected = round_to(numbers.movedim(dim, -1).contiguous(), format).movedim(-1, dim)
        assert torch.equal(round_to(numbers, format, dim=dim), expected)
    flat = numbers[0]
    turned = flat.t().contiguous().t()
    assert torch.equal(round_to(turned, format), round_to(flat, format))
    assert torch.equal(round_to(flat.t(), format, dim=0).t(), round_to(flat, format, dim=1))
    _, scales = quantize(flat, format, dim=0)
    first = scales[0] if isinstance(scales, tuple) else scales
    height, width = format.sides or (1, 128)
    assert first.shape == (128 // width, 128 // height)
    if height == 1 and scale != "e4m3":
        assert torch.equal(quantize(flat[0], format)[0], quantize(flat, format)[0][0])


def test_a_zero_an_inf_and_a_nan() -> None:
    zero = torch.zeros(128, 128)
    zero[0] = -0.0
    for name, format in FORMATS.items():
        codes, scales = quantize(zero, name)
        expected = zero.abs() if format.element == "int8" else zero  # which has one zero
        assert not differ(dequantize(codes, scales, name), expected).any()
        if format.scale != "e8m0":
            of_tensor = scales[1] if isinstance(scales, tuple) else scales
            assert (of_tensor == 1).all()
        assert quantize(torch.empty(0, 128), name)[0].shape == (0, 128)
        assert round_to(torch.empty(0, 128), name).shape == (0, 128)
        for odd in (NAN, INF, -INF):
            numbers = TENSORS["normal"].clone()
            numbers[3, 7] = odd
            rounded = round_to(numbers, name)
            assert not rounded[3, 7].isfinite(), name  # an overflow is seen in any format
            poisoned = rounded.isnan()
            if math.isnan(odd) or format.scale != "e8m0":
                side = format.sides or (512, 128)
                height, width = (512, 128) if format.scale == "e4m3" else side
                assert int(poisoned.sum()) == height * width, name
            elif format.element != "int8":
                assert not poisoned.any()
                assert (rounded[3, :32].nan_to_num(0, 0, 0) == 0).all()


def test_an_amax_of_the_past_sets_the_scale() -> None:
    numbers = TENSORS["normal"]
    assert torch.equal(round_to(numbers, "fp8_e4m3", amax=numbers.abs().max()), round_to(numbers, "fp8_e4m3"))
    past = round_to(numbers, "fp8_e4m3", amax=1.0)
    assert past.abs().max() <= 1.0 + 1e-6
    assert round_to(numbers, "fp8_e4m3,saturate=False", amax=1.0).isnan().any()


def test_the_result_is_written_where_it_is_wanted() -> None:
    for name in FORMATS:
        numbers = TENSORS["normal"].clone()
        expected = round_to(numbers, name)
        for out in (torch.empty_like(numbers), torch.empty(128, 512).t(), numbers):
            assert round_to(numbers, name, out=out) is out
            assert torch.equal(out, expected)


# ---- signal to noise


def test_int8_is_as_exact_as_the_closed_formula() -> None:
    """Chen and others, arXiv 2510.25602, section 4: 4.78 + 6.02 b - 20 log10(crest factor), and the scale's excess."""
    for block in ("1x16", "1x32"):
        for spread in (1.0, 3.0):
            numbers = torch.randn(2048, 512, generator=torch.Generator().manual_seed(4))
            numbers[:, ::16] *= spread
            format = Format("int8", block, "e8m0")
            assert format.sides is not None
            blocks = numbers.view(-1, format.sides[1])
            _, scales = quantize(numbers, format)
            crest = blocks.abs().amax(-1) / blocks.square().mean(-1).sqrt()
            excess = plain(scales).float().view(-1) * format.numbers.greatest / blocks.abs().amax(-1)
            formula = 4.78 + 6.02 * 8 - 20 * (crest * excess).log10()
            found = error(numbers, format)
            assert abs(found.mean() - formula.mean()) < 0.2


@pytest.mark.parametrize("name", ["mxfp8", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp4", "nvfp4", "fp8_e4m3"])
def test_floating_formats_lose_a_twelfth_of_the_square_of_their_spacing(name: str) -> None:
    numbers = torch.randn(4096, 512, generator=torch.Generator().manual_seed(4))
    format = FORMATS[name]
    width = format.sides[1] if format.sides else numbers.numel()
    _, scales = quantize(numbers, format)
    each = pair(scales)[0].float() * pair(scales)[1] if isinstance(scales, tuple) else scales.float()
    blocks = numbers.view(-1, width)
    scaled = (blocks / each.view(-1, 1)).abs()
    element = format.numbers
    exponent = (torch.frexp(scaled).exponent - 1).clamp(min=element.least_exponent)
    spacing = torch.exp2((exponent - element.mantissa).float()) * each.view(-1, 1)
    noise = spacing.square() / 12
    if format.scale == "e4m3":  # the largest number of a block is the greatest element, nearly
        noise = noise.scatter(1, blocks.abs().argmax(-1, keepdim=True), 0.0)
    formula = 10 * (blocks.square().sum() / noise.sum()).log10()
    lost = numbers - round_to(numbers, format)
    found = 10 * (numbers.square().sum() / lost.square().sum()).log10()
    assert abs(found - formula) < 0.2


def test_the_error_has_the_shape_of_the_scales() -> None:
    numbers = TENSORS["normal"]
    assert error(numbers, "fp8_e4m3").shape == ()
    assert error(numbers, "mxfp8").shape == (512, 4)
    assert error(numbers, "mxfp8", dim=0).shape == (16, 128)
    assert error(numbers, "fp8_blockwise").shape == (4, 1)
    assert (error(torch.ones(2, 32), "mxfp4") == INF).all()


# ---- back ends


def formats_to_compare(format: Format, dtype: torch.dtype) -> list[Format]:
    """A format with every rule and rounding; for 16 bits, in which only loads and stores differ, the usual ones."""
    wide, found = dtype is torch.float32, []
    for rounding in ("even", "away", "stochastic") if wide else ("even", "stochastic"):
        changed = format.replace(rounding=rounding)
        rules = ("floor", "rceil", "ceil", "even") if format.scale == "e8m0" else ("rceil",)
        rules += ("4over6",) * ((format.element, format.scale) == ("e2m1", "e4m3"))
        rules += ("eden",) * (format == FORMATS["nvfp4"] and rounding == "even")
        found += [changed.replace(scale_rule=rule) for rule in rules]
        if wide and format.numbers.overflow is not None:
            found.append(changed.replace(saturate=False))
    return found


@needs_compiler
@pytest.mark.costly
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "format", [*FORMATS.values(), Format("e2m1", "16x16", "e4m3"), Format("float8_e4m3fn", "row")], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_library_gives_the_bits_of_torchs_ops(format: Format, dtype: torch.dtype) -> None:
    for changed in formats_to_compare(format, dtype):
        for kind, numbers in TENSORS.items():
            numbers = numbers.to(dtype)
            for shaped, dim in ((numbers, 1), (numbers[:384].t(), 0), (numbers.view(2, 128, 256), 1)):
                found = []
                for backend in ("compiled", "eager"):
                    with kernels.backend(backend):
                        generator = torch.Generator().manual_seed(2)
                        found.append(round_to(shaped, changed, dim=dim, generator=generator))
                assert not differ(*found).any(), (str(changed), kind, shaped.shape)


@needs_compiler
def test_a_library_that_cannot_be_built_is_replaced_by_torchs_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    from halfstep.formats import compiled

    def refuse(*_: object) -> None:
        raise OSError("no space left on device")

    expected = round_to(TENSORS["normal"], "mxfp6_e3m2")
    monkeypatch.setattr(compiled, "_run", refuse)
    monkeypatch.setattr(compiled.compiler, "give_up", lambda error: None)
    assert torch.equal(round_to(TENSORS["normal"], "mxfp6_e3m2"), expected)
