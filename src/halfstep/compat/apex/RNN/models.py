"""Stacks of recurrent layers in one or both directions, and their constructors: ``LSTM``, ``GRU``, ``ReLU``..."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ....core.errors import ArgumentTypeError, ArgumentValueError
from .cells import RNNCell, Step, gru_step, lstm_step, mLSTMRNNCell, relu_step, tanh_step

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
    """A module with recurrent layers at any depth, each of which keeps its state."""

    def _cells(self) -> list[RNNCell]:
        return [module for module in self.modules() if isinstance(module, RNNCell)]

    def init_hidden(self, bsz: int) -> None:
        """Set the state to zeros in every layer whose state does not have this batch size."""
        for cell in self._cells():
            cell.init_hidden(bsz)

    init_inference = init_hidden

    def reset_hidden(self, bsz: int) -> None:
        """Set the state of every layer to zeros."""
        for cell in self._cells():
            cell.reset_hidden(bsz)

    def detach_hidden(self) -> None:
        """Cut the graph behind every layer's state."""
        for cell in self._cells():
            cell.detach_hidden()

    def reset_parameters(self) -> None:
        """Initialize all weights again."""
        for cell in self._cells():
            cell.reset_parameters()


class stackedRNN(_Layers):  # noqa: N801 - Apex's name
    """Recurrent layers on top of each other. The state stays in the layers from one call to the next.

    Args:
        inputRNN: the lowest layer, from which the higher layers are made, or a list of all layers.
        num_layers: the count of layers.
        dropout: the dropout between layers in training; Apex ignored it.
        batch_first: inputs and outputs are [batch, time, features]; Apex ignored it.

    Raises:
        ArgumentValueError: if the list does not have ``num_layers`` elements, or the dropout is outside [0, 1].
        ArgumentTypeError: if a layer is not an ``RNNCell``.

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
            reverse: run from the end of the sequence. Outputs are always in the order of time.

        Returns:
            The last layer's outputs, shaped as the input, and the last states ``hiddens[state][layer]``, or with
            ``collect_hidden`` all states ``hiddens[state][step][layer]``: tensors of [batch, features].
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
    """Two independent stacks, one per direction, whose outputs are concatenated.

    Args:
        inputRNN: the lowest layer of the forward stack, from which the lowest layer of the backward stack is made.
        num_layers: the count of layers in each stack.
        dropout: the argument of ``stackedRNN``.
        batch_first: the argument of ``stackedRNN``.
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
        """Run over a sequence, as ``stackedRNN`` does, with twice the features: forward, then backward."""
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
    """Make a ``stackedRNN`` or ``bidirectionalRNN`` from one kind of layer."""
    return (bidirectionalRNN if bidirectional else stackedRNN)(inputRNN, num_layers, dropout)


def _factory(
    name: str, what: str, gates: int, cell: Step | None, n_hidden_states: int, kind: type[RNNCell] = RNNCell
) -> Callable[..., nn.Module]:
    """Make the constructor of networks of one kind of layer.

    Args:
        name: the name of the constructor.
        what: the layers in words.
        gates: the argument ``gate_multiplier`` of the layers.
        cell: the function of one step.
        n_hidden_states: the count of hidden states.
        kind: the class of the layers.
    """

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
        first = kind(gates, input_size, hidden_size, cell, n_hidden_states, bias, output_size)
        return (bidirectionalRNN if bidirectional else stackedRNN)(first, num_layers, dropout, batch_first)

    make.__name__ = make.__qualname__ = name
    make.__doc__ = f"A ``stackedRNN``, or ``bidirectionalRNN``, of {what}."
    return make


LSTM = _factory("LSTM", "LSTM layers; with ``output_size`` h is a projection", 4, lstm_step, 2)
GRU = _factory("GRU", "GRU layers; an ``output_size`` other than ``hidden_size`` is refused", 3, gru_step, 1)
ReLU = _factory("ReLU", "Elman layers with ReLU", 1, relu_step, 1)
Tanh = _factory("Tanh", "Elman layers with tanh", 1, tanh_step, 1)
mLSTM = _factory("mLSTM", "multiplicative LSTM layers", 4, None, 2, mLSTMRNNCell)  # noqa: N816 - Apex's name
