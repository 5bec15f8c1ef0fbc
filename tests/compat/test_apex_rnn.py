"""apex.RNN against torch.nn where the arithmetic is the same, and against loops in float64 where it is not."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from halfstep.apex.RNN.cells import gru_step
from halfstep.apex.RNN.models import RNNCell, bidirectionalRNN, stackedRNN
from torch import nn

from halfstep import amp
from halfstep.apex import RNN
from halfstep.core.errors import UsageError
from tests.support.worlds import Made, advance, with_optimizer

T, B, IN, H = 5, 3, 4, 6
KINDS = {"LSTM": (RNN.LSTM, nn.LSTM, {}), "GRU": (RNN.GRU, nn.GRU, {})}
KINDS |= {name: (getattr(RNN, name), nn.RNN, {"nonlinearity": name.lower()}) for name in ("ReLU", "Tanh")}


def copied(ours: Any, theirs: Any) -> None:
    """The weights of a stack into torch's module."""
    for layer, cell in enumerate(ours.rnns):
        for name, param in (
            ("weight_ih", cell.w_ih),
            ("weight_hh", cell.w_hh),
            ("bias_ih", cell.b_ih),
            ("bias_hh", cell.b_hh),
        ):
            if param is not None:
                getattr(theirs, f"{name}_l{layer}").data.copy_(param.data)
        if cell.w_ho is not None:
            getattr(theirs, f"weight_hr_l{layer}").data.copy_(cell.w_ho.data)


def last(hidden: Any) -> list[torch.Tensor]:
    """torch's final state as [state]."""
    return list(hidden) if isinstance(hidden, tuple) else [hidden]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("name", KINDS)
def test_it_is_torchs_network_that_remembers(name: str, batch_first: bool, layers: int, bias: bool) -> None:
    make, reference, options = KINDS[name]
    ours: Any = make(IN, H, layers, bias=bias, batch_first=batch_first)
    theirs = reference(IN, H, layers, bias=bias, batch_first=batch_first, **options)
    copied(ours, theirs)
    hidden = None
    for _ in range(2):  # the second call goes on from the first one's state
        x = torch.randn((B, T, IN) if batch_first else (T, B, IN), requires_grad=True)
        y, hiddens = ours(x)
        expected, hidden = theirs(x, hidden)
        torch.testing.assert_close(y, expected)
        torch.testing.assert_close([torch.stack(found) for found in hiddens], [*last(hidden)])
        (grad,) = torch.autograd.grad(y.square().sum(), x, retain_graph=True)
        (expected_grad,) = torch.autograd.grad(expected.square().sum(), x, retain_graph=True)
        torch.testing.assert_close(grad, expected_grad)


def mlstm(
    cell: Any, x: torch.Tensor, h: torch.Tensor, c: torch.Tensor
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Krause et al., equations 18 to 22, with Apex's biases and projection."""
    w = {name: param.double() for name, param in cell.named_parameters()}
    zero = torch.zeros(())
    hs, cs = [], []
    for x_t in x.double():
        m = (x_t @ w["w_mih"].T) * (h @ w["w_mhh"].T)
        gates = x_t @ w["w_ih"].T + w.get("b_ih", zero) + m @ w["w_hh"].T + w.get("b_hh", zero)
        i, f, g, o = gates.chunk(4, 1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        if "w_ho" in w:
            h = h @ w["w_ho"].T
        hs.append(h)
        cs.append(c)
    return hs, cs


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("output_size", [None, 2, 9])
def test_mlstm(output_size: int | None, bias: bool) -> None:
    net: Any = RNN.mLSTM(IN, H, 2, bias=bias, output_size=output_size)
    out = output_size or H
    x = torch.randn(T, B, IN)
    y, (h, c) = net(x, collect_hidden=True)
    below = x.double()
    for layer, cell in enumerate(net.rnns):
        hs, cs = mlstm(cell, below, torch.zeros(B, out).double(), torch.zeros(B, H).double())
        for t in range(T):
            torch.testing.assert_close(h[t][layer].double(), hs[t], rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(c[t][layer].double(), cs[t], rtol=1e-5, atol=1e-6)
        below = torch.stack(hs)
    torch.testing.assert_close(y.double(), below, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")  # torch's own
@pytest.mark.parametrize("output_size", [2, 9])
@pytest.mark.parametrize("name", ["LSTM", "Tanh", "ReLU"])
def test_output_size_projects_the_state(name: str, output_size: int) -> None:
    net: Any = getattr(RNN, name)(IN, H, 2, output_size=output_size)
    x = torch.randn(T, B, IN)
    y, hiddens = net(x)
    assert y.shape == (T, B, output_size)
    assert [[h.shape[1] for h in state] for state in hiddens] == [[output_size] * 2, [H] * 2][: len(hiddens)]
    steps: Any = getattr(RNN, name)(IN, H, 2, output_size=output_size)
    steps.load_state_dict(net.state_dict())
    torch.testing.assert_close(y, steps(x, collect_hidden=True)[0])  # step by step the same
    if name == "LSTM" and output_size < H:
        theirs = nn.LSTM(IN, H, 2, proj_size=output_size)
        copied(net, theirs)
        torch.testing.assert_close(y, theirs(x)[0])


def test_a_step_of_a_gru_is_torch_s() -> None:
    theirs, x, hidden = nn.GRUCell(IN, H), torch.randn(B, IN), torch.randn(B, H)
    weights = (theirs.weight_ih, theirs.weight_hh)
    assert torch.equal(gru_step(x, hidden, *weights, theirs.bias_ih, theirs.bias_hh), theirs(x, hidden))
    with torch.no_grad():
        theirs.bias_ih.zero_()
        theirs.bias_hh.zero_()
    assert torch.equal(gru_step(x, hidden, *weights), theirs(x, hidden))


@pytest.mark.parametrize("name", [*KINDS, "mLSTM"])
def test_collected_states_are_those_of_every_step(name: str) -> None:
    net: Any = getattr(RNN, name)(IN, H, 2)
    x = torch.randn(T, B, IN)
    y, collected = net(x, collect_hidden=True)
    assert len(collected[0]) == T
    assert [len(step) for step in collected[0]] == [2] * T
    torch.testing.assert_close(torch.stack([step[-1] for step in collected[0]]), y)
    net.reset_hidden(B)
    for t in range(T):
        _, hiddens = net(x[t : t + 1])
        torch.testing.assert_close([*hiddens], [kept[t] for kept in collected])


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("name", [*KINDS, "mLSTM"])
def test_bidirectional(name: str, batch_first: bool) -> None:
    net: Any = getattr(RNN, name)(IN, H, 2, bidirectional=True, batch_first=batch_first)
    assert isinstance(net, bidirectionalRNN)
    x = torch.randn(T, B, IN)
    y, hiddens = net(x.transpose(0, 1) if batch_first else x)
    y = y.transpose(0, 1) if batch_first else y
    for stack in (net.fwd, net.bckwrd):
        stack.batch_first = False
        stack.reset_hidden(B)
    there, states = net.fwd(x)
    back, back_states = net.bckwrd(x.flip(0))
    torch.testing.assert_close(y, torch.cat([there, back.flip(0)], 2))
    for found, a, b in zip(hiddens, states, back_states, strict=True):
        torch.testing.assert_close(found, [torch.cat(pair, 1) for pair in zip(a, b, strict=True)])
    if name == "LSTM":  # with one layer it is torch's
        net, theirs = RNN.LSTM(IN, H, 1, bidirectional=True), nn.LSTM(IN, H, 1, bidirectional=True)
        copied(net.fwd, theirs)
        for part in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
            own = getattr(net.bckwrd.rnns[0], part.replace("weight", "w").replace("bias", "b"))
            getattr(theirs, f"{part}_l0_reverse").data.copy_(own.data)
        expected, (h, _) = theirs(x)
        y, hiddens = net(x)
        torch.testing.assert_close(y, expected)
        torch.testing.assert_close(hiddens[0][0], torch.cat(list(h), 1))
    net.detach_hidden()
    net.reset_hidden(7)
    net.init_inference(7)
    net.reset_parameters()


def test_dropout_is_between_layers_in_training() -> None:
    net: Any = RNN.Tanh(IN, H, 2, dropout=1.0)
    x = torch.randn(T, B, IN)
    first, second = net(x)[0], (net.reset_hidden(B), net(x + 1)[0])[1]
    assert torch.equal(first, second), "all of what the first layer says is dropped"
    net.eval()
    net.reset_hidden(B)
    assert not torch.equal(net(x)[0], first)


def test_truncated_backpropagation() -> None:
    net: Any = RNN.LSTM(IN, H, 2)
    with pytest.raises(UsageError, match="no hidden state to detach"):
        net.detach_hidden()
    x = torch.randn(T, B, IN)
    for _ in range(2):
        net(x)[0].sum().backward()
        net.detach_hidden()
    before = [h.clone() for h in net.rnns[0].hidden]
    assert any(h.abs().sum() for h in before)
    net.init_hidden(B)
    assert all(torch.equal(a, b) for a, b in zip(net.rnns[0].hidden, before, strict=True)), "a state that fits stays"
    net.init_hidden(B + 1)
    assert net.rnns[0].hidden[0].abs().sum() == 0
    net(x)
    again, thawed = copy.deepcopy(net), pickle.loads(pickle.dumps(net))
    x = torch.randn(T, B, IN)
    assert torch.equal(again(x)[0], thawed(x)[0])


def test_a_cell_by_itself() -> None:
    cell = RNNCell(1, IN, H, lambda x, h, w_ih, w_hh, *_: torch.tanh(x @ w_ih.T + h @ w_hh.T), n_hidden_states=1)
    x = torch.randn(T, B, IN)
    outputs, _ = stackedRNN(cell)(x)
    cell.reset_hidden(B)
    for t in range(T):
        (h,) = cell(x[t])
        torch.testing.assert_close(h, outputs[t])
    assert stackedRNN([cell, cell.new_like(H)], num_layers=2)(x)[0].shape == (T, B, H)


@pytest.mark.exhaustive
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
@pytest.mark.parametrize("name", [*KINDS, "mLSTM"])
def test_levels(name: str, level: str, dtype: torch.dtype, bidirectional: bool) -> None:
    model: Any = nn.ModuleDict(
        {"rnn": getattr(RNN, name)(IN, H, 2, bidirectional=bidirectional), "out": nn.Linear(H * (1 + bidirectional), 1)}
    )
    model.forward = None

    net = Made(lambda self, x: self.parts["out"](self.parts["rnn"](x)[0]), parts=model)
    net, optimizer = with_optimizer(net, torch.optim.SGD, lr=0.1)
    kind = {} if level == "O0" else {"dtype": dtype}
    net, optimizer = amp.initialize(net, optimizer, opt_level=level, loss_scale=64.0, verbosity=0, **kind)
    x = torch.randn(T, B, IN)
    losses = []
    for _ in range(30):
        loss = (net(x).float() - 1).square().mean()
        advance(loss, optimizer)
        model["rnn"].reset_hidden(B)
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 3
