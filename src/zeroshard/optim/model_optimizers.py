"""ModelOptimizers: what the optimizers of one model share.

[Note: several optimizers]
A model may have several optimizers, each for a part of its parameters and each stepped on its own: the two of a GAN,
Muon next to AdamW, one for the embeddings. Every one is a ShardedOptimizer with its own groups, slices, states and CPU
updates. A FlatParam has parameters of one optimizer only, so a step, a clip and a zero_grad() touch only their own
flats, and updates of several optimizers may be pending at once. All the rest belongs to the model:

- Gradients are reduced for all, by whichever step or clip comes first ([Note: reducing in the last backward]).
- There is one loss scale ([Note: one loss scale for several optimizers]).
- Owners of whole parameters are balanced over all optimizers ([Note: whole parameters]).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from zeroshard.engine import Engine
from zeroshard.optim.loss_scale import LossScale


def as_list(optimizer: Any) -> list[Any]:
    """Return one optimizer, several in a list or tuple, or None as a list.

    >>> as_list(None), as_list("one"), as_list(("one", "two"))
    ([], ['one'], ['one', 'two'])
    """
    return [] if optimizer is None else list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]


class ModelOptimizers:
    """What the ``count`` optimizers of one model share: see [Note: several optimizers]."""

    def __init__(self, engine: Engine, count: int = 1) -> None:
        config = engine.context.config
        self.engine, self.count = engine, count
        self.loss_scale: LossScale | None = None
        if config.precision == "fp16":
            self.loss_scale = LossScale(config.loss_scale, engine.comm.device, is_shared=count > 1)
        self.owner_loads = [0] * engine.comm.shard_axis.size  # elements of whole parameters, by owner
        self.owner_flops = [0] * engine.comm.shard_axis.size  # of Muon's matrices, by owner
        self.state_bytes: dict[str, list[int]] = {}  # by tier, of each optimizer
        self.members: list[weakref.ref[Membership]] = []  # weak: without an optimizer, its states are freed

    def add(self) -> Membership:
        """Add the next optimizer."""
        member = Membership(self, len(self.members))
        self.members.append(weakref.ref(member))
        return member


class StepCounter(Protocol):
    """Counts the steps of one optimizer: see ``LocalSteps``."""

    def begin_step(self) -> None:
        """Begin a step."""

    def end_step(self) -> None:
        """End it."""


@dataclass(eq=False)
class Membership:
    """One optimizer, as the model and its other optimizers know it."""

    shared: ModelOptimizers
    number: int
    last_step: int = 0  # ``Engine.total_backwards`` in its last step
    discards_grads: bool = False  # whether a zero_grad() has cleared what backwards since its last step have added
    names: set[str] = field(default_factory=set)  # of the parameters in its groups
    local_steps: StepCounter | None = None

    def __post_init__(self) -> None:
        # which optimizer of several this is, for the names of passes: all ranks must use the same one
        self.label = f" of optimizer {self.number}" if self.shared.count > 1 else ""

    @property
    def backwards(self) -> int:
        """The number of backwards since its last step."""
        return self.shared.engine.total_backwards - self.last_step

    def begin_step(self) -> int:
        """Begin a step; return the number of backwards since the last step of any optimizer."""
        engine = self.shared.engine
        if self.local_steps is not None:
            self.local_steps.begin_step()
        self.last_step, backwards, engine.backward_count = engine.total_backwards, engine.backward_count, 0
        return backwards

    def end_step(self, backwards: int) -> None:
        """End a step; ``backwards`` is what :meth:`begin_step` returned."""
        if self.local_steps is not None:
            self.local_steps.end_step()
        self.shared.engine.gradients.memory.has_unstepped = False
        self.shared.engine.comm.counters.end_step(continues_last=self.shared.count > 1 and not backwards)

    def check_ungrouped(self, names: list[str]) -> None:
        """Raise if one of the named parameters is in a group of any optimizer."""
        for member in self._living_members():
            for name in member.names.intersection(names):
                raise ValueError(f"{name!r} is already in a parameter group{member.label}")

    def check_averaged_alone(self, name: str, adjacent: Iterable[str]) -> None:
        """Raise if another optimizer has a parameter in the flat of a named one: its average would change both."""
        for member in self._living_members():
            for other in member.names.intersection(adjacent) if member is not self else ():
                raise ValueError(
                    f"{name!r} is stored together with {other!r}, which is in a parameter group{member.label}, and "
                    "with local_steps each optimizer averages its parameters at its own time: add both to one "
                    "optimizer, or pass them to shard() in the groups of their optimizers"
                )

    def _living_members(self) -> list[Membership]:
        return [member for reference in self.shared.members if (member := reference()) is not None]

    def track_state_bytes(self, tier: str, nbytes: int) -> None:
        """Record how many bytes the states take in a tier."""
        by_optimizer = self.shared.state_bytes.setdefault(tier, [0] * self.shared.count)
        by_optimizer[self.number] = nbytes
        self.shared.engine.context.tracker.set("optimizer states", sum(by_optimizer), tier)
