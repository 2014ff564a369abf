"""Arrangement: the sizes of segments to make beforehand, with which a step's requests take least memory.

[Note: how sizes are looked for]
Every guess is rehearsed. First come one or two segments of a few multiples of the largest request, which is the loss's
as a rule. Then one that has room for nearly all, and some that are alike and a little smaller than some large request:
what is small and stays, a block's checkpoint, is carved from these, and no gathered unit, which comes and goes, leaves
a hole between two of them. Then the best so far, and in turn with them some that are drawn at random, are changed a
little at a time: a segment more or less, two made one, one larger or smaller by the size of some request. A change that
does not make it worse is kept. It ends when almost nothing is left to be gained, when it comes to nothing new, or after
a time.

Where all fits to the byte, a request that is a little larger than it was takes a segment of its own, perhaps the
largest. So a guess is rehearsed with requests that are a little larger too, and the worse of the two counts.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from zeroshard.memory.rehearsal import UNIT, Rehearsal, Request

FIRST = (1.0, 1.125, 1.25, 2.0, 2.125, 2.25, 2.375, 3.0, 3.125, 3.25, 3.375)  # times the largest request
SECOND = (0.0, 0.0625, 0.125, 0.25, 0.375, 0.5, 0.5625, 0.625, 1.0, 1.125, 1.25, 2.0)
LARGE = (1.0, 0.9375, 0.875)  # times the bytes that are in use at once
BELOW = (1.0, 0.85, 0.7, 0.55)  # times a request
ENOUGH = 1.01  # times the bytes that are in use at once, or …
MORE = 4 * UNIT  # … so many bytes more than these
KEPT = 3  # of the guesses so far, the best
TURN = 40  # changes that are tried before another has its turn
IDLE = 5  # turns without a new guess, after which it ends
MOST = 6  # segments
FEW = 6  # sizes, the largest
OUT = 1.1  # times the least, from which on a guess is out of the running
GROWN = 512  # a request is larger by this part of it, the second time
APART = 0.05  # of its bytes: by so much another guess differs, or by its number of segments

Sizes = tuple[int, ...]  # bytes, the largest first


@dataclass(frozen=True)
class Guess:
    """Sizes of segments, and the bytes that are reserved in the end where these are made first."""

    sizes: Sizes
    needed: int


class Arrangement:
    """The sizes that were found so far for a list of requests.

    >>> steps = [(1, 60 << 20), (2, 60 << 20), (1, 0), (2, 0), (3, 120 << 20), (3, 0)]
    >>> [size >> 20 for size in Arrangement(steps).best(seconds=1)[0].sizes]
    [122]
    """

    def __init__(self, requests: Sequence[Request]) -> None:
        self._requests = requests
        self._grown = [(tensor, nbytes + nbytes // GROWN) for tensor, nbytes in requests]
        self._most = _at_once(self._grown)
        self._enough = max(ENOUGH * self._most, self._most + MORE)
        rounded = {_whole(nbytes) for _, nbytes in self._grown}
        self._sizes = sorted(size for size in rounded if size)
        self._needed: dict[Sizes, int] = {}
        self._least: float = math.inf  # of what was needed so far

    def best(self, seconds: float) -> list[Guess]:
        """The guesses with which least is reserved from the second pass on, the best first; the last makes none.

        They differ plainly from each other.
        """
        end = time.perf_counter() + seconds
        without = self._rehearse(())
        for sizes in self._first():
            if self._over(end):
                break
            if sum(sizes) < without:
                self._rehearse(sizes)
        draw = random.Random(0)
        leading = sorted(self._needed, key=self._rank)[:KEPT]
        idle = 0  # turns that came to nothing new
        while self._sizes and idle < IDLE and not self._over(end):
            known = len(self._needed)
            begin = draw.choice(leading) if draw.random() < 0.5 else self._drawn(draw)
            leading.append(self._climbed(begin, draw, end))
            leading = sorted(set(leading), key=self._rank)[:KEPT]
            idle = idle + 1 if len(self._needed) == known else 0
        return self._apart()

    def _climbed(self, sizes: Sizes, draw: random.Random, end: float) -> Sizes:
        """The same after a few changes, those of them that did not make it worse."""
        for _ in range(TURN):
            changed = self._changed(sizes, draw)
            if changed not in self._needed and sum(changed) < self._needed[sizes]:
                if self._rehearse(changed) <= self._needed[sizes]:
                    sizes = changed
                if self._over(end):
                    break
        return sizes

    def _apart(self) -> list[Guess]:
        found: list[Sizes] = []
        for sizes in sorted(self._needed, key=self._rank):
            if self._needed[sizes] > OUT * self._least:  # it may need more: it was not rehearsed to its end
                break
            near = (len(sizes) == len(other) and abs(sum(sizes) - sum(other)) <= APART * sum(sizes) for other in found)
            if not any(near):
                found.append(sizes)
            if len(found) == KEPT or sizes == ():
                break
        if found[-1] != ():
            found.append(())
        return [Guess(sizes, self._needed[sizes]) for sizes in found]

    def _over(self, end: float) -> bool:
        return self._least <= self._enough or time.perf_counter() > end

    def _rank(self, sizes: Sizes) -> tuple[int, int]:
        return self._needed[sizes], len(sizes)

    def _first(self) -> list[Sizes]:
        """One or two segments, in multiples of the largest request; then one and some smaller ones that are alike."""
        largest = self._sizes[-1] if self._sizes else 0
        parts = ([_whole(largest * part) for part in pair] for pair in product(FIRST, SECOND))
        found = [tuple(sorted(filter(None, pair), reverse=True)) for pair in parts if largest]
        for part, size, below, count in product(LARGE, self._sizes[-FEW:], BELOW, range(2, MOST)):
            alike = max(UNIT, _whole(below * size) - UNIT)
            found.append((_whole(part * self._most), *[alike] * count))
        simplest, others = found[:1], found[1:]
        random.Random(0).shuffle(others)  # time may be short for all, where a step makes many requests
        return simplest + others

    def _drawn(self, draw: random.Random) -> Sizes:
        """A few segments at random, smaller together than all that are needed without any."""
        sizes = [draw.choice(self._sizes[-FEW:]) * draw.choice((1, 2)) for _ in range(draw.randint(2, MOST))]
        while sum(sizes) >= self._needed[()]:
            sizes.pop()
        drawn = tuple(sorted(sizes, reverse=True))
        self._rehearse(drawn)
        return drawn

    def _changed(self, sizes: Sizes, draw: random.Random) -> Sizes:
        """Sizes with one thing changed, or two."""
        changed = list(sizes)
        for _ in range(draw.choice((1, 1, 2))):
            kind, at = draw.random(), draw.randrange(len(changed)) if changed else 0
            if not changed or (kind < 0.25 and len(changed) < MOST):
                changed.append(draw.choice(self._sizes))
            elif kind < 0.4 and len(changed) > 1:
                del changed[at]
            elif kind < 0.55 and len(changed) > 1:
                size = changed.pop(at)
                changed[draw.randrange(len(changed))] += size
            else:
                changed[at] = max(UNIT, changed[at] + draw.choice((-1, 1)) * draw.choice(self._sizes))
        return tuple(sorted(changed, reverse=True))

    def _rehearse(self, sizes: Sizes) -> int:
        """Bytes that are reserved in the end, with segments of these sizes made first.

        Where they are a tenth more than with the best so far, it is out of the running, and not rehearsed to its end.
        """
        if sizes not in self._needed:
            most = OUT * self._least
            needed = _played(sizes, self._grown, most)
            self._needed[sizes] = needed if needed > most else max(needed, _played(sizes, self._requests, most))
            self._least = min(self._least, self._needed[sizes])
        return self._needed[sizes]


def _played(sizes: Sizes, requests: Sequence[Request], most: float) -> int:
    rehearsal = Rehearsal(sizes)
    for _ in range(2):
        rehearsal.play(requests, most)
    return rehearsal.reserved


def _whole(nbytes: float) -> int:
    """As a segment would have them."""
    return -(-int(nbytes) // UNIT) * UNIT


def _at_once(requests: Sequence[Request]) -> int:
    """The most bytes that are in use at a time."""
    held: dict[int, int] = {}
    now = most = 0
    for tensor, nbytes in requests:
        now += nbytes - held.pop(tensor, 0)
        if nbytes:
            held[tensor] = nbytes
            most = max(most, now)
    return most
