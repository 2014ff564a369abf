"""Float8FlatParam: weights that are all-gathered in float8, for layers that compute in it.

[Note: gathering float8]
A float8 layer multiplies its weight cast to float8, with one scale for the whole weight. In stage 3 these weights have
a FlatParam of their own. Each rank casts its shard, and the all-gather moves 1 byte per element instead of 2. The
scales need the largest value of each weight, which no rank has: one all-reduce of a number per weight, at the first
unshard after the values have changed, for the whole model. So the float8 values are those of a weight that is gathered
in bf16 and cast afterwards, to the bit.

The full bf16 weights are nowhere. The parameters stay guarded, and point at placeholders, while their layers run; the
layers have the float8 values (:class:`Float8Weight`). Other code that uses such a weight in a forward raises: its layer
belongs into ``keep_bf16``. (Compiled code needs plain parameters: it would get NaN.) Inside ``gathered()`` the
parameters have their bf16 values, and layers cast these. A weight that several modules share, or that is transposed in
memory, is gathered in bf16.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from zeroshard.comm import Communicator
from zeroshard.engine.flat_param import FlatParam
from zeroshard.float8 import E4M3, Float8Weight, ShardCast, ShardCasts, float8_scale
from zeroshard.sharding import Range

SCALES_LABEL = "float8 scales"


class Float8FlatParam(FlatParam):
    """The weights of float8 layers in one unit: see [Note: gathering float8]. ``full`` has their bytes."""

    weights: list[Float8Weight]
    has_stale_scales = True
    _sources: list[tuple[int, int, Range, torch.Tensor]] | None = None
    _casts: ShardCasts | None = None  # of the sources, into their places in ``full``

    def allocate(self, is_partitioned: bool, shard: torch.Tensor | None) -> None:
        """Allocate ``full``, which is empty until unshard; parameters always point at placeholders."""
        self.largest = torch.zeros(len(self.shapes), dtype=torch.bfloat16, device=self.device)
        # 16 bytes apart: cuBLAS accepts no other addresses of scales
        self.scales = torch.ones(len(self.shapes), 4, dtype=torch.float32, device=self.device)[:, 0]
        super().allocate(is_partitioned, shard)
        self.views = self.placeholders

    def _allocate_full(self) -> None:
        self.full = torch.empty(self.layout.numel, dtype=torch.uint8, device=self.device)
        self.bucket_views = [self.full[bucket.slice] for bucket in self.layout.buckets]
        self._shard_spans = [self.layout.bucket_shard(bucket, self.shard_rank) for bucket in self.layout.buckets]
        self.shard_slots = [self.full[span.slice] for span in self._shard_spans]
        # not at the first unshard: in inference mode it would be an inference tensor
        self._float8_values = values = self.full.view(E4M3)
        self.weights = [
            # ``data`` has a version counter of its own: refilling the storage is no in-place change for autograd
            Float8Weight(self.view(values, index).data, self.scales[index])
            for index in range(len(self.shapes))
        ]

    def set_param_data(self, values: Sequence[torch.Tensor]) -> None:
        """Set the values of all parameters: placeholders, or inside ``gathered()`` copies, which layers then use."""
        super().set_param_data(values)
        for weight in self.weights:
            weight.is_in_use = values is self.placeholders

    def free(self, keep_storage: bool) -> bool:
        """Free the full values: nobody else has them."""
        self.full.untyped_storage().resize_(0)
        return False

    def mark_values_changed(self) -> None:
        """Have the next unshard compute the scales again."""
        self.has_stale_scales = True

    def all_gather_inputs(self) -> list[torch.Tensor]:
        """Cast this rank's shard of each bucket into its place in ``full``, and return it."""
        if self._casts is None:
            shards = [
                ShardCast(values, index, self._shard_spans[bucket].start + own.start)
                for index, bucket, own, values in self.sources()
            ]
            self._casts = ShardCasts(shards, self.largest, self._float8_values)
        self._casts.run()
        return self.shard_slots

    def sources(self) -> list[tuple[int, int, Range, torch.Tensor]]:
        """Return what this rank has of each parameter: (parameter, bucket, range in the bucket's shard, values)."""
        if self._sources is None:
            self._sources = []
            for number, (bucket, span) in enumerate(zip(self.layout.buckets, self.shard_ranges, strict=True)):
                for part in self.layout.owned_ranges_in_bucket(bucket, self.shard_rank):
                    own = Range(part.offset, part.offset + part.elements.numel)
                    if not self.spec.is_cast_from_master or self.master is None:
                        self._sources.append((part.param_index, number, own, self.local_shards[number][own.slice]))
                        continue
                    for common, values in self.master.views_in(own.shift(span.start)):
                        self._sources.append((part.param_index, number, common.shift(-span.start), values))
        return self._sources


class Float8Scales:
    """The scales of all weights that a model gathers in float8."""

    def __init__(self, flats: Sequence[Float8FlatParam]) -> None:
        self._flats = flats
        self._counts = [len(flat.shapes) for flat in flats]

    @property
    def are_stale(self) -> bool:
        """Whether some values have changed."""
        return any(flat.has_stale_scales for flat in self._flats)

    @torch.no_grad()
    def refresh(self, comm: Communicator) -> None:
        """Compute all scales. All ranks call it together: see [Note: gathering float8]."""
        indices: list[int] = []
        sources: list[torch.Tensor] = []
        first = 0
        for flat, count in zip(self._flats, self._counts, strict=True):
            for index, _, _, values in flat.sources():
                indices.append(first + index)
                sources.append(values)
            first += count
        largest = torch.zeros(first, dtype=torch.float32, device=comm.device)
        if sources:
            norms = torch.stack(torch._foreach_norm(sources, float("inf"))).float()
            places = torch.tensor(indices, device="cpu").to(comm.device, non_blocking=True)
            largest.scatter_reduce_(0, places, norms, "amax")
        for axis in comm.shard_axis.factors or (comm.shard_axis,):
            if axis.size > 1:
                comm.all_reduce(largest, axis, SCALES_LABEL, dist.ReduceOp.MAX).wait()
        rounded = largest.to(torch.bfloat16)  # rounding keeps the order: the largest bf16 value
        inverse = float8_scale(rounded, E4M3).reciprocal()
        parts = zip(self._flats, torch.split(rounded, self._counts), torch.split(inverse, self._counts), strict=True)
        stale = [part for part in parts if part[0].has_stale_scales]  # a graph may still need the scales of others
        targets = [tensor for flat, *_ in stale for tensor in (flat.largest, flat.scales)]
        torch._foreach_copy_(targets, [tensor for _, *values in stale for tensor in values])
        for flat in self._flats:
            flat.has_stale_scales = False


def find_float8_scales(flats: Sequence[FlatParam]) -> Float8Scales | None:
    """Return the scales of a model's flats, None if it gathers none in float8."""
    found = [flat for flat in flats if isinstance(flat, Float8FlatParam)]
    return Float8Scales(found) if found else None
