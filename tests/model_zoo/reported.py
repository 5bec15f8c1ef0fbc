"""What people have reported as broken under Apex's O2, ``.half()`` and autocast: one kind for each report."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from .generative import mlp, moons
from .kinds import kind
from .language import tokens


class Spectrogram(nn.Module):
    """A front end of audio models: a window in a buffer, torch.stft, and decibels of small powers."""

    def __init__(self, n_fft=16):
        super().__init__()
        self.n_fft = n_fft
        self.register_buffer("window", torch.hann_window(n_fft))
        self.register_buffer("mel", torch.rand(6, n_fft // 2 + 1))
        self.conv, self.fc = nn.Conv1d(6, 8, 3, padding=1), nn.Linear(8, 3)

    def forward(self, x):
        spec = torch.stft(x, self.n_fft, 4, window=self.window, return_complex=True)
        power = torch.matmul(self.mel, spec.real.pow(2) + spec.imag.pow(2))
        x = torch.log10(torch.clamp(power, min=1e-10)) / 4 + 1
        return self.fc(F.relu(self.conv(x)).mean(-1))


@kind("spectrogram by stft", steps=30, lr=3e-2)
def spectrogram():
    model, y = Spectrogram(), torch.arange(12) % 3
    t = torch.arange(64) * 2 * math.pi / 16
    x = torch.sin(t * (1 + 2 * y[:, None])) + 0.1 * torch.randn(12, 64)
    return model, lambda: F.cross_entropy(model(x), y)


class AdaptiveLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.rnn = nn.Embedding(16, 16), nn.GRU(16, 16, batch_first=True)
        self.loss = nn.AdaptiveLogSoftmaxWithLoss(16, 16, cutoffs=[4, 10], div_value=2.0)

    def forward(self, x, y):
        return self.loss(self.rnn(self.embed(x))[0].flatten(0, 1), y.flatten()).loss


@kind("adaptive softmax", steps=20, lr=2e-2)
def adaptive_softmax():
    model, x = AdaptiveLM(), tokens(8, 8)
    return model, lambda: model(x[:, :-1], x[:, 1:])


class Glow(nn.Module):
    """An invertible product: a logarithm of its determinant, and an inverse for samples."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linalg.qr(torch.randn(2, 2))[0].contiguous())
        self.log_scale, self.shift, self.net = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2)), mlp(1, 16, 2)

    def forward(self, x):
        x = (x + self.shift) * self.log_scale.exp()
        x = x @ self.weight
        a, b = x.chunk(2, 1)
        s, t = self.net(a).chunk(2, 1)
        log_det = self.log_scale.sum() + torch.slogdet(self.weight)[1] + s.tanh().squeeze(1)
        z = torch.cat([a, b * s.tanh().exp() + t], 1)
        return 0.5 * z.pow(2).sum(1) + math.log(2 * math.pi) - log_det

    @torch.no_grad()
    def sample(self, n):
        return torch.randn(n, 2) @ torch.inverse(self.weight) / self.log_scale.exp() - self.shift


@kind("Glow", steps=25, lr=3e-2)
def glow():
    model, x = Glow(), moons() * 2 + 1

    def loss():
        assert model.sample(4).isfinite().all()
        return model(x).mean()

    return model, loss


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 16), nn.PReLU(), nn.Linear(16, 4)) for _ in range(3))
        self.out = nn.Bilinear(4, 4, 2)

    def forward(self, x):
        for block in self.blocks:
            x = x + checkpoint(block, x + torch.zeros(len(x), 1), use_reentrant=False)
        return self.out(x, x)


@kind("checkpointing, PReLU, Bilinear", steps=20, lr=1e-2)
def checkpointed():
    model, x = Checkpointed(), torch.randn(24, 4)
    y = (x[:, 0] * x[:, 1] > 0).long()
    return model, lambda: F.cross_entropy(model(x), y)


class RoundSTE(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, bits):
        scale = x.abs().max() / (2 ** (bits - 1) - 1)
        return torch.round(x / scale) * scale

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Quantized(nn.Module):
    """Training for 6 bits with a straight-through estimator."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 24), nn.Linear(24, 2)

    def forward(self, x):
        h = F.relu(F.linear(x, RoundSTE.apply(self.one.weight, 6), self.one.bias))
        return F.linear(h, RoundSTE.apply(self.two.weight, 6), self.two.bias)


@kind("quantization, straight through", steps=15, lr=2e-2)
def quantized():
    model, x = Quantized(), torch.randn(48, 4)
    return model, lambda: F.mse_loss(model(x), x[:, :2] * 2 + 1)


class Curriculum(nn.Module):
    """A second branch, with a state of its own, comes in after ten passes: long after the first ones."""

    def __init__(self):
        super().__init__()
        self.inp, self.memory, self.out = nn.Linear(4, 16), nn.Linear(16, 16), nn.Linear(16, 2)
        self.passes = 0

    def forward(self, x):
        self.passes += 1
        h = F.relu(self.inp(x))
        if self.passes > 10:
            state = torch.zeros(len(x), 16)
            for _ in range(2):
                state = torch.tanh(self.memory(state) + h)
            h = h + state
        return self.out(h)


@kind("a branch that comes in later", steps=25, lr=1e-2, at_o2={"cast_ops": True})
def curriculum():
    model, x = Curriculum(), torch.randn(32, 4)

    def loss():
        before = model.passes
        error = F.mse_loss(model(x), x[:, :2].sin() + 1)
        assert model.passes == before + 1
        return error

    return model, loss
