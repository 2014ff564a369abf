"""Pace: how long a step takes on a machine, from a trace and what the library moves.

[Note: replaying time]
Several clocks run side by side: the host's thread that launches, the device's computation, one lane for gathers and one
for reductions, the wire that both share, that to the host, the host's own updates, and the disk. Operations move the
first two: the device begins no operation before it was launched, and the host runs ahead as far as it likes. At the
moments between them the engine's rules say who waits for whom: a lane begins after what computation was given before;
computation waits for the unit it needs; a reduction waits for the one before it; the next forward waits, unit by unit,
for what is updated outside the device. The third of three steps is what a step takes: by then work that reaches into
the next step does so at both ends.

An operation takes the longer of its arithmetic and its memory traffic, at the rates that a ``Machine`` has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

from zeroshard.planner.footprint import unshard_orders
from zeroshard.planner.machines.collective_time import collective_seconds
from zeroshard.planner.machines.machine import Machine
from zeroshard.planner.state_sizes import StateSizes
from zeroshard.planner.tracing.trace import Op, Trace, TraceSpan, split_spans

SIMULATED_STEPS = 3  # replayed, of which the last counts
TRANSFER_BYTES_PER_PARAM, ADAM_BYTES_PER_PARAM = (
    4,
    28,
)  # bytes a parameter: 16 bits that come and go by themselves, and what an update of Adam moves
SLOW_PRECISION_RATIO = 0.5  # of the fastest precision's rate
MAX_SIMULATED_BACKWARDS = 3  # of a step that are replayed at most: each further one takes as long as the last of these


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step on one rank, and what they go to."""

    step: float
    """From one step to the next."""
    compute: float
    """The device computes, tensor-parallel collectives not counted."""
    tensor: float
    """Collectives of the tensor axis: nothing hides them."""
    launch: float
    """The device waits for the host to launch."""
    gather: float
    """It waits for parameters to be gathered."""
    reduce: float
    """It waits for gradients to be reduced, or to leave."""
    update: float
    """It updates, or waits for what is updated outside of it."""
    flops: float
    """Of the model's products and attention, recomputation included, of all backwards of a step."""
    traffic: dict[str, float] = field(default_factory=dict)
    """Bytes a step by kind of collective, as :func:`zeroshard.report` counts them; "pcie" and "disk" for the tiers."""

    @property
    def exposed_communication(self) -> float:
        """Seconds that communication is not hidden."""
        return self.tensor + self.gather + self.reduce

    def extrapolate(self, previous: StepTime, count: int) -> StepTime:
        """The pace with so many backwards more, each of which adds what the last one added to the pace before it."""

        def on(mine: float, its: float) -> float:
            return mine + count * (mine - its)

        numbers = {
            f.name: on(getattr(self, f.name), getattr(previous, f.name)) for f in fields(self) if f.name != "traffic"
        }
        traffic = {kind: on(nbytes, previous.traffic.get(kind, 0.0)) for kind, nbytes in self.traffic.items()}
        return StepTime(**numbers, traffic=traffic)


@dataclass
class TraceCost:
    """What the spans of a trace take on a machine, whatever the stage."""

    spans: Sequence[TraceSpan]
    device_seconds: list[float]  # seconds of each span on the device
    tensor_seconds: list[float]  # of these, for collectives of the tensor axis
    host_seconds: list[float]  # seconds of the host
    flops: float
    traffic: dict[str, float]

    @classmethod
    def from_trace(cls, trace: Trace, machine: Machine, tensor: int = 1) -> TraceCost:
        """Price all operations of a trace."""
        spans = split_spans(trace)
        found = cls(spans, [], [], [], sum(op.flops for op in trace.ops), {})
        for span in spans:
            found._add_span(span, machine, tensor)
        return found

    def _add_span(self, span: TraceSpan, machine: Machine, tensor: int) -> None:
        device = wire = host = 0.0
        for op in span.ops:
            host += op.host_ops * machine.op
            if op.collective:
                wire += collective_seconds(machine, op.collective, op.moved_bytes, tensor)
                counted = op.moved_bytes * (2 if op.collective == "all-reduce" else 1)
                key = f"tensor {op.collective}"
                self.traffic[key] = self.traffic.get(key, 0.0) + counted
                host += machine.op
            elif op.kind != "nothing":
                device += op_seconds(op, machine)
                host += machine.op
        self.device_seconds.append(device + wire)
        self.tensor_seconds.append(wire)
        self.host_seconds.append(host)


def op_seconds(op: Op, machine: Machine) -> float:
    """How long an operation keeps the device busy."""
    moving, computing = op.moved_bytes / machine.bandwidth, 0.0
    precision = op.dtype if op.dtype in machine.flops else "fp32"
    if op.kind == "product" and op.flops:
        computing = machine.matmul_seconds(op.flops, precision)
    elif op.kind == "attention":
        computing = machine.attention_seconds(op.flops, precision)
    elif op.kind == "convolution":
        computing = machine.convolution_seconds(op.flops, precision)
    if computing > moving and machine.peak_flops(precision) < SLOW_PRECISION_RATIO * max(machine.flops.values()):
        return computing + machine.gap  # a device that computes far below its best keeps its clocks up
    return max(moving, computing) / machine.sustained + machine.gap


def step_time(
    cost: TraceCost,
    sizes: StateSizes,
    machine: Machine,
    *,
    ranks: int,
    tensor: int = 1,
    accumulate: int = 1,
    prefetch: bool = True,
    has_clipping: bool = False,
    kept_input_bytes: float = 0.0,
) -> StepTime:
    """Replay a step: see [Note: replaying time]. ``ranks`` are all, ``kept_inputs_on_host`` bytes a backward."""
    clock = _StepSimulator(cost, sizes, machine, ranks, tensor, prefetch, has_clipping, kept_input_bytes)
    if accumulate > MAX_SIMULATED_BACKWARDS:
        longest, before = (
            clock.simulate(MAX_SIMULATED_BACKWARDS),
            _StepSimulator(*clock.init_args).simulate(MAX_SIMULATED_BACKWARDS - 1),
        )
        return longest.extrapolate(before, accumulate - MAX_SIMULATED_BACKWARDS)
    return clock.simulate(accumulate)


class _StepSimulator:
    """All clocks of one rank."""

    def __init__(
        self,
        cost: TraceCost,
        sizes: StateSizes,
        machine: Machine,
        ranks: int,
        tensor: int,
        prefetch: bool,
        has_clipping: bool,
        kept_input_bytes: float,
    ) -> None:
        self.init_args = (cost, sizes, machine, ranks, tensor, prefetch, has_clipping, kept_input_bytes)
        self._cost, self._sizes, self._machine, self._prefetch = cost, sizes, machine, prefetch
        self._tensor, self._data_ranks = tensor, ranks // tensor
        self._has_clipping, self._kept_input_bytes = has_clipping, kept_input_bytes
        self._local_ranks = min(ranks, machine.devices)  # ranks that share a node's host and disk
        self._unshard_orders = unshard_orders(cost.spans)
        self._is_cpu = machine.kind == "cpu"
        self._host_update_slowdown = (
            1.0 if self._is_cpu else 1 + TRANSFER_BYTES_PER_PARAM / ADAM_BYTES_PER_PARAM
        )  # gradients and parameters pass its memory too
        self.wait_seconds = dict.fromkeys(("launch", "gather", "reduce", "update"), 0.0)
        self.traffic: dict[str, float] = {}
        self._known_collective_seconds: dict[tuple[str, float], float] = {}  # of collectives over the data axis
        self.host_time = self.compute_time = 0.0
        self._all_gather_free_at = self._reduce_free_at = self._network_free_at = self._h2d_free_at = (
            self._host_update_free_at
        ) = 0.0  # when each is free
        self._all_gather_done_at: dict[int, float] = {}  # units on their way → when they are there
        self._grad_offloaded_at: dict[int, float] = {}  # gradients outside the device → when they are there
        self._updated_params_at: dict[
            int, float
        ] = {}  # units updated by the last step → when their new values are on the device
        self._next_unshard = 0

    def simulate(self, accumulate: int) -> StepTime:
        """The pace of a step with so many backwards."""
        step = 0.0
        for _ in range(SIMULATED_STEPS):
            self.wait_seconds, self.traffic = dict.fromkeys(self.wait_seconds, 0.0), {}
            begin = self.compute_time
            for _ in range(accumulate):
                self.micro_step()
            self.step()
            step = self.compute_time - begin
        work = self._cost
        for kind, nbytes in work.traffic.items():
            self._count_traffic(kind, accumulate * nbytes)
        return StepTime(
            step,
            compute=accumulate * (sum(work.device_seconds) - sum(work.tensor_seconds)),
            tensor=accumulate * sum(work.tensor_seconds),
            flops=accumulate * work.flops,
            traffic=self.traffic,
            **self.wait_seconds,
        )

    # -- forward and backward -----------------------------------------------------------------------------------

    def micro_step(self) -> None:
        """One forward and backward."""
        self._next_unshard, began = 0, self.compute_time
        for number, span in enumerate(self._cost.spans):
            mark = span.event
            if mark is not None and mark.kind == "bring":
                self._unshard(mark.unit, span.is_backward)
            elif mark is not None and mark.kind == "release":
                self._all_gather_done_at.pop(mark.unit, None)
            elif mark is not None and mark.kind == "finish":
                self._post_backward(mark.unit)
            elif mark is not None and mark.kind == "end forward":
                self._next_unshard = 0
                began = self._wait_kept_inputs(began)
            elif mark is not None and mark.kind == "end backward":
                self._wait_until("reduce", self._reduce_free_at)
                self._wait_kept_inputs(began)
                self._all_gather_done_at.clear()
            self._run_ops(number)

    def _run_ops(self, number: int) -> None:
        """The operations of a span."""
        device, host = self._cost.device_seconds[number], self._cost.host_seconds[number]
        if self._is_cpu:
            self.compute_time = self.host_time = max(self.compute_time, self.host_time) + device + host
            self.wait_seconds["launch"] += host
            return
        begin = max(self.compute_time, self.host_time)
        self.host_time += host
        end = max(begin + device, self.host_time)
        self.wait_seconds["launch"] += end - self.compute_time - device
        self.compute_time = end

    def _wait_kept_inputs(self, began: float) -> float:
        """Inputs that are kept on the host have to pass the wire in the time of a forward, and of a backward."""
        if self._kept_input_bytes:
            self._count_traffic("pcie", self._kept_input_bytes)
            self._wait_until("reduce", began + self._kept_input_bytes / self._machine.pcie)
        return self.compute_time

    def _wait_until(self, kind: str, until: float) -> None:
        if until > self.compute_time:
            self.wait_seconds[kind] += until - self.compute_time
            self.compute_time = until
            if self._is_cpu:
                self.host_time = self.compute_time

    def _count_traffic(self, kind: str, nbytes: float) -> None:
        self.traffic[kind] = self.traffic.get(kind, 0.0) + nbytes

    def _unshard(self, unit: int, backward: bool) -> None:
        self.host_time += self._host_seconds(unit)
        if unit in self._updated_params_at:  # updated by the last step: the host waits for it, and then the device
            ready = self._updated_params_at.pop(unit)
            if self._sizes.units[unit].offloaded_numel:
                self.host_time = max(self.host_time, ready)
            self._wait_until("update", ready)
        if not self._sizes.placement.parameters:
            return
        self._start_all_gather(unit)
        self._wait_until("gather", self._all_gather_done_at[unit])
        self._next_unshard += 1
        order = self._unshard_orders[backward]
        if self._prefetch and self._next_unshard < len(order):
            self._start_all_gather(order[self._next_unshard])

    def _host_seconds(self, unit: int) -> float:
        """Seconds of the host: half of them for a collective, half for the hooks of each module that makes it run."""
        collective = 1 if self._data_ranks > 1 else 0
        return self._machine.unit * (self._sizes.units[unit].num_blocks + collective) / 2

    def _start_all_gather(self, unit: int) -> None:
        if unit in self._all_gather_done_at:
            return
        sizes, ready = self._sizes.units[unit], max(self.compute_time, self.host_time, self._all_gather_free_at)
        ready = max(ready, self._updated_params_at.get(unit, 0.0))
        if sizes.param_tier != "device":
            if sizes.param_tier == "disk":
                ready += sizes.shard_bytes * self._local_ranks / self._machine.disk_read
                self._count_traffic("disk", sizes.shard_bytes)
            self._h2d_free_at = max(self._h2d_free_at, ready) + sizes.shard_bytes / self._machine.pcie
            self._count_traffic("pcie", sizes.shard_bytes)
            ready = self._h2d_free_at
        ready += sizes.cast_bytes / self._machine.bandwidth
        self._all_gather_free_at = self._schedule_collective(ready, "all-gather", sizes.full_bytes)
        self._all_gather_done_at[unit] = self._all_gather_free_at

    def _schedule_collective(self, ready: float, kind: str, nbytes: float) -> float:
        """When a collective that could begin now is over: gathers and reductions share the links."""
        seconds = self._collective_seconds(kind, nbytes)
        if not seconds:
            return ready
        self._network_free_at = max(self._network_free_at, ready) + seconds
        return self._network_free_at

    def _collective_seconds(self, kind: str, nbytes: float) -> float:
        """Count one over the data axis and return its seconds."""
        if self._data_ranks == 1 or not nbytes:
            return 0.0
        self._count_traffic(kind, nbytes * (2 if kind == "all-reduce" else 1))
        known = self._known_collective_seconds.get((kind, nbytes))
        if known is None:
            known = collective_seconds(self._machine, kind, nbytes, self._data_ranks, self._tensor)
            self._known_collective_seconds[kind, nbytes] = known
        return known

    def _post_backward(self, unit: int) -> None:
        """A unit's gradients are complete: they are packed, and reduced beside what comes, or added to the sum."""
        self.host_time += self._host_seconds(unit)
        sizes = self._sizes.units[unit]
        if not self._sizes.placement.gradients:
            self.compute_time += 2 * sizes.grad_bytes / self._machine.bandwidth
            return
        self._wait_until("reduce", self._reduce_free_at)
        copied = sizes.grad_bytes + sizes.reduce_bytes - 2 * sizes.in_place_grad_bytes
        begin = max(self.compute_time, self.host_time) + copied / self._machine.bandwidth
        if not sizes.side_stream_grad_bytes:  # see [Note: packing at once]
            self._wait_until("launch", self.host_time)
            self.compute_time = begin
        self._reduce_free_at = self._schedule_collective(begin, "reduce-scatter", sizes.reduce_bytes)
        if sizes.offloaded_grad_bytes:
            self._reduce_free_at += sizes.offloaded_grad_bytes / self._machine.pcie
            self._count_traffic("pcie", sizes.offloaded_grad_bytes)
            self._grad_offloaded_at[unit] = self._reduce_free_at

    # -- the step -----------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Update what is near, start to update what is far, and send new parameters to all."""
        held, machine = self._sizes, self._machine
        if not held.placement.gradients:
            kind = "reduce-scatter" if held.shard_count > 1 else "all-reduce"
            self._wait_until(
                "reduce",
                self.compute_time + sum(self._collective_seconds(kind, unit.reduce_bytes) for unit in held.units),
            )
        trained = sum(unit.trained_numel for unit in held.units)
        near = trained - sum(sum(unit.offloaded_numel.values()) for unit in held.units)
        busy = near * held.update_bytes_per_element / machine.bandwidth
        if self._has_clipping:
            busy += sum(held.states[kind] for kind in ("gradients",)) / machine.bandwidth
            busy += collective_seconds(machine, "all-reduce", 4, self._data_ranks, self._tensor)
        self.host_time += machine.unit
        self._wait_until("update", max(self.compute_time, self.host_time) + busy)
        self._updated_params_at.clear()
        self._update_offloaded()
        if held.shard_count > 1 and not held.placement.parameters:
            self._all_gather_params()

    def _update_offloaded(self) -> None:
        """The host updates unit by unit: of the gradients that are there, what forward wants first."""
        held, machine = self._sizes, self._machine
        due = {unit: when for unit, when in self._grad_offloaded_at.items() if held.units[unit].offloaded_numel}
        self._grad_offloaded_at.clear()
        first = {unit: place for place, unit in reversed(list(enumerate(self._unshard_orders[0])))}
        free = self._host_update_free_at
        while due:
            now = max(free, min(due.values()))
            unit = min((u for u in due if due[u] <= now), key=lambda u: first.get(u, len(first)))
            sizes = held.units[unit]
            begin = max(free, due.pop(unit))
            if self._has_clipping or "disk" in sizes.offloaded_numel:  # not before the step
                begin = max(begin, self.compute_time)
            free = (
                begin
                + sum(sizes.offloaded_numel.values())
                * self._local_ranks
                * self._host_update_slowdown
                / machine.host_update
            )
            if "disk" in sizes.offloaded_numel:
                states = sizes.offloaded_numel["disk"] * held.optimizer_bytes_per_element
                free += states * self._local_ranks * (1 / machine.disk_read + 1 / machine.disk_write)
                self._count_traffic("disk", 2 * states)
            self._h2d_free_at = max(self._h2d_free_at, free, self.compute_time) + sizes.shard_bytes / machine.pcie
            self._count_traffic("pcie", sizes.shard_bytes)
            self._updated_params_at[unit] = self._h2d_free_at
        self._host_update_free_at = free

    def _all_gather_params(self) -> None:
        """Gather the updated parts of parameters that all ranks hold whole; the next forward waits unit by unit."""
        self._all_gather_free_at = max(self._all_gather_free_at, self.compute_time, self.host_time)
        for unit in dict.fromkeys(self._unshard_orders[0]):
            if self._sizes.units[unit].trained_numel:
                self._all_gather_free_at = max(self._all_gather_free_at, self._updated_params_at.get(unit, 0.0))
                self._all_gather_free_at = self._schedule_collective(
                    self._all_gather_free_at, "all-gather", self._sizes.units[unit].full_bytes
                )
                self._updated_params_at[unit] = self._all_gather_free_at
