"""Models with 16-bit weights: ops meet in their first passes, and go on doing so in models that mix dtypes."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import halfstep
from halfstep import amp, numerics
from halfstep.casting.scope import OpCasting
from halfstep.core.errors import NotScriptableError
from tests.support.worlds import HALVES, Made, in_a_thread

X = torch.linspace(-1.0, 1.0, 8).reshape(2, 4)


def at_o2(model: nn.Module, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Any:
    return amp.initialize(model, opt_level="O2", dtype=dtype, emulate=False, verbosity=0, **options)


class Late(nn.Module):
    """Mixes dtypes only when it is told to, and counts what it does."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.mixes = False
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        y = self.norm(self.one(x))
        return self.two(y.float() if self.mixes else y)

    def log_prob(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return -self.one(x.float() if self.mixes else x).square().sum(-1)


def modes_in(model: nn.Module, *args: Any, **kwargs: Any) -> int:
    """How many function modes are on while a model runs."""
    found: list[int] = []
    handle = next(m for m in model.modules() if isinstance(m, nn.Linear)).register_forward_hook(
        lambda *_: found.append(torch._C._len_torch_function_stack())
    )
    model(*(args or (X,)), **kwargs)
    handle.remove()
    return found[0]


@pytest.mark.parametrize("dtype", HALVES)
def test_a_model_that_never_mixes_runs_without_a_mode_after_its_first_passes(dtype: torch.dtype) -> None:
    model = at_o2(Late(), dtype)
    assert [modes_in(model) for _ in range(5)] == [1, 1, 1, 0, 0]
    model.eval()
    assert [modes_in(model) for _ in range(4)] == [1, 1, 1, 0]  # it may take another way here
    with torch.no_grad():
        assert [modes_in(model) for _ in range(4)] == [1, 1, 1, 0]
    model.train()
    assert modes_in(model) == 0


def test_a_model_that_mixes_keeps_the_mode_and_runs_once_in_each_pass() -> None:
    model = at_o2(Late())
    model.mixes = True
    assert [modes_in(model) for _ in range(6)] == [1] * 6
    assert (model.calls, int(model.norm.num_batches_tracked)) == (6, 6)


@pytest.mark.parametrize("cast_ops", [True, False])
def test_cast_ops_decides_for_all_passes(cast_ops: bool) -> None:
    model = at_o2(Late(), cast_ops=cast_ops)
    assert [bool(modes_in(model)) for _ in range(5)] == [cast_ops] * 5
    model.mixes = True
    if cast_ops:
        assert model(X).dtype is torch.float32
    else:
        with pytest.raises(RuntimeError, match="dtype") as raised:
            model(X)
        assert not getattr(raised.value, "__notes__", [])


def test_a_late_refusal_is_torchs_error_with_a_note_and_the_next_call_is_right() -> None:
    model = at_o2(Late())
    for _ in range(4):
        model(X)
    model.mixes, model.calls, batches = True, 0, int(model.norm.num_batches_tracked)
    with pytest.raises(RuntimeError, match="same dtype") as raised:
        model(X)
    assert model.calls == 1
    assert int(model.norm.num_batches_tracked) == batches + 1  # nothing ran twice
    if hasattr(raised.value, "__notes__"):
        assert "call the model again" in raised.value.__notes__[0]
        assert "cast_ops=True" in raised.value.__notes__[0]
    assert model(X).dtype is torch.float32
    model.mixes = False
    assert modes_in(model) == 1  # for good


def test_other_errors_have_no_note() -> None:
    model = at_o2(Late())
    for _ in range(4):
        model(X)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="shapes") as raised:
            model(torch.ones(2, 3))
        assert not getattr(raised.value, "__notes__", [])
    assert modes_in(model) == 0


@pytest.mark.parametrize("dtype", HALVES)
def test_public_methods_meet_and_follow_copies(dtype: torch.dtype) -> None:
    model = at_o2(Late(), dtype)
    wanted = -(X @ model.one.weight.float().t() + model.one.bias.float()).square().sum(-1)
    for each in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        for _ in range(5):
            torch.testing.assert_close(each.log_prob(X).float(), wanted, atol=0.05, rtol=0.02)
    plain = Late()
    assert plain.log_prob(X).dtype is torch.float32
    with pytest.raises(RuntimeError, match="dtype"):
        at_o2(Late(), cast_ops=False).log_prob(X)


class Registered(nn.Module):
    """Keeps a register of its subclasses, as some frameworks do."""

    classes: ClassVar[list[type]] = []

    def __init_subclass__(cls) -> None:
        cls.classes.append(cls)


class Scored(Registered):
    """A method that is called in ``forward``, and a property that mixes dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(4, 4)

    @property
    def score(self) -> torch.Tensor:
        return self.one(torch.ones(1, 4)).sum()  # type: ignore[no-any-return]

    @functools.cached_property
    def kept_score(self) -> torch.Tensor:
        return self.one(torch.ones(1, 4)).sum()  # type: ignore[no-any-return]

    def half_way(self, x: torch.Tensor) -> torch.Tensor:
        return self.one(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.half_way(x)


def test_the_class_of_the_user_stays_as_it_is() -> None:
    before = dict(vars(Scored))
    model = at_o2(Scored())
    assert isinstance(model, Scored)
    assert repr(type(model)) == repr(Scored)
    assert vars(Scored) == before
    assert Registered.classes == [Scored]
    assert type(amp.master_model(model)) is Scored
    assert type(at_o2(nn.Linear(2, 2))) is nn.Linear
    plain = Scored()
    for each, cls in ((model, type(model)), (plain, Scored)):
        numerics.compare_step(lambda each=each: each(X).sum(), each, candidate="O2", dtype=torch.bfloat16)
        assert type(each) is cls


def test_properties_meet() -> None:
    model = at_o2(Scored())
    for each in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert each.score.dtype is torch.bfloat16
        assert each.kept_score is each.kept_score
        assert each.kept_score.dtype is torch.bfloat16


class Product(nn.Module):
    """TorchScript compiles it, with the method."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(4, 4)

    def half_way(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.one(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.half_way(x)


@pytest.mark.filterwarnings("ignore:.torch.jit.:DeprecationWarning")
def test_another_model_of_the_class_can_be_scripted() -> None:
    model, other = at_o2(Product()), Product()
    torch.testing.assert_close(torch.jit.script(other)(X), other(X))
    with pytest.raises(NotScriptableError):
        torch.jit.script(model)


def test_a_method_that_mixes_late_has_the_note() -> None:
    model = at_o2(Late())
    for _ in range(4):
        model.log_prob(X.bfloat16())
    model.mixes, model.calls = True, 0
    with pytest.raises(RuntimeError, match="dtype") as raised:
        model.log_prob(X.bfloat16())
    assert model.calls == 1
    assert any("call the model again" in each for each in getattr(raised.value, "__notes__", ["call the model again"]))
    assert model.log_prob(X.bfloat16()).shape == (2,)


def test_outside_of_the_model_nothing_is_cast() -> None:
    model = at_o2(Late())
    model.mixes = True
    model(X)
    with pytest.raises(RuntimeError, match="dtype"):
        F.linear(X, model.one.weight.detach())


def test_with_cast_ops_ops_meet_outside_too_while_the_model_lives() -> None:
    model = at_o2(Late(), cast_ops=True)
    assert F.linear(X, model.one.weight.detach()).dtype is torch.bfloat16


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_recomputes_as_it_computed(reentrant: bool) -> None:
    class Recomputing(Late):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(super().forward, x, use_reentrant=reentrant)  # type: ignore[no-any-return]

    torch.manual_seed(0)
    plain = Late()
    model = Recomputing()
    model.load_state_dict(plain.state_dict())
    grads = []
    for each in (at_o2(plain), at_o2(model)):
        each.mixes = True
        for _ in range(5):
            each.zero_grad()
            each(X.clone().requires_grad_()).sum().backward()
        grads.append([p.grad for p in each.parameters()])
    assert all(map(torch.equal, *grads))


@pytest.mark.exhaustive
def test_an_exported_program_has_the_casts() -> None:
    model = at_o2(Late()).eval()
    model.mixes = True
    program = torch.export.export(model, (X,))
    torch.testing.assert_close(program.module()(X), model(X))


def test_other_threads_and_inference() -> None:
    model = at_o2(Late()).eval()
    model.mixes = True
    wanted = model(X)
    found: list[torch.Tensor] = []

    def run() -> None:
        with torch.inference_mode():
            found.extend(model(X) for _ in range(4))

    in_a_thread(run)
    assert all(torch.equal(each, wanted) for each in found)
    assert len(found) == 4


def test_a_model_in_a_model() -> None:
    inner = at_o2(Late())
    inner.mixes = True
    outer = at_o2(nn.Sequential(nn.Linear(4, 4)))
    outer.add_module("1", inner)
    for _ in range(5):
        assert outer(X).dtype is torch.float32


@pytest.mark.parametrize("dtype", HALVES)
def test_a_model_that_never_mixes_has_the_bits_of_one_without_the_mode(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.GELU(), nn.Flatten(), nn.Linear(4 * 36, 2))
    x, outputs = torch.randn(5, 3, 8, 8), []
    for cast_ops in (False, None, True):
        model = at_o2(copy.deepcopy(made), dtype, cast_ops=cast_ops)
        for _ in range(4):
            out = model(x)
        out.square().sum().backward()
        outputs.append([out, *(p.grad for p in model.parameters())])
    for others in outputs[1:]:
        assert all(map(torch.equal, outputs[0], others))


@pytest.mark.parametrize("dtype", HALVES)
def test_functional_call_takes_fp32_weights_also_when_the_mode_is_off(dtype: torch.dtype) -> None:
    model = at_o2(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)), dtype)
    for _ in range(5):
        model(X)
    fast = {name: p.detach().float().requires_grad_() for name, p in model.named_parameters()}
    torch.func.functional_call(model, fast, (X,)).square().sum().backward()
    assert all(w.grad is not None and w.grad.dtype is torch.float32 for w in fast.values())
    assert modes_in(model) == 0

    def loss(weights: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, weights, (x[None],)).square().sum()

    detached = {name: w.detach() for name, w in fast.items()}
    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(detached, X)
    for name, w in fast.items():
        torch.testing.assert_close(each[name].sum(0), w.grad, atol=0.02, rtol=0.05)


def test_a_policy_with_cast_ops_is_read_back_from_its_text() -> None:
    policy = halfstep.Policy.from_level("O2").replace(cast_ops=True)
    assert halfstep.Policy.parse(str(policy)) == policy


# ---- what a cast would destroy


class Seen(nn.Module):
    """Keeps what it was called with."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.seen: Any = None

    def forward(self, *args: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
        self.seen = args, kwargs
        return self.layer(self.layer.weight).sum()  # type: ignore[no-any-return]


def stays(model: nn.Module, **options: Any) -> list[Any]:
    return [each.evidence["inputs"] for each in halfstep.check(model, **options) if each.code == "HS118"]


def test_integers_that_the_dtype_does_not_have_stay_fp32(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "halfstep")
    model = at_o2(Seen())
    steps = torch.tensor([3.0, 999.0])
    for _ in range(5):
        model(X, steps, small=torch.tensor([1.0, 2.0]), halves=torch.tensor([999.5]))
        (features, given), others = model.seen
        assert features.dtype is others["small"].dtype is others["halves"].dtype is torch.bfloat16
        assert torch.equal(given, steps)
    assert stays(model) == [[1]]
    line = "Input 1 of a model holds integers above 256, which bfloat16 has not all. It stays float32."
    assert caplog.messages.count(line) == 1


def test_integers_are_looked_for_in_the_first_pass_of_training_and_of_evaluation() -> None:
    small, large = torch.tensor([3.0, 5.0]), torch.tensor([3.0, 999.0])

    def dtypes(model: nn.Module, *inputs: torch.Tensor) -> list[torch.dtype]:
        return [(model(each), model.seen[0][0].dtype)[1] for each in inputs]

    model = at_o2(Seen())
    assert dtypes(model, *[small, *[large] * 8]) == [torch.bfloat16] * 9  # no dtype depends on a late batch
    assert dtypes(model.eval(), large, small) == [torch.float32] * 2
    assert dtypes(model.train(), large) == [torch.float32]
    model = at_o2(Seen())
    model(small)
    assert stays(model) == []
    assert stays(model, batch=large) == [[0]]
    assert dtypes(model, large) == [torch.float32]


SPECIAL = [float("inf"), -float("inf"), float("nan"), 0.5]


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("options", [{"opt_level": "O2"}, {"opt_level": "O2", "cast_ops": False}, {"opt_level": "O3"}])
@pytest.mark.parametrize("wide", [torch.float32, torch.float64])
def test_finite_inputs_stay_finite_and_infinite_ones_infinite(half: torch.dtype, options: Any, wide: Any) -> None:
    model = amp.initialize(Seen(), dtype=half, verbosity=0, **options)
    lowest, limits = torch.finfo(torch.float32).min, torch.finfo(half)
    plain, mask = torch.zeros(1, 6, dtype=wide), torch.tensor([[lowest, -lowest, *SPECIAL]], dtype=wide)
    for given in (plain, plain, plain, plain, mask):
        model(given)
    wanted = torch.tensor([[limits.min, limits.max, *SPECIAL]], dtype=half)
    torch.testing.assert_close(model.seen[0][0], wanted, rtol=0, atol=0, equal_nan=True)
    model(mask.requires_grad_())  # an activation of another model: its overflow is seen
    torch.testing.assert_close(model.seen[0][0], mask.to(half), rtol=0, atol=0, equal_nan=True)


@pytest.mark.filterwarnings("ignore:.torch.jit.:DeprecationWarning")
@pytest.mark.parametrize("half", HALVES)
def test_what_cannot_be_looked_at_stays_finite(half: torch.dtype) -> None:
    """In a traced program, as on a device, whose values nobody waits for."""
    model = at_o2(nn.Sequential(nn.Softmax(-1), nn.Linear(4, 4)), half)
    hidden = torch.full((2, 4), torch.finfo(torch.float32).min)
    wanted = model(torch.zeros(2, 4))
    torch.testing.assert_close(torch.jit.trace(model, (X,))(hidden), wanted)
    torch.testing.assert_close(torch.func.vmap(model)(hidden), wanted, atol=0.01, rtol=0.01)


def test_the_order_of_names_makes_no_other_kind_of_call() -> None:
    model = at_o2(Seen())
    steps, small = torch.tensor([3.0, 999.0]), torch.tensor([1.0, 2.0])
    model({"steps": steps, "small": small}, a=X, b=None)
    model({"small": small, "steps": steps}, b=None, a=X)
    (given,), _ = model.seen
    assert given["steps"] is steps
    assert given["small"].dtype is torch.bfloat16
    assert [modes_in(model, {}, **names) for names in ({"a": X, "b": None}, {"b": None, "a": X}) * 2] == [1, 0, 0, 0]


# ---- what a model writes to its inputs


class Cached(nn.Module):
    """Writes to one column of a cache, and only if it is told where."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, caches: Any, at: int | None = None) -> torch.Tensor:
        keys: torch.Tensor = self.layer(x)
        if at is not None:
            caches["keys"][0][:, at] = keys[:, 0]
        return keys


@pytest.mark.parametrize("context", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("half", HALVES)
def test_what_a_model_writes_to_an_input_is_there(half: torch.dtype, context: Any) -> None:
    model = at_o2(Cached(), half)
    with context():
        for _ in range(4):
            cache = torch.full((2, 4), 1 / 3)
            keys = model(X, {"keys": [cache]}, 1)
            assert torch.equal(cache[:, 1], keys[:, 0])
            assert torch.equal(cache[:, 0], torch.full((2,), 1 / 3))  # not rounded
    if cache.requires_grad:
        cache.sum().backward()
        assert model.layer.weight.grad[0].any()


def test_an_input_that_no_model_writes_to_is_left_alone() -> None:
    model, cache = at_o2(Cached()), torch.full((2, 4), 1 / 3)
    leaf = torch.zeros(2, 4, requires_grad=True)
    for _ in range(4):
        model(X, {"keys": [cache]})
        model(X, {"keys": [leaf]}, 1)  # torch refuses this in fp32
    assert (cache._version, leaf._version) == (0, 0)


def given(written: Callable[..., torch.Tensor]) -> nn.Module:
    """Make a model that does to its inputs what it is told."""
    return Made(lambda self, *inputs: self.layer(written(*inputs)), layer=nn.Linear(4, 4))


def test_an_input_that_is_given_twice_is_one_tensor_in_the_model() -> None:
    model = at_o2(given(lambda x, y: (y.add_(1), x)[1]))
    for _ in range(5):
        x = torch.zeros(2, 4)
        result = model(x, x)
        assert torch.equal(x, torch.ones(2, 4))
        assert torch.equal(result, model(torch.ones(2, 4), torch.zeros(2, 4)))


def test_inputs_whose_shape_a_model_changes() -> None:
    out = torch.empty(0)
    result = at_o2(given(lambda x, out: torch.add(x, 1, out=out)))(X, out)
    assert out.shape == X.shape
    torch.testing.assert_close(out, X.bfloat16().float() + 1, atol=0.02, rtol=0.02)
    assert result.shape == X.shape
    x = X.clone()
    assert at_o2(given(lambda x: x.unsqueeze_(1)))(x).shape == (len(X), 1, 4)
    assert torch.equal(x, X)
    empty = X[:0].clone().requires_grad_() * 2
    assert at_o2(given(lambda x: x.relu_()))(empty).shape == (0, 4)


BUFFERS: dict[str, tuple[float, bool, Callable[[torch.dtype], bool]]] = {  # value, whether saved, whether it stays
    "constant": (1e-8, True, lambda half: half is torch.float16),
    "large": (1e5, True, lambda half: half is torch.float16),
    "zero": (0.0, True, lambda half: False),
    "infinite": (float("inf"), True, lambda half: False),
    "plain": (-1.5, False, lambda half: False),
    "inv_freq": (0.3, False, lambda half: True),
}


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("name", BUFFERS)
def test_buffers_that_a_cast_would_destroy_stay_fp32(name: str, half: torch.dtype) -> None:
    value, saved, stays = BUFFERS[name]
    for cast_ops in (None, False):
        model = nn.Linear(4, 4)
        model.register_buffer(name, torch.tensor([0.0, value]), persistent=saved)
        model = at_o2(model, half, cast_ops=cast_ops)
        kept = stays(half) and cast_ops is None
        assert getattr(model, name).dtype is (torch.float32 if kept else half)
        named = [f.evidence["buffers"] for f in halfstep.check(model) if f.code == "HS119"]
        assert named == ([[name]] if kept else [])


class Updating(nn.Module):
    """Updates a buffer in training as it is told, and has another one that stays as it is."""

    def __init__(self, update: str) -> None:
        super().__init__()
        self.layer, self.update = nn.Linear(4, 4), update
        self.register_buffer("state", torch.full((4,), 300.25))
        self.register_buffer("table", torch.full((4,), 300.25))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        with torch.no_grad():
            UPDATES[self.update](self, y) if self.training else None
        return self.layer((y - self.state) / self.table)  # type: ignore[no-any-return]


UPDATES: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "running variance": lambda model, y: model.state.lerp_(y.var(0), 0.001),
    "counter": lambda model, y: model.state.add_(1),
    "codebook": lambda model, y: model.state.copy_(0.999 * model.state + 0.001 * y.mean(0)),
    "assigned": lambda model, y: setattr(model, "state", 0.999 * model.state + 0.001 * y.mean(0)),
}


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("other", [lambda model: model, copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_buffers_that_a_model_updates_are_fp32_after_the_first_training_pass(
    half: torch.dtype, update: str, other: Callable[[nn.Module], Any]
) -> None:
    plain, model = Updating(update), other(at_o2(Updating(update), half))
    state = model.state
    for training in (False,) * 4 + (True,) * 20:
        for each in (plain, model):
            each.train(training)(X).sum().backward()
    torch.testing.assert_close(model.state, plain.state, rtol=0, atol=2.0)  # the first update is rounded
    assert model.table.dtype is half
    assert (model.state is state) == (update != "assigned")  # DistributedDataParallel holds it
    assert [f.evidence["buffers"] for f in halfstep.check(model) if f.code == "HS119"] == [["state"]]


def test_buffers_keep_their_digits_until_the_first_training_pass() -> None:
    model = at_o2(Updating("counter"))
    saved = model.state_dict()
    assert torch.equal(saved["state"], amp.master_model(model).state)
    assert saved["state"][0] == 300.25
    model.load_state_dict({**saved, "state": saved["state"] + 1})
    assert model.state_dict()["state"][0] == 301.25


@pytest.mark.parametrize("half", HALVES)
def test_a_whole_casting_replaces_that_of_the_model(half: torch.dtype) -> None:
    model = at_o2(Late(), half)
    model.mixes = True
    with OpCasting(None, enabled=False), pytest.raises(RuntimeError, match="dtype"):
        model(X)


def series(self: Any, x: torch.Tensor) -> Any:
    """Give a recurrent layer an fp32 tensor, whose dtype torch's own code compares with that of the weights."""
    return self.out(self.rnn(x.float()[..., None])[0][:, -1])


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_take_fp32_and_integers_that_stay_fp32(kind: type[nn.RNNBase], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = Made(series, rnn=kind(1, 8, batch_first=True), out=nn.Linear(8, 1))
    x = torch.tensor([[3000.0, 2.0, 1.0], [1.0, 3001.0, 5.0]])
    exact = copy.deepcopy(model)(x)
    found = at_o2(model, dtype)(x)
    torch.testing.assert_close(found, exact, rtol=0.05, atol=0.05)
    found.sum().backward()
    assert all(p.grad is not None and p.grad.dtype is dtype for p in model.parameters())
