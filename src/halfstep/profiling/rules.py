"""Causes of a slow step: one function per cause, which prices it in milliseconds. ``RULES`` at the end lists them.

The prices do not add up, because two causes may claim the same time. Each is what its fix alone would save.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from ..core.text import counted, listed
from ..diagnostics.findings import Finding
from .accounts import Account, inside
from .ops import SIZES, Product, Work
from .trace import covered, minus, overlap, union

__all__ = ["RULES", "apply"]

_LEAST = 0.03  # of a step: less is not worth a line
_SMALL, _CALL = 30.0, 40.0  # microseconds: an op below the first is mostly its call, of at most the second
_FEWER = "a larger batch, or halfstep.TrainStep(..., cuda_graph=True) on a GPU"
_REACHED = 0.8  # of a chip's rate, by good kernels on good shapes


class Cause(NamedTuple):
    """A cause that a rule has found.

    Attributes:
        us: the microseconds of all steps that its fix would save.
        where: the ops.
        message: the problem, with its numbers.
        evidence: the same numbers by name.
        fix: the remedy, if it differs from the rule's own.
    """

    us: float
    where: str
    message: str
    evidence: Mapping[str, Any] | None = None
    fix: str = ""


def apply(account: Account) -> list[Finding]:
    """Return the findings, the most expensive first."""
    found = []
    for code, (rule, fix) in RULES.items():
        for cause in rule(account):
            if cause.us < _LEAST * account.total:
                continue
            ms, share = account.ms(cause.us), cause.us / account.total
            severity = "warning" if share >= 0.1 else "note"
            evidence = {"ms": ms, "share": share, **(cause.evidence or {})}
            message = f"{ms:.3g} ms of a step: {cause.message}"
            found.append(Finding(code, severity, cause.where, message, evidence, cause.fix or fix))  # type: ignore[arg-type]
    return sorted(found, key=lambda each: -each.evidence["ms"])


def _names(works: Iterable[Work]) -> str:
    """Name the ops that take most of the time, with their dtypes."""
    times: Counter[str] = Counter()
    for each in works:
        times[" ".join(filter(None, (each.op, each.dtype, each.sizes)))] += int(each.piece.time) + 1
    return listed([name for name, _ in times.most_common()], 2)


def _time(works: Iterable[Work]) -> float:
    return sum(each.piece.time for each in works)


def _once(works: Iterable[Work]) -> list[Work]:
    """Keep one work per call."""
    return list({id(each.whole): each for each in works}.values())


def _least(account: Account, work: Work, dtype: str = "") -> float:
    """Compute the shortest time of a work by its roofline, in microseconds, in its own dtype or in another.

    A work that is faster than its bytes allow has read fewer bytes: from a cache, or the weights of some experts only.
    """
    size = SIZES.get(dtype or work.dtype, 4) / SIZES.get(work.dtype, 4)
    flops = work.product.flops if work.product is not None else 0.0
    moved = work.bytes if account.machine.ms(work.dtype, 0.0, work.bytes) < work.piece.time / 1e3 else 0.0
    return 1e3 * account.machine.ms(dtype or work.dtype, flops, moved * size)


# ---- the host


def launch_bound(account: Account) -> Iterator[Cause]:
    """HS201: the device waits for the host to launch the next op, or an op costs less than its call."""
    model = account.model
    other = union([*account.marked("Optimizer."), *account.reads])
    compiled = any(call.name.startswith("Torch-Compiled Region") for call in account.trace.calls)
    us = covered(minus(account.host, other))
    if not account.trace.on_gpu:
        small = [each for each in model if each.piece.time < _SMALL]
        us += sum(max(0.0, each.piece.time - _least(account, each)) for each in small)
        count = len({id(each.piece.call) for each in small})
        us = min(us, _CALL * count)
    else:
        count = len(account.works)
    if count / account.steps >= 30 or (account.trace.on_gpu and count >= 5):
        mean = account.busy / max(len(account.works), 1)
        what = "kernels" if account.trace.on_gpu else "ops"
        text = f"launch-bound: {count // account.steps:,} {what}, {mean:.3g} us each on average; the host is too slow"
        yield Cause(us, _names(model), text, {"launches": count // account.steps, "mean_us": mean}, _FEWER * compiled)


def host_waits(account: Account) -> Iterator[Cause]:
    """HS208: the host reads numbers from the device, and waits for each."""
    reads = [each for each in account.trace.calls if each.name == "aten::_local_scalar_dense"]
    us = covered(union([*account.waits, *account.reads]))
    if reads:
        count = len(reads) / account.steps
        text = f"{counted(round(count), 'value is', 'values are')} read by the host, one at a time"
        yield Cause(us, ".item()", text, {"reads": count})


def waits_for_data(account: Account) -> Iterator[Cause]:
    """HS211: a step waits for its batch."""
    us = account.kinds["waits for data"]
    yield Cause(us, "before the first module", f"the device waits for data {us / account.total:.0%} of the time")


def threads(account: Account) -> Iterator[Cause]:
    """HS213: torch has more threads than this process has cores."""
    of = account.settings
    if not account.trace.on_gpu and of.threads > of.cores:
        us = account.busy * (1 - 1 / max(of.thread_cost, 1.0))
        text = f"{of.threads} threads on {counted(of.cores, 'core')}: small ops take {of.thread_cost:.3g} times as long"
        evidence = {"threads": of.threads, "cores": of.cores}
        yield Cause(us, "all ops", text, evidence, f"torch.set_num_threads({of.cores})")


# ---- products


def _off(product: Product, dtype: str) -> list[int]:
    size = SIZES.get(dtype, 4)
    return [each for each in product.aligned if each > 1 and each * size % 16]


def misaligned(account: Account) -> Iterator[Cause]:
    """HS202: rows of matrices that do not fill 16 bytes cost more."""
    found: dict[str, tuple[Product, list[Work]]] = {}
    for each in _products(account):
        if each.product is not None and _off(each.product, each.dtype):
            found.setdefault(each.product.text, (each.product, []))[1].append(each)
    for text, (first, works) in found.items():
        size = SIZES.get(works[0].dtype, 4)
        off = _off(first, works[0].dtype)[0]
        padded = -(-off // (16 // size)) * (16 // size)
        least = sum(_least(account, each) / _REACHED for each in _once(works)) * padded / off
        what = f"{works[0].op} {works[0].dtype} {text}"
        channels = "channels" if first.what == "convolution" else "elements per row"
        message = f"{off} {channels} are not a multiple of {16 // size}, which fill 16 bytes"
        fix = f"pad {off} to {padded}: nn.Linear(..., {padded}), and leave the rest of the result out"
        if first.what == "convolution":
            fix = f"pad the images to {padded} channels: F.pad(x, (0, 0, 0, 0, 0, {padded - off}))"
        yield Cause(_time(works) - least, what, message, {"size": off, "padded": padded}, fix)


def fp32_products(account: Account) -> Iterator[Cause]:
    """HS205: products in float32 in a 16-bit model, which do not use the 16-bit units."""
    wide = [each for each in _products(account) if each.dtype == "float32"]
    if wide and account.half and not _emulated(account):
        us = _time(wide) * (1 - 1 / max(account.machine.gain("float32", account.half), 1.0))
        text = f"products in float32 take {account.ms(_time(wide)):.3g} ms in a model of {account.half}"
        yield Cause(us, _names(wide), text, {"fp32_ms": account.ms(_time(wide))})


def tf32_off(account: Account) -> Iterator[Cause]:
    """HS206: float32 products that are not allowed to use TF32."""
    wide = [each for each in _products(account) if each.dtype == "float32"]
    if wide and account.settings.tf32_off:
        gain = account.machine.gain("float32", "tf32") if "tf32" in account.machine.flops else 2.0
        yield Cause(_time(wide) * (1 - 1 / gain), _names(wide), "float32 products do not use TF32")


def no_units(account: Account) -> Iterator[Cause]:
    """HS212: products in a dtype for which the device has no units."""
    works = [each for each in _products(account) if each.dtype in account.machine.lacks]
    if not account.trace.on_gpu:
        works += [w for w in account.works if w.kind == "memory-bound ops" and w.dtype in account.machine.lacks]
    if works:
        least = sum(_least(account, each, "float32") / _REACHED for each in _once(works))
        dtype = works[0].dtype
        us = max(_time(works) - least, _time(works) / 2)
        yield Cause(us, _names(works), f"{account.machine.name} has no units for {dtype}", {"dtype": dtype})


def below_roofline(account: Account) -> Iterator[Cause]:
    """HS217: a product is far below what the device can do, because of its shape."""
    found: dict[tuple[str, str], tuple[Product, list[Work]]] = {}
    for each in _products(account):
        if each.product is not None and not _off(each.product, each.dtype) and each.dtype not in account.machine.lacks:
            found.setdefault((each.op, each.product.text), (each.product, []))[1].append(each)
    for (op, text), (first, works) in found.items():
        if not account.trace.on_gpu and first.text.startswith("depthwise"):
            continue  # no shape helps
        least, time = sum(_least(account, each) for each in _once(works)), _time(works)
        if time > (2.0 if account.trace.on_gpu else 5.0) * least / _REACHED:
            why, fix = _why(first)
            message = f"{text}: {least / time:.0%} of what {account.machine.name} can do{why}"
            us, what = time - least / _REACHED, f"{op} {works[0].dtype} {text}"
            yield Cause(us, what, message, {"reached": least / time}, fix)


def _why(product: Product) -> tuple[str, str]:
    """Tell why a shape is slow, and what helps."""
    if product.what == "attention":
        return "; attention", "F.scaled_dot_product_attention with a fused backend, and sequences packed or in windows"
    if product.what == "experts":
        text = f"; {product.m:,} rows for all experts"
        return text, "more tokens a step, or fewer experts a device (expert parallelism)"
    if "transposed" in product.text:
        return "; transposed", "nn.Upsample and nn.Conv2d, or model.to(memory_format=torch.channels_last)"
    if product.what == "convolution":
        return "", "model.to(memory_format=torch.channels_last); torch.backends.cudnn.benchmark = True"
    tiles = math.ceil(product.m / 128) * math.ceil(product.n / 128) * product.batch
    text = f"; only {counted(tiles, 'tile')} of 128 x 128, and sums of {product.k:,}" if tiles < 132 else ""
    return text, "a larger batch, or products of the same input in one: nn.Linear(k, 3 * n) in place of three"


def _products(account: Account) -> list[Work]:
    return [each for each in account.works if each.kind == "products"]


def _emulated(account: Account) -> str:
    """Find the dtype that halfstep emulates: there are casts to it, no units for it, and only float32 products."""
    calls = [call for each in account.works if each.kind == "casts" and each.whole for call in each.whole.chain()]
    casts = {dtype for call in calls for dtype in call.dtypes[:2]}
    done = {each.dtype for each in _products(account)}
    if account.settings.device is None or "float32" not in done:
        return ""
    return next((half for half in account.machine.lacks if half in casts and half not in done), "")


# ---- memory


def layouts(account: Account) -> Iterator[Cause]:
    """HS203: images are copied from one memory format to another."""
    copies = [each for each in account.works if _changes_layout(each)]
    by_call: dict[int, list[Work]] = defaultdict(list)
    for each in account.works:
        if each.product is not None and each.product.what == "convolution" and account.trace.on_gpu:
            by_call[id(each.whole)].append(each)
    for works in by_call.values():  # beside the kernel of a convolution are the kernels that reorder its operands
        longest = max(works, key=lambda each: each.piece.time)
        copies += [each for each in works if each is not longest]
    if copies:
        text = f"{len(copies) // account.steps:,} copies change the memory format"
        yield Cause(_time(copies), _names(copies), text, {"copies": len(copies) // account.steps})


def _changes_layout(work: Work) -> bool:
    call = work.piece.call
    if work.kind != "memory-bound ops" or call is None or work.op not in ("copy_", "clone", "contiguous"):
        return False
    told = next((each for each in call.chain() if each.name == "aten::copy_" and len(each.strides) > 1), None)
    if told is None or len(told.dims[0]) < 4 or told.dims[0] != told.dims[1]:
        return False
    orders = [sorted(range(len(s)), key=lambda i: -s[i]) for s in told.strides[:2]]
    return orders[0] != orders[1] and 0 not in told.strides[1]


def islands(account: Account) -> Iterator[Cause]:
    """HS204: ops in float32 between ops of 16 bits, with the casts around them."""
    wide = [each for each in account.model if each.kind == "memory-bound ops" and each.dtype == "float32"]
    wide = [each for each in wide if each.piece.time >= _SMALL / 3 and not _changes_layout(each)]
    if (half := account.half) and not _emulated(account) and wide:
        casts = [each for each in account.model if each.kind == "casts"]
        around = _time(casts) if _time(wide) > _time(casts) / 2 else 0.0
        text = f"ops in float32 take {account.ms(_time(wide)):.3g} ms in a model of {half}"
        text += f", and casts around them {account.ms(around):.3g} ms" if around else ""
        yield Cause(_time(wide) / 2 + around, _names(wide), text)


def casts(account: Account) -> Iterator[Cause]:
    """HS207: casts take a large part of the time."""
    found = [each for each in account.model if each.kind == "casts"]
    wide = [each for each in account.model if each.kind == "memory-bound ops" and each.dtype == "float32"]
    if found and not _emulated(account) and _time(wide) <= _time(found) / 2:
        count = len(found) // account.steps
        yield Cause(_time(found), _names(found), f"{count:,} casts take {_time(found) / account.total:.0%} of the time")


def emulated(account: Account) -> Iterator[Cause]:
    """HS214: halfstep emulates a dtype that the device has no units for."""
    if half := _emulated(account):
        found = [each for each in account.works if each.kind in ("casts", "loss scale")]
        text = f"{half} is emulated here: products in float32, with the rounding of {half}"
        other = next((each for each in ("bfloat16", "float16") if each not in account.machine.lacks), "")
        yield Cause(_time(found), _names(found), text, {}, f'dtype="{other}", which has units' if other else "")


def denormals(account: Account) -> Iterator[Cause]:
    """HS215: values below the smallest normal number, which a CPU computes slowly."""
    shares, costs = account.settings.denormal, account.settings.denormal_cost
    us, hit = 0.0, []
    for each in account.works if shares else ():
        share = max((shares.get(size, 0.0) for size in each.tensors), default=0.0)
        if share > 0.01:
            cost = costs[0] if each.kind == "products" else costs[1]
            us += each.piece.time * share * (1 - 1 / max(cost, 1.0))
            hit.append(each)
    if hit:
        text = f"{max(shares.values()):.0%} of a tensor's values are denormal, up to {max(costs):.3g} times as slow"
        yield Cause(us, _names(hit), text)


# ---- optimizer and communication


def optimizer(account: Account) -> Iterator[Cause]:
    """HS209: the step of the optimizer is not fused."""
    spans = overlap(account.marked("Optimizer.step"), account.window)
    works = inside(account.works, spans)
    if not works or any(each.op.startswith("_fused") for each in works):
        return
    us = _time(works) if account.trace.on_gpu else min(covered(spans), _time(works) + _CALL * len(works))
    gradients = sum(each.count for each in account.works if each.accumulates)
    weights = account.settings.weights or gradients // account.steps
    least = 1e3 * account.machine.ms("float32", 0.0, 28.0 * weights) * account.steps
    count = len(works) // account.steps
    if count > 4:
        text = f"the optimizer step runs {count:,} ops instead of one fused kernel"
        yield Cause(us - min(least, us * 0.7), _names(works), text, {"ops": count})


def zeroed(account: Account) -> Iterator[Cause]:
    """HS210: gradients are set to zero and not freed."""
    works = [each for each in account.works if each.zeroes]
    added = [each for each in account.works if each.op == "add_" and each.accumulates]
    if works:
        text = f"gradients are zeroed {len(works) // account.steps:,} times and accumulated into, not freed"
        yield Cause(_time(works) + _time(added), _names(works), text)


def communication(account: Account) -> Iterator[Cause]:
    """HS216: communication between ranks is not hidden, or sends float32 in a 16-bit model."""
    us = covered(account.exposed)
    sent = [call for call in [*account.trace.calls, *account.trace.marks] if call.made or call.name.startswith("c10d")]
    wide = bool(account.half) and any("float32" in (*call.dtypes, call.made) for call in sent)
    fix = "ddp.register_comm_hook(None, bf16_compress_hook)" if account.trace.on_gpu else "opt_level='O2'"
    text = f"{us / account.total:.0%} of the time ranks communicate and compute nothing"
    yield Cause(us / 2 if wide else us, "all_reduce", text + (", in float32" if wide else ""), {}, fix * wide)


RULES: dict[str, tuple[Callable[[Account], Iterator[Cause]], str]] = {
    "HS201": (launch_bound, f"torch.compile(model), {_FEWER}"),
    "HS202": (misaligned, "pad the size"),
    "HS203": (layouts, "model.to(memory_format=torch.channels_last), and images in the same format, once"),
    "HS204": (islands, "compute it in 16 bits: leave .float() out, or add the op to the white list of amp.initialize"),
    "HS205": (fp32_products, "cast what goes in: x.to(weight.dtype), or amp.initialize(..., opt_level='O1')"),
    "HS206": (tf32_off, 'torch.set_float32_matmul_precision("high")'),
    "HS207": (casts, "weights of 16 bits: amp.initialize(model, optimizer, opt_level='O2'), or a larger batch"),
    "HS208": (host_waits, "keep the numbers on the device: total += loss.detach(), and read it once in 100 steps"),
    "HS209": (optimizer, "optimizer = halfstep.optimizers.fuse(optimizer), or AdamW(..., fused=True)"),
    "HS210": (zeroed, "optimizer.zero_grad(set_to_none=True), its default"),
    "HS211": (waits_for_data, "DataLoader(..., num_workers=4, persistent_workers=True, prefetch_factor=4)"),
    "HS212": (no_units, "dtype=torch.bfloat16, or opt_level='O0'; see halfstep doctor"),
    "HS213": (threads, "torch.set_num_threads(cores)"),
    "HS214": (emulated, "opt_level='O0' is as fast as this machine is"),
    "HS215": (denormals, "torch.set_flush_denormal(True)"),
    "HS216": (communication, "larger buckets: DDP(..., bucket_cap_mb=100); no_sync() while accumulating"),
    "HS217": (below_roofline, "another shape"),
}
"""The rules by code, each with its fix."""
