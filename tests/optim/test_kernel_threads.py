"""Native updates that are begun one after the other: the same bits, in whatever order and by whomever they end."""

from __future__ import annotations

import subprocess
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from offloaded import Case, assert_same, everything, train
from plain import ONE_BATCH, token_step

from zeroshard.optim.cpu import build, kernels
from zeroshard.optim.cpu.apply import ChunkUpdater, UpdateSpec
from zeroshard.optim.cpu.kernels import CpuKernels, KernelHandle, KernelThreads
from zeroshard.optim.cpu.updates import CpuUpdates
from zeroshard.optim.cpu.worker import UpdateJob
from zeroshard.optim.hyperparams import AdamHyperparams, SGDHyperparams

ADAM = AdamHyperparams(lr=0.1, weight_decay=0.1)
LENGTHS = (1, 0, 70_001, 8192, 8191, 300_000, 1, 40_003, 9000, 0)  # less than a thread is worth, one, several chunks
MANY = 300  # updates in line: the last is not begun, let alone over, when it has just been put there


class Update:
    """One Adam update with its old values and the expected result."""

    def __init__(self, kernels: CpuKernels, numel: int, seed: int = 0) -> None:
        chance = torch.Generator().manual_seed(seed)
        self._kernels = kernels
        self._old = tuple(torch.rand(numel, generator=chance) for _ in range(3))
        self._gradient = torch.randn(numel, generator=chance).bfloat16()
        self.wanted, self.made = self._outputs(numel), self._outputs(numel)
        self._run(self.wanted)

    def _outputs(self, numel: int) -> list[torch.Tensor]:
        return [*(torch.full((numel,), 7.0) for _ in range(3)), torch.full((numel,), 7.0).bfloat16()]

    def _run(self, new: list[torch.Tensor], **chosen: Any) -> KernelHandle:
        out = new[0], new[1], new[2]
        return self._kernels.adam(*self._old, self._gradient, ADAM, out=out, step=3, copy=new[3], **chosen)

    def begin(self, pool: KernelThreads, threads: int) -> KernelHandle:
        return self._run(self.made, kernel_threads=pool, threads=threads)

    @property
    def over(self) -> bool:
        return all(torch.equal(made, wanted) for made, wanted in zip(self.made, self.wanted, strict=True))


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("threads", [1, 2, 5, 1000])
def test_updates_that_are_begun_before_others_end_give_the_same_bits(
    native_kernels: CpuKernels, threads: int, backwards: bool
) -> None:
    updates = [Update(native_kernels, numel, seed) for seed, numel in enumerate(LENGTHS)]
    pool = native_kernels.make_threads()
    begun = [update.begin(pool, threads) for update in updates]
    for number in range(len(begun))[:: -1 if backwards else 1]:
        begun[number].wait()
        begun[number].wait()  # nothing more happens
        assert updates[number].over


def test_sgd_is_begun_too(native_kernels: CpuKernels) -> None:
    parameter, gradient = torch.randn(100_000), torch.randn(100_000)
    wanted, new = torch.empty(100_000), torch.empty(100_000)
    native_kernels.sgd(parameter, None, gradient, SGDHyperparams(lr=0.1), out=(wanted, None))
    begun = native_kernels.sgd(
        parameter,
        None,
        gradient,
        SGDHyperparams(lr=0.1),
        out=(new, None),
        threads=2,
        kernel_threads=native_kernels.make_threads(),
    )
    begun.wait()
    assert torch.equal(new, wanted)


@pytest.mark.parametrize("shared", [False, True])
def test_several_threads_may_begin_and_end(native_kernels: CpuKernels, shared: bool) -> None:
    common, together = native_kernels.make_threads(), threading.Barrier(4)

    def one(rank: int) -> bool:
        pool = common if shared else native_kernels.make_threads()
        together.wait()
        for turn in range(5):
            updates = [Update(native_kernels, numel, rank + 4 * turn) for numel in LENGTHS]
            before: tuple[KernelHandle, Update] | None = None
            for update in updates:
                begun = update.begin(pool, 1 + rank)
                if before is not None:
                    before[0].wait()
                    if not before[1].over:
                        return False
                before = begun, update
        return True

    with ThreadPoolExecutor(4) as ranks:
        assert all(ranks.map(one, range(4)))


def in_line(kernels: CpuKernels) -> tuple[KernelThreads, list[KernelHandle]]:
    """Return kernel threads that are busy for a while, and the handles of their updates."""
    line, pool = torch.zeros(1_000_000), kernels.make_threads()
    return pool, [
        kernels.sgd(line, None, line, SGDHyperparams(lr=0.0), out=(line, None), kernel_threads=pool)
        for _ in range(MANY)
    ]


def test_one_that_is_dropped_is_ended(native_kernels: CpuKernels) -> None:
    update = Update(native_kernels, 70_001)
    pool, others = in_line(native_kernels)
    begun = update.begin(pool, 1)
    del pool, begun
    assert update.over
    del others


def test_tensors_stay_until_the_end(native_kernels: CpuKernels) -> None:
    pool, _others = in_line(native_kernels)
    old, gradient = tuple(torch.zeros(9000) for _ in range(3)), torch.zeros(9000)
    begun = native_kernels.adam(*old, gradient, ADAM, out=old, step=1, copy=torch.zeros(9000), kernel_threads=pool)
    told = [weakref.ref(tensor) for tensor in (*old, gradient)]
    del old, gradient
    assert all(reference() is not None for reference in told)
    begun.wait()
    assert all(reference() is None for reference in told)


@pytest.mark.parametrize(
    ("there", "instead"),
    [
        ("while (threads && !pthread_create(", "while (0 && !pthread_create("),
        ("while (threads && !pthread_create(", "while (threads > 2 && !pthread_create("),
        ("malloc(sizeof *call)", "NULL"),
    ],
    ids=["no thread", "few threads", "no memory"],
)
def test_what_cannot_be_started_is_done_all_the_same(
    native_kernels: CpuKernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: str, instead: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = kernels.KERNELS_SOURCE.read_text()
    assert source.count(there) == 1
    (tmp_path / "kernels.c").write_text(source.replace(there, instead))
    poor = CpuKernels(build.load_library(tmp_path / "kernels.c"))
    updates, pool = [Update(native_kernels, numel, seed) for seed, numel in enumerate(LENGTHS)], poor.make_threads()
    for update in updates:
        update._kernels = poor
    begun = [update.begin(pool, 4) for update in updates]
    begun[-2].wait()
    for running in begun:
        running.wait()
    assert all(update.over for update in updates)


def test_a_crew_wants_memory(native_kernels: CpuKernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "kernels.c").write_text(kernels.KERNELS_SOURCE.read_text().replace("malloc(sizeof *pool)", "NULL"))
    with pytest.raises(MemoryError, match="no memory for the threads"):
        CpuKernels(build.load_library(tmp_path / "kernels.c")).make_threads()


FORK = """
import os, sys, torch
sys.path[:0] = sys.argv[1:]
from test_kernel_threads import in_line
from zeroshard.optim.cpu.kernels import load_kernels
pool, begun = in_line(load_kernels())
child = os.fork()
if not child:
    begun[-1].wait()
    del begun, pool  # none of them may wait for threads that are not here
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_fork_does_not_wait_for_what_is_not_there(native_kernels: CpuKernels) -> None:
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-c",
        FORK,
        *(str(Path(__file__).parents[1] / name) for name in ("optim", "harness")),
    ]
    assert subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.split() == ["7"]


# ------------------------------------------------------------------------------------------------ in training


class Record:
    """Records which kernels of a run start and end, and with which kernel threads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lines: list[tuple[str, int]] = []
        self.kernel_threads: list[Any] = []
        apply, record = UpdateSpec.apply, self

        class Noted:
            def __init__(self, inner: KernelHandle) -> None:
                self._inner, self._number = inner, len(record.kernel_threads)
                record.lines.append(("begin", self._number))

            def wait(self) -> None:
                self._inner.wait()
                record.lines.append(("end", self._number))

        def noted(spec: UpdateSpec, *arguments: Any) -> Noted:
            found = Noted(apply(spec, *arguments))
            self.kernel_threads.append(arguments[7])
            return found

        monkeypatch.setattr(UpdateSpec, "apply", noted)


def stepped(offload: dict[str, Any]) -> Any:
    """One step whose updates all are there before the first begins; what came of it."""
    model, optimizer = Case(net="wide", options={"stage": 2}).make(offload)
    token_step(model, ONE_BATCH)
    gate = threading.Event()
    optimizer._cpu_updates._worker.submit(UpdateJob((-1, 0), [], lambda: gate.wait(10)))
    optimizer.step()
    gate.set()
    return everything(model, optimizer)


def test_a_kernel_runs_while_the_next_is_started(native_kernels: CpuKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    record = Record(monkeypatch)
    stepped({"optimizer": "host", "speculate": False})
    last = len(record.kernel_threads) - 1
    assert last > 1 and None not in record.kernel_threads
    pairs = [line for number in range(1, last + 1) for line in (("begin", number), ("end", number - 1))]
    assert record.lines == [("begin", 0), *pairs, ("end", last)]


def test_chunks_on_disk_are_updated_one_at_a_time(
    native_kernels: CpuKernels, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    record = Record(monkeypatch)
    stepped({"optimizer": "disk", "directory": tmp_path})
    assert len(record.kernel_threads) > 1 and set(record.kernel_threads) == {None}
    assert record.lines == [(what, number) for number in range(len(record.kernel_threads)) for what in ("begin", "end")]


def test_running_kernels_are_finished_if_the_next_cannot_start(
    native_kernels: CpuKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk has several slices, and only the first update starts."""
    record = Record(monkeypatch)
    noted = UpdateSpec.apply

    def second_fails(spec: UpdateSpec, *arguments: Any) -> Any:
        if record.kernel_threads:
            raise MemoryError("no room")
        return noted(spec, *arguments)

    monkeypatch.setattr(UpdateSpec, "apply", second_fails)
    case = Case(groups=True, options={"stage": 2})
    model, optimizer = case.make({"optimizer": "host", "speculate": False})
    assert any(len(chunk.slices) > 1 for chunk in optimizer._cpu_updates._chunk_by_segment.values())
    token_step(model, ONE_BATCH)
    optimizer.step()
    with pytest.raises(RuntimeError, match="MemoryError: no room"):
        optimizer.step()
    assert record.lines == [("begin", 0), ("end", 0)]


@pytest.mark.parametrize("groups", [False, True])
def test_speculative_updates_that_are_discarded_and_repeated_change_no_bit(
    native_kernels: CpuKernels, monkeypatch: pytest.MonkeyPatch, groups: bool
) -> None:
    """The next backward finds updates of the previous one in the queue: of the same chunks, and invalid."""
    case = Case(net="wide", groups=groups, steps=9, accumulate=(1, 1, 1, 1, 3, 1, 2, 1, 1), options={"stage": 2})
    begun = threading.Event()
    ahead, landed = ChunkUpdater.speculate, CpuUpdates.on_shard_ready

    def noted(*arguments: Any) -> Any:
        begun.set()
        return ahead(*arguments)

    def awaited(updates: CpuUpdates, flat: Any) -> None:
        """Let the worker begin with the first before the step can drop them all."""
        landed(updates, flat)
        if updates._speculator.pending:
            assert begun.wait(60)

    monkeypatch.setattr(ChunkUpdater, "speculate", noted)
    monkeypatch.setattr(CpuUpdates, "on_shard_ready", awaited)
    ours = train(0, 1, case, {"optimizer": "host", "threads": 2})
    assert begun.is_set()
    assert_same(ours, train(0, 1, case))
