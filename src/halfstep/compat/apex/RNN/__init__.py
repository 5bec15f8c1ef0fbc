"""``apex.RNN``: recurrent layers that keep their state, by Apex's names."""

from ...submodules import add_submodules
from . import models
from .models import GRU, LSTM, ReLU, Tanh, mLSTM

__all__ = ["GRU", "LSTM", "ReLU", "Tanh", "mLSTM"]

add_submodules(__name__, {"RNNBackend": "RNNCell bidirectionalRNN stackedRNN"}, also=vars(models))
