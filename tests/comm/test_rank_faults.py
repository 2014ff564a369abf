"""A rank that dies, raises, ends or leaves the order is named to all others within seconds; a slow one is fine."""

from __future__ import annotations

import gc
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from crash import Forks, Outcome, Run
from ranks import run_threads
from zoo import make_net

import zeroshard
from zeroshard.comm import heartbeat_monitor, peers
from zeroshard.comm.collectives import CollectiveOrder
from zeroshard.comm.consistency import ConsistencyChecker

SOON = 25.0  # seconds: they know within 10, but for a busy machine; the process group's timeout is 60


@dataclass
class Case:
    """A fault of one rank, and what the errors of the others have to say."""

    what: str
    named: str  # a pattern
    ranks: int = 2
    options: dict[str, Any] = field(default_factory=dict)
    store: str = "file"  # "tcp": rank 0 holds it
    by: int = 1

    @property
    def name(self) -> str:
        return " ".join(
            [
                self.what,
                f"{self.ranks} ranks",
                *(f"{k} {v}" for k, v in self.options.items()),
                self.store,
                f"by {self.by}",
            ]
        )


def lone(call: str, named: str, *stages: int) -> list[Case]:
    return [Case(call, f"rank 1 is about to start to {named}", 2, {"stage": stage}) for stage in stages]


BARRIER_WAIT = r"rank \d is about to .*, but rank \d waits for it in torch.distributed.barrier\(\) \(.*faults.py, line"

CASES = [
    Case("killed", r"rank 1 has died: its process \d+ was killed", 3, store="tcp"),
    Case("killed", r"rank 0 has died: its process \d+ was killed", 3, store="tcp", by=0),
    Case("killed", r"rank 1 has died: no heartbeat from machine", 2, {"apart": True, "heartbeat_timeout": 3}),
    *(Case("killed before a step", r"rank 1 has died: its process \d+ was killed", 2, {"stage": s}) for s in (0, 2)),
    Case("killed in save", r"rank 1 has died: its process \d+ was killed", 2, {"stage": 2}),
    Case("killed in save, writing", r"rank 0 has died: its process \d+ was killed", 3, by=0),
    Case("raises", r"rank 1 raised LossError: of this rank. Its last event: gather unit 'blocks\.\d'", 3),
    Case("raises", r"rank 0 raised LossError: of this rank", 3, {"stage": 0}, "tcp", by=0),
    Case("raises a long text", r"rank 1 raised LossError: of this rank!+\. Its last event: ", 2, {"stage": 0}, "tcp"),
    Case("raises without text", r"rank 1 raised MuteError: its str\(\) raises", 2, {"stage": 0}, "tcp"),
    Case("ends early", r"rank 1 has exited. Its last event: ", 2, {"stage": 1}, "tcp"),
    Case("micro-batches", r"rank 2 is about to start step after 1 backwards", 3, by=2),
    Case("micro-batches", r"rank 1 is about to start reduction .* after 1 backwards", 2, {"stage": 0}, "tcp"),
    Case("skips a block", r"rank 1 is about to gather unit 'blocks\.2'.*is at: gather unit 'blocks\.1'", 3),
    *lone("state_dict", r"read the optimizer's state_dict\(\)", 1, 3),
    *lone("full_state", r"read the optimizer's state of", 2),
    *lone("full_parameter", r"read the parameter 'blocks\.1\.0\.weight'", 3),
    *lone("full_gradient", r"read the gradient of", 0, 3),
    *lone("save", "save", 0),
    *(Case("barrier", BARRIER_WAIT, 3, {"stage": stage}) for stage in (0, 1, 2, 3)),
    Case("barrier in a step", BARRIER_WAIT, 2, {"stage": 1}, by=0),
    Case("barrier in a step", BARRIER_WAIT, 3, {"stage": 3}, by=2),
]
# in these stages a rank has all of it by itself; and a slow rank is no fault
HARMLESS = [Case("state_dict", "", 2, {"stage": 0}), Case("full_parameter", "", 2, {"stage": 2}), Case("slow", "")]
BARRIER = Case("save before a barrier", "")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Outcome]]:
    """All runs, made by one program."""
    return run_cases([*CASES, *HARMLESS, BARRIER], tmp_path_factory)


def run_cases(
    cases: list[Case], tmp_path_factory: pytest.TempPathFactory, backend: str = "gloo"
) -> dict[str, list[Outcome]]:
    """Run the cases in processes that one program forks; return what came of the ranks of each."""
    forks = Forks(tmp_path_factory.mktemp("forks"))
    runs = []
    for case in cases:
        directory = str(tmp_path_factory.mktemp("fault"))
        arguments = {"ranks": case.ranks, "what": case.what, "directory": directory, "by": case.by, **case.options}
        runs.append(Run("faults:fault", arguments, ranks=case.ranks, limit=60, store=case.store, backend=backend))
    try:
        return {case.name: found for case, found in zip(cases, forks.run(runs), strict=True)}
    finally:
        forks.close()


@pytest.mark.guarantee("Failed ranks")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_all_other_ranks_learn_who_failed_and_why(case: Case, outcomes: dict[str, list[Outcome]]) -> None:
    assert_others_are_told(case, outcomes[case.name])


def assert_others_are_told(case: Case, outcomes: list[Outcome]) -> None:
    """Assert that every other rank has ended by itself, in time, with an error that names the rank and the fault."""
    diverged = not case.what.startswith(("killed", "raises", "ends early", "barrier"))
    for rank, outcome in enumerate(outcomes):
        if rank == case.by and not diverged:
            continue
        assert not outcome.hung, outcome.printed
        assert outcome.code == 0, outcome.printed
        told = outcome.answer
        assert re.search(case.named, told["told"]), told
        assert told["told"].startswith((f"rank {rank} cannot ", "ranks disagree")), told
        assert told["after"] < SOON, told
        stated = re.search(r", after ([\d.]+) s", told["told"])
        if stated is not None:  # how long it waited, which is not how long it might have
            assert float(stated[1]) < told["waited"] + 0.2, told


@pytest.mark.guarantee("Slow ranks")
@pytest.mark.parametrize("case", HARMLESS, ids=lambda case: case.name)
def test_what_needs_no_other_rank_and_what_is_slow_is_not_an_error(
    case: Case, outcomes: dict[str, list[Outcome]]
) -> None:
    assert_no_error(outcomes[case.name])


def assert_no_error(outcomes: list[Outcome]) -> None:
    """Assert that every rank has ended by itself, without an error, and has stopped to watch the others."""
    for outcome in outcomes:
        assert outcome.code == 0, outcome.printed
        assert outcome.answer == {"told": "", "watching": 1, "left": 0}


def test_a_rank_that_saves_while_others_wait_in_a_barrier_raises(outcomes: dict[str, list[Outcome]]) -> None:
    waiting, saving = outcomes[BARRIER.name]
    wanted = r"rank 0 waits for it in torch.distributed.barrier\(\) \(.*faults.py, line \d+\)"
    assert re.search(wanted, saving.answer["told"]), saving
    assert saving.answer["after"] < SOON
    assert not waiting.hung, waiting.printed  # its barrier ends with the process of the other


class SlowBackend:
    """In the place of NCCL's, which needs a GPU."""

    def __init__(self) -> None:
        self.is_aborted = False

    def abort(self) -> None:
        time.sleep(0.5)
        self.is_aborted = True


def test_communicators_are_aborted_before_the_error_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else freeing the user's tensors may wait for the device, with the GIL held, so that nobody can abort them."""
    backend = SlowBackend()
    monkeypatch.setattr(heartbeat_monitor, "_nccl_backends", lambda ranks: [backend])

    def body(rank: int) -> bool:
        model, _ = zeroshard.shard(make_net(), stage=3)
        with pytest.raises(zeroshard.RanksDisagreeError):
            if rank == 0:
                model(torch.zeros(2, 4, dtype=torch.int64))
            else:
                zeroshard.full_parameter(model, next(name for name, _ in model.named_parameters()))
        return backend.is_aborted

    assert run_threads(2, body) == [True, True]


@pytest.mark.parametrize("is_garbage", [False, True])
def test_a_rank_may_drop_its_model_before_the_others(is_garbage: bool) -> None:
    """They learn that it has joined all collectives, also those since its last heartbeat."""
    store = torch.distributed.HashStore()
    first, second = (ConsistencyChecker(store, rank, [0, 1], timeout=5.0) for rank in range(2))
    order = CollectiveOrder(second)
    time.sleep(1.5 * peers.HEARTBEAT_INTERVAL_SECONDS)
    order.event_count = 7
    if is_garbage:  # in cycles, whose objects are finalized in any order
        second.itself, order.itself = second, order  # type: ignore[attr-defined]
    del second, order
    gc.collect()
    deadline = time.monotonic() + SOON
    while not first.faults and time.monotonic() < deadline:
        time.sleep(0.05)
    first.close()
    (fault,) = first.faults
    assert (fault.rank, fault.event_count) == (1, 7)
    assert not fault.is_blocking(7)


class LostStore:
    """A store that can be lost while the process that holds it still runs."""

    def __init__(self) -> None:
        self._store = torch.distributed.HashStore()
        self.is_lost = self.is_missed = False

    def clone(self) -> LostStore:
        return self

    def __getattr__(self, name: str) -> Any:
        if self.is_lost:
            self.is_missed = True
            raise RuntimeError("the store is lost")
        return getattr(self._store, name)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_killed_rank_is_named_after_another_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connections close before its process has ended, and a rank that ended by itself explains no failure."""
    monkeypatch.setattr(heartbeat_monitor, "STORE_GRACE_SECONDS", SOON)
    store: Any = LostStore()
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        start_time = peers._process_start_time(process.pid)
        store.set("who 0", json.dumps([peers._machine_id(), process.pid, start_time]))
        first, second = (ConsistencyChecker(store, rank, [0, 1, 2], timeout=5.0) for rank in (1, 2))
        second.announce_model_dropped((0, ""))
        wait_until(lambda: [fault.rank for fault in first.faults] == [2])
        store.is_lost = True
        wait_until(lambda: store.is_missed)
        process.kill()
    wait_until(lambda: len(first.faults) == 2)
    first.close()
    assert re.match(r"rank 0 has died: its process \d+ was killed", first.faults[0].text)


def watches() -> set[threading.Thread]:
    """The threads that look after other ranks. Tests before may have left some."""
    return {thread for thread in threading.enumerate() if thread.name == heartbeat_monitor.THREAD_NAME}


@pytest.mark.parametrize("is_enabled", [True, False])
def test_frames_are_gone_through_without_garbage_collection(is_enabled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would let the thread return from frames that are being looked at: see `_without_garbage_collection`."""
    found, current_frames = list[bool](), sys._current_frames

    def frames() -> dict[int, Any]:
        found.append(gc.isenabled())
        return current_frames()

    monkeypatch.setattr(sys, "_current_frames", frames)
    was_enabled = gc.isenabled()
    try:
        (gc.enable if is_enabled else gc.disable)()
        assert peers.BarrierDetector().poll() is None
        assert found == [False] and gc.isenabled() == is_enabled
    finally:
        (gc.enable if was_enabled else gc.disable)()


@pytest.mark.guarantee("Threads")
def test_a_model_that_is_gone_leaves_no_thread() -> None:
    started, before = threading.Barrier(2), watches()

    def body(rank: int) -> int:
        model, _ = zeroshard.shard(make_net(), stage=3)
        started.wait(60)
        found = len(watches() - before)
        del model
        return found

    assert max(run_threads(2, body)) == 2
    gc.collect()
    for thread in watches() - before:
        thread.join(30)
    assert not watches() - before


def test_one_rank_alone_has_no_thread(tmp_path: Path) -> None:
    before = watches()
    model, _ = zeroshard.shard(make_net(), stage=3)
    assert not watches() - before
    zeroshard.unwrap(model)
