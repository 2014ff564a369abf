"""The model that is planned, with cached traces, sizes and costs."""

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
from zeroshard.sharding import find_repeated_blocks, plan_units
from zeroshard.tensor_parallel import tensor_plan_for

TRACE_TOLERANCE = 0.001  # relative error allowed for an extrapolated trace
TRACED_DEPTHS = (2, 3)  # blocks of the truncated models that are traced instead of a deep one
MIN_EXTRAPOLATED_BLOCKS = 8  # models with fewer blocks are traced in full
# traced micro-batches; others are extrapolated linearly. Not 1: many kernels treat it specially
TRACED_MICRO_BATCHES = (2, 3)


@dataclass(frozen=True)
class TraceAndCost:
    """A trace and its cost on a machine."""

    trace: Trace
    cost: TraceCost


class TracedModel:
    """A model, its inputs, and the options of :func:`zeroshard.shard` that are not part of a strategy.

    ``partition``: each tensor-parallel rank keeps a shard of a recomputed block's input (P_a), not all of it.
    ``group_small_blocks``: small blocks are grouped into units, as in the engine ([Note: small blocks]).
    ``replicas``: number of groups of ranks that have the same states.
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
        is_ungrouped = all(
            spec.block_count == 1 for spec in self._unit_specs if spec.is_block
        )  # see [Note: small blocks]
        stack = find_block_stack(model) if self._config.units is None and is_ungrouped else None
        # 0: the full model is traced
        self._extrapolated_depth = len(stack) if stack is not None and len(stack) >= MIN_EXTRAPOLATED_BLOCKS else 0
        self._short_models: list[nn.Module] = []
        self._can_extrapolate_micro_batch = True  # traces are linear in the micro-batch
        self._traces: dict[tuple[int, CheckpointMode, str, int], Trace] = {}
        self._costs: dict[tuple[int, CheckpointMode, Machine, int], TraceAndCost] = {}
        self._state_sizes: dict[Any, StateSizes] = {}
        self._footprints: dict[Any, Footprint] = {}

    @property
    def has_blocks(self) -> bool:
        """Whether the model has repeated blocks, which can be recomputed."""
        return next(find_repeated_blocks(self.model), None) is not None

    def tensor_degrees(self, max_degree: int) -> list[int]:
        """Return the tensor-parallel degrees up to ``max_degree``, powers of two; only 1 if no plan is known."""
        plan = tensor_plan_for(self.model)
        degrees = [1]
        while plan is not None and 2 * degrees[-1] <= max_degree:
            if any(count % (2 * degrees[-1]) for count in plan.divisible_sizes.values()):
                break
            degrees.append(2 * degrees[-1])
        return degrees

    def trace_and_cost(self, strategy: Strategy, machine: Machine) -> TraceAndCost:
        """Return the trace of a strategy and its cost on a machine."""
        key = (strategy.tensor, strategy.checkpoint, machine, strategy.micro_batch)
        if key not in self._costs:
            trace = self._trace(strategy.tensor, strategy.checkpoint, machine.kind, strategy.micro_batch)
            self._costs[key] = TraceAndCost(trace, TraceCost.from_trace(trace, machine, strategy.tensor))
        return self._costs[key]

    def _trace(self, tensor: int, checkpoint: CheckpointMode, kind: str, micro_batch: int) -> Trace:
        if micro_batch in TRACED_MICRO_BATCHES or not self._can_extrapolate_micro_batch:
            return self._cached_trace(tensor, checkpoint, kind, micro_batch)
        low, high = (self._cached_trace(tensor, checkpoint, kind, batch) for batch in TRACED_MICRO_BATCHES)
        if low.has_same_ops(high):
            return low.extrapolate(high, micro_batch)
        return self._cached_trace(tensor, checkpoint, kind, micro_batch)

    def _cached_trace(self, tensor: int, checkpoint: CheckpointMode, kind: str, micro_batch: int) -> Trace:
        traced_mode: CheckpointMode = "recompute" if checkpoint == "host" else checkpoint
        key = (tensor, traced_mode, kind, micro_batch)
        if key not in self._traces:
            self._traces[key] = (
                self._trace_from_short_models(*key) if self._extrapolated_depth else self._trace_model(self.model, *key)
            )
        return self._traces[key]

    def _trace_from_short_models(self, tensor: int, checkpoint: CheckpointMode, kind: str, micro_batch: int) -> Trace:
        """Extrapolate the trace from two truncated models; if their blocks differ, trace the full model."""
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
        """Return whether the extrapolated trace of a strategy matches a trace of the full model at its micro-batch.

        If not, stop extrapolating, both over depth and over the micro-batch.
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
        """Return the state sizes of a strategy on one rank."""
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
        """Return the memory footprint of a strategy on each of ``ranks``."""
        reduced = replace(strategy, accumulate=min(strategy.accumulate, 2), offload=None)
        key = (reduced, repr(strategy.offload), ranks, machine, timeline)
        if key not in self._footprints:
            self._footprints[key] = self._footprint(strategy, ranks, machine, timeline)
        return self._footprints[key]

    def _footprint(self, strategy: Strategy, ranks: int, machine: Machine, timeline: bool) -> Footprint:
        traced, on_gpu = self.trace_and_cost(strategy, machine), machine.kind == "cuda"
        sizes = self.state_sizes(strategy, ranks, on_gpu)
        trainable = sum(unit.trained_numel for unit in sizes.units)
        return footprint(
            traced.trace,
            sizes,
            on_gpu=on_gpu,
            prefetch=self._config.prefetch,
            inputs_on_host=strategy.checkpoint == "host",
            workspace=machine.workspace * (1 if self._config.defragment else 2),  # see [Note: one workspace]
            scratch=self._scratch_bytes_per_element * min(trainable, self._config.bucket_size),
            timeline=timeline,
            spans=traced.cost.spans,
            has_persistent_grads=strategy.accumulate > 1 or strategy.offload is not None,
            is_accumulating=strategy.accumulate > 1,
        )

    def step_time(self, strategy: Strategy, ranks: int, machine: Machine) -> StepTime:
        """Return the step time of a strategy."""
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
        """Return the FLOPs of a step on one device, without recomputation."""
        uncheckpointed = Strategy(tensor=strategy.tensor, micro_batch=strategy.micro_batch)
        return strategy.accumulate * self.trace_and_cost(uncheckpointed, machine).cost.flops


def _has_same_cost(found: Trace, real: Trace) -> bool:
    """Return whether two traces need the same memory and time within ``TRACE_TOLERANCE``."""
    totals = [
        (
            max(span.peak_bytes for span in split_spans(trace)),
            sum(op.flops for op in trace.ops),
            sum(op.moved_bytes for op in trace.ops),
        )
        for trace in (found, real)
    ]
    is_close = all(
        abs(predicted - actual) <= TRACE_TOLERANCE * actual for predicted, actual in zip(*totals, strict=True)
    )
    return is_close and len(found.events) == len(real.events)
