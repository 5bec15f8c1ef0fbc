"""Stacks of recurrent layers, in one direction and in both, and what makes them: ``LSTM``, ``GRU``, ``ReLU``..."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ....core.errors import ArgumentTypeError, ArgumentValueError
from .cells import RNNCell, gru_step, lstm_step, mLSTMRNNCell, relu_step, tanh_step

__all__ = [
    "GRU",
    "LSTM",
    "RNNCell",
    "ReLU",
    "Tanh",
    "bidirectionalRNN",
    "mLSTM",
    "mLSTMRNNCell",
    "stackedRNN",
    "toRNNBackend",
]


class _Layers(nn.Module):
    """Recurrent layers, wherever they are below this module; each keeps its state."""

    def _cells(self) -> list[RNNCell]:
        return [module for module in self.modules() if isinstance(module, RNNCell)]

    def init_hidden(self, bsz: int) -> None:
        """A state of zeros for every layer that has none for this batch size."""
        for cell in self._cells():
            cell.init_hidden(bsz)

    def init_inference(self, bsz: int) -> None:
        """``init_hidden``."""
        self.init_hidden(bsz)

    def reset_hidden(self, bsz: int) -> None:
        """A state of zeros for every layer."""
        for cell in self._cells():
            cell.reset_hidden(bsz)

    def detach_hidden(self) -> None:
        """Cut the graph behind every layer's state."""
        for cell in self._cells():
            cell.detach_hidden()

    def reset_parameters(self) -> None:
        """Draw all weights anew."""
        for cell in self._cells():
            cell.reset_parameters()


class stackedRNN(_Layers):  # noqa: N801 - Apex's name
    """Recurrent layers on top of each other. The state stays in the layers from one call to the next.

    Args:
        inputRNN: the lowest layer, of which the others are made, or a list of all of them.
        num_layers: how many.
        dropout: of what goes from one layer to the next, in training; Apex ignored it.
        batch_first: inputs and outputs are [batch, time, features]; Apex ignored it.

    Raises:
        ArgumentValueError: a list of another length than ``num_layers``, or a dropout outside of [0, 1].
        ArgumentTypeError: something else than an ``RNNCell``.

    Source: Apex, ``apex.RNN.RNNBackend``.
    """

    def __init__(
        self,
        inputRNN: RNNCell | Sequence[RNNCell],  # noqa: N803
        num_layers: int = 1,
        dropout: float = 0.0,
        batch_first: bool = False,
    ) -> None:
        super().__init__()
        if isinstance(inputRNN, RNNCell):
            first = inputRNN
            cells = [first, *(first.new_like(first.output_size) for _ in range(num_layers - 1))]
        else:
            cells = list(inputRNN) if isinstance(inputRNN, (list, tuple)) else []
            if not cells or not all(isinstance(cell, RNNCell) for cell in cells):
                raise ArgumentTypeError(f"inputRNN must be an RNNCell or a list of them, not {inputRNN!r}.")
            if len(cells) != num_layers:
                raise ArgumentValueError(f"inputRNN has {len(cells)} layers, but num_layers={num_layers}.")
        if not 0.0 <= dropout <= 1.0:
            raise ArgumentValueError(f"dropout={dropout!r} must be from 0 to 1.")
        self.rnns = nn.ModuleList(cells)
        self.nLayers, self.dropout, self.batch_first = num_layers, dropout, batch_first

    def forward(
        self, input: torch.Tensor, collect_hidden: bool = False, reverse: bool = False
    ) -> tuple[torch.Tensor, list[Any]]:
        """Run over a sequence.

        Args:
            input: [time, batch, features], or [batch, time, features] with ``batch_first``.
            collect_hidden: return the states of all steps.
            reverse: go through it from its end. Outputs are in the order of time in any case.

        Returns:
            The last layer's outputs, shaped as the input, and ``hiddens[state][layer]``, tensors of [batch, features]:
            the last ones, or with ``collect_hidden`` ``hiddens[state][step][layer]``.
        """
        x = input.transpose(0, 1) if self.batch_first else input
        layers = []
        for i, cell in enumerate(self.rnns):
            if i and self.dropout:
                x = F.dropout(x, self.dropout, self.training)
            x, states = cell.run(x, reverse, collect_hidden)  # type: ignore[operator]
            layers.append(states)
        hiddens: list[Any] = [list(states) for states in zip(*layers, strict=True)]
        if collect_hidden:
            hiddens = [[list(step) for step in zip(*states, strict=True)] for states in hiddens]
        return (x.transpose(0, 1) if self.batch_first else x), hiddens


class bidirectionalRNN(_Layers):  # noqa: N801 - Apex's name
    """Two stacks, one for each direction, that know nothing of each other; their outputs are put side by side.

    Args:
        inputRNN: the lowest layer of the forward stack; the other one's is made like it.
        num_layers: of each stack.
        dropout: as in ``stackedRNN``.
        batch_first: as in ``stackedRNN``.
    """

    def __init__(
        self,
        inputRNN: RNNCell,  # noqa: N803
        num_layers: int = 1,
        dropout: float = 0.0,
        batch_first: bool = False,
    ) -> None:
        super().__init__()
        self.fwd = stackedRNN(inputRNN, num_layers, dropout, batch_first)
        self.bckwrd = stackedRNN(inputRNN.new_like(), num_layers, dropout, batch_first)
        self.rnns = nn.ModuleList([self.fwd, self.bckwrd])

    def forward(self, input: torch.Tensor, collect_hidden: bool = False) -> tuple[torch.Tensor, list[Any]]:
        """As ``stackedRNN``, with twice the features: forward, then backward."""
        out, states = self.fwd(input, collect_hidden)
        back, back_states = self.bckwrd(input, collect_hidden, reverse=True)
        return torch.cat([out, back], -1), _side_by_side(states, back_states)


def _side_by_side(a: Any, b: Any) -> Any:
    if isinstance(a, list):
        return [_side_by_side(x, y) for x, y in zip(a, b, strict=True)]
    return torch.cat([a, b], -1)


def toRNNBackend(  # noqa: N802 - Apex's name
    inputRNN: RNNCell,  # noqa: N803
    num_layers: int,
    bidirectional: bool = False,
    dropout: float = 0.0,
) -> nn.Module:
    """A ``stackedRNN``, or ``bidirectionalRNN``, of one kind of layer."""
    return (bidirectionalRNN if bidirectional else stackedRNN)(inputRNN, num_layers, dropout)


def _factory(
    name: str, what: str, make_cell: Callable[[int, int, bool, int | None], RNNCell]
) -> Callable[..., nn.Module]:
    def make(
        input_size: int,
        hidden_size: int,
        num_layers: int,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        output_size: int | None = None,
    ) -> nn.Module:
        kind = bidirectionalRNN if bidirectional else stackedRNN
        return kind(make_cell(input_size, hidden_size, bias, output_size), num_layers, dropout, batch_first)

    make.__name__ = make.__qualname__ = name
    make.__doc__ = f"A ``stackedRNN``, or ``bidirectionalRNN``, of {what}."
    return make


LSTM = _factory(
    "LSTM",
    "LSTM layers; with ``output_size`` h is a projection",
    lambda inputs, hidden, bias, out: RNNCell(4, inputs, hidden, lstm_step, 2, bias, out),
)
GRU = _factory(
    "GRU",
    "GRU layers; an ``output_size`` other than ``hidden_size`` is refused",
    lambda inputs, hidden, bias, out: RNNCell(3, inputs, hidden, gru_step, 1, bias, out),
)
ReLU = _factory(
    "ReLU",
    "Elman layers with ReLU",
    lambda inputs, hidden, bias, out: RNNCell(1, inputs, hidden, relu_step, 1, bias, out),
)
Tanh = _factory(
    "Tanh",
    "Elman layers with tanh",
    lambda inputs, hidden, bias, out: RNNCell(1, inputs, hidden, tanh_step, 1, bias, out),
)
mLSTM = _factory(  # noqa: N816 - Apex's name
    "mLSTM",
    "multiplicative LSTM layers",
    lambda inputs, hidden, bias, out: mLSTMRNNCell(4, inputs, hidden, None, 2, bias, out),
)
