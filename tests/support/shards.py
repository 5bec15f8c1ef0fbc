"""What tests on shards share: the mesh of all ranks, and sharded checkpoints."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["load", "mesh", "save", "state_dicts", "whole"]


@functools.cache
def mesh() -> Any:
    """The mesh of all ranks, in a process that stays in one process group."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (dist.get_world_size(),))


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of all of a tensor, of which this rank may have a part."""
    full: Any = getattr(tensor.detach(), "full_tensor", lambda: tensor.detach())
    return full().clone()  # type: ignore[no-any-return]


def state_dicts(model: Any, optimizer: Any, **options: Any) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    weights, state = get_state_dict(model, optimizer, options=StateDictOptions(**options))
    return {"model": weights, "optimizer": state}


def save(model: Any, optimizer: Any, folder: str | Path) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.save(state_dicts(model, optimizer), checkpoint_id=folder)


def load(model: Any, optimizer: Any, folder: str | Path) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import set_state_dict

    saved = state_dicts(model, optimizer)
    dcp.load(saved, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])
