"""The cost of parameters that one rank updates as a whole: owners, exchange, and the arithmetic of the update.

[Note: predicting whole parameters]
The engine's own rule assigns the owners: ``assign_owners``, by elements ([Note: whole parameters]), or by FLOPs if
owners only orthogonalize ([Note: Muon on shards]). The fullest owner decides memory and time, since the others wait for
it. Per step, with N ranks and Ψ elements in whole parameters:

    memory     states of the owned parameters; in the step also their values and gradients, and the buffers of an
               exchange. This bounds the memory of optimizers that are stepped in batches, too
    traffic    Ψ/N gradients and Ψ/N values to the owners, and the owned values back: 3Ψ/N elements, in two
               collectives for each ``bucket_size``/2 elements of the fullest owner
    compute    the matmuls of the update, on the owner

With Muon on shards, states are on slices, Ψ/N updates travel to the owners and back, in bf16, and there are two
collectives for each ``max_exchanged_numel`` elements of the fullest owner.

What an update computes and stores is measured, not assumed: one step of the optimizer on the meta device. For Muon, a
matrix of a × b elements with a ≤ b takes 5 iterations of two products of a·a·b and one of a·a·a, so 20·a²·b + 10·a³
FLOPs, and one state value per element.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from zeroshard.memory import fullest_over_mean
from zeroshard.optim import assign_owners, measure_update, runs_on_shards
from zeroshard.sharding import find_block_matrices
from zeroshard.utils.format import format_bytes, format_count

OPTIMIZERS = ("adamw", "muon")
UNKNOWN_STATES = 2.0  # state values per element if an update cannot be measured: as for Adam
# read and written per element on the owner: gradient and value packed, unpacked (32), momentum and update (30), value
# (18), packed and unpacked on the way back (16)
UPDATE_BYTES_PER_ELEMENT = 96
# the same with Muon on shards: on each rank momentum, gradient and update (12), update and value (10); on the owner
# unpacked and packed (8), normalized (6), and copied in each iteration (20)
SHARD_BYTES_PER_ELEMENT, OWNER_BYTES_PER_ELEMENT = 22, 34
# temporary memory of Muon's kernels per element of a matrix or stack: the fp32 update, and four bf16 tensors of at most
# its size
SCRATCH_BYTES_PER_ELEMENT = 12


class WholeParamSpec(NamedTuple):
    """What the update of one parameter stores and computes."""

    numel: int
    """Its elements, over all tensor-parallel ranks."""
    states: float
    """Bytes of optimizer states per byte of the parameter, in the dtype of the update."""
    flops: float
    """FLOPs of matmuls."""
    group: int = 0
    """Its group in the optimizer: owners are assigned group by group."""
    is_on_shards: bool = False
    """Whether its states are on the shards, and its owner only orthogonalizes it: see [Note: Muon on shards]."""

    @classmethod
    def from_measured(
        cls, numel: int, state_bytes: int | None, flops: float, group: int, is_on_shards: bool = False
    ) -> WholeParamSpec:
        """``state_bytes`` are those of an fp32 parameter; None if they are not known."""
        states = UNKNOWN_STATES if state_bytes is None else state_bytes / (4 * max(numel, 1))
        return cls(numel, states, flops, group, is_on_shards)


def find_whole_params(
    model: nn.Module, optimizer: str | torch.optim.Optimizer, needs_whole: Sequence[bool] = ()
) -> dict[str, WholeParamSpec]:
    """Return the parameters that are updated as a whole, in the order in which they get their owners.

    ``optimizer`` is a name in ``OPTIMIZERS``, or an optimizer of this model and which of its groups need it.

    >>> blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 2), nn.Linear(2, 8)) for _ in range(2))
    >>> find_whole_params(nn.Sequential(nn.Embedding(4, 8), blocks), "muon")["1.0.0.weight"]
    WholeParamSpec(numel=16, states=1.0, flops=720.0, group=0, is_on_shards=True)
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    if isinstance(optimizer, str):
        if optimizer not in OPTIMIZERS:
            raise ValueError(f"optimizer must be one of {', '.join(OPTIMIZERS)}, got {optimizer!r}")
        if optimizer == "adamw":
            return {}
        parameters = dict(model.named_parameters())
        matrices = find_block_matrices(model)
        optimizer, needs_whole = torch.optim.Muon([parameters[name] for name in matrices]), [True]
    found: dict[str, WholeParamSpec] = {}
    measured: dict[tuple[int, torch.Size], WholeParamSpec] = {}
    for number, (group, is_whole) in enumerate(zip(optimizer.param_groups, needs_whole, strict=True)):
        is_on_shards = is_whole and runs_on_shards(optimizer, group)
        for parameter in group["params"] if is_whole else ():
            key = number, parameter.shape
            if key not in measured:
                update = measure_update(optimizer, group, parameter.shape, torch.float32)
                state_bytes, flops = (None, 0) if update is None else update
                found_bytes = parameter.numel(), state_bytes, float(flops)
                measured[key] = WholeParamSpec.from_measured(*found_bytes, number, is_on_shards)
            if parameter.requires_grad:
                found[names[id(parameter)]] = measured[key]
    return found


@dataclass(frozen=True)
class OwnerLoads:
    """What each owner has, by rank of the shard axis."""

    elements: tuple[int, ...]
    state_bytes: tuple[int, ...]
    """Of the states on the shards, an equal part."""
    flops: tuple[float, ...]
    max_param_numel: int
    """Elements of the largest parameter."""
    least_elements: float
    """No assignment of whole parameters gives its fullest owner fewer elements."""
    least_flops: float = 0.0
    """If owners only orthogonalize: no assignment of whole matrices gives its fullest owner fewer FLOPs."""

    @classmethod
    def assign(
        cls, whole: Mapping[str, WholeParamSpec], itemsizes: Mapping[str, int], ranks: int
    ) -> tuple[dict[str, int], OwnerLoads]:
        """Assign the owners, as the engine does. ``itemsizes`` are those of the dtypes of the updates."""
        loads, work = [0] * ranks, [0] * ranks  # elements of whole parameters, FLOPs of those on shards
        owners: dict[str, int] = {}
        for group in sorted({spec.group for spec in whole.values()}):
            names = [name for name, spec in whole.items() if spec.group == group]
            if whole[names[0]].is_on_shards:
                owners |= zip(names, assign_owners([int(whole[name].flops) for name in names], work), strict=True)
            else:
                owners |= zip(names, assign_owners([whole[name].numel for name in names], loads), strict=True)
        elements, state_bytes, flops = [0] * ranks, [0] * ranks, [0.0] * ranks
        shared_bytes = 0
        for name, owner in owners.items():
            nbytes = round(whole[name].states * whole[name].numel * itemsizes[name])
            if whole[name].is_on_shards:
                shared_bytes += nbytes
            else:
                state_bytes[owner] += nbytes
            elements[owner] += whole[name].numel
            flops[owner] += whole[name].flops
        state_bytes = [nbytes + shared_bytes // ranks for nbytes in state_bytes]
        sizes = [spec.numel for spec in whole.values()]
        least = least_max_load(sizes, ranks)
        is_on_shards = all(spec.is_on_shards for spec in whole.values())
        least_flops = least_max_load([spec.flops for spec in whole.values()], ranks) if is_on_shards else 0.0
        return owners, cls(tuple(elements), tuple(state_bytes), tuple(flops), max(sizes), least, least_flops)

    @property
    def fullest_elements(self) -> int:
        return max(self.elements)

    def describe(self) -> str:
        """Compare the fullest owner with the mean."""
        ranks = len(self.elements)
        parts = [
            f"{format_count(max(self.elements))} elements ({fullest_over_mean(self.elements):.2f} × the mean of "
            f"{format_count(sum(self.elements) / ranks)})",
            f"{format_bytes(max(self.state_bytes))} of states ({fullest_over_mean(self.state_bytes):.2f} ×)",
        ]
        if any(self.flops):
            parts.append(f"{max(self.flops) / 1e12:.3g} TFLOP a step ({fullest_over_mean(self.flops):.2f} ×)")
        least, what = self.least_elements * ranks / max(sum(self.elements), 1), ""
        if self.least_flops:
            least, what = self.least_flops * ranks / sum(self.flops), "' work"
        bound = f"no assignment of whole parameters{what} is below {least:.2f} ×" if least >= 1.005 else ""
        return ", ".join(parts) + (f"; {bound}" if bound else "")


def least_max_load(sizes: Sequence[float], ranks: int) -> float:
    """Return a lower bound of the fullest owner's load, for any assignment of items of these sizes.

    Of the k·N + 1 largest items, some rank has k + 1; and no rank has less than the mean.

    >>> least_max_load([4, 4, 4, 1], ranks=2), least_max_load([4, 4, 1, 1], ranks=2)
    (8, 5.0)
    """
    ordered = sorted(sizes, reverse=True)
    crowded = [(at // ranks + 1) * ordered[at] for at in range(0, len(ordered), ranks)]
    return max([sum(sizes) / ranks, *crowded])
