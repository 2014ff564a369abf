"""The file of the disk tier: two ways to its bytes, its space, its failures, and how it ends."""

import contextlib
import errno
import fcntl
import gc
import os
import signal
import stat
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from torch import nn

import zeroshard
import zeroshard.memory.disk.disk
from zeroshard.memory.disk.disk import Disk, Transfer, aligned_buffer
from zeroshard.memory.disk.file import DiskError, OffloadFile
from zeroshard.sharding.tier_placement import PAGE_BYTES
from zeroshard.utils.free_list import FreeList

MEMORY = Path("/dev/shm")
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.uint8, torch.bool, torch.int16]
SIZES = [1, 7, PAGE_BYTES - 1, PAGE_BYTES, PAGE_BYTES + 1, 50_001]


@pytest.fixture(params=["disk", "memory"])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A directory on a file system with pages on a device, and one of a file system that is all page cache."""
    if request.param == "memory" and not MEMORY.is_dir():
        pytest.skip("there is no /dev/shm")
    return MEMORY if request.param == "memory" else tmp_path


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transfers of many pieces without many bytes."""
    monkeypatch.setattr(zeroshard.memory.disk.disk, "IO_REQUEST_BYTES", 3 * PAGE_BYTES)


def values_of(numel: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return torch.randn(numel, generator=generator).to(dtype)
    return torch.randint(0, 2, (numel,), generator=generator).to(dtype)


def filled(values: torch.Tensor) -> torch.Tensor:
    """A buffer that begins with these values."""
    near = aligned_buffer(values.nbytes)
    near.view(values.dtype)[: values.numel()] = values
    return near


def fetched(disk: Disk, tensor: torch.Tensor) -> torch.Tensor:
    """What a transfer reads of a tensor."""
    near = aligned_buffer(tensor.nbytes).fill_(255)
    disk.start_read(tensor, near).wait()
    return near[: tensor.nbytes].view(tensor.dtype)


def movers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("zeroshard-disk")]


def soon(true: Callable[[], bool]) -> bool:
    """Whether something becomes true; a thread may need a moment."""
    until = time.monotonic() + 20
    while not true() and time.monotonic() < until:
        time.sleep(0.005)
    return true()


# ------------------------------------------------------------------------------------------------ two ways


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_map_and_transfers_show_each_other_every_size_and_dtype(directory: Path, dtype: torch.dtype) -> None:
    disk = Disk(directory)
    tensors = [disk.zeros(numel, dtype) for numel in SIZES]
    for seed, tensor in enumerate(tensors):
        assert tensor.shape == (SIZES[seed],) and tensor.dtype == dtype and tensor.data_ptr() % PAGE_BYTES == 0
        assert not tensor.any() and not fetched(disk, tensor).any()
        tensor.copy_(values_of(tensor.numel(), dtype, seed))
    for seed, tensor in enumerate(tensors):
        assert torch.equal(fetched(disk, tensor), values_of(tensor.numel(), dtype, seed))
        disk.start_write(filled(values_of(tensor.numel(), dtype, seed + 100)), tensor).wait()
    for seed, tensor in enumerate(tensors):
        assert torch.equal(tensor, values_of(tensor.numel(), dtype, seed + 100))


def test_the_two_ways_stay_coherent_over_many_rounds(directory: Path, small_pieces: None) -> None:
    disk = Disk(directory)
    tensors = [disk.zeros(20_000 + number, torch.float32) for number in range(3)]
    for turn in range(60):
        for seed, tensor in enumerate(tensors):
            fresh = values_of(tensor.numel(), torch.float32, 10 * turn + seed)
            if turn % 2:
                tensor.copy_(fresh)
                assert torch.equal(fetched(disk, tensor), fresh)
            else:
                disk.start_write(filled(fresh), tensor).wait()
                assert torch.equal(tensor, fresh)
            tensor[turn] = -1  # one dirty page among clean ones
            assert fetched(disk, tensor)[turn] == -1
    assert all(tensor[59] == -1 for tensor in tensors)


def test_many_transfers_are_under_way_at_once(directory: Path, small_pieces: None) -> None:
    disk = Disk(directory, threads=3)
    tensors = [disk.zeros(9_000 + 13 * number, torch.bfloat16) for number in range(60)]
    wanted = [values_of(tensor.numel(), torch.bfloat16, seed) for seed, tensor in enumerate(tensors)]
    for transfer in [disk.start_write(filled(fresh), tensor) for fresh, tensor in zip(wanted, tensors, strict=True)]:
        transfer.wait()
        assert transfer.is_done
    nears = [aligned_buffer(tensor.nbytes) for tensor in tensors]
    for transfer in [disk.start_read(tensor, near) for tensor, near in zip(tensors, nears, strict=True)]:
        transfer.wait()
    for fresh, tensor, near in zip(wanted, tensors, nears, strict=True):
        assert torch.equal(near[: fresh.nbytes].view(torch.bfloat16), fresh) and torch.equal(tensor, fresh)


def test_views_that_begin_with_a_page_are_moved_alone(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    tensor = disk.zeros(5000, torch.float32)  # 4.9 pages
    tensor.copy_(torch.arange(5000.0))
    assert torch.equal(fetched(disk, tensor[2048:2050]), torch.tensor([2048.0, 2049.0]))
    disk.start_write(filled(torch.zeros(1024)), tensor[1024:2048]).wait()
    disk.start_write(filled(torch.zeros(904)), tensor[4096:]).wait()
    wanted = torch.arange(5000.0)
    wanted[1024:2048] = 0
    wanted[4096:] = 0
    assert torch.equal(tensor, wanted)
    for wrong in (tensor[1:2048], tensor[::2], tensor[1024:2000]):
        with pytest.raises(ValueError, match=r"bytes \d+ to \d+ of a tensor of 20000 bytes: the view must be"):
            disk.start_write(aligned_buffer(wrong.nbytes), wrong)
    assert torch.equal(tensor, wanted)


def test_sides_of_a_transfer_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    tensor = disk.zeros(2000, torch.float32)
    with pytest.raises(ValueError, match=r"does not belong to the disk in .*, or was freed"):
        disk.start_read(torch.zeros(2000), aligned_buffer(8000))
    with pytest.raises(
        ValueError, match=r"of 4096 bytes on cpu cannot be the buffer of a transfer of 8192 bytes.*buffer"
    ):
        disk.start_read(tensor, aligned_buffer(4096))
    with pytest.raises(ValueError, match="start at a multiple of 4096"):
        disk.start_read(tensor, aligned_buffer(16384)[8:])
    with pytest.raises(ValueError, match="the same dtype, or uint8"):
        disk.start_read(tensor, aligned_buffer(8192).view(torch.bfloat16))
    with pytest.raises(ValueError, match="at least as many bytes"):
        disk.start_write(aligned_buffer(8192)[:7000], tensor)
    disk.start_write(
        aligned_buffer(8192).view(torch.float32)[:2000].fill_(3), tensor
    ).wait()  # a buffer with a dtype will do
    assert torch.equal(tensor, torch.full((2000,), 3.0))


def test_nothing_is_moved_at_once(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    tensor = disk.zeros(0, torch.float32)
    assert tensor.numel() == 0 and disk.used_bytes == PAGE_BYTES
    assert disk.start_read(tensor, aligned_buffer(0)).is_done
    disk.free(tensor)
    assert disk.used_bytes == 0


def test_calls_that_move_a_part_are_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, write, calls = os.preadv, os.pwritev, []

    def part(call: Callable[..., int], descriptor: int, memories: list[memoryview], offset: int) -> int:
        calls.append(call)
        return min(PAGE_BYTES + 100, call(descriptor, [memories[0][: 2 * PAGE_BYTES]], offset))

    monkeypatch.setattr(os, "preadv", lambda *args: part(read, *args))
    monkeypatch.setattr(os, "pwritev", lambda *args: part(write, *args))
    disk = Disk(tmp_path)
    direct = disk.is_direct_io
    tensor, fresh = disk.zeros(5 * PAGE_BYTES, torch.uint8), values_of(5 * PAGE_BYTES, torch.uint8, 0)
    disk.start_write(filled(fresh), tensor).wait()
    assert torch.equal(fetched(disk, tensor), fresh) and torch.equal(tensor, fresh)
    assert len(calls) == 10 and disk.is_direct_io == direct  # each went on where a page begins


# ------------------------------------------------------------------------------------------------ file systems


def test_a_file_system_that_refuses_direct_transfers_gets_plain_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, write = Disk(tmp_path), os.pwritev

    def pwritev(descriptor: int, memories: list[memoryview], offset: int) -> int:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return write(descriptor, memories, offset)

    if not disk.is_direct_io:
        pytest.skip("the file system of the tests has no direct I/O")
    monkeypatch.setattr(os, "pwritev", pwritev)
    tensor, fresh = disk.zeros(30_000, torch.float32), values_of(30_000, torch.float32, 0)
    disk.start_write(filled(fresh), tensor).wait()
    assert not disk.is_direct_io and torch.equal(tensor, fresh) and torch.equal(fetched(disk, tensor), fresh)


def test_a_file_system_without_direct_io_and_nameless_files_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without(call: Callable[..., int], flag: int, code: int) -> Callable[..., int]:
        def refuse(where: str | int, *args: int) -> int:
            if any(arg & flag == flag for arg in args):
                raise OSError(code, os.strerror(code))
            return call(where, *args)

        return refuse

    monkeypatch.setattr(os, "open", without(os.open, os.O_TMPFILE, errno.EOPNOTSUPP))
    monkeypatch.setattr(fcntl, "fcntl", without(fcntl.fcntl, os.O_DIRECT, errno.EINVAL))
    disk = Disk(tmp_path)
    assert not disk.is_direct_io and not list(tmp_path.iterdir())
    assert disk._file is not None and stat.S_IMODE(os.fstat(disk._file.descriptor).st_mode) == 0o600
    tensor, fresh = disk.zeros(3001, torch.float32), values_of(3001, torch.float32, 0)
    disk.start_write(filled(fresh), tensor).wait()
    assert torch.equal(tensor, fresh) and torch.equal(fetched(disk, tensor), fresh)


def test_no_name_is_made_where_files_may_be_nameless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        os.close(os.open(tmp_path, os.O_TMPFILE | os.O_RDWR))
    except OSError:
        pytest.skip("the file system of the tests has no nameless files")
    monkeypatch.setattr(tempfile, "mkstemp", lambda **_: pytest.fail("a file with a name was made"))
    Disk(tmp_path)


def test_children_of_the_process_do_not_have_its_buffers() -> None:
    near, holds = aligned_buffer(PAGE_BYTES), False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *others = line.split()
        if not first.endswith(":"):  # a map's addresses, before what is said of it
            start, stop = (int(address, 16) for address in first.split("-"))
            holds = start <= near.data_ptr() < stop
        elif holds and first == "VmFlags:":
            assert "dc" in others  # "do not copy on fork"
            return
    pytest.fail("the buffer is in no map")


def test_directories_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    with pytest.raises(DiskError, match=r"/absent is not a directory: create it, or pass one that exists"):
        Disk(tmp_path / "absent")
    (tmp_path / "file").touch()
    with pytest.raises(DiskError, match="/file is not a directory"):
        Disk(tmp_path / "file")
    with pytest.raises(DiskError, match=r"cannot create a file in /proc"):
        Disk("/proc")


# ------------------------------------------------------------------------------------------------ space


@hypothesis.given(st.lists(st.tuples(st.booleans(), st.integers(1, 9)), max_size=60))
def test_extents_do_not_overlap_and_gaps_are_used_first(moves: list[tuple[bool, int]]) -> None:
    extents, taken = FreeList(), {}
    for take, number in moves:
        if take:
            before = set(range(extents.end)) - {byte for start in taken for byte in range(start, start + taken[start])}
            room = any(before.issuperset(range(start, start + number)) for start in before)
            end, start = extents.end, extents.alloc(number)
            assert not any(start < other + taken[other] and other < start + number for other in taken)
            assert extents.end == (end if room else end + number)
            taken[start] = number
        elif taken:
            start = sorted(taken)[number % len(taken)]
            extents.free(start, taken.pop(start))
        assert extents.used_bytes == sum(taken.values())
        assert extents.end == max((start + taken[start] for start in taken), default=0)


def test_the_smallest_gap_that_is_large_enough_is_taken() -> None:
    extents = FreeList()
    starts = [extents.alloc(nbytes) for nbytes in (30, 1, 10, 1)]
    extents.free(starts[0], 30)
    extents.free(starts[2], 10)
    assert extents.alloc(10) == starts[2] and extents.alloc(30) == starts[0]


@pytest.mark.parametrize("holes", [True, False])
def test_a_tensor_made_again_is_zero_and_the_file_does_not_grow(
    directory: Path, holes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not holes:
        monkeypatch.setattr(OffloadFile, "release", lambda *_: False)
    disk = Disk(directory)
    assert disk._file is not None
    descriptor = disk._file.descriptor
    kept = [disk.zeros(5000, torch.float32).fill_(number) for number in range(3)]
    disk.free(kept.pop(1))
    for turn in range(20):
        tensor = disk.zeros(5000 - 200 * turn, torch.float32)
        assert not tensor.any() and not fetched(disk, tensor).any()
        disk.start_write(filled(torch.ones(tensor.numel())), tensor).wait()
        disk.free(tensor)
    assert disk.used_bytes == 2 * 5 * PAGE_BYTES
    assert os.fstat(descriptor).st_size == 3 * 5 * PAGE_BYTES
    if holes:
        assert os.fstat(descriptor).st_blocks * 512 < 3 * 5 * PAGE_BYTES  # space went back to the file system
    assert torch.equal(kept[0], torch.zeros(5000)) and torch.equal(kept[1], torch.full((5000,), 2.0))


def test_a_freed_tensor_is_known_no_more(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    tensor = disk.zeros(10, torch.float32)
    disk.free(tensor[5:])  # a view names its tensor
    for use in (lambda: disk.free(tensor), lambda: disk.start_read(tensor, aligned_buffer(40))):
        with pytest.raises(ValueError, match="or was freed"):
            use()


def test_the_limit_is_kept(tmp_path: Path) -> None:
    disk = Disk(tmp_path, limit=3 * PAGE_BYTES)
    first, _second = disk.zeros(PAGE_BYTES, torch.uint8), disk.zeros(PAGE_BYTES + 1, torch.uint8)
    with pytest.raises(
        DiskError, match=r"cannot allocate 4.10 kB on disk: 12.29 kB of 12.29 kB are used.*Raise the limit"
    ):
        disk.zeros(1, torch.uint8)
    disk.free(first)
    disk.zeros(1, torch.uint8)
    assert disk.used_bytes == 3 * PAGE_BYTES


def test_a_full_disk_is_reported_when_space_is_requested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, reserve = Disk(tmp_path), os.posix_fallocate

    def full(descriptor: int, offset: int, nbytes: int) -> None:
        reserve(descriptor, offset, nbytes // 2)  # as file systems do
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    kept = disk.zeros(1000, torch.float32).fill_(7)
    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", full)
        wanted = r"cannot allocate 81.92 kB on disk: .* are free in .*: No space left on device. Free some space"
        with pytest.raises(DiskError, match=wanted):
            disk.zeros(20 * PAGE_BYTES, torch.uint8)
    assert disk._file is not None and os.fstat(disk._file.descriptor).st_blocks * 512 < 10 * PAGE_BYTES
    assert disk.used_bytes == PAGE_BYTES and torch.equal(kept, torch.full((1000,), 7.0))
    assert not disk.zeros(20 * PAGE_BYTES, torch.uint8).any()


def test_tensors_take_no_descriptors(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    before = len(os.listdir("/proc/self/fd"))
    tensors = [disk.zeros(1, torch.float32) for _ in range(100)]
    assert len(tensors) == 100 and len(os.listdir("/proc/self/fd")) <= before


# ------------------------------------------------------------------------------------------------ failures


@pytest.mark.parametrize("left", [2 * PAGE_BYTES, 2 * PAGE_BYTES + 100, 0])
def test_a_file_that_was_cut_off_is_a_short_read(directory: Path, left: int) -> None:
    disk = Disk(directory)
    tensor = disk.zeros(5 * PAGE_BYTES, torch.uint8)
    assert disk._file is not None
    direct = disk.is_direct_io
    os.truncate(disk._file.descriptor, left)
    transfer = disk.start_read(tensor, aligned_buffer(tensor.nbytes))
    wanted = rf"the read of {5 * PAGE_BYTES} bytes at byte 0 of the .* in {directory} stopped after {left} bytes"
    for _again in range(2):
        with pytest.raises(DiskError, match=wanted):
            transfer.wait()
    assert transfer.is_done and disk.is_direct_io == direct
    os.truncate(disk._file.descriptor, 5 * PAGE_BYTES)
    assert not fetched(disk, tensor)[left:].any()


@pytest.mark.parametrize(
    ("code", "advice"), [(errno.EIO, "device failed"), (errno.ENOSPC, "Free some space"), (errno.EBADF, "closed this")]
)
def test_a_write_that_fails_says_where_and_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_pieces: None, code: int, advice: str
) -> None:
    write = os.pwritev

    def pwritev(descriptor: int, memories: list[memoryview], offset: int) -> int:
        if offset == 7 * PAGE_BYTES:  # the second page of the third piece
            raise OSError(code, os.strerror(code))
        return write(descriptor, [memories[0][: PAGE_BYTES if offset == 6 * PAGE_BYTES else None]], offset)

    disk = Disk(tmp_path)
    tensor, fresh = disk.zeros(12 * PAGE_BYTES, torch.uint8), values_of(12 * PAGE_BYTES, torch.uint8, 0)
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwritev", pwritev)
        transfer = disk.start_write(filled(fresh), tensor)
        wanted = (
            f"write of {3 * PAGE_BYTES} bytes at byte {6 * PAGE_BYTES} .* in {tmp_path} failed after {PAGE_BYTES} "
            f"bytes: .*{advice}"
        )
        with pytest.raises(DiskError, match=wanted) as raised:
            transfer.wait()
        assert isinstance(raised.value.__cause__, OSError) and transfer.is_done
    disk.start_write(filled(fresh), tensor).wait()
    assert torch.equal(tensor, fresh)


def test_whatever_goes_wrong_in_a_thread_reaches_who_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pwritev(*_: object) -> int:
        raise MemoryError("none")

    disk = Disk(tmp_path)
    tensor = disk.zeros(1, torch.uint8)
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwritev", pwritev)
        with pytest.raises(DiskError, match="MemoryError"):
            disk.start_write(aligned_buffer(1), tensor).wait()
    disk.start_write(aligned_buffer(1).fill_(1), tensor).wait()  # by the same threads
    assert tensor[0] == 1


@contextlib.contextmanager
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def test_neither_a_transfer_nor_its_error_keeps_the_buffer(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    tensor = disk.zeros(2 * PAGE_BYTES, torch.uint8)
    assert disk._file is not None
    with no_collector():
        near = aligned_buffer(2 * PAGE_BYTES)
        gone = weakref.ref(near)
        fine = disk.start_read(tensor, near)
        fine.wait()
        os.truncate(disk._file.descriptor, 0)
        short = disk.start_read(tensor, near)
        with contextlib.suppress(DiskError):
            short.wait()
        assert short.has_failed
        del near
        assert soon(lambda: gone() is None)


USES: dict[str, Callable[[Any, Any, Path], object]] = {  # what reads or writes states between steps
    "save": lambda model, optimizer, path: zeroshard.save(path / "emergency", model, optimizer),
    "save later": lambda model, optimizer, path: zeroshard.save(path / "later", model, optimizer, wait=False).wait(),
    "save the optimizer": lambda model, optimizer, path: zeroshard.save(path / "o", model, optimizer, weights=False),
    "load": lambda model, optimizer, path: zeroshard.load(path / "good", model, optimizer),
    "state_dict": lambda model, optimizer, path: optimizer.state_dict(),
    "full_state": lambda model, optimizer, path: optimizer.full_state("0.weight"),
    "full_parameter": lambda model, optimizer, path: zeroshard.full_parameter(model, "0.weight"),
    "gathered": lambda model, optimizer, path: zeroshard.gathered(model).__enter__(),
    "offload_states": lambda model, optimizer, path: zeroshard.offload_states(model),
    "forward": lambda model, optimizer, path: model(torch.ones(2, 32)),
    "unwrap": lambda model, optimizer, path: zeroshard.unwrap(model, optimizer),
}


@pytest.mark.guarantee("States that are away")
@pytest.mark.parametrize("precision", [None, "bf16"])
def test_a_file_that_was_cut_off_is_an_error_and_not_the_end_of_the_process(
    precision: str | None, tmp_path: Path
) -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32))
    offload = {"optimizer": "disk", "parameters": "disk", "directory": tmp_path}
    adam = torch.optim.Adam(model.parameters())
    model, optimizer = zeroshard.shard(model, adam, stage=3, precision=precision, offload=offload)
    model(torch.ones(2, 32)).float().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    zeroshard.save(tmp_path / "good", model, optimizer)
    os.truncate(model._zeroshard.engine.context.tiers.disk._file.descriptor, 0)
    for use, call in USES.items():
        with pytest.raises(DiskError, match="truncated"):
            call(model, optimizer, tmp_path)
            pytest.fail(f"{use} took no note")


# ------------------------------------------------------------------------------------------------ threads, and the end


def test_two_threads_use_one_disk(tmp_path: Path, small_pieces: None) -> None:
    disk, wrong = Disk(tmp_path, threads=2), []

    def use(seed: int) -> None:
        for turn in range(25):
            tensor = disk.zeros(10_000 + 500 * turn, torch.float32)
            fresh = values_of(tensor.numel(), torch.float32, 100 * seed + turn)
            disk.start_write(filled(fresh), tensor).wait()
            if not torch.equal(tensor, fresh) or not torch.equal(fetched(disk, tensor), fresh):
                wrong.append((seed, turn))
            disk.free(tensor)

    threads = [threading.Thread(target=use, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and disk.used_bytes == 0


def test_threads_come_with_the_first_transfer_and_go_with_the_disk(tmp_path: Path) -> None:
    gc.collect()
    assert soon(lambda: not movers())  # those of the tests before
    with no_collector():
        before = len(os.listdir("/proc/self/fd"))
        disk = Disk(tmp_path, threads=3)
        tensor = disk.zeros(10, torch.float32)
        assert not movers()
        assert not fetched(disk, tensor).any()
        assert len(movers()) == 3
        del disk
        assert soon(lambda: not movers() and len(os.listdir("/proc/self/fd")) <= before)
        assert torch.equal(tensor.fill_(1), torch.ones(10))  # its map is its own


def test_after_close_every_use_is_an_error_and_what_was_under_way_ends(
    tmp_path: Path, small_pieces: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, write, go = Disk(tmp_path, threads=1), os.pwritev, threading.Event()
    tensor, fresh = disk.zeros(50_000, torch.float32), values_of(50_000, torch.float32, 0)
    assert disk._file is not None
    file = weakref.ref(disk._file)
    monkeypatch.setattr(os, "pwritev", lambda *args: go.wait() and write(*args))
    others = set(movers())
    transfer = disk.start_write(filled(fresh), tensor)
    mine = set(movers()) - others
    disk.close()
    disk.close()
    assert not transfer.is_done and len(mine) == 1
    go.set()
    transfer.wait()
    assert torch.equal(tensor, fresh)
    uses: list[Callable[[], object]] = [
        lambda: disk.zeros(1, torch.float32),
        lambda: disk.free(tensor),
        lambda: disk.start_read(tensor, aligned_buffer(tensor.nbytes)),
        lambda: disk.start_write(aligned_buffer(tensor.nbytes), tensor),
        lambda: disk.is_direct_io,
    ]
    for use in uses:
        with pytest.raises(DiskError, match=rf"the disk in {tmp_path} is closed: create a new one"):
            use()
    assert soon(lambda: file() is None and not mine.intersection(movers()))


def test_a_child_of_the_process_cannot_harm_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(tmp_path)
    tensor = disk.zeros(1, torch.float32)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    with pytest.raises(DiskError, match=r"belongs to process \d+: create one in this process"):
        disk.free(tensor)


def test_a_transfer_without_pieces_is_over() -> None:
    assert Transfer(0).is_done and not Transfer(1).is_done


def start(code: str, *args: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, args)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_killed_process_leaves_nothing_behind(tmp_path: Path) -> None:
    process = start(
        """
        import sys, torch
        from zeroshard.memory.disk.disk import Disk, aligned_buffer
        disk, near = Disk(sys.argv[1]), aligned_buffer(8 << 20)
        tensor = disk.zeros(8 << 20, torch.uint8).fill_(1)
        print("ready", flush=True)
        while True:
            disk.start_write(near, tensor).wait()
        """,
        tmp_path,
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    assert not list(tmp_path.iterdir())
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL and not list(tmp_path.iterdir())
    process.communicate()


@pytest.mark.parametrize("end", ["pass", "raise KeyError('the end')"])
def test_a_transfer_under_way_does_not_keep_the_interpreter(tmp_path: Path, end: str) -> None:
    process = start(
        f"""
        import os, sys, threading, torch
        from zeroshard.memory.disk.disk import Disk, aligned_buffer
        begun = threading.Event()
        os.pwritev = lambda *_: (begun.set(), threading.Event().wait())  # for ever
        disk = Disk(sys.argv[1], threads=2)
        transfers = [disk.start_write(aligned_buffer(64 << 20), disk.zeros(64 << 20, torch.uint8)) for _ in range(2)]
        begun.wait()
        {end}
        """,
        tmp_path,
    )
    try:
        _, told = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == (1 if "raise" in end else 0), told
    assert ("the end" in told) == ("raise" in end) and "Fatal" not in told


def test_limits_of_the_system_and_of_the_user_are_reported(tmp_path: Path) -> None:
    locked = Path(tempfile.mkdtemp())  # where another user comes to, too
    locked.chmod(0o555)
    process = start(
        """
        import os, resource, sys, torch
        from zeroshard.memory.disk.disk import Disk, aligned_buffer
        from zeroshard.memory.disk.file import DiskError
        disk = Disk(sys.argv[1])
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        kept = disk.zeros(1 << 19, torch.uint8)
        try:
            disk.zeros(1 << 20, torch.uint8)
        except DiskError as error:
            print(error)
        disk.start_write(aligned_buffer(1 << 19).fill_(3), kept).wait()
        print(disk.used_bytes, int(kept.sum()), disk.zeros(1 << 19, torch.uint8).numel())
        if os.getuid() == 0:
            os.setuid(65534)  # root may write everywhere
        try:
            Disk(sys.argv[2])
        except DiskError as error:
            print(error)
        """,
        tmp_path,
        locked,
    )
    told, errors = process.communicate(timeout=60)
    locked.rmdir()
    assert process.returncode == 0, errors
    full, after, refused = told.splitlines()
    assert full.startswith("cannot allocate 1.05 MB on disk: ")
    assert "File too large. Raise `ulimit -f`" in full
    assert after == f"{1 << 19} {3 << 19} {1 << 19}"
    assert refused.startswith(f"cannot create a file in {locked}: Permission denied. Choose a directory that")
