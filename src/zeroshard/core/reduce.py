"""Reducer: gradients of flats through buckets of constant size to their placements."""

from __future__ import annotations

import operator
from collections import deque
from functools import partial

import torch

from zeroshard.core.axis import Steps
from zeroshard.core.flat import Flat
from zeroshard.core.gradient import Gradient
from zeroshard.core.layout import Layout
from zeroshard.core.placement import Placements
from zeroshard.core.transfers import Transfer, TransferQueue

MAX_SEGMENTS = 16  # of a model's gradients
_IS_THERE = partial(operator.is_not, None)


class GradientMemory:
    """Allocates reduced gradients, several that follow each other at once.

    They live from a backward to zero_grad(). One by one they would lie between the activations that backward frees, and
    nothing large could be allocated there.
    """

    def __init__(self, gradients: list[Gradient]) -> None:
        self._segments: dict[Gradient, list[Gradient]] = {}
        by_dtype: dict[torch.dtype, list[Gradient]] = {}
        for gradient in gradients:
            by_dtype.setdefault(gradient.flat.dtype, []).append(gradient)
        for same in by_dtype.values():
            segment_numel = sum(map(_numel, same)) / MAX_SEGMENTS
            end = 0
            segments: dict[int, list[Gradient]] = {}
            for gradient in same:
                middle = end + _numel(gradient) / 2
                end += _numel(gradient)
                segments.setdefault(int(middle / segment_numel) if segment_numel else 0, []).append(gradient)
            self._segments.update({gradient: segment for segment in segments.values() for gradient in segment})

    def allocate(self, gradient: Gradient, placements: Placements) -> torch.Tensor:
        """Return memory for a gradient with these placements."""
        flat = gradient.flat
        span = flat.layout.span(placements)
        if placements != flat.grad_placements or span.stop - span.start == flat.layout.numel:
            return torch.empty(span.stop - span.start, dtype=flat.dtype, device=flat.full.device)
        if gradient.memory is None:
            lacking = [each for each in self._segments[gradient] if each.memory is None]
            buffer = torch.empty(sum(map(_numel, lacking)), dtype=flat.dtype, device=flat.full.device)
            for each, memory in zip(lacking, buffer.split([_numel(each) for each in lacking]), strict=True):  # type: ignore[no-untyped-call]
                each.memory = memory
        assert gradient.memory is not None
        return gradient.memory


def _numel(gradient: Gradient) -> int:
    span = gradient.flat.grad_span
    return int(span.stop - span.start)


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
        self._memory = GradientMemory(gradients)
        self._pending: deque[Transfer] = deque()

    def start(self, gradient: Gradient, to: Placements) -> None:
        """Start to reduce a gradient: its summands, and what earlier backwards have reduced only in part."""
        is_continued = gradient.reduced is not None and gradient.placements != to
        now = gradient.placements if is_continued else to
        summands = gradient.take_local()
        if not is_continued or any(summand is not None for summand in summands):
            self._reduce_summands(gradient, summands, now)
        if is_continued:
            partial = gradient.reduced
            gradient.reduced = self._memory.allocate(gradient, to)
            self._launch(self._continue(gradient, partial, now, to), kept=partial)
        gradient.placements = to

    def wait(self) -> None:
        """Wait for all reductions."""
        while self._pending:
            self._pending.popleft().wait()

    def _launch(self, steps: Steps, kept: object) -> None:
        while len(self._pending) >= self._bucket_count:
            self._pending.popleft().wait()
        self._pending.append(self._queue.start(steps, kept))

    def _reduce_summands(self, gradient: Gradient, summands: list[torch.Tensor | None], to: Placements) -> None:
        """Reduce summands, and add the result to that of earlier backwards."""
        flat = gradient.flat
        layout = flat.layout
        hops = layout.hops(layout.partial, to)
        is_first = gradient.reduced is None
        span = layout.span(to)
        is_whole = span.stop - span.start == layout.numel
        is_kept = len(hops) == 1 and not is_whole  # no hop writes to it
        single = _single_summand(flat, summands) if is_kept or (not hops and flat.divisor == 1) else None
        if single is None and layout.numel > self._bucket_numel and not (is_first and is_whole):
            self._reduce_columns(gradient, summands, to)
            return
        while len(self._pending) >= self._bucket_count:  # before another bucket is allocated
            self._pending.popleft().wait()
        bucket = _pack(flat, summands) if single is None else single
        if is_first and is_whole:
            gradient.reduced = bucket
        elif is_first:
            gradient.reduced = self._memory.allocate(gradient, to)
        assert gradient.reduced is not None
        output = gradient.reduced if is_first else None
        if single is not None and hops and not is_first:
            output = torch.empty_like(gradient.reduced)
        steps = self._reduce(flat, layout, bucket, gradient.reduced, to, is_first, output)
        self._launch(steps, kept=(bucket, gradient.reduced, output))

    def _reduce_columns(self, gradient: Gradient, summands: list[torch.Tensor | None], to: Placements) -> None:
        """Reduce a flat that is larger than a bucket."""
        flat = gradient.flat
        is_first = gradient.reduced is None
        if gradient.reduced is None:
            gradient.reduced = self._memory.allocate(gradient, to)
        width = max(self._bucket_numel // flat.layout.ranks, 1)
        rows = gradient.reduced.view(-1, flat.layout.part_numel)
        for start in range(0, flat.layout.part_numel, width):
            columns = slice(start, min(start + width, flat.layout.part_numel))
            while len(self._pending) >= self._bucket_count:
                self._pending.popleft().wait()
            bucket = _pack_columns(flat, summands, columns)
            layout = Layout(flat.layout.axes, bucket.numel())
            target = rows[:, columns]
            output = target if is_first and target.is_contiguous() else None
            steps = self._reduce(flat, layout, bucket, target, to, is_first, output)
            self._launch(steps, kept=(bucket, summands, rows))

    def _reduce(
        self,
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
        is_averaged = _is_averaged(flat, bucket.dtype)
        if output is not None:
            output = output.view(-1)
        yield from layout.redistribute(bucket, layout.partial, to, output=output, is_averaged=is_averaged)
        result = bucket[layout.span(to)].view(target.shape)
        if output is not None and any(hop.source != hop.target for hop in layout.hops(layout.partial, to)):
            result = output.view(target.shape)
        if not is_averaged and flat.divisor > 1 and to == flat.grad_placements:
            result.mul_(1 / flat.divisor)
        if not is_first:
            target.add_(result)
        elif result.data_ptr() != target.data_ptr():
            target.copy_(result)

    def _continue(self, gradient: Gradient, partial: torch.Tensor | None, now: Placements, to: Placements) -> Steps:
        """Reduce what is PARTIAL over some axes still, when it is complete."""
        yield  # older transfers add to it
        flat = gradient.flat
        assert partial is not None and gradient.reduced is not None
        is_averaged = _is_averaged(flat, partial.dtype)
        origin = flat.layout.span(now).start
        target = gradient.reduced
        yield from flat.layout.redistribute(partial, now, to, origin=origin, output=target, is_averaged=is_averaged)
        span = flat.layout.span(to)
        result = partial[span.start - origin : span.stop - origin]
        if all(hop.source == hop.target for hop in flat.layout.hops(now, to)):
            target.copy_(result)
        if not is_averaged and flat.divisor > 1:
            target.mul_(1 / flat.divisor)


def _is_averaged(flat: Flat, dtype: torch.dtype) -> bool:
    """Return whether NCCL averages while it reduces: no kernel has to divide.

    Not if that is less exact (16 bits, and the number of ranks is no power of two), or underflows (fp16).
    """
    axes = flat.layout.axes
    is_exact = dtype is torch.float32 or (dtype is torch.bfloat16 and flat.divisor & (flat.divisor - 1) == 0)
    return (
        is_exact and flat.divisor == flat.layout.ranks and all(axis.backend == "nccl" for axis in axes if axis.size > 1)
    )


def _single_summand(flat: Flat, summands: list[torch.Tensor | None]) -> torch.Tensor | None:
    """Return the summand that is a whole flat as it is, if there is one."""
    summand = summands[0]
    if len(summands) > 1 or summand is None or summand.numel() != flat.layout.numel or summand.dtype != flat.dtype:
        return None
    return flat.elements(summand, 0)


def _pack(flat: Flat, summands: list[torch.Tensor | None]) -> torch.Tensor:
    """Return the summands in one buffer, with zeros for those that are missing."""
    if flat.is_plain and all(map(_IS_THERE, summands)):
        packed: torch.Tensor = torch._C._nn.flatten_dense_tensors(summands)  # type: ignore[arg-type]
        return packed
    pieces = []
    end = 0
    for index, summand in enumerate(summands):
        own = flat.ranges[index]
        if own.start > end:
            pieces.append(flat.full.new_zeros(own.start - end))
        if summand is None:
            pieces.append(flat.full.new_zeros(own.stop - own.start))
        else:
            pieces.append(flat.elements(summand, index))
        end = own.stop
    if flat.layout.numel > end:
        pieces.append(flat.full.new_zeros(flat.layout.numel - end))
    return torch.cat(pieces) if len(pieces) > 1 else pieces[0].clone()


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
