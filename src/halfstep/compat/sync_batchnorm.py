"""BatchNorm over the batches of all ranks, exact also for batches of different sizes."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..core.checks import check_count, check_kind
from ..core.errors import ArgumentValueError
from ..torch_internals.torch_compat import BatchNorm, InstanceNorm, SyncBatchNormFunction, children_of

__all__ = ["SyncBatchNorm", "convert_syncbn_model", "create_syncbn_process_group", "normalize"]


def normalize(
    x: torch.Tensor, mean: torch.Tensor, inv_std: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None
) -> torch.Tensor:
    """Compute ``(x - mean) * inv_std * weight + bias``; the arguments broadcast and have one dtype."""
    y = (x - mean) * inv_std
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


class _Sum(torch.autograd.Function):
    """The sum over ranks, whose gradient is also summed over ranks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return _Sum.apply(grads[0], ctx.group), None  # type: ignore[no-untyped-call]


class SyncBatchNorm(BatchNorm):
    """BatchNorm with statistics over the batches of all ranks, on any device.

    Statistics are computed in fp32 in two passes (mean, then squared distances from the mean). All values have equal
    weight, so that unequal batches give the same result as one large batch. The output has the dtype of the input.
    Without a process group, and in evaluation, the layer is an ordinary BatchNorm. On CUDA it calls torch's kernels. It
    does not subclass ``nn.SyncBatchNorm``, which ``DistributedDataParallel`` refuses on a CPU.

    Args:
        num_features: channels, dimension 1 of the input; the last dimension with ``channel_last``.
        eps: added to the variance.
        momentum: the momentum of the running statistics; None averages over all batches.
        affine: create a weight and a bias.
        track_running_stats: keep running statistics.
        process_group: ranks that share statistics; None means all.
        channel_last: the input has its channels last.
        fuse_relu: apply ReLU to the result.

    Source: Apex, ``apex.parallel.SyncBatchNorm``.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: Any = None,
        channel_last: bool = False,
        fuse_relu: bool = False,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self.process_group = process_group
        self.channel_last = channel_last
        self.fuse_relu = fuse_relu

    def forward(self, input: torch.Tensor, z: torch.Tensor | None = None) -> torch.Tensor:
        """Normalize a batch.

        Args:
            input: a floating tensor of shape [N, C, ...], or [N, ..., C] with ``channel_last``.
            z: a tensor to add before the ReLU.

        Raises:
            ArgumentValueError: in training, if all ranks together have only one value for a channel.
        """
        x = input.movedim(-1, 1) if self.channel_last and input.dim() > 2 else input
        y = self._normalize(x)
        if y is not x and self.channel_last and input.dim() > 2:
            y = y.movedim(1, -1)
        if z is not None:
            y = y + z
        return torch.relu(y) if self.fuse_relu else y

    def _normalize(self, x: torch.Tensor) -> torch.Tensor:
        batch = self.training or self.running_mean is None
        together = batch and dist.is_available() and dist.is_initialized() and self._world() > 1
        if together and x.is_cuda:
            return self._on_cuda(x)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        if not batch:
            assert self.running_mean is not None
            assert self.running_var is not None
            mean, var = self.running_mean.to(wide.dtype), self.running_var.to(wide.dtype)
        else:
            mean, var = self._statistics(wide, together)
        shape = [1, -1, *[1] * (x.dim() - 2)]
        given: Any = mean, (var + self.eps).rsqrt(), self.weight, self.bias
        of_channels: list[Any] = [None if t is None else t.to(wide.dtype).view(shape) for t in given]
        return normalize(wide, *of_channels).to(x.dtype)

    def _on_cuda(self, x: torch.Tensor) -> torch.Tensor:
        group = dist.group.WORLD if self.process_group is None else self.process_group
        mean, var = (self.running_mean, self.running_var) if self.training else (None, None)
        share = self._share() if mean is not None else 0.0
        y: torch.Tensor = SyncBatchNormFunction.apply(
            x, self.weight, self.bias, mean, var, self.eps, share, group, self._world()
        )
        return y

    def _share(self) -> float:
        """Count a batch, and return its weight in the running statistics."""
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        return 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum

    def _statistics(self, x: torch.Tensor, together: bool) -> tuple[torch.Tensor, torch.Tensor]:
        dims = [0, *range(2, x.dim())]
        group = self.process_group

        def total(value: torch.Tensor) -> torch.Tensor:
            return _Sum.apply(value, group) if together else value  # type: ignore[no-untyped-call]

        count = x.new_tensor([x.numel() / max(x.shape[1], 1)])
        sums = total(torch.cat([x.sum(dims), count]))
        n = sums[-1].detach()
        if n <= 1:
            raise ArgumentValueError(
                f"SyncBatchNorm in training needs more than one value for a channel over all ranks; the input here has "
                f"shape {tuple(x.shape)}."
            )
        mean = sums[:-1] / n
        centred = x - mean.view([1, -1, *[1] * (x.dim() - 2)])
        var = total(centred.square().sum(dims)) / n
        self._track(mean.detach(), var.detach() * (n / (n - 1)))
        return mean, var

    @torch.no_grad()
    def _track(self, mean: torch.Tensor, var: torch.Tensor) -> None:
        if self.running_mean is None or self.running_var is None or not self.training:
            return
        share = self._share()
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        self.running_var.lerp_(var.to(self.running_var.dtype), share)

    def _world(self) -> int:
        return dist.get_world_size(self.process_group)


def convert_syncbn_model(module: nn.Module, process_group: Any = None, channel_last: bool = False) -> nn.Module:
    """Replace every BatchNorm of a model by a ``SyncBatchNorm`` with the same parameters and running statistics.

    Args:
        module: the model, changed in place unless it is a BatchNorm.
        process_group: ranks that share statistics; None means all.
        channel_last: the argument of ``SyncBatchNorm``.

    Returns:
        The model.
    """
    check_kind("convert_syncbn_model: module", module, nn.Module, "a torch.nn.Module")
    made: dict[nn.Module, nn.Module] = {}  # a module with two names gets one replacement

    def convert(old: nn.Module) -> nn.Module:
        if old not in made:
            made[old] = _converted(old, process_group, channel_last)
            for name, child in children_of(old).items():
                if child is not None:
                    setattr(old, name, convert(child))
        return made[old]

    return convert(module)


def _converted(module: nn.Module, process_group: Any, channel_last: bool) -> nn.Module:
    """Return a ``SyncBatchNorm`` in place of a BatchNorm; return any other module unchanged."""
    if isinstance(module, BatchNorm) and not isinstance(module, (SyncBatchNorm, InstanceNorm)):
        track = module.track_running_stats
        made = SyncBatchNorm(
            module.num_features, module.eps, module.momentum, module.affine, track, process_group, channel_last
        )
        made.weight, made.bias = module.weight, module.bias
        made.running_mean, made.running_var = module.running_mean, module.running_var
        made.num_batches_tracked = module.num_batches_tracked
        return made.train(module.training)
    return module


def create_syncbn_process_group(group_size: int) -> Any:
    """Create groups of neighbouring ranks that share BatchNorm statistics. Every rank must call it.

    Args:
        group_size: ranks in a group, a divisor of the world size; 0 means all.

    Returns:
        This rank's group, or None for 0.

    Raises:
        ArgumentValueError: if ``group_size`` does not divide the world size.
    """
    check_count("group_size", group_size, least=0)
    if group_size == 0:
        return None
    world, rank = dist.get_world_size(), dist.get_rank()
    if world % group_size:
        raise ArgumentValueError(f"group_size={group_size} must divide the world size, {world}, or be 0 for all ranks.")
    groups = [dist.new_group(list(range(first, first + group_size))) for first in range(0, world, group_size)]
    return groups[rank // group_size]
