"""Enumerate the strategies that are worth evaluating."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any

from zeroshard.config.config import EIGHT_BIT_DTYPES, PARTITIONS, check_replicas
from zeroshard.config.offload import Offload
from zeroshard.planner.footprint import device_bytes_needed
from zeroshard.planner.machines.machine import Machine
from zeroshard.planner.strategy import Strategy
from zeroshard.planner.traced_model import TracedModel
from zeroshard.planner.tracing.trace_model import CHECKPOINT_MODES, CheckpointMode
from zeroshard.sharding import Placement

STAGES = (0, 1, 2, 3)
OFFLOAD_FRACTIONS = (0.5, 1.0)  # fractions of the optimizer states to try on the host
MAX_MICRO_BATCH = 4096  # largest micro-batch to try
MAX_DIVISOR = 2**20  # the same if a batch is given, and its divisors are tried
EXACT = "none"  # given instead of an 8-bit dtype: values are sent in their own
LOSSY_DTYPE = "int8"  # tried if lossy strategies are allowed
_WIRE_DTYPES = tuple(EXACT if dtype is None else dtype for dtype in EIGHT_BIT_DTYPES)
PLACEHOLDER_DIRECTORY = "."  # the plan uses only the disk's rates and size, not its path


@dataclass(frozen=True, kw_only=True)
class SearchSpace:
    """The values to try for each part of a strategy."""

    batch: int | None = None
    """Samples of a step over all devices. None: as many as one backward has."""
    micro_batches: Sequence[int] | None = None
    """None: all divisors of the batch, or powers of two for as long as they fit."""
    stages: Sequence[int] = STAGES
    replicas: Sequence[int] | None = None
    """Sizes of the outer axis of a 2-D mesh. None: 1, and the number of nodes."""
    partitions: Sequence[str] | None = None
    """How such a mesh divides the states. None: all ways that differ from those without it."""
    gather_dtypes: Sequence[str] | None = None
    """8-bit dtypes of all-gathers, or "none". None: "none", and int8 if ``allow_lossy``."""
    reduce_wires: Sequence[str] | None = None
    """The same for reductions."""
    allow_lossy: bool = False
    """Whether to try 8-bit collectives, which change the numbers, without being named."""
    local_steps: Sequence[int] = (1,)
    """After how many steps replicas that train alone are averaged: another algorithm, so it is tried only if named."""
    tensors: Sequence[int] | None = None
    """None: all degrees that divide the model and the devices of a node."""
    checkpoints: Sequence[CheckpointMode] = CHECKPOINT_MODES
    offloads: Any = "every"
    """The ``offload`` option of :func:`zeroshard.shard`, a list of them, or "every"."""

    @property
    def can_reduce_in_8_bits(self) -> bool:
        """Whether some strategies send gradients in 8 bits."""
        return self.allow_lossy if self.reduce_wires is None else set(self.reduce_wires) != {EXACT}

    def __post_init__(self) -> None:
        offloads = self.offloads if isinstance(self.offloads, (list, tuple)) else None
        for name, values, allowed in (
            ("batch", None if self.batch is None else (self.batch,), None),
            ("micro_batch", self.micro_batches, None),
            ("stage", self.stages, STAGES),
            ("replicas", self.replicas, None),
            ("partition", self.partitions, tuple(PARTITIONS)),
            ("gather_dtype", self.gather_dtypes, _WIRE_DTYPES),
            ("reduce_wire", self.reduce_wires, _WIRE_DTYPES),
            ("local_steps", self.local_steps, None),
            ("tensor", self.tensors, None),
            ("checkpoint", self.checkpoints, CHECKPOINT_MODES),
            ("offload", offloads, offloads),
        ):
            if values is not None and not len(values):
                raise ValueError(f"{name} is empty: pass one value or several, or leave it out")
            for value in values or ():
                if allowed is None and (type(value) is not int or value < 1):
                    raise ValueError(f"{name} must be a positive integer, got {value!r}")
                if allowed is not None and value not in allowed:
                    raise ValueError(f"{name} must be one of {', '.join(map(str, allowed))}, got {value!r}")


def candidate_strategies(
    traced_model: TracedModel, devices: int, machine: Machine, space: SearchSpace
) -> Iterator[Strategy]:
    """Yield every valid strategy of a search space that may be useful."""
    checkpoints = space.checkpoints
    if not traced_model.has_blocks:
        checkpoints = [mode for mode in checkpoints if mode == "none"] or checkpoints

    def can_fit(strategy: Strategy) -> bool:
        return device_bytes_needed(traced_model.footprint(strategy, devices, machine), machine) <= machine.memory

    for tensor in _tensor_degrees(traced_model, devices, machine, space.tensors):
        is_unsharded = devices == tensor  # then all stages are the same, and the last one can offload the most
        for stage in space.stages[-1:] if is_unsharded else space.stages:
            for offload in _candidate_offloads(space.offloads, stage, devices // tensor, machine):
                try:
                    Placement.from_stage(stage, devices // tensor, offload)
                except ValueError:
                    if stage == space.stages[-1]:
                        raise
                    continue  # a higher stage may support it
                plain = Strategy(stage=stage, tensor=tensor, offload=offload)
                bases = [
                    base
                    for steps in space.local_steps
                    for mesh in _with_local_steps(plain, steps, devices, machine, space)
                    for base in _with_wires(mesh, devices // tensor, traced_model.options, space)
                ]
                for base, checkpoint in product(bases, checkpoints):
                    if checkpoint == "host" and machine.is_cpu and len(checkpoints) > 1:
                        continue  # the host is the device: no memory is saved
                    yield from _with_batches(replace(base, checkpoint=checkpoint), devices // tensor, space, can_fit)


def explain_unsupported(space: SearchSpace) -> str:
    """Return the 8-bit collectives or local steps that a space without strategies names, and what they need, or ""."""
    if any(dtypes and EXACT not in dtypes for dtypes in (space.gather_dtypes, space.reduce_wires)):
        return (
            "these 8-bit collectives: gather_dtype needs stage 3, reduce_wire needs stage 1, 2 or 3, no "
            "reduce_dtype='fp32' and no replicas of partition='hybrid'; both need several data-parallel ranks, and a "
            "batch that is a multiple of these"
        )
    if min(space.local_steps) > 1:
        return (
            f"local_steps={max(space.local_steps)}: stages 1 to 3 need replicas, the rows of a 2-D mesh, and "
            "partition='hybrid'; in stage 0 without them every rank is a replica. The batch must be a multiple of the "
            "data-parallel ranks, of which there must be several"
        )
    return ""


def _with_local_steps(
    plain: Strategy, steps: int, devices: int, machine: Machine, space: SearchSpace
) -> Iterator[Strategy]:
    """Yield the strategy on the meshes on which shard() accepts these local steps; without a number, a row per node."""
    if steps == 1:
        yield from _with_meshes(plain, devices, machine, space)
        return
    data_ranks, nodes = devices // plain.tensor, machine.nodes(devices)
    if data_ranks == 1 or (space.replicas is None and data_ranks % nodes):
        return
    for mesh in _with_meshes(plain, devices, machine, replace(space, replicas=space.replicas or (nodes,))):
        if mesh.partition == "hybrid" and (mesh.replicas > 1 or mesh.stage == 0):
            yield replace(mesh, local_steps=steps)


def _with_meshes(plain: Strategy, devices: int, machine: Machine, space: SearchSpace) -> Iterator[Strategy]:
    """Yield the strategy on one axis of data-parallel ranks, and on the 2-D meshes that may be better."""
    data_ranks = devices // plain.tensor
    for replicas in space.replicas or dict.fromkeys((1, machine.nodes(devices))):
        if data_ranks % replicas:
            if space.replicas is None:
                continue
            raise ValueError(f"{data_ranks} data-parallel ranks cannot be divided into {replicas} replicas")
        for partition in _partitions(plain, replicas, data_ranks // replicas, space):
            yield replace(plain, replicas=replicas, partition=partition)


def _with_wires(plain: Strategy, data_ranks: int, options: Mapping[str, Any], space: SearchSpace) -> Iterator[Strategy]:
    """Yield the strategy with each dtype of its collectives that shard() accepts."""
    default = (EXACT, LOSSY_DTYPE) if space.allow_lossy else (EXACT,)
    for dtypes in product(space.gather_dtypes or default, space.reduce_wires or default):
        gather_dtype, reduce_wire = (None if dtype == EXACT else dtype for dtype in dtypes)
        found = replace(plain, gather_dtype=gather_dtype, reduce_wire=reduce_wire)
        if not found.is_lossy or (data_ranks > 1 and _accepts(found, options)):
            yield found


def _accepts(strategy: Strategy, options: Mapping[str, Any]) -> bool:
    """Return whether shard() accepts the 8-bit collectives of a strategy."""
    try:
        check_replicas(strategy.config(options), strategy.replicas)
    except ValueError:
        return False
    return True


def _partitions(plain: Strategy, replicas: int, inner_ranks: int, space: SearchSpace) -> Sequence[str]:
    """Return the partitions of a mesh that the strategy supports and that differ."""
    if replicas == 1:
        return (space.partitions or [*PARTITIONS])[:1]
    partitions = space.partitions
    if partitions is None and plain.stage == 0:  # nothing is partitioned
        return [*PARTITIONS][:1] if space.replicas else ()
    has_offloaded_params = plain.offload is not None and bool(plain.offload.parameters)
    if partitions is None:
        partitions = _useful_partitions(plain.stage, has_offloaded_params)
        # over all ranks, two hops are for reductions in 8 bits: a node sends the sums of its devices
        if not (space.replicas or space.can_reduce_in_8_bits):
            partitions = [name for name in partitions if name != "full"]

    def is_accepted(name: str) -> bool:  # by shard()
        params_axes, grads_axes, optimizer_axes = PARTITIONS[name]
        has_inner_params = plain.stage == 3 and params_axes != optimizer_axes
        has_inner_grads = plain.stage >= 2 and grads_axes != optimizer_axes
        has_inner_states = has_inner_params or has_inner_grads
        return not (has_inner_states and inner_ranks == 1) and not (has_inner_params and has_offloaded_params)

    return [name for name in partitions if is_accepted(name)]


def _useful_partitions(stage: int, has_offloaded_params: bool) -> list[str]:
    """Return the partitions that differ in this stage, without those that send more and save nothing.

    >>> _useful_partitions(1, False), _useful_partitions(2, False)
    (['hybrid', 'full'], ['hybrid', 'full', 'inner-gradients'])
    """
    if stage == 3 and not has_offloaded_params:
        return [name for name in PARTITIONS if name != "inner-gradients"]
    return ["hybrid", "full", *(["inner-gradients"] if stage >= 2 else ())]


def _tensor_degrees(
    traced_model: TracedModel, devices: int, machine: Machine, given: Sequence[int] | None
) -> list[int]:
    if given is None:
        # across nodes the tensor-parallel collectives cost too much
        degrees = traced_model.tensor_degrees(machine.local_ranks(devices))
        return [degree for degree in degrees if devices % degree == 0]
    for degree in given:
        if devices % degree:
            raise ValueError(f"the number of devices ({devices}) must be a multiple of the tensor degree ({degree})")
    return list(given)


def _candidate_offloads(given: Any, stage: int, data_ranks: int, machine: Machine) -> list[Offload | None]:
    if given != "every":
        return [Offload.from_option(option) for option in (given if isinstance(given, (list, tuple)) else [given])]
    offloads: list[Offload | None] = [None]
    if machine.is_cpu or (stage == 0 and data_ranks > 1):
        return offloads
    offloads += [Offload(optimizer=("host", fraction)) for fraction in OFFLOAD_FRACTIONS]
    if stage == 3:
        offloads.append(Offload(optimizer="host", parameters="host"))
        if machine.disk:
            offloads.append(Offload(optimizer="disk", parameters="host", directory=PLACEHOLDER_DIRECTORY))
    elif machine.disk:
        offloads.append(Offload(optimizer="disk", directory=PLACEHOLDER_DIRECTORY))
    return offloads


@cache
def _divisors(number: int) -> list[int]:
    """Return the divisors of a number up to MAX_DIVISOR.

    >>> _divisors(6)
    [1, 2, 3, 6]
    """
    return [divisor for divisor in range(1, min(number, MAX_DIVISOR) + 1) if number % divisor == 0]


def _with_batches(
    base: Strategy, data_ranks: int, space: SearchSpace, can_fit: Callable[[Strategy], bool]
) -> Iterator[Strategy]:
    """Yield the strategy with each micro-batch, in increasing order, up to the first that does not fit."""
    if space.batch is None:
        powers = [1 << power for power in range(MAX_MICRO_BATCH.bit_length())]
        batches = [(micro, 1) for micro in space.micro_batches or powers]
    elif space.batch % data_ranks:
        return
    else:
        per_rank = space.batch // data_ranks
        micros = space.micro_batches or _divisors(per_rank)
        batches = [(micro, per_rank // micro) for micro in micros if per_rank % micro == 0]
    _, grads_axes, optimizer_axes = PARTITIONS[base.partition]
    needs_accumulation = grads_axes != optimizer_axes and space.partitions is None
    for micro, accumulate in batches:
        if accumulate > 1 or not needs_accumulation:  # else another partition is the same
            yield replace(base, micro_batch=micro, accumulate=accumulate)
        if space.micro_batches is None and not can_fit(replace(base, micro_batch=micro, accumulate=1)):
            return  # a larger one does not fit either; gradient accumulation only adds memory
