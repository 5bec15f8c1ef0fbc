"""Decisions, models of models, and regression."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import distributions, nn
from torch.func import functional_call

from .generative import mlp
from .kinds import kind


class ActorCritic(nn.Module):
    """Discrete actions and continuous ones; ``evaluate`` is a method beside ``forward``, as in most PPO programs."""

    def __init__(self):
        super().__init__()
        self.body, self.pi, self.mu, self.v = mlp(4, 32, 32, activation=nn.Tanh), *(nn.Linear(32, n) for n in (3, 2, 1))
        self.log_std = nn.Parameter(torch.zeros(2))

    def forward(self, x):
        h = torch.tanh(self.body(x))
        discrete = distributions.Categorical(logits=self.pi(h))
        continuous = distributions.Normal(self.mu(h), self.log_std.exp())
        return discrete, continuous, self.v(h).squeeze(-1)

    def act(self, x):
        discrete, continuous, value = self(x)
        a, u = discrete.sample(), continuous.sample()
        return a, u, discrete.log_prob(a) + continuous.log_prob(u).sum(-1), value

    def evaluate(self, x, a, u):
        discrete, continuous, value = self(x)
        entropy = discrete.entropy() + continuous.entropy().sum(-1)
        return discrete.log_prob(a) + continuous.log_prob(u).sum(-1), entropy, value


@kind("PPO", steps=20, lr=1e-2)
def ppo():
    model = ActorCritic()
    x = torch.randn(64, 4)
    a, u = torch.randint(3, (64,)), torch.randn(64, 2)
    reward = (a == x[:, :3].argmax(1)).float() - 0.5 * (u - x[:, :2]).pow(2).mean(1)
    old = torch.full((64,), -1.1 - 2 * 0.92) - u.pow(2).sum(1) / 2
    advantage = (reward - reward.mean()) / (reward.std() + 1e-8)

    def loss():
        with torch.no_grad():
            assert model.act(x)[2].isfinite().all()
        log_prob, entropy, value = model.evaluate(x, a, u)
        ratio = (log_prob - old).exp()
        clipped = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        return 0.5 * F.mse_loss(value, reward) - clipped.mean() - 0.001 * entropy.mean()

    return model, loss


class SoftActor(nn.Module):
    """SAC: a squashed Gaussian with rsample in ``forward``, and Beta and Gamma distributions, which need fp32."""

    def __init__(self):
        super().__init__()
        self.net, self.beta = mlp(4, 16, 4), mlp(4, 16, 2)

    def forward(self, x):
        mu, log_std = self.net(x).chunk(2, -1)
        dist = distributions.Normal(mu, log_std.clamp(-5, 2).exp())
        u = dist.rsample()
        log_prob = (dist.log_prob(u) - 2 * (math.log(2) - u - F.softplus(-2 * u))).sum(-1)
        a, b = F.softplus(self.beta(x)).add(1).unbind(-1)
        return torch.tanh(u), log_prob, distributions.Beta(a, b).rsample()


@kind("SAC with Beta", steps=30, lr=2e-2, noise=True)
def sac():
    model, x = SoftActor(), torch.randn(256, 4)

    def loss():
        action, log_prob, share = model(x)
        return (
            (action - 0.5 * x[:, :2].tanh()).pow(2).sum(1).mean()
            + 0.05 * log_prob.mean()
            + 2 * (share - torch.sigmoid(x[:, 0])).pow(2).mean()
        )

    return model, loss


@kind("MAML", steps=15, lr=1e-2)
def maml():
    model = mlp(1, 16, 16, 1, activation=nn.Tanh)
    x = torch.linspace(-2, 2, 12)[:, None]
    tasks = [(amplitude * torch.sin(x + phase)) for amplitude, phase in ((1.0, 0.0), (0.5, 0.5), (1.5, 0.2))]

    def loss():
        total = 0.0
        for y in tasks:
            weights = dict(model.named_parameters())
            for _ in range(2):
                inner = F.mse_loss(functional_call(model, weights, (x[::2],)), y[::2])
                grads = torch.autograd.grad(inner, weights.values(), create_graph=True)
                weights = {k: w - 0.05 * g for (k, w), g in zip(weights.items(), grads, strict=True)}
            total = total + F.mse_loss(functional_call(model, weights, (x[1::2],)), y[1::2])
        return total / len(tasks)

    return model, loss


@kind("per-sample gradients", steps=20, lr=2e-2)
def per_sample_gradients():
    """DP-SGD by vmap of grad, added to the loss as a penalty of their norms would be."""
    model = mlp(4, 16, 1, activation=nn.Tanh)
    x = torch.randn(16, 4)
    y = x[:, :1].sin() + 1

    def loss_of(weights, xi, yi):
        return F.mse_loss(functional_call(model, weights, (xi[None],)), yi[None])

    def loss():
        weights = {k: p.detach() for k, p in model.named_parameters()}
        grads = torch.func.vmap(torch.func.grad(loss_of), (None, 0, 0))(weights, x, y)
        norms = torch.stack([g.float().flatten(1).norm(dim=1) for g in grads.values()]).norm(dim=0)
        share = (1 / norms).clamp(max=1.0)
        return (share * (model(x) - y).pow(2).squeeze(1)).mean()

    return model, loss


class SpectralConv1d(nn.Module):
    """A Fourier neural operator's layer: complex weights on the lowest modes."""

    def __init__(self, width, modes):
        super().__init__()
        self.modes = modes
        self.weights1 = nn.Parameter(torch.rand(width, width, modes, dtype=torch.cfloat) / width**2)

    def forward(self, x):
        x_ft = torch.fft.rfft(x)
        out_ft = torch.zeros(x.shape[0], x.shape[1], x.size(-1) // 2 + 1, dtype=torch.cfloat)
        out_ft[:, :, : self.modes] = torch.einsum("bix,iox->box", x_ft[:, :, : self.modes], self.weights1)
        return torch.fft.irfft(out_ft, n=x.size(-1))


class FNO(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.lift, self.conv, self.w = nn.Linear(2, width), SpectralConv1d(width, 5), nn.Conv1d(width, width, 1)
        self.out = nn.Linear(width, 1)

    def forward(self, x):
        grid = torch.linspace(0, 1, x.size(1)).reshape(1, -1, 1).repeat(x.size(0), 1, 1)
        x = self.lift(torch.cat((x, grid), dim=-1)).permute(0, 2, 1)
        return self.out(F.gelu(self.conv(x) + self.w(x)).permute(0, 2, 1))


@kind("Fourier neural operator", steps=25, lr=2e-2)
def fno():
    model = FNO()
    t = torch.linspace(0, 2 * math.pi, 16)
    x = torch.stack([torch.sin(t + p) for p in torch.linspace(0, 3, 8)])[..., None]
    return model, lambda: F.mse_loss(model(x), x.roll(4, 1))


class BayesLinear(nn.Module):
    def __init__(self, inp, out):
        super().__init__()
        self.mu, self.rho = nn.Parameter(torch.randn(out, inp) * 0.3), nn.Parameter(torch.full((out, inp), -4.0))
        self.bias = nn.Parameter(torch.zeros(out))

    def forward(self, x):
        sigma = torch.log1p(torch.exp(self.rho))
        weight = self.mu + sigma * torch.randn(self.mu.shape)
        self.kl = (
            distributions.Normal(0, 1).log_prob(weight) - distributions.Normal(self.mu, sigma).log_prob(weight)
        ).sum()
        return F.linear(x, weight, self.bias)


class BayesByBackprop(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = BayesLinear(2, 16), BayesLinear(16, 1)

    def forward(self, x, y):
        out = self.two(F.relu(self.one(x)))
        return F.mse_loss(out, y) - 1e-4 * (self.one.kl + self.two.kl)


@kind("Bayes by backprop", steps=30, lr=1e-2, noise=True)
def bayes():
    model, x = BayesByBackprop(), torch.randn(64, 2)
    return model, lambda: model(x, x.prod(1, keepdim=True) + 2)
