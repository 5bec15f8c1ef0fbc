"""Every op of torch, with 16-bit tensors alone and beside fp32 ones, is right at O1 and O2 or has an error of ours.

``tests/support/op_sweep.py`` says what right is. Here is what torch itself cannot do.
"""

from __future__ import annotations

import json

import pytest

from tests.support.sweeps import Found, run

SCALED = "torch multiplies 8-bit floats only"
LAYOUT = "torch cannot cast the dense gradient of a sparse 16-bit matrix"
OVERFLOW = "its gradient overflows in float16"
EXCEPTIONS: dict[str, str] = {  # why
    "torch._scaled_mm": SCALED,
    "torch._scaled_mm_v2": SCALED,
    "sparse.sampled_addmm": LAYOUT,
    "sparse @, to_sparse_coo": LAYOUT,
    "sparse @, to_sparse_csr": LAYOUT,
    "addmm, to_sparse_coo": LAYOUT,
    "addmm, to_sparse_csr": LAYOUT,
    "polygamma.polygamma_n_4": OVERFLOW,
    "special.polygamma.special_polygamma_n_0": OVERFLOW,
    "linalg.pinv.singular": "its sample is a product, and has another rank when that is rounded",
    "kl_divergence(Gamma)": "two numbers that are nearly the same are subtracted in 16 bits",
}
CANCELS = "its gradient is a difference of numbers that are nearly the same, in 16 bits"
WHOLE: dict[str, str] = {  # more of them with --combinations all
    **dict.fromkeys(("native_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update"), CANCELS),
    **dict.fromkeys(("corrcoef", "cov", "nn.functional.normalize", "nn.functional.layer_norm"), CANCELS),
    **dict.fromkeys([f"nn.functional.{name}" for name in ("elu", "celu", "selu")], "in place: from a rounded result"),
    **dict.fromkeys([f"polygamma.polygamma_n_{n}" for n in range(4)], OVERFLOW),
    **dict.fromkeys(("__rdiv__", "pow", "__rpow__"), OVERFLOW),
    "native_layer_norm": "a private form of layer_norm, whose gradient refuses mixed dtypes",
    "sparse +": LAYOUT,
}
LEVELS = ("O1", "O2")


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> Found:
    """Of one sample and form of each op, or with ``--combinations all`` of several and all."""
    return run("op_sweep", LEVELS, request)


@pytest.mark.exhaustive
@pytest.mark.parametrize("level", LEVELS)
def test_every_op_is_right_or_refused(found: Found, level: str) -> None:
    assert found[level]["cases"] > 1000
    wrong = {name: problems for name, problems in found[level]["wrong"].items() if name not in EXCEPTIONS | WHOLE}
    assert not wrong, json.dumps(wrong, indent=1)


@pytest.mark.exhaustive
@pytest.mark.parametrize("level", LEVELS)
def test_no_exception_is_needed_no_more(found: Found, level: str) -> None:
    assert EXCEPTIONS.keys() - {"torch._scaled_mm"} <= found[level]["wrong"].keys()  # a CPU with AMX refuses it alike


@pytest.mark.exhaustive
def test_what_halfstep_refuses(found: Found) -> None:
    refused = {name for level in found.values() for name in level["refused"]}
    assert refused <= {"nn.functional.binary_cross_entropy"}
