"""What people have reported of models for images and points; see ``reported.py``."""

from __future__ import annotations

import torch
from torch import nn

from .generative import mlp
from .kinds import kind
from .vision import classifies, pictures


class PointNet(nn.Module):
    """Groups of nearest neighbours, as in PointNet++ and DGCNN."""

    def __init__(self, k=4):
        super().__init__()
        self.k, self.edge, self.fc = k, mlp(6, 16, 16), nn.Linear(16, 2)

    def forward(self, x):
        inner = -2 * torch.matmul(x, x.transpose(2, 1))
        xx = torch.sum(x**2, dim=2, keepdim=True)
        idx = (-xx - inner - xx.transpose(2, 1)).topk(k=self.k, dim=-1)[1]
        n, points, _ = x.shape
        idx = (idx + torch.arange(n).view(-1, 1, 1) * points).view(-1)
        near = x.reshape(n * points, -1)[idx].view(n, points, self.k, 3)
        centre = x[:, :, None].expand_as(near)
        return self.fc(self.edge(torch.cat((near - centre, centre), dim=3)).amax(2).amax(1))


@classifies("Swin", steps=20, lr=1e-2)
class Swin(nn.Module):
    """Shifted windows: a mask of -100, a table of relative positions, and the depth dropped by a random mask."""

    def __init__(self, dim=16, window=2):
        super().__init__()
        self.window, self.embed, self.norm = window, nn.Conv2d(3, dim, 2, 2), nn.LayerNorm(dim)
        self.qkv, self.proj, self.head = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim), nn.Linear(dim, 4)
        self.table = nn.Parameter(torch.zeros((2 * window - 1) ** 2, 2))
        c = torch.stack(torch.meshgrid(torch.arange(window), torch.arange(window), indexing="ij")).flatten(1)
        relative = (c[:, :, None] - c[:, None]).permute(1, 2, 0) + window - 1
        self.register_buffer("index", relative[..., 0] * (2 * window - 1) + relative[..., 1])
        regions = torch.zeros(1, 4, 4, 1)
        for i, h in enumerate((slice(0, -2), slice(-2, -1), slice(-1, None))):
            for j, w in enumerate((slice(0, -2), slice(-2, -1), slice(-1, None))):
                regions[:, h, w] = 3 * i + j
        regions = self.windows(regions).squeeze(-1)
        mask = regions[:, None] - regions[:, :, None]
        self.register_buffer("mask", mask.masked_fill(mask != 0, -100.0).masked_fill(mask == 0, 0.0))

    def windows(self, x):
        n, h, w, c, s = *x.shape, self.window
        return x.view(n, h // s, s, w // s, s, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, s * s, c)

    def forward(self, x, drop=0.1):
        x = self.embed(x).permute(0, 2, 3, 1)
        y = self.windows(self.norm(x).roll((-1, -1), (1, 2)))
        q, k, v = self.qkv(y).view(*y.shape[:2], 3, 2, -1).permute(2, 0, 3, 1, 4)
        attn = q * q.size(-1) ** -0.5 @ k.transpose(-2, -1) + self.table[self.index].permute(2, 0, 1)[None]
        attn = attn.view(len(x), -1, 2, *attn.shape[-2:]) + self.mask[None, :, None]
        y = (attn.view(len(q), 2, *attn.shape[-2:]).softmax(-1) @ v).transpose(1, 2).flatten(2)
        y = self.proj(y).view(len(x), 2, 2, 2, 2, -1).permute(0, 1, 3, 2, 4, 5).reshape(x.shape).roll((1, 1), (1, 2))
        keep = x.new_empty(len(x), 1, 1, 1).bernoulli_(1 - drop)
        return self.head((x + y * keep / (1 - drop)).mean((1, 2)) + self.norm(y).amax((1, 2)))


@kind("Barlow Twins", steps=15, lr=3e-3)
def barlow_twins():
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8))
    bn = nn.BatchNorm1d(8, affine=False)
    x, _ = pictures()
    one, two = x + 0.3 * torch.randn_like(x), x + 0.3 * torch.randn_like(x)

    def loss():
        c = bn(model(one)).T @ bn(model(two))
        c.div_(16)
        on_diag = torch.diagonal(c).add_(-1).pow_(2).sum()
        off_diag = c.flatten()[:-1].view(7, 9)[:, 1:].flatten().pow_(2).sum()
        return on_diag + 0.1 * off_diag

    return model, loss


class Pose(nn.Module):
    """Kabsch's rotation between predicted points and their targets, by SVD inside of the model."""

    def __init__(self):
        super().__init__()
        self.net = mlp(3, 24, 3, activation=nn.Tanh)

    def forward(self, x, target):
        points = self.net(x) + x
        h = (points - points.mean(0)).T @ (target - target.mean(0))
        u, _, v = torch.linalg.svd(h)
        d = torch.sign(torch.det(v.T @ u.T))
        rotation = v.T @ torch.diag(torch.stack([torch.ones(()), torch.ones(()), d])) @ u.T
        aligned = (points - points.mean(0)) @ rotation.T.detach()
        return (aligned - target + target.mean(0)).pow(2).sum(1).mean()


@kind("rotation by SVD", steps=20, lr=1e-2)
def pose():
    model, x = Pose(), torch.randn(24, 3)
    target = x.roll(1, 1) * torch.tensor([1.5, 0.7, 1.0]) + 2
    return model, lambda: model(x, target)
