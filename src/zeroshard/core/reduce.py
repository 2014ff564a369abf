"""Reducer: gradients of flats through buckets of constant size to their placements."""

from __future__ import annotations

from collections import deque

import torch

from zeroshard.core.axis import Steps
from zeroshard.core.flat import Flat
from zeroshard.core.gradient import Gradient
from zeroshard.core.layout import Layout
from zeroshard.core.placement import Placements
from zeroshard.core.transfers import Transfer, TransferQueue

MAX_SEGMENTS = 16  # of a model's gradients


class Reducer:
    """Packs summands into buckets and reduces them, with a fixed number of buckets at a time.

    A bucket is some columns of a flat: the same ones of every rank's part. So it has the flat's layout, smaller, and
    the same sums. Most flats are one bucket. A flat of one parameter needs none: its summand is reduced as it is. ::

        flat      |  rank 0's part      |  rank 1's part      |
        bucket 0  |  a  |               |  a  |               |   a, b, c: columns
        bucket 1        |  b  |               |  b  |
        bucket 2              |  c  |               |  c  |
    """

    def __init__(self, gradients: list[Gradient], bucket_numel: int, bucket_count: int, device: torch.device) -> None:
        self._bucket_numel = bucket_numel
        self._bucket_count = bucket_count
        self._queue = TransferQueue(device)
        self._segments = _segments_of(gradients)
        self._pending: deque[Transfer] = deque()
        self._unpacked: list[Transfer] = []  # of the present unit

    def begin_unit(self) -> None:
        """Wait for summands of the unit before, which are reduced where they are: so two units' are in memory."""
        while self._unpacked:
            self._queue.wait(self._unpacked.pop())

    def start(self, gradient: Gradient, to: Placements) -> None:
        """Start to reduce a gradient: its summands, and what earlier backwards have reduced only in part."""
        if gradient.factor is not gradient.summand_factor:
            gradient.set_factor(gradient.summand_factor)
        partial = gradient.reduced if gradient.placements != to else None
        summands = gradient.local
        gradient.local = [None] * len(summands)
        if partial is None:
            self._reduce_summands(gradient, summands, to)
        elif any(summand is not None for summand in summands):
            self._reduce_summands(gradient, summands, gradient.placements)
        if partial is not None:
            now = gradient.placements
            gradient.reduced = self._allocate(gradient, to)
            self._launch(_continue(gradient, partial, now, to), kept=partial)
        gradient.placements = to

    def wait(self, most: int = 0) -> None:
        """Wait until at most so many buckets are under way."""
        while len(self._pending) > most:
            self._queue.wait(self._pending.popleft())
        if not most:
            self.begin_unit()

    def _launch(self, steps: Steps, kept: object) -> None:
        self.wait(self._bucket_count - 1)
        self._pending.append(self._queue.start(steps, kept=kept))

    def _allocate(self, gradient: Gradient, to: Placements) -> torch.Tensor:
        """Return memory for a gradient with these placements.

        Reduced gradients live from a backward to zero_grad(). One by one they would lie between the activations that
        backward frees, and nothing large could be allocated there. So several that follow each other share memory.
        """
        flat = gradient.flat
        span = flat.layout.span(to)
        if to != flat.grad_placements or span.stop - span.start == flat.layout.numel:
            return flat.full.new_empty(span.stop - span.start)
        if gradient.memory is None:
            lacking = [each for each in self._segments[gradient] if each.memory is None]
            numels = [each.flat.grad_numel for each in lacking]
            buffer = flat.full.new_empty(sum(numels))
            for each, memory in zip(lacking, torch.split(buffer, numels), strict=True):
                each.memory = memory
        assert gradient.memory is not None
        return gradient.memory

    def _reduce_summands(self, gradient: Gradient, summands: list[torch.Tensor | None], to: Placements) -> None:
        """Reduce summands, and add the result to that of earlier backwards."""
        flat = gradient.flat
        layout = flat.layout
        hops = layout.hops(layout.partial, to)
        span = layout.span(to)
        is_first = gradient.reduced is None
        is_whole = span.stop - span.start == layout.numel  # so nothing is scattered
        is_kept = not is_whole if len(hops) == 1 else not hops and flat.divisor == 1  # nothing writes to the bucket
        bucket = _single_summand(flat, summands) if is_kept and flat.is_single else None
        is_packed = bucket is None
        if is_packed and layout.numel > self._bucket_numel and not (is_first and is_whole):
            self._reduce_columns(gradient, summands, to)
            return
        if bucket is None:
            self.wait(self._bucket_count - 1)  # before another bucket is allocated
            bucket = _pack(flat, summands)
        output = None  # where a reduce-scatter writes, if not into the bucket
        if is_first:
            output = gradient.reduced = bucket if is_whole else self._allocate(gradient, to)
        elif not is_packed and hops:
            output = torch.empty_like(gradient.reduced)  # type: ignore[arg-type]
        steps = _reduce(flat, layout, bucket, gradient.reduced, to, is_first, output)  # type: ignore[arg-type]
        launched = self._pending if is_packed else self._unpacked
        launched.append(self._queue.start(steps, kept=(bucket, output, gradient.reduced)))

    def _reduce_columns(self, gradient: Gradient, summands: list[torch.Tensor | None], to: Placements) -> None:
        """Reduce a flat that is larger than a bucket."""
        flat = gradient.flat
        is_first = gradient.reduced is None
        if gradient.reduced is None:
            gradient.reduced = self._allocate(gradient, to)
        width = max(self._bucket_numel // flat.layout.ranks, 1)
        rows = gradient.reduced.view(-1, flat.layout.part_numel)
        for start in range(0, flat.layout.part_numel, width):
            columns = slice(start, min(start + width, flat.layout.part_numel))
            self.wait(self._bucket_count - 1)
            bucket = _pack_columns(flat, summands, columns)
            layout = Layout(flat.layout.axes, bucket.numel())
            target = rows[:, columns]
            output = target.view(-1) if is_first and target.is_contiguous() else None
            steps = _reduce(flat, layout, bucket, target, to, is_first, output)
            self._launch(steps, kept=(bucket, summands, rows))


def _reduce(
    flat: Flat,
    layout: Layout,
    bucket: torch.Tensor,
    target: torch.Tensor,
    to: Placements,
    is_first: bool,
    output: torch.Tensor | None,
) -> Steps:
    """Reduce a bucket, and write or add the result to ``target``.

    ``output``: where a reduce-scatter writes, if not into the bucket.
    """
    result = yield from layout.redistribute(bucket, layout.partial, to, output=output, is_averaged=flat.is_averaged)
    if not flat.is_averaged and flat.divisor > 1 and to == flat.grad_placements:
        result.mul_(1 / flat.divisor)
    if not is_first:
        target.add_(result.view(target.shape))
    elif result.data_ptr() != target.data_ptr():
        target.copy_(result.view(target.shape))


def _continue(gradient: Gradient, partial: torch.Tensor, now: Placements, to: Placements) -> Steps:
    """Reduce what is PARTIAL over some axes still, when it is complete."""
    yield  # older transfers add to it
    flat = gradient.flat
    target = gradient.reduced
    assert target is not None
    origin = flat.layout.span(now).start
    result = yield from flat.layout.redistribute(
        partial, now, to, origin=origin, output=target, is_averaged=flat.is_averaged
    )
    if result is not target:
        target.copy_(result)
    if not flat.is_averaged and flat.divisor > 1:
        target.mul_(1 / flat.divisor)


def _segments_of(gradients: list[Gradient]) -> dict[Gradient, list[Gradient]]:
    """Return those that each gradient shares memory with: others of its dtype that follow each other."""
    found = {}
    for dtype in {gradient.flat.dtype for gradient in gradients}:
        same = [gradient for gradient in gradients if gradient.flat.dtype == dtype]
        segment_numel = max(sum(gradient.flat.grad_numel for gradient in same) / MAX_SEGMENTS, 1)
        segments: dict[int, list[Gradient]] = {}
        end = 0
        for gradient in same:
            middle = end + gradient.flat.grad_numel / 2
            end += gradient.flat.grad_numel
            segments.setdefault(int(middle / segment_numel), []).append(gradient)
        found.update({gradient: segment for segment in segments.values() for gradient in segment})
    return found


def _single_summand(flat: Flat, summands: list[torch.Tensor | None]) -> torch.Tensor | None:
    """Return the summand of a flat of one parameter, if it can be reduced as it is."""
    summand = summands[0]
    return flat.elements(summand, 0) if summand is not None and summand.dtype == flat.dtype else None


def _pack(flat: Flat, summands: list[torch.Tensor | None]) -> torch.Tensor:
    """Return the summands in one buffer, with zeros for those that are missing, and in the gaps."""
    pieces = []
    for index, summand in enumerate(summands):
        if summand is None:
            pieces.append(flat.full.new_zeros(flat.ranges[index].stop - flat.ranges[index].start))
        else:
            pieces.append(summand if flat.is_contiguous else flat.elements(summand, index))
        pieces += flat.gaps[index]
    packed: torch.Tensor = torch._C._nn.flatten_dense_tensors(pieces)
    return packed if len(pieces) > 1 else packed.clone()


def _pack_columns(flat: Flat, summands: list[torch.Tensor | None], columns: slice) -> torch.Tensor:
    """Return some columns of every rank's part, in one buffer."""
    width = columns.stop - columns.start
    bucket = flat.full.new_zeros(width * flat.layout.ranks)
    for row in range(flat.layout.ranks):
        start = row * flat.layout.part_numel + columns.start
        span = slice(start, start + width)
        target = bucket[row * width : (row + 1) * width]
        for index, summand in enumerate(summands):
            if summand is not None:
                target[flat.part(span, index)] = flat.part_of(summand, span, index)
    return bucket
