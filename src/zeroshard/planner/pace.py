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

from zeroshard.planner.footprint import brought_in
from zeroshard.planner.machines.links import collective_seconds
from zeroshard.planner.machines.machine import Machine
from zeroshard.planner.memory import Holdings
from zeroshard.planner.traces.trace import Op, Span, Trace, spans_of

STEPS = 3  # replayed, of which the last counts
TRAVEL, PASSED = 4, 28  # bytes a parameter: 16 bits that come and go by themselves, and what an update of Adam moves
SLOW = 0.5  # of the fastest precision's rate
BACKWARDS = 3  # of a step that are replayed at most: each further one takes as long as the last of these


@dataclass(frozen=True)
class Pace:
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
    def communication(self) -> float:
        """Seconds that communication is not hidden."""
        return self.tensor + self.gather + self.reduce

    def further(self, before: Pace, times: int) -> Pace:
        """The pace with so many backwards more, each of which adds what the last one added to the pace before it."""

        def on(mine: float, its: float) -> float:
            return mine + times * (mine - its)

        numbers = {
            f.name: on(getattr(self, f.name), getattr(before, f.name)) for f in fields(self) if f.name != "traffic"
        }
        traffic = {kind: on(nbytes, before.traffic.get(kind, 0.0)) for kind, nbytes in self.traffic.items()}
        return Pace(**numbers, traffic=traffic)


@dataclass
class Work:
    """What the spans of a trace take on a machine, whatever the stage."""

    spans: Sequence[Span]
    device: list[float]  # seconds of each span on the device
    tensor: list[float]  # of these, for collectives of the tensor axis
    host: list[float]  # seconds of the host
    flops: float
    traffic: dict[str, float]

    @classmethod
    def of(cls, trace: Trace, machine: Machine, tensor: int = 1) -> Work:
        """Price all operations of a trace."""
        spans = spans_of(trace)
        found = cls(spans, [], [], [], sum(op.flops for op in trace.ops), {})
        for span in spans:
            found._price(span, machine, tensor)
        return found

    def _price(self, span: Span, machine: Machine, tensor: int) -> None:
        device = wire = host = 0.0
        for op in span.ops:
            host += op.host * machine.op
            if op.collective:
                wire += collective_seconds(machine, op.collective, op.moved, tensor)
                counted = op.moved * (2 if op.collective == "all-reduce" else 1)
                key = f"tensor {op.collective}"
                self.traffic[key] = self.traffic.get(key, 0.0) + counted
                host += machine.op
            elif op.kind != "nothing":
                device += seconds_of(op, machine)
                host += machine.op
        self.device.append(device + wire)
        self.tensor.append(wire)
        self.host.append(host)


def seconds_of(op: Op, machine: Machine) -> float:
    """How long an operation keeps the device busy."""
    moving, computing = op.moved / machine.bandwidth, 0.0
    precision = op.dtype if op.dtype in machine.flops else "fp32"
    if op.kind == "product" and op.flops:
        computing = machine.product_seconds(op.flops, precision)
    elif op.kind == "attention":
        computing = machine.attention_seconds(op.flops, precision)
    elif op.kind == "convolution":
        computing = machine.convolution_seconds(op.flops, precision)
    if computing > moving and machine.peak(precision) < SLOW * max(machine.flops.values()):
        return computing + machine.gap  # a device that computes far below its best keeps its clocks up
    return max(moving, computing) / machine.sustained + machine.gap


def pace(
    work: Work,
    held: Holdings,
    machine: Machine,
    *,
    ranks: int,
    tensor: int = 1,
    accumulate: int = 1,
    prefetch: bool = True,
    clipped: bool = False,
    kept_on_host: float = 0.0,
) -> Pace:
    """Replay a step: see [Note: replaying time]. ``ranks`` are all, ``kept_on_host`` bytes of inputs a backward."""
    clock = _Clock(work, held, machine, ranks, tensor, prefetch, clipped, kept_on_host)
    if accumulate > BACKWARDS:
        longest, before = clock.after(BACKWARDS), _Clock(*clock.given).after(BACKWARDS - 1)
        return longest.further(before, accumulate - BACKWARDS)
    return clock.after(accumulate)


class _Clock:
    """All clocks of one rank."""

    def __init__(
        self,
        work: Work,
        held: Holdings,
        machine: Machine,
        ranks: int,
        tensor: int,
        prefetch: bool,
        clipped: bool,
        kept_on_host: float,
    ) -> None:
        self.given = (work, held, machine, ranks, tensor, prefetch, clipped, kept_on_host)
        self._work, self._held, self._machine, self._prefetch = work, held, machine, prefetch
        self._tensor, self._data = tensor, ranks // tensor
        self._clipped, self._kept = clipped, kept_on_host
        self._here = min(ranks, machine.devices)  # ranks that share a node's host and disk
        self._orders = brought_in(work.spans)
        self._on_cpu = machine.kind == "cpu"
        self._crowded = 1.0 if self._on_cpu else 1 + TRAVEL / PASSED  # gradients and parameters pass its memory too
        self.waits = dict.fromkeys(("launch", "gather", "reduce", "update"), 0.0)
        self.traffic: dict[str, float] = {}
        self._seconds: dict[tuple[str, float], float] = {}  # of collectives over the data axis
        self.host = self.compute = 0.0
        self._gathers = self._reductions = self._wire = self._up = self._updates = 0.0  # when each is free
        self._coming: dict[int, float] = {}  # units on their way → when they are there
        self._landed: dict[int, float] = {}  # gradients outside the device → when they are there
        self._new: dict[int, float] = {}  # units updated by the last step → when their new values are on the device
        self._at = 0

    def after(self, accumulate: int) -> Pace:
        """The pace of a step with so many backwards."""
        step = 0.0
        for _ in range(STEPS):
            self.waits, self.traffic = dict.fromkeys(self.waits, 0.0), {}
            begin = self.compute
            for _ in range(accumulate):
                self.micro_step()
            self.step()
            step = self.compute - begin
        work = self._work
        for kind, nbytes in work.traffic.items():
            self._count(kind, accumulate * nbytes)
        return Pace(
            step,
            compute=accumulate * (sum(work.device) - sum(work.tensor)),
            tensor=accumulate * sum(work.tensor),
            flops=accumulate * work.flops,
            traffic=self.traffic,
            **self.waits,
        )

    # -- forward and backward -----------------------------------------------------------------------------------

    def micro_step(self) -> None:
        """One forward and backward."""
        self._at, began = 0, self.compute
        for number, span in enumerate(self._work.spans):
            mark = span.mark
            if mark is not None and mark.moment == "bring":
                self._bring(mark.unit, span.backward)
            elif mark is not None and mark.moment == "release":
                self._coming.pop(mark.unit, None)
            elif mark is not None and mark.moment == "finish":
                self._finish(mark.unit)
            elif mark is not None and mark.moment == "end forward":
                self._at = 0
                began = self._keep_up(began)
            elif mark is not None and mark.moment == "end backward":
                self._wait("reduce", self._reductions)
                self._keep_up(began)
                self._coming.clear()
            self._run(number)

    def _run(self, number: int) -> None:
        """The operations of a span."""
        device, host = self._work.device[number], self._work.host[number]
        if self._on_cpu:
            self.compute = self.host = max(self.compute, self.host) + device + host
            self.waits["launch"] += host
            return
        begin = max(self.compute, self.host)
        self.host += host
        end = max(begin + device, self.host)
        self.waits["launch"] += end - self.compute - device
        self.compute = end

    def _keep_up(self, began: float) -> float:
        """Inputs that are kept on the host have to pass the wire in the time of a forward, and of a backward."""
        if self._kept:
            self._count("pcie", self._kept)
            self._wait("reduce", began + self._kept / self._machine.pcie)
        return self.compute

    def _wait(self, kind: str, until: float) -> None:
        if until > self.compute:
            self.waits[kind] += until - self.compute
            self.compute = until
            if self._on_cpu:
                self.host = self.compute

    def _count(self, kind: str, nbytes: float) -> None:
        self.traffic[kind] = self.traffic.get(kind, 0.0) + nbytes

    def _bring(self, unit: int, backward: bool) -> None:
        self.host += self._attended(unit)
        if unit in self._new:  # updated by the last step: the host waits for it, and then the device
            ready = self._new.pop(unit)
            if self._held.units[unit].far:
                self.host = max(self.host, ready)
            self._wait("update", ready)
        if not self._held.placement.parameters:
            return
        self._gather(unit)
        self._wait("gather", self._coming[unit])
        self._at += 1
        order = self._orders[backward]
        if self._prefetch and self._at < len(order):
            self._gather(order[self._at])

    def _attended(self, unit: int) -> float:
        """Seconds of the host: half of them for a collective, half for the hooks of each module that makes it run."""
        collective = 1 if self._data > 1 else 0
        return self._machine.unit * (self._held.units[unit].blocks + collective) / 2

    def _gather(self, unit: int) -> None:
        if unit in self._coming:
            return
        sizes, ready = self._held.units[unit], max(self.compute, self.host, self._gathers)
        ready = max(ready, self._new.get(unit, 0.0))
        if sizes.parameters != "device":
            if sizes.parameters == "disk":
                ready += sizes.shard * self._here / self._machine.disk_read
                self._count("disk", sizes.shard)
            self._up = max(self._up, ready) + sizes.shard / self._machine.pcie
            self._count("pcie", sizes.shard)
            ready = self._up
        ready += sizes.cast / self._machine.bandwidth
        self._gathers = self._over_the_wire(ready, "all-gather", sizes.whole)
        self._coming[unit] = self._gathers

    def _over_the_wire(self, ready: float, kind: str, nbytes: float) -> float:
        """When a collective that could begin now is over: gathers and reductions share the links."""
        seconds = self._collective(kind, nbytes)
        if not seconds:
            return ready
        self._wire = max(self._wire, ready) + seconds
        return self._wire

    def _collective(self, kind: str, nbytes: float) -> float:
        """Count one over the data axis and return its seconds."""
        if self._data == 1 or not nbytes:
            return 0.0
        self._count(kind, nbytes * (2 if kind == "all-reduce" else 1))
        known = self._seconds.get((kind, nbytes))
        if known is None:
            known = collective_seconds(self._machine, kind, nbytes, self._data, self._tensor)
            self._seconds[kind, nbytes] = known
        return known

    def _finish(self, unit: int) -> None:
        """A unit's gradients are complete: they are packed, and reduced beside what comes, or added to the sum."""
        self.host += self._attended(unit)
        sizes = self._held.units[unit]
        if not self._held.placement.gradients:
            self.compute += 2 * sizes.gradient / self._machine.bandwidth
            return
        self._wait("reduce", self._reductions)
        copied = sizes.gradient + sizes.reduced - 2 * sizes.unpacked
        begin = max(self.compute, self.host) + copied / self._machine.bandwidth
        if not sizes.late:  # see [Note: packing at once]
            self._wait("launch", self.host)
            self.compute = begin
        self._reductions = self._over_the_wire(begin, "reduce-scatter", sizes.reduced)
        if sizes.sent:
            self._reductions += sizes.sent / self._machine.pcie
            self._count("pcie", sizes.sent)
            self._landed[unit] = self._reductions

    # -- the step -----------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Update what is near, start to update what is far, and send new parameters to all."""
        held, machine = self._held, self._machine
        if not held.placement.gradients:
            kind = "reduce-scatter" if held.ranks > 1 else "all-reduce"
            self._wait("reduce", self.compute + sum(self._collective(kind, unit.reduced) for unit in held.units))
        trained = sum(unit.trained for unit in held.units)
        near = trained - sum(sum(unit.far.values()) for unit in held.units)
        busy = near * held.updated / machine.bandwidth
        if self._clipped:
            busy += sum(held.states[kind] for kind in ("gradients",)) / machine.bandwidth
            busy += collective_seconds(machine, "all-reduce", 4, self._data, self._tensor)
        self.host += machine.unit
        self._wait("update", max(self.compute, self.host) + busy)
        self._new.clear()
        self._update_far()
        if held.ranks > 1 and not held.placement.parameters:
            self._refresh()

    def _update_far(self) -> None:
        """The host updates unit by unit: of the gradients that are there, what forward wants first."""
        held, machine = self._held, self._machine
        due = {unit: when for unit, when in self._landed.items() if held.units[unit].far}
        self._landed.clear()
        first = {unit: place for place, unit in reversed(list(enumerate(self._orders[0])))}
        free = self._updates
        while due:
            now = max(free, min(due.values()))
            unit = min((u for u in due if due[u] <= now), key=lambda u: first.get(u, len(first)))
            sizes = held.units[unit]
            begin = max(free, due.pop(unit))
            if self._clipped or "disk" in sizes.far:  # not before the step
                begin = max(begin, self.compute)
            free = begin + sum(sizes.far.values()) * self._here * self._crowded / machine.host_update
            if "disk" in sizes.far:
                states = sizes.far["disk"] * held.kept
                free += states * self._here * (1 / machine.disk_read + 1 / machine.disk_write)
                self._count("disk", 2 * states)
            self._up = max(self._up, free, self.compute) + sizes.shard / machine.pcie
            self._count("pcie", sizes.shard)
            self._new[unit] = self._up
        self._updates = free

    def _refresh(self) -> None:
        """Gather the updated parts of parameters that all ranks hold whole; the next forward waits unit by unit."""
        self._gathers = max(self._gathers, self.compute, self.host)
        for unit in dict.fromkeys(self._orders[0]):
            if self._held.units[unit].trained:
                self._gathers = max(self._gathers, self._new.get(unit, 0.0))
                self._gathers = self._over_the_wire(self._gathers, "all-gather", self._held.units[unit].whole)
                self._new[unit] = self._gathers
