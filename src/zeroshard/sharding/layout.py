"""The arithmetic of sharding: parameter → FlatParam → bucket → rank. Pure integers, no torch.

[Note: the packed layout]
The parameters of one *flat* are packed contiguously, each starting at a multiple of ``ALIGN_ELEMENTS`` elements. The
flat is split into *buckets* of at most ``bucket_size`` elements, one collective each, and every bucket is split evenly
over the ranks. Three ranks, two buckets::

    flat      |  weight 0                 |  w 1  | bias |  weight 2              |pad|
    buckets   |             bucket 0              |            bucket 1               |
    owners    |  rank 0   |  rank 1   |  rank 2   |  rank 0   |  rank 1   |  rank 2   |

    shard of rank 1, in memory:  | bucket 0's middle third | bucket 1's middle third |

Because buckets are split, not parameters, all ranks hold the same number of bytes whatever the shapes are, a collective
needs no copy before or after it, and a parameter may be larger than a bucket. A bucket's range in the shard starts at
``bucket.start // shard_count``, because every earlier bucket contributes ``1/shard_count`` of its length.

[Note: large parameters]
A parameter of at least a third of ``bucket_size`` is placed after the others, in its own buckets, if it splits evenly:
autograd's gradient is then reduced in place, without a copy into a bucket ([Note: reducing large gradients in place]).
This takes at most four collectives instead of one, and the host has to launch each of them; for smaller parameters,
that would cost the host more time than it saves on the device::

    flat      |  bias, weight 0, bias … |pad|  weight 1 (large)             |  weight 3 (large)     |
    buckets   |          bucket 0           |   bucket 1    |   bucket 2    |       bucket 3        |
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

ALIGN_ELEMENTS = 64  # 128 bytes in 16-bit: every parameter is aligned for vector loads and matrix kernels


def round_up(value: int, multiple: int) -> int:
    """Round ``value`` up to a multiple.

    >>> round_up(65, 64)
    128
    """
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class Range:
    """Elements ``start`` to ``end`` (exclusive) of a 1-D tensor."""

    start: int
    end: int

    @property
    def numel(self) -> int:
        return self.end - self.start

    @property
    def slice(self) -> slice:
        return slice(self.start, self.end)

    def intersect(self, other: Range) -> Range | None:
        start, end = max(self.start, other.start), min(self.end, other.end)
        return Range(start, end) if start < end else None

    def shift(self, offset: int) -> Range:
        return Range(self.start + offset, self.end + offset)


@dataclass(frozen=True)
class ParamRange:
    """A range of one parameter inside a bucket or a shard."""

    param_index: int  # index in the flat
    elements: Range  # elements of the flattened parameter
    offset: int  # first element in the bucket or shard


@dataclass(frozen=True)
class FlatLayout:
    """The positions of parameters of ``numels`` elements in one flat, and each rank's shard.

    >>> layout = FlatLayout.build([100, 7], bucket_size=128, shard_count=2)
    >>> layout.starts, layout.numel, layout.shard_numel
    ((0, 128), 256, 128)
    >>> [bucket.start for bucket in layout.buckets]
    [0, 128]
    >>> layout.owned_ranges(rank=1)
    [ParamRange(param_index=0, elements=Range(start=64, end=100), offset=0)]
    """

    numels: tuple[int, ...]
    starts: tuple[int, ...]
    buckets: tuple[Range, ...]
    shard_count: int  # ranks that the flat is sharded over
    param_order: tuple[int, ...]  # parameter indices, in the order of their positions

    @classmethod
    def build(cls, numels: Sequence[int], bucket_size: int, shard_count: int) -> FlatLayout:
        """Compute positions and buckets: see [Note: the packed layout] and [Note: large parameters]."""
        quantum = ALIGN_ELEMENTS * shard_count  # every bucket splits evenly, on vector boundaries
        has_own_buckets = [bucket_size <= 3 * numel and numel % quantum == 0 for numel in numels]
        small, large = ([i for i, is_large in enumerate(has_own_buckets) if is_large is kind] for kind in (False, True))
        starts, total = [0] * len(numels), 0
        for index in small:
            starts[index] = total
            total += round_up(numels[index], ALIGN_ELEMENTS)
        total = round_up(total, quantum)
        buckets = _split(Range(0, total), bucket_size, quantum)
        for index in large:
            starts[index] = total
            total += numels[index]
            buckets += _split(Range(starts[index], total), bucket_size, quantum)
        return cls(tuple(numels), tuple(starts), tuple(buckets), shard_count, (*small, *large))

    @property
    def numel(self) -> int:
        """Return the elements of the full flat, including padding."""
        return self.buckets[-1].end if self.buckets else 0

    @property
    def shard_numel(self) -> int:
        """Return the elements of one rank's shard."""
        return self.numel // self.shard_count

    def range_of_param(self, index: int) -> Range:
        """Return the range of parameter ``index`` in the flat."""
        return Range(self.starts[index], self.starts[index] + self.numels[index])

    def bucket_shard(self, bucket: Range, rank: int) -> Range:
        """Return the range of ``rank``'s shard of ``bucket`` in the flat."""
        numel = bucket.numel // self.shard_count
        return Range(bucket.start + rank * numel, bucket.start + (rank + 1) * numel)

    def shard_range(self, bucket: Range) -> Range:
        """Return the range of ``bucket`` in a rank's shard."""
        return Range(bucket.start // self.shard_count, bucket.end // self.shard_count)

    def params_in_bucket(self, bucket: Range) -> list[ParamRange]:
        """Return the parameter ranges in ``bucket``; ``offset`` counts from the bucket's start."""
        return list(self._param_ranges(bucket, 0))

    def single_param(self, bucket: Range) -> ParamRange | None:
        """Return the parameter range that ``bucket`` consists of, if it is inside one parameter, else None."""
        ranges = self.params_in_bucket(bucket)
        return ranges[0] if len(ranges) == 1 and ranges[0].elements.numel == bucket.numel else None

    def padding(self, bucket: Range) -> list[Range]:
        """Return the padding in ``bucket``, as ranges that count from the bucket's start."""
        paddings, end = [], 0
        for param_range in self.params_in_bucket(bucket):
            if param_range.offset > end:
                paddings.append(Range(end, param_range.offset))
            end = param_range.offset + param_range.elements.numel
        if end < bucket.numel:
            paddings.append(Range(end, bucket.numel))
        return paddings

    def owned_ranges(self, rank: int) -> list[ParamRange]:
        """Return the parameter ranges in ``rank``'s shard; ``offset`` counts from the shard's start."""
        return [
            param_range
            for bucket in self.buckets
            for param_range in self._param_ranges(self.bucket_shard(bucket, rank), self.shard_range(bucket).start)
        ]

    def owned_ranges_in_bucket(self, bucket: Range, rank: int) -> list[ParamRange]:
        """Return the parameter ranges in ``rank``'s shard of ``bucket``; ``offset`` counts from that shard's start."""
        return list(self._param_ranges(self.bucket_shard(bucket, rank), 0))

    def _param_ranges(self, span: Range, origin: int) -> Iterator[ParamRange]:
        order, start = self.param_order, self.starts.__getitem__
        first = max(bisect_right(order, span.start, key=start) - 1, 0)  # it may begin before the span
        for index in order[first : bisect_left(order, span.end, key=start)]:
            common = span.intersect(self.range_of_param(index))
            if common is not None:
                yield ParamRange(index, common.shift(-self.starts[index]), origin + common.start - span.start)


def _split(span: Range, bucket_size: int, quantum: int) -> list[Range]:
    """Split a range into buckets; the lengths of both are multiples of ``quantum``."""
    max_length = max(bucket_size // quantum, 1) * quantum
    count = max(-(-span.numel // max_length), 1)
    # equal lengths, because buffers are as long as the longest bucket
    length = max(round_up(-(-span.numel // count), quantum), quantum)
    return [Range(a, b) for a, b in pairwise([*range(span.start, span.end, length), span.end])]


def round_to_shared_sizes(sizes: Sequence[int]) -> list[int]:
    """Round similar sizes up to a common size, so that each allocation can reuse another's memory.

    >>> round_to_shared_sizes([100, 90, 50])
    [100, 100, 50]
    """
    rounded, shared = list(sizes), 0
    for index in sorted(range(len(sizes)), key=lambda index: sizes[index], reverse=True):
        if sizes[index] <= shared * 7 // 8 or not shared:
            shared = sizes[index]
        rounded[index] = shared
    return rounded
