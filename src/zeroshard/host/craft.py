"""Craft: how one granule is updated, on the thread of updates."""

from __future__ import annotations

import contextlib
import copy
from collections import defaultdict
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from zeroshard.engine.gradients import Gradients
from zeroshard.host.crew import Running
from zeroshard.host.desk import Desk
from zeroshard.host.granule import MASTER, Granule
from zeroshard.host.native import Kernels
from zeroshard.host.recipe import Recipe
from zeroshard.host.verdict import Ruling
from zeroshard.memory.tiers import Tiers
from zeroshard.runs import Run, is_elementwise, lifted


@dataclass(frozen=True)
class Task:
    """The update of one granule in one step."""

    granule: Granule
    runs: tuple[Run, ...]
    states: tuple[dict[str, Any], ...]  # of the runs; the optimizer may have others by the time they are updated
    recipes: tuple[Recipe, ...] | None  # None: by torch
    groups: tuple[dict[str, Any], ...]  # of the runs, as they were at the step
    alone: bool  # whether nothing else may be under way meanwhile: see [Note: behind the kernel]


class Craft:
    """Updates granules by the native update or by torch. ``now`` is everywhere the moment of the step.

    Whatever yields does so once its kernels run, unless its task is to be alone; what it returns is there when it goes
    on after that.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        gradients: Gradients,
        tiers: Tiers,
        desk: Desk,
        kernels: Kernels | None,
        threads: int,
    ) -> None:
        self._inner, self._gradients, self._tiers, self._desk = inner, gradients, tiers, desk
        self._kernels, self._threads = kernels, threads
        self._crew = None if kernels is None else kernels.crew()

    def ahead(self, task: Task, ruling: Ruling) -> Generator[None, None, None]:
        """Update a granule beside its old values."""
        granule = task.granule
        yield from self._cook(task, granule.lines, granule.beside, granule.copy, ruling)

    def confirm(self, task: Task, now: torch.cuda.Event | None) -> torch.cuda.Event | None:
        """Let what was made ahead of the step count."""
        granule = task.granule
        states = dict(zip(task.runs, task.states, strict=True))
        keys = dict.fromkeys(key for recipe in task.recipes or () for key in recipe.keys)
        granule.exchange(list(keys), states)
        self._count(task)
        return self._desk.deliver(granule.place, granule.copy, now)

    def update(
        self, task: Task, lines: dict[str, torch.Tensor], ruling: Ruling, now: torch.cuda.Event | None
    ) -> Generator[None, None, torch.cuda.Event | None]:
        """Update a granule, whose values are in ``lines`` by key, and send the new parameters to their place."""
        granule = task.granule
        if task.recipes is None:
            with self._pointed(task, lines):
                self._by_torch(task, lines, ruling)
                return self.deliver_masters(granule, list(task.runs), now)
        if self._desk.direct(granule.place, now):
            yield from self._cook(task, lines, lines, granule.place, ruling)
            self._count(task)
            return None
        slot, copy = None, granule.copy
        if copy is None:  # slots are few: until the device is at the step, they stay taken
            slot = self._desk.take()
            copy = slot.copy_of(granule)
        yield from self._cook(task, lines, lines, copy, ruling)
        self._count(task)
        whole = granule.whole and len(task.runs) == len(granule.runs)
        event = None
        for span in [slice(None)] if whole else [granule.within(run).slice for run in task.runs]:
            event = self._desk.deliver(granule.place[span], copy[span], now)
        if slot is not None:
            slot.event = event
        return event

    def _cook(
        self,
        task: Task,
        old: dict[str, torch.Tensor],
        new: dict[str, torch.Tensor],
        copy: torch.Tensor | None,
        ruling: Ruling,
    ) -> Generator[None, None, None]:
        """Update by the native update. Alone, run after run, as all may find their gradients in one buffer."""
        running: list[Running] = []
        try:
            for run, recipe in zip(task.runs, task.recipes or (), strict=True):
                span = task.granule.within(run).slice
                begun = recipe.cook(
                    self._kernels_there,
                    {key: old[key][span] for key in (MASTER, *recipe.keys)},
                    {key: new[key][span] for key in (MASTER, *recipe.keys)},
                    self._desk.gradient(run, self._gradients),
                    None if copy is None else copy[span],
                    ruling.factors,
                    self._threads,
                    None if task.alone else self._crew,
                )
                running.append(begun)
            if not task.alone:
                yield
        finally:
            for begun in running:
                begun.end()

    @property
    def _kernels_there(self) -> Kernels:
        if self._kernels is None:
            raise RuntimeError("the native update is not there: please report this")
        return self._kernels

    def _count(self, task: Task) -> None:
        for state in task.states:
            if "step" in state:
                state["step"] += 1

    @contextlib.contextmanager
    def _pointed(self, task: Task, lines: dict[str, torch.Tensor]) -> Iterator[None]:
        """Let runs and their states point at lines in memory, where they rest on disk."""
        granule = task.granule
        if granule.tier != "disk":
            yield
            return
        self._point(task, lines)
        try:
            yield
        finally:
            self._point(task, granule.lines)

    def _point(self, task: Task, lines: dict[str, torch.Tensor]) -> None:
        for run, state in zip(task.runs, task.states, strict=True):
            span = task.granule.within(run).slice
            run.parameter.data = lines[MASTER][span]
            for key in task.granule.states:
                if is_elementwise(key, state.get(key), run.parameter.shape) and key in lines:
                    state[key] = lines[key][span]

    def _by_torch(self, task: Task, lines: dict[str, torch.Tensor], ruling: Ruling) -> None:
        """Step a twin of the user's optimizer on these runs alone: the optimizer itself belongs to another thread."""
        twin: Any = copy.copy(self._inner)
        twin.param_groups = []
        states = zip(task.runs, task.states, strict=True)
        wides: list[torch.Tensor] = []
        twin.state = defaultdict(dict, {run.parameter: state for run, state in states})
        for run, group in zip(task.runs, task.groups, strict=True):
            gradient = self._desk.gradient(run, self._gradients)
            wide = gradient.to(run.parameter.dtype, copy=True)
            for factor in ruling.factors:
                wide.mul_(factor)
            wides.append(wide)
            twin.param_groups.append({**group, "params": [run.parameter]})
        with lifted([run.parameter for run in task.runs]):
            for run, wide in zip(task.runs, wides, strict=True):
                run.parameter.grad = wide
            type(self._inner).step(twin)
        for run, state in zip(task.runs, task.states, strict=True):
            task.granule.house(run, state, self._tiers, lines)

    def deliver_masters(
        self, granule: Granule, runs: list[Run], now: torch.cuda.Event | None
    ) -> torch.cuda.Event | None:
        """Send values that were updated elsewhere to the parameters in computation."""
        if self._desk.direct(granule.place, now):
            for run in runs:
                granule.place[granule.within(run).slice].copy_(run.parameter.data)
            return None
        slot = self._desk.take()
        for run in runs:
            span = granule.within(run).slice
            slot.copy_of(granule)[span].copy_(run.parameter.data)
            slot.event = self._desk.deliver(granule.place[span], slot.copy_of(granule)[span], now)
        return slot.event
