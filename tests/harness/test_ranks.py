"""The rank harness: results come back in order, failures with their tracebacks, and nothing stays behind."""

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from live import allocated_bytes
from processes import wait_until_gone
from ranks import RanksFailed, run_processes, run_threads, seeded
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial

Runner = Callable[..., list[Any]]
both = pytest.mark.parametrize("run", [run_threads, run_processes])


def add_ranks(rank: int, offset: float) -> tuple[int, int, torch.Tensor]:
    total = torch.full((3,), rank + offset)
    dist.all_reduce(total)
    return dist.get_rank(), dist.get_world_size(), total


def fail_on_one(rank: int, culprit: int) -> None:
    if rank == culprit:
        raise ValueError(f"rank {rank} has had enough")
    dist.barrier()


def fail_on_all(rank: int) -> None:
    raise ValueError(f"rank {rank} has had enough")


def sleep_on_one(rank: int, sleeper: int) -> None:
    if rank == sleeper:
        doze()
    dist.barrier()


def sleep_and_fail(rank: int) -> None:
    if rank == 0:
        doze()
    raise ValueError("rank 1 has had enough")


def doze() -> None:
    for _ in range(6000):
        time.sleep(0.01)


def die(rank: int, how: str) -> None:
    if rank == 1:
        if how == "exit":
            os._exit(3)
        os.kill(os.getpid(), signal.SIGSEGV)
    dist.barrier()


def pid_of(rank: int) -> int:
    return os.getpid()


def start_child(rank: int, pid_file: Path) -> None:
    if rank == 0:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        pid_file.write_text(str(child.pid))
    doze()


def sum_dtensor(rank: int, other_groups: int) -> float:
    for _ in range(other_groups):
        dist.new_group([0, 1])
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))["tensor"]
    part = DTensor.from_local(torch.ones(2), mesh, [Partial()])
    return float((part * 2.0).full_tensor()[0])


def read_variable(rank: int, name: str) -> str | None:
    return os.environ.get(name)


def sub_group(rank: int) -> float:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    total = torch.tensor(float(rank))
    dist.all_reduce(total, group=groups[rank // 2])
    return total.item()


def tied(rank: int) -> dict[str, torch.Tensor]:
    weight = torch.arange(4.0)
    return {"a": weight, "b": weight}


def measure_beside_garbage(rank: int) -> tuple[int, int]:
    """Allocate 40 bytes, and free what an earlier measurement allocated and left in a cycle."""
    kept: list[Any] = []

    def leave_garbage() -> None:
        cycle: list[Any] = [torch.ones(1000)]
        cycle.append(cycle)

    def measured() -> None:
        kept.append(torch.ones(10))
        gc.collect()

    gc.disable()
    allocated_bytes(leave_garbage)
    return allocated_bytes(measured)


@both
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_results_come_in_the_order_of_the_ranks(run: Runner, world: int) -> None:
    results = run(world, add_ranks, 0.5)
    assert [result[0] for result in results] == list(range(world))
    for _, size, total in results:
        assert size == world
        assert torch.equal(total, torch.full((3,), sum(range(world)) + 0.5 * world))


@both
def test_groups_within_the_world(run: Runner) -> None:
    assert run(4, sub_group) == [1, 1, 5, 5]


@both
def test_torch_is_left_as_it_was(run: Runner) -> None:
    hook = sys.excepthook
    run(2, add_ranks, 0)
    assert not dist.is_initialized()
    assert sys.excepthook is hook


@both
@pytest.mark.parametrize("culprit", [0, 1])
def test_a_failing_rank_is_reported_first_with_its_traceback(run: Runner, culprit: int) -> None:
    with pytest.raises(RanksFailed) as caught:
        run(2, fail_on_one, culprit, timeout=60)
    message = str(caught.value)
    assert next(iter(caught.value.accounts)) == culprit
    assert f"--- rank {culprit} ---" in message
    assert f"ValueError: rank {culprit} has had enough" in message
    assert "in fail_on_one" in message
    assert "still running" not in message  # the other rank was let go, not timed out
    assert run(2, add_ranks, 0)[1][0] == 1  # and the next run works


def test_threads_let_go_have_not_failed() -> None:
    with pytest.raises(RanksFailed, match="1 of 3 ranks failed") as caught:
        run_threads(3, fail_on_one, 1)
    assert list(caught.value.accounts) == [1]


@both
def test_every_failing_rank_is_reported(run: Runner) -> None:
    with pytest.raises(RanksFailed, match="3 of 3 ranks failed") as caught:
        run(3, fail_on_all)
    for rank in range(3):
        assert f"rank {rank} has had enough" in caught.value.accounts[rank]


@both
@pytest.mark.parametrize("sleeper", [0, 1])
def test_a_stuck_run_ends_with_the_stacks(run: Runner, sleeper: int) -> None:
    with pytest.raises(RanksFailed) as caught:
        run(2, sleep_on_one, sleeper, timeout=4)  # long enough to get there on a busy machine
    assert "stuck: still running after 4 s" in caught.value.accounts[sleeper]
    assert "in doze" in caught.value.accounts[sleeper]
    assert "barrier" in caught.value.accounts[1 - sleeper]
    assert run(2, add_ranks, 0)[1][0] == 1


@both
def test_a_rank_that_runs_on_after_a_failure_is_ended_early(run: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "GRACE", 0.5)
    with pytest.raises(RanksFailed) as caught:
        run(2, sleep_and_fail, timeout=60)
    assert list(caught.value.accounts) == [1, 0]
    assert "after rank 1 failed" in caught.value.accounts[0]
    assert "in doze" in caught.value.accounts[0]


def test_a_thread_that_comes_back_late_cannot_disturb_a_later_run() -> None:
    def sleep_deeply(rank: int) -> None:
        if rank == 1:
            time.sleep(1.5)  # one call: an exception from outside only arrives after it
            dist.all_reduce(torch.full((3,), 1000.0))
        dist.barrier()

    with pytest.raises(RanksFailed):
        run_threads(2, sleep_deeply, timeout=0.3)
    end = time.monotonic() + 1
    while time.monotonic() < end:
        assert [result[2][0] for result in run_threads(2, add_ranks, 0)] == [1, 1]


def test_seeded_threads_draw_the_same_numbers() -> None:
    def draw(rank: int) -> torch.Tensor:
        with seeded(7):
            return torch.cat([torch.rand(1000) for _ in range(20)])

    first, *others = run_threads(4, draw)
    assert all(torch.equal(first, other) for other in others)


def test_threads_start_with_plain_torch_settings() -> None:
    def settings(rank: int) -> tuple[bool, int, str]:
        return torch.is_grad_enabled(), torch.get_num_threads(), str(torch.empty(0).device)

    with torch.no_grad(), torch.device("meta"):
        assert run_threads(2, settings) == [(True, 1, "cpu")] * 2


def test_processes_are_used_again() -> None:
    first = run_processes(2, pid_of)
    assert len(set(first)) == 2
    assert os.getpid() not in first
    assert set(run_processes(2, pid_of)) == set(first)


def test_a_fresh_run_gets_processes_of_its_own() -> None:
    idle = run_processes(2, pid_of)
    fresh = run_processes(2, pid_of, fresh=True)
    assert not set(fresh) & set(idle)
    wait_until_gone(fresh)
    assert set(run_processes(2, pid_of)) == set(idle)


def test_garbage_of_an_earlier_measurement_is_not_subtracted() -> None:
    assert run_processes(1, measure_beside_garbage, fresh=True) == [(40, 40)]


@pytest.mark.parametrize(("how", "words"), [("exit", "exit code 3"), ("crash", "signal SIGSEGV")])
def test_a_dying_rank_is_reported(how: str, words: str) -> None:
    before = run_processes(2, pid_of)
    with pytest.raises(RanksFailed) as caught:
        run_processes(2, die, how, timeout=60)
    assert f"its process died with {words}" in caught.value.accounts[1]
    if how == "crash":
        assert "in die" in caught.value.accounts[1]  # where it crashed
    wait_until_gone(before)
    assert not set(run_processes(2, pid_of)) & set(before)


def test_what_a_stuck_process_started_is_killed_too(tmp_path: Path) -> None:
    before = run_processes(2, pid_of)
    with pytest.raises(RanksFailed):
        run_processes(2, start_child, tmp_path / "pid", timeout=1)
    wait_until_gone([*before, int((tmp_path / "pid").read_text())])


def test_a_mesh_does_not_get_the_groups_of_an_equal_mesh_of_another_run() -> None:
    assert run_processes(4, sum_dtensor, 0) == run_processes(4, sum_dtensor, 3) == [4.0] * 4


def test_environment_holds_for_one_run() -> None:
    assert run_processes(2, read_variable, "RANKS_TEST", env={"RANKS_TEST": "1"}) == ["1", "1"]
    assert run_processes(2, read_variable, "RANKS_TEST") == [None, None]
    assert run_processes(2, read_variable, "GLOO_SOCKET_IFNAME")[0] in ("lo", "lo0")


def test_tied_tensors_stay_tied_on_the_way_back() -> None:
    for result in run_processes(2, tied):
        assert result["a"].data_ptr() == result["b"].data_ptr()


def test_a_body_that_cannot_be_sent_is_refused() -> None:
    with pytest.raises(ValueError, match="move it to the top level"):
        run_processes(2, lambda rank: rank)


SESSION = """
import os, sys, time
from pathlib import Path
sys.path.insert(0, {tests!r})
import ranks
ranks.PRELOADED = ["torch", "torch.distributed"]
from ranks import run_processes
from test_ranks import pid_of, start_child
pids = run_processes(2, pid_of)
Path({pids!r}).write_text(" ".join(map(str, pids)))
if {stuck}:
    run_processes(2, start_child, Path({child!r}))
"""


@pytest.fixture(scope="module")
def sessions(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[subprocess.Popen[bytes], Path]]]:
    """A session for each end and the folder of its notes, started at once: most of their time goes into imports."""
    started = {}
    for end in ("return", "SIGKILL"):
        path = tmp_path_factory.mktemp("session")
        tests, pids, child = (str(place) for place in (Path(__file__).parent, path / "pids", path / "child"))
        script = SESSION.format(tests=tests, pids=pids, child=child, stuck=end != "return")
        started[end] = subprocess.Popen([sys.executable, "-c", script]), path
    yield started
    for session, _ in started.values():
        session.kill()
        session.wait()


@pytest.mark.parametrize("end", ["return", "SIGKILL"])
def test_no_process_outlives_the_session(end: str, sessions: dict[str, tuple[subprocess.Popen[bytes], Path]]) -> None:
    session, path = sessions[end]
    pids, child = path / "pids", path / "child"
    if end != "return":
        while not (child.exists() and child.read_text()):
            assert session.poll() is None
            time.sleep(0.05)
        session.send_signal(getattr(signal, end))
    session.wait(60)
    left = [int(pid) for pid in pids.read_text().split()]
    if end != "return":
        left.append(int(child.read_text()))
    wait_until_gone(left)
