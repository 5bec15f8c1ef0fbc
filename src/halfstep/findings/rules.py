"""One function for each code. Each looks at the facts and yields what it finds, nothing for a healthy recipe."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from . import rules_of_gradients as of_gradients
from . import rules_of_model as of_model
from . import rules_of_optimizer as of_optimizer
from .facts import Facts
from .finding import Finding

__all__ = ["RULES"]

RULES: dict[str, Callable[[Facts], Iterable[Finding]]] = {
    "HS101": of_optimizer.lost_updates,
    "HS102": of_optimizer.stuck_second_moment,
    "HS103": of_optimizer.lost_weight_decay,
    "HS104": of_model.sensitive_parts_in_16_bits,
    "HS105": of_model.loss_in_16_bits,
    "HS106": of_optimizer.eps_underflows,
    "HS107": of_optimizer.fp16_without_loss_scale,
    "HS108": of_optimizer.useless_scaler,
    "HS109": of_model.average_in_16_bits,
    "HS110": of_optimizer.accumulation_in_16_bits,
    "HS111": of_model.no_units,
    "HS112": of_model.fp32_in_name_only,
    "HS113": of_optimizer.fused_and_foreach_differ,
    "HS114": of_model.fsdp_reduces_in_16_bits,
    "HS115": of_optimizer.foreign_parameters,
    "HS121": of_gradients.zero_gradients,
}
