"""The table of rules: what each code looks for, and what to do about it.

A rule looks at the facts and yields what it finds, nothing for a healthy recipe.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from . import rules_of_model as of_model
from . import rules_of_optimizer as of_optimizer
from .facts import Facts
from .finding import Finding, Found
from .rules_of_optimizer import ZERO_GRADIENTS_FIX

__all__ = ["RULES", "Rule", "finding"]

_USE_MASTERS = (
    "Use fp32 masters, from amp.initialize(..., opt_level='O2'), or for Adam, AdamW, SGD, Adagrad and "
    "Muon from optimizers.fuse(optimizer, master_weights=True)"
)


class Rule(NamedTuple):
    """What stands behind a code.

    Attributes:
        look: yields what it finds in the facts.
        fix: what to do; empty where what it finds has a fix of its own.
    """

    look: Callable[[Facts], Iterable[Found]]
    fix: str = ""


RULES: dict[str, Rule] = {
    "HS101": Rule(
        of_optimizer.lost_updates, f"{_USE_MASTERS}; or rounding='stochastic' of a fused optimizer for bfloat16."
    ),
    "HS102": Rule(of_optimizer.stuck_second_moment, f"{_USE_MASTERS}."),
    "HS103": Rule(of_optimizer.lost_weight_decay, f"{_USE_MASTERS}."),
    "HS104": Rule(of_model.sensitive_parts_in_16_bits),
    "HS105": Rule(of_model.loss_in_16_bits, "Compute it from logits.float(), or within amp.auto_cast, which does so."),
    "HS106": Rule(of_optimizer.eps_underflows, f"{_USE_MASTERS}; or eps=1e-4."),
    "HS107": Rule(
        of_optimizer.fp16_without_loss_scale,
        "Use a dynamic loss scale: amp.GradScaler(), or loss_scale='dynamic' of amp.initialize. Or train in bfloat16, "
        "which needs none. If there is a scaler, halfstep.check knows it by scaler=scaler only.",
    ),
    "HS108": Rule(of_optimizer.useless_scaler),
    "HS109": Rule(
        of_model.average_in_16_bits, "Average fp32 weights: amp.master_model(model) gives the masters as a model."
    ),
    "HS110": Rule(
        of_optimizer.accumulation_in_16_bits, f"{_USE_MASTERS}; or param.grad_dtype = torch.float32 (torch 2.13)."
    ),
    "HS111": Rule(of_model.no_units),
    "HS112": Rule(of_model.fp32_in_name_only),
    "HS113": Rule(of_optimizer.fused_and_foreach_differ, f"{_USE_MASTERS}."),
    "HS114": Rule(
        of_model.fsdp_reduces_in_16_bits,
        "MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32).",
    ),
    "HS115": Rule(
        of_optimizer.foreign_parameters,
        "Make the optimizer from model.parameters() after the model was built, moved and wrapped.",
    ),
    "HS118": Rule(of_model.inputs_that_a_cast_destroys),
    "HS119": Rule(
        of_model.buffers_that_a_cast_destroys,
        "Nothing is lost; ops that mix dtypes cost a cast. cast_ops=False of amp.initialize casts these buffers, too.",
    ),
    "HS121": Rule(of_optimizer.zero_gradients, f"{ZERO_GRADIENTS_FIX[0].upper()}{ZERO_GRADIENTS_FIX[1:]}."),
}
"""The rules by their codes, in the order of these."""


def finding(code: str, found: Found) -> Finding:
    """What a rule has found, with its code and what to do."""
    return Finding(code, *found[:4], found.fix or RULES[code].fix)
