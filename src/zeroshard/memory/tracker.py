"""MemoryTracker: bytes that this library holds; Report and Profile: what users see of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch

from zeroshard.comm import Traffic
from zeroshard.sharding import EightBitParams, Float8Layers
from zeroshard.utils.format import format_bytes

MODEL_STATE_KINDS = ("parameters", "gradients", "master weights", "optimizer states")
STATE_KINDS = (*MODEL_STATE_KINDS, "averages", "outer optimizer")  # with those of an EMA, and of Config.local_steps


@dataclass
class NowAndPeak:
    """Bytes held now, and the peak."""

    now: int = 0
    peak: int = 0

    def add(self, nbytes: int) -> None:
        """Add ``nbytes``, which may be negative."""
        self.now += nbytes
        if self.now > self.peak:
            self.peak = self.now


@dataclass
class MemoryTracker:
    """Track what the library allocates and frees. The code that allocates or frees reports it here.

    >>> tracker = MemoryTracker()
    >>> tracker.add("parameters", 100)
    >>> tracker.add("parameters", -60)
    >>> tracker.by_kind["parameters", "device"]
    NowAndPeak(now=40, peak=100)
    """

    by_kind: dict[tuple[str, str], NowAndPeak] = field(default_factory=dict)  # (kind of state, tier)
    total: NowAndPeak = field(default_factory=NowAndPeak)  # on the device
    on_change: Callable[[str, int], None] | None = None  # called on every device change: (kind of state, its bytes now)

    def add(self, kind: str, nbytes: int, tier: str = "device") -> None:
        """Track ``nbytes`` as allocated, or as freed if negative."""
        held = self.by_kind.get((kind, tier)) or self.get(kind, tier)
        held.now += nbytes  # written out: a step adds many times
        if held.now > held.peak:
            held.peak = held.now
        if tier != "device":
            return
        total = self.total
        total.now += nbytes
        if total.now > total.peak:
            total.peak = total.now
        if self.on_change is not None and nbytes:
            self.on_change(kind, held.now)

    def record_transient(self, kind: str, nbytes: int) -> None:
        """Track an allocation that is freed immediately: it only affects the peak."""
        self.add(kind, nbytes)
        self.add(kind, -nbytes)

    def set(self, kind: str, nbytes: int, tier: str = "device") -> None:
        """Set the bytes of a kind whose total is measured."""
        self.add(kind, nbytes - self.get(kind, tier).now, tier)

    def get(self, kind: str, tier: str = "device") -> NowAndPeak:
        held = self.by_kind.get((kind, tier))
        if held is None:
            held = self.by_kind.setdefault((kind, tier), NowAndPeak())  # another thread may have added it
        return held


class OwnedParam(NamedTuple):
    """A parameter that one rank updates as a whole."""

    owner: int  # rank of the shard axis
    elements: int
    state_bytes: int | None  # of its optimizer states; None: they cannot be known before the first step


class OwnedMatrix(NamedTuple):
    """A matrix that Muon updates on flat slices, and that one rank orthogonalizes."""

    owner: int  # rank of the shard axis
    elements: int
    flops: int  # of the products that orthogonalize it


@dataclass(frozen=True)
class Routing:
    """How the optimizer updates each parameter: on flat slices of every rank's shard, or whole, by its owner.

    >>> owned = {"a": OwnedParam(0, 600, 2400), "b": OwnedParam(1, 400, 1600)}
    >>> for part in str(Routing(owners=2, flat={"bias": 30}, whole=owned)).split("; "):
    ...     print(part)
    flat slices: 1 parameter, 30 elements
    whole: 2 parameters, 1,000 elements, each by one of 2 ranks: the fullest has 1.20 × the mean's elements, 1.20 × ...
    """

    owners: int
    """Ranks of the shard axis. 1: every rank updates all whole parameters, as in stage 0."""
    flat: dict[str, int]
    """Elements of the parameters that are updated on flat slices, by name."""
    whole: dict[str, OwnedParam]
    """The parameters that one rank updates, by name."""
    matrices: dict[str, OwnedMatrix] = field(default_factory=dict)
    """The parameters that are updated on flat slices, after one rank has orthogonalized their update, by name."""

    def flops_by_owner(self) -> list[int]:
        """Return the FLOPs of the products by which each rank of the shard axis orthogonalizes matrices."""
        loads = [0] * self.owners
        for matrix in self.matrices.values():
            loads[matrix.owner] += matrix.flops
        return loads

    def elements_by_owner(self) -> list[int]:
        """Return the elements that each rank of the shard axis updates as whole parameters."""
        return self._by_owner({name: param.elements for name, param in self.whole.items()})

    def state_bytes_by_owner(self) -> list[int] | None:
        """Return the bytes of the states that each rank of the shard axis owns; None if they are not known."""
        sizes = {name: param.state_bytes for name, param in self.whole.items() if param.state_bytes is not None}
        return self._by_owner(sizes) if len(sizes) == len(self.whole) else None

    def _by_owner(self, sizes: dict[str, int]) -> list[int]:
        loads = [0] * self.owners
        for name, size in sizes.items():
            loads[self.whole[name].owner] += size
        return loads

    def __str__(self) -> str:
        parts, one = [], "by every rank" if self.owners == 1 else f"each by one of {self.owners} ranks"
        if self.flat or not (self.whole or self.matrices):
            parts.append(f"flat slices: {_count_params(list(self.flat.values()))}")
        if self.matrices:
            count = _count_params([matrix.elements for matrix in self.matrices.values()])
            balance = f": the fullest has {fullest_over_mean(self.flops_by_owner()):.2f} × the mean's work"
            parts.append(f"flat slices, orthogonalized {one}: {count}{balance if self.owners > 1 else ''}")
        if self.whole:
            count = _count_params([param.elements for param in self.whole.values()])
            parts.append(f"whole: {count}, {one}{self._describe_balance() if self.owners > 1 else ''}")
        return "; ".join(parts)

    def _describe_balance(self) -> str:
        state_bytes = self.state_bytes_by_owner()
        text = f": the fullest has {fullest_over_mean(self.elements_by_owner()):.2f} × the mean's elements"
        return text if state_bytes is None else f"{text}, {fullest_over_mean(state_bytes):.2f} × its state bytes"


def fullest_over_mean(loads: Sequence[float]) -> float:
    """Return the largest load divided by the mean.

    >>> fullest_over_mean([3, 1]), fullest_over_mean([0, 0])
    (1.5, 1.0)
    """
    return max(loads) * len(loads) / sum(loads) if any(loads) else 1.0


def _count_params(elements: list[int]) -> str:
    return f"{len(elements)} parameter{'s' if len(elements) != 1 else ''}, {sum(elements):,} elements"


@dataclass(frozen=True)
class Report:
    """Memory and traffic of one rank.

    >>> report = Report(rank=0, ranks=4, parameters=10, memory={("parameters", "device"): NowAndPeak(20, 60)},
    ...     total=NowAndPeak(20, 60), collectives={"all-gather": Traffic(3, 4096)})
    >>> print(report)
    rank 0 of 4, 10 parameters
    memory            tier            now       peak
    parameters        device         20 B       60 B
    total                            20 B       60 B
    last step         count         bytes
    all-gather        3           4.10 kB
    """

    rank: int
    ranks: int
    parameters: int
    """Ψ: number of elements of all parameters."""
    memory: dict[tuple[str, str], NowAndPeak] = field(default_factory=dict)
    """Bytes by (kind of state, tier). "parameters": this rank's shards; "gathered": unsharded units in use;
    "gradients": accumulated or reduced gradients, until zero_grad(); "master weights", "optimizer states"; "buckets":
    the ring of gradient buckets; "autograd": gradients of one unit as backward produces them; "step": fp32 gradients
    and whole parameters during a step; "staging": one unit while it is being sharded; "activations": what
    checkpoint_activations() stores; "error feedback": see Config; "ahead of the step": shadow buffers of speculative
    updates; "away": see offload_states(); "averages": of an EMA; "outer optimizer": its states, and the values that it
    updates."""
    total: NowAndPeak = field(default_factory=NowAndPeak)
    """Total on the device."""
    collectives: dict[str, Traffic] = field(default_factory=dict)
    """Collectives of the last finished step, by kind."""
    tensor_traffic: Traffic | None = None
    """What tensor parallelism communicated along its axis in the last profile."""
    activation_traffic: Traffic | None = None
    """What P_a communicated in the same profile."""
    chosen: str = ""
    """What the planner chose, and why, if anything was left to it."""
    routing: Routing | None = None
    """How the optimizer updates each parameter; None without an optimizer."""
    float8: Float8Layers | None = None
    """Which layers compute in float8, and why others do not; None unless the precision is "fp8"."""
    eight_bits: dict[str, EightBitParams] = field(default_factory=dict)
    """Which parameters "gather_dtype" and "reduce_wire" send in 8 bits, and why others not, by option that is set."""

    @property
    def states(self) -> int:
        """Bytes of model states now: parameters, gradients, optimizer states and master weights."""
        return sum(held.now for (kind, _), held in self.memory.items() if kind in STATE_KINDS)

    @property
    def communicated(self) -> int:
        """Bytes of all collectives of the last step."""
        return sum(traffic.bytes for traffic in self.collectives.values())

    @property
    def activation_share(self) -> float | None:
        """Bytes that P_a all-gathers, divided by those of tensor parallelism itself; 1/12 for the paper's blocks."""
        if self.tensor_traffic is None or self.activation_traffic is None or not self.activation_traffic.bytes:
            return None
        return self.activation_traffic.bytes / max(1, self.tensor_traffic.bytes)

    def __str__(self) -> str:
        lines = [
            f"rank {self.rank} of {self.ranks}, {self.parameters:,} parameters",
            f"{'memory':<18}{'tier':<10}{'now':>9}{'peak':>11}",
        ]
        for (kind, tier), held in self.memory.items():
            lines.append(f"{kind:<18}{tier:<10}{format_bytes(held.now):>9}{format_bytes(held.peak):>11}")
        lines.append(f"{'total':<28}{format_bytes(self.total.now):>9}{format_bytes(self.total.peak):>11}")
        lines.append(f"{'last step':<18}{'count':<10}{'bytes':>9}")
        for kind, traffic in self.collectives.items():
            lines.append(f"{kind:<18}{traffic.count:<10}{format_bytes(traffic.bytes):>9}")
        if (share := self.activation_share) is not None:
            lines.append(f"activation gathers are 1/{1 / share:.1f} of tensor parallelism's traffic (the paper: 1/12)")
        if self.routing is not None:
            lines.append(f"updates: {self.routing}")
        if self.float8 is not None:
            lines.append(f"float8: {self.float8}")
        lines += [f"{option}: {params}" for option, params in self.eight_bits.items()]
        if self.chosen:
            lines.append(f"chosen: {self.chosen}")
        return "\n".join(lines)


@dataclass(frozen=True)
class ProfileMoment:
    """Bytes held from one point in time on."""

    seconds: float
    """Seconds since the profile started, on the host clock."""
    held: dict[str, int]
    """Bytes by kind of state, as in :class:`zeroshard.Report`."""
    allocated: int | None
    """On a GPU, bytes of all live tensors, including the model's activations."""


@dataclass
class Profile:
    """What happened inside ``with zeroshard.profile(model) as profile:``.

    >>> profile = Profile(held={"parameters": 8})
    >>> profile.record_bytes("gathered", 4)
    >>> profile.moments[-1].held
    {'parameters': 8, 'gathered': 4}
    """

    held: dict[str, int] = field(default_factory=dict)
    """Bytes by kind of state, as last recorded."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    moments: list[ProfileMoment] = field(default_factory=list)
    """Every change of the bytes held, in order."""
    phases: list[tuple[str, float]] = field(default_factory=list)
    """Names passed to :meth:`phase`, each with its start in seconds."""
    seconds: float = 0.0
    """Total time; on a GPU, until the device has finished."""
    waited: float = 0.0
    """Seconds in which computation waited for communication."""
    trace: Path | None = None
    """This rank's Chrome trace, if one was asked for; set once it is written."""
    start_time: float = field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        self.moments.append(ProfileMoment(0.0, dict(self.held), None))

    def phase(self, name: str) -> None:
        """Mark the start of a phase: "forward", "backward", …"""
        self.phases.append((name, time.perf_counter() - self.start_time))

    def record_bytes(self, kind: str, nbytes: int) -> None:
        """Record that ``nbytes`` of one kind of state are held now."""
        self.held[kind] = nbytes
        allocated = torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else None
        self.moments.append(ProfileMoment(time.perf_counter() - self.start_time, dict(self.held), allocated))
