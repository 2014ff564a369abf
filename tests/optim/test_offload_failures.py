"""States outside the device: failing devices, interrupted waits, reads that fail, forks, and dtypes that few use."""

from __future__ import annotations

import re
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from offloaded import Case, assert_same, everything
from plain import adamw, batches, net_loss, of, sharded, take_step, train_step

import zeroshard
from zeroshard.memory.disk.disk import Disk, Transfer
from zeroshard.memory.disk.file import DiskError
from zeroshard.memory.host_memory import MIN_MMAP_BYTES, host_zeros
from zeroshard.memory.tier_allocator import ParamPrefetcher
from zeroshard.memory.tracker import MemoryTracker
from zeroshard.optim.cpu.worker import UpdateJob, UpdateWorker


class Broken:
    """A moment of a device that has failed; before, it is awaited once."""

    def __init__(self) -> None:
        self.failed = False

    def query(self) -> bool:
        if self.failed:
            raise RuntimeError("an illegal memory access was encountered")
        return False

    def synchronize(self) -> None:
        self.failed = True
        self.query()


def test_a_device_that_fails_fails_its_job_and_does_not_end_the_worker() -> None:
    worker = UpdateWorker()
    moment: Any = Broken()
    with pytest.raises(RuntimeError, match="illegal memory access"):
        worker.submit(UpdateJob((0, 0), [moment], lambda: None)).result(10)
    assert worker.submit(UpdateJob((0, 0), [], lambda: 7)).result(10) == 7


@pytest.mark.parametrize("where", ["step", "forward"])
def test_an_interrupted_wait_harms_nothing(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The key that is pressed while the loop waits for the host is the user's, and no failure of the update."""

    def run(offload: Any) -> Any:
        model, optimizer = Case(optimizer="Adam", options={"stage": 2}).make(offload)
        for number, batch in enumerate(batches(3)):
            if number and offload is not None:
                interrupt(partial(net_loss, model, batch) if where == "forward" else optimizer._cpu_updates.wait)
            train_step(model, optimizer, batch)
        return everything(model, optimizer)

    def interrupt(waits: Any) -> None:
        def pressed(future: Any, timeout: float | None = None) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(Future, "exception", pressed)
            patch.setattr(Future, "result", pressed)
            waits()

    assert_same(run({"optimizer": "host", "speculate": False}), run(None))


class Failing:
    """A disk whose reads fail until it is mended."""

    def __init__(self, disk: Disk) -> None:
        self.disk, self.mended = disk, False

    def start_read(self, shard: torch.Tensor, into: torch.Tensor) -> Transfer:
        if self.mended:
            return self.disk.start_read(shard, into)
        transfer = Transfer(requests=1)
        transfer.finish_request(DiskError("the device lost it"))
        return transfer


@pytest.mark.parametrize("wanted", [True, False], ids=["taken", "only fetched"])
def test_what_could_not_be_read_is_read_again_and_never_taken_for_values(wanted: bool, tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    shards = [disk.zeros(3, torch.float32).fill_(7) for _ in range(2)]
    failing: Any = Failing(disk)
    reader = ParamPrefetcher(failing, torch.device("cpu"), shards[0].nbytes, MemoryTracker())
    for shard in shards:
        reader.prefetch(shard)
    for _ in range(2 if wanted else 0):
        with pytest.raises(DiskError, match="the device lost it"):
            reader.acquire(shards[0])
    reader.discard()
    failing.mended = True
    for shard in shards:
        assert reader.acquire(shard).tolist() == [7, 7, 7]
        reader.release(shard)


def test_memory_of_the_host_tier_is_not_copied_for_forked_processes() -> None:
    memory = host_zeros(MIN_MMAP_BYTES)
    start, end = memory.data_ptr(), memory.data_ptr() + memory.nbytes
    for area in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text()):
        first, last = (int(bound, 16) for bound in area.split(" ")[0].split("-"))
        if first <= start and end <= last:
            flags = re.search(r"VmFlags:(.*)", area)
            assert flags is not None and "dc" in flags[1].split()  # "do not copy area on fork"
            return
    raise AssertionError("the memory is in no area")


def test_a_limit_counts_states_in_the_dtype_they_have() -> None:
    with torch.no_grad():
        model = torch.nn.Linear(64, 64).double()

    optimizer: Any = torch.optim.Adam(model.parameters())
    limit = 60_000  # bytes: of 4160 parameters with master and two moments of 8 bytes, and a gradient, about half
    model, optimizer = zeroshard.shard(model, optimizer, stage=2, offload={"optimizer": "host", "host_bytes": limit})
    for _ in range(2):  # a step counts what is there, and the states of the first are made after it
        model(torch.ones(1, 64).double()).sum().backward()
        optimizer.step()
    held = zeroshard.report(model).memory
    assert 0 < sum(nbytes.peak for (_, tier), nbytes in held.items() if tier == "host") <= limit


def test_complex_numbers_rest_on_the_host_too() -> None:

    def run(offload: Any) -> Any:
        torch.manual_seed(0)
        model, optimizer = sharded(
            torch.nn.Linear(4, 3, dtype=torch.complex64), of(torch.optim.Adam), stage=2, offload=offload
        )
        norms = []
        for _ in range(3):
            model(torch.ones(2, 4, dtype=torch.complex64)).abs().sum().backward()
            norms.append(optimizer.clip_grad_norm_(0.5).item())
            optimizer.step()
            optimizer.zero_grad()
        return {"norms": norms, **everything(model, optimizer)}

    assert_same(run("host"), run(None))


def test_a_learning_rate_that_is_a_tensor_gives_the_same_bits() -> None:

    def run(offload: Any) -> Any:
        torch.manual_seed(0)
        model, optimizer = sharded(
            torch.nn.Linear(32, 32), partial(adamw, lr=torch.tensor(0.01)), stage=2, offload=offload
        )
        for _ in range(4):
            take_step(optimizer, model(torch.randn(2, 32)).square().sum())
        return everything(model, optimizer)

    assert_same(run("host"), run(None))


def test_without_memory_for_the_buffers_nothing_goes_to_disk(tmp_path: Path) -> None:
    model: Any = torch.nn.Linear(64, 64)
    adam = torch.optim.Adam(model.parameters())
    rests = {"optimizer": "disk", "parameters": "disk", "directory": tmp_path, "host_bytes": 1000}
    model, optimizer = zeroshard.shard(model, adam, stage=3, offload=rests)
    model(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    held = zeroshard.report(model).memory
    assert sum(nbytes.peak for (_, tier), nbytes in held.items() if tier != "device") <= 1000
