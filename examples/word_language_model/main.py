"""Train a recurrent language model on the source of Python's standard library, in 16 bits with FP16_Optimizer."""

from __future__ import annotations

import argparse
import math
import re
import sysconfig
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import nn

from halfstep.fp16_utils import FP16_Optimizer

WORDS = re.compile(r"\n *|[A-Za-z_]\w*|\d+|[^\w\s]")


class Corpus:
    """The words of the standard library's top-level modules as numbers: nine tenths to train on, one to test."""

    def __init__(self, characters: int, vocabulary: int) -> None:
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        text = ""
        for file in files:
            text += file.read_text(encoding="utf-8", errors="ignore")
            if len(text) > characters:
                break
        words = WORDS.findall(text[:characters])
        common = [word for word, _ in Counter(words).most_common(vocabulary - 1)]
        self.words = ["<unk>", *common]
        index = {word: i for i, word in enumerate(self.words)}
        ids = torch.tensor([index.get(word, 0) for word in words])
        self.train, self.valid = ids[: len(ids) * 9 // 10], ids[len(ids) * 9 // 10 :]


class RNNModel(nn.Module):
    """Embedding, a stack of recurrent layers, and scores for the next word."""

    def __init__(self, kind: str, vocabulary: int, width: int, layers: int, dropout: float, tied: bool) -> None:
        super().__init__()
        self.drop = nn.Dropout(dropout)
        self.embed = nn.Embedding(vocabulary, width)
        self.rnn = {"LSTM": nn.LSTM, "GRU": nn.GRU}[kind](width, width, layers, dropout=dropout if layers > 1 else 0.0)
        self.score = nn.Linear(width, vocabulary)
        if tied:
            self.score.weight = self.embed.weight
        nn.init.uniform_(self.embed.weight, -0.1, 0.1)

    def forward(self, words: torch.Tensor, hidden: object = None) -> tuple[torch.Tensor, object]:
        """Scores [time, batch, vocabulary] for word numbers [time, batch], and the hidden state after them."""
        output, hidden = self.rnn(self.drop(self.embed(words)), hidden)
        return self.score(self.drop(output)), hidden


def columns(ids: torch.Tensor, batch: int) -> torch.Tensor:
    """Cut one long text into ``batch`` texts side by side: [time, batch]."""
    length = len(ids) // batch
    return ids[: length * batch].view(batch, length).t().contiguous()


def pieces(text: torch.Tensor, bptt: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield pieces of ``bptt`` words, each with the words that follow its words."""
    for i in range(0, len(text) - 1, bptt):
        length = min(bptt, len(text) - 1 - i)
        yield text[i : i + length], text[i + 1 : i + 1 + length]


def detach(hidden: object) -> object:
    """The same hidden state, without its autograd graph."""
    if isinstance(hidden, torch.Tensor):
        return hidden.detach()
    assert isinstance(hidden, tuple)
    return tuple(h.detach() for h in hidden)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="LSTM", choices=["LSTM", "GRU"])
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--characters", type=int, default=1_000_000, help="how much text to read")
    parser.add_argument("--vocabulary", type=int, default=4000)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--tied", action="store_true", help="one weight for embedding and scores")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--bptt", type=int, default=35, help="steps through time a gradient goes back")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--clip", type=float, default=0.25)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16", choices=["float16", "bfloat16"])
    parser.add_argument("--static-loss-scale", type=float, help="default: a dynamic one")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> float:
    """Train, and return the perplexity on held-out text."""
    args = parse(argv)
    torch.manual_seed(0)
    corpus = Corpus(args.characters, args.vocabulary)
    size = len(corpus.words)
    model = RNNModel(args.model, size, args.width, args.layers, args.dropout, args.tied)
    model = model.to(args.device, getattr(torch, args.dtype))
    dynamic = args.static_loss_scale is None
    optimizer = FP16_Optimizer(
        torch.optim.Adam(model.parameters(), lr=args.lr),
        static_loss_scale=args.static_loss_scale or 1.0,
        dynamic_loss_scale=dynamic,
        dynamic_loss_args={"init_scale": 2.0**12} if dynamic else None,
        verbose=False,
    )
    train = columns(corpus.train, args.batch_size).to(args.device)
    valid = columns(corpus.valid, 8).to(args.device)
    perplexity = evaluate(model, valid, args.bptt)
    for epoch in range(args.epochs):
        model.train()
        hidden: object = None
        total, count = torch.zeros((), device=args.device), 0
        for words, following in pieces(train, args.bptt):
            optimizer.zero_grad()
            scores, hidden = model(words, hidden)
            hidden = detach(hidden)
            loss = nn.functional.cross_entropy(scores.float().view(-1, size), following.reshape(-1))
            optimizer.backward(loss)
            optimizer.clip_master_grads(args.clip)
            optimizer.step()
            total, count = total + loss.detach(), count + 1
        perplexity = evaluate(model, valid, args.bptt)
        loss_scale = optimizer.loss_scale
        print(f"epoch {epoch + 1}: loss {total.item() / count:.3f}, perplexity {perplexity:.1f}, scale {loss_scale}")
    print(write(model, corpus, 40))
    return perplexity


@torch.no_grad()
def evaluate(model: nn.Module, text: torch.Tensor, bptt: int) -> float:
    """The perplexity of a text: e to the mean loss of a word."""
    model.eval()
    hidden: object = None
    total = torch.zeros((), device=text.device)
    for words, following in pieces(text, bptt):
        scores, hidden = model(words, hidden)
        total += nn.functional.cross_entropy(scores.float().flatten(0, 1), following.reshape(-1), reduction="sum")
    return math.exp(total.item() / ((len(text) - 1) * text.shape[1]))


@torch.no_grad()
def write(model: nn.Module, corpus: Corpus, length: int) -> str:
    """Let the model write ``length`` words, after the end of a line."""
    model.eval()
    device = next(model.parameters()).device
    word, hidden, found = torch.tensor([[corpus.words.index("\n")]], device=device), None, []
    for _ in range(length):
        scores, hidden = model(word, hidden)
        word = torch.multinomial(scores.float().view(-1).softmax(0), 1).view(1, 1)
        found.append(corpus.words[int(word)])
    return " ".join(found)


if __name__ == "__main__":
    main()
