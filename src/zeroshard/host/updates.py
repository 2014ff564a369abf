"""HostUpdates: the optimizer's step for states that rest outside the device, on a thread of its own.

[Note: just in time]
Gradients leave the device unit by unit while backward runs. ``step()`` only decides what is to be done and returns; a
thread of the host updates one granule after the other ([Note: what the host does next]) and sends the new
parameters to the device; forward waits for each unit as it comes to it. Where the loop is expected to step after this
backward (``foresight.py``), the thread begins as soon as a gradient is there, and writes beside the old values
([Note: beside the old values]); ``step()`` then has only to confirm it. So the update hides behind backward and the
next forward, and the semantics are PyTorch's: before ``step()`` nothing has changed, after it everything.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from zeroshard.engine.engine import Engine
from zeroshard.engine.flat import Flat
from zeroshard.host.coming import Coming
from zeroshard.host.craft import Craft, Task
from zeroshard.host.desk import Desk
from zeroshard.host.foresight import Foresight
from zeroshard.host.granule import MASTER, Granule
from zeroshard.host.native import Kernels, kernels
from zeroshard.host.recipe import Recipe, recipe_for
from zeroshard.host.shelf import Shelf
from zeroshard.host.verdict import Ruling, Verdict
from zeroshard.host.worker import Job, Worker
from zeroshard.memory.disk import DiskError
from zeroshard.memory.host import host_memory_left, ranks_here
from zeroshard.memory.spread import Stretch
from zeroshard.memory.tiers import Tiers
from zeroshard.runs import Run, states_of_an_element

SHARE = 0.7  # of the memory that is left: for what is made ahead of a step


@dataclass(frozen=True)
class Ahead:
    """An update that was begun before the step."""

    task: Task
    done: Future[Ruling]


class HostUpdates:
    """Updates the far stretches of one model: see [Note: just in time]."""

    def __init__(self, inner: torch.optim.Optimizer, engine: Engine, tiers: Tiers) -> None:
        self._inner, self._engine, self._tiers = inner, engine, tiers
        flats = list(engine.gradients.of_flat)
        self._of: dict[Flat, list[Granule]] = {
            flat: [Granule(flat, stretch) for stretch in flat.master.stretches if stretch.far]
            for flat in flats
            if flat.master is not None
        }
        self._granules: dict[Stretch, Granule] = {g.stretch: g for found in self._of.values() for g in found}
        self._kernels: Kernels | None = kernels()
        self._desk = Desk(engine.comm.device, tiers, self._granules.values())
        threads = (tiers.offload.threads if tiers.offload is not None else None) or default_threads()
        self._craft = Craft(inner, engine.gradients, tiers, self._desk, self._kernels, threads)
        self._shelf = Shelf(tiers)
        self._order = {granule: number for number, granule in enumerate(self._granules.values())}
        self._there: dict[Flat, torch.cuda.Event | None] = {}  # when a flat's gradient is complete, where that is told
        self._worker = Worker()
        self._jobs: list[Future[Any]] = []
        self._vain: list[Future[Any]] = []  # begun ahead, of no use, and perhaps still under way
        self._uncounted: list[Task] = []  # of a step in which a gradient overflowed
        self._foresight = Foresight()
        self._ahead: dict[Granule, Ahead] = {}
        self._guessing = False
        self._inverse = Verdict()
        self._left = self._spare()  # bytes for what is made ahead

    # -- told by the optimizer and the engine ------------------------------------------------------------------------

    def arrange(self, runs: list[Run]) -> None:
        """Take note of the runs there are."""
        self.doubt()
        for granule in self._granules.values():
            granule.runs = []
        for run in runs:
            if run.stretch is not None:
                self._granules[run.stretch].runs.append(run)
        for granule in self._granules.values():
            granule.whole = granule.covered(granule.runs)

    def room(self, stretch: Stretch, run: Run, key: str, dtype: torch.dtype) -> torch.Tensor:
        """Where a state of a run in a far stretch belongs, in its tier; what is there now has no meaning."""
        return self._granules[stretch].room(run, key, dtype, self._tiers)

    def foresee(self, backwards: int) -> None:
        """A backward begins: see [Note: just in time]."""
        self.doubt()
        self._guessing = self._foresight.last(backwards) and self._left > 0 and self._kernels is not None
        if self._guessing:
            self._inverse = Verdict(inverse=self._engine.gradients.inverse)

    def landed(self, flat: Flat) -> None:
        """Begin to update what a flat's gradient is there for, ahead of the step."""
        if flat not in self._of:
            return
        gradient = self._engine.gradients.of_flat[flat]
        there = self._there[flat] = gradient.landing if gradient.far else self._desk.mark()
        if not (self._guessing and all(gradient.used)):
            return
        for granule in self._of[flat]:
            if not granule.whole or granule.tier == "disk":
                continue
            task = self._task(granule, granule.runs, ahead=True)
            if task.recipes is not None and self._open_beside(granule, task.recipes):
                moments, work = [there, self._inverse.there], partial(self._work_ahead, task, self._inverse)
                job = Job((self._order[granule], 1), moments, work, task.alone)
                self._ahead[granule] = Ahead(task, self._worker.do(job))

    def doubt(self) -> None:
        """What was begun ahead of the step does not count."""
        self._guessing = False
        if self._ahead:
            for ahead in self._ahead.values():
                self._drop(ahead)
            self._ahead.clear()

    def step(self, runs: list[Run], verdict: Verdict, backwards: int) -> None:
        """Start the update of these runs."""
        self.wait()
        self._foresight.stepped(backwards)
        self._guessing = False
        ahead, self._ahead = self._ahead, {}
        due: dict[Granule, list[Run]] = {}
        for run in runs:
            if run.stretch is not None:
                due.setdefault(self._granules[run.stretch], []).append(run)
        tasks = [self._task(granule, due[granule]) for granule in self._granules.values() if granule in due]
        for granule, vain in ahead.items():
            if granule not in due:
                self._drop(vain)
        now = self._desk.mark()
        following = [task.granule for task in tasks if task.granule.tier == "disk"]
        coming: dict[Flat, list[Future[Any]]] = {}
        for task in tasks:
            granule = task.granule
            moments = [self._there.get(granule.flat, now), verdict.there]
            if granule.place.device.type == "cpu":  # the device has to have read the old values
                moments.append(now)
            work = partial(self._work, task, verdict, ahead.get(granule), now, following)
            done = self._worker.do(Job((self._order[granule], 0), moments, work, task.alone))
            coming.setdefault(granule.flat, []).append(done)
            self._jobs.append(done)
        self._there.clear()
        for flat, jobs in coming.items():
            flat.arrival = Coming(jobs, self._fail)

    def together(self, runs: list[Run]) -> None:
        """Bring about what the optimizer itself has just updated, in one call for all runs."""
        now = self._desk.mark()
        due: dict[Granule, list[Run]] = {}
        for run in runs:
            if run.stretch is not None:
                granule = self._granules[run.stretch]
                granule.house(run, self._inner.state.get(run.parameter, {}), self._tiers)
                due.setdefault(granule, []).append(run)
        for granule, found in due.items():
            event = self._craft.deliver_masters(granule, found, now)
            if event is not None:
                event.synchronize()

    def wait(self) -> None:
        """Return when no update is under way."""
        for job in self._jobs:
            error = job.exception()  # as in Coming.wait()
            if error is not None:
                raise self._fail(error) from error
        self._jobs = []
        wait_for(self._vain)
        self._vain = []
        self._unmake_states()
        try:
            self._shelf.finish()
        except DiskError as error:
            raise self._fail(error) from error

    # -- on the thread of the step -----------------------------------------------------------------------------------

    def _drop(self, ahead: Ahead) -> None:
        if not ahead.done.cancel():
            self._vain.append(ahead.done)
        self._foresight.wrong()

    def _fail(self, error: BaseException) -> Exception:
        """Let everything that is under way end, and say so to whoever wants to go on without a load."""
        why = f"the update outside the device failed: {type(error).__name__}: {error}"
        told = f"{why}. The states are of no use any more: load a checkpoint"
        self._engine.states.spoilt |= dict.fromkeys(("weights", "optimizer"), told)  # what a load makes good
        self._engine.comm.control.tell_failure(why)
        wait_for(self._jobs)
        self._jobs = []
        self._shelf.forget()
        for flat in self._of:
            flat.arrival = None
        return RuntimeError(told)

    def _task(self, granule: Granule, runs: list[Run], ahead: bool = False) -> Task:
        """What is to be done. ``ahead``: by the native update only where there are states, since a step makes them."""
        states = tuple(self._inner.state[run.parameter] for run in runs)
        gradient = self._engine.gradients.of_flat[granule.flat]
        dtypes = (granule.stretch.tensor.dtype, gradient.dtype, granule.flat.dtype)
        recipes: list[Recipe] = []
        for run, state in zip(runs, states, strict=True) if self._kernels is not None else ():
            recipe = recipe_for(self._inner, run.group, state, dtypes, self._engine.comm.device.type == "cuda")
            if recipe is None or (ahead and any(state.get(key) is None for key in recipe.keys)):
                break
            recipes.append(recipe)
        if len(recipes) == len(runs):
            for run, recipe in zip(runs, recipes, strict=True):
                self._begin(granule, run, recipe)
            fetched = self._engine.comm.device.type == "cuda" and not gradient.far  # into the one buffer there is
            return Task(granule, tuple(runs), states, tuple(recipes), (), fetched or granule.tier == "disk")
        return Task(granule, tuple(runs), states, None, tuple(_as_it_is(run.group) for run in runs), alone=True)

    def _begin(self, granule: Granule, run: Run, recipe: Recipe) -> None:
        """Make the states of a run that has none yet, or bring them into the granule."""
        state = self._inner.state[run.parameter]
        within = granule.within(run)
        for key in recipe.keys:
            if state.get(key) is None:
                if key not in granule.states:
                    granule.states[key] = self._tiers.zeros(None, granule.tier, granule.numel, torch.float32)
                else:  # of a run whose states were forgotten
                    granule.states[key][within.slice].zero_()
                state[key] = granule.states[key][within.slice]
        if "exp_avg" in recipe.keys and "step" not in state:
            state["step"] = torch.tensor(0.0)
        granule.house(run, state, self._tiers)

    def _unmake_states(self) -> None:
        """Take back the states that were made for a first step which then did not count: it will be the first again."""
        for task in self._uncounted:
            for state, recipe in zip(task.states, task.recipes or (), strict=False):
                if recipe.step == 1:
                    for key in (*recipe.keys, "step"):
                        state.pop(key, None)
        self._uncounted = []

    def _spare(self) -> int:
        """Bytes of host memory that may be taken to work ahead: a part of what is left once all states are there."""
        if self._tiers.offload is None or not self._tiers.offload.speculate:
            return 0
        gradients = self._engine.gradients.of_flat.values()
        coming = sum(g.flat.layout.shard_numel * g.dtype.itemsize for g in gradients if g.far)
        coming += sum(granule.numel for granule in self._granules.values()) * states_of_an_element(self._inner)
        left = int(SHARE * max(0, host_memory_left() // ranks_here() - coming))
        limit = self._tiers.host_left
        return left if limit is None else min(left, limit)

    def _open_beside(self, granule: Granule, recipes: tuple[Recipe, ...]) -> bool:
        """Whether there is room to update a granule ahead of the step."""
        keys = list(dict.fromkeys(key for recipe in recipes for key in recipe.keys))
        missing = [key for key in (MASTER, *keys) if key not in granule.beside]
        nbytes = granule.numel * (4 * len(missing) + (granule.flat.dtype.itemsize if granule.copy is None else 0))
        if nbytes > self._left:
            return False
        self._left -= nbytes
        if missing:
            granule.open_beside(self._tiers, keys)
        return True

    # -- on the thread of updates ------------------------------------------------------------------------------------

    def _work_ahead(self, task: Task, verdict: Verdict) -> Generator[None, None, Ruling]:
        """Update a granule beside its old values."""
        ruling = verdict.read()
        yield from self._craft.ahead(task, ruling)
        return ruling

    def _work(
        self, task: Task, verdict: Verdict, begun: Ahead | None, now: torch.cuda.Event | None, following: list[Granule]
    ) -> Generator[None, None, torch.cuda.Event | None]:
        """Confirm what was made ahead, or update a granule now."""
        ruling, granule = verdict.read(), task.granule
        if not ruling.counts:
            if begun is not None:
                begun.done.cancel()
            self._uncounted.append(task)
            return None
        if begun is not None and not begun.done.cancel():  # it is over: no two of one granule overlap
            made, same = begun.done.result(), begun.task.runs == task.runs and begun.task.recipes == task.recipes
            if same and made.inverse == ruling.inverse and ruling.coefficient in (None, 1.0):
                return self._craft.confirm(task, now)
            self._foresight.wrong()
        if granule.tier == "disk":
            with self._shelf.taken(granule, following) as lines:
                return (yield from self._craft.update(task, lines, ruling, now))
        return (yield from self._craft.update(task, granule.lines, ruling, now))


def _as_it_is(group: dict[str, Any]) -> dict[str, Any]:
    """A group for torch to step on the host, which nothing that is done to the user's own changes any more."""
    numbers = {key: value.detach().cpu().clone() for key, value in group.items() if isinstance(value, torch.Tensor)}
    return {**group, **numbers, **({"capturable": False} if "capturable" in group else {})}


def default_threads() -> int:
    """This rank's share of the processors, less two: one launches the device's work, one runs backward."""
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, processors // ranks_here() - 2)
