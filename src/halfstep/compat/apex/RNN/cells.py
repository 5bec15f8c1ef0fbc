"""One layer of a recurrent network that keeps its state: ``RNNCell``, and the multiplicative LSTM."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ....core.errors import ArgumentValueError, UsageError

__all__ = ["RNNCell", "Step", "gru_step", "lstm_step", "mLSTMCell", "mLSTMRNNCell", "relu_step", "tanh_step"]

Step = Callable[..., Any]


def lstm_step(x: Any, hidden: Any, w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None) -> Any:
    """One step of an LSTM: (h, c) from [batch, input] and (h, c), of which h may be a projection."""
    h, c = hidden
    return _after_gates(F.linear(x, w_ih, b_ih) + F.linear(h, w_hh, b_hh), c)


def gru_step(x: Any, hidden: Any, w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None) -> Any:
    """One step of a GRU."""
    return torch.gru_cell(x, hidden, w_ih, w_hh, b_ih, b_hh)


def relu_step(x: Any, hidden: Any, w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None) -> Any:
    """One step of an Elman network with ReLU. Its state may be a projection of what it computes."""
    return torch.relu(F.linear(x, w_ih, b_ih) + F.linear(hidden, w_hh, b_hh))


def tanh_step(x: Any, hidden: Any, w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None) -> Any:
    """One step of an Elman network with tanh."""
    return torch.tanh(F.linear(x, w_ih, b_ih) + F.linear(hidden, w_hh, b_hh))


_SEQUENCES: dict[Step, Callable[..., Any]] = {
    lstm_step: torch.lstm,
    gru_step: torch.gru,
    relu_step: torch.rnn_relu,
    tanh_step: torch.rnn_tanh,
}
"""Steps for which torch has a kernel that takes a whole sequence."""


class RNNCell(nn.Module):
    """A recurrent layer with its weights and its state.

    Args:
        gate_multiplier: the count of gates of ``hidden_size`` that a step computes.
        input_size: features of the input.
        hidden_size: features of the cell.
        cell: the function of one step, ``cell(x, hidden, w_ih, w_hh, b_ih, b_hh)``. ``hidden`` and the result are
            tensors, or tuples of tensors if there are several hidden states.
        n_hidden_states: the count of hidden states.
        bias: create ``b_ih`` and ``b_hh``.
        output_size: features of the first hidden state, to which ``w_ho`` projects the result of a step.

    Attributes:
        hidden: the state, [batch, output_size] and, for the second, [batch, hidden_size]; None before the first use.

    Raises:
        ArgumentValueError: for an ``output_size`` that the step does not support.

    Source: Apex, ``apex.RNN``.
    """

    def __init__(
        self,
        gate_multiplier: int,
        input_size: int,
        hidden_size: int,
        cell: Step | None,
        n_hidden_states: int = 2,
        bias: bool = False,
        output_size: int | None = None,
    ) -> None:
        super().__init__()
        self.gate_multiplier, self.input_size, self.hidden_size = gate_multiplier, input_size, hidden_size
        self.cell, self.n_hidden_states, self.bias = cell, n_hidden_states, bias
        self.output_size = hidden_size if output_size is None else output_size
        projects = self.output_size != hidden_size
        if cell is gru_step and projects:
            raise ArgumentValueError(
                f"output_size={output_size} of a GRU must be its hidden_size, {hidden_size}: a GRU's state is mixed "
                "with its gates, so it cannot be a projection. Leave it out, or add a linear layer behind."
            )
        self.hidden: list[torch.Tensor] | None = None
        gates = gate_multiplier * hidden_size
        self.w_ih = nn.Parameter(torch.empty(gates, input_size))
        self.w_hh = nn.Parameter(torch.empty(gates, self.output_size))
        self.w_ho = nn.Parameter(torch.empty(self.output_size, hidden_size)) if projects else None
        self.b_ih = nn.Parameter(torch.empty(gates)) if bias else None
        self.b_hh = nn.Parameter(torch.empty(gates)) if bias else None
        self.reset_parameters()

    def new_like(self, new_input_size: int | None = None) -> RNNCell:
        """Create a layer of the same kind with new weights, optionally for another input size."""
        size = self.input_size if new_input_size is None else new_input_size
        return type(self)(
            self.gate_multiplier, size, self.hidden_size, self.cell, self.n_hidden_states, self.bias, self.output_size
        )

    def reset_parameters(self) -> None:
        """Draw all weights uniformly from +-1/sqrt(hidden_size)."""
        bound = 1.0 / math.sqrt(self.hidden_size)
        for param in self.parameters():
            nn.init.uniform_(param, -bound, bound)

    # ---- the state

    def init_hidden(self, bsz: int) -> None:
        """Set the state to zeros, unless it already has this batch size; then its graph and values are kept."""
        if self.hidden is None or self.hidden[0].shape[0] != bsz:
            self.reset_hidden(bsz)
        assert self.hidden is not None
        self.hidden = [h.to(self.w_ih.device, self.w_ih.dtype) for h in self.hidden]

    def reset_hidden(self, bsz: int) -> None:
        """Set the state to zeros."""
        sizes = [self.output_size, *[self.hidden_size] * (self.n_hidden_states - 1)]
        self.hidden = [self.w_ih.new_zeros(bsz, size) for size in sizes]

    def detach_hidden(self) -> None:
        """Cut the graph behind the state, as truncated backpropagation does between two batches.

        Raises:
            UsageError: if there is no state yet.
        """
        if self.hidden is None:
            raise UsageError("There is no hidden state to detach yet; run the network, or call init_hidden(bsz).")
        self.hidden = [h.detach() for h in self.hidden]

    def __getstate__(self) -> dict[str, Any]:
        hidden = None if self.hidden is None else [h.detach() for h in self.hidden]
        return {**self.__dict__, "hidden": hidden}

    # ---- computing

    def forward(self, input: torch.Tensor) -> list[torch.Tensor]:
        """Run one step on [batch, input_size], which reads and updates the state.

        Returns:
            The new state.
        """
        self.init_hidden(input.shape[0])
        self.hidden = self._step(self._prepared(input.to(self.w_ih.dtype)))
        return self.hidden

    def run(self, x: torch.Tensor, reverse: bool, collect: bool) -> tuple[torch.Tensor, list[Any]]:
        """Run all steps of a sequence.

        Args:
            x: [time, batch, input_size].
            reverse: run from the last step to the first.
            collect: return the states of all steps.

        Returns:
            Outputs, [time, batch, output_size], and for each hidden state its last value, or with ``collect`` all
            values, [time, batch, features]. Both are in the order of time.
        """
        x = x.to(self.w_ih.dtype)
        self.init_hidden(x.shape[1])
        assert self.hidden is not None
        if reverse:
            x = x.flip(0)
        sequence = _SEQUENCES.get(self.cell) if self.cell is not None else None
        if sequence is None or self.w_ho is not None or (collect and self.n_hidden_states > 1):
            states = self._loop(x)
        else:
            states = self._kernel(sequence, x)
        if reverse:
            states = [state.flip(0) for state in states]
        return states[0], states if collect else list(self.hidden)

    def _kernel(self, sequence: Callable[..., Any], x: torch.Tensor) -> list[torch.Tensor]:
        assert self.hidden is not None
        several = self.n_hidden_states > 1
        hidden = tuple(h.unsqueeze(0) for h in self.hidden)
        weights = [w for w in self._weights() if w is not None]
        outputs, *last = sequence(
            x, hidden if several else hidden[0], weights, self.bias, 1, 0.0, self.training, False, False
        )
        self.hidden = [h.squeeze(0) for h in last]
        return [outputs]

    def _loop(self, x: torch.Tensor) -> list[torch.Tensor]:
        steps = []
        for prepared in zip(*(part.unbind(0) for part in self._prepared(x)), strict=True):
            self.hidden = self._step(prepared)
            steps.append(self.hidden)
        return [torch.stack(states) for states in zip(*steps, strict=True)]

    def _prepared(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Compute the part of the input's product that all steps share."""
        return (x,)

    def _step(self, prepared: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        assert self.hidden is not None
        assert self.cell is not None
        several = self.n_hidden_states > 1
        hidden = [h.to(self.w_ih.dtype) for h in self.hidden]
        found = self.cell(prepared[0], tuple(hidden) if several else hidden[0], *self._weights())
        return self._projected(list(found) if several else [found])

    def _weights(self) -> tuple[torch.Tensor | None, ...]:
        return self.w_ih, self.w_hh, self.b_ih, self.b_hh

    def _projected(self, states: list[torch.Tensor]) -> list[torch.Tensor]:
        return states if self.w_ho is None else [F.linear(states[0], self.w_ho), *states[1:]]


class mLSTMRNNCell(RNNCell):  # noqa: N801 - Apex's name
    """A multiplicative LSTM (Krause et al., arXiv 1609.07959): gates read ``(W_mih x) * (W_mhh h)`` instead of h.

    Args:
        gate_multiplier: kept for Apex: 4.
        input_size: features of the input.
        hidden_size: features of the cell.
        cell: kept for Apex.
        n_hidden_states: kept for Apex: 2.
        bias: create ``b_ih`` and ``b_hh``.
        output_size: the argument of ``RNNCell``.
    """

    def __init__(
        self,
        gate_multiplier: int,
        input_size: int,
        hidden_size: int,
        cell: Step | None = None,
        n_hidden_states: int = 2,
        bias: bool = False,
        output_size: int | None = None,
    ) -> None:
        super().__init__(4, input_size, hidden_size, None, 2, bias, output_size)
        self.w_mih = nn.Parameter(torch.empty(self.output_size, input_size))
        self.w_mhh = nn.Parameter(torch.empty(self.output_size, self.output_size))
        self.reset_parameters()

    def _prepared(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return F.linear(x, self.w_ih, self.b_ih), F.linear(x, self.w_mih)

    def _step(self, prepared: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        assert self.hidden is not None
        gates_of_x, m_of_x = prepared
        h, c = (state.to(gates_of_x.dtype) for state in self.hidden)
        m = m_of_x * F.linear(h, self.w_mhh)
        return self._projected(list(_after_gates(gates_of_x + F.linear(m, self.w_hh, self.b_hh), c)))


def mLSTMCell(  # noqa: N802 - Apex's name
    input: Any, hidden: Any, w_ih: Any, w_hh: Any, w_mih: Any, w_mhh: Any, b_ih: Any = None, b_hh: Any = None
) -> Any:
    """One step of a multiplicative LSTM: (h, c) from [batch, input] and (h, c)."""
    h, c = hidden
    m = F.linear(input, w_mih) * F.linear(h, w_mhh)
    return _after_gates(F.linear(input, w_ih, b_ih) + F.linear(m, w_hh, b_hh), c)


def _after_gates(gates: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute (h, c) of an LSTM from the inputs of its gates i, f, g, o."""
    i, f, g, o = gates.chunk(4, -1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c
