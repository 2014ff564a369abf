"""Enumerate the strategies that are worth evaluating."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from zeroshard.config.offload import Offload
from zeroshard.planner.footprint import device_bytes_needed
from zeroshard.planner.machines.machine import Machine
from zeroshard.planner.strategy import Strategy
from zeroshard.planner.traced_model import TracedModel
from zeroshard.planner.tracing.trace_model import CHECKPOINT_MODES, CheckpointMode
from zeroshard.sharding import Placement

OFFLOAD_FRACTIONS = (0.5, 1.0)  # fractions of the optimizer states to try on the host
MAX_MICRO_BATCH = 4096  # largest micro-batch to try
PLACEHOLDER_DIRECTORY = "."  # the plan uses only the disk's rates and size, not its path


def candidate_strategies(
    traced_model: TracedModel,
    devices: int,
    machine: Machine,
    *,
    batch: int | None = None,
    micro_batches: Sequence[int] | None = None,
    stages: Sequence[int] = (0, 1, 2, 3),
    tensors: Sequence[int] | None = None,
    checkpoints: Sequence[CheckpointMode] = CHECKPOINT_MODES,
    offloads: Any = "every",
) -> Iterator[Strategy]:
    """Yield every valid strategy within the given constraints that may be useful.

    Without a batch or micro-batches, double the micro-batch for as long as it fits.
    """
    for name, values in (("batch", (batch,)), ("micro_batch", micro_batches), ("tensor", tensors)):
        for value in values or ():
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"{name} is a whole number from 1 up, got {value!r}")
    given = {"stage": stages, "tensor": tensors, "checkpoint": checkpoints, "micro_batch": micro_batches}
    for name, options in given.items():
        if options is not None and not len(options):
            raise ValueError(f"{name} is empty: give one value or several, or leave it out")
    for stage in stages:
        if stage not in (0, 1, 2, 3):
            raise ValueError(f"stage is 0, 1, 2 or 3, got {stage!r}")
    for checkpoint in checkpoints:
        if checkpoint not in CHECKPOINT_MODES:
            raise ValueError(f"checkpoint is one of {', '.join(CHECKPOINT_MODES)}, got {checkpoint!r}")
    if not traced_model.has_blocks:
        checkpoints = [mode for mode in checkpoints if mode == "none"] or list(checkpoints)
    for tensor in _tensor_degrees(traced_model, devices, machine, tensors):
        is_unsharded = devices == tensor  # then all stages are the same, and the last one can offload the most
        for stage in stages[-1:] if is_unsharded else stages:
            for offload in _candidate_offloads(offloads, stage, devices // tensor, machine):
                error = _offload_error(stage, devices // tensor, offload)
                if error is not None and stage != stages[-1]:
                    continue  # a higher stage may support it
                if error is not None:
                    raise error
                for checkpoint in checkpoints:
                    if checkpoint == "host" and machine.kind == "cpu" and len(checkpoints) > 1:
                        continue  # the host is the device: no memory is saved
                    base = Strategy(stage=stage, tensor=tensor, checkpoint=checkpoint, offload=offload)
                    yield from _with_batches(traced_model, base, devices, machine, batch, micro_batches)


def _offload_error(stage: int, data: int, offload: Offload | None) -> ValueError | None:
    """Return the error if a stage cannot offload the given states, else None."""
    try:
        Placement.from_stage(stage, data, offload)
    except ValueError as error:
        return error
    return None


def _tensor_degrees(
    traced_model: TracedModel, devices: int, machine: Machine, given: Sequence[int] | None
) -> list[int]:
    if given is None:
        # across nodes the tensor-parallel collectives cost too much
        degrees = traced_model.tensor_degrees(min(machine.devices, devices))
        return [degree for degree in degrees if devices % degree == 0]
    for degree in given:
        if degree < 1 or devices % degree:
            raise ValueError(f"{devices} devices are not a multiple of the {degree} that divide each layer")
    return list(given)


def _candidate_offloads(given: Any, stage: int, data: int, machine: Machine) -> list[Offload | None]:
    if given != "every":
        options = given if isinstance(given, (list, tuple)) else [given]
        if not options:
            raise ValueError("offload is empty: give one value or several, or leave it out")
        return [Offload.from_option(option) for option in options]
    offloads: list[Offload | None] = [None]
    if machine.kind == "cpu" or (stage == 0 and data > 1):
        return offloads
    offloads += [Offload(optimizer=("host", fraction)) for fraction in OFFLOAD_FRACTIONS]
    if stage == 3:
        offloads.append(Offload(optimizer="host", parameters="host"))
        if machine.disk:
            offloads.append(Offload(optimizer="disk", parameters="host", directory=PLACEHOLDER_DIRECTORY))
    elif machine.disk:
        offloads.append(Offload(optimizer="disk", directory=PLACEHOLDER_DIRECTORY))
    return offloads


def _with_batches(
    traced_model: TracedModel,
    base: Strategy,
    devices: int,
    machine: Machine,
    batch: int | None,
    micro_batches: Sequence[int] | None,
) -> Iterator[Strategy]:
    data_ranks = devices // base.tensor
    if batch is None:
        yield from (
            _doubling_micro_batches(traced_model, base, devices, machine)
            if micro_batches is None
            else (_with_batch(base, micro, 1) for micro in micro_batches)
        )
        return
    if batch % data_ranks:
        return
    batch_per_rank = batch // data_ranks
    divisors = [micro for micro in range(1, batch_per_rank + 1) if batch_per_rank % micro == 0]
    for micro in divisors if micro_batches is None else [m for m in micro_batches if batch_per_rank % m == 0]:
        strategy = _with_batch(base, micro, batch_per_rank // micro)
        yield strategy
        if micro_batches is None and not _can_fit(traced_model, _with_batch(base, micro, 1), devices, machine):
            return  # a larger one does not fit either; gradient accumulation only adds memory


def _doubling_micro_batches(
    traced_model: TracedModel, base: Strategy, devices: int, machine: Machine
) -> Iterator[Strategy]:
    micro = 1
    while micro <= MAX_MICRO_BATCH:
        strategy = _with_batch(base, micro, 1)
        yield strategy
        if not _can_fit(traced_model, strategy, devices, machine):
            return
        micro *= 2


def _can_fit(traced_model: TracedModel, strategy: Strategy, devices: int, machine: Machine) -> bool:
    return device_bytes_needed(traced_model.footprint(strategy, devices, machine), machine) <= machine.memory


def _with_batch(strategy: Strategy, micro_batch: int, accumulate: int) -> Strategy:
    return replace(strategy, micro_batch=micro_batch, accumulate=accumulate)
