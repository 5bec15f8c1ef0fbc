# ruff: noqa
import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
from apex import amp
from torch.autograd import Variable

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
args = parser.parse_args()

torch.manual_seed(0)
x = torch.randn(512, 20)
y = (x[:, :2].prod(1) > 0).long()

model = nn.Sequential(nn.Linear(20, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 2)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model, optimizer = amp.initialize(model, optimizer, opt_level="O2", loss_scale="dynamic")
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2)

for epoch in range(args.epochs):
    total = 0.0
    for i in range(0, 512, 64):
        data, target = Variable(x[i : i + 64].cuda()), Variable(y[i : i + 64].cuda())
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data), target)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        total += loss.item()
    scheduler.step()
    print("epoch %d: loss %.3f" % (epoch, total / 8))
