"""Saving and loading beside a raw write of the same bytes and torch.distributed.checkpoint with FSDP2.

    python -m benchmarks checkpoint                                  # 2 ranks on the CPU, or one on a GPU
    python -m benchmarks checkpoint --layers 24 --width 1024 --heads 16 --batch 8

All in one run, interleaved, in the same processes: the same GPT under fp32 Adam, sharded by both libraries; each save
is synced to disk, each load begins with its files out of the page cache. *Pause* is how long training stands still for
a save that is written beside it: the call, and the wait of the next step for the copy of the states. The step itself,
with the write beside it, is given too.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
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
import torch.multiprocessing as mp
from torch import nn

import zeroshard
from benchmarks.rank import fsdp2_gpt, zeroshard_gpt
from benchmarks.record import Record, described, machine
from benchmarks.table import ratio
from zeroshard.checkpoint.async_save import Snapshot
from zeroshard.models import GPTConfig

Times = dict[str, list[float]]
VARIANTS = ("raw", "zeroshard", "fsdp2")


class Bench:
    """One rank: two models, a directory, and a clock that all ranks share."""

    def __init__(self, options: argparse.Namespace, device: torch.device, directory: Path) -> None:
        self.options, self.device, self.directory = options, device, directory
        config = GPTConfig(
            vocab_size=options.vocabulary,
            context=options.context,
            layers=options.layers,
            heads=options.heads,
            width=options.width,
            checkpoint=True,
        )
        self.tokens = torch.randint(config.vocab_size, (options.batch, config.context), device=device)
        mesh = dist.device_mesh.init_device_mesh(device.type, (dist.get_world_size(),))
        self.ours = zeroshard_gpt(config, mesh, stage=3, precision="fp32")
        self.theirs = fsdp2_gpt(config, mesh, mixed=False)
        for model, optimizer in (self.ours, self.theirs):
            self.step(model, optimizer)
        self.group = dist.new_group(backend="gloo")
        model, optimizer = self.theirs
        moments = [
            value for state in optimizer.state.values() for value in state.values() if hasattr(value, "to_local")
        ]
        self.shards = [tensor.to_local() for tensor in (*model.parameters(), *moments)]
        self.nbytes = sum(tensor.nbytes for tensor in self.shards)
        self.times: Times = {}

    # -- what is measured ---------------------------------------------------------------------------------------

    def clock(self, name: str, act: Callable[[], Any]) -> Any:
        """Time something from when all ranks begin to when the last has ended."""
        self.wait()
        start = time.perf_counter()
        value = act()
        self.wait()
        self.times.setdefault(name, []).append(time.perf_counter() - start)
        return value

    def wait(self) -> None:
        """Wait for the device, then for all ranks."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()

    def step(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """One step."""
        model(self.tokens, self.tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    def raw(self) -> None:
        """Write as many bytes as this rank holds, and read them."""
        data = torch.empty(self.nbytes, dtype=torch.uint8).random_().numpy()
        path = self.directory / f"raw-{dist.get_rank()}"

        def write() -> None:
            with open(path, "wb", buffering=0) as file:
                view = memoryview(data)
                while view:
                    view = view[file.write(view[: 2**24]) :]
                os.fsync(file.fileno())

        def read() -> None:
            with open(path, "rb", buffering=0) as file:
                buffer = memoryview(data)
                while count := file.readinto(buffer[: 2**24]):
                    buffer = buffer[count:]

        self.clock("raw save", write)
        self.forget()
        self.clock("raw load", read)
        self.clean()

    def zeroshard(self) -> None:
        """Save and load with zeroshard."""
        model, optimizer = self.ours
        self.clock("zeroshard save", lambda: zeroshard.save(self.directory / "z", model, optimizer))
        self.forget()
        self.clock("zeroshard load", lambda: zeroshard.load(self.directory / "z", model, optimizer))
        self.clean()
        self.beside("zeroshard", lambda: zeroshard.save(self.directory / "z", model, optimizer, wait=False).wait)
        self.clean()

    def fsdp2(self) -> None:
        """Save and load FSDP2's states with torch.distributed.checkpoint."""
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

        model, optimizer = self.theirs
        path = self.directory / "f"

        def states() -> dict[str, Any]:
            weights, moments = get_state_dict(model, optimizer)
            return {"model": weights, "optimizer": moments}

        def load() -> None:
            held = states()
            dcp.load(held, checkpoint_id=path)
            set_state_dict(model, optimizer, model_state_dict=held["model"], optim_state_dict=held["optimizer"])

        self.clock("fsdp2 save", lambda: dcp.save(states(), checkpoint_id=path))
        self.forget()
        self.clock("fsdp2 load", load)
        self.clean()
        # on the default group its collectives and training's would wait for each other for ever
        save = partial(dcp.async_save, checkpoint_id=path, process_group=self.group)
        self.beside("fsdp2", lambda: save(states()).result)
        self.clean()

    def beside(self, name: str, begin: Callable[[], Callable[[], Any]]) -> None:
        """Time a save that is written beside training, the step beside it, and a step alone."""
        model, optimizer = self.ours if name == "zeroshard" else self.theirs
        self.clock(f"{name} step", lambda: self.step(model, optimizer))
        self.wait()
        waited, settle = [0.0], Snapshot.wait_for_copies

        def timed(snapshot: Snapshot) -> None:
            start = time.perf_counter()
            settle(snapshot)
            waited[0] += time.perf_counter() - start

        with unittest.mock.patch.object(Snapshot, "wait_for_copies", timed):
            start = time.perf_counter()
            finish = begin()
            call = time.perf_counter() - start
            self.clock(f"{name} step beside", lambda: self.step(model, optimizer))
        self.times.setdefault(f"{name} pause", []).append(call + waited[0])
        finish()

    def host_copy(self) -> None:
        """Copy the shards to host memory that has been used before, tensor by tensor."""
        copies = [torch.empty_like(tensor, device="cpu").fill_(0) for tensor in self.shards]

        def copy() -> None:
            for to, tensor in zip(copies, self.shards, strict=True):
                to.copy_(tensor)

        self.clock("host copy", copy)

    # -- files --------------------------------------------------------------------------------------------------

    def forget(self) -> None:
        """Have the files out of the page cache, so that a load reads the disk."""
        self.wait()
        if dist.get_rank() == 0:
            os.sync()
            for path in self.directory.rglob("*"):
                if path.is_file():
                    descriptor = os.open(path, os.O_RDONLY)
                    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                    os.close(descriptor)
        self.wait()

    def clean(self) -> None:
        """Remove everything, and let the disk come to rest."""
        self.wait()
        if dist.get_rank() == 0:
            for path in self.directory.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            os.sync()
        self.wait()


def run(rank: int, options: argparse.Namespace, port: int, directory: str, results: Any) -> None:
    """Be one rank."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    on_gpu = options.device == "cuda"
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // options.ranks))
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", rank=rank, world_size=options.ranks)
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    bench = Bench(options, device, Path(directory))
    for _ in range(options.repeats):
        for act in (bench.raw, bench.zeroshard, bench.fsdp2, bench.host_copy):
            act()
    if rank == 0:
        results.put((bench.nbytes * options.ranks, bench.times))
    dist.destroy_process_group()


def show(nbytes: int, times: Times, record: Record) -> None:
    """Print tables: saving and loading, and saving beside training."""
    middle = {name: statistics.median(found) for name, found in times.items()}
    spread = {name: max(found) - min(found) for name, found in times.items()}
    table = []
    for variant in VARIANTS:
        row: list[object] = [variant]
        for kind in ("save", "load"):
            seconds = middle[f"{variant} {kind}"]
            row += [seconds, spread[f"{variant} {kind}"], nbytes / seconds / 1e9]
            row.append(ratio(seconds, middle[f"raw {kind}"]))
        table.append(row)
    saves = ("save s", "spread of saves s", "saved GB/s", "of the raw write")
    loads = ("load s", "spread of loads s", "loaded GB/s", "of the raw read")
    record.show("saving", ("", *saves, *loads), table)
    copy = 1e3 * middle["host copy"]
    table = [["host copy", copy, 1e3 * spread["host copy"], None, None, None, None]]
    for variant in VARIANTS[1:]:
        pause, step, beside = (1e3 * middle[f"{variant} {what}"] for what in ("pause", "step", "step beside"))
        first, apart = 1e3 * times[f"{variant} pause"][0], 1e3 * spread[f"{variant} pause"]
        table.append([variant, pause, apart, ratio(pause, copy), first, step, beside])
    print("\nSaving beside training; the host copy is of the shards of one rank")
    heads = ("", "pause ms", "spread", "of a host copy", "first pause ms", "a step ms", "a step beside it ms")
    record.show("beside", heads, table)


def main(argv: Sequence[str] | None = None) -> None:
    """Run everything and print tables."""
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if on_gpu else "cpu")
    parser.add_argument("--ranks", type=int, default=1 if on_gpu else 2)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--vocabulary", type=int, default=50304)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--directory", type=Path, help="where to write; a temporary directory by default")
    parser.add_argument("--out", type=Path, help="write all results as JSON")
    options = parser.parse_args(argv)
    record = Record("checkpoint", options.device, options.out)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    results = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        mp.spawn(run, (options, port, directory, results), nprocs=options.ranks)
    nbytes, times = results.get()
    given = {name: value for name, value in vars(options).items() if name not in ("directory", "out")}
    record.add({**given, "bytes": nbytes, "seconds": times})
    print(f"{options.ranks} ranks, {nbytes / 1e9:.2f} GB in all, {described(machine(options.device))}")
    show(nbytes, times, record)
