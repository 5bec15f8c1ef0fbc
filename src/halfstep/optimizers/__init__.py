"""Fused optimizers: unscale, clip, update and cast in one pass, with masters that cost two bytes a weight."""

from .adagrad import FusedAdagrad
from .adam import FusedAdam
from .fuse import can_fuse, fuse, unfuse
from .lamb import FusedLAMB, FusedMixedPrecisionLamb
from .larc import LARC
from .muon import FusedMuon
from .novograd import FusedNovoGrad
from .sgd import FusedSGD

__all__ = [
    "LARC",
    "FusedAdagrad",
    "FusedAdam",
    "FusedLAMB",
    "FusedMixedPrecisionLamb",
    "FusedMuon",
    "FusedNovoGrad",
    "FusedSGD",
    "can_fuse",
    "fuse",
    "unfuse",
]
__dir__ = __all__.copy
