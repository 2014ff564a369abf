"""Subject: the model that is planned for, traced as often as plans need it and no more."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from zeroshard.config.config import Config
from zeroshard.planner.depth_extrapolation import (
    NonUniformBlocksError,
    extrapolate_trace,
    find_block_stack,
    truncate_model,
)
from zeroshard.planner.footprint import Footprint, footprint
from zeroshard.planner.machines.machine import Machine
from zeroshard.planner.state_sizes import StateSizes, state_sizes
from zeroshard.planner.step_time import StepTime, TraceCost, step_time
from zeroshard.planner.strategy import Strategy
from zeroshard.planner.tracing.inputs import Inputs, LossFn
from zeroshard.planner.tracing.trace import Trace, split_spans
from zeroshard.planner.tracing.trace_model import CheckpointMode, UntraceableError, trace_model
from zeroshard.sharding.units import find_repeated_blocks, plan_units
from zeroshard.tensor_parallel.plans import tensor_plan_for

TRACE_TOLERANCE = 0.001  # by which a trace may miss what it stands for
TRACED_DEPTHS = (2, 3)  # blocks of the shortened models that are traced in the place of a deep one
MIN_EXTRAPOLATED_BLOCKS = 8  # blocks from which on that is done
TRACED_MICRO_BATCHES = (
    2,
    3,
)  # micro-batches that are traced; all others lie on the lines through them. 1 is special to many kernels


@dataclass(frozen=True)
class TraceAndCost:
    """A trace, and what it takes on a machine."""

    trace: Trace
    cost: TraceCost


class TracedModel:
    """A model, how it is called, and what :func:`zeroshard.shard` is told beside a choice.

    ``partition``: whether each tensor rank keeps its part of a recomputed block's input (P_a), or all of it.
    ``together``: whether small blocks make units together, as they do ([Note: small blocks]). ``replicas``: groups of
    ranks that have the same states.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: Inputs = None,
        *,
        loss: LossFn = None,
        sequence: int | None = None,
        optimizer_states: int = 2,
        one_pass: bool = True,
        scratch: float = 0.0,
        clipped: bool = False,
        partition: bool = True,
        group_small_blocks: bool = True,
        replicas: int = 1,
        **options: Any,
    ) -> None:
        self.model, self._inputs, self._loss, self._sequence = model, inputs, loss, sequence
        self.optimizer_states, self._scratch_bytes_per_element, self.has_clipping = optimizer_states, scratch, clipped
        self.has_fused_adam, self._replicas = one_pass, replicas
        self.options, self._partition_activations = options, partition
        self._config = Config(**options)
        self._unit_specs = plan_units(model, self._config.units, self._config.bucket_size, group_small_blocks)
        alone = all(plan.block_count == 1 for plan in self._unit_specs if plan.is_block)  # see [Note: small blocks]
        stack = find_block_stack(model) if self._config.units is None and alone else None
        self._extrapolated_depth = (
            len(stack) if stack is not None and len(stack) >= MIN_EXTRAPOLATED_BLOCKS else 0
        )  # 0: traced as it is
        self._short_models: list[nn.Module] = []
        self._can_extrapolate_micro_batch = True  # whether other micro-batches are taken to lie on straight lines
        self._traces: dict[tuple[int, CheckpointMode, str, int], Trace] = {}
        self._costs: dict[tuple[int, CheckpointMode, Machine, int], TraceAndCost] = {}
        self._state_sizes: dict[Any, StateSizes] = {}
        self._footprints: dict[Any, Footprint] = {}

    @property
    def has_blocks(self) -> bool:
        """Whether there are repeated blocks, whose inputs could be kept alone."""
        return next(find_repeated_blocks(self.model), None) is not None

    def tensor_degrees(self, max_degree: int) -> list[int]:
        """The powers of two up to ``most`` that the model can be divided by; 1 alone where no plan is known."""
        plan = tensor_plan_for(self.model)
        degrees = [1]
        while plan is not None and 2 * degrees[-1] <= max_degree:
            if any(count % (2 * degrees[-1]) for count in plan.divisible_sizes.values()):
                break
            degrees.append(2 * degrees[-1])
        return degrees

    def trace_and_cost(self, strategy: Strategy, machine: Machine) -> TraceAndCost:
        """The trace of a choice, priced on a machine."""
        key = (strategy.tensor, strategy.checkpoint, machine, strategy.micro_batch)
        if key not in self._costs:
            found = self._trace(strategy.tensor, strategy.checkpoint, machine.kind, strategy.micro_batch)
            self._costs[key] = TraceAndCost(found, TraceCost.from_trace(found, machine, strategy.tensor))
        return self._costs[key]

    def _trace(self, tensor: int, checkpoint: CheckpointMode, kind: str, micro_batch: int) -> Trace:
        if micro_batch in TRACED_MICRO_BATCHES or not self._can_extrapolate_micro_batch:
            return self._cached_trace(tensor, checkpoint, kind, micro_batch)
        low, high = (self._cached_trace(tensor, checkpoint, kind, batch) for batch in TRACED_MICRO_BATCHES)
        if low.has_same_ops(high):
            return low.extrapolate(high, micro_batch)
        return self._cached_trace(tensor, checkpoint, kind, micro_batch)

    def _cached_trace(self, tensor: int, checkpoint: CheckpointMode, kind: str, micro_batch: int) -> Trace:
        same: CheckpointMode = "recompute" if checkpoint == "host" else checkpoint
        key = (tensor, same, kind, micro_batch)
        if key not in self._traces:
            self._traces[key] = (
                self._trace_from_short_models(*key) if self._extrapolated_depth else self._trace_model(self.model, *key)
            )
        return self._traces[key]

    def _trace_from_short_models(self, tensor: int, checkpoint: CheckpointMode, kind: str, micro_batch: int) -> Trace:
        """The trace of a deep model from two shortened ones; the whole model's, where these are not alike."""
        try:
            self._short_models = self._short_models or [truncate_model(self.model, blocks) for blocks in TRACED_DEPTHS]
            low, high = (
                self._trace_model(model, tensor, checkpoint, kind, micro_batch) for model in self._short_models
            )
            return extrapolate_trace(low, high, self._extrapolated_depth - TRACED_DEPTHS[1])
        except (NonUniformBlocksError, UntraceableError):
            self._extrapolated_depth = 0
            return self._trace_model(self.model, tensor, checkpoint, kind, micro_batch)

    def _trace_model(
        self, model: nn.Module, tensor: int, checkpoint: CheckpointMode, kind: str, micro_batch: int
    ) -> Trace:
        return trace_model(
            model,
            self._inputs,
            micro_batch=micro_batch,
            sequence=self._sequence,
            loss=self._loss,
            tensor=tensor,
            checkpoint=checkpoint,
            partition_activations=self._partition_activations,
            device_kind=kind,
            **self.options,
        )

    def verify_extrapolation(self, strategy: Strategy, machine: Machine) -> bool:
        """Whether the whole model, at a choice's own micro-batch, does what other traces have told of it.

        If not, nothing is taken for a straight line from now on: neither depth nor micro-batch.
        """
        if not (self._extrapolated_depth or self._can_extrapolate_micro_batch):
            return True
        checkpoint: CheckpointMode = "recompute" if strategy.checkpoint == "host" else strategy.checkpoint
        key = (strategy.tensor, checkpoint, machine.kind, strategy.micro_batch)
        real = self._trace_model(self.model, *key)
        if _has_same_cost(self._trace(*key), real):
            return True
        self._extrapolated_depth, self._can_extrapolate_micro_batch = 0, False
        self._traces, self._costs, self._footprints = {key: real}, {}, {}
        return False

    def state_sizes(self, strategy: Strategy, ranks: int, on_gpu: bool) -> StateSizes:
        """What the library holds of a choice."""
        key = (strategy.stage, strategy.tensor, repr(strategy.offload), ranks, on_gpu)
        if key not in self._state_sizes:
            self._state_sizes[key] = state_sizes(
                self.model,
                Config(**{**self.options, **strategy.shard_options}),
                ranks=ranks,
                tensor=strategy.tensor,
                optimizer_states=self.optimizer_states,
                on_gpu=on_gpu,
                has_fused_adam=self.has_fused_adam,
                unit_specs=self._unit_specs,
                replicas=self._replicas,
            )
        return self._state_sizes[key]

    def footprint(self, strategy: Strategy, ranks: int, machine: Machine, timeline: bool = False) -> Footprint:
        """What a choice holds on each of ``ranks``."""
        alike = replace(strategy, accumulate=min(strategy.accumulate, 2), offload=None)
        key = (alike, repr(strategy.offload), ranks, machine, timeline)
        if key not in self._footprints:
            self._footprints[key] = self._footprint(strategy, ranks, machine, timeline)
        return self._footprints[key]

    def _footprint(self, strategy: Strategy, ranks: int, machine: Machine, timeline: bool) -> Footprint:
        traced, on_gpu = self.trace_and_cost(strategy, machine), machine.kind == "cuda"
        held = self.state_sizes(strategy, ranks, on_gpu)
        trained = sum(unit.trained_numel for unit in held.units)
        return footprint(
            traced.trace,
            held,
            on_gpu=on_gpu,
            prefetch=self._config.prefetch,
            inputs_on_host=strategy.checkpoint == "host",
            workspace=machine.workspace * (1 if self._config.defragment else 2),  # see [Note: one workspace]
            scratch=self._scratch_bytes_per_element * min(trained, self._config.bucket_size),
            timeline=timeline,
            spans=traced.cost.spans,
            has_persistent_grads=strategy.accumulate > 1 or strategy.offload is not None,
            is_accumulating=strategy.accumulate > 1,
        )

    def step_time(self, strategy: Strategy, ranks: int, machine: Machine) -> StepTime:
        """How long a step of a choice takes."""
        traced = self.trace_and_cost(strategy, machine)
        return step_time(
            traced.cost,
            self.state_sizes(strategy, ranks, machine.kind == "cuda"),
            machine,
            ranks=ranks,
            tensor=strategy.tensor,
            accumulate=strategy.accumulate,
            prefetch=self._config.prefetch,
            has_clipping=self.has_clipping,
            kept_input_bytes=sum(traced.trace.kept_input_bytes) if strategy.checkpoint == "host" else 0.0,
        )

    def useful_flops(self, strategy: Strategy, machine: Machine) -> float:
        """Of a step on one device, without what is computed again."""
        plain = Strategy(tensor=strategy.tensor, micro_batch=strategy.micro_batch)
        return strategy.accumulate * self.trace_and_cost(plain, machine).cost.flops


def _has_same_cost(found: Trace, real: Trace) -> bool:
    """Whether two traces take the same memory and time, but for rounding."""
    sizes = [
        (
            max(span.peak_bytes for span in split_spans(one)),
            sum(op.flops for op in one.ops),
            sum(op.moved_bytes for op in one.ops),
        )
        for one in (found, real)
    ]
    near = all(abs(mine - its) <= TRACE_TOLERANCE * its for mine, its in zip(*sizes, strict=True))
    return near and len(found.events) == len(real.events)
