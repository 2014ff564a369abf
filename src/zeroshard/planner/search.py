"""Search: which choices are worth looking at."""

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
from zeroshard.sharding.placement import Placement

OFFLOAD_FRACTIONS = (0.5, 1.0)  # of the optimizer's states, that are tried on the host
MAX_MICRO_BATCH = 4096  # micro-batch that is tried
PLACEHOLDER_DIRECTORY = "."  # where a plan's disk would be: only its rates and its size count here


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
    """Yield every choice that is allowed and may be of use, given what was narrowed already.

    Without a batch or micro-batches, a micro-batch is doubled for as long as it fits.
    """
    for name, values in (("batch", (batch,)), ("micro_batch", micro_batches), ("tensor", tensors)):
        for value in values or ():
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"{name} is a whole number from 1 up, got {value!r}")
    given = {"stage": stages, "tensor": tensors, "checkpoint": checkpoints, "micro_batch": micro_batches}
    for name, several in given.items():
        if several is not None and not len(several):
            raise ValueError(f"{name} is empty: give one value or several, or leave it out")
    for stage in stages:
        if stage not in (0, 1, 2, 3):
            raise ValueError(f"stage is 0, 1, 2 or 3, got {stage!r}")
    for checkpoint in checkpoints:
        if checkpoint not in CHECKPOINT_MODES:
            raise ValueError(f"checkpoint is one of {', '.join(CHECKPOINT_MODES)}, got {checkpoint!r}")
    if not traced_model.has_blocks:
        checkpoints = [one for one in checkpoints if one == "none"] or list(checkpoints)
    for tensor in _tensor_degrees(traced_model, devices, machine, tensors):
        alone = devices == tensor  # then all stages are the same, and the last can offload most
        for stage in stages[-1:] if alone else stages:
            for offload in _candidate_offloads(offloads, stage, devices // tensor, machine):
                why = _offload_error(stage, devices // tensor, offload)
                if why is not None and stage != stages[-1]:
                    continue  # a later stage may do it
                if why is not None:
                    raise why
                for checkpoint in checkpoints:
                    if checkpoint == "host" and machine.kind == "cpu" and len(checkpoints) > 1:
                        continue  # the host is the device: nothing is gained
                    begin = Strategy(stage=stage, tensor=tensor, checkpoint=checkpoint, offload=offload)
                    yield from _with_batches(traced_model, begin, devices, machine, batch, micro_batches)


def _offload_error(stage: int, data: int, offload: Offload | None) -> ValueError | None:
    """Why a stage cannot offload what is asked; None: it can."""
    try:
        Placement.from_stage(stage, data, offload)
    except ValueError as error:
        return error
    return None


def _tensor_degrees(
    traced_model: TracedModel, devices: int, machine: Machine, given: Sequence[int] | None
) -> list[int]:
    if given is None:
        degrees = traced_model.tensor_degrees(
            min(machine.devices, devices)
        )  # beyond a node its collectives cost too much
        return [degree for degree in degrees if devices % degree == 0]
    for degree in given:
        if degree < 1 or devices % degree:
            raise ValueError(f"{devices} devices are not a multiple of the {degree} that divide each layer")
    return list(given)


def _candidate_offloads(given: Any, stage: int, data: int, machine: Machine) -> list[Offload | None]:
    if given != "every":
        several = given if isinstance(given, (list, tuple)) else [given]
        if not several:
            raise ValueError("offload is empty: give one value or several, or leave it out")
        return [Offload.from_option(one) for one in several]
    found: list[Offload | None] = [None]
    if machine.kind == "cpu" or (stage == 0 and data > 1):
        return found
    found += [Offload(optimizer=("host", fraction)) for fraction in OFFLOAD_FRACTIONS]
    if stage == 3:
        found.append(Offload(optimizer="host", parameters="host"))
        if machine.disk:
            found.append(Offload(optimizer="disk", parameters="host", directory=PLACEHOLDER_DIRECTORY))
    elif machine.disk:
        found.append(Offload(optimizer="disk", directory=PLACEHOLDER_DIRECTORY))
    return found


def _with_batches(
    traced_model: TracedModel,
    base: Strategy,
    devices: int,
    machine: Machine,
    batch: int | None,
    micro_batches: Sequence[int] | None,
) -> Iterator[Strategy]:
    data = devices // base.tensor
    if batch is None:
        yield from (
            _doubling_micro_batches(traced_model, base, devices, machine)
            if micro_batches is None
            else (_with_batch(base, micro, 1) for micro in micro_batches)
        )
        return
    if batch % data:
        return
    each = batch // data
    divisors = [micro for micro in range(1, each + 1) if each % micro == 0]
    for micro in divisors if micro_batches is None else [m for m in micro_batches if each % m == 0]:
        choice = _with_batch(base, micro, each // micro)
        yield choice
        if micro_batches is None and not _can_fit(traced_model, _with_batch(base, micro, 1), devices, machine):
            return  # nor will a larger one; with several backwards a step it takes more


def _doubling_micro_batches(
    traced_model: TracedModel, base: Strategy, devices: int, machine: Machine
) -> Iterator[Strategy]:
    micro = 1
    while micro <= MAX_MICRO_BATCH:
        choice = _with_batch(base, micro, 1)
        yield choice
        if not _can_fit(traced_model, choice, devices, machine):
            return
        micro *= 2


def _can_fit(traced_model: TracedModel, strategy: Strategy, devices: int, machine: Machine) -> bool:
    return device_bytes_needed(traced_model.footprint(strategy, devices, machine), machine) <= machine.memory


def _with_batch(strategy: Strategy, micro_batch: int, accumulate: int) -> Strategy:
    return replace(strategy, micro_batch=micro_batch, accumulate=accumulate)
