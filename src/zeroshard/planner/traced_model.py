"""The model that is planned, with cached traces, sizes and costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from torch import nn

from zeroshard.optim import MAX_STACKED_NUMEL
from zeroshard.planner.depth_extrapolation import (
    NonUniformBlocksError,
    extrapolate_state_sizes,
    extrapolate_trace,
    find_block_stack,
    truncate_model,
)
from zeroshard.planner.footprint import Footprint, MemoryConditions, footprint
from zeroshard.planner.machines.machine import Machine
from zeroshard.planner.state_sizes import StateSizes, state_sizes
from zeroshard.planner.step_time import StepConditions, StepTime, TraceCost, step_time
from zeroshard.planner.strategy import Strategy
from zeroshard.planner.tracing.inputs import Inputs, LossFn
from zeroshard.planner.tracing.trace import Trace, split_spans
from zeroshard.planner.tracing.trace_model import CheckpointMode, UntraceableError, trace_model
from zeroshard.planner.whole_params import SCRATCH_BYTES_PER_ELEMENT, WholeParamSpec
from zeroshard.sharding import blocks_per_group, find_repeated_blocks, plan_units
from zeroshard.tensor_parallel import tensor_plan_for

TRACE_TOLERANCE = 0.001  # relative error allowed for an extrapolated trace
TRACED_DEPTHS = (2, 3)  # blocks of the models that are traced instead of a deep one: more go between first and last
MIN_EXTRAPOLATED_BLOCKS = 8  # models with fewer blocks are traced in full
# traced micro-batches; others are extrapolated linearly. Not 1: many kernels treat it specially
TRACED_MICRO_BATCHES = (2, 3)


@dataclass(frozen=True, kw_only=True)
class TrainingLoop:
    """How a model is trained, apart from the strategy and the options of :func:`zeroshard.shard`."""

    inputs: Inputs = None
    """The arguments of the model, as in :func:`zeroshard.plan`."""
    loss: LossFn = None
    """Reduces the model's output to a scalar."""
    sequence: int | None = None
    """Tokens per sample of a known language model."""
    has_clipping: bool = False
    """Gradients are clipped by norm."""
    optimizer_states: int = 2
    """State values per element: 2 for Adam."""
    has_fused_adam: bool = True
    """With 2 states, a GPU updates in one pass over memory."""
    scratch_bytes_per_element: float = 0.0
    """Temporary memory of the optimizer's kernels."""
    whole: Mapping[str, WholeParamSpec] = field(default_factory=dict)
    """The parameters that are updated as a whole."""
    partition_activations: bool = True
    """Each tensor-parallel rank keeps a shard of a recomputed block's input (P_a), not all of it."""


DEFAULT_LOOP = TrainingLoop()


class TraceKey(NamedTuple):
    """What a trace depends on."""

    tensor: int
    checkpoint: CheckpointMode  # not "host": where inputs are kept does not change the trace
    device_kind: str
    micro_batch: int

    @classmethod
    def of(cls, strategy: Strategy, machine: Machine) -> TraceKey:
        """Return the key of a strategy's trace on a machine."""
        checkpoint: CheckpointMode = "recompute" if strategy.checkpoint == "host" else strategy.checkpoint
        return cls(strategy.tensor, checkpoint, machine.kind, strategy.micro_batch)


@dataclass(frozen=True)
class TraceAndCost:
    """A trace and its cost on a machine."""

    trace: Trace
    cost: TraceCost


ModelFamily = Callable[[int], nn.Module]
"""Returns the model with the given number of layers; on the meta device it takes no memory."""


class TracedModel:
    """A model with its training loop, and the ``options`` of :func:`zeroshard.shard` that are not part of a strategy.

    A deep model is not traced itself: see [Note: extrapolating in depth]. ``group_small_blocks``: small blocks are
    grouped into units, as in the engine ([Note: small blocks]).
    """

    def __init__(
        self, model: nn.Module, loop: TrainingLoop = DEFAULT_LOOP, *, group_small_blocks: bool = True, **options: Any
    ) -> None:
        for name in Strategy().shard_options:
            if name in options:
                raise ValueError(
                    f"{name} is part of a strategy, and would be ignored here: leave it out, or plan with it"
                )
        self.model, self.loop, self.options = model, loop, options
        self._config = Strategy().config(options)  # for options that are not part of a strategy
        self._unit_specs = plan_units(model, self._config.units, self._config.bucket_size, group_small_blocks)
        # see [Note: small blocks]
        is_ungrouped = all(spec.block_count == 1 for spec in self._unit_specs if spec.is_block)
        stack = find_block_stack(model) if self._config.units is None and is_ungrouped else None
        # 0: the full model is traced
        self._extrapolated_depth = len(stack) if stack is not None and len(stack) >= MIN_EXTRAPOLATED_BLOCKS else 0
        self._shallow_models: Sequence[TracedModel] = ()  # with TRACED_DEPTHS blocks, if traces are extrapolated
        self._family: ModelFamily | None = None
        self.layers = 0  # of a family's model
        self._is_built = True  # ``model`` has all blocks; a deep model of a family has not
        self._can_extrapolate_micro_batch = True  # traces are linear in the micro-batch
        self._traces: dict[TraceKey, Trace] = {}
        self._costs: dict[tuple[TraceKey, Machine], TraceAndCost] = {}
        self._state_sizes: dict[Any, StateSizes] = {}
        self._footprints: dict[Any, Footprint] = {}

    @classmethod
    def from_family(
        cls,
        family: ModelFamily,
        layers: int = TRACED_DEPTHS[1],
        loop: TrainingLoop = DEFAULT_LOOP,
        *,
        shallow_models: Sequence[TracedModel] = (),
        **options: Any,
    ) -> TracedModel:
        """Return the traced model of a family with the given number of layers, without building a deep model.

        Its state sizes are extrapolated, too. ``shallow_models`` are those of another depth, if there are any. If
        several blocks form one unit, or there are only a few, the model is built and traced at its full depth.

        >>> from zeroshard.models import GPTConfig
        >>> from zeroshard.planner.scaling import gpt_family
        >>> deep = TracedModel.from_family(gpt_family(GPTConfig(heads=64, width=8192)), 125, precision="fp16")
        >>> f"{deep.parameters / 1e9:.1f}B"
        '101.5B'
        """
        if layers < 1:
            raise ValueError(f"layers must be a positive integer, got {layers}")
        if not shallow_models and layers > TRACED_DEPTHS[0] and _blocks_per_unit(family, layers, options) == 1:
            shallow_models = [cls(family(depth), loop, **options) for depth in TRACED_DEPTHS]
        traced = cls(shallow_models[0].model if shallow_models else family(layers), loop, **options)
        traced._family, traced.layers, traced._shallow_models = family, layers, shallow_models
        if shallow_models:
            traced._extrapolated_depth, traced._is_built = layers, False
        return traced

    def with_layers(self, layers: int) -> TracedModel:
        """Return the model of the same family with another depth; both share traces, and each block is a unit.

        >>> from zeroshard.models import GPTConfig
        >>> from zeroshard.planner.scaling import gpt_family
        >>> TracedModel.from_family(gpt_family(GPTConfig(heads=64, width=8192))).with_layers(125).layers
        125
        """
        if self._family is None or min(self.layers, layers) <= TRACED_DEPTHS[0]:
            raise ValueError(
                f"models share traces only with more than {TRACED_DEPTHS[0]} layers, got {self.layers} and {layers}"
            )
        shallow_models = self._shallow_models
        return self.from_family(self._family, layers, self.loop, shallow_models=shallow_models, **self.options)

    @cached_property
    def parameters(self) -> int:
        """Ψ: the number of elements of all parameters."""
        if self._is_built:
            return sum(parameter.numel() for parameter in self.model.parameters())
        low, high = (shallow.parameters for shallow in self._shallow_models)
        return low + (self.layers - TRACED_DEPTHS[0]) * (high - low)

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
        key = TraceKey.of(strategy, machine)
        if (key, machine) not in self._costs:
            trace = self._trace(key)
            self._costs[key, machine] = TraceAndCost(trace, TraceCost.from_trace(trace, machine, strategy.tensor))
        return self._costs[key, machine]

    def _trace(self, key: TraceKey) -> Trace:
        if self._extrapolated_depth:
            try:
                return self._extrapolate_depth(key)
            except (NonUniformBlocksError, UntraceableError):
                if not self._is_built:
                    raise
                self._extrapolated_depth = 0
        if key.micro_batch not in TRACED_MICRO_BATCHES and self._can_extrapolate_micro_batch:
            low, high = (self._cached_trace(key._replace(micro_batch=batch)) for batch in TRACED_MICRO_BATCHES)
            if low.has_same_ops(high):
                return low.extrapolate(high, key.micro_batch)
        return self._cached_trace(key)

    def _extrapolate_depth(self, key: TraceKey) -> Trace:
        self._shallow_models = self._shallow_models or [
            TracedModel(truncate_model(self.model, blocks), self.loop, **self.options) for blocks in TRACED_DEPTHS
        ]
        low, high = (shallow._trace(key) for shallow in self._shallow_models)
        return extrapolate_trace(low, high, self._extrapolated_depth - TRACED_DEPTHS[1])

    def _cached_trace(self, key: TraceKey) -> Trace:
        if key not in self._traces:
            self._traces[key] = self._trace_model(self.model, key)
        return self._traces[key]

    def _trace_model(self, model: nn.Module, key: TraceKey) -> Trace:
        # these belong to options of a strategy, which no trace depends on
        belong = ("error_feedback", "outer_optimizer")
        options = {name: value for name, value in self.options.items() if name not in belong}
        return trace_model(
            model,
            self.loop.inputs,
            sequence=self.loop.sequence,
            loss=self.loop.loss,
            partition_activations=self.loop.partition_activations,
            **key._asdict(),
            **options,
        )

    def verify_extrapolation(self, strategy: Strategy, machine: Machine) -> bool:
        """Return whether the extrapolated trace of a strategy matches a trace of the full model at its micro-batch.

        If not, stop extrapolating, both over depth and over the micro-batch.
        """
        if not (self._extrapolated_depth or self._can_extrapolate_micro_batch):
            return True
        key = TraceKey.of(strategy, machine)
        real = self._trace_model(self.model, key)
        if _has_same_cost(self._trace(key), real):
            return True
        self._extrapolated_depth, self._can_extrapolate_micro_batch = 0, False
        self._traces, self._costs, self._footprints = {key: real}, {}, {}
        return False

    def state_sizes(self, strategy: Strategy, ranks: int, on_gpu: bool) -> StateSizes:
        """Return the state sizes of a strategy on one rank."""
        mesh = strategy.replicas, strategy.partition, strategy.tensor, strategy.local_steps
        key = (strategy.stage, mesh, strategy.wire_summary, repr(strategy.offload), ranks, on_gpu)
        if key not in self._state_sizes:
            self._state_sizes[key] = self._compute_state_sizes(strategy, ranks, on_gpu)
        return self._state_sizes[key]

    def _compute_state_sizes(self, strategy: Strategy, ranks: int, on_gpu: bool) -> StateSizes:
        if self._family is not None and not self._is_built:
            if strategy.offload is not None:  # its fractions apply to all blocks together: they cannot be extrapolated
                model = TracedModel(self._family(self.layers), self.loop, group_small_blocks=False, **self.options)
                return model.state_sizes(strategy, ranks, on_gpu)
            low, high = (shallow.state_sizes(strategy, ranks, on_gpu) for shallow in self._shallow_models)
            return extrapolate_state_sizes(low, high, self.layers - TRACED_DEPTHS[1], self._config.bucket_size)
        return state_sizes(
            self.model,
            strategy.config(self.options),
            ranks=ranks // strategy.replicas,
            tensor=strategy.tensor,
            optimizer_states=self.loop.optimizer_states,
            on_gpu=on_gpu,
            has_fused_adam=self.loop.has_fused_adam,
            unit_specs=self._unit_specs,
            replicas=strategy.replicas,
            whole=self.loop.whole,
        )

    def footprint(self, strategy: Strategy, ranks: int, machine: Machine, timeline: bool = False) -> Footprint:
        """Return the memory footprint of a strategy on each of ``ranks``."""
        reduced = replace(strategy, accumulate=min(strategy.accumulate, 2), offload=None)
        key = (reduced, repr(strategy.offload), ranks, machine, timeline)
        if key not in self._footprints:
            self._footprints[key] = self._compute_footprint(strategy, ranks, machine, timeline)
        return self._footprints[key]

    def _compute_footprint(self, strategy: Strategy, ranks: int, machine: Machine, timeline: bool) -> Footprint:
        traced, on_gpu = self.trace_and_cost(strategy, machine), not machine.is_cpu
        sizes = self.state_sizes(strategy, ranks, on_gpu)
        trained_numel = sum(unit.trained_numel for unit in sizes.units)
        scratch_bytes = self.loop.scratch_bytes_per_element * min(trained_numel, self._config.bucket_size)
        if sizes.whole is not None:  # one parameter after the other, or a stack of them: [Note: Muon in batches]
            loads = sizes.whole.loads
            stacked_numel = min(loads.fullest_elements, MAX_STACKED_NUMEL) if on_gpu else 0
            scratch_numel = max(loads.max_param_numel, stacked_numel)
            scratch_bytes = max(scratch_bytes, SCRATCH_BYTES_PER_ELEMENT * scratch_numel)
        conditions = MemoryConditions(
            on_gpu=on_gpu,
            prefetch=self._config.prefetch,
            keeps_inputs_on_host=strategy.checkpoint == "host",
            workspace_bytes=machine.workspace * (1 if self._config.defragment else 2),  # see [Note: one workspace]
            scratch_bytes=scratch_bytes,
            has_persistent_grads=(strategy.accumulate > 1 and not sizes.placement.keeps_inner_sums)
            or strategy.offload is not None,
            is_accumulating=strategy.accumulate > 1,
            reduces_in_backward=self._config.backwards != 0,
        )
        return footprint(traced.trace, sizes, conditions, spans=traced.cost.spans, timeline=timeline)

    def step_time(self, strategy: Strategy, ranks: int, machine: Machine) -> StepTime:
        """Return the step time of a strategy."""
        traced = self.trace_and_cost(strategy, machine)
        conditions = StepConditions(
            ranks=ranks,
            replicas=strategy.replicas,
            tensor=strategy.tensor,
            accumulate=strategy.accumulate,
            prefetch=self._config.prefetch,
            reduces_in_backward=self._config.backwards != 0,
            has_clipping=self.loop.has_clipping,
            kept_input_bytes=sum(traced.trace.kept_input_bytes) if strategy.checkpoint == "host" else 0.0,
            local_steps=strategy.local_steps,
            average_ranks=strategy.average_ranks(ranks // strategy.tensor),
            shares_loss_scale=self._config.precision == "fp16",
        )
        return step_time(traced.cost, self.state_sizes(strategy, ranks, not machine.is_cpu), machine, conditions)

    def useful_flops(self, strategy: Strategy, machine: Machine) -> float:
        """Return the FLOPs of a step on one device, without recomputation."""
        uncheckpointed = Strategy(tensor=strategy.tensor, micro_batch=strategy.micro_batch)
        return strategy.accumulate * self.trace_and_cost(uncheckpointed, machine).cost.flops


def _blocks_per_unit(family: ModelFamily, layers: int, options: dict[str, Any]) -> int:
    """Return how many blocks form a unit in the model with the given number of layers: see [Note: small blocks]."""
    if options.get("units") is not None:
        return 1
    counts = [sum(parameter.numel() for parameter in family(depth).parameters()) for depth in (1, 2)]
    return blocks_per_group(counts[1] - counts[0], layers)


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
