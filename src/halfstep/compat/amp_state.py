"""Apex's ``amp._amp_state``, by which some scripts read and set the settings of the latest session."""

from __future__ import annotations

from typing import Any

import torch

from ..amp.loss_scaler import LossScaler
from ..amp.options import ResolvedProperties
from ..amp.session import Session, latest, require_session
from ..casting.modules import ModuleHooks, hooks_of
from ..casting.scope import deactivate, sessions
from .casting_switch import CastingSwitch
from .optimizer_wrapper import forwarded

__all__ = ["AmpState"]


class StateHandle(CastingSwitch):
    """Apex's ``amp._amp_state.handle``, which some scripts use: the process-wide op casting."""

    def _deactivate(self) -> None:
        """End all O1 casts, also in models and their copies, whose ops then compute in the dtype of their inputs."""
        for owner in [owner for session in sessions for owner in session.owners]:
            hooks = hooks_of(owner) if isinstance(owner, torch.nn.Module) else owner
            if isinstance(hooks, ModuleHooks) and hooks.passes is None:  # 16-bit weights need the casts
                hooks.casting = None
        deactivate()


def _of_all_scalers(name: str, doc: str) -> Any:
    """Make a property that reads an attribute of the first loss scaler, and sets it in every loss scaler."""

    def set_all(state: AmpState, value: Any) -> None:
        for scaler in state.loss_scalers:
            setattr(scaler, name, value)

    return property(lambda state: getattr(state.loss_scalers[0], name), set_all, doc=doc)


class AmpState:
    """``amp._amp_state`` of Apex, which some scripts use: the latest session, and switches.

    Attributes:
        allow_incoming_model_not_fp32: kept for Apex: ``initialize`` takes a model that has 16-bit parameters already.
        hard_override: kept for Apex.
        handle: ``is_active``, ``disable_casts`` and ``_deactivate``.
    """

    def __init__(self) -> None:
        self.allow_incoming_model_not_fp32 = False
        self.hard_override = False
        self.handle = StateHandle()

    _latest = latest
    session: Session | None = forwarded("_latest.session", "The latest session.")

    @property
    def loss_scalers(self) -> list[LossScaler]:
        """The loss scalers of the latest session."""
        return require_session("amp._amp_state.loss_scalers").loss_scalers

    @loss_scalers.setter
    def loss_scalers(self, scalers: list[LossScaler]) -> None:
        self.loss_scalers[:] = scalers

    min_loss_scale: float | None = _of_all_scalers(
        "_min_loss_scale", "The floor of the loss scales; setting it sets the floor of every scaler."
    )
    max_loss_scale: float | None = _of_all_scalers(
        "_max_loss_scale", "The ceiling of the loss scales; setting it sets the ceiling of every scaler."
    )

    @property
    def opt_properties(self) -> ResolvedProperties:
        """The options of the latest session."""
        return require_session("amp._amp_state.opt_properties").options

    @property
    def verbosity(self) -> int:
        """The verbosity of the latest session."""
        return require_session("amp._amp_state.verbosity").verbosity

    @verbosity.setter
    def verbosity(self, level: int) -> None:
        require_session("amp._amp_state.verbosity").verbosity = level
        for scaler in self.loss_scalers:
            scaler.verbose = level > 0


_amp_state = AmpState()
