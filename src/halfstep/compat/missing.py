"""The modules of Apex that are not here: importing one says what to use."""

from __future__ import annotations

import importlib.abc
import sys
from collections.abc import Sequence
from types import ModuleType

from ..core.errors import MissingModuleError

__all__ = ["refuse_missing"]

_TREE = f"{__package__}.apex."
_OTHERWISE = {
    "transformer": "Use Megatron-LM, or torch.distributed.tensor.parallel and torch.distributed.pipelining.",
    "contrib.bottleneck": "Use torchvision's Bottleneck with DistributedDataParallel.",
    "contrib.conv_bias_relu": "Use torch.nn.Conv2d and torch.relu under torch.compile, which fuses them.",
    "contrib.cudnn_gbn": "Use apex.parallel.SyncBatchNorm with a process group.",
    "contrib.fmha": "Use torch.nn.functional.scaled_dot_product_attention.",
    "contrib.gpu_direct_storage": "Use torch.cuda.gds.",
    "contrib.groupbn": "Use apex.parallel.SyncBatchNorm with a process group, and channels_last.",
    "contrib.index_mul_2d": "Use in1[idx] * in2.",
    "contrib.nccl_allocator": "Use torch.cuda.MemPool.",
    "contrib.openfold_triton": "Use torch.nn.functional.scaled_dot_product_attention and torch.nn.LayerNorm.",
    "contrib.peer_memory": "Use torch.distributed with the NCCL backend.",
    "contrib.transducer": "Use torchaudio.functional.rnnt_loss.",
}


class _Missing(importlib.abc.MetaPathFinder):
    """Stands last, and so is asked only for what is not there."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        name = fullname.removeprefix(_TREE)
        if name != fullname and name in _OTHERWISE:
            # Without the name of the module, or `from apex import X` takes this for any name that is not there.
            raise MissingModuleError(f"halfstep does not have apex.{name}. {_OTHERWISE[name]}")


_finder = _Missing()


def refuse_missing() -> None:
    """Say from now on, where one of these modules is imported, what to use."""
    if _finder not in sys.meta_path:
        sys.meta_path.append(_finder)
