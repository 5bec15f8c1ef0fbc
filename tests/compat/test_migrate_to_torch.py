"""``halfstep migrate --to torch``: scripts as people write them, rewritten, run, and equal to halfstep's losses."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from click.testing import CliRunner
from torch import nn

from halfstep.cli.migrate import command, migrate, migrate_to_torch

ONE_FUNCTION = '''\
import torch.nn.functional as F
import torch.nn as nn

def train(args, model, data):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if args.fp16:
        try:
            from apex import amp
        except ImportError:
            raise ImportError("Please install it")
        model, optimizer = amp.initialize(model, optimizer, opt_level=args.level)
    losses = []
    for step, (x, y) in enumerate(data):
        out = model(x)
        loss = F.cross_entropy(out, y)  # of one batch
        if args.accumulate > 1:
            loss = loss / args.accumulate
        text = """as
it is"""
        if args.fp16:
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
        else:
            loss.backward()
        losses.append(loss.item())
        if (step + 1) % args.accumulate == 0:
            if args.fp16:
                torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.1)
            else:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            model.zero_grad()
    assert text == "as\\nit is"
    return losses
'''.replace("import torch.nn.functional", "import torch\nimport torch.nn.functional")

TWO_FUNCTIONS = """\
import torch.nn as nn
try:
    from apex import amp
    from apex.normalization import FusedLayerNorm
    from apex.optimizers import FusedSGD
except ImportError:
    amp = None

def train(args, model, data):
    assert amp is not None
    net = nn.Sequential(*model, FusedLayerNorm(4))
    optimizer = FusedSGD(net.parameters(), lr=0.1, momentum=0.5)
    if args.level != "O0":
        net, optimizer = amp.initialize(net, optimizer, opt_level=args.level)
    losses = epoch(args, net, nn.CrossEntropyLoss(), data, optimizer)
    if args.level != "O0":
        state = amp.state_dict()
    return losses

def epoch(args, net, criterion, data, optimizer):
    losses = []
    for x, y in data:
        loss = criterion(net(x), y)
        net.zero_grad()
        if args.level != "O0":
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            norm = nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.1)
        else:
            loss.backward()
            norm = nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        optimizer.step()
        losses.append(loss.item())
    return losses
"""


SHAPES = {
    "step after an inner loop": {
        "main": """
import torch.nn as nn
import torch
from apex import amp

def train(args, model, data):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if args.fp16:
        model, optimizer = amp.initialize(model, optimizer, opt_level=args.level)
    losses = []
    for x, y in data:
        optimizer.zero_grad()
        for part in range(args.accumulate):
            loss = nn.functional.cross_entropy(model(x[part :: args.accumulate]), y[part :: args.accumulate])
            if args.fp16:
                with amp.scale_loss(loss, optimizer) as scaled_loss:
                    scaled_loss.backward()
            else:
                loss.backward()
        # all of them
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        losses.append(loss.item())
    return losses
"""
    },
    "step in another method": {
        "main": """
import torch
from torch import nn
from apex import amp

def train(args, model, data):
    return Trainer(args, model).train(data)

class Trainer:
    def __init__(self, args, model):
        self.args, self.model = args, model

    def train(self, data):
        model, optimizer = self.model, torch.optim.SGD(self.model.parameters(), lr=0.1)
        if self.args.fp16:
            model, optimizer = amp.initialize(model, optimizer, opt_level=self.args.level)
        losses = []
        for step, batch in enumerate(data):
            losses += [self.backward(model, batch, optimizer)]
            if (step + 1) % self.args.accumulate == 0:
                if self.args.fp16:
                    nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.1)
                else:
                    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                if step < 0:
                    raise ValueError(step)
                else:
                    optimizer.step()
                model.zero_grad()
        return losses

    def backward(self, model, batch, optimizer):
        loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
        loss = loss / self.args.accumulate
        if self.args.fp16:
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
        else:
            loss.backward()
        return loss.item()
"""
    },
    "a helper with its first argument given": {
        "main": """
import torch
from functools import partial
from torch.nn.functional import cross_entropy
try:
    from apex import amp
    AVAILABLE = True
except:
    AVAILABLE = False

def loss_backwards(fp16, loss, optimizer, **kwargs):
    if fp16:
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward(**kwargs)
    else:
        loss.backward(**kwargs)

class Trainer:
    def __init__(self, args, net, ema):
        assert AVAILABLE
        self.args, self.net, self.ema = args, net, ema
        self.opt = torch.optim.SGD(net.parameters(), lr=0.1)
        if args.fp16:
            (self.net, self.ema), self.opt = amp.initialize([self.net, self.ema], self.opt, opt_level=args.level)

    def train(self, data):
        backwards = partial(loss_backwards, self.args.fp16)
        losses = []
        for x, y in data:
            for i in range(self.args.accumulate):
                loss = cross_entropy(self.net(x), y)
                losses.append(loss.item())
                backwards(loss / self.args.accumulate, self.opt)
            self.opt.step()
            self.opt.zero_grad()
        return losses

def train(args, model, data):
    return Trainer(args, model, torch.nn.Linear(2, 2)).train(data)
"""
    },
    "start, model, pass and step in four files": {
        "setup": """
import torch

class OptimizerScheduler:
    def __init__(self, optimizer):
        self.optimizer = optimizer

    def step(self):
        self.optimizer.step()

def to_fp16(model, optimizer, level):
    from apex import amp
    model, optimizer = amp.initialize(model, optimizer, opt_level=level)
    return model, optimizer

def set_up(model, optimizer, args):
    if args.fp16:
        model, optimizer = to_fp16(model=model, optimizer=optimizer, level=args.level)
    return model, optimizer
""",
        "backward": """
from torch.nn.utils import clip_grad_norm_

def complex_backward(loss, optimizer, model, args):
    if args.accumulate > 1:
        loss = loss / args.accumulate
    if args.fp16:
        from apex import amp
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        if args.accumulate == 1:
            clip_grad_norm_(amp.master_params(optimizer), 0.1)
    else:
        loss.backward()
        if args.accumulate == 1:
            clip_grad_norm_(model.parameters(), 0.1)
    return loss
""",
        "runner": """
import backward
from torch.nn.functional import cross_entropy

class Runner:
    def __init__(self, my_model, optimizer_scheduler, args):
        self.my_model, self.optimizer_scheduler, self.args = my_model, optimizer_scheduler, args

    def step(self, x, y):
        loss = 0
        for i in range(self.args.accumulate):
            out = self.my_model(x)
            loss = cross_entropy(out, y)
            loss = self.backward(loss=loss)
        self.optimizer_scheduler.step()
        self.optimizer_scheduler.optimizer.zero_grad()
        return loss.item()

    def backward(self, loss):
        return backward.complex_backward(
            loss=loss, optimizer=self.optimizer_scheduler.optimizer, model=self.my_model, args=self.args
        )
""",
        "main": """
import torch
from runner import Runner
from setup import OptimizerScheduler, set_up

def train(args, model, data):
    model, optimizer = set_up(model, torch.optim.SGD(model.parameters(), lr=0.1), args)
    runner = Runner(model, OptimizerScheduler(optimizer), args)
    return [runner.step(x, y) for x, y in data]
""",
    },
    "amp is asked for in the other order, and started once": {
        "main": """
import torch
from torch.nn.functional import cross_entropy
try:
    from apex import amp
except ImportError:
    amp = None

class Trainer:
    def __init__(self, args, network):
        self.args, self.network, self.started = args, network, False
        self.optimizer = torch.optim.SGD(network.parameters(), lr=0.1)

    def start(self):
        if self.args.fp16:
            if not self.started:
                if amp is not None:
                    self.network, self.optimizer = amp.initialize(
                        self.network, self.optimizer, opt_level=self.args.level
                    )
                    self.started = True

    def run_iteration(self, x, y):
        self.optimizer.zero_grad()
        loss = cross_entropy(self.network(x), y)
        if not self.args.fp16 or amp is None:
            loss.backward()
        else:
            with amp.scale_loss(loss, self.optimizer) as scaled_loss:
                scaled_loss.backward()
        _ = torch.nn.utils.clip_grad_norm_(self.network.parameters(), 0.1)
        self.optimizer.step()
        return loss.item()

def train(args, model, data):
    trainer = Trainer(args, model)
    trainer.start()
    trainer.start()
    return [trainer.run_iteration(x, y) for x, y in data]
"""
    },
    "models and optimizers in lists": {
        "main": """
import torch
from torch.nn.functional import cross_entropy

def train(args, model, data):
    models = [model, torch.nn.Linear(8, 4)]
    opts = [torch.optim.SGD(each.parameters(), lr=0.1) for each in models]
    if args.fp16:
        from apex import amp
        for i in range(2):
            net, optimizer = amp.initialize(models[i], opts[i], opt_level=args.level)
            models[i], opts[i] = net, optimizer
    losses = []
    for step, (x, y) in enumerate(data):
        net = models[step % 2]
        optimizer = opts[step % 2]
        loss = cross_entropy(net(x), y)
        if args.fp16:
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.1)
        else:
            loss.backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
"""
    },
    "a helper that returns the loss": {
        "main": """
import torch
from torch.nn.functional import cross_entropy
from apex import amp

def backward(loss, optimizer, fp16):
    if fp16:
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
    else:
        loss.backward()
    return loss.item()

def train(args, net, data):
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    if args.fp16:
        net, opt = amp.initialize(net, opt, opt_level=args.level)
    losses = []
    for x, y in data:
        opt.zero_grad()
        loss = cross_entropy(net(x), y)
        losses.append(backward(loss, opt, args.fp16))
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        opt.step()
    return losses
"""
    },
    "no scale_loss at all": {
        "main": """
import torch
from torch.nn.functional import cross_entropy
from apex import amp

def train_epoch(net, data, opt):
    losses = []
    for x, y in data:
        loss = cross_entropy(net(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    return losses

def train(args, model, data):
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    if args.fp16:
        model, opt = amp.initialize(model, opt, opt_level=args.level)
    return train_epoch(model, data, opt)
"""
    },
    "two optimizers and a dict of options": {
        "main": """
import torch
from torch.nn.functional import cross_entropy
from apex import amp

def train(args, model, data):
    options = {"opt_level": args.level if args.fp16 else "O0", "verbosity": 0}
    other = torch.nn.Linear(4, 4)
    one = torch.optim.SGD(model.parameters(), lr=0.1)
    two = torch.optim.SGD(other.parameters(), lr=0.1)
    [model, other], [one, two] = amp.initialize([model, other], [one, two], num_losses=2, **options)
    losses = []
    for x, y in data:
        one.zero_grad()
        loss = cross_entropy(model(x), y)
        with amp.scale_loss(loss, one, loss_id=0) as scaled_loss:
            scaled_loss.backward()
        one.step()
        losses.append(loss.item())
        two.zero_grad()
        with torch.no_grad():
            hidden = model(x)
        loss = cross_entropy(other(hidden), y)
        with amp.scale_loss(loss, two, loss_id=1) as scaled_loss:
            scaled_loss.backward()
        two.step()
        losses.append(loss.item())
    return losses
"""
    },
    "the model is called in a method that makes the loss": {
        "main": """
import torch
from torch.nn.functional import cross_entropy
from apex import amp

class Trainer:
    def __init__(self, args, model):
        self.args, self.model = args, model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if args.fp16:
            self.model, self.optimizer = amp.initialize(self.model, self.optimizer, opt_level=args.level)

    def compute_loss(self, batch):
        x, y = batch
        return cross_entropy(self.model(x), y)

    def training_step(self, batch):
        loss = self.compute_loss(batch)
        if self.args.fp16:
            with amp.scale_loss(loss, self.optimizer) as scaled_loss:
                scaled_loss.backward()
        else:
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

def train(args, model, data):
    trainer = Trainer(args, model)
    return [trainer.training_step(each) for each in data]
"""
    },
    "passes that wait for their import": {
        "main": """
import torch
from torch.nn.functional import cross_entropy

def train(args, model, data):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if args.fp16:
        from apex import amp
        model, optimizer = amp.initialize(model, optimizer, opt_level=args.level)
    losses = []
    for x, y in data:
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        if args.fp16:
            try:
                from apex import amp
                with amp.scale_loss(loss, optimizer) as scaled_loss:
                    scaled_loss.backward()
            except ImportError:
                loss.backward()
        else:
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
"""
    },
    "passes of two losses after both are computed": {
        "main": """
import torch
from torch.nn.functional import cross_entropy
from apex import amp

def train(args, model, data):
    other = torch.nn.Linear(8, 4)
    one = torch.optim.SGD(model.parameters(), lr=0.1)
    two = torch.optim.SGD(other.parameters(), lr=0.1)
    level = args.level if args.fp16 else "O0"
    [model, other], [one, two] = amp.initialize([model, other], [one, two], opt_level=level, num_losses=2)
    losses = []
    for x, y in data:
        first = cross_entropy(model(x), y)
        second = cross_entropy(other(x), y)
        one.zero_grad()
        two.zero_grad()
        with amp.scale_loss(first, one, loss_id=0) as scaled_loss:
            scaled_loss.backward()
        with amp.scale_loss(second, two, loss_id=1) as scaled_loss:
            scaled_loss.backward()
        one.step()
        two.step()
        losses += [first.item(), second.item()]
    return losses
"""
    },
    "a GradScaler that the script has, too": {
        "main": """
import torch
from torch.nn.functional import cross_entropy
from apex import amp

def train(args, model, data):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    native = args.level == "native"
    scaler = torch.amp.GradScaler("cpu", enabled=native)
    if args.fp16:
        model, optimizer = amp.initialize(model, optimizer, opt_level=args.level)
    losses = []
    for x, y in data:
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        if native:
            scaler.scale(loss).backward()
        elif args.fp16:
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
        else:
            loss.backward()
        if native:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        losses.append(loss.item())
    return losses
"""
    },
    "passes that overflow, and steps that cross": {
        "main": """
import torch
from torch.nn.functional import cross_entropy
from apex import amp

def train(args, model, data):
    other = torch.nn.Linear(8, 4)
    one = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    two = torch.optim.SGD(other.parameters(), lr=0.1)
    [model, other], [one, two] = amp.initialize(
        [model, other], [one, two], opt_level=args.level if args.fp16 else "O0"
    )
    schedule = torch.optim.lr_scheduler.ExponentialLR(one, 0.9)
    losses = []
    for step, (x, y) in enumerate(data):
        for part in range(args.accumulate):
            large = 2.0**20 if step in (2, 7) and part != 1 else 1.0
            first = cross_entropy(model(x), y)
            second = cross_entropy(other(x), y)
            with amp.scale_loss(first * large, one) as scaled_loss:
                scaled_loss.backward()
            with amp.scale_loss(second, two) as scaled_loss:
                scaled_loss.backward()
            losses += [first.item(), second.item()]
        torch.nn.utils.clip_grad_norm_(amp.master_params(one), 0.1)
        for optimizer in (one, two):
            optimizer.step()
            optimizer.zero_grad()
        schedule.step()
    return losses
"""
    },
    "a step by a function that nobody can find, and a loss beside": {
        "main": """
import torch
from torch.nn.functional import cross_entropy
from apex import amp

class Trainer:
    def __init__(self, args, model):
        self.args, self.model = args, model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if args.fp16:
            self.model, self.optimizer = amp.initialize(self.model, self.optimizer, opt_level=args.level)
        self.callbacks = {"step": self.optimizer.step, "end": [getattr(self.optimizer, "zero_grad")]}

    def pass_back(self, x, y):
        loss = cross_entropy(self.model(x), y)
        if self.args.fp16:
            with amp.scale_loss(loss, self.optimizer) as scaled_loss:
                scaled_loss.backward()
        else:
            loss.backward()
        penalty = self.model[0](x).square().mean()
        penalty.backward()
        return loss.item()

    def train(self, data):
        losses = []
        for step, (x, y) in enumerate(data):
            losses.append(self.pass_back(x, y))
            if (step + 1) % self.args.accumulate == 0:
                for call in (self.callbacks["step"], *self.callbacks["end"]):
                    call()
        return losses

def train(args, model, data):
    return Trainer(args, model).train(data)
"""
    },
    "a loss scale that is set and read": {
        "main": """
import torch
from torch.nn.functional import cross_entropy
from apex import amp
from apex.amp import _amp_state

def train(args, model, data):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if args.fp16:
        model, optimizer = amp.initialize(models=model, optimizers=optimizer, opt_level=args.level)
        amp._amp_state.loss_scalers[0]._loss_scale = 2**20
    losses = []
    for step, (x, y) in enumerate(data):
        loss = cross_entropy(model(x), y)
        if args.fp16:
            with amp.scale_loss(loss * 2.0**4, optimizer) as scaled_loss:
                scaled_loss.backward()
        else:
            (loss * 2.0**4).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        if (step + 1) % args.accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
        scale = _amp_state.loss_scalers[0].loss_scale() if args.fp16 and args.level == "O1" else 1.0
        losses += [loss.item(), scale]
    return losses
"""
    },
    "gradients that stay scaled but for the last pass": {
        "main": """
import torch
from torch.nn.functional import cross_entropy
from apex import amp

def train(args, model, data):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if args.fp16:
        model, optimizer = amp.initialize(model, optimizer, opt_level=args.level)
    losses = []
    for step, (x, y) in enumerate(data):
        last = (step + 1) % args.accumulate == 0
        loss = cross_entropy(model(x), y)
        if args.fp16:
            with amp.scale_loss(loss, optimizer, delay_unscale=not last) as scaled_loss:
                scaled_loss.backward(retain_graph=True)
        else:
            loss.backward(retain_graph=True)
        for each in [optimizer] if last else []:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            each.step()
            each.zero_grad()
        losses.append(loss.item())
    return losses
"""
    },
    "a loss of two optimizers, and a block that does more": {
        "main": """
import contextlib
import torch
from torch.nn.functional import cross_entropy
from apex import amp

def train(args, model, data):
    other = torch.nn.Linear(4, 4)
    one = torch.optim.SGD(model.parameters(), lr=0.1)
    two = torch.optim.SGD(other.parameters(), lr=0.1)
    level = args.level if args.fp16 else "O0"
    [model, other], [one, two] = amp.initialize([model, other], [one, two], opt_level=level)
    losses = []
    for step, (x, y) in enumerate(data):
        loss = cross_entropy(other(model(x)), y)
        large = loss * (2.0**20 if step in (2, 3) else 1.0)
        with torch.enable_grad(), amp.scale_loss(large, [one, two]) as scaled_loss:
            torch.autograd.backward(scaled_loss)
            if step % 2:
                for p in model.parameters():
                    p.grad.mul_(0.5)
        torch.nn.utils.clip_grad_norm_([*amp.master_params(one), *amp.master_params(two)], 0.1)
        if (step + 1) % args.accumulate == 0:
            one.step()
            two.step()
            one.zero_grad()
            two.zero_grad()
        losses.append(loss.item())
    return losses
"""
    },
    "a name for a list of optimizers, and a model in a dict": {
        "main": """
import torch
from torch.nn.functional import cross_entropy
from apex import amp

def start(args, nets, one, two):
    [nets["first"], nets["second"]], optimizers = amp.initialize(
        models=[nets["first"], nets["second"]], optimizers=[one, two], opt_level=args.level if args.fp16 else "O0"
    )
    return optimizers

def train(args, model, data):
    nets = {"first": model, "second": torch.nn.Linear(4, 4)}
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets.values()]
    optimizers = start(args, nets, *optimizers)
    losses = []
    for step, (x, y) in enumerate(data):
        loss = cross_entropy(nets["second"](nets["first"](x)), y)
        with amp.scale_loss(loss, optimizers) as scaled_loss:
            scaled_loss.backward()
        if (step + 1) % args.accumulate == 0:
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        losses.append(loss.item())
    return losses
""".replace("(loss, optimizers)", "(loss, [optimizers[0], optimizers[1]])")
    },
    "amp from another file by a star": {
        "tools": """
import torch
try:
    from apex import amp
    has_apex = True
except ImportError:
    has_apex = False
""",
        "main": """
from .tools import *

def train(args, model, data):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if args.fp16:
        if not has_apex:
            raise ImportError("please install it")
        model, optimizer = amp.initialize(model, optimizer, opt_level=args.level)
    losses = []
    for step, (x, y) in enumerate(data):
        loss = torch.nn.functional.cross_entropy(model(x), y)
        if args.fp16:
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
        else:
            loss.backward()
        if (step + 1) % args.accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses
""",
    },
    "three losses of two networks": {
        "main": """
import torch
from torch.nn.functional import cross_entropy
from apex import amp

def train(args, model, data):
    other = torch.nn.Linear(4, 4)
    one = torch.optim.SGD(model.parameters(), lr=0.1)
    two = torch.optim.SGD(other.parameters(), lr=0.1)
    if args.fp16:
        [model, other], [one, two] = amp.initialize(
            [model, other], [one, two], opt_level=args.level, num_losses=3
        )
    losses = []
    for step, (x, y) in enumerate(data):
        two.zero_grad()
        real = cross_entropy(other(x[:, :4]), y) * (2.0**20 if step == 3 else 1.0)
        if args.fp16:
            with amp.scale_loss(real, two, loss_id=0) as scaled_loss:
                scaled_loss.backward()
        else:
            real.backward()
        fake = model(x)
        wrong = cross_entropy(other(fake.detach()), y)
        if args.fp16:
            with amp.scale_loss(wrong, two, loss_id=1) as scaled_loss:
                scaled_loss.backward()
        else:
            wrong.backward()
        torch.nn.utils.clip_grad_norm_(other.parameters(), 0.1)
        two.step()
        one.zero_grad()
        loss = cross_entropy(other(fake), y)
        if args.fp16:
            with amp.scale_loss(loss, one, loss_id=2) as scaled_loss:
                scaled_loss.backward()
        else:
            loss.backward()
        one.step()
        losses += [real.item(), wrong.item(), loss.item()]
    return losses
"""
    },
}
"""Scripts of the shapes that public trees have: the text of each file, the first ones without imports of later ones."""


def losses_of(sources: dict[str, str], level: str, accumulate: int, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    for name, source in sources.items():
        module = ModuleType(name)
        monkeypatch.setitem(sys.modules, name, module)
        exec(compile(source.replace("from .", "from "), f"<{name}>", "exec"), vars(module))
    torch.manual_seed(0)
    data = [(torch.randn(16, 8), torch.randint(4, (16,))) for _ in range(12)]
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    args = SimpleNamespace(fp16=level != "fp32", level=level, accumulate=accumulate)
    return list(vars(sys.modules["main"])["train"](args, model, data))


def on_cpu(sources: Mapping[str, str], *, accumulation: bool = True, o2_as_o1: bool = False) -> dict[str, str]:
    found = migrate_to_torch(sources, accumulation=accumulation, o2_as_o1=o2_as_o1)
    assert [each.problems for each in found.values()] == [[] for _ in found]
    texts = {name: each.after for name, each in found.items()}
    return {
        name: texts.get(name, source).replace('"cuda"', '"cpu"').replace("GradScaler(", "GradScaler('cpu', ")
        for name, source in sources.items()
    }


ALL = {"one function": {"main": ONE_FUNCTION}, "two functions": {"main": TWO_FUNCTIONS}, **SHAPES}


@pytest.mark.filterwarnings("ignore:SGD.step.. uses gradients that came through no block of amp.scale_loss")
@pytest.mark.parametrize("accumulation", [False, True])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("level", ["fp32", "O0", "O1"])
@pytest.mark.parametrize("shape", ALL)
def test_it_trains_as_halfstep_does(
    shape: str, level: str, accumulate: int, accumulation: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shape == "two functions" and (level == "fp32" or accumulate > 1):
        return
    for_halfstep = {name: migrate(source).after for name, source in ALL[shape].items()}
    want = losses_of(for_halfstep, level, accumulate, monkeypatch)
    found = losses_of(on_cpu(ALL[shape], accumulation=accumulation), level, accumulate, monkeypatch)
    assert found == pytest.approx(want, rel=2e-3 if level == "O1" else 1e-6)


@pytest.mark.parametrize("source", [ONE_FUNCTION, TWO_FUNCTIONS], ids=["one function", "two functions"])
def test_a_level_that_torch_has_not_is_refused_when_it_runs(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="O0 and O1 only"):
        losses_of(on_cpu({"main": source}), "O2", 1, monkeypatch)


@pytest.mark.parametrize("source", [ONE_FUNCTION, TWO_FUNCTIONS], ids=["one function", "two functions"])
def test_o2_trains_as_o1_where_that_is_asked_for(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    want = losses_of(on_cpu({"main": source}), "O1", 1, monkeypatch)
    literal = source.replace("=args.level", '="O2", keep_batchnorm_fp32=True, master_weights=True')
    for text in (source, literal):
        found = on_cpu({"main": text}, o2_as_o1=True)
        assert losses_of(found, "O2", 1, monkeypatch) == want
    found = on_cpu({"main": source}, o2_as_o1=True)
    with pytest.raises(ValueError, match="O0 and O1 only"):
        losses_of(found, "O3", 1, monkeypatch)
    original = losses_of({"main": migrate(source).after}, "O2", 1, monkeypatch)
    assert want == pytest.approx(original, rel=1e-2)


STATE_OF_A_TRAINER = """
import torch
from torch.nn.functional import cross_entropy
from apex import amp

class Trainer:
    def __init__(self, net, optimizer):
        self.net, self.optimizer = net, optimizer

    def step(self, x, y):
        loss = cross_entropy(self.net(x), y)
        with amp.scale_loss(loss, self.optimizer) as scaled_loss:
            scaled_loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def save(self):
        return amp.state_dict()

    def load(self, state):
        amp.load_state_dict(state)

def train(args, net, data):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net, optimizer = amp.initialize(net, optimizer, opt_level=args.level)
    trainer = Trainer(net, optimizer)
    losses = [trainer.step(x, y) for x, y in data]
    trainer.load(trainer.save())
    return losses
"""


def test_the_state_of_amp_is_that_of_the_optimizer_of_the_class(monkeypatch: pytest.MonkeyPatch) -> None:
    found = on_cpu({"main": STATE_OF_A_TRAINER})
    assert "return scaler_of(self.optimizer).state_dict()" in found["main"]
    want = losses_of({"main": migrate(STATE_OF_A_TRAINER).after}, "O1", 1, monkeypatch)
    assert losses_of(found, "O1", 1, monkeypatch) == pytest.approx(want, rel=2e-3)
    two = STATE_OF_A_TRAINER.replace(
        "self.net, self.optimizer = net,", "self.net, self.opt, self.optimizer = net, None,"
    )
    two = two.replace(
        "net, optimizer = amp.initialize(net, optimizer", "net, (optimizer, opt) = amp.initialize(net, (optimizer, opt)"
    )
    assert any("where no optimizer is" in text for _, text in migrate(two, "torch").problems)


@pytest.mark.parametrize(
    "source",
    [
        ONE_FUNCTION,
        SHAPES["passes of two losses after both are computed"]["main"]
        .replace(", num_losses=2", "")
        .replace("id=1", "id=0"),
    ],
    ids=["several passes of a step", "steps that cross with one loss scale"],
)
def test_the_loss_scale_moves_after_each_pass_where_a_grad_scaler_would_do_something_else(source: str) -> None:
    found = migrate(source, "torch")
    assert found.problems == []
    assert "scaled_pass(scale" in found.after
    assert "    optimizer.step()\n" in found.after or "    one.step()\n        two.step()\n" in found.after


def test_a_grad_scaler_moves_its_scale_once_for_several_passes_where_that_is_asked_for() -> None:
    after = migrate_to_torch({"": ONE_FUNCTION}, accumulation=True)[""].after
    assert "scaled_pass" not in after
    assert "            scaler.step(optimizer)\n            scaler.update()\n" in after


def test_a_step_is_skipped_once_after_passes_that_overflow(monkeypatch: pytest.MonkeyPatch) -> None:
    losses_of(on_cpu({"main": ONE_FUNCTION}, accumulation=False), "fp32", 1, monkeypatch)
    scaled_pass = vars(sys.modules["main"])["scaled_pass"]
    weight, scaler = nn.Parameter(torch.ones(())), torch.amp.GradScaler("cpu", init_scale=2.0**24)
    optimizer = torch.optim.SGD([weight], lr=1.0)

    def backward(factor: float) -> None:
        with scaled_pass(scaler, weight * factor, optimizer) as loss:
            loss.backward()

    for factor in (torch.inf, torch.nan, 1.0):
        backward(factor)
    assert scaler.get_scale() == 2.0**22
    optimizer.step()
    assert weight.item() == 1.0
    optimizer.zero_grad()
    backward(2.0)
    backward(3.0)
    assert weight.grad is not None
    assert weight.grad.item() == 5.0
    optimizer.step()
    assert weight.item() == -4.0


def test_loss_scales_are_for_each_loss_or_for_each_optimizer() -> None:
    """Where the GradScaler is found at the optimizer, it cannot have one for each of its losses."""
    source = SHAPES["three losses of two networks"]["main"]
    assert "scaled_pass(scalers[1], wrong, two)" in migrate(source, "torch").after
    start = source.index("        [model, other], [one, two] = amp")
    initialize = source[start : source.index("    losses = []")]
    apart = source.replace(initialize, "        [model, other], [one, two] = start(args, model, other, one, two)\n")
    apart += f"\ndef start(args, model, other, one, two):\n{initialize}        return [model, other], [one, two]\n"
    assert any("not one for each optimizer" in text for _, text in migrate(apart, "torch").problems)


HEAD = "import torch\nfrom apex import amp\nmodel, optimizer = amp.initialize(model, optimizer)\n"
LOOP = "for x in data:\n    loss = model(x)\n    with amp.scale_loss(loss, optimizer) as s:\n        s.backward()\n"
STEP = "    optimizer.step()\n"
SCALED = """\
import torch
scaler = torch.amp.GradScaler()
for x in data:
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(x)
    scaler.scale(loss).backward()
"""


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (HEAD + LOOP + STEP, f"{SCALED}    scaler.step(optimizer)\n    scaler.update()\n"),
        (  # gradients that somebody clips, by whatever name, are unscaled
            f"{HEAD}{LOOP}    clip_grad_norm_(model.parameters(), 1.0)\n{STEP}",
            f"{SCALED}    scaler.unscale_(optimizer)\n    clip_grad_norm_(model.parameters(), 1.0)\n"
            "    scaler.step(optimizer)\n    scaler.update()\n",
        ),
        (  # what stands between, and has nothing to do with the loss, is not under autocast
            f"{HEAD}{LOOP}{STEP}".replace("    with", "    optimizer.zero_grad()\n    with"),
            SCALED.replace("    scaler.scale", "    optimizer.zero_grad()\n    scaler.scale")
            + "    scaler.step(optimizer)\n    scaler.update()\n",
        ),
        (  # one name for several models
            HEAD.replace("model, optimizer = amp.initialize(model,", "models, optimizer = amp.initialize([model, ema],")
            + LOOP
            + STEP,
            SCALED.replace("scaler =", "models = [model, ema]\nscaler =")
            + "    scaler.step(optimizer)\n    scaler.update()\n",
        ),
        (  # a step that may be left out
            f"{HEAD}{LOOP}    if bad(loss):\n        continue\n    clip(model)\n{STEP}",
            f"{SCALED}    if bad(loss):\n        continue\n    scaler.unscale_(optimizer)\n    clip(model)\n"
            "    scaler.step(optimizer)\n    scaler.update()\n",
        ),
        (  # a loop of its own, which leaves out nothing but its own rest
            f"{HEAD}{LOOP}    for p in net.parameters():\n        if p.grad is None:\n            continue\n"
            f"        p.grad.clamp_(-1, 1)\n{STEP}",
            f"{SCALED}    scaler.unscale_(optimizer)\n    for p in net.parameters():\n        if p.grad is None:\n"
            "            continue\n        p.grad.clamp_(-1, 1)\n    scaler.step(optimizer)\n    scaler.update()\n",
        ),
        (  # torch is imported where it is written
            "try:\n    import torch\nexcept ImportError:\n    torch = None\ntry:\n    import apex\n    has = True\n"
            "except ImportError:\n    has = False\n",
            "try:\n    import torch\nexcept ImportError:\n    torch = None\nhas = True\n",
        ),
        (  # 16-bit weights without training
            "from apex import amp\nif fp16:\n    net, _ = amp.initialize(net, [], opt_level='O3')\ny = net.infer(x)\n",
            "if fp16:\n    net = net.half()\ny = net.infer(x)\n",
        ),
        (  # imports that nothing uses
            "from apex.fp16_utils import *\nfrom apex.multi_tensor_apply import multi_tensor_applier\nx = 1\n",
            "x = 1\n",
        ),
        ("from apex.normalization import FusedLayerNorm as N\n", "from torch.nn import LayerNorm as N\n"),
        (
            "import apex\nm = apex.parallel.DistributedDataParallel(m)\nisinstance(m, apex.parallel.SyncBatchNorm)\n",
            "import torch\nm = torch.nn.parallel.DistributedDataParallel(m)\nisinstance(m, torch.nn.SyncBatchNorm)\n",
        ),
        (
            "from apex.parallel import convert_syncbn_model\nm = convert_syncbn_model(m)\n",
            "import torch\nm = torch.nn.SyncBatchNorm.convert_sync_batchnorm(m)\n",
        ),
        (
            "from apex.optimizers import FusedAdam\no = FusedAdam(p, lr=1)\n",
            "from torch.optim import AdamW as FusedAdam\no = FusedAdam(p, lr=1, weight_decay=0.0)\n",
        ),
        (  # several statements in a line
            (HEAD + LOOP + STEP)
            .replace("        s.back", " s.back")
            .replace(":\n s.", ": s.")
            .replace(STEP, "    y = 1; optimizer.step(); z = 2; w = 3;\nx = 1; y = 2\n")
            .replace("torch\nfrom", "torch; from"),
            f"{SCALED}    scaler.unscale_(optimizer)\n    y = 1\n"
            "    scaler.step(optimizer)\n    scaler.update()\n    z = 2\n    w = 3\nx = 1; y = 2\n",
        ),
        (  # optimizers that are called by other names
            "import torch\ntry:\n    from apex.optimizers import FusedAdam, FusedSGD\nexcept ImportError:\n    pass\n"
            "adam = FusedAdam\nsgd = {'sgd': FusedSGD}\n",
            "import functools\nimport torch\nfrom torch.optim import AdamW as FusedAdam\n"
            "from torch.optim import SGD as FusedSGD\n"
            "adam = functools.partial(FusedAdam, weight_decay=0.0)\nsgd = {'sgd': FusedSGD}\n",
        ),
        (  # adam_w_mode
            "import apex, torch\nFusedAdam = apex.optimizers.FusedAdam(p, adam_w_mode=True)\n",
            "import torch\nFusedAdam = torch.optim.AdamW(p, weight_decay=0.0)\n",
        ),
        (
            "import torch\nfrom apex.optimizers import FusedAdam as A\n"
            "o = A(p, adam_w_mode=False, weight_decay=1)\no = A(p, weight_decay=1, adam_w_mode=False)\n"
            "o = A(\n    p,\n    weight_decay=1,\n    adam_w_mode=args.w,\n)\n",
            "import torch\nfrom torch.optim import AdamW as A\n"
            "o = torch.optim.Adam(p, weight_decay=1)\no = torch.optim.Adam(p, weight_decay=1)\n"
            "o = (torch.optim.AdamW if args.w else torch.optim.Adam)(\n    p,\n    weight_decay=1,\n)\n",
        ),
        ("try:\n    import apex\n    has = True\nexcept ImportError:\n    has = False\n", "has = True\n"),
        (  # a name that Apex never had
            "def f(*x):\n    try:\n        from apex.normalization import FusedMine\n\n        return FusedMine(*x)\n"
            "    except ImportError:\n        pass\n    return LayerNorm(*x)\n",
            "def f(*x):\n    pass\n    return LayerNorm(*x)\n",
        ),
        (
            "import importlib\n\ndef has():\n    return importlib.util.find_spec('apex') is not None\n"
            "x = importlib.util.find_spec('apex') is None\n",
            "import importlib\n\ndef has():\n    return True\nx = False\n",
        ),
        ("def f():\n    from apex import amp\n", "def f():\n    pass\n"),
        (
            HEAD.replace("(model, optimizer)", "(net, optimizer, loss_scale=scale)") + LOOP + STEP,
            SCALED.replace(
                "scaler =",
                "model = net\nif scale not in (None, 'dynamic'):\n"
                '    raise ValueError("torch.amp has no loss_scale")\nscaler =',
            )
            + "    scaler.step(optimizer)\n    scaler.update()\n",
        ),
    ],
)
def test_what_it_writes(before: str, after: str) -> None:
    found = migrate(before, "torch")
    assert found.problems == []
    assert found.after == after
    assert migrate(after, "torch").after == after


CLIPPED_EACH_PASS = SHAPES["step in another method"]["main"].replace(
    "                scaled_loss.backward()\n",
    "                scaled_loss.backward()\n            nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.1)\n",
)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_gradients_that_are_clipped_after_every_pass_are_unscaled_there(
    accumulate: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = losses_of({"main": migrate(CLIPPED_EACH_PASS).after}, "O1", accumulate, monkeypatch)
    found = on_cpu({"main": CLIPPED_EACH_PASS})
    assert losses_of(found, "O1", accumulate, monkeypatch) == pytest.approx(want, rel=2e-3)


def test_delayed_unscaling_is_what_a_grad_scaler_does() -> None:
    source = SHAPES["step in another method"]["main"].replace(
        "(loss, optimizer)", "(loss, optimizer, delay_unscale=True)"
    )
    assert "torch.amp" in on_cpu({"main": source}, accumulation=False)["main"]


def test_a_scaler_that_is_off_is_where_the_optimizer_is() -> None:
    """Not before ``if __name__ == "__main__"``, in which a whole script is."""
    lines = [
        "opt = SGD(p)",
        "if fp16:",
        "    model, opt = amp.initialize(model, opt)",
        *LOOP.splitlines(),
        *STEP.split(),
    ]
    text = "\n".join(["from apex import amp", 'if __name__ == "__main__":', *(f"    {line}" for line in lines)])
    found = migrate(text.replace("    optimizer.step", "        opt.step").replace("optimizer", "opt"), "torch")
    assert found.problems == []
    after = found.after.splitlines()
    assert after[after.index("    if fp16:") - 1] == "    scaler = torch.amp.GradScaler(enabled=False)"


OTHER_OPTIMIZERS = """
from apex import amp
import copy
import torch
from torch.nn.functional import cross_entropy

# one batch
@torch.enable_grad()
def step(args, model, opt, x, y):
    loss = cross_entropy(model(x), y)
    if args.fp16:
        with amp.scale_loss(loss, opt) as scaled_loss:
            scaled_loss.backward()
        torch.nn.utils.clip_grad_norm_(amp.master_params(opt), 0.1)
    else:
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    opt.step()
    opt.zero_grad()
    return loss.item()

def train(args, model, data):
    first = torch.optim.SGD(model.parameters(), lr=0.1)
    if args.fp16:
        model, first = amp.initialize(model, first, opt_level=args.level)
    losses = [step(args, model, first, x, y) for x, y in data]
    other = torch.nn.Linear(8, 4)
    opt = torch.optim.SGD(other.parameters(), lr=0.1)
    losses += [step(args, other, opt, x, y) for x, y in data]
    other, opt = copy.deepcopy((other, opt))
    return losses + [step(args, other, opt, x, y) for x, y in data]
"""


def test_optimizers_that_amp_never_had_or_that_are_copies_train_as_with_amp_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    want = losses_of({"main": migrate(OTHER_OPTIMIZERS).after}, "fp32", 1, monkeypatch)
    found = on_cpu({"main": OTHER_OPTIMIZERS})
    assert losses_of(found, "fp32", 1, monkeypatch) == want
    assert losses_of(found, "O1", 1, monkeypatch)[12:] == want[12:]
    assert "# one batch\n@torch.enable_grad()\ndef step(" in found["main"]


def test_a_wrapper_that_hides_the_scaler_is_an_error_and_no_optimizer_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    losses_of(on_cpu({"main": OTHER_OPTIMIZERS}), "fp32", 1, monkeypatch)
    scaler_of = vars(sys.modules["main"])["scaler_of"]
    assert not scaler_of(None).is_enabled()
    with pytest.raises(AttributeError, match="scaler"):
        scaler_of(SimpleNamespace(optimizer=torch.optim.SGD([nn.Parameter(torch.ones(2))])))


def test_files_that_do_not_speak_of_apex_are_rewritten_too(tmp_path: Path) -> None:
    for name, text in SHAPES["start, model, pass and step in four files"].items():
        (tmp_path / f"{name}.py").write_text(text)
    (tmp_path / "old.py").write_text("print 'Python 2'\n")
    result = CliRunner().invoke(command, [str(tmp_path), "--to", "torch", "--accumulation", "--write"])
    assert result.exit_code == 0, result.output
    assert "3 files changed, 0 places left" in result.output
    assert "torch.autocast" in (tmp_path / "runner.py").read_text()


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (HEAD.replace("optimizer)\n", "optimizer, opt_level='O2')\n") + LOOP + STEP, "--o2-as-o1 makes O1 of it"),
        (HEAD.replace("optimizer)\n", "optimizer, opt_level='O3')\n") + LOOP + STEP, 'or write "O1"'),
        ("from apex import amp\nnet = amp.initialize(net, opt_level='O3')\ny = net(x)\n", "call .half() of them"),
        (HEAD + LOOP + STEP + "loss.backward()\n", "no call of the model"),
        (HEAD + LOOP.replace("\n        s.b", " s.b") + STEP + "loss.backward()\n", "no call of the model"),
        (  # the optimizer is not there yet where a model is
            "from apex import amp\ndef f(net):\n    out = net(1)\n    t = T()\n    t.go(out)\nclass T:\n"
            "    def __init__(self):\n        self.net, self.opt = amp.initialize(self.net, self.opt)\n"
            "    def go(self, out):\n        loss = out\n        with amp.scale_loss(loss, self.opt) as s:\n"
            "            s.backward()\n        self.opt.step()\n",
            "no call of the model",
        ),
        (HEAD + "def f(loss):\n" + LOOP.partition("model(x)\n")[2] + STEP, "no call of the model"),
        (LOOP.replace("    loss", "    import apex.amp as amp\n    loss") + STEP, "there is no amp.initialize"),
        ("from apex.optimizers import FusedAdam\no = {1: FusedAdam}\n", "defaults differ"),
        ("from apex.optimizers import FusedAdam\no = FusedAdam(p, bias_correction=False)\n", "bias_correction"),
        (HEAD + LOOP.replace("(loss,", "(f(loss),") + STEP, "give it a name in a line before"),
        ("from .tools import amp\namp.scale_loss\n# apex", "taken from another file"),
        ("from tools import amp\namp.scale_loss\n# apex", "taken from another file"),
        (HEAD.replace("optimizer)\n", "optimizer, opt_level=level())\n") + LOOP + STEP, "cannot be read here"),
    ],
)
def test_what_it_refuses(source: str, said: str) -> None:
    found = migrate(source, "torch")
    assert found.after == source
    assert any(said in text for _, text in found.problems), found.problems
    assert not any("in a line" in text and "a line before" not in text for _, text in found.problems)


def test_a_folder_is_rewritten_whole_or_not_at_all(tmp_path: Path) -> None:
    """One file asks ``isinstance`` of a class that another one wraps with."""
    asks = "from apex.parallel import DistributedDataParallel as DDP\nx = isinstance(m, DDP)\n"
    (tmp_path / "hooks.py").write_text(asks)
    (tmp_path / "wraps.py").write_text(
        "from apex.parallel import DistributedDataParallel as D\nm = D(m, allreduce=1)\n"
    )
    result = CliRunner().invoke(command, [str(tmp_path), "--to", "torch", "--write"])
    assert result.exit_code == 1
    assert "wraps.py:2: allreduce" in result.output
    assert (tmp_path / "hooks.py").read_text() == asks
    (tmp_path / "wraps.py").write_text("from apex.parallel import DistributedDataParallel as D\nm = D(m)\n")
    assert CliRunner().invoke(command, [str(tmp_path), "--to", "torch", "--write"]).exit_code == 0
    assert "torch.nn.parallel" in (tmp_path / "hooks.py").read_text()
    assert "torch.nn.parallel" in (tmp_path / "wraps.py").read_text()
