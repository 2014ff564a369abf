"""The arithmetic of partitioning: parameter → flat → bucket → rank. Pure integers, no torch.

[Note: the packed layout]
The parameters of one *flat* lie end to end, each starting at a multiple of ``ALIGN_ELEMENTS`` elements. The flat is cut
into *buckets* of at most ``bucket_size`` elements, the size of one collective, and every bucket is cut evenly over the
ranks. Three ranks, two buckets::

    flat      |  weight 0                 |  w 1  | bias |  weight 2              |pad|
    buckets   |             bucket 0              |            bucket 1               |
    owners    |  rank 0   |  rank 1   |  rank 2   |  rank 0   |  rank 1   |  rank 2   |

    shard of rank 1, as it lies in memory:  | bucket 0's middle third | bucket 1's middle third |

Cutting buckets, not parameters, is why all ranks hold the same number of bytes whatever the shapes are, why a
collective needs no copy before or after it, and why a parameter may be larger than a bucket. Bucket ``b`` of the
shard starts at ``bucket.start // parts``, since every earlier bucket gave ``1/parts`` of its length.

[Note: large parameters]
One of at least a third of ``bucket_size`` lies behind the others, in buckets of its own, if it divides evenly: its
gradient is then reduced as autograd has made it, without a copy into a bucket ([Note: what needs no packing]). That
takes at most four collectives where one would do, each of which the host has to launch; smaller ones would cost it more
time than they save the device::

    flat      |  bias, weight 0, bias … |pad|  weight 1 (large)             |  weight 3 (large)     |
    buckets   |          bucket 0           |   bucket 1    |   bucket 2    |       bucket 3        |
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

ALIGN_ELEMENTS = 64  # elements; 128 bytes in 16-bit, so that every parameter suits vector loads and matrix kernels


def round_up(value: int, multiple: int) -> int:
    """Round ``value`` up to a multiple.

    >>> round_up(65, 64)
    128
    """
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class Range:
    """Elements ``start`` to ``end`` (exclusive) of some 1-D tensor."""

    start: int
    end: int

    @property
    def numel(self) -> int:
        """How many elements the range holds."""
        return self.end - self.start

    @property
    def slice(self) -> slice:
        """The same, to index with."""
        return slice(self.start, self.end)

    def intersect(self, other: Range) -> Range | None:
        """Return what both ranges hold, or None."""
        start, end = max(self.start, other.start), min(self.end, other.end)
        return Range(start, end) if start < end else None

    def shift(self, offset: int) -> Range:
        """Return the range shifted by ``offset``."""
        return Range(self.start + offset, self.end + offset)


@dataclass(frozen=True)
class ParamRange:
    """A part of one parameter inside a bucket or a shard."""

    param_index: int  # index in the flat
    elements: Range  # elements of the flattened parameter
    offset: int  # first element in the bucket or shard


@dataclass(frozen=True)
class FlatLayout:
    """How parameters of ``numels`` elements lie in one flat, and who owns what.

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
    shard_count: int  # how many ranks share the flat
    param_order: tuple[int, ...]  # the parameters as they lie

    @classmethod
    def build(cls, numels: Sequence[int], bucket_size: int, shard_count: int) -> FlatLayout:
        """Lay the parameters out and cut them: see [Note: the packed layout] and [Note: large parameters]."""
        quantum = ALIGN_ELEMENTS * shard_count  # every bucket divides evenly, on vector boundaries
        alone = [bucket_size <= 3 * numel and numel % quantum == 0 for numel in numels]
        small, large = ([i for i, is_large in enumerate(alone) if is_large is kind] for kind in (False, True))
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
        """Elements of the whole flat, alignment included."""
        return self.buckets[-1].end if self.buckets else 0

    @property
    def shard_numel(self) -> int:
        """Elements one rank owns."""
        return self.numel // self.shard_count

    def range_of_param(self, index: int) -> Range:
        """Where parameter ``index`` lies in the flat."""
        return Range(self.starts[index], self.starts[index] + self.numels[index])

    def bucket_shard(self, bucket: Range, rank: int) -> Range:
        """What ``rank`` owns of ``bucket``, in the flat's coordinates."""
        share = bucket.numel // self.shard_count
        return Range(bucket.start + rank * share, bucket.start + (rank + 1) * share)

    def shard_range(self, bucket: Range) -> Range:
        """Where a rank's part of ``bucket`` lies in its shard."""
        return Range(bucket.start // self.shard_count, bucket.end // self.shard_count)

    def params_in_bucket(self, bucket: Range) -> list[ParamRange]:
        """The parts of parameters in ``bucket``, ``at`` counted from the bucket's start."""
        return list(self._param_ranges(bucket, 0))

    def single_param(self, bucket: Range) -> ParamRange | None:
        """The part of a parameter that ``bucket`` is, if it is one and nothing else."""
        pieces = self.params_in_bucket(bucket)
        return pieces[0] if len(pieces) == 1 and pieces[0].elements.numel == bucket.numel else None

    def padding(self, bucket: Range) -> list[Range]:
        """The alignment in ``bucket`` that belongs to no parameter, counted from the bucket's start."""
        gaps, last = [], 0
        for piece in self.params_in_bucket(bucket):
            if piece.offset > last:
                gaps.append(Range(last, piece.offset))
            last = piece.offset + piece.elements.numel
        if last < bucket.numel:
            gaps.append(Range(last, bucket.numel))
        return gaps

    def owned_ranges(self, rank: int) -> list[ParamRange]:
        """The parts of parameters that ``rank`` owns, ``at`` counted from its shard's start."""
        return [
            piece
            for bucket in self.buckets
            for piece in self._param_ranges(self.bucket_shard(bucket, rank), self.shard_range(bucket).start)
        ]

    def owned_ranges_in_bucket(self, bucket: Range, rank: int) -> list[ParamRange]:
        """The parts of parameters that ``rank`` owns of ``bucket``, ``at`` counted from its part's start."""
        return list(self._param_ranges(self.bucket_shard(bucket, rank), 0))

    def _param_ranges(self, span: Range, origin: int) -> Iterator[ParamRange]:
        order, start = self.param_order, self.starts.__getitem__
        first = max(bisect_right(order, span.start, key=start) - 1, 0)  # the one that may begin before the span
        for index in order[first : bisect_left(order, span.end, key=start)]:
            common = span.intersect(self.range_of_param(index))
            if common is not None:
                yield ParamRange(index, common.shift(-self.starts[index]), origin + common.start - span.start)


def _split(span: Range, bucket_size: int, quantum: int) -> list[Range]:
    """Cut a stretch into buckets, each a multiple of ``quantum``, as the stretch is."""
    most = max(bucket_size // quantum, 1) * quantum
    count = max(-(-span.numel // most), 1)
    length = max(round_up(-(-span.numel // count), quantum), quantum)  # even: buffers are as long as the longest
    return [Range(a, b) for a, b in pairwise([*range(span.start, span.end, length), span.end])]


def round_to_shared_sizes(sizes: Sequence[int]) -> list[int]:
    """Round sizes up so that those of nearly one size become one: each then fits where another was.

    >>> round_to_shared_sizes([100, 90, 50])
    [100, 100, 50]
    """
    rooms, room = list(sizes), 0
    for index in sorted(range(len(sizes)), key=lambda index: sizes[index], reverse=True):
        if sizes[index] <= room * 7 // 8 or not room:
            room = sizes[index]
        rooms[index] = room
    return rooms
