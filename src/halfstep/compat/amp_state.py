"""Apex's ``amp._amp_state``, by which some scripts read and set the settings of the latest session."""

from __future__ import annotations

import torch

from ..amp.loss_scaler import LossScaler
from ..amp.options import ResolvedProperties
from ..amp.session import Session, latest, require_session
from ..casting.current import clear_cache
from ..casting.modules import ModuleHooks, hooks_of
from ..casting.scope import deactivate, disable_casts, sessions
from .casting_switch import CastingSwitch

__all__ = ["AmpState"]


class StateHandle(CastingSwitch):
    """Apex's ``amp._amp_state.handle``, which some scripts use: the process-wide op casting."""

    disable_casts = staticmethod(disable_casts)

    def _clear_cache(self) -> None:
        clear_cache()

    def _deactivate(self) -> None:
        """End all O1 casts, also in models and their copies, whose ops then compute in the dtype of their inputs."""
        for owner in [owner() for session in sessions for owner in session.owners]:
            hooks = hooks_of(owner) if isinstance(owner, torch.nn.Module) else owner
            if isinstance(hooks, ModuleHooks) and hooks.passes is None:  # 16-bit weights need the casts
                hooks.casting = None
        deactivate()


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

    @property
    def session(self) -> Session | None:
        """The latest session."""
        return latest.session

    @session.setter
    def session(self, session: Session | None) -> None:
        latest.session = session

    @property
    def loss_scalers(self) -> list[LossScaler]:
        """The loss scalers of the latest session."""
        return require_session("amp._amp_state.loss_scalers").loss_scalers

    @loss_scalers.setter
    def loss_scalers(self, scalers: list[LossScaler]) -> None:
        self.loss_scalers[:] = scalers

    @property
    def min_loss_scale(self) -> float | None:
        """The floor of the loss scales; setting it sets the floor of every scaler."""
        return self.loss_scalers[0].settings.min_scale

    @min_loss_scale.setter
    def min_loss_scale(self, scale: float | None) -> None:
        for scaler in self.loss_scalers:
            scaler._min_loss_scale = scale

    @property
    def max_loss_scale(self) -> float | None:
        """The ceiling of the loss scales; setting it sets the ceiling of every scaler."""
        return self.loss_scalers[0].settings.max_scale

    @max_loss_scale.setter
    def max_loss_scale(self, scale: float | None) -> None:
        for scaler in self.loss_scalers:
            scaler._max_loss_scale = scale

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
