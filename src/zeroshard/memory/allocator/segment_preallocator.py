"""SegmentPreallocator: chooses the allocator segments for the model's temporaries (the paper's M_D).

[Note: large segments first]
PyTorch's allocator takes memory from the device in segments, each as large as the request that needed it, and carves
later, smaller requests from free segments. A step requests its small temporaries first (those of a block) and its
largest last (those of the loss). The large ones then get new segments, in addition to the small segments, which are
free but useless by then. If a few large segments exist first, the small requests are carved from them.

So after a few steps the allocator records the requests of one step, and these are simulated with a few preallocated
segments of various sizes (``segment_search.py``). The sizes with the least reserved memory are preallocated, once, from
an empty cache. If the next pass reserves more than the simulation predicted (it may free a tensor slightly earlier than
the device does), the next best sizes are tried; after the last of them, the sizes that reserved least are used. Passes
on larger inputs start a new search, a limited number of times; smaller inputs fit into the existing segments.

If memory is so full that the allocator had to free segments in the middle of a step, the next passes start with an
empty cache instead, so that no segment of one pass fragments the next.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import torch

from zeroshard.memory.allocator.segment_search import SegmentCandidate, SegmentSearch, SegmentSizes
from zeroshard.memory.allocator.simulator import SMALL_SIZE_BYTES, AllocRequest

WARMUP_PASSES = 2  # passes before recording: optimizer states are created in the first step
MAX_TRACE_EVENTS = 200_000  # requests and frees of a step; longer steps are not optimized
SEARCH_SECONDS = 4.0  # time limit of a search
RESERVED_SLACK_RATIO = 1.02  # a pass may reserve this multiple of the simulated bytes, …
SMALL_REQUESTS_BYTES = 64 << 20  # … plus these bytes for all smaller requests
INPUT_GROWTH_RATIO = 1.125  # growth of the inputs that starts a new search
MAX_SEARCHES = 8  # per model
EMPTY_CACHE_PASSES = 100  # passes that start with an empty cache after memory was full


class SegmentPreallocator:
    """Tunes the segments for one model's temporaries, from one training pass to the next."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pass_count = self._search_count = 0
        self._searched_input_numel = -1  # input elements of the last search, and …
        self._last_input_numel = -1  # … of the last pass
        self._is_recording = False
        self._empty_cache_passes_left = 0  # further passes that start with an empty cache
        self._segment_sizes: SegmentSizes = ()  # of the preallocated segments
        self._candidates: list[SegmentCandidate] = []  # not evaluated yet; the first is preallocated
        self._evaluated: list[SegmentCandidate] = []  # with the bytes they reserved on the device
        self._reserved_without_cache = 0  # bytes reserved with an empty cache
        self._last_reserved = self._last_retries = 0  # at the start of the last pass

    def on_forward_begin(self, input_numel: int) -> None:
        """Start a training pass on inputs of ``input_numel`` elements, and evaluate the previous pass."""
        self._pass_count += 1
        if torch.cuda.is_current_stream_capturing():
            return
        if self._pass_count <= WARMUP_PASSES:
            torch.cuda.empty_cache()  # drops what building the model and the last pass left
            return
        reserved, retries = self._reserved_and_retries()
        if retries > self._last_retries or self._empty_cache_passes_left:
            was_full = retries > self._last_retries
            self._empty_cache_passes_left = EMPTY_CACHE_PASSES if was_full else self._empty_cache_passes_left - 1
            self.stop_recording()
            self._candidates = []
            self._preallocate(())
        elif self._is_recording:
            self._evaluated, self._candidates = [], SegmentSearch(self._recorded_requests()).search(SEARCH_SECONDS)
            self._preallocate(self._candidates[0].sizes)
        elif reserved < 0.9 * self._last_reserved:  # the user emptied the cache: the last pass tells nothing
            self._preallocate(self._segment_sizes)
        elif self._candidates and self._last_input_numel > self._searched_input_numel:
            self._candidates = []  # not comparable: the pass had larger inputs than the recorded one
        elif self._candidates:
            self._evaluate(reserved - self._reserved_without_cache)
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
        if self._is_recording:
            _record_memory_history(0)
            self._is_recording = False

    def _start_recording(self) -> None:
        """Record the requests of this pass, from an empty cache, unless the user already records memory history."""
        if not torch._C._cuda_isHistoryEnabled():
            self._search_count += 1
            self._candidates = []
            self._preallocate(())
            _record_memory_history(MAX_TRACE_EVENTS)
            self._is_recording = True

    def _recorded_requests(self) -> list[AllocRequest]:
        """Return the last pass's requests for large tensors of the default pool, and their frees."""
        device_index = self._device.index or 0
        snapshot = torch.cuda.memory._snapshot()
        events = snapshot["device_traces"][device_index]
        self.stop_recording()
        if len(events) >= MAX_TRACE_EVENTS:
            return []
        # Not of pools: the cuBLAS workspace is freed and allocated there in every pass, and recorded like any request.
        pooled = [segment for segment in snapshot["segments"] if any(segment["segment_pool_id"])]
        pool_ranges = sorted((segment["address"], segment["address"] + segment["total_size"]) for segment in pooled)
        requests: list[AllocRequest] = []
        for event in events:
            if event["action"] == "alloc" and event["size"] > SMALL_SIZE_BYTES:
                if not _contains(pool_ranges, event["addr"]):
                    requests.append((event["addr"], event["size"]))
            elif event["action"] == "free_completed":
                requests.append((event["addr"], 0))
        return requests

    def _evaluate(self, reserved_bytes: int) -> None:
        """Keep the segments or try the next, given the bytes that the last pass reserved besides the model states."""
        candidate = self._candidates.pop(0)
        self._evaluated.append(SegmentCandidate(candidate.sizes, reserved_bytes))
        if reserved_bytes <= RESERVED_SLACK_RATIO * candidate.reserved_bytes + SMALL_REQUESTS_BYTES:
            self._candidates = []
        elif self._candidates:
            self._preallocate(self._candidates[0].sizes)
        else:
            self._preallocate(min(self._evaluated, key=lambda evaluated: evaluated.reserved_bytes).sizes)

    def _preallocate(self, sizes: SegmentSizes) -> None:
        """Empty the cache, allocate segments of these sizes and leave them free."""
        self._segment_sizes = sizes
        torch.cuda.empty_cache()
        self._reserved_without_cache, _ = self._reserved_and_retries()
        try:
            segments = [torch.empty(size, dtype=torch.uint8, device=self._device) for size in sizes]
            del segments
        except torch.OutOfMemoryError:  # other allocations took the memory in the meantime
            self._candidates, self._segment_sizes = [], ()
            torch.cuda.empty_cache()

    def _reserved_and_retries(self) -> tuple[int, int]:
        """Return the reserved bytes, and how often the allocator had to free segments and retry."""
        stats = torch.cuda.memory_stats_as_nested_dict(self._device)
        return stats["reserved_bytes"]["all"]["current"], stats["num_alloc_retries"]


def _contains(ranges: Sequence[tuple[int, int]], address: int) -> bool:
    """Return whether an address is in one of the sorted ranges."""
    index = bisect_right(ranges, address, key=itemgetter(0))
    return index > 0 and address < ranges[index - 1][1]


def _record_memory_history(max_entries: int) -> None:
    """Make the allocator record its requests, or stop recording if ``max_entries`` is 0."""
    record: Any = torch.cuda.memory._record_memory_history
    record(enabled="all" if max_entries else None, context=None, stacks="python", max_entries=max(max_entries, 1))
