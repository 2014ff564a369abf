"""Step time: simulate a step on a machine, from a trace and the library's traffic.

[Note: simulating step time]
The simulation keeps several timelines: the host thread that launches kernels, the device's compute stream, the
all-gather stream, the reduce stream, the network that both share, the link to the host, the host's optimizer updates,
and the disk. Operations advance the first two: the device starts an operation after its launch, and the host may run
ahead without limit. At the engine events between operations, the engine's rules determine who waits:

- A side stream starts after the computation that was launched before it.
- Computation waits for the unit it needs.
- A reduction waits for the previous one. If gradients are replicated, only the last backward of a step reduces.
- The next forward waits, unit by unit, for offloaded updates.

Replicas that train alone (``Config.local_steps``) are simulated as one of them; an average, divided by the number of
local steps, is added.

Three steps are simulated and the third one counts: by then, work that overlaps with the next step does so at both ends.

An operation takes the longer of its compute time and its memory traffic, at the rates of the ``Machine``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import NamedTuple

from zeroshard.planner.machines.collective_time import collective_seconds
from zeroshard.planner.machines.machine import Machine
from zeroshard.planner.state_sizes import StateSizes, UnitSizes, WholeSizes
from zeroshard.planner.tracing.trace import Op, Trace, TraceSpan, UnshardOrder, split_spans

SIMULATED_STEPS = 3  # only the last one counts
# host memory traffic per parameter: the 16-bit gradient and parameter in transfer, and an Adam update
TRANSFER_BYTES_PER_PARAM, ADAM_BYTES_PER_PARAM = (4, 28)
AVERAGE_BYTES_PER_ELEMENT = 24  # read and written for an average: copied to fp32, divided, written back
OUTER_GRAD_BYTES_PER_ELEMENT = 16  # the difference to the mean: both read, written, read by the outer optimizer
SLOW_PRECISION_RATIO = 0.5  # relative to the fastest precision's rate
ALL_HOPS, INNER_HOP, OUTER_HOP = slice(None), slice(1), slice(1, None)  # of a reduction: see [Note: inner sums]
MAX_SIMULATED_BACKWARDS = 3  # per step: each further backward takes as long as the last simulated one


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step on one rank, by cause."""

    step: float
    """From one step to the next, in total."""
    compute: float
    """The device computes; tensor-parallel collectives are not counted."""
    tensor: float
    """Tensor-parallel collectives, which are never overlapped."""
    launch: float
    """The device waits for the host to launch."""
    gather: float
    """The device waits for an all-gather of parameters."""
    reduce: float
    """The device waits for gradients to be reduced or offloaded."""
    update: float
    """The device updates, or waits for offloaded updates."""
    flops: float
    """FLOPs of matmuls and attention over all backwards of a step, including recomputation."""
    average: float = 0.0
    """Replicas that train alone are averaged: the mean over their local steps."""
    traffic: dict[str, float] = field(default_factory=dict)
    """Bytes per step by collective, as :func:`zeroshard.report` counts them; "pcie" and "disk" for the tiers."""

    @property
    def exposed_communication(self) -> float:
        """Seconds of communication that are not overlapped with computation."""
        return self.tensor + self.gather + self.reduce + self.average

    def extrapolate(self, previous: StepTime, count: int) -> StepTime:
        """Return the step time with ``count`` more backwards; each adds the difference from ``previous``."""

        def extrapolated(mine: float, its: float) -> float:
            return mine + count * (mine - its)

        numbers = {
            f.name: extrapolated(getattr(self, f.name), getattr(previous, f.name))
            for f in fields(self)
            if f.name != "traffic"
        }
        traffic = {kind: extrapolated(nbytes, previous.traffic.get(kind, 0.0)) for kind, nbytes in self.traffic.items()}
        return StepTime(**numbers, traffic=traffic)


@dataclass
class TraceCost:
    """The cost of a trace's spans on a machine, independent of the stage."""

    spans: Sequence[TraceSpan]
    device_seconds: list[float]  # per span
    tensor_seconds: list[float]  # of these, for tensor-parallel collectives
    host_seconds: list[float]  # per span
    flops: float
    traffic: dict[str, float]

    @classmethod
    def from_trace(cls, trace: Trace, machine: Machine, tensor: int = 1) -> TraceCost:
        """Compute the cost of all operations of a trace."""
        spans = split_spans(trace)
        cost = cls(spans, [], [], [], sum(op.flops for op in trace.ops), {})
        for span in spans:
            cost._add_span(span, machine, tensor)
        return cost

    def _add_span(self, span: TraceSpan, machine: Machine, tensor: int) -> None:
        device = network = host = 0.0
        for op in span.ops:
            host += op.host_ops * machine.op
            if op.collective:
                is_gloos_own = machine.is_cpu and op.collective == "reduce-scatter"  # [Note: reduce-scatter over gloo]
                collective = "all-reduce" if is_gloos_own else op.collective
                network += collective_seconds(machine, collective, op.moved_bytes, tensor)
                counted = op.moved_bytes * (2 if collective == "all-reduce" else 1)
                key = f"tensor {op.collective}"
                self.traffic[key] = self.traffic.get(key, 0.0) + counted
                host += machine.op
            elif op.kind != "nothing":
                device += op_seconds(op, machine)
                host += machine.op
        self.device_seconds.append(device + network)
        self.tensor_seconds.append(network)
        self.host_seconds.append(host)


def op_seconds(op: Op, machine: Machine) -> float:
    """Return how long an operation keeps the device busy."""
    moving, computing = op.moved_bytes / machine.bandwidth, 0.0
    precision = op.dtype if op.dtype == "fp8" or op.dtype in machine.flops else "fp32"
    if op.kind == "matmul" and op.flops:
        computing = machine.matmul_seconds(op.flops, precision)
    elif op.kind == "attention":
        computing = machine.attention_seconds(op.flops, precision)
    elif op.kind == "convolution":
        computing = machine.convolution_seconds(op.flops, precision)
    if computing > moving and machine.peak_flops(precision) < SLOW_PRECISION_RATIO * max(machine.flops.values()):
        return computing + machine.gap  # a device far below its peak rate keeps its clock frequency
    return max(moving, computing) / machine.sustained + machine.gap


@dataclass(frozen=True, kw_only=True)
class StepConditions:
    """What else the time of a step depends on, besides the trace, the state sizes and the machine."""

    ranks: int
    """All ranks of the job."""
    replicas: int = 1
    """Size of the outer axis of a 2-D mesh."""
    tensor: int = 1
    """Tensor-parallel degree."""
    accumulate: int = 1
    """Backwards per step."""
    prefetch: bool = True
    """The next unit is all-gathered while one computes."""
    reduces_in_backward: bool = True
    """Replicated gradients and inner sums are reduced in the last backward; else in the step, by
    ``Config(backwards=0)``."""
    has_clipping: bool = False
    """Gradients are clipped by norm."""
    kept_input_bytes: float = 0.0
    """Block inputs kept on the host, in bytes per backward."""
    local_steps: int = 1
    """After how many steps replicas that train alone are averaged."""
    average_ranks: int = 1
    """How many replicas train alone."""
    shares_loss_scale: bool = False
    """In every step, replicas that train alone compare whether one of them overflowed (fp16)."""

    @property
    def replica_ranks(self) -> int:
        """The data-parallel ranks over which gradients are averaged."""
        return self.ranks // self.tensor // self.average_ranks


def step_time(cost: TraceCost, sizes: StateSizes, machine: Machine, conditions: StepConditions) -> StepTime:
    """Simulate a step: see [Note: simulating step time]."""
    simulated = min(conditions.accumulate, MAX_SIMULATED_BACKWARDS)
    found = _StepSimulator(cost, sizes, machine, conditions).simulate(simulated)
    if conditions.accumulate > simulated:
        before = _StepSimulator(cost, sizes, machine, conditions).simulate(simulated - 1)
        found = found.extrapolate(before, conditions.accumulate - simulated)
    return found if conditions.average_ranks == 1 else _with_average(found, sizes, machine, conditions)


def _with_average(found: StepTime, sizes: StateSizes, machine: Machine, conditions: StepConditions) -> StepTime:
    """Add the time and traffic of an average of the replicas, divided by the number of local steps.

    See [Note: local steps]. Nothing overlaps with an average. Unsharded parameters are gathered before it, as after
    every step, and once more after it.
    """
    mesh, moved = Mesh(sizes, conditions), defaultdict[str, float](float)
    seconds = _average_update_seconds(sizes, machine, conditions)
    for hop in mesh.average_hops():
        moved[hop.name] += hop.counted_bytes
        seconds += hop.seconds(machine)
    for unit in sizes.units:
        for tier, numel in unit.offloaded_numel.items():
            nbytes = numel * unit.average_bytes / unit.trained_numel
            moved["pcie"] += 2 * nbytes
            seconds += 2 * nbytes / machine.pcie
            if tier == "disk":
                local_bytes = nbytes * machine.local_ranks(conditions.ranks)
                moved["disk"] += 2 * nbytes
                seconds += local_bytes / machine.disk_read + local_bytes / machine.disk_write
    seconds /= conditions.local_steps
    if conditions.shares_loss_scale:
        seconds += mesh.average_hop(4).seconds(machine)
    traffic = dict(found.traffic)
    for kind, nbytes in moved.items():
        traffic[kind] = traffic.get(kind, 0.0) + nbytes / conditions.local_steps
    return replace(found, step=found.step + seconds, average=seconds, traffic=traffic)


def _average_update_seconds(sizes: StateSizes, machine: Machine, conditions: StepConditions) -> float:
    """Return the seconds in which values are copied and divided, and the outer optimizer updates them."""
    numel = sum(unit.trained_numel for unit in sizes.units)
    seconds = AVERAGE_BYTES_PER_ELEMENT * numel / machine.bandwidth
    if outer_bytes := sizes.states.get("outer optimizer", 0):
        seconds += (2 * outer_bytes + OUTER_GRAD_BYTES_PER_ELEMENT * numel) / machine.bandwidth
    if any(kind == "outer optimizer" for kind, _ in sizes.offloaded):
        offloaded = sum(sum(unit.offloaded_numel.values()) for unit in sizes.units)
        seconds += offloaded * machine.local_ranks(conditions.ranks) / machine.host_update
    return seconds


@dataclass
class _Timelines:
    """When each resource is free, in seconds."""

    host: float = 0.0  # the thread that launches
    compute: float = 0.0
    all_gather: float = 0.0  # the stream
    reduce: float = 0.0  # the stream
    network: float = 0.0  # all-gathers and reductions share it
    h2d: float = 0.0
    host_update: float = 0.0


class Hop(NamedTuple):
    """A collective over one axis of the mesh."""

    name: str  # as the report has it
    kind: str
    nbytes: float
    ranks: int
    stride: int

    @property
    def counted_bytes(self) -> float:
        """Bytes as :func:`zeroshard.report` counts them."""
        return self.nbytes * (2 if self.kind == "all-reduce" else 1) if self.ranks > 1 else 0.0

    def seconds(self, machine: Machine) -> float:
        """Return how long it takes."""
        return collective_seconds(machine, self.kind, self.nbytes, self.ranks, self.stride)

    def latency(self, machine: Machine) -> float:
        """Return how long it would take without any bytes."""
        return self._replace(nbytes=0.0).seconds(machine)


class Mesh:
    """The data-parallel axes, and the collectives over them."""

    def __init__(self, sizes: StateSizes, conditions: StepConditions) -> None:
        self._sizes, self._conditions = sizes, conditions

    def hops(self, kind: str, nbytes: float) -> list[Hop]:
        """Return what a data-parallel collective consists of, that inside the inner axis first."""
        stride, replicas = self._conditions.tensor, self._conditions.replicas
        outer_stride = self._conditions.ranks // replicas
        trains_alone = self._conditions.average_ranks > 1
        ranks = self._conditions.replica_ranks if trains_alone else outer_stride // stride
        inside = Hop(kind, kind, nbytes, ranks, stride)
        if replicas == 1 or trains_alone:
            return [inside]
        if self._sizes.shard_count > ranks:  # [Note: two hops]
            if ranks == 1:
                return [Hop(kind, kind, nbytes, replicas, outer_stride)]
            if kind == "all-to-all":
                return [Hop(kind, kind, nbytes, ranks * replicas, stride)]
            return [inside, Hop(f"outer {kind}", kind, nbytes / ranks, replicas, outer_stride)]
        if kind == "reduce-scatter":
            return [inside, Hop("all-reduce", "all-reduce", nbytes / self._sizes.shard_count, replicas, outer_stride)]
        return [inside, Hop(kind, kind, nbytes, replicas, outer_stride)] if kind == "all-reduce" else [inside]

    def gather_hops(self, unit: UnitSizes, is_stale: bool) -> list[Hop]:
        """Return what the all-gather of partitioned parameters consists of.

        ``is_stale``: trained ones have changed since the last one, see [Note: inner shards].
        """
        hops = self.hops("all-gather", unit.gather_bytes)
        if not self._sizes.placement.keeps_inner_shards:
            return hops
        return hops[:1] + (self.hops("all-gather", unit.trained_gather_bytes)[1:] if is_stale else [])

    def reduce_hops(self, unit: UnitSizes, parts: slice) -> list[Hop]:
        """Return what the reduction of a unit's gradients consists of; 8-bit values go in all-to-alls.

        ``parts``: of the hops, the one inside the inner axis being the first.
        """
        kind = "reduce-scatter" if self._sizes.shard_count > 1 else "all-reduce"
        exact, payloads = self.hops(kind, unit.exact_reduce_bytes), unit.reduce_payload_bytes
        payloads = payloads if len(payloads) == len(exact) else payloads * len(exact)  # or there are none
        quantized = [
            hop._replace(kind="all-to-all", nbytes=nbytes) for hop, nbytes in zip(exact, payloads, strict=True)
        ]
        return exact[parts] + quantized[parts]

    def refresh_hops(self, unit: UnitSizes) -> list[Hop]:
        """Return what gathers a unit's unsharded parameters after an update; empty if every rank updates them all."""
        is_gathered = self._sizes.shard_count > 1 and not self._sizes.placement.parameters
        return self.hops("all-gather", unit.refresh_bytes) if is_gathered else []

    def whole_hops(self, whole: WholeSizes) -> list[Hop]:
        """Return what exchanges the parameters that are updated as a whole."""
        hops = self.hops("all-to-all", whole.to_owner_bytes) + self.hops("all-to-all", whole.from_owner_bytes)
        return [*hops, Hop("all-gather", "all-gather", whole.tensor_bytes, self._conditions.tensor, 1)]

    def average_hop(self, nbytes: float) -> Hop:
        """Return the all-reduce over the replicas that train alone."""
        ranks = self._conditions.average_ranks
        return Hop("replica average", "all-reduce", nbytes, ranks, self._conditions.ranks // ranks)

    def average_hops(self) -> list[Hop]:
        """Return what an average of the replicas consists of; unsharded parameters are gathered once more."""
        averages = [self.average_hop(unit.average_bytes) for unit in self._sizes.units if unit.average_bytes]
        return averages + [hop for unit in self._sizes.units for hop in self.refresh_hops(unit)]


class _StepSimulator:
    """All timelines of one rank."""

    def __init__(self, cost: TraceCost, sizes: StateSizes, machine: Machine, conditions: StepConditions) -> None:
        self._cost, self._sizes, self._machine, self._conditions = cost, sizes, machine, conditions
        self._data_ranks = conditions.replica_ranks
        self._local_ranks = machine.local_ranks(conditions.ranks)  # they share a node's host memory and disk
        self._unshard_order = UnshardOrder(cost.spans)
        self._wait_seconds = dict.fromkeys(("launch", "gather", "reduce", "update"), 0.0)
        self._traffic: dict[str, float] = {}
        self._mesh = Mesh(sizes, conditions)
        self._known_times: dict[Hop, tuple[float, float]] = {}
        self._time = _Timelines()
        self._all_gather_done_at: dict[int, float] = {}  # units in all-gather → when they are unsharded
        self._grad_offloaded_at: dict[int, float] = {}  # offloaded gradients → when the copy is done
        # units updated by the last step → when their new values are on the device
        self._updated_params_at: dict[int, float] = {}
        self._stale_inner_shards: set[int] = set()  # units: see [Note: inner shards]

    def simulate(self, accumulate: int) -> StepTime:
        """Simulate a step with ``accumulate`` backwards."""
        step = 0.0
        for _ in range(SIMULATED_STEPS):
            self._wait_seconds, self._traffic = dict.fromkeys(self._wait_seconds, 0.0), {}
            begin = self._time.compute
            for number in range(accumulate):
                self._micro_step(is_last=number == accumulate - 1)
            self._step()
            step = self._time.compute - begin
        cost = self._cost
        for kind, nbytes in cost.traffic.items():
            self._count_traffic(kind, accumulate * nbytes)
        return StepTime(
            step,
            compute=accumulate * (sum(cost.device_seconds) - sum(cost.tensor_seconds)),
            tensor=accumulate * sum(cost.tensor_seconds),
            flops=accumulate * cost.flops,
            traffic=self._traffic,
            **self._wait_seconds,
        )

    # -- forward and backward -----------------------------------------------------------------------------------

    def _micro_step(self, is_last: bool) -> None:
        """Simulate one forward and backward; ``is_last``: the last ones of a step."""
        self._unshard_order.begin_pass()
        began = self._time.compute
        for index, span in enumerate(self._cost.spans):
            event = span.event
            kind = "" if event is None else event.kind
            if event is not None and kind == "unshard":
                self._unshard(event.unit, span.is_backward)
            elif event is not None and kind == "reshard":
                self._all_gather_done_at.pop(event.unit, None)
            elif event is not None and kind == "reduce":
                self._post_backward(event.unit, is_last)
            elif kind == "end forward":
                self._unshard_order.begin_pass()
                began = self._wait_kept_inputs(began)
            elif kind == "end backward":
                self._wait_until("reduce", self._time.reduce)
                self._wait_kept_inputs(began)
                self._all_gather_done_at.clear()
            self._run_ops(index)

    def _run_ops(self, number: int) -> None:
        """Advance host and device by the operations of a span."""
        device, host = self._cost.device_seconds[number], self._cost.host_seconds[number]
        if self._machine.is_cpu:
            self._time.compute = self._time.host = max(self._time.compute, self._time.host) + device + host
            self._wait_seconds["launch"] += host
            return
        begin = max(self._time.compute, self._time.host)
        self._time.host += host
        end = max(begin + device, self._time.host)
        self._wait_seconds["launch"] += end - self._time.compute - device
        self._time.compute = end

    def _wait_kept_inputs(self, began: float) -> float:
        """Wait until the kept inputs are transferred, once in a forward and once in a backward."""
        if self._conditions.kept_input_bytes:
            self._count_traffic("pcie", self._conditions.kept_input_bytes)
            self._wait_until("reduce", began + self._conditions.kept_input_bytes / self._machine.pcie)
        return self._time.compute

    def _wait_until(self, kind: str, until: float) -> None:
        if until > self._time.compute:
            self._wait_seconds[kind] += until - self._time.compute
            self._time.compute = until
            if self._machine.is_cpu:
                self._time.host = self._time.compute

    def _count_traffic(self, kind: str, nbytes: float) -> None:
        self._traffic[kind] = self._traffic.get(kind, 0.0) + nbytes

    def _unshard(self, unit: int, backward: bool) -> None:
        self._time.host += self._host_seconds(unit)
        if unit in self._updated_params_at:  # updated by the last step: first the host waits, then the device
            ready = self._updated_params_at.pop(unit)
            if self._sizes.units[unit].offloaded_numel:
                self._time.host = max(self._time.host, ready)
            self._wait_until("update", ready)
        if not self._sizes.placement.parameters:
            return
        self._start_all_gather(unit)
        self._wait_until("gather", self._all_gather_done_at[unit])
        next_unit = self._unshard_order.next_unit(backward)
        if self._conditions.prefetch and next_unit is not None:
            self._start_all_gather(next_unit)

    def _host_seconds(self, unit: int) -> float:
        """Return the host time of a unit: half of it for a collective, half for the hooks of each of its blocks."""
        collective = 1 if self._data_ranks > 1 else 0
        return self._machine.unit * (self._sizes.units[unit].num_blocks + collective) / 2

    def _start_all_gather(self, unit: int) -> None:
        if unit in self._all_gather_done_at:
            return
        sizes, updated_at = self._sizes.units[unit], self._updated_params_at.get(unit, 0.0)
        ready = max(self._time.compute, self._time.host, self._time.all_gather, updated_at)
        if sizes.param_tier != "device":
            if sizes.param_tier == "disk":
                ready += sizes.shard_bytes * self._local_ranks / self._machine.disk_read
                self._count_traffic("disk", sizes.shard_bytes)
            self._time.h2d = max(self._time.h2d, ready) + sizes.shard_bytes / self._machine.pcie
            self._count_traffic("pcie", sizes.shard_bytes)
            ready = self._time.h2d
        is_stale = unit in self._stale_inner_shards
        if is_stale or not self._sizes.placement.keeps_inner_shards:
            ready += sizes.cast_bytes / self._machine.bandwidth
        hops = self._mesh.gather_hops(sizes, is_stale)
        self._stale_inner_shards.discard(unit)
        done = self._schedule(ready, hops) + sizes.dequantize_bytes / self._machine.bandwidth
        self._time.all_gather = self._all_gather_done_at[unit] = done

    def _schedule(self, ready: float, hops: list[Hop]) -> float:
        """Return when hops that can start at ``ready`` end.

        All-gathers and reductions share the network. While one waits for its latency, the other can use it.
        """
        times = [self._hop_times(hop) for hop in hops if hop.counted_bytes]
        if not times:
            return ready
        seconds, latency = map(sum, zip(*times, strict=True))
        self._time.network = max(self._time.network, ready) + seconds - latency
        return self._time.network + latency

    def _hop_times(self, hop: Hop) -> tuple[float, float]:
        """Count the traffic of a hop and return its seconds, and its latency, which is part of them."""
        self._count_traffic(hop.name, hop.counted_bytes)
        if hop not in self._known_times:
            self._known_times[hop] = hop.seconds(self._machine), hop.latency(self._machine)
        return self._known_times[hop]

    def _post_backward(self, unit: int, is_last: bool) -> None:
        """Reduce a unit's gradients during computation: pack them, or add them to the accumulated gradients first."""
        self._time.host += self._host_seconds(unit)
        sizes = self._sizes.units[unit]
        if not self._sizes.placement.gradients:
            self._time.compute += 2 * sizes.grad_bytes / self._machine.bandwidth
            if is_last and self._conditions.reduces_in_backward:  # see [Note: reducing in the last backward]
                self._reduce_sum(unit)
            return
        self._wait_until("reduce", self._time.reduce)
        copied = sizes.grad_bytes + sizes.reduce_bytes - 2 * sizes.in_place_grad_bytes
        begin = max(self._time.compute, self._time.host) + copied / self._machine.bandwidth
        if not sizes.side_stream_grad_bytes:  # see [Note: packing on the compute stream]
            self._wait_until("launch", self._time.host)
            self._time.compute = begin
        stays_inside = self._sizes.placement.keeps_inner_sums and not (is_last and self._conditions.reduces_in_backward)
        self._time.reduce = self._schedule_reduction(begin, sizes, INNER_HOP if stays_inside else ALL_HOPS)
        if sizes.offloaded_grad_bytes and not stays_inside:
            self._time.reduce += sizes.offloaded_grad_bytes / self._machine.pcie
            self._count_traffic("pcie", sizes.offloaded_grad_bytes)
            self._grad_offloaded_at[unit] = self._time.reduce

    def _reduce_sum(self, unit: int) -> None:
        """Reduce a unit's accumulated gradients, or its inner sums, during computation."""
        begin = max(self._time.compute, self._time.host, self._time.reduce)
        hops = OUTER_HOP if self._sizes.placement.keeps_inner_sums else ALL_HOPS
        self._time.reduce = self._schedule_reduction(begin, self._sizes.units[unit], hops)

    def _schedule_reduction(self, ready: float, sizes: UnitSizes, hops: slice) -> float:
        """Return when the gradients of a unit are reduced, with the kernels that quantize and sum 8-bit values."""
        ready += sizes.reduce_kernel_bytes / self._machine.bandwidth
        return self._schedule(ready, self._mesh.reduce_hops(sizes, hops))

    # -- the step -----------------------------------------------------------------------------------------------

    def _step(self) -> None:
        """Update the states on the device, start the offloaded updates, and all-gather the new parameters."""
        sizes, machine, placement = self._sizes, self._machine, self._sizes.placement
        if not self._conditions.reduces_in_backward and (placement.keeps_inner_sums or not placement.gradients):
            for unit in range(len(sizes.units)):
                self._reduce_sum(unit)
            self._wait_until("reduce", self._time.reduce)
        on_device = sum(unit.trained_numel - sum(unit.offloaded_numel.values()) for unit in sizes.units)
        if sizes.whole is not None:
            on_device -= sizes.whole.shard_numel
        busy = on_device * sizes.update_bytes_per_element / machine.bandwidth
        if self._conditions.has_clipping:
            busy += sizes.states["gradients"] / machine.bandwidth
            busy += collective_seconds(machine, "all-reduce", 4, self._data_ranks, self._conditions.tensor)
        if sizes.whole is not None:
            busy += self._whole_seconds(sizes.whole)
        self._time.host += machine.unit
        self._wait_until("update", max(self._time.compute, self._time.host) + busy)
        self._updated_params_at.clear()
        self._stale_inner_shards.update(i for i, unit in enumerate(sizes.units) if unit.trained_numel)
        self._update_offloaded()
        self._all_gather_params()

    def _whole_seconds(self, whole: WholeSizes) -> float:
        """Return the seconds of the fullest owner: exchange, update, exchange, as if none of them overlapped."""
        machine = self._machine
        seconds = sum(self._hop_times(hop)[0] for hop in self._mesh.whole_hops(whole) if hop.counted_bytes)
        seconds += whole.update_bytes / machine.bandwidth
        precision = "bf16" if "bf16" in machine.flops else "fp32"
        return seconds + (machine.matmul_seconds(flops, precision) if (flops := max(whole.loads.flops)) else 0.0)

    def _update_offloaded(self) -> None:
        """Update unit by unit on the host: among the gradients that have arrived, the first one that forward needs."""
        state_sizes, machine = self._sizes, self._machine
        # transfers of gradients and parameters use host memory bandwidth, too
        slowdown = 1.0 if self._machine.is_cpu else 1 + TRANSFER_BYTES_PER_PARAM / ADAM_BYTES_PER_PARAM
        arrivals = {
            unit: time for unit, time in self._grad_offloaded_at.items() if state_sizes.units[unit].offloaded_numel
        }
        self._grad_offloaded_at.clear()
        forward_position = {unit: position for position, unit in reversed(list(enumerate(self._unshard_order.forward)))}
        free_at = self._time.host_update
        while arrivals:
            now = max(free_at, min(arrivals.values()))
            unit = min(
                (candidate for candidate in arrivals if arrivals[candidate] <= now),
                key=lambda candidate: forward_position.get(candidate, len(forward_position)),
            )
            sizes = state_sizes.units[unit]
            begin = max(free_at, arrivals.pop(unit))
            if self._conditions.has_clipping or "disk" in sizes.offloaded_numel:  # not before the step
                begin = max(begin, self._time.compute)
            numel = sum(sizes.offloaded_numel.values()) * self._local_ranks
            free_at = begin + numel * slowdown / machine.host_update
            if "disk" in sizes.offloaded_numel:
                state_bytes = sizes.offloaded_numel["disk"] * state_sizes.optimizer_bytes_per_element
                free_at += state_bytes * self._local_ranks * (1 / machine.disk_read + 1 / machine.disk_write)
                self._count_traffic("disk", 2 * state_bytes)
            self._time.h2d = max(self._time.h2d, free_at, self._time.compute) + sizes.shard_bytes / machine.pcie
            self._count_traffic("pcie", sizes.shard_bytes)
            self._updated_params_at[unit] = self._time.h2d
        self._time.host_update = free_at

    def _all_gather_params(self) -> None:
        """All-gather the updated shards of unsharded parameters; the next forward waits unit by unit."""
        self._time.all_gather = max(self._time.all_gather, self._time.compute, self._time.host)
        for unit in dict.fromkeys(self._unshard_order.forward):
            hops = self._mesh.refresh_hops(self._sizes.units[unit])
            if hops and self._sizes.units[unit].trained_numel:
                self._time.all_gather = max(self._time.all_gather, self._updated_params_at.get(unit, 0.0))
                self._time.all_gather = self._schedule(self._time.all_gather, hops)
                self._updated_params_at[unit] = self._time.all_gather
