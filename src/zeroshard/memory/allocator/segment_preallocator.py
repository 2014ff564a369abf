"""Segments: which pieces of device memory the model's temporaries are carved from (the paper's M_D).

[Note: large segments first]
PyTorch's allocator takes memory from the device in segments, each as large as the request that needed it, and carves
later, smaller requests from segments that are free. A step asks for its small temporaries first (a block's) and for its
largest last (the loss's): each of these then gets a segment of its own, beside all the small ones, which are free and
of no use by then. Were some large ones there first, the small ones would be carved from them.

So after a few steps the allocator is asked to note a step's requests, and these are rehearsed with a few segments of
various sizes made beforehand (``segment_search.py``). The sizes with which least memory was reserved in the end are
made, once, from an empty cache. Should the next pass reserve more than it did on paper, where a tensor may be freed a
moment earlier than on a device, the next best sizes are tried, and after the last of them those that did best are made.
Passes on larger inputs begin it anew, a few times; smaller ones fit into what is there.

Where memory is so full that the allocator had to give segments back in the middle of a step, the next passes begin with
an empty cache instead: nothing of the last one may then stand in the way of the next.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from operator import itemgetter
from typing import Any

import torch

from zeroshard.memory.allocator.segment_search import SegmentCandidate, SegmentSearch, SegmentSizes
from zeroshard.memory.allocator.simulator import SMALL_SIZE_BYTES, AllocRequest

WARMUP_PASSES = 2  # passes before the model's needs are looked at: optimizer states are made in the first step
MAX_TRACE_EVENTS = 200_000  # requests and frees of a step; a longer one is left alone
SEARCH_SECONDS = 4.0  # that rehearsals may take
RESERVED_SLACK_RATIO = 1.02  # times what is needed on paper, and …
SMALL_REQUESTS_BYTES = 64 << 20  # … bytes for all smaller requests: so much may be needed
INPUT_GROWTH_RATIO = 1.125  # times the inputs, from which on a pass is looked at anew
MAX_SEARCHES = 8  # times that it is
EMPTY_CACHE_PASSES = 100  # passes that begin with an empty cache after memory was full


class SegmentPreallocator:
    """Watches the segments of one model's temporaries, one training pass after the other."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pass_count = self._search_count = 0
        self._searched_input_numel = -1  # elements of the inputs that were last looked at, and …
        self._last_input_numel = -1  # … of the pass before
        self._is_recording = False
        self._empty_cache_passes_left = 0  # passes that will begin with an empty cache
        self._segment_sizes: SegmentSizes = ()  # of the segments that are made first
        self._candidates: list[SegmentCandidate] = []  # that are not judged yet; the first of them is made
        self._evaluated: list[SegmentCandidate] = []  # with what they really needed
        self._reserved_without_cache = 0  # bytes that are reserved with an empty cache
        self._last_reserved = self._last_retries = 0  # when this was last looked at

    def on_forward_begin(self, input_numel: int) -> None:
        """A training forward begins, on inputs of so many elements: what the pass before has asked for is known."""
        self._pass_count += 1
        if torch.cuda.is_current_stream_capturing():
            return
        if self._pass_count <= WARMUP_PASSES:
            torch.cuda.empty_cache()  # of what building, and the pass before, have left
            return
        reserved, retries = self._reserved_and_retries()
        if retries > self._last_retries or self._empty_cache_passes_left:
            self._empty_cache_passes_left = (
                EMPTY_CACHE_PASSES if retries > self._last_retries else self._empty_cache_passes_left - 1
            )
            self.stop_recording()
            self._candidates, self._segment_sizes = [], ()
            self._preallocate()
        elif self._is_recording:
            self._evaluated, self._candidates = [], SegmentSearch(self._recorded_requests()).search(SEARCH_SECONDS)
            self._apply(self._candidates[0])
        elif (
            self._candidates and self._last_input_numel > self._searched_input_numel
        ):  # that pass cannot be compared with what was noted
            self._candidates = []
        elif self._candidates:
            self._evaluate(reserved - self._reserved_without_cache)
        elif reserved < 0.9 * self._last_reserved:  # somebody has emptied the cache
            self._preallocate()
        if (
            input_numel > self._searched_input_numel * INPUT_GROWTH_RATIO
            and self._search_count < MAX_SEARCHES
            and not self._empty_cache_passes_left
        ):
            self._searched_input_numel = input_numel
            self._start_recording()
        self._last_input_numel = input_numel
        self._last_reserved, self._last_retries = self._reserved_and_retries()

    def stop_recording(self) -> None:
        """Stop noting, if that is under way."""
        if self._is_recording:
            _record_memory_history(0)
            self._is_recording = False

    def _start_recording(self) -> None:
        """Have the allocator note this pass, from an empty cache, unless the user has it note requests already."""
        if not torch._C._cuda_isHistoryEnabled():
            self._search_count += 1
            self._candidates, self._segment_sizes = [], ()
            self._preallocate()
            _record_memory_history(MAX_TRACE_EVENTS)
            self._is_recording = True

    def _recorded_requests(self) -> list[AllocRequest]:
        """The requests of the pass before for large tensors of the model's memory, and when they were freed."""
        number = self._device.index or 0
        noted = torch.cuda.memory._snapshot()
        events = noted["device_traces"][number]
        self.stop_recording()
        if len(events) >= MAX_TRACE_EVENTS:
            return []
        apart = _PoolAddresses(noted["segments"])
        requests: list[AllocRequest] = []
        for event in events:
            if event["action"] == "alloc" and event["size"] > SMALL_SIZE_BYTES and event["addr"] not in apart:
                requests.append((event["addr"], event["size"]))
            elif event["action"] == "free_completed":
                requests.append((event["addr"], 0))
        return requests

    def _apply(self, candidate: SegmentCandidate) -> None:
        self._segment_sizes = candidate.sizes
        self._preallocate()

    def _evaluate(self, reserved_bytes: int) -> None:
        """The pass before has needed so much beside the model's states: stay with what is made, or try the next."""
        guess = self._candidates.pop(0)
        self._evaluated.append(SegmentCandidate(guess.sizes, reserved_bytes))
        if reserved_bytes <= RESERVED_SLACK_RATIO * guess.reserved_bytes + SMALL_REQUESTS_BYTES:
            self._candidates = []
        else:
            self._apply(
                self._candidates[0]
                if self._candidates
                else min(self._evaluated, key=lambda judged: judged.reserved_bytes)
            )

    def _preallocate(self) -> None:
        """Empty the cache, make the segments, and leave them free."""
        torch.cuda.empty_cache()
        self._reserved_without_cache, _ = self._reserved_and_retries()
        try:
            made = [torch.empty(size, dtype=torch.uint8, device=self._device) for size in self._segment_sizes]
            del made
        except torch.OutOfMemoryError:  # others have taken the memory meanwhile
            self._candidates, self._segment_sizes = [], ()
            torch.cuda.empty_cache()

    def _reserved_and_retries(self) -> tuple[int, int]:
        """The bytes that are reserved, and how often the allocator had to give some back to go on."""
        stats = torch.cuda.memory_stats_as_nested_dict(self._device)
        return stats["reserved_bytes"]["all"]["current"], stats["num_alloc_retries"]


class _PoolAddresses:
    """The addresses that belong to pools ([Note: memory apart]).

    cuBLAS's workspace comes and goes there in every pass, and the allocator notes it like any other request.
    """

    def __init__(self, segments: Iterable[Mapping[str, Any]]) -> None:
        pooled = (segment for segment in segments if any(segment["segment_pool_id"]))
        self._ranges = sorted((part["address"], part["address"] + part["total_size"]) for part in pooled)

    def __contains__(self, address: int) -> bool:
        place = bisect_right(self._ranges, address, key=itemgetter(0))
        return place > 0 and address < self._ranges[place - 1][1]


def _record_memory_history(max_entries: int) -> None:
    """Have the allocator note what is asked of it, or stop that where ``most`` is 0."""
    record: Any = torch.cuda.memory._record_memory_history
    record(enabled="all" if max_entries else None, context=None, stacks="python", max_entries=max(max_entries, 1))
