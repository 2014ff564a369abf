"""Predict a step of ranks that share one device and communicate through loopback sockets.

The planner's simulation knows devices of their own and links between them. Ranks that share a device take turns on it,
so for each of N ranks it is N times as slow; and the sockets are a link whose rate is measured with all ranks. What a
rank computes is measured too, with all ranks at once and without communication. What is predicted is how the two
overlap, and what the collectives of a strategy send.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from zeroshard.models import GPT, GPTConfig
from zeroshard.planner import Machine, Strategy
from zeroshard.planner.machines.machine import Link
from zeroshard.planner.machines.presets import FALLBACK_PRESET, preset_of_gpu
from zeroshard.planner.scaling import TracedModel, TrainingLoop
from zeroshard.planner.step_time import StepConditions, StepTime, step_time

UNLIMITED = Link(bandwidth=1e18, latency=0)


def beside(kind: str) -> str:
    """Return the name of the rate of all-gathers beside reductions of a kind."""
    return f"all-gather beside {kind}"


def trace_gpt(config: GPTConfig, **options: Any) -> TracedModel:
    """Return a GPT for predictions, with ``options`` of shard()."""
    with torch.device("meta"):
        model = GPT(config)
    return TracedModel(model, TrainingLoop(sequence=config.context), **options)


@dataclass(frozen=True)
class SharedDevice:
    """What was measured of ranks that share a device."""

    ranks: int
    device: str
    """The name of the GPU, or "cpu"."""
    compute_seconds: float
    """Of a forward and a backward, while all ranks compute, without communication."""
    link_rates: dict[str, float]
    """Bytes/s that a rank receives while all communicate: in "all-gather", "reduce-scatter" and "all-to-all", and, by
    the name that :func:`beside` returns, in all-gathers and reductions together."""

    def machine(self, link_rate: float) -> Machine:
        """Return one rank's share of the device, with a link.

        >>> shared = SharedDevice(ranks=2, device="NVIDIA H200", compute_seconds=0.1, link_rates={})
        >>> whole, half = Machine.resolve("h200"), shared.machine(3.6e9)
        >>> half.devices, half.bandwidth == whole.bandwidth / 2, half.inside.bandwidth
        (2, True, 3600000000.0)
        """
        base = Machine.resolve("cpu" if self.device == "cpu" else preset_of_gpu(self.device) or FALLBACK_PRESET)
        link = replace(UNLIMITED, bandwidth=link_rate)
        return replace(
            base,
            name="shared",
            devices=self.ranks,
            flops={name: rate / self.ranks for name, rate in base.flops.items()},
            bandwidth=base.bandwidth / self.ranks,
            gap=0.0,
            op=0.0,  # what the host launches is in the measured time
            inside=link,
            outside=link,
        )

    def predict(self, traced: TracedModel, strategy: Strategy) -> StepTime:
        """Predict a step of a model with a strategy and its micro-batch; one backward a step."""
        free = self.machine(UNLIMITED.bandwidth)
        cost, sizes = (
            traced.trace_and_cost(strategy, free).cost,
            traced.state_sizes(strategy, self.ranks, not free.is_cpu),
        )
        scale = self.compute_seconds / sum(cost.device_seconds)  # operations take the measured time together
        scaled = replace(cost, device_seconds=[scale * seconds for seconds in cost.device_seconds])
        conditions = StepConditions(ranks=self.ranks)
        traffic = step_time(scaled, sizes, free, conditions).traffic  # does not depend on rates
        # the machine has one rate for all collectives: that at which these bytes take as long as at their own rates
        gathered, reduced = traffic.get("all-gather", 0.0), traffic.get("reduce-scatter", 0.0)
        kind = "all-to-all" if strategy.reduce_wire else "reduce-scatter"
        # stage 3 gathers in backward too, half of all, while it reduces
        each = min(gathered / 2, reduced) if strategy.stage == 3 else 0.0
        seconds = (
            2 * each / self.link_rates[beside(kind)]
            + (gathered - each) / self.link_rates["all-gather"]
            + (reduced - each) / self.link_rates[kind]
        )
        return step_time(scaled, sizes, self.machine((gathered + reduced) / seconds), conditions)
