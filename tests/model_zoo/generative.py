"""Models of distributions: diffusion, adversaries, variational models, flows, fields."""

from __future__ import annotations

import itertools
import math

import torch
import torch.nn.functional as F
from torch import distributions, nn

from .kinds import kind


def moons(n=64):
    t = torch.rand(n) * math.pi
    upper = (torch.arange(n) % 2).float()
    x = torch.stack([torch.cos(t) + upper, torch.sin(t) * (1 - 2 * upper) + 0.5 * upper], 1)
    return x + 0.05 * torch.randn(n, 2)


def timestep_embedding(timesteps, dim, max_period=10000):
    half = dim // 2
    freqs = torch.exp(-math.log(max_period) * torch.arange(0, half, dtype=torch.float32) / half)
    args = timesteps[:, None].float() * freqs[None]
    return torch.cat([torch.cos(args), torch.sin(args)], dim=-1)


class Denoiser(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.dim = dim
        self.time_embed = nn.Sequential(nn.Linear(dim, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.inp, self.mid, self.out = nn.Linear(2, dim), nn.Linear(dim, dim), nn.Linear(dim, 2)

    def forward(self, x, timesteps):
        emb = self.time_embed(timestep_embedding(timesteps, self.dim))
        h = F.silu(self.inp(x) + emb)
        return self.out(F.silu(self.mid(h) + emb))


def diffusion_loss(model, times):
    betas = torch.linspace(1e-4, 0.02, 1000)
    alphas_cumprod = torch.cumprod(1.0 - betas, dim=0)
    x0, t, noise = moons(128), torch.arange(128) * 999 // 127, torch.randn(128, 2)
    a = alphas_cumprod[t][:, None]
    x = a.sqrt() * x0 + (1 - a).sqrt() * noise
    return lambda: F.mse_loss(model(x, times(t)), noise)


@kind("diffusion, time steps 0 to 999", steps=25)
def diffusion():
    model = Denoiser()
    return model, diffusion_loss(model, lambda t: t)


class LearnedTimes(nn.Module):
    """Time by a learned sensitive function: steps that differ by one must stay different."""

    def __init__(self):
        super().__init__()
        self.register_buffer("freqs", 2 * math.pi * torch.arange(1, 5).float() / 16)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 1))

    def forward(self, t):
        x = t[:, None] * self.freqs
        return self.net(torch.cat([x.sin(), x.cos()], 1))


@kind("Fourier features of integers", steps=30, lr=2e-2)
def fourier_of_integers():
    model = LearnedTimes()
    t = torch.arange(936, 1000).float()
    y = torch.sin(t * 2 * math.pi / 8)[:, None]
    return model, lambda: F.mse_loss(model(t), y)


def mlp(*sizes, activation=nn.ReLU):
    layers = []
    for a, b in itertools.pairwise(sizes):
        layers += [nn.Linear(a, b), activation()]
    return nn.Sequential(*layers[:-1])


@kind("GAN, two optimizers", steps=25, lr=5e-3)
def gan():
    generator = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2), nn.Tanh())
    discriminator = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
    criterion = nn.BCEWithLogitsLoss()
    real, z = moons(32) * 0.2 + 0.5, torch.randn(32, 4)
    ones, zeros = torch.ones(32, 1), torch.zeros(32, 1)

    def d_loss():
        return criterion(discriminator(real), ones) + criterion(discriminator(generator(z).detach()), zeros)

    def g_loss():
        return (
            0.2 * criterion(discriminator(generator(z)), ones) + 4 * (generator(z).mean(0) - real.mean(0)).pow(2).sum()
        )

    return [discriminator, generator], [d_loss, g_loss]


class VAE(nn.Module):
    """PyTorch's example."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc21, self.fc22 = nn.Linear(36, 24), nn.Linear(24, 4), nn.Linear(24, 4)
        self.fc3, self.fc4 = nn.Linear(4, 24), nn.Linear(24, 36)

    def reparameterize(self, mu, logvar):
        std = torch.exp(0.5 * logvar)
        eps = torch.randn_like(std)
        return mu + eps * std

    def forward(self, x):
        h1 = F.relu(self.fc1(x.view(-1, 36)))
        mu, logvar = self.fc21(h1), self.fc22(h1)
        z = self.reparameterize(mu, logvar)
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z)))), mu, logvar


def bars(n=64):
    x = torch.zeros(n, 6, 6)
    for i in range(n):
        x[i, i % 4] = 1.0
        x[i, :, i % 2] = 1.0
    return x


@kind("VAE", steps=40, lr=3e-2, noise=True)
def vae():
    model, x = VAE(), bars()

    def loss_function():
        recon_x, mu, logvar = model(x)
        bce = F.binary_cross_entropy(recon_x, x.view(-1, 36), reduction="sum")
        kld = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
        return (bce + kld) / len(x)

    return model, loss_function


class VectorQuantizer(nn.Module):
    def __init__(self, n=8, dim=4):
        super().__init__()
        self.embedding = nn.Embedding(n, dim)
        self.embedding.weight.data.uniform_(-0.5, 0.5)
        self.encoder, self.decoder = mlp(36, 24, dim), mlp(dim, 24, 36)

    def forward(self, x):
        z = self.encoder(x.view(-1, 36))
        d = z.pow(2).sum(1, keepdim=True) + self.embedding.weight.pow(2).sum(1) - 2 * z @ self.embedding.weight.t()
        index = torch.argmin(d, dim=1).unsqueeze(1)
        encodings = torch.zeros(index.shape[0], 8)
        encodings.scatter_(1, index, 1)
        quantized = torch.matmul(encodings, self.embedding.weight).view(z.shape)
        loss = F.mse_loss(quantized, z.detach()) + 0.25 * F.mse_loss(quantized.detach(), z)
        quantized = z + (quantized - z).detach()
        perplexity = torch.exp(-torch.sum(encodings.mean(0) * torch.log(encodings.mean(0) + 1e-10)))
        return self.decoder(quantized), loss, perplexity


@kind("VQ-VAE", steps=25, lr=1e-2)
def vq_vae():
    model, x = VectorQuantizer(), bars(12)

    def loss():
        recon, vq_loss, _ = model(x)
        return F.mse_loss(recon, x.view(-1, 36)) + 0.1 * vq_loss

    return model, loss


class RealNVP(nn.Module):
    """A flow that is trained by its method ``log_prob``, which most programs call on the model itself."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.0, 1.0]]))
        self.prior = distributions.MultivariateNormal(torch.zeros(2), torch.eye(2))
        self.s = nn.ModuleList(nn.Sequential(mlp(2, 16, 2, activation=nn.LeakyReLU), nn.Tanh()) for _ in range(3))
        self.t = nn.ModuleList(mlp(2, 16, 2, activation=nn.LeakyReLU) for _ in range(3))

    def f(self, x):
        log_det_J, z = x.new_zeros(x.shape[0]), x
        for i in reversed(range(3)):
            z_ = self.mask[i] * z
            s, t = self.s[i](z_) * (1 - self.mask[i]), self.t[i](z_) * (1 - self.mask[i])
            z = (1 - self.mask[i]) * (z - t) * torch.exp(-s) + z_
            log_det_J -= s.sum(dim=1)
        return z, log_det_J

    def log_prob(self, x):
        z, logp = self.f(x)
        return self.prior.log_prob(z) + logp

    def forward(self, x):
        return self.f(x)


@kind("RealNVP by log_prob", steps=20, lr=2e-2)
def real_nvp():
    model, x = RealNVP(), moons() * 2 + 1
    return model, lambda: -model.log_prob(x).mean()
