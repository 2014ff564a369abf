"""Saving and loading, compared with a raw write of the same bytes and torch.distributed.checkpoint with FSDP2.

    python -m benchmarks checkpoint                                  # 2 ranks on the CPU, or one on a GPU
    python -m benchmarks checkpoint --layers 24 --width 1024 --heads 16 --batch 8
    python -m benchmarks checkpoint --tiny --device cpu

All in one run, interleaved, in the same processes: the same GPT under fp32 Adam, sharded by both libraries. Each save
is synced to disk, each load starts with its files out of the page cache. *Pause* is how long training stops for a save
that is written in the background: the call, and the wait of the next step for the copy of the states.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
import unittest.mock
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import zeroshard
from benchmarks.harness.ranks import run_ranks
from benchmarks.harness.record import Record, Result, describe, ratio
from benchmarks.harness.trials import make_parser
from benchmarks.harness.variants import Job, Loop, fsdp2, ours
from benchmarks.harness.workloads import Workload
from zeroshard.checkpoint.async_save import Snapshot

Times = dict[str, list[float]]
VARIANTS = ("raw", "zeroshard", "fsdp2")
SHAPE = {"layers": 12, "width": 768, "heads": 12, "vocabulary": 50304, "context": 1024, "batch": 1}  # by default
TINY = {"layers": 2, "width": 64, "heads": 4, "vocabulary": 64, "context": 16}
CHUNK_BYTES = 2**24


class Rank:
    """One rank: two models, a directory, and times that all ranks share."""

    def __init__(self, work: Workload, device: str, directory: Path) -> None:
        self.device, self.directory = device, directory
        job = Job(work, device, dist.device_mesh.init_device_mesh(device, (dist.get_world_size(),)))
        self.ours: Loop = ours(job, precision="fp32", defragment=False)
        self.theirs: Loop = fsdp2(job, is_mixed=False)
        self.ours.step()
        self.theirs.step()
        self.group = dist.new_group(backend="gloo")
        states = self.theirs.optimizer.state.values()
        moments = [value for state in states for value in state.values() if hasattr(value, "to_local")]
        self.shards = [tensor.to_local() for tensor in (*self.theirs.model.parameters(), *moments)]
        self.nbytes = sum(tensor.nbytes for tensor in self.shards)
        self.times: Times = {}

    def time(self, name: str, act: Callable[[], Any]) -> None:
        """Time something from when all ranks begin until the last has ended."""
        self.wait()
        start = time.perf_counter()
        act()
        self.wait()
        self.times.setdefault(name, []).append(time.perf_counter() - start)

    def wait(self) -> None:
        """Wait for the device, then for all ranks."""
        if self.device == "cuda":
            torch.cuda.synchronize()
        dist.barrier()

    def measure_raw(self) -> None:
        """Write as many bytes as this rank holds, and read them."""
        data = memoryview(torch.empty(self.nbytes, dtype=torch.uint8).random_().numpy())
        path = self.directory / f"raw-{dist.get_rank()}"

        def write() -> None:
            with open(path, "wb", buffering=0) as file:
                view = data
                while view:
                    view = view[file.write(view[:CHUNK_BYTES]) :]
                os.fsync(file.fileno())

        def read() -> None:
            with open(path, "rb", buffering=0) as file:
                view = data
                while count := file.readinto(view[:CHUNK_BYTES]):
                    view = view[count:]

        self.measure_files("raw", write, read)

    def measure_zeroshard(self) -> None:
        """Save and load with zeroshard."""
        path, model, optimizer = self.directory / "z", self.ours.model, self.ours.optimizer
        save = partial(zeroshard.save, path, model, optimizer)
        self.measure_files("zeroshard", save, lambda: zeroshard.load(path, model, optimizer))
        self.measure_pause("zeroshard", self.ours, lambda: save(wait=False).wait)

    def measure_fsdp2(self) -> None:
        """Save and load FSDP2's states with torch.distributed.checkpoint."""
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

        path, model, optimizer = self.directory / "f", self.theirs.model, self.theirs.optimizer

        def states() -> dict[str, Any]:
            weights, moments = get_state_dict(model, optimizer)
            return {"model": weights, "optimizer": moments}

        def load() -> None:
            held = states()
            dcp.load(held, checkpoint_id=path)
            set_state_dict(model, optimizer, model_state_dict=held["model"], optim_state_dict=held["optimizer"])

        self.measure_files("fsdp2", lambda: dcp.save(states(), checkpoint_id=path), load)
        # on the default group its collectives and those of training would deadlock
        save = partial(dcp.async_save, checkpoint_id=path, process_group=self.group)
        self.measure_pause("fsdp2", self.theirs, lambda: save(states()).result)

    def measure_copy(self) -> None:
        """Copy the shards to host memory that has been used before, tensor by tensor."""
        copies = [torch.empty_like(tensor, device="cpu").fill_(0) for tensor in self.shards]
        pairs = list(zip(copies, self.shards, strict=True))
        self.time("host copy", lambda: [copy.copy_(tensor) for copy, tensor in pairs])

    def measure_files(self, name: str, save: Callable[[], Any], load: Callable[[], Any]) -> None:
        """Time a save, and a load that reads the disk and not the page cache."""
        self.time(f"{name} save", save)
        self.wait()
        if dist.get_rank() == 0:
            os.sync()
            for path in self.directory.rglob("*"):
                if path.is_file():
                    descriptor = os.open(path, os.O_RDONLY)
                    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                    os.close(descriptor)
        self.time(f"{name} load", load)
        self.clean()

    def measure_pause(self, name: str, training: Loop, begin: Callable[[], Callable[[], Any]]) -> None:
        """Time a save that is written in the background, the step during it, and a step alone."""
        self.time(f"{name} step", training.step)
        self.wait()
        waited, wait_for_copies = [0.0], Snapshot.wait_for_copies

        def timed(snapshot: Snapshot) -> None:
            start = time.perf_counter()
            wait_for_copies(snapshot)
            waited[0] += time.perf_counter() - start

        with unittest.mock.patch.object(Snapshot, "wait_for_copies", timed):
            start = time.perf_counter()
            finish = begin()
            call = time.perf_counter() - start
            self.time(f"{name} step beside", training.step)
        self.times.setdefault(f"{name} pause", []).append(call + waited[0])
        finish()
        self.clean()

    def clean(self) -> None:
        """Remove all files, and wait until the disk is idle."""
        self.wait()
        if dist.get_rank() == 0:
            for path in self.directory.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            os.sync()
        self.wait()


def measure_rank(shape: dict[str, Any], device: str, repeats: int, directory: str) -> Result:
    """Be one rank."""
    if device == "cuda":
        torch.cuda.set_device(0)
    rank = Rank(Workload(**shape), device, Path(directory))
    for _ in range(repeats):
        for act in (rank.measure_raw, rank.measure_zeroshard, rank.measure_fsdp2, rank.measure_copy):
            act()
    return {"bytes": rank.nbytes * dist.get_world_size(), "seconds": rank.times}


def show(nbytes: int, times: Times, record: Record) -> None:
    """Print tables: saving and loading, and saving during training."""
    median = {name: statistics.median(found) for name, found in times.items()}
    spread = {name: max(found) - min(found) for name, found in times.items()}
    table = []
    for variant in VARIANTS:
        row: list[object] = [variant]
        for kind in ("save", "load"):
            seconds = median[f"{variant} {kind}"]
            row += [seconds, spread[f"{variant} {kind}"], nbytes / seconds / 1e9]
            row.append(ratio(seconds, median[f"raw {kind}"]))
        table.append(row)
    saves = ("save s", "spread of saves s", "saved GB/s", "of the raw write")
    loads = ("load s", "spread of loads s", "loaded GB/s", "of the raw read")
    record.show("saving", ("", *saves, *loads), table)
    copy = 1e3 * median["host copy"]
    table = [["host copy", copy, 1e3 * spread["host copy"], None, None, None, None]]
    for variant in VARIANTS[1:]:
        pause, step, beside = (1e3 * median[f"{variant} {what}"] for what in ("pause", "step", "step beside"))
        first, apart = 1e3 * times[f"{variant} pause"][0], 1e3 * spread[f"{variant} pause"]
        table.append([variant, pause, apart, ratio(pause, copy), first, step, beside])
    print("\nSaving during training; the host copy is of the shards of one rank")
    heads = ("", "pause ms", "spread", "of a host copy", "first pause ms", "a step ms", "a step beside it ms")
    record.show("beside", heads, table)


def main(argv: Sequence[str] | None = None) -> None:
    """Run everything and print tables."""
    parser = make_parser(__doc__, **SHAPE, repeats=3)
    parser.add_argument("--ranks", type=int, help="(default: 1 on a GPU, 2 on a CPU)")
    parser.add_argument("--directory", type=Path, help="where to write (default: a temporary directory)")
    chosen = parser.parse_args(argv)
    count = chosen.ranks or (1 if chosen.device == "cuda" else 2)
    shape = {name: getattr(chosen, name) for name in SHAPE} | (TINY if chosen.tiny else {})
    shape = {"place": "alone", "sequence": shape.pop("context"), **shape}
    record = Record("checkpoint", chosen.device, chosen.out)
    fixed = {"shape": shape, "device": chosen.device, "repeats": chosen.repeats}
    backend = "cpu:gloo,cuda:nccl" if chosen.device == "cuda" else "gloo"
    with tempfile.TemporaryDirectory(dir=chosen.directory) as directory:
        found = run_ranks(measure_rank, count, backend, directory=directory, **fixed)
    record.add({**fixed, "ranks": count, **found})
    print(f"{count} ranks, {found['bytes'] / 1e9:.2f} GB in all, {describe(record.machine)}")
    show(found["bytes"], found["seconds"], record)
