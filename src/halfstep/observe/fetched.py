"""Numbers of a device on their way to the host, which nothing waits for."""

from __future__ import annotations

import torch

__all__ = ["Fetched"]


class Fetched:
    """A tensor on its way to the host: a copy is queued behind the work of its device.

    Args:
        tensor: on any device.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._passed: torch.Event | None = None
        self._host = tensor
        if tensor.device.type != "cpu":
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._passed = torch.Event(tensor.device)
            self._passed.record(torch.accelerator.current_stream(tensor.device))

    @property
    def ready(self) -> bool:
        """Whether ``get`` need not wait."""
        return self._passed is None or self._passed.query()

    def get(self) -> torch.Tensor:
        """The tensor on the host."""
        if self._passed is not None:
            self._passed.synchronize()
        return self._host
