"""Predict a step of ranks that share one device and communicate through loopback sockets.

The planner's simulation knows devices of their own and links between them. Ranks that share a device take turns on it:
for each of N ranks it is N times as slow, and while one computes, no collective advances. What the ranks compute is
measured, all at once and without communication. So are the sockets: a link, with a latency that is mostly the wait for
a turn. What is predicted is which collectives a strategy has, what they send, and how they overlap with each other.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, log2
from typing import Any

import torch

from zeroshard.models import GPT, GPTConfig
from zeroshard.planner import Machine, Strategy
from zeroshard.planner.machines.machine import Link
from zeroshard.planner.machines.presets import FALLBACK_PRESET, preset_of_gpu
from zeroshard.planner.scaling import TracedModel, TrainingLoop
from zeroshard.planner.step_time import StepConditions, StepTime, step_time

UNLIMITED = Link(bandwidth=1e18, latency=0)


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
    links: dict[str, Link]
    """What a rank receives while all communicate, by collective: "all-gather", "reduce-scatter" and "all-to-all"."""

    def machine(self, link: Link) -> Machine:
        """Return one rank's share of the device, with a link.

        >>> shared = SharedDevice(ranks=2, device="NVIDIA H200", compute_seconds=0.1, links={})
        >>> whole, half = Machine.resolve("h200"), shared.machine(Link(bandwidth=3.6e9, latency=1e-3))
        >>> half.devices, half.bandwidth == whole.bandwidth / 2, half.inside.bandwidth
        (2, True, 3600000000.0)
        """
        base = Machine.resolve("cpu" if self.device == "cpu" else preset_of_gpu(self.device) or FALLBACK_PRESET)
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
        free = self.machine(UNLIMITED)
        cost, sizes = (
            traced.trace_and_cost(strategy, free).cost,
            traced.state_sizes(strategy, self.ranks, not free.is_cpu),
        )
        idle = replace(cost, device_seconds=[0.0] * len(cost.device_seconds))  # computation is added at the end
        conditions = StepConditions(ranks=self.ranks)
        traffic = step_time(idle, sizes, free, conditions).traffic  # does not depend on links
        gathered, reduced = traffic.get("all-gather", 0.0), traffic.get("reduce-scatter", 0.0)
        gathers, reductions = (
            self.links["all-gather"],
            self.links["all-to-all" if strategy.reduce_wire else "reduce-scatter"],
        )
        # the machine has one link: at its rate these bytes take as long as at the two rates
        seconds = gathered / gathers.bandwidth + reduced / reductions.bandwidth
        link = Link(
            bandwidth=(gathered + reduced) / seconds,
            # measured of rings; the planner takes a tree, which has fewer hops, for what is small
            latency=(gathers.latency + reductions.latency) / 2 * (self.ranks - 1) / ceil(log2(self.ranks)),
        )
        found = step_time(idle, sizes, self.machine(link), conditions)
        return replace(found, step=found.step + self.compute_seconds, compute=self.compute_seconds)
