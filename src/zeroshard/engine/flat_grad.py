"""FlatGrad: the gradient of one FlatParam; GradMemory: its device memory, from a backward to zero_grad().

[Note: freeing gradients between steps]
Between zero_grad() and the first reduction of a backward, no gradient has a value. This interval contains the loss,
where a step uses the most memory. So zero_grad() frees the memory, and backward allocates it again, in space that the
loss has just freed. It does so in up to 16 segments, each for consecutive flats. If that gives enough segments, each is
about as large as one unit's full gradient. A segment is allocated with the first of its flats that gets a gradient:
while most activations are alive, few gradients have memory.

Full gradients (stages 0 and 1, or a single rank) are allocated all together instead, if the memory that the loss has
freed is large enough for them: in segments they would only fragment the memory of backward's temporaries (GPT 1.4B on
one rank, 31.6 GB in use: 33.2 GB reserved with four segments, 35.0 GB flat by flat). The freed memory is the difference
between the bytes allocated when forward ended or backward began and those allocated now.

Tensors over the memory stay the same (:meth:`Arena.free_storage`), unless the user was given one as ``parameter.grad``:
as in plain PyTorch, the user then owns it, and new memory is allocated.

If gradients exist when a training forward begins, they exist at the loss too: a step has several backwards, or
zero_grad() is called between forward and backward. They are then moved into the separate pool, once ([Note: separate
pool for long-lived tensors]), and keep their memory from then on. The next backward overwrites it even if the user
holds a view. The same holds if states are offloaded, because their updates read the gradients during the next forward.

[Note: inner sums]
If ``Config.partition`` has gradients over the inner axis, and optimizer states over both, a backward reduces gradients
inside the inner axis and adds them to the inner sum: what the ranks with one inner rank need together, laid out as a
shard of the inner axis. The last backward adds the inner sum to its own result before it reduces that over the outer
axis, into the shard. If it is not known to be the last (see [Note: reducing in the last backward]), the inner sum is
reduced over the outer axis when the gradients are needed. Then the inner sum is freed; so a step with one backward has
none, once that is known. If another backward follows, a new inner sum is later added to the same shard.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Collection, Sequence
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch.utils.weak import WeakIdKeyDictionary

from zeroshard.engine.context import ShardContext
from zeroshard.engine.flat_param import FlatParam
from zeroshard.engine.param_data import pop_autograd_grads, zero_autograd_grads
from zeroshard.memory import Arena, Pool
from zeroshard.sharding import ParamRange, Range

MIN_SEGMENTS = 4  # segments for the gradients of one dtype, if there are enough flats
MAX_SEGMENTS = 16


class FlatGrad:
    """The gradient of one trainable flat: this rank's local sum, and its shard of the reduced gradient."""

    def __init__(self, flat: FlatParam, dtype: torch.dtype) -> None:
        self.flat = flat
        self.dtype = dtype
        self.local_sum: torch.Tensor | None = None  # [numel]: this rank's sum, not reduced yet
        self.shard: torch.Tensor | None = None  # [shard_numel]: this rank's shard of the mean over the ranks
        self.bucket_shards: list[torch.Tensor] = []  # views of ``shard``, by bucket
        self.carried_over: torch.Tensor | None = None  # [shard_numel]: reduced before ``local_sum`` was reused
        self.inner_sum: torch.Tensor | None = None  # [numel / inner_count]: see [Note: inner sums]
        self.arena: Arena | None = None  # holds ``shard``, or ``local_sum`` if gradients are replicated
        self.has_local_sum = False
        self.has_shard = False
        self.is_param_used = [False] * len(flat.parameters)  # has got a gradient on this rank since zero_grad()
        # valid values of ``parameter.grad`` that the user may hold, tensors or handles → the parameter's index
        self.exposed: Any = WeakIdKeyDictionary()
        # by norm type (infinity only under fp16) and by bucket, if offloaded: recorded before the copy
        self.norms: dict[float, dict[int, list[torch.Tensor]]] = {2.0: {}, math.inf: {}}
        self.copy_done: torch.cuda.Event | None = None  # when an offloaded shard is complete
        self.local_sum_views: list[torch.Tensor] = []  # each parameter's view of ``local_sum``
        self.is_offloaded = flat.spec.has_offloaded_grads

    @property
    def pending_sums(self) -> list[torch.Tensor]:
        """The sums that are not reduced over all ranks yet, on this rank or inside the inner axis."""
        local_sum = self.local_sum if self.has_local_sum else None
        return [tensor for tensor in (local_sum, self.inner_sum) if tensor is not None]

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

    def inner_parts(self) -> list[torch.Tensor]:
        """Return views of the inner sum, by bucket; none if there is no inner sum."""
        layout, inner_sum = self.flat.spec.inner_layout, self.inner_sum
        return [] if inner_sum is None else [inner_sum[layout.shard_range(b).slice] for b in layout.buckets]

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

    def unused_parts(self, bucket: Range) -> list[slice]:
        """Return the parts of a bucket that belong to parameters without a gradient on this rank."""
        unused = [p for p in self.flat.layout.params_in_bucket(bucket) if not self.is_param_used[p.param_index]]
        return [slice(part.offset, part.offset + part.elements.numel) for part in unused]

    def pop_autograd_grads(self) -> list[torch.Tensor | None]:
        """Return the gradients that autograd has stored in the parameters' ``grad``, and clear it."""
        autograd_grads = pop_autograd_grads(self.flat.parameters)
        self.is_param_used = [
            was_used or grad is not None for was_used, grad in zip(self.is_param_used, autograd_grads, strict=True)
        ]
        return autograd_grads

    def clear_norms(self) -> None:
        """Clear the norms that were recorded before the copy, because the gradient changes."""
        for by_bucket in self.norms.values():
            by_bucket.clear()

    def clear(self) -> None:
        """Set the gradients of all parameters to None."""
        pop_autograd_grads(self.flat.parameters)
        if self.exposed:
            give_away(self.exposed, *self.exposed.values())
        self.is_param_used = [False] * len(self.is_param_used)
        self.has_local_sum = self.has_shard = False

    def zero(self) -> None:
        """Set the gradients of all parameters that have one to zero."""
        self.wait_copy()
        self.clear_norms()
        zero_autograd_grads(self.flat.parameters)
        for pending_sum in self.pending_sums:
            pending_sum.zero_()
        if self.has_shard and self.shard is not None:
            self.shard.zero_()

    def clear_param(self, index: int) -> None:
        """Clear the gradient of one parameter."""
        give_away(self.exposed, index)
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
            _zero_param(reduced, self.flat.owned_ranges, index)
        if self.inner_sum is not None:
            layout = self.flat.spec.inner_layout
            inner_rank = self.flat.shard_rank * layout.shard_count // self.flat.layout.shard_count
            _zero_param(self.inner_sum, layout.owned_ranges(inner_rank), index)

    def param_shards(self, index: int) -> list[tuple[Range, torch.Tensor]]:
        """Return (elements, values) for each range of one parameter's reduced gradient in this rank's shard."""
        if self.shard is None or not self.has_shard:
            return []
        ranges = [param_range for param_range in self.flat.owned_ranges if param_range.param_index == index]
        return [
            (param_range.elements, self.shard[param_range.offset : param_range.offset + param_range.elements.numel])
            for param_range in ranges
        ]


def _zero_param(tensor: torch.Tensor, owned_ranges: Sequence[ParamRange], index: int) -> None:
    """Set one parameter's elements to zero, in a tensor that holds these ranges."""
    for param_range in owned_ranges:
        if param_range.param_index == index:
            tensor[param_range.offset : param_range.offset + param_range.elements.numel].zero_()


def compute_norms(tensors: list[torch.Tensor], norm_type: float) -> list[torch.Tensor]:
    """Return the norm of each tensor in fp32 (for float64 and complex tensors, torch rejects ``dtype=float32``)."""
    if not tensors:
        return []
    if tensors[0].dtype == torch.float64 or tensors[0].is_complex():
        return [norm.float() for norm in torch._foreach_norm(tensors, norm_type)]
    return list(torch._foreach_norm(tensors, norm_type, dtype=torch.float32))


def assign_segments(sizes: Sequence[int], shard_count: int) -> list[int]:
    """Return the segment of each of consecutive gradients: the one that contains the gradient's middle.

    ``sizes`` are the elements that this rank has of each gradient, 1/``shard_count`` of the full gradient.

    >>> assign_segments([100, 10, 10, 10, 10, 100], shard_count=2)
    [0, 1, 1, 2, 2, 3]
    >>> assign_segments([10] * 8, shard_count=1)
    [0, 1, 2, 3, 4, 5, 6, 7]
    """
    max_full_size, doubled_total = shard_count * max(sizes, default=1) or 1, 2 * sum(sizes) or 1
    segment_count = min(max(MIN_SEGMENTS, -(-sum(sizes) // max_full_size)), MAX_SEGMENTS)
    doubled_middles = [2 * end - size for end, size in zip(accumulate(sizes), sizes, strict=True)]
    return [min(segment_count * middle // doubled_total, segment_count - 1) for middle in doubled_middles]


def give_away(exposed: Any, *indices: int) -> None:
    """Separate gradients that the user has read from parameters that get others: a tensor gets memory of its own."""
    for gradient, index in [*exposed.items()]:
        if index in indices:
            del exposed[gradient]
            if isinstance(gradient, torch.Tensor):
                gradient.data = gradient.clone()


class GradListener(Protocol):
    """Computes updates from gradients while backward still runs: the CPU updates of offloaded states."""

    def on_backward_begin(self, total_backwards: int) -> None:
        """Called when a backward begins whose gradients are reduced; ``total_backwards`` counts since shard()."""

    def on_shard_ready(self, flat: FlatParam) -> None:
        """Called when this rank's shard of a flat's reduced gradient is complete."""

    def invalidate(self) -> None:
        """Invalidate speculative updates, because the gradients may change."""

    def wait(self) -> None:
        """Wait until no update is pending; raise the error of a failed one."""


class GradListeners(list["weakref.ref[GradListener]"]):
    """The listeners of one model; weak, because each refers to the gradients and must not keep the model alive."""

    def on_backward_begin(self, total_backwards: int) -> None:
        """Tell all listeners that a backward begins."""
        for listener in self._alive():
            listener.on_backward_begin(total_backwards)

    def on_shard_ready(self, flat: FlatParam) -> None:
        """Tell all listeners that a reduced gradient is complete."""
        for listener in self._alive():
            listener.on_shard_ready(flat)

    def invalidate(self) -> None:
        """Invalidate all speculative updates."""
        for listener in self._alive():
            listener.invalidate()

    def wait(self) -> None:
        """Wait until no update is pending."""
        for listener in self._alive():
            listener.wait()

    def _alive(self) -> list[GradListener]:
        return [listener for reference in self if (listener := reference()) is not None]


class GradMemory:
    """The memory of one model's gradients, and their local sums in it: see [Note: freeing gradients between steps]."""

    def __init__(self, flat_grads: Collection[FlatGrad], context: ShardContext) -> None:
        is_partitioned, is_persistent = context.placement.gradients, context.config.offload is not None
        self.is_persistent = is_persistent
        self.is_exposed = False  # whether the user may hold a view of the current gradients
        self.has_unstepped = False  # whether a backward has added gradients since the last step of any optimizer
        self.discards_unstepped = False  # whether the last clear has dropped such gradients, as the loop of a GAN does
        self._has_memory = False  # whether some gradients have memory
        self._is_single_allocation = is_persistent and not is_partitioned  # whether all share one allocation
        self._peak_allocated_bytes = 0  # peak allocated bytes since the last backward
        self._flat_grads, self._is_partitioned = flat_grads, is_partitioned
        self._pool, self._tracker, self._tiers = context.pool, context.tracker, context.tiers
        on_device = [gradient for gradient in flat_grads if not gradient.is_offloaded]
        self.segments: dict[FlatParam, tuple[torch.dtype, int]] = {}  # the segment of each flat's gradient
        self._total_bytes = sum(self._grad_numel(flat_grad) * flat_grad.dtype.itemsize for flat_grad in on_device)
        for dtype in {gradient.dtype: None for gradient in on_device}:
            same_dtype = [gradient for gradient in on_device if gradient.dtype == dtype]
            shard_count = same_dtype[0].flat.layout.shard_count if is_partitioned else 1
            indices = assign_segments([self._grad_numel(flat_grad) for flat_grad in same_dtype], shard_count)
            self.segments |= {
                flat_grad.flat: (dtype, segment_index)
                for flat_grad, segment_index in zip(same_dtype, indices, strict=True)
            }

    @property
    def has_grads(self) -> bool:
        """Return whether there are gradients, local sums, inner sums or reduced."""
        return any(g.has_local_sum or g.has_shard or g.inner_sum is not None for g in self._flat_grads)

    def record_allocated(self) -> None:
        """Record the allocated bytes; called when a forward ends or a backward begins."""
        if self._is_undecided:
            self._peak_allocated_bytes = max(self._peak_allocated_bytes, self._allocated_bytes())

    def allocate(self, flat_grad: FlatGrad) -> None:
        """Allocate memory for all flats in the gradient's segment, or for one offloaded shard.

        The flats of a segment share one arena, in their order, so that optimizer slices can span them.
        """
        if flat_grad.is_offloaded and self._is_partitioned:
            if flat_grad.shard is None:
                tier, numel = flat_grad.flat.spec.tier_placement.gradients, flat_grad.flat.layout.shard_numel
                flat_grad.set_shard(self._tiers.zeros("gradients", tier, numel, flat_grad.dtype, pinned=True))
            return
        if self._is_undecided:
            self._decide_single_allocation()
        if flat_grad.arena is not None:
            flat_grad.arena.alloc_storage()
            self._has_memory = True
            return
        key = self._segment_key(flat_grad)
        segment = [other for other in self._flat_grads if self._segment_key(other) == key]
        arena = self._make_arena(sum(map(self._grad_numel, segment)), flat_grad.dtype, separate_pool=self.is_persistent)
        self._has_memory = True
        for other in segment:
            other.arena = arena
            (other.set_shard if self._is_partitioned else other.set_local_sum)(arena.allocate(self._grad_numel(other)))

    def allocate_local_sum(self, flat_grad: FlatGrad) -> torch.Tensor:
        """Return memory for the local sum; that of a partitioned gradient is kept for the duration of ``no_sync``."""
        flat_grad.flat.wait_for_update()  # a pending update may still read the previous step's gradient
        if self._is_partitioned:
            if flat_grad.local_sum is None:
                numel = flat_grad.flat.layout.numel
                flat_grad.set_local_sum(self._make_arena(numel, flat_grad.dtype, separate_pool=True).tensor)
        elif flat_grad.shard is not None and flat_grad.has_shard and not flat_grad.has_local_sum:
            # A backward after the reduction and before zero_grad(): the reduced shard is inside ``local_sum``, save it.
            flat_grad.carried_over = flat_grad.shard.clone()
            self._tracker.add("gradients", flat_grad.carried_over.nbytes)
        else:
            self.allocate(flat_grad)
        assert flat_grad.local_sum is not None
        return flat_grad.local_sum

    def accumulate(self, flat_grad: FlatGrad) -> None:
        """Add autograd's gradients to this rank's local sum."""
        autograd_grads = flat_grad.pop_autograd_grads()
        present = [index for index, tensor in enumerate(autograd_grads) if tensor is not None]
        if not present:
            return
        sources = [tensor for tensor in autograd_grads if tensor is not None]
        self._tracker.record_transient("autograd", sum([tensor.nbytes for tensor in sources]))
        local_sum = self.allocate_local_sum(flat_grad)
        views = [flat_grad.local_sum_views[index] for index in present]
        if flat_grad.has_local_sum:
            torch._foreach_add_(views, sources)
            return
        if len(present) < len(autograd_grads) or local_sum.numel() > sum(flat_grad.flat.layout.numels):
            local_sum.zero_()
        torch._foreach_copy_(views, sources)
        flat_grad.has_local_sum = True

    def drop_local_sum(self, flat_grad: FlatGrad) -> None:
        """Drop the local sum of a partitioned gradient."""
        if flat_grad.local_sum is not None:
            self._tracker.add("gradients", -flat_grad.local_sum.nbytes)
            flat_grad.local_sum, flat_grad.local_sum_views, flat_grad.has_local_sum = None, [], False

    def allocate_inner_sum(self, flat_grad: FlatGrad) -> None:
        """Allocate memory for an inner sum, unless it has some: it exists until it is reduced over the outer axis."""
        if flat_grad.inner_sum is None:
            numel = flat_grad.flat.spec.inner_layout.shard_numel
            flat_grad.inner_sum = self._make_arena(numel, flat_grad.dtype, separate_pool=True).tensor

    def drop_inner_sum(self, flat_grad: FlatGrad) -> None:
        """Drop an inner sum, if there is one."""
        if flat_grad.inner_sum is not None:
            self._tracker.add("gradients", -flat_grad.inner_sum.nbytes)
            flat_grad.inner_sum = None

    def pop_carried_over(self, flat_grad: FlatGrad) -> torch.Tensor | None:
        """Remove and return the gradient that was reduced before ``local_sum`` was reused."""
        carried_over = flat_grad.carried_over
        if carried_over is not None:
            self._tracker.add("gradients", -carried_over.nbytes)
            flat_grad.carried_over = None
        return carried_over

    def clear(self, flat_grad: FlatGrad, set_to_none: bool) -> None:
        """Set the gradients of one flat to None, or to zero."""
        if flat_grad.carried_over is not None:
            self.pop_carried_over(flat_grad)
        if not set_to_none:
            flat_grad.zero()
            return
        if self._is_partitioned and flat_grad.local_sum is not None:  # summed inside ``no_sync``
            self.drop_local_sum(flat_grad)
        if flat_grad.inner_sum is not None:
            self.drop_inner_sum(flat_grad)
        flat_grad.clear()

    def free(self) -> None:
        """Free the memory of all gradients, which were cleared, unless it is persistent."""
        if not self.is_persistent:
            self._has_memory = False
            for arena in self._arenas():
                arena.disown() if self.is_exposed else arena.free_storage()
            for gradient in self._flat_grads if self.is_exposed else ():
                gradient.detach_arena()
        self.is_exposed = False

    def make_persistent(self) -> None:
        """Keep the memory of gradients that exist when a training forward begins: they exist at the loss too."""
        if not self.is_persistent and any(g.has_local_sum or g.has_shard for g in self._flat_grads):
            self.is_persistent = True
            for arena in self._arenas():
                arena.move_to(self._pool)

    @property
    def _is_undecided(self) -> bool:
        """Return whether the next gradients may still become a single allocation."""
        return not (self._has_memory or self._is_partitioned or self.is_persistent)

    def _decide_single_allocation(self) -> None:
        """Decide, before the first gradient is allocated, between one allocation for all and one per segment."""
        is_single = self._peak_allocated_bytes - self._allocated_bytes() >= self._total_bytes > 0
        self._peak_allocated_bytes = 0
        if is_single != self._is_single_allocation:
            self._is_single_allocation = is_single
            for gradient in self._flat_grads:
                gradient.detach_arena()

    def _allocated_bytes(self) -> int:
        """Return the allocated bytes; 0 on a CPU, where segments cause no fragmentation."""
        device = self._pool.device
        if device.type != "cuda":
            return 0
        allocated: int = torch.cuda.memory_stats_as_nested_dict(device)["allocated_bytes"]["all"]["current"]
        return allocated

    def _segment_key(self, gradient: FlatGrad) -> object:
        """Return a key that gradients in one arena share; None for offloaded gradients."""
        segment = self.segments.get(gradient.flat)
        return segment[0] if segment is not None and self._is_single_allocation else segment

    def _grad_numel(self, gradient: FlatGrad) -> int:
        layout = gradient.flat.layout
        return layout.shard_numel if self._is_partitioned else layout.numel

    def _make_arena(self, numel: int, dtype: torch.dtype, separate_pool: bool) -> Arena:
        pool = self._pool if separate_pool else Pool(self._pool.device, is_separate=False)
        return Arena("gradients", numel, dtype, pool, self._tracker)

    def _arenas(self) -> set[Arena]:
        return {gradient.arena for gradient in self._flat_grads if gradient.arena is not None}
