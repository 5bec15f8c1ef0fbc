"""Models of Transformers as they are, among them mixtures of experts, train at every level as they do in fp32."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="Transformers is not installed; `make integrations` does it")

from halfstep import amp
from tests.support.worlds import advance

CONFIGS = json.loads(Path(__file__).with_name("tiny_models.json").read_text(encoding="utf-8"))


def losses(name: str, level: str, half: torch.dtype) -> list[float]:
    torch.manual_seed(0)
    config = getattr(transformers, name + ("TextConfig" if name == "Gemma3" else "Config"))
    model = getattr(transformers, f"{name}ForCausalLM")(config(**CONFIGS["all"] | CONFIGS[name]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, dtype=half, loss_scale=128.0, verbosity=0)
    words, found = torch.randint(3, 64, (2, 16)), []
    for _ in range(2):
        found.append(model(input_ids=words, labels=words).loss)
        advance(found[-1], optimizer)
    return [loss.item() for loss in found]


@pytest.mark.costly
@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "all"])
def test_it_trains_for_two_steps(name: str, level: str, half: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    want, products, real = losses(name, "O0", half), [], torch.nn.functional.grouped_mm
    monkeypatch.setattr(
        "torch.nn.functional.grouped_mm", lambda *a, **k: products.append(real(*a, **k)) or products[-1]
    )
    assert losses(name, level, half) == pytest.approx(want, abs=0.02)
    assert {product.dtype for product in products} == ({half} if "num_experts" in CONFIGS[name] else set())
