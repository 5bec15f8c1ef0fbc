"""Images: classifiers, detectors and losses that compare pictures."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

from .kinds import kind


def pictures(n=16, size=8, classes=4, channels=3):
    """Noise with a bright patch at one of four places, which is the class."""
    y = torch.arange(n) % classes
    x = torch.randn(n, channels, size, size) * 0.3
    half = size // 2
    for i, c in enumerate(y):
        x[i, :, (c // 2) * half : (c // 2 + 1) * half, (c % 2) * half : (c % 2 + 1) * half] += 1.0
    return x, y


def classifies(name, **options):
    """A kind of model that classifies pictures: a decorator of what makes it."""

    def add(make_model):
        @kind(name, **options)
        def make():
            model, (x, y) = make_model(), pictures()
            return model, lambda: F.cross_entropy(model(x), y)

        return make_model

    return add


class SELayer(nn.Module):
    def __init__(self, channel, reduction=4):
        super().__init__()
        self.avg_pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Sequential(
            nn.Linear(channel, channel // reduction, bias=False),
            nn.ReLU(inplace=True),
            nn.Linear(channel // reduction, channel, bias=False),
            nn.Sigmoid(),
        )

    def forward(self, x):
        b, c, _, _ = x.size()
        y = self.avg_pool(x).view(b, c)
        y = self.fc(y).view(b, c, 1, 1)
        return x * y.expand_as(x)


@classifies("CNN with squeeze-excitation", steps=20, lr=5e-3)
class SENet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(8)
        self.se = SELayer(8)
        self.fc = nn.Linear(8 * 4, 4)

    def forward(self, x):
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.relu(self.se(self.bn2(self.conv2(x))) + x)
        return self.fc(F.adaptive_avg_pool2d(x, 2).flatten(1))


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down1 = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.down2 = nn.Sequential(nn.Conv2d(8, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU())
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.out = nn.Conv2d(16, 1, 1)

    def forward(self, x):
        skip = self.down1(x)
        x = self.down2(F.max_pool2d(skip, 2))
        x = torch.cat([self.up(x), skip], dim=1)
        return self.out(x) + F.interpolate(self.out(x)[:, :, ::2, ::2], scale_factor=2, mode="bilinear")


def dice_loss(inputs, targets):
    inputs = inputs.sigmoid().flatten(1)
    targets = targets.flatten(1)
    numerator = 2 * (inputs * targets).sum(1)
    denominator = inputs.sum(-1) + targets.sum(-1)
    return (1 - (numerator + 1) / (denominator + 1)).mean()


@kind("U-Net", steps=25)
def unet():
    model = UNet()
    x, _ = pictures(8)
    mask = (x.mean(1, keepdim=True) > 0.5).float()
    return model, lambda: F.binary_cross_entropy_with_logits(model(x), mask) + dice_loss(model(x), mask)


def box_iou(boxes1, boxes2):
    area1 = (boxes1[:, 2] - boxes1[:, 0]) * (boxes1[:, 3] - boxes1[:, 1])
    area2 = (boxes2[:, 2] - boxes2[:, 0]) * (boxes2[:, 3] - boxes2[:, 1])
    lt = torch.max(boxes1[:, None, :2], boxes2[:, :2])
    rb = torch.min(boxes1[:, None, 2:], boxes2[:, 2:])
    wh = (rb - lt).clamp(min=0)
    inter = wh[:, :, 0] * wh[:, :, 1]
    return inter / (area1[:, None] + area2 - inter)


class Detector(nn.Module):
    """One box for each cell of a grid, with anchors, matching and losses inside of the model as in torchvision."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 16, 3, 2, 1), nn.ReLU())
        self.cls_logits = nn.Conv2d(16, 1, 1)
        self.bbox_pred = nn.Conv2d(16, 4, 1)

    def anchors(self, features):
        h, w = features.shape[-2:]
        ys, xs = torch.meshgrid(torch.arange(h) + 0.5, torch.arange(w) + 0.5, indexing="ij")
        centers = torch.stack([xs, ys], -1).reshape(-1, 2) * 4.0
        return torch.cat([centers - 3.0, centers + 3.0], 1)

    def forward(self, images, targets):
        features = self.body(images)
        anchors = self.anchors(features)
        logits = self.cls_logits(features).flatten(1)
        deltas = self.bbox_pred(features).flatten(2).transpose(1, 2)
        loss = logits.new_zeros(())
        for i, gt in enumerate(targets):
            iou = box_iou(anchors, gt[None])[:, 0]
            positive = iou > 0.2
            positive[iou.argmax()] = True
            labels = torch.zeros_like(logits[i])
            labels[positive] = iou[positive]
            boxes = anchors.clone()
            boxes[positive] = (anchors + deltas[i] * 4)[positive]
            loss = loss + F.binary_cross_entropy_with_logits(logits[i], labels)
            loss = loss + F.smooth_l1_loss(boxes[positive], gt.expand(int(positive.sum()), 4), beta=1.0)
        keep = logits.sigmoid().max(1).values > 0.5
        return loss / len(targets), self.nms(anchors, logits[0].detach()), keep

    def nms(self, boxes, scores):
        order = scores.argsort(descending=True)
        iou = box_iou(boxes, boxes)[order][:, order]
        return order[(iou.triu(1) > 0.5).sum(0) == 0]


@kind("detection", steps=15, lr=5e-3)
def detection():
    model = Detector()
    x = torch.randn(4, 3, 16, 16) * 0.1
    targets = torch.tensor([[1.0, 1, 8, 8], [6.0, 5, 15, 14], [2.0, 7, 9, 15], [0.0, 0, 12, 12]])
    for image, (x0, y0, x1, y1) in zip(x, targets.int().tolist(), strict=True):
        image[:, y0:y1, x0:x1] += 1.0
    return model, lambda: model(x, targets)[0]


@classifies("spatial transformer", steps=15, lr=2e-3)
class STN(nn.Module):
    def __init__(self):
        super().__init__()
        self.localization = nn.Sequential(nn.Flatten(), nn.Linear(192, 16), nn.ReLU(), nn.Linear(16, 6))
        self.localization[3].weight.data.zero_()
        self.localization[3].bias.data.copy_(torch.tensor([1, 0, 0, 0, 1, 0], dtype=torch.float))
        self.fc = nn.Linear(192, 4)

    def forward(self, x):
        theta = self.localization(x).view(-1, 2, 3)
        return self.fc(
            F.grid_sample(x, F.affine_grid(theta, x.size(), align_corners=False), align_corners=False).flatten(1)
        )


@kind("spectral norm", steps=8, lr=4e-3)
def spectral_norm():
    model = nn.Sequential(
        parametrizations.spectral_norm(nn.Conv2d(3, 8, 3, 2, 1)),
        nn.LeakyReLU(0.2),
        nn.Flatten(),
        parametrizations.spectral_norm(nn.Linear(128, 4)),
    )
    x, y = pictures()
    return model, lambda: F.cross_entropy(4 * model(x), y)


@classifies("weight norm", steps=20, lr=5e-3)
def weight_norm():
    return nn.Sequential(
        parametrizations.weight_norm(nn.Conv2d(3, 8, 3, 2, 1)),
        nn.GELU(),
        nn.Flatten(),
        parametrizations.weight_norm(nn.Linear(128, 4), dim=None),
    )


@classifies("orthogonal weights", steps=15, lr=6e-3)
def orthogonal():
    return nn.Sequential(
        nn.Conv2d(3, 4, 4, 4),
        nn.Flatten(),
        parametrizations.orthogonal(nn.Linear(16, 16), orthogonal_map="matrix_exp"),
        nn.ReLU(),
        parametrizations.orthogonal(nn.Linear(16, 16), orthogonal_map="cayley"),
        nn.Linear(16, 4),
    )
