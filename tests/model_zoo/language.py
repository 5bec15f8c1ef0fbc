"""Sequences: transformers with their masks and positions, recurrent networks, and what has followed them."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from .kinds import kind


def tokens(n=8, length=12, vocabulary=16):
    """Sequences that count upwards from a random place by one or two."""
    first, by = torch.randint(vocabulary, (n, 1)), torch.randint(1, 3, (n, 1))
    return (first + by * torch.arange(length + 1)) % vocabulary


def next_token_loss(model, x):
    logits = model(x[:, :-1])
    return F.cross_entropy(logits.reshape(-1, logits.size(-1)), x[:, 1:].reshape(-1))


def next_token(name, *size, **options):
    """A kind of model that predicts the next of tokens of a size: a decorator of its class."""

    def add(model_class):
        @kind(name, **options)
        def make():
            model, x = model_class(), tokens(*size)
            return model, lambda: next_token_loss(model, x)

        return model_class

    return add


class CausalSelfAttention(nn.Module):
    def __init__(self, n_embd, n_head, block_size):
        super().__init__()
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)
        self.c_proj = nn.Linear(n_embd, n_embd)
        self.n_head, self.n_embd = n_head, n_embd
        self.register_buffer("bias", torch.tril(torch.ones(block_size, block_size)).view(1, 1, block_size, block_size))

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = (y.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for y in self.c_attn(x).split(C, dim=2))
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
        y = F.softmax(att, dim=-1) @ v
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class GPTBlock(nn.Module):
    def __init__(self, n_embd, n_head, block_size):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.attn = CausalSelfAttention(n_embd, n_head, block_size)
        self.mlp = nn.Sequential(nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd))

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, vocab=16, n_embd=16, block_size=12):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, n_embd), nn.Embedding(block_size, n_embd)
        self.h = nn.ModuleList(GPTBlock(n_embd, 2, block_size) for _ in range(2))
        self.ln_f = nn.LayerNorm(n_embd)
        self.lm_head = nn.Linear(n_embd, vocab, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1)))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.reshape(-1))


@kind("GPT, loss inside", steps=20)
def gpt():
    model = GPT()
    x = tokens()
    return model, lambda: model(x[:, :-1], x[:, 1:])[1]


class T5LayerNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.variance_epsilon = eps

    def forward(self, hidden_states):
        variance = hidden_states.to(torch.float32).pow(2).mean(-1, keepdim=True)
        return self.weight * (hidden_states * torch.rsqrt(variance + self.variance_epsilon))


@next_token("T5, relative bias", steps=20)
class T5(nn.Module):
    def __init__(self, dim=16, heads=2):
        super().__init__()
        self.embed = nn.Embedding(16, dim)
        self.relative_attention_bias = nn.Embedding(8, heads)
        self.norm, self.final_norm = T5LayerNorm(dim), T5LayerNorm(dim)
        self.qkv, self.o = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.head = nn.Linear(dim, 16, bias=False)

    def bucket(self, relative_position, num_buckets=8, max_distance=16):
        n = torch.max(-relative_position, torch.zeros_like(relative_position))
        exact = num_buckets // 2
        large = exact + (
            torch.log(n.float().clamp(min=1) / exact) / math.log(max_distance / exact) * (num_buckets - exact)
        ).to(torch.long)
        return torch.where(n < exact, n, large.clamp(max=num_buckets - 1))

    def forward(self, ids):
        x = self.embed(ids)
        length = ids.size(1)
        positions = torch.arange(length)
        bias = self.relative_attention_bias(self.bucket(positions[None] - positions[:, None])).permute(2, 0, 1)[None]
        bias = bias + torch.full((length, length), -1e9).triu(1)
        q, k, v = self.qkv(self.norm(x)).view(*x.shape[:2], 3, 2, -1).permute(2, 0, 3, 1, 4)
        scores = torch.matmul(q, k.transpose(3, 2)) + bias
        weights = F.softmax(scores.float(), dim=-1).type_as(scores)
        x = x + self.o(torch.matmul(weights, v).transpose(1, 2).flatten(2))
        return self.head(self.final_norm(x))


class PositionalEncoding(nn.Module):
    def __init__(self, d_model, max_len=64):
        super().__init__()
        position = torch.arange(max_len).unsqueeze(1)
        div_term = torch.exp(torch.arange(0, d_model, 2) * (-math.log(10000.0) / d_model))
        pe = torch.zeros(max_len, 1, d_model)
        pe[:, 0, 0::2] = torch.sin(position * div_term)
        pe[:, 0, 1::2] = torch.cos(position * div_term)
        self.register_buffer("pe", pe)

    def forward(self, x):
        return x + self.pe[: x.size(0)]


@next_token("nn.Transformer with a sinusoidal buffer", steps=15)
class TransformerModel(nn.Module):
    """That of PyTorch's tutorial on language models."""

    def __init__(self, ntoken=16, d_model=16):
        super().__init__()
        self.pos_encoder = PositionalEncoding(d_model)
        layers = nn.TransformerEncoderLayer(d_model, 2, 32, 0.0)
        self.transformer_encoder = nn.TransformerEncoder(layers, 2, enable_nested_tensor=False)
        self.embedding, self.linear = nn.Embedding(ntoken, d_model), nn.Linear(d_model, ntoken)
        self.d_model = d_model

    def forward(self, src):
        src = self.pos_encoder(self.embedding(src.t()) * math.sqrt(self.d_model))
        src_mask = nn.Transformer.generate_square_subsequent_mask(len(src))
        return self.linear(self.transformer_encoder(src, src_mask)).transpose(0, 1)


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-5):
        super().__init__()
        self.eps, self.weight = eps, nn.Parameter(torch.ones(dim))

    def forward(self, x):
        output = (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)).type_as(x)
        return output * self.weight


def rotate_half(x):
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((-x2, x1), dim=-1)


class Llama(nn.Module):
    """Rotary positions from a buffer, SwiGLU, and a cache that is written in place for the second half."""

    def __init__(self, dim=16, heads=2):
        super().__init__()
        self.heads = heads
        self.embed = nn.Embedding(16, dim)
        self.norm1, self.norm2, self.norm = RMSNorm(dim), RMSNorm(dim), RMSNorm(dim)
        self.wqkv, self.wo = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.w1, self.w3 = nn.Linear(dim, 32, bias=False), nn.Linear(dim, 32, bias=False)
        self.w2 = nn.Linear(32, dim, bias=False)
        self.output = nn.Linear(dim, 16, bias=False)
        head = dim // heads
        self.register_buffer("inv_freq", 1.0 / (10000.0 ** (torch.arange(0, head, 2).float() / head)), persistent=False)

    def rotary(self, positions):
        freqs = torch.outer(positions.float(), self.inv_freq)
        emb = torch.cat((freqs, freqs), dim=-1)
        return emb.cos(), emb.sin()

    def forward(self, ids, cache=None, start=0):
        x = self.embed(ids)
        n, t, _ = x.shape
        q, k, v = self.wqkv(self.norm1(x)).view(n, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        cos, sin = self.rotary(torch.arange(start, start + t))
        q, k = q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin
        if cache is not None:
            cache[0][:, :, start : start + t], cache[1][:, :, start : start + t] = k, v
            k, v = cache[0][:, :, : start + t], cache[1][:, :, : start + t]
        mask = torch.full((t, start + t), float("-inf")).triu(1 + start)
        scores = torch.matmul(q, k.transpose(2, 3)) / math.sqrt(q.size(-1)) + mask
        h = F.softmax(scores.float(), dim=-1).type_as(q) @ v
        x = x + self.wo(h.transpose(1, 2).reshape(n, t, -1))
        h = self.norm2(x)
        x = x + self.w2(F.silu(self.w1(h)) * self.w3(h))
        return self.output(self.norm(x)).float()


@kind("Llama with a KV cache", steps=20)
def llama():
    model = Llama()
    x = tokens()

    def loss():
        cache = [torch.zeros(8, 2, 12, 8) for _ in range(2)]
        with torch.no_grad():
            model(x[:, :6], cache)
            continued = model(x[:, 6:-1], cache, 6)
            assert continued.isfinite().all()
        logits = model(x[:, :-1])
        torch.testing.assert_close(continued, logits[:, 6:].detach(), atol=0.1, rtol=0.1)
        return F.cross_entropy(logits.reshape(-1, 16), x[:, 1:].reshape(-1))

    return model, loss


class FNet(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.embed, self.norm1, self.norm2 = nn.Embedding(16, dim), nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.ff = nn.Sequential(nn.Linear(dim, 32), nn.GELU(), nn.Linear(32, dim))
        self.out = nn.Linear(dim, 3)

    def forward(self, ids):
        x = self.embed(ids)
        x = self.norm1(x + torch.fft.fft(torch.fft.fft(x, dim=-1), dim=-2).real)
        return self.out(self.norm2(x + self.ff(x)).mean(1))


@kind("FNet", steps=15)
def fnet():
    model = FNet()
    x, y = tokens(16), torch.arange(16) % 3
    x[:, 2:5] = y[:, None]
    return model, lambda: F.cross_entropy(model(x), y)


def alibi_slopes(heads):
    return torch.tensor([2.0 ** (-8.0 * (i + 1) / heads) for i in range(heads)])


@next_token("ALiBi in nn.MultiheadAttention", steps=20)
class Alibi(nn.Module):
    def __init__(self, dim=16, heads=2):
        super().__init__()
        self.embed, self.attn = nn.Embedding(16, dim), nn.MultiheadAttention(dim, heads, batch_first=True)
        self.out = nn.Linear(dim, 16)
        distance = torch.arange(12)[None] - torch.arange(12)[:, None]
        self.bias = alibi_slopes(heads)[:, None, None] * distance.clamp(max=0)

    def forward(self, ids):
        x = self.embed(ids)
        causal = torch.triu(torch.full((12, 12), float("-inf")), diagonal=1)
        mask = (self.bias + causal).repeat(len(ids), 1, 1)
        y, _ = self.attn(x, x, x, attn_mask=mask, need_weights=False)
        return self.out(x + y)
