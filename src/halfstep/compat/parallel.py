"""``DistributedDataParallel`` with Apex's arguments, and ``Reducer``."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from ..core.checks import arguments, check_between
from ..core.errors import ArgumentValueError, UsageError
from ..kernels.multi_tensor import group_rows
from ..stepping.ranks.ddp_hook import reduction_of

__all__ = ["DistributedDataParallel", "Reducer"]

_NO_MEANING = (
    *("allreduce_trigger_params", "retain_allreduce_buffers", "num_allreduce_streams", "allreduce_communicators"),
    *("gradient_average_split_factor", "prof"),
)
"""Arguments that have no meaning for torch's reducer."""

_warned_of: set[str] = set()


class DistributedDataParallel(torch.nn.parallel.DistributedDataParallel):
    """torch's ``DistributedDataParallel`` with the arguments of Apex's class.

    All ranks start with the parameters and buffers of rank 0. With an optimizer of ``amp`` and passes in
    ``scale_loss``, every rank steps with the mean over ranks of the sum over passes, after any mix of synced and
    unsynced passes. Otherwise only the last pass before a step may be synced, as with torch's wrapper.

    Args:
        module: the model, after ``amp.initialize``.
        message_size: the largest count of elements in a bucket.
        delay_allreduce: reduce after the whole backward pass, so that a pass need not use all parameters.
        shared_param: refused, as in Apex.
        allreduce_trigger_params: ignored, with one warning per process: only Apex's reducer used it.
        retain_allreduce_buffers: ignored in the same way.
        allreduce_always_fp32: send 16-bit gradients as fp32. Gradients of parameters with fp32 masters are always sent
            as fp32.
        num_allreduce_streams: ignored in the same way.
        allreduce_communicators: ignored in the same way.
        gradient_average: False leaves the sum over ranks, divided by ``gradient_predivide_factor``.
        gradient_predivide_factor: divide by this before the sum, so that 16-bit sums do not overflow, and by world
            size / factor after it. 1.0 divides by the world size before the sum, as torch does.
        gradient_average_split_factor: ignored in the same way.
        prof: ignored in the same way.

    Raises:
        ArgumentValueError: for ``shared_param``, or a factor or size that is not above zero.

    Source: Apex, ``apex.parallel.DistributedDataParallel``.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        message_size: int = 10_000_000,
        delay_allreduce: bool = False,
        shared_param: Any = None,
        allreduce_trigger_params: Any = None,
        retain_allreduce_buffers: bool = False,
        allreduce_always_fp32: bool = False,
        num_allreduce_streams: int = 1,
        allreduce_communicators: Any = None,
        gradient_average: bool = True,
        gradient_predivide_factor: float = 1.0,
        gradient_average_split_factor: float | None = None,
        prof: bool = False,
    ) -> None:
        given = arguments(locals())
        if shared_param is not None:
            raise ArgumentValueError("shared_param is gone; shared parameters need no care. Leave it out.")
        check_between("message_size", message_size)
        check_between("gradient_predivide_factor", gradient_predivide_factor)
        parameters = inspect.signature(DistributedDataParallel).parameters
        useless = [name for name in _NO_MEANING if given[name] != parameters[name].default]
        if useless and not _warned_of.issuperset(useless):
            _warned_of.update(useless)
            warnings.warn(
                f"DistributedDataParallel: {', '.join(useless)} have no meaning for torch's reducer; leave them out.",
                stacklevel=2,
            )
        bucket = 2.0**20 if delay_allreduce else message_size * 4 / 2**20  # MiB of fp32; one bucket for all gradients
        # The communication hook reads these attributes, and torch copies them together with the wrapper.
        self.allreduce_always_fp32 = allreduce_always_fp32
        self.gradient_predivide_factor = gradient_predivide_factor
        self.gradient_average = gradient_average
        super().__init__(module, bucket_cap_mb=bucket, find_unused_parameters=delay_allreduce)
        if (reduction := reduction_of(self)).changes_gradients:
            reduction.hook()  # also for optimizers that are not attached

    def disable_allreduce(self) -> None:
        """Keep gradients on this rank from the next backward pass on."""
        self.require_backward_grad_sync = False

    def enable_allreduce(self) -> None:
        """Average gradients from the next backward pass on, including the gradients accumulated before it."""
        self.require_backward_grad_sync = True


class Reducer:
    """An average of gradients over the ranks on request.

    Args:
        module_or_grads_list: a module whose gradients are reduced, or a list of gradients to reduce. The constructor
            broadcasts the parameters of a module from rank 0.

    Raises:
        UsageError: without a process group.
    """

    def __init__(self, module_or_grads_list: torch.nn.Module | Iterable[torch.Tensor]) -> None:
        if not dist.is_initialized():
            raise UsageError("Reducer needs torch.distributed.init_process_group first.")
        self.module: torch.nn.Module | None = None
        self.grads: list[torch.Tensor] = []
        if isinstance(module_or_grads_list, torch.nn.Module):
            self.module = module_or_grads_list
            with torch.no_grad():
                for param in self.module.parameters():
                    dist.broadcast(param, 0)
        else:
            self.grads = list(module_or_grads_list)

    @torch.no_grad()
    def reduce(self) -> None:
        """Replace each gradient by its mean over the ranks. Every rank must have the same gradients."""
        grads = self.grads
        if self.module is not None:
            grads = [param.grad for param in self.module.parameters() if param.grad is not None]
        for rows in group_rows(grads):
            group = [grads[i] for i in rows]
            flat = torch.cat([grad.flatten() for grad in group]).div_(dist.get_world_size())
            dist.all_reduce(flat)
            for grad, mean in zip(group, flat.split([g.numel() for g in group]), strict=True):
                grad.copy_(mean.view_as(grad))
