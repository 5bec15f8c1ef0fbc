"""Muon: against torch's own in float64, in every form of storage, by the rule that says what it steps, and at O2."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import halfstep
from halfstep import amp
from halfstep.core.errors import UsageError
from halfstep.kernels import backend
from halfstep.optimizers import FusedMuon, can_fuse, fuse, muon, newton_schulz, unfuse
from tests.support.backends import needs_compiler, skip_without_compiler
from tests.support.processes import one_rank
from tests.support.worlds import BF16, FP16, FP32, FP64, advance, scaled_step, start_amp

BACKENDS = ["eager", "torch", pytest.param("compiled", marks=needs_compiler)]
SHAPES = [(8, 24), (24, 8), (8, 24), (3, 8, 24), (8, 3, 2, 4), (16, 16)]
SETTINGS: list[dict[str, Any]] = [
    {},
    {"nesterov": False, "momentum": 0.8},
    {"adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.5},
    {"lr": torch.tensor(0.05, dtype=FP64), "ns_steps": 3, "ns_coefficients": (2.0, -1.5, 0.5)},
    {"maximize": True, "weight_decay": 0.0},
]
ADAMW = {"betas": (0.9, 0.95), "weight_decay": 0.1}


def weights(shapes: Any = SHAPES, dtype: torch.dtype = FP32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    params = [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]
    for p in params:
        if p.dim() == 4:
            p.data = p.data.to(memory_format=torch.channels_last)
    return params


def set_grads(params: Any, seed: int, scale: float = 1.0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    grads = [torch.randn(p.shape, generator=generator).to(p.grad_dtype or p.dtype) for p in params]
    for p, grad in zip(params, grads, strict=True):
        p.grad = grad * scale
    return grads


def run(optimizer: Any, steps: int, first: int = 0) -> None:
    for seed in range(first, first + steps):
        set_grads([p for group in optimizer.param_groups for p in group["params"]], seed)
        optimizer.step()


def matrices(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dim() == 3 else tensor.flatten(1)[None]


class Reference:
    """torch's ``_single_tensor_muon`` in float64, for each matrix."""

    def __init__(self, params: Any, **settings: Any) -> None:
        self.group = {**FusedMuon([nn.Parameter(torch.zeros(1, 1))], use_muon=True, lr=0.02).defaults, **settings}
        self.params = [matrices(p.detach().double().clone()) for p in params]
        self.buffers = [torch.zeros_like(p) for p in self.params]

    def step(self, grads: list[torch.Tensor]) -> None:
        g, lr = self.group, float(self.group["lr"])
        for param, buffer, grad in zip(self.params, self.buffers, grads, strict=True):
            grad = matrices(grad.double()) * (-1 if g["maximize"] else 1)
            buffer.lerp_(grad, 1 - g["momentum"])
            update = grad.lerp(buffer, g["momentum"]) if g["nesterov"] else buffer
            rows, columns = param.shape[1:]
            original = math.sqrt(max(1, rows / columns))
            ratio = 0.2 * math.sqrt(max(rows, columns)) if g["adjust_lr_fn"] == "match_rms_adamw" else original
            param.mul_(1 - lr * g["weight_decay"])
            param.sub_(torch.stack([orthogonal(each, g) for each in update]) * lr * ratio)


def orthogonal(matrix: torch.Tensor, group: Any) -> torch.Tensor:
    a, b, c = group["ns_coefficients"]
    x = matrix / matrix.norm().clamp(min=group["eps"])
    for _ in range(group["ns_steps"]):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


# ---- values


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: ",".join(s) or "defaults")
@pytest.mark.parametrize(("dtype", "masters"), [(FP64, None), (FP32, None), (BF16, "split"), (FP16, "plain")])
def test_values_are_torchs_in_float64(name: str, settings: Any, dtype: Any, masters: Any) -> None:
    params = weights(dtype=dtype)
    reference = Reference(params, **settings)
    with backend(name):
        chosen = FP64 if dtype is FP64 else FP32
        optimizer: Any = FusedMuon(
            params, **{"lr": 0.02, **settings}, use_muon=True, ns_dtype=chosen, master_weights=masters
        )
        for seed in range(3):
            reference.step(set_grads(params, seed))
            optimizer.step()
    near = 1e-12 if dtype is FP64 else 1e-5
    for param, expected in zip(params, reference.params, strict=True):
        value = optimizer.master_value(param) if masters else param.detach()
        torch.testing.assert_close(matrices(value).double(), expected, rtol=near, atol=near)


def angles(params: Any, references: Any, before: Any) -> torch.Tensor:
    """Of the updates and those in float64, in radians."""
    moved = [(matrices(p.detach().double()) - b).flatten() for p, b in zip(params, before, strict=True)]
    wanted = [(r - b).flatten() for r, b in zip(references, before, strict=True)]
    return torch.stack(
        [torch.cosine_similarity(a, b, dim=0).clamp(max=1).acos() for a, b in zip(moved, wanted, strict=True)]
    )


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(2), dtype=FP64)


def conditioned(rows: int, columns: int, number: float) -> torch.Tensor:
    values = torch.logspace(0, -math.log10(number), rows, dtype=FP64)
    left, right = torch.linalg.qr(normal(rows, rows))[0], torch.linalg.qr(normal(columns, rows))[0]
    return left * values @ right.mT


GRADS: dict[str, tuple[Callable[[int, int], torch.Tensor], float]] = {  # and what bfloat16 may add to torch's error
    "normal": (normal, 0.01),
    "rank 1": (lambda m, n: normal(m, 1) @ normal(1, n), 0.1),
    "rank 2": (lambda m, n: normal(m, 2) @ normal(2, n), 0.0),
    "condition 1e3": (lambda m, n: conditioned(m, n, 1e3), 0.0),
    "condition 1e6": (lambda m, n: conditioned(m, n, 1e6), 0.0),
    "one size": (lambda m, n: normal(m, 1).sign() @ normal(1, n).sign(), 0.07),
    "one large row": (lambda m, n: normal(m, n) * torch.tensor([100.0] + [0.01] * (m - 1), dtype=FP64)[:, None], 0.02),
    "zeros": (lambda m, n: torch.zeros(m, n, dtype=FP64), 0.0),
}


@pytest.mark.parametrize("tall", [False, True])
@pytest.mark.parametrize("name", GRADS)
def test_ill_conditioned_matrices_are_as_near_as_torchs(name: str, tall: bool) -> None:
    """Their singular values reach from 1 to what bfloat16 rounds away; the Gram form squares them."""
    make, more = GRADS[name]
    matrix, norms = make(128, 512), []
    grad = matrix.mT if tall else matrix
    settings: dict[str, Any] = {"lr": 1.0, "weight_decay": 0.0, "momentum": 0.0, "nesterov": False}
    wanted = orthogonal(matrix, FusedMuon([torch.zeros(1, 1)], use_muon=True).defaults)
    for kind, options in ((FusedMuon, {"use_muon": True, "ns_dtype": BF16}), (torch.optim.Muon, {})):
        param = nn.Parameter(torch.zeros(grad.shape))
        param.grad = grad.float()
        kind([param], **settings, **options).step()
        rate = math.sqrt(max(1, grad.shape[0] / grad.shape[1]))
        found = -param.detach().double() / rate
        norms.append(((found.mT if tall else found) - wanted).norm() / wanted.norm().clamp(min=1))
    assert norms[0] <= norms[1] + more


@pytest.mark.exhaustive
@pytest.mark.parametrize("steps", [2, 5])
def test_16_bit_products_are_as_near_as_torchs(steps: int) -> None:
    shapes = [(64, 64), (64, 192), (192, 64), (64, 64), (128, 384), (512, 128), (1024, 1024)]
    ours, theirs = weights(shapes), weights(shapes)
    settings: Any = {"weight_decay": 0.0, "ns_steps": steps}
    a = FusedMuon(ours, lr=0.02, use_muon=True, ns_dtype=BF16, **settings)
    b = torch.optim.Muon(theirs, lr=0.02, **settings)
    reference = Reference(ours, **settings)
    before = [p.clone() for p in reference.params]
    set_grads(theirs, 0)
    reference.step(set_grads(ours, 0))
    a.step()
    b.step()
    found, known = (angles(params, reference.params, before) for params in (ours, theirs))
    assert found.max() < 0.02
    assert (found < 1.3 * known + 1e-3).all()


@pytest.mark.exhaustive
@pytest.mark.parametrize("shape", [(128, 512), (512, 192), (520, 520), (520, 800)])
@pytest.mark.parametrize("decays", [False, True], ids=["random", "few large singular values"])
def test_fp32_products_are_near_in_runs_and_in_blocks(shape: tuple[int, int], decays: bool) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=FP64)
    if decays:
        u, sizes, v = torch.linalg.svd(matrix, full_matrices=False)
        matrix = u * torch.arange(1, len(sizes) + 1) ** -1.0 @ v
    group = FusedMuon([nn.Parameter(torch.zeros(1, 1))], use_muon=True).defaults
    wanted = orthogonal(matrix, group)
    stack = torch.stack([matrix, 2 * matrix]).float()
    found = newton_schulz.unit_singular_values(stack.clone(), group["ns_coefficients"], 5, group["eps"])
    for each in found:
        assert (each - wanted).norm() < 1e-3 * wanted.norm()
    norms = stack.norm(dim=(-2, -1), keepdim=True)
    batched = newton_schulz._iterate(stack / norms, group["ns_coefficients"], 5)  # as on a GPU
    assert (batched - wanted).norm() < 2e-3 * wanted.norm()


def test_stacks_are_of_a_shape_and_have_an_end(monkeypatch: Any) -> None:
    results, found = {}, []
    make = muon.unit_singular_values

    def note(stack: torch.Tensor, *settings: Any) -> torch.Tensor:
        found.append(len(stack))
        return make(stack, *settings)

    monkeypatch.setattr(muon, "unit_singular_values", note)
    for batch, sizes in ((1 << 24, [6, 1, 1]), (192, [1, 1, 3, 1, 1, 1])):
        monkeypatch.setattr(muon, "_BATCH", batch)
        params = weights()
        optimizer = FusedMuon(params, lr=0.02, use_muon=True, ns_steps=1)
        set_grads(params, 0)
        found.clear()
        optimizer.step()
        assert sorted(found) == sorted(sizes)
        results[batch] = [p.detach() for p in params]
    assert all(map(torch.equal, *results.values()))


@pytest.mark.parametrize("masters", [None, "split"])
def test_the_rest_is_adamw(masters: Any) -> None:
    ours, theirs = weights([(8, 8), (5,), ()]), weights([(8, 8), (5,), ()])
    names = ["hidden.weight", "norm.weight", "scale"]
    a = FusedMuon(zip(names, ours, strict=True), lr=0.02, master_weights=masters)
    b = torch.optim.AdamW(theirs[1:], lr=0.02, **ADAMW)  # type: ignore[arg-type]
    run(b, 4)
    for seed in range(4):
        set_grads(theirs[1:], seed)
        set_grads(ours[1:], seed)
        ours[0].grad = torch.ones(8, 8)
        a.step()
    torch.testing.assert_close(ours[1:], theirs[1:], rtol=1e-5, atol=1e-6)


# ---- the rule


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(7, 16)
        self.hidden = nn.Linear(16, 16)
        self.experts = nn.Parameter(torch.randn(2, 16, 16) / 4)
        self.lm_head = nn.Linear(16, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.hidden(self.wte(x)).relu()
        return self.lm_head((x @ self.experts.sum(0)).relu())


def taken(optimizer: Any, model: nn.Module) -> set[str]:
    names = {id(p): name for name, p in model.named_parameters()}
    return {names[id(p)] for group in optimizer.param_groups if group["use_muon"] for p in group["params"]}


RULES: list[tuple[Callable[[Net], Any], dict[str, Any], set[str], int]] = [
    (lambda m: m.named_parameters(), {}, {"hidden.weight", "experts"}, 2),
    (lambda m: m.named_parameters(), {"use_muon": lambda name, p: p.dim() == 2 and "w" in name.split(".")[0]},
     {"wte.weight"}, 2),
    (lambda m: m.parameters(), {"use_muon": lambda name, p: p.dim() == 3}, {"experts"}, 2),
    (lambda m: m.parameters(), {"use_muon": False}, set(), 1),
    (lambda m: [m.hidden.weight], {"use_muon": True}, {"hidden.weight"}, 1),
    (lambda m: [{"params": [m.hidden.weight], "use_muon": True, "lr": 0.3},
                {"params": [m.wte.weight, m.hidden.bias], "use_muon": False}], {}, {"hidden.weight"}, 2),
    (lambda m: [{"params": list(m.hidden.named_parameters())}, {"params": list(m.lm_head.named_parameters()),
                "use_muon": False}], {}, {"weight"}, 3),
    (lambda m: [m.hidden.bias], {}, set(), 1),
]  # fmt: skip


NAMES = {
    "transformer.wte.weight": False, "model.embed_tokens.weight": False, "patch_embed.proj.weight": False,
    "lm_head.weight": False, "output.weight": False, "heads.head.weight": False,
    "encoder.layer.0.attention.output.dense.weight": True, "attn.heads.0.q.weight": True, "h.3.mlp.c_fc.weight": True,
    "weight": True,
}  # fmt: skip


@pytest.mark.parametrize(("name", "hidden"), NAMES.items())
def test_the_default_rule_knows_embeddings_and_heads_by_name(name: str, hidden: bool) -> None:
    assert muon.hidden_matrix(name, torch.empty(2, 3)) is hidden
    assert not muon.hidden_matrix(name, torch.empty(2))


@pytest.mark.parametrize(("params", "settings", "names", "groups"), RULES)
def test_the_rule_makes_groups_that_say_what_they_take(params: Any, settings: Any, names: Any, groups: int) -> None:
    model = Net()
    optimizer = FusedMuon(params(model), **settings)
    assert {name.removeprefix("hidden.") for name in taken(optimizer, model)} == {
        name.removeprefix("hidden.") for name in names
    }
    assert len(optimizer.param_groups) == groups


def test_a_group_that_is_refused_in_part_is_not_there() -> None:
    param = nn.Parameter(torch.ones(3))
    optimizer = FusedMuon([("a", param)])
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": [("a.weight", nn.Parameter(torch.ones(2, 2))), ("b", param)]})
    assert len(optimizer.param_groups) == 1


# ---- with amp


def trained(
    make: Callable[[Net], Any], steps: int = 3, level: str = "O2", dtype: str = "bfloat16", **kwargs: Any
) -> Any:
    torch.manual_seed(3)
    model: Any = Net()
    model, optimizer = amp.initialize(model, make(model), opt_level=level, dtype=dtype, **kwargs)
    for step in range(steps):
        iterate(model, optimizer, step)
    return model, optimizer


def iterate(model: Any, optimizer: Any, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    x = torch.randint(7, (8, 5), generator=generator)
    loss = nn.functional.cross_entropy(model(x).float().flatten(0, 1), x.flatten())
    advance(loss, optimizer)


def named(model: Net) -> Any:
    return FusedMuon(model.named_parameters(), lr=0.02, adjust_lr_fn="match_rms_adamw")


def of_torch(model: Net) -> Any:
    return torch.optim.Muon([model.hidden.weight, model.lm_head.weight], lr=0.02)


@pytest.mark.parametrize("make", [named, of_torch])
@pytest.mark.parametrize(("level", "dtype"), [("O1", "bfloat16"), ("O2", "bfloat16"), ("O2", "float16")])
def test_trains_at_every_level(make: Any, level: str, dtype: str) -> None:
    skip_without_compiler(needed=level == "O2" and (make is of_torch or dtype == "bfloat16"))
    model, optimizer = trained(make, 12, level, dtype)
    assert isinstance(optimizer, FusedMuon) == (level == "O2" or make is named)
    x = torch.randint(7, (8, 5))
    loss = nn.functional.cross_entropy(model(x).float().flatten(0, 1), x.flatten())
    assert loss < math.log(7)
    if level == "O2":
        state = optimizer.state[model.hidden.weight]
        assert ("remainder" in state) == (dtype == "bfloat16")
        assert state["momentum_buffer"].dtype is FP32


@needs_compiler
def test_bytes_of_a_parameter() -> None:
    model, optimizer = start_amp(nn.Linear(128, 128, bias=False), torch.optim.Muon, "O2", dtype="bfloat16")
    scaled_step(model(torch.ones(2, 128)).float().mean(), optimizer)
    found = halfstep.memory(model, optimizer)
    assert (found.weights + found.masters + found.state) / found.parameters == 8


def test_8_bit_momentum() -> None:
    params, wide = weights([(64, 64), (64, 64)]), weights([(64, 64), (64, 64)])
    a = FusedMuon(params, lr=0.02, use_muon=True, state_dtype="8bit")
    b = FusedMuon(wide, lr=0.02, use_muon=True)
    run(a, 5)
    run(b, 5)
    assert a.state[params[0]]["momentum_buffer_codes"].dtype is torch.uint8
    for p, q in zip(params, wide, strict=True):
        assert torch.cosine_similarity(p.flatten(), q.flatten(), dim=0) > 0.999


@pytest.mark.parametrize("limit", [None, 0.5])
def test_a_scaler_of_torch_is_obeyed_in_the_step(limit: float | None) -> None:
    ours, theirs = weights(), weights()
    a, b = (FusedMuon(params, lr=0.02, use_muon=True, ns_dtype=FP32, max_grad_norm=limit) for params in (ours, theirs))
    set_grads(ours, 0, 1024.0)
    vars(a).update(grad_scale=torch.tensor(1024.0), found_inf=torch.tensor(0.0))
    set_grads(theirs, 0)
    a.step()
    b.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


# ---- state


def torchs(params: Any) -> Any:
    return torch.optim.Muon(params, lr=0.02)


def ours_of(params: Any) -> Any:
    return FusedMuon(params, lr=0.02, use_muon=True, ns_dtype=BF16)


@pytest.mark.parametrize(
    ("first", "second"), [(torchs, ours_of), (ours_of, torchs), (torchs, lambda p: fuse(torchs(p)))]
)
def test_state_goes_to_and_from_torchs(first: Any, second: Any) -> None:
    shapes = [(16, 16), (16, 48)]
    straight, params = weights(shapes), weights(shapes)
    one = torchs(straight)
    run(one, 4)
    a = first(params)
    run(a, 2)
    b = second(params)
    b.load_state_dict(copy.deepcopy(a.state_dict()))
    run(b, 2, first=2)
    for p, q in zip(params, straight, strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=2e-3)
        torch.testing.assert_close(b.state[p]["momentum_buffer"], one.state[q]["momentum_buffer"])


def test_fused_torch_has_torchs_groups_and_unfuses() -> None:
    params = weights([(16, 16)])
    optimizer = torchs(params)
    keys = optimizer.param_groups[0].keys()
    assert can_fuse(optimizer)
    assert isinstance(fuse(optimizer), FusedMuon)
    run(optimizer, 2)
    assert optimizer.param_groups[0].keys() == keys
    unfuse(optimizer)
    assert type(optimizer) is torch.optim.Muon
    assert optimizer.state[params[0]].keys() == {"momentum_buffer"}
    run(optimizer, 1)


def test_shards_are_refused_in_words() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    with one_rank():
        mesh = init_device_mesh("cpu", (1,))
        param = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]))
        assert not can_fuse(torchs([param]))
        optimizer = FusedMuon([param], use_muon=True)
        param.grad = torch.ones_like(param)
        with pytest.raises(UsageError, match=r"shape \(4, 4\) is cut into shards.*torch.optim.Muon"):
            optimizer.step()
        assert not optimizer.state[param]
