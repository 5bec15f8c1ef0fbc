"""``apex.RNN``: recurrent layers that keep their state, by Apex's names."""

from .models import GRU, LSTM, ReLU, Tanh, mLSTM

__all__ = ["GRU", "LSTM", "ReLU", "Tanh", "mLSTM"]
