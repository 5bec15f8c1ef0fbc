"""Models of the kinds that people train, unchanged: they end where they end in fp32, at O1 and O2 in both dtypes."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch

from halfstep import HalfstepError
from tests.support.worlds import in_both_halves

from . import generative, graphs, language, others, recurrent, reported, reported_vision, vision  # noqa: F401
from .kinds import KINDS
from .training import Losses, train

REFUSED = {  # by the level: halfstep's own error
    ("Barlow Twins", "O1"): "pow_ runs in fp32.*use the out-of-place form"
}


@functools.cache
def in_fp32(name: str) -> Losses:
    return train(KINDS[name])


QUICK = ("VQ-VAE", "FNet", "MAML", "GNN by scatter", "T5, relative bias", "rotation by SVD", "RealNVP by log_prob")
SOME_KINDS = [name if name in QUICK else pytest.param(name, marks=pytest.mark.exhaustive) for name in KINDS]


@pytest.mark.parametrize("name", SOME_KINDS)
def test_the_problem_can_be_learned(name: str) -> None:
    begin, end = in_fp32(name)
    assert begin - end > 0.3 * abs(begin)


@in_both_halves
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("name", SOME_KINDS)
def test_a_model_ends_where_it_ends_in_fp32(name: str, level: str, half: torch.dtype) -> None:
    if (name, level) in REFUSED:
        with pytest.raises(HalfstepError, match=REFUSED[name, level]):
            train(KINDS[name], level, half, steps=1)
        return
    begin, end = in_fp32(name)
    found = train(KINDS[name], level, half)
    limit = 0.1 if name.startswith("VAE") and torch.__version__ < "2.13" else 0.05  # other noise in 2.11
    assert found.begin == pytest.approx(begin, rel=0.05, abs=0.01)
    assert found.end == pytest.approx(end, rel=limit, abs=0.02 * abs(begin - end))


MIXES = {
    *("diffusion, time steps 0 to 999", "VQ-VAE", "RealNVP by log_prob"),
    *("T5, relative bias", "Llama with a KV cache", "FNet"),
    *("GNN by scatter", "GNN by a sparse product", "SAC with Beta", "MAML", "Fourier neural operator"),
    *("Bayes by backprop", "Mamba scan", "mixture of experts", "detection"),
    *("orthogonal weights", "spectrogram by stft", "Glow", "checkpointing, PReLU, Bilinear"),
    *("rotation by SVD", "a branch that comes in later"),
}
"""Kinds with an op that torch refuses where all weights are 16 bits, for two dtypes or for want of a kernel.

``nn.LSTM`` and ``nn.GRU`` with fp32 states are none: their hooks cast what they are given, also without ops that meet.
"""


@pytest.mark.parametrize("name", KINDS)
def test_which_kinds_need_ops_that_meet(name: str) -> None:
    try:
        train(KINDS[name], "O2", steps=11 if KINDS[name].at_o2 else 1, cast_ops=False)
    except RuntimeError:
        assert name in MIXES
    else:
        assert name not in MIXES


def test_the_page_has_all_kinds() -> None:
    text = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    rows = [[cell.strip() for cell in line.split("|")] for line in text.splitlines() if line.startswith("| ")][1:]
    meet = {row[1].split(", `")[0]: row[7] == "yes" for row in rows}
    assert sorted(meet) == sorted(KINDS)
    assert {name for name in meet if meet[name]} == MIXES
