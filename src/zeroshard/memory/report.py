"""Report: what one rank holds and what it communicated, as data and as a table."""

from __future__ import annotations

from dataclasses import dataclass, field

from zeroshard.comm import Traffic
from zeroshard.memory.tracker import MODEL_STATE_KINDS, NowAndPeak
from zeroshard.utils.format import format_bytes


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
    during a step; "staging": one unit while it is being sharded; "activations": what checkpoint_activations() stores;
    "ahead of the step": shadow buffers of speculative updates; "away": see offload_states()."""
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

    @property
    def states(self) -> int:
        """Bytes of model states now: parameters, gradients, optimizer states and master weights."""
        return sum(held.now for (kind, _), held in self.memory.items() if kind in MODEL_STATE_KINDS)

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
        """Format as a table."""
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
        if self.chosen:
            lines.append(f"chosen: {self.chosen}")
        return "\n".join(lines)
