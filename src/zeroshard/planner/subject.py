"""Subject: the model that is planned for, traced as often as plans need it and no more."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from zeroshard.config import Config
from zeroshard.engine.units import plan_units, repeated
from zeroshard.planner.choice import Choice
from zeroshard.planner.deepened import UnevenError, deepened
from zeroshard.planner.footprint import Footprint, footprint
from zeroshard.planner.machines.machine import Machine
from zeroshard.planner.memory import Holdings, holdings
from zeroshard.planner.pace import Pace, Work, pace
from zeroshard.planner.shortened import shortened, stack_of
from zeroshard.planner.traces.inputs import Inputs, Loss
from zeroshard.planner.traces.trace import Trace, spans_of
from zeroshard.planner.traces.tracing import Checkpoint, UntraceableError, trace
from zeroshard.tensor.plans import plan_of

ROUNDING = 0.001  # by which a trace may miss what it stands for
DEPTHS = (2, 3)  # blocks of the shortened models that are traced in the place of a deep one
DEEP = 8  # blocks from which on that is done
BASIS = (2, 3)  # micro-batches that are traced; all others lie on the lines through them. 1 is special to many kernels


@dataclass(frozen=True)
class Traced:
    """A trace, and what it takes on a machine."""

    trace: Trace
    work: Work


class Subject:
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
        loss: Loss = None,
        sequence: int | None = None,
        optimizer_states: int = 2,
        one_pass: bool = True,
        scratch: float = 0.0,
        clipped: bool = False,
        partition: bool = True,
        together: bool = True,
        replicas: int = 1,
        **options: Any,
    ) -> None:
        self.model, self._inputs, self._loss, self._sequence = model, inputs, loss, sequence
        self.optimizer_states, self._scratch, self.clipped = optimizer_states, scratch, clipped
        self.one_pass, self._replicas = one_pass, replicas
        self.options, self._partition = options, partition
        self._config = Config(**options)
        self._units = plan_units(model, self._config.units, self._config.bucket_size, together)
        alone = all(plan.blocks == 1 for plan in self._units if plan.is_block)  # see [Note: small blocks]
        stack = stack_of(model) if self._config.units is None and alone else None
        self._depth = len(stack) if stack is not None and len(stack) >= DEEP else 0  # 0: traced as it is
        self._short: list[nn.Module] = []
        self._straight = True  # whether other micro-batches are taken to lie on straight lines
        self._traces: dict[tuple[int, Checkpoint, str, int], Trace] = {}
        self._works: dict[tuple[int, Checkpoint, Machine, int], Traced] = {}
        self._holdings: dict[Any, Holdings] = {}
        self._footprints: dict[Any, Footprint] = {}

    @property
    def has_blocks(self) -> bool:
        """Whether there are repeated blocks, whose inputs could be kept alone."""
        return next(repeated(self.model), None) is not None

    def tensor_degrees(self, most: int) -> list[int]:
        """The powers of two up to ``most`` that the model can be divided by; 1 alone where no plan is known."""
        plan = plan_of(self.model)
        degrees = [1]
        while plan is not None and 2 * degrees[-1] <= most:
            if any(count % (2 * degrees[-1]) for count in plan.counts.values()):
                break
            degrees.append(2 * degrees[-1])
        return degrees

    def traced(self, choice: Choice, machine: Machine) -> Traced:
        """The trace of a choice, priced on a machine."""
        key = (choice.tensor, choice.checkpoint, machine, choice.micro_batch)
        if key not in self._works:
            found = self._trace(choice.tensor, choice.checkpoint, machine.kind, choice.micro_batch)
            self._works[key] = Traced(found, Work.of(found, machine, choice.tensor))
        return self._works[key]

    def _trace(self, tensor: int, checkpoint: Checkpoint, kind: str, micro_batch: int) -> Trace:
        if micro_batch in BASIS or not self._straight:
            return self._run(tensor, checkpoint, kind, micro_batch)
        low, high = (self._run(tensor, checkpoint, kind, batch) for batch in BASIS)
        if low.alike(high):
            return low.between(high, micro_batch)
        return self._run(tensor, checkpoint, kind, micro_batch)

    def _run(self, tensor: int, checkpoint: Checkpoint, kind: str, micro_batch: int) -> Trace:
        same: Checkpoint = "recompute" if checkpoint == "host" else checkpoint
        key = (tensor, same, kind, micro_batch)
        if key not in self._traces:
            self._traces[key] = self._from_short(*key) if self._depth else self._whole(self.model, *key)
        return self._traces[key]

    def _from_short(self, tensor: int, checkpoint: Checkpoint, kind: str, micro_batch: int) -> Trace:
        """The trace of a deep model from two shortened ones; the whole model's, where these are not alike."""
        try:
            self._short = self._short or [shortened(self.model, blocks) for blocks in DEPTHS]
            low, high = (self._whole(model, tensor, checkpoint, kind, micro_batch) for model in self._short)
            return deepened(low, high, self._depth - DEPTHS[1])
        except (UnevenError, UntraceableError):
            self._depth = 0
            return self._whole(self.model, tensor, checkpoint, kind, micro_batch)

    def _whole(self, model: nn.Module, tensor: int, checkpoint: Checkpoint, kind: str, micro_batch: int) -> Trace:
        return trace(
            model,
            self._inputs,
            micro_batch=micro_batch,
            sequence=self._sequence,
            loss=self._loss,
            tensor=tensor,
            checkpoint=checkpoint,
            partition=self._partition,
            kind=kind,
            **self.options,
        )

    def confirm(self, choice: Choice, machine: Machine) -> bool:
        """Whether the whole model, at a choice's own micro-batch, does what other traces have told of it.

        If not, nothing is taken for a straight line from now on: neither depth nor micro-batch.
        """
        if not (self._depth or self._straight):
            return True
        checkpoint: Checkpoint = "recompute" if choice.checkpoint == "host" else choice.checkpoint
        key = (choice.tensor, checkpoint, machine.kind, choice.micro_batch)
        real = self._whole(self.model, *key)
        if _told(self._trace(*key), real):
            return True
        self._depth, self._straight = 0, False
        self._traces, self._works, self._footprints = {key: real}, {}, {}
        return False

    def holdings(self, choice: Choice, ranks: int, on_gpu: bool) -> Holdings:
        """What the library holds of a choice."""
        key = (choice.stage, choice.tensor, repr(choice.offload), ranks, on_gpu)
        if key not in self._holdings:
            self._holdings[key] = holdings(
                self.model,
                Config(**{**self.options, **choice.sharding}),
                ranks=ranks,
                tensor=choice.tensor,
                optimizer_states=self.optimizer_states,
                on_gpu=on_gpu,
                one_pass=self.one_pass,
                plans=self._units,
                replicas=self._replicas,
            )
        return self._holdings[key]

    def footprint(self, choice: Choice, ranks: int, machine: Machine, timeline: bool = False) -> Footprint:
        """What a choice holds on each of ``ranks``."""
        alike = replace(choice, accumulate=min(choice.accumulate, 2), offload=None)
        key = (alike, repr(choice.offload), ranks, machine, timeline)
        if key not in self._footprints:
            self._footprints[key] = self._footprint(choice, ranks, machine, timeline)
        return self._footprints[key]

    def _footprint(self, choice: Choice, ranks: int, machine: Machine, timeline: bool) -> Footprint:
        traced, on_gpu = self.traced(choice, machine), machine.kind == "cuda"
        held = self.holdings(choice, ranks, on_gpu)
        trained = sum(unit.trained for unit in held.units)
        return footprint(
            traced.trace,
            held,
            on_gpu=on_gpu,
            prefetch=self._config.prefetch,
            inputs_on_host=choice.checkpoint == "host",
            workspace=machine.workspace * (1 if self._config.defragment else 2),  # see [Note: one workspace]
            scratch=self._scratch * min(trained, self._config.bucket_size),
            timeline=timeline,
            spans=traced.work.spans,
            gradients_stay=choice.accumulate > 1 or choice.offload is not None,
            adds=choice.accumulate > 1,
        )

    def pace(self, choice: Choice, ranks: int, machine: Machine) -> Pace:
        """How long a step of a choice takes."""
        traced = self.traced(choice, machine)
        return pace(
            traced.work,
            self.holdings(choice, ranks, machine.kind == "cuda"),
            machine,
            ranks=ranks,
            tensor=choice.tensor,
            accumulate=choice.accumulate,
            prefetch=self._config.prefetch,
            clipped=self.clipped,
            kept_on_host=sum(traced.trace.kept) if choice.checkpoint == "host" else 0.0,
        )

    def useful_flops(self, choice: Choice, machine: Machine) -> float:
        """Of a step on one device, without what is computed again."""
        plain = Choice(tensor=choice.tensor, micro_batch=choice.micro_batch)
        return choice.accumulate * self.traced(plain, machine).work.flops


def _told(found: Trace, real: Trace) -> bool:
    """Whether two traces take the same memory and time, but for rounding."""
    sizes = [
        (max(span.peak for span in spans_of(one)), sum(op.flops for op in one.ops), sum(op.moved for op in one.ops))
        for one in (found, real)
    ]
    near = all(abs(mine - its) <= ROUNDING * its for mine, its in zip(*sizes, strict=True))
    return near and len(found.events) == len(real.events)
