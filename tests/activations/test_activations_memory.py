"""Where activations are kept: laid in a line, placed in a stack, sent to the host and back."""

from __future__ import annotations

import random
import weakref
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zeroshard.activations.stack import ALIGN_BYTES, ActivationStack, PoolBuffer, StackSlot
from zeroshard.activations.store import ActivationStore
from zeroshard.activations.tensor_layout import TensorLayout, checksum
from zeroshard.memory.tracker import MemoryTracker, NowAndPeak
from zeroshard.sharding.layout import round_up

CPU = torch.device("cpu")

# ------------------------------------------------------------------------------------------------------- form


@st.composite
def tensors(draw: Any) -> torch.Tensor:
    """Tensors as models make them: permuted, cut out of others, expanded, overlapping, in any dtype."""
    shape = draw(st.lists(st.integers(1, 4), max_size=4))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.complex128, torch.int64, torch.bool]))
    tensor = torch.arange(max(1, torch.Size(shape).numel()), dtype=torch.float32).view(shape).to(dtype)
    tensor = tensor.permute(draw(st.permutations(range(len(shape)))))
    for dim in range(tensor.dim()):
        how = draw(st.sampled_from(["whole", "whole", "cut", "every second", "expanded"]))
        if how == "cut":
            tensor = tensor.narrow(dim, tensor.shape[dim] // 2, (tensor.shape[dim] + 1) // 2)
        elif how == "every second":
            tensor = tensor[(slice(None),) * dim + (slice(None, None, 2),)]
        elif how == "expanded" and tensor.shape[dim] == 1:
            tensor = tensor.expand(*tensor.shape[:dim], 3, *tensor.shape[dim + 1 :])
    if draw(st.booleans()) and tensor.dim() and tensor.shape[0] > 1:
        tensor = tensor.unfold(0, 2, 1)  # several indices mean one element
    return tensor


@settings(deadline=None, max_examples=150)
@given(tensors(), st.integers(1, 4))
def test_parts_of_a_line_make_the_tensor_again_with_its_strides(tensor: torch.Tensor, ranks: int) -> None:
    form = TensorLayout.from_tensor(tensor)
    line = form.flatten(tensor)
    assert line.shape == (form.unexpanded_numel,)
    length = -(-form.unexpanded_numel // ranks)
    parts = [line[length * rank : length * (rank + 1)].clone() for rank in range(ranks)]
    again = form.unflatten(torch.cat(parts))
    assert torch.equal(again, tensor)
    if form._storage_extent is not None:
        assert again.stride() == tensor.stride()


def test_a_line_copies_nothing_where_the_tensor_fills_its_memory_and_repeats_nothing_where_it_was_expanded() -> None:
    tensor = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert TensorLayout.from_tensor(tensor).flatten(tensor).data_ptr() == tensor.data_ptr()
    expanded = torch.randn(1, 3).expand(100, 3)
    form = TensorLayout.from_tensor(expanded)
    assert form.flatten(expanded).numel() == 3
    assert form.unflatten(form.flatten(expanded).clone()).stride() == (0, 1)


# --------------------------------------------------------------------------------------------------- checksum


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex128, torch.bool])
def test_a_checksum_changes_with_every_bit_and_with_every_exchange(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    tensor = torch.randn(6, 5, generator=generator).to(dtype)
    if dtype.is_floating_point:
        tensor[2, 3], tensor[0, 0] = float("nan"), float("inf")
    first = checksum(tensor)
    assert torch.equal(first, checksum(tensor.clone()))
    raw = tensor.view(torch.uint8)
    for byte in random.Random(0).sample(range(raw.numel()), 30):
        changed = tensor.clone()
        changed.view(torch.uint8).view(-1)[byte] ^= 1
        assert not torch.equal(first, checksum(changed))
    for other in (tensor.flip(0), tensor.flip(1), tensor.roll(1, 0), tensor[[0, 2, 1, 3, 4, 5]]):
        if not torch.equal(other.contiguous().view(torch.uint8), raw):
            assert not torch.equal(first, checksum(other.contiguous()))


# ------------------------------------------------------------------------------------------------------ stack


class Allocations:
    """Counts the rooms that a stack makes, and what is alive of them."""

    def __init__(self, limit: int | None = None) -> None:
        self.made: list[int] = []
        self.most = 0
        self._limit = limit
        self._alive: list[tuple[weakref.ref[PoolBuffer], int]] = []

    def __call__(self, nbytes: int) -> PoolBuffer:
        if self._limit is not None and self.alive + nbytes > self._limit:
            raise torch.OutOfMemoryError
        room = PoolBuffer(nbytes, CPU)
        self.made.append(nbytes)
        self._alive.append((weakref.ref(room), nbytes))
        self.most = max(self.most, self.alive)
        return room

    @property
    def alive(self) -> int:
        return sum(nbytes for room, nbytes in self._alive if room() is not None)


def make_stack(allocations: Allocations) -> ActivationStack:
    return ActivationStack("device", allocations, wait_event=lambda event: None)


def step(stack: ActivationStack, sizes: list[int]) -> None:
    """Push in forward, pop in backward."""
    slots = [stack.push(size) for size in sizes]
    while slots:
        slots.pop()


def spans(slots: list[StackSlot]) -> list[tuple[int, int]]:
    return sorted((slot.data.data_ptr(), slot.data.data_ptr() + slot.data.numel()) for slot in slots)


def test_from_the_second_step_on_all_lies_side_by_side_in_one_allocation_that_stays() -> None:
    allocations = Allocations()
    stack = make_stack(allocations)
    sizes = [100, 64, 33, 100]
    for _ in range(4):
        step(stack, sizes)
    total = sum(round_up(size, ALIGN_BYTES) for size in sizes)
    assert allocations.made == [112, 64, 48, 112, total]
    assert allocations.most == total  # also while the one took the place of the four
    slots = [stack.push(size) for size in sizes]
    starts = [slot.data.data_ptr() for slot in slots]
    assert [b - a for a, b in pairwise(starts)] == [112, 64, 48]


def test_varying_lengths_settle_at_the_largest_and_never_hold_old_and_new_at_once() -> None:
    allocations = Allocations()
    stack = make_stack(allocations)
    numbers = random.Random(0)
    most = 0
    for _ in range(200):
        sizes = [numbers.randrange(1, 1000)] * 8
        most = max(most, sum(round_up(size, ALIGN_BYTES) for size in sizes))
        step(stack, sizes)
    step(stack, [1])
    made = len(allocations.made)
    assert stack.allocated_bytes == most
    assert (
        allocations.most <= most + 8 * ALIGN_BYTES + 1000
    )  # what a longer sequence could not use is less than one slot
    for _ in range(20):
        step(stack, [numbers.randrange(1, 1000)] * 8)
    assert len(allocations.made) == made


def test_memory_that_is_free_but_too_small_goes_before_more_is_allocated() -> None:
    allocations = Allocations()
    stack = make_stack(allocations)
    below = stack.push(100)
    step(stack, [100])
    above = stack.push(200)
    assert allocations.most == 112 + 208  # not the second 112 as well
    assert below.data.numel() + above.data.numel() == 300


@settings(deadline=None, max_examples=100)
@given(st.lists(st.tuples(st.integers(1, 200), st.integers(0, 10)), max_size=60))
def test_slots_never_overlap_whatever_the_order_they_go_in(actions: list[tuple[int, int]]) -> None:
    allocations = Allocations()
    stack = make_stack(allocations)
    slots: list[StackSlot] = []
    for size, choice in actions:
        if slots and choice > 4:
            del slots[choice % len(slots)]
        else:
            slots.append(stack.push(size))
        found = spans(slots)
        assert all(a[1] <= b[0] for a, b in pairwise(found))
        assert stack.used_bytes == sum(round_up(slot.data.numel(), ALIGN_BYTES) for slot in slots)
    slots.clear()
    assert stack.used_bytes == 0
    assert allocations.alive == stack.allocated_bytes


def test_graphs_that_always_overlap_take_no_more_than_two_of_them() -> None:
    allocations = Allocations()
    stack = make_stack(allocations)
    older: list[StackSlot] = []
    for _ in range(50):  # the next forward always before the last backward
        newer = [stack.push(100) for _ in range(4)]
        older.clear()
        older = newer
    assert stack.allocated_bytes <= 2 * 4 * 112


def test_a_stack_that_no_memory_is_left_for_in_one_piece_goes_on_in_pieces() -> None:
    allocations = Allocations(limit=400)
    stack = make_stack(allocations)
    step(stack, [100] * 3)
    assert stack.allocated_bytes == 0  # the pieces are gone, the whole is not there yet
    blocker = allocations(100)  # 336 bytes do not fit any more, three times 96 do
    step(stack, [96] * 3)
    assert allocations.made[-3:] == [96] * 3
    assert blocker.tensor.numel() == 100
    with pytest.raises(torch.OutOfMemoryError):
        stack.push(1000)


def test_what_a_side_stream_still_uses_is_waited_for_before_it_is_placed_again_or_goes() -> None:
    class Event:
        synchronized = False

        def synchronize(self) -> None:
            self.synchronized = True

    event: Any = Event()
    joined: list[Any] = []
    allocations = Allocations()
    stack = ActivationStack("device", allocations, joined.append)
    slot = stack.push(16)
    slot.set_last_use(event)
    del slot
    assert joined == []
    slot = stack.push(16)
    assert joined == [event]
    assert not event.synchronized
    del stack
    assert allocations.alive == 16
    del slot  # and with it the memory
    assert allocations.alive == 0
    assert event.synchronized


def test_allocations_are_counted_in_the_ledger_of_the_moment() -> None:
    first, second = MemoryTracker(), MemoryTracker()
    stack = make_stack(Allocations())
    slot = stack.push(100)
    stack.set_tracker(first)
    assert first.by_kind["activations", "device"] == NowAndPeak(112, 112)
    stack.set_tracker(second)
    assert first.by_kind["activations", "device"].now == 0
    other = stack.push(8)
    assert second.by_kind["activations", "device"] == NowAndPeak(128, 128)
    del slot, other, stack
    assert second.by_kind["activations", "device"].now == 0


# ------------------------------------------------------------------------------------------------------ store


def test_what_is_far_comes_back_and_takes_no_device_memory_meanwhile() -> None:
    store = ActivationStore(CPU, offload=True)
    values = [torch.randn(8) for _ in range(5)]
    kept = []
    for value in values:
        store.evict_except(kept[-1:])
        kept.append(store.save(value, 32))
        assert store.device_stack.used_bytes <= 2 * 32
    assert store.host_stack.used_bytes == 5 * 32
    for index in reversed(range(5)):
        store.evict_except(kept[max(0, index - 1) : index + 1])
        for one in reversed(kept[max(0, index - 1) : index + 1]):
            store.prefetch(one)
        assert store.device_stack.used_bytes <= 2 * 32
        assert torch.equal(store.load(kept[index]).view(torch.float32), values[index])
    kept.clear()
    del one
    assert store.device_stack.used_bytes == store.host_stack.used_bytes == 0
