"""FlatGrad: the gradient of one FlatParam: this rank's local sum, and its shard of the reduced gradient."""

from __future__ import annotations

import torch

from zeroshard.engine.flat_param import FlatParam
from zeroshard.engine.parameter import pop_autograd_grads, zero_autograd_grads
from zeroshard.memory import Arena
from zeroshard.sharding import Range


class FlatGrad:
    """The gradient of one trainable flat: this rank's local sum, and its shard of the reduced gradient."""

    def __init__(self, flat: FlatParam, dtype: torch.dtype) -> None:
        self.flat = flat
        self.dtype = dtype
        self.local_sum: torch.Tensor | None = None  # [numel]: this rank's sum, not reduced yet
        self.shard: torch.Tensor | None = None  # [shard_numel]: this rank's shard of the mean over the ranks
        # for each bucket inside one parameter, its range in that; else None
        self.single_param_buckets = [flat.layout.single_param(bucket) for bucket in flat.layout.buckets]
        self.has_single_param_buckets = any(bucket is not None for bucket in self.single_param_buckets)
        self.bucket_shards: list[torch.Tensor] = []  # views of ``shard``, by bucket, if gradients are partitioned
        self.carried_over: torch.Tensor | None = None  # [shard_numel]: reduced before ``local_sum`` was reused
        self.arena: Arena | None = None  # holds ``shard``, or ``local_sum`` if gradients are replicated
        self.has_local_sum = False
        self.has_shard = False
        self.is_param_used = [False] * len(flat.parameters)  # has got a gradient on this rank since zero_grad()
        self.norms: dict[int, list[torch.Tensor]] = {}  # by bucket, if offloaded: recorded before the copy
        self.max_abs: dict[int, list[torch.Tensor]] = {}  # the same for the infinity norm, under fp16
        self.copy_done: torch.cuda.Event | None = None  # when an offloaded shard is complete
        self.local_sum_views: list[torch.Tensor] = []  # each parameter's view of ``local_sum``
        self.is_offloaded = flat.tier_placement.gradients != "device"

    @property
    def needs_reduce_buffer(self) -> bool:
        """Return whether buckets are reduced into a buffer first, to be added to the shard or to be offloaded."""
        return self.has_shard or (self.is_offloaded and self.flat.layout.shard_count > 1)

    def set_shard(self, shard: torch.Tensor) -> None:
        """Use ``shard`` for the reduced gradient from now on."""
        self.shard = shard
        self.bucket_shards = [shard[span.slice] for span in self.flat.shard_ranges]

    def set_local_sum(self, local_sum: torch.Tensor) -> None:
        """Use ``local_sum`` for this rank's sum from now on."""
        self.local_sum = local_sum
        self.local_sum_views = [self.flat.view(local_sum, index) for index in range(len(self.flat.parameters))]

    def detach_arena(self) -> None:
        """Drop all references to the arena, because the user may hold views of it."""
        self.arena = self.local_sum = self.shard = None
        self.local_sum_views, self.bucket_shards = [], []

    def wait_copy(self) -> None:
        """Wait until an offloaded shard is copied completely."""
        if self.copy_done is not None:
            self.copy_done.synchronize()

    def norm_ranges(self, bucket_index: int, include_replicated: bool) -> list[Range]:
        """Return the ranges of one bucket's shard that count in a norm.

        Without ``include_replicated``, only those that are not replicated over the tensor axis.
        """
        bucket_range = self.flat.shard_ranges[bucket_index]
        spans = [bucket_range] if include_replicated else self.flat.tp_sharded_ranges()
        return [common for span in spans if (common := span.intersect(bucket_range)) is not None]

    def pop_autograd_grads(self) -> list[torch.Tensor | None]:
        """Return the gradients that autograd has stored in the parameters' ``grad``, and clear it."""
        autograd_grads = pop_autograd_grads(self.flat.parameters)
        self.is_param_used = [
            was_used or grad is not None for was_used, grad in zip(self.is_param_used, autograd_grads, strict=True)
        ]
        return autograd_grads

    def clear_norms(self) -> None:
        """Clear the norms that were recorded before the copy, because the gradient changes."""
        self.norms.clear()
        self.max_abs.clear()

    def clear_param(self, index: int) -> None:
        """Clear the gradient of one parameter."""
        self.is_param_used[index] = False
        pop_autograd_grads(self.flat.parameters[index : index + 1])
        self.zero_param(index)

    def zero_param(self, index: int) -> None:
        """Set the gradient of one parameter to zero."""
        self.clear_norms()
        zero_autograd_grads(self.flat.parameters[index : index + 1])
        if self.has_local_sum:
            self.local_sum_views[index].zero_()
        reduced = self.shard if self.carried_over is None else self.carried_over
        if self.has_shard and reduced is not None:
            self.wait_copy()
            for param_range in self.flat.owned_ranges:
                if param_range.param_index == index:
                    reduced[param_range.offset : param_range.offset + param_range.elements.numel].zero_()

    def param_shards(self, index: int) -> list[tuple[Range, torch.Tensor]]:
        """Return (elements, values) for each range of one parameter's reduced gradient in this rank's shard."""
        if self.shard is None or not self.has_shard:
            return []
        ranges = [param_range for param_range in self.flat.owned_ranges if param_range.param_index == index]
        return [
            (param_range.elements, self.shard[param_range.offset : param_range.offset + param_range.elements.numel])
            for param_range in ranges
        ]


def compute_norms(tensors: list[torch.Tensor], norm_type: float) -> list[torch.Tensor]:
    """Return the norm of each tensor in fp32 (for float64 and complex tensors, torch rejects ``dtype=float32``)."""
    if not tensors:
        return []
    if tensors[0].dtype == torch.float64 or tensors[0].is_complex():
        return [norm.float() for norm in torch._foreach_norm(tensors, norm_type)]
    return list(torch._foreach_norm(tensors, norm_type, dtype=torch.float32))
