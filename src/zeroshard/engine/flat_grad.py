"""FlatGradient: the gradient of one flat, what this rank has summed of it and what it owns of the mean."""

from __future__ import annotations

import torch

from zeroshard.engine.flat_param import FlatParam
from zeroshard.engine.parameter import has_autograd_grads, pop_autograd_grads, zero_autograd_grads
from zeroshard.memory.arena import Arena
from zeroshard.sharding.layout import ParamRange, Range


class FlatGrad:
    """The gradient of one trainable flat: what this rank has summed itself, and its part of the reduced whole."""

    def __init__(self, flat: FlatParam, dtype: torch.dtype) -> None:
        self.flat = flat
        self.dtype = dtype
        self.local_sum: torch.Tensor | None = None  # [numel]: this rank's own sum, not reduced yet
        self.shard: torch.Tensor | None = None  # [shard_numel]: the mean over the ranks, this rank's part
        self.single_param_buckets = [
            flat.layout.single_param(bucket) for bucket in flat.layout.buckets
        ]  # buckets within one parameter
        self.bucket_shards: list[torch.Tensor] = []  # of ``shard``, by bucket, where gradients are partitioned
        self.carried_over: torch.Tensor | None = None  # [shard_numel]: reduced before, where ``local`` is reused
        self.arena: Arena | None = None  # that ``shard``, and ``local`` where gradients are replicated, lies in
        self.has_local_sum = False
        self.has_shard = False
        self.is_param_used = [False] * len(flat.parameters)  # got a gradient on this rank since zero_grad()
        self.norms: dict[int, list[torch.Tensor]] = {}  # by bucket, of a gradient outside the device: see ``measure``
        self.max_abs: dict[int, list[torch.Tensor]] = {}  # the same for the infinity norm, under fp16
        self.copy_done: torch.cuda.Event | None = None  # when all of a far shard is there
        self.local_sum_views: list[torch.Tensor] = []  # the parameters' places in ``local``

    @property
    def is_offloaded(self) -> bool:
        """Whether the reduced gradient rests outside the device."""
        return self.flat.tier_placement.gradients != "device"

    @property
    def needs_reduce_buffer(self) -> bool:
        """Whether its parts are reduced into a buffer first: to be added to what is there, or sent off."""
        return self.has_shard or (self.is_offloaded and self.flat.layout.shard_count > 1)

    def set_shard(self, shard: torch.Tensor) -> None:
        """Have the reduced gradient here from now on."""
        self.shard = shard
        self.bucket_shards = [shard[home.slice] for home in self.flat.shard_ranges]

    def set_local_sum(self, local_sum: torch.Tensor) -> None:
        """Sum this rank's own gradients here from now on."""
        self.local_sum = local_sum
        self.local_sum_views = [self.flat.view(local_sum, index) for index in range(len(self.flat.parameters))]

    def detach_arena(self) -> None:
        """Have no memory any more: somebody else may hold a part of it."""
        self.arena = self.local_sum = self.shard = None
        self.local_sum_views, self.bucket_shards = [], []

    def wait_copy(self) -> None:
        """Wait until all of a shard outside the device is there."""
        if self.copy_done is not None:
            self.copy_done.synchronize()

    def norm_ranges(self, bucket_index: int, include_replicated: bool) -> list[Range]:
        """What of one bucket's part of the shard counts in a norm: all of it, or what no other tensor rank has too."""
        home = self.flat.shard_ranges[bucket_index]
        stretches = [home] if include_replicated else self.flat.tp_sharded_ranges()
        return [common for stretch in stretches if (common := stretch.intersect(home)) is not None]

    def pop_autograd_grads(self) -> list[torch.Tensor | None]:
        """Take what autograd has put into the parameters' ``grad``."""
        taken = pop_autograd_grads(self.flat.parameters)
        self.is_param_used = [before or now is not None for before, now in zip(self.is_param_used, taken, strict=True)]
        return taken

    def in_place_input(self, param_range: ParamRange, autograd_grads: list[torch.Tensor | None]) -> torch.Tensor | None:
        """A part of a parameter's gradient, where it can be reduced without being packed."""
        tensor = autograd_grads[param_range.param_index]
        if (
            tensor is None
            or tensor.dtype != self.dtype
            or tensor.stride() != self.flat.strides[param_range.param_index]
        ):
            return None
        if tensor.is_conj() or tensor.is_neg():  # its memory has other values
            return None
        return self.flat.flatten(tensor, param_range.param_index)[param_range.elements.slice]

    def has_autograd_grads(self) -> bool:
        """Whether autograd has left gradients here."""
        return has_autograd_grads(self.flat.parameters)

    def clear_norms(self) -> None:
        """The gradient changes where it rests: what was measured on its way there does not hold any more."""
        self.norms.clear()
        self.max_abs.clear()

    def clear_param(self, index: int) -> None:
        """Forget the gradient of one parameter."""
        self.is_param_used[index] = False
        pop_autograd_grads(self.flat.parameters[index : index + 1])
        self.zero_param(index)

    def zero_param(self, index: int) -> None:
        """Make the gradient of one parameter zero."""
        self.clear_norms()
        zero_autograd_grads(self.flat.parameters[index : index + 1])
        if self.has_local_sum:
            self.local_sum_views[index].zero_()
        reduced = self.shard if self.carried_over is None else self.carried_over
        if self.has_shard and reduced is not None:
            self.wait_copy()
            for piece in self.flat.owned_ranges:
                if piece.param_index == index:
                    reduced[piece.offset : piece.offset + piece.elements.numel].zero_()

    def param_shards(self, index: int) -> list[tuple[Range, torch.Tensor]]:
        """What this rank has of one parameter's reduced gradient: which elements, and where they lie."""
        if self.shard is None or not self.has_shard:
            return []
        pieces = [piece for piece in self.flat.owned_ranges if piece.param_index == index]
        return [(piece.elements, self.shard[piece.offset : piece.offset + piece.elements.numel]) for piece in pieces]


def compute_norms(tensors: list[torch.Tensor], norm_type: float) -> list[torch.Tensor]:
    """The norm of each tensor, in fp32; torch refuses to narrow those of float64, and of complex numbers, by itself."""
    if not tensors:
        return []
    if tensors[0].dtype == torch.float64 or tensors[0].is_complex():
        return [norm.float() for norm in torch._foreach_norm(tensors, norm_type)]
    return list(torch._foreach_norm(tensors, norm_type, dtype=torch.float32))
