"""Segments: which pieces of device memory the model's temporaries are carved from (the paper's M_D).

[Note: large segments first]
PyTorch's allocator takes memory from the device in segments, each as large as the request that needed it, and carves
later, smaller requests from segments that are free. A step asks for its small temporaries first (a block's) and for its
largest last (the loss's): each of these then gets a segment of its own, beside all the small ones, which are free and
of no use by then. Were some large ones there first, the small ones would be carved from them.

So after a few steps the allocator is asked to note a step's requests, and these are rehearsed with a few segments of
various sizes made beforehand (``arrangement.py``). The sizes with which least memory was reserved in the end are made,
once, from an empty cache. Should the next pass reserve more than it did on paper, where a tensor may be freed a moment
earlier than on a device, the next best sizes are tried, and after the last of them those that did best are made. Passes
on larger inputs begin it anew, a few times; smaller ones fit into what is there.

Where memory is so full that the allocator had to give segments back in the middle of a step, the next passes begin with
an empty cache instead: nothing of the last one may then stand in the way of the next.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from operator import itemgetter
from typing import Any

import torch

from zeroshard.memory.arrangement import Arrangement, Guess, Sizes
from zeroshard.memory.rehearsal import SMALL, Request

WARM_UP = 2  # passes before the model's needs are looked at: optimizer states are made in the first step
NOTED = 200_000  # requests and frees of a step; a longer one is left alone
SECONDS = 4.0  # that rehearsals may take
SLACK = 1.02  # times what is needed on paper, and …
SMALLER = 64 << 20  # … bytes for all smaller requests: so much may be needed
GROWN = 1.125  # times the inputs, from which on a pass is looked at anew
LEARNT = 8  # times that it is
FULL = 100  # passes that begin with an empty cache after memory was full


class Segments:
    """Watches the segments of one model's temporaries, one training pass after the other."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._passes = self._learnt = 0
        self._inputs = -1  # elements of the inputs that were last looked at, and …
        self._before = -1  # … of the pass before
        self._noting = False
        self._full = 0  # passes that will begin with an empty cache
        self._made: Sizes = ()  # of the segments that are made first
        self._guesses: list[Guess] = []  # that are not judged yet; the first of them is made
        self._judged: list[Guess] = []  # with what they really needed
        self._states = 0  # bytes that are reserved with an empty cache
        self._reserved = self._retries = 0  # when this was last looked at

    def begin(self, inputs: int) -> None:
        """A training forward begins, on inputs of so many elements: what the pass before has asked for is known."""
        self._passes += 1
        if torch.cuda.is_current_stream_capturing():
            return
        if self._passes <= WARM_UP:
            torch.cuda.empty_cache()  # of what building, and the pass before, have left
            return
        reserved, retries = self._now()
        if retries > self._retries or self._full:
            self._full = FULL if retries > self._retries else self._full - 1
            self.close()
            self._guesses, self._made = [], ()
            self._make()
        elif self._noting:
            self._judged, self._guesses = [], Arrangement(self._noted()).best(SECONDS)
            self._try(self._guesses[0])
        elif self._guesses and self._before > self._inputs:  # that pass cannot be compared with what was noted
            self._guesses = []
        elif self._guesses:
            self._judge(reserved - self._states)
        elif reserved < 0.9 * self._reserved:  # somebody has emptied the cache
            self._make()
        if inputs > self._inputs * GROWN and self._learnt < LEARNT and not self._full:
            self._inputs = inputs
            self._note()
        self._before = inputs
        self._reserved, self._retries = self._now()

    def close(self) -> None:
        """Stop noting, if that is under way."""
        if self._noting:
            _record(0)
            self._noting = False

    def _note(self) -> None:
        """Have the allocator note this pass, from an empty cache, unless the user has it note requests already."""
        if not torch._C._cuda_isHistoryEnabled():
            self._learnt += 1
            self._guesses, self._made = [], ()
            self._make()
            _record(NOTED)
            self._noting = True

    def _noted(self) -> list[Request]:
        """The requests of the pass before for large tensors of the model's memory, and when they were freed."""
        number = self._device.index or 0
        noted = torch.cuda.memory._snapshot()
        events = noted["device_traces"][number]
        self.close()
        if len(events) >= NOTED:
            return []
        apart = _Apart(noted["segments"])
        requests: list[Request] = []
        for event in events:
            if event["action"] == "alloc" and event["size"] > SMALL and event["addr"] not in apart:
                requests.append((event["addr"], event["size"]))
            elif event["action"] == "free_completed":
                requests.append((event["addr"], 0))
        return requests

    def _try(self, guess: Guess) -> None:
        self._made = guess.sizes
        self._make()

    def _judge(self, needed: int) -> None:
        """The pass before has needed so much beside the model's states: stay with what is made, or try the next."""
        guess = self._guesses.pop(0)
        self._judged.append(Guess(guess.sizes, needed))
        if needed <= SLACK * guess.needed + SMALLER:
            self._guesses = []
        else:
            self._try(self._guesses[0] if self._guesses else min(self._judged, key=lambda judged: judged.needed))

    def _make(self) -> None:
        """Empty the cache, make the segments, and leave them free."""
        torch.cuda.empty_cache()
        self._states, _ = self._now()
        try:
            made = [torch.empty(size, dtype=torch.uint8, device=self._device) for size in self._made]
            del made
        except torch.OutOfMemoryError:  # others have taken the memory meanwhile
            self._guesses, self._made = [], ()
            torch.cuda.empty_cache()

    def _now(self) -> tuple[int, int]:
        """The bytes that are reserved, and how often the allocator had to give some back to go on."""
        stats = torch.cuda.memory_stats_as_nested_dict(self._device)
        return stats["reserved_bytes"]["all"]["current"], stats["num_alloc_retries"]


class _Apart:
    """The addresses that belong to pools ([Note: memory apart]).

    cuBLAS's workspace comes and goes there in every pass, and the allocator notes it like any other request.
    """

    def __init__(self, segments: Iterable[Mapping[str, Any]]) -> None:
        pooled = (segment for segment in segments if any(segment["segment_pool_id"]))
        self._parts = sorted((part["address"], part["address"] + part["total_size"]) for part in pooled)

    def __contains__(self, address: int) -> bool:
        place = bisect_right(self._parts, address, key=itemgetter(0))
        return place > 0 and address < self._parts[place - 1][1]


def _record(most: int) -> None:
    """Have the allocator note what is asked of it, or stop that where ``most`` is 0."""
    record: Any = torch.cuda.memory._record_memory_history
    record(enabled="all" if most else None, context=None, stacks="python", max_entries=max(most, 1))
