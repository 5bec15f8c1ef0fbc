"""Every optimizer of torch with every setting of torch's own tests steps at O2 as it does on fp32 weights.

``tests/support/optimizer_sweep.py`` says how they are compared, and which optimizers it leaves out.
"""

from __future__ import annotations

import json

import pytest

from halfstep.kernels.backends import compiler
from tests.support.optimizer_sweep import HOWS
from tests.support.sweeps import Found, run

EXCEPTIONS = {"fused": {"Muon": "torch's products are bfloat16, and fused ones fp32 on a CPU without units for it"}}


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> Found:
    """In one way by the name of a setting, or with ``--combinations all`` in every way."""
    return run("optimizer_sweep", HOWS, request)


@pytest.mark.exhaustive
@pytest.mark.parametrize("how", HOWS)
def test_every_setting_steps_as_on_fp32_weights(found: Found, how: str) -> None:
    assert found[how]["cases"] > 60
    wrong = found[how]["wrong"]
    exceptions = EXCEPTIONS.get(how, {}) if compiler.available() else {}  # without it torch's own steps run
    assert not {name: problems for name, problems in wrong.items() if name.partition(",")[0] not in exceptions}, (
        json.dumps(wrong, indent=1)
    )
    assert exceptions.keys() <= {name.partition(",")[0] for name in wrong}
