"""Sequences that are followed step by step: recurrent networks, scans, alignments, experts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from .kinds import kind
from .language import next_token, next_token_loss, tokens


class LSTMModel(nn.Module):
    def __init__(self, hidden=16, layers=2):
        super().__init__()
        self.hidden, self.layers = hidden, layers
        self.lstm = nn.LSTM(1, hidden, layers, batch_first=True)
        self.fc = nn.Linear(hidden, 1)

    def forward(self, x):
        h0 = torch.zeros(self.layers, x.size(0), self.hidden)
        c0 = torch.zeros(self.layers, x.size(0), self.hidden)
        out, _ = self.lstm(x, (h0, c0))
        return self.fc(out[:, -1, :])


@kind("LSTM with states of its own", steps=20, lr=2e-2)
def lstm():
    model = LSTMModel()
    t = torch.linspace(0, 6, 16)[:, None] + torch.linspace(0, 1, 9)
    x = torch.sin(t)[..., None]
    return model, lambda: F.mse_loss(model(x[:, :-1]), x[:, -1])


class PackedTagger(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.embed = nn.Embedding(16, dim, padding_idx=0)
        self.rnn = nn.LSTM(dim, dim // 2, batch_first=True, bidirectional=True)
        self.out = nn.Linear(dim, 2)

    def forward(self, x, lengths):
        packed = pack_padded_sequence(self.embed(x), lengths, batch_first=True, enforce_sorted=False)
        state = torch.zeros(2, len(x), 8), torch.zeros(2, len(x), 8)
        y, _ = pad_packed_sequence(self.rnn(packed, state)[0], batch_first=True)
        return self.out(y)


@kind("packed sequences", steps=20, lr=2e-2)
def packed():
    model = PackedTagger()
    x, lengths = tokens(8, 9), torch.tensor([10, 4, 7, 9, 5, 6, 10, 8])
    valid = torch.arange(10) < lengths[:, None]
    y = ((x > 7).long()).masked_fill(~valid, -100)
    return model, lambda: F.cross_entropy(model(x, lengths).flatten(0, 1), y.flatten(), ignore_index=-100)


@next_token("Mamba scan", 8, 8, steps=15, lr=3e-2)
class Mamba(nn.Module):
    """The selective scan of the reference code: fp32 for ``A``, a state that starts with zeros."""

    def __init__(self, d_model=8, d_state=4):
        super().__init__()
        self.d_state = d_state
        self.embed, self.in_proj = nn.Embedding(16, d_model), nn.Linear(d_model, 2 * d_model, bias=False)
        self.conv1d = nn.Conv1d(d_model, d_model, 3, groups=d_model, padding=2)
        self.x_proj, self.dt_proj = nn.Linear(d_model, 1 + 2 * d_state, bias=False), nn.Linear(1, d_model)
        self.A_log = nn.Parameter(torch.log(torch.arange(1, d_state + 1, dtype=torch.float32).repeat(d_model, 1)))
        self.D, self.out_proj = nn.Parameter(torch.ones(d_model)), nn.Linear(d_model, 16)

    def forward(self, ids):
        x, z = self.in_proj(self.embed(ids)).chunk(2, -1)
        n, length, d = x.shape
        x = F.silu(self.conv1d(x.transpose(1, 2))[..., :length]).transpose(1, 2)
        A = -torch.exp(self.A_log.float())
        dt, B, C = torch.split(self.x_proj(x), [1, self.d_state, self.d_state], dim=-1)
        dt = F.softplus(self.dt_proj(dt))
        dA = torch.exp(torch.einsum("bld,dn->bldn", dt, A))
        dBu = torch.einsum("bld,bln,bld->bldn", dt, B, x)
        state, ys = torch.zeros(n, d, self.d_state), []
        for i in range(length):
            state = dA[:, i] * state + dBu[:, i]
            ys.append(torch.einsum("bdn,bn->bd", state, C[:, i]))
        y = torch.stack(ys, dim=1) + x * self.D
        return self.out_proj(y * F.silu(z))


class MixtureOfExperts(nn.Module):
    """Mixtral's routing: the best two experts, whose rows are written with index_add_ and by a mask."""

    def __init__(self, dim=16, experts=4):
        super().__init__()
        self.embed, self.gate, self.out = nn.Embedding(16, dim), nn.Linear(dim, experts, bias=False), nn.Linear(dim, 16)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, 32), nn.SiLU(), nn.Linear(32, dim)) for _ in range(experts)
        )

    def forward(self, ids):
        x = self.embed(ids).flatten(0, 1)
        router_logits = self.gate(x)
        weights, selected = torch.topk(F.softmax(router_logits, dim=1, dtype=torch.float), 2, dim=-1)
        weights /= weights.sum(dim=-1, keepdim=True)
        final = torch.zeros(x.shape)
        best = torch.zeros(x.shape)
        for i, expert in enumerate(self.experts):
            rows, place = torch.where(selected == i)
            y = expert(x[rows])
            final.index_add_(0, rows, (y * weights[rows, place, None]).to(x.dtype))
            best[rows[place == 0]] = y[place == 0]
        share = F.one_hot(selected, len(self.experts)).float().mean((0, 1))
        self.aux = len(self.experts) * (share * F.softmax(router_logits, -1).mean(0)).sum()
        return self.out(x + final + 0.1 * best).view(*ids.shape, -1)


@kind("mixture of experts", steps=15)
def mixture_of_experts():
    model = MixtureOfExperts()
    x = tokens(8, 8)
    return model, lambda: next_token_loss(model, x) + 0.01 * model.aux


class Speech(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(4, 16, 3, padding=1)
        self.rnn, self.fc = nn.GRU(16, 8, bidirectional=True), nn.Linear(16, 5)

    def forward(self, x):
        x = F.gelu(self.conv(x)).permute(2, 0, 1)
        return F.log_softmax(self.fc(self.rnn(x)[0]), dim=2)


@kind("CTC", steps=25, lr=2e-2)
def ctc():
    model = Speech()
    y = torch.randint(1, 5, (6, 3))
    x = F.one_hot(y - 1, 4).float().repeat_interleave(4, 1).transpose(1, 2) + 0.1 * torch.randn(6, 4, 12)
    lengths = torch.full((6,), 12), torch.full((6,), 3)
    return model, lambda: F.ctc_loss(model(x), y, *lengths)
