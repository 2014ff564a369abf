"""Measuring a machine: everything is measured, kept and found again. How fast this machine is decides nothing here."""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import RanksFailed, run_processes

from zeroshard.memory.disk.disk import Disk
from zeroshard.memory.disk.file import DiskError
from zeroshard.optim.cpu import apply
from zeroshard.planner.calibration import calibrate as module
from zeroshard.planner.calibration import device_rates, node_rates
from zeroshard.planner.calibration.calibrate import calibrate, fit_matmul_rates
from zeroshard.planner.calibration.device_rates import LaunchCounter, has_attention, host_seconds, time_matmuls
from zeroshard.planner.calibration.node_rates import CalibrationRanks, fit_link
from zeroshard.planner.machines import cache as machine_cache
from zeroshard.planner.machines.collective_time import collective_seconds
from zeroshard.planner.machines.machine import EfficiencyCurve, Machine

BRIEF = 0.1  # seconds
CPU = torch.device("cpu")
SMALL_ATTENTION = (1, 2, 32, 16)  # a CPU without bf16 takes a second for the real one
NUMBERS = [
    f.name
    for f in fields(Machine)
    if f.name not in ("name", "kind", "flops", "fp8_flops", "efficiency", "inside", "outside")
]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setitem(device_rates.ATTENTION_SHAPES, "cpu", SMALL_ATTENTION)
    return tmp_path / "cache" / "zeroshard" / "machines"


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(Disk, "is_direct_io", True)  # whatever file system the tests run on
    (tmp_path / "disk").mkdir()
    return tmp_path / "disk"


def whole(machine: Machine, kind: str) -> None:
    """Nothing of a machine is missing."""
    assert machine.kind == kind
    for name in NUMBERS:
        value = getattr(machine, name)
        assert value > 0 or (kind == "cpu" and name in ("gap", "workspace")), name
    device = torch.device(kind)
    with torch.random.fork_rng():
        assert set(machine.flops) == {name for name in ("fp32", "bf16", "fp16") if has_attention(device, name)}
    assert machine.context < machine.memory


# -- all of it ---------------------------------------------------------------------------------------------------------


def test_a_machine_is_measured_kept_and_found_again(directory: Path, cache: Path) -> None:
    before, state = torch.backends.mkldnn.enabled, torch.get_rng_state()
    machine = calibrate("cpu", directory=directory, seconds=BRIEF)
    whole(machine, "cpu")
    assert machine.name == machine_cache.local_machine_name("cpu")
    assert Machine.resolve("here") == machine
    assert [path.name for path in cache.iterdir()] == [f"{machine.name}.json"]
    assert list(directory.iterdir()) == []  # the file that was measured with is gone
    assert torch.backends.mkldnn.enabled == before
    assert torch.equal(torch.get_rng_state(), state)
    preset = Machine.resolve("cpu")
    assert (machine.inside, machine.outside) == (preset.inside, preset.outside)  # one rank sees no links
    same = {name for name in NUMBERS if getattr(machine, name) == getattr(preset, name)}
    # kernels in a row may be no slower than alone: then ``sustained`` is 1, as in the preset
    assert same <= {"gap", "workspace", "context", "sustained"}, "these were not measured"


def test_measuring_again_replaces_what_was_kept(directory: Path, cache: Path) -> None:
    machine_cache.write_machine(machine_cache.local_machine_name("cpu"), "{damaged")
    machine = calibrate(CPU, directory=directory, seconds=BRIEF)
    assert Machine.resolve("here") == machine
    assert len(list(cache.iterdir())) == 1


def test_a_cache_that_cannot_be_written_costs_no_measurement(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.warns(RuntimeWarning, match=r"could not be saved in .*Set XDG_CACHE_HOME"):
        machine = calibrate("cpu", directory=directory, seconds=BRIEF)
    whole(machine, "cpu")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"seconds": 0}, "seconds must be a positive number, got 0"),
        ({"seconds": "45"}, "seconds must be a positive number, got '45'"),
        ({"seconds": float("inf")}, "seconds must be a positive number, got inf"),
        ({"device": "meta"}, "device must be a CUDA GPU or the CPU, got meta"),
        pytest.param(
            {"device": "cuda"},
            "torch finds no GPU here. Calibrate on 'cpu'",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is one"),
        ),
    ],
)
def test_what_cannot_be_measured_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        calibrate(**options)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_is_measured(directory: Path) -> None:
    held = torch.cuda.memory_allocated()
    machine = calibrate("cuda", directory=directory, seconds=6)
    whole(machine, "cuda")
    assert machine.devices == torch.cuda.device_count()
    assert machine.memory == torch.cuda.mem_get_info()[1]
    assert Machine.resolve("here") == machine
    assert torch.cuda.memory_allocated() - held < 2.5 * machine.workspace  # tensors are gone, two threads' are not


# -- products ----------------------------------------------------------------------------------------------------------


def times(rate: float, lost: float, sizes: tuple[int, ...] = (512, 1024, 4096)) -> list[tuple[float, float]]:
    return [(2.0 * n**3, lost + 2.0 * n**3 / rate) for n in sizes]


def test_published_peaks_stay_and_what_was_seen_is_what_is_predicted() -> None:
    seen = {"fp32": times(40e12, 3e-6), "bf16": times(700e12, 3e-6), "fp16": times(650e12, 3e-6)}
    flops, curve = fit_matmul_rates(seen, Machine.resolve("h100").flops)
    assert flops["bf16"] == Machine.resolve("h100").flops["bf16"]
    machine = Machine.resolve("h100", flops=flops, efficiency=curve)
    for precision, found in seen.items():
        for x, seconds in found:
            assert machine.matmul_seconds(x, precision) == pytest.approx(seconds, rel=1e-3), precision


def test_without_a_published_peak_the_peak_is_what_large_products_reach() -> None:
    seen = {"fp32": times(5e10, 1e-5), "bf16": times(1e9, 1e-5, sizes=(64, 128))}
    flops, curve = fit_matmul_rates(seen, {})
    assert flops["fp32"] == pytest.approx(5e10, rel=1e-4)
    assert curve.share == pytest.approx(1, rel=1e-4)
    machine = Machine.resolve("cpu", flops=flops, efficiency=curve)
    for precision, found in seen.items():
        assert machine.matmul_seconds(found[-1][0], precision) == pytest.approx(found[-1][1], rel=1e-3)
    assert set(flops) == {"fp32", "bf16"}  # no fp16 was seen: it is refused


def test_of_two_equal_peaks_bf16_keeps_its_own() -> None:
    seen = {"bf16": times(600e12, 3e-6), "fp16": times(700e12, 3e-6)}
    flops, curve = fit_matmul_rates(seen, Machine.resolve("h100").flops)
    assert flops == Machine.resolve("h100").flops  # fp16 is no faster than its peak
    assert curve.share == pytest.approx(600 / 989.4, rel=1e-3)


def test_one_product_of_one_precision_is_enough() -> None:
    assert fit_matmul_rates({"fp32": [(1e9, 1e-3)]}, {}) == ({"fp32": 1e12}, EfficiencyCurve(share=1.0, half=0.0))


def test_a_slow_precision_is_measured_on_small_products_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def slow(run: Callable[[], object], device: torch.device, seconds: float) -> float:
        asked.append(seconds)
        return 100.0

    monkeypatch.setattr(device_rates, "device_seconds", slow)
    assert [x for x, _ in time_matmuls(CPU, "bf16", 1.0)] == [2.0 * 64**3, 2.0 * 128**3]
    assert sum(asked) <= 1.0


def test_a_precision_without_a_kernel_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object, **__: object) -> None:
        raise RuntimeError("not implemented for 'Half'")

    monkeypatch.setattr(torch, "mm", missing)
    assert time_matmuls(CPU, "fp16", 1.0) == []
    with pytest.raises(RuntimeError, match="no matmul could run on cpu: check whether another process"):
        calibrate("cpu", seconds=BRIEF)


def test_a_precision_without_attention_is_left_out(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch may multiply in bf16 and have no attention for it, without AVX-512 for one."""
    attention = F.scaled_dot_product_attention

    def only_fp32(query: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        if query.dtype != torch.float32:
            raise RuntimeError("pack_vnni2 is only supported when avx512 is supported")
        return attention(query, *args, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", only_fp32)
    assert list(calibrate("cpu", directory=directory, seconds=BRIEF).flops) == ["fp32"]


@pytest.mark.parametrize("before", [True, False])
def test_a_product_that_makes_torch_change_its_library_changes_it_for_itself_alone(
    before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def changing(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        torch.backends.mkldnn.set_flags(not before)

    torch.backends.mkldnn.set_flags(before)
    monkeypatch.setattr(torch, "mm", changing)
    time_matmuls(CPU, "bf16", BRIEF / 10)
    assert torch.backends.mkldnn.enabled == before


# -- time and operations -----------------------------------------------------------------------------------------------


def test_a_run_that_takes_longer_than_there_is_time_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])

    def run() -> None:
        clock[0] += 7.0

    assert host_seconds(run, seconds=5.0) == 7.0
    assert clock[0] == 7.0
    assert host_seconds(run, seconds=30.0) == 7.0
    assert clock[0] == 7.0 + 7.0 + 5 * 7.0  # a first one, and those begun within 30 seconds
    clock[0] = 0.0
    assert host_seconds(run, seconds=1e9, max_runs=3) == 7.0
    assert clock[0] == 4 * 7.0


def test_operations_that_launch_nothing_do_not_count() -> None:
    x, weight = torch.ones(4, 6), torch.ones(6, 6, requires_grad=True)
    launches = LaunchCounter()
    with launches:
        y = x.view(2, 2, 6)[0].t().detach()  # views
        torch.empty(3)
        assert launches.count == 0
        loss = (x @ weight).sum()
        assert launches.count == 2
        loss.backward()  # a one to begin with, and a product; expanding is a view
        assert launches.count == 4
        y.mul_(2)
    assert launches.count == 5


# -- the node ----------------------------------------------------------------------------------------------------------


def test_a_directory_that_is_named_and_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DiskError, match="absent is not a directory: create it, or pass one that exists"):
        calibrate("cpu", directory=tmp_path / "absent", seconds=BRIEF)


def test_without_a_directory_a_disk_that_cannot_be_used_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise DiskError("no space is left")

    monkeypatch.setattr(module, "disk_rates", full)
    with pytest.warns(RuntimeWarning, match=r"the disk was not measured: no space is left\. Pass a directory"):
        machine = calibrate("cpu", seconds=BRIEF)
    preset = Machine.resolve("cpu")
    assert (machine.disk, machine.disk_read, machine.disk_write) == (preset.disk, preset.disk_read, preset.disk_write)


def test_without_a_directory_the_current_one_is_measured(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def noted(where: str, *_: object) -> dict[str, float]:
        asked.append(Path(where).resolve())
        return {"disk": 5, "disk_read": 6.0, "disk_write": 7.0}

    monkeypatch.setattr(module, "disk_rates", noted)
    monkeypatch.chdir(directory)
    machine = calibrate("cpu", seconds=BRIEF)
    assert asked == [directory.resolve()]
    assert (machine.disk, machine.disk_read, machine.disk_write) == (5, 6.0, 7.0)


def test_a_full_disk_and_one_in_the_page_cache_say_nothing(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Disk, "is_direct_io", False)
    with pytest.warns(RuntimeWarning, match="go through the page cache.*choose a directory on a local disk"):
        assert list(node_rates.disk_rates(directory, BRIEF, max_bytes=2**20)) == ["disk"]
    monkeypatch.setattr(node_rates.shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(DiskError, match=r"only 1000 bytes are free in .*: choose a directory on a disk with more"):
        node_rates.disk_rates(directory, BRIEF)
    assert list(directory.iterdir()) == []


def test_without_native_kernels_torchs_update_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    stepped = []
    plain = torch.optim.AdamW.step
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self: stepped.append(plain(self)))
    assert node_rates.update_rate(BRIEF / 10, max_numel=1000) > 0
    assert not stepped or apply.load_kernels() is None
    monkeypatch.setattr(apply, "load_kernels", lambda: None)
    assert node_rates.update_rate(BRIEF / 10, max_numel=1000) > 0
    assert stepped


# -- links -------------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 16), st.floats(1e8, 1e12), st.floats(1e-6, 1e-3))
def test_a_link_is_found_again_from_the_times_of_its_ring(ranks: int, bandwidth: float, latency: float) -> None:
    def ring(nbytes: float) -> tuple[float, float]:
        return nbytes, nbytes * (ranks - 1) / ranks / bandwidth + (ranks - 1) * latency

    link = fit_link(ranks, ring(4096), ring(2**28))
    machine = Machine.resolve("h100", devices=16, inside=link)
    assert link.bandwidth == pytest.approx(bandwidth, rel=1e-4)
    assert link.latency == pytest.approx(latency, rel=1e-3)
    assert collective_seconds(machine, "all-gather", 1e15, ranks) == pytest.approx(ring(1e15)[1], rel=1e-4)


def test_noise_makes_no_link_that_is_none() -> None:
    assert fit_link(2, small=(4096, 2e-3), large=(2**22, 1e-3)).bandwidth == pytest.approx(2**22 / 2 / 1e-3)
    assert (
        fit_link(4, (0, 1e-4), (1e9, 1.0), hops=1, local_seconds=1.0).latency == 0
    )  # the way inside took longer than all


def measured(rank: int, directory: str, nodes: int) -> tuple[Machine, CalibrationRanks, bool]:
    device_rates.ATTENTION_SHAPES["cpu"] = SMALL_ATTENTION
    if nodes > 1:
        world = torch.distributed.get_world_size()
        platform.node = lambda: f"node{rank * nodes // world}"
    try:
        machine = calibrate("cpu", directory=directory, seconds=BRIEF)
        return (
            machine,
            CalibrationRanks.current(),
            machine_cache.machine_path(machine_cache.local_machine_name("cpu")).exists(),
        )
    finally:
        platform.node = NODE
        device_rates.ATTENTION_SHAPES["cpu"] = ATTENTION


NODE, ATTENTION = platform.node, device_rates.ATTENTION_SHAPES["cpu"]


def together(tmp_path: Path, world: int, nodes: int) -> list[tuple[Machine, CalibrationRanks, bool]]:
    env = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    return run_processes(world, measured, str(tmp_path), nodes, env=env)


def test_ranks_of_a_node_measure_their_links_and_agree(tmp_path: Path, cache: Path) -> None:
    results = together(tmp_path, world=2, nodes=1)
    machine = results[0][0]
    assert all(found == machine for found, _, _ in results)
    assert machine.devices == 2
    assert machine.memory == machine.host_memory // 2
    assert machine.inside != Machine.resolve("cpu").inside
    assert machine.outside == Machine.resolve("cpu").outside
    assert Machine.resolve("here") == machine
    assert [ranks for _, ranks, _ in results] == [CalibrationRanks(2, 0, (0, 1)), CalibrationRanks(2, 1, (0, 1))]


def test_nodes_measure_the_link_between_them_and_each_keeps_a_file(tmp_path: Path, cache: Path) -> None:
    results = together(tmp_path, world=4, nodes=2)
    machine = results[0][0]
    assert all(found == machine for found, _, _ in results)
    assert machine.devices == 2
    assert machine.inside != Machine.resolve("cpu").inside
    assert machine.outside != Machine.resolve("cpu").outside
    assert sorted(path.name for path in cache.iterdir()) == ["node0-cpu.json", "node1-cpu.json"]
    assert [ranks.local_ranks for _, ranks, _ in results] == [(0, 1), (0, 1), (2, 3), (2, 3)]


def lost(rank: int, directory: str) -> None:
    calibrate("cpu", directory=directory if rank == 0 else f"{directory}/absent", seconds=BRIEF)


def test_where_one_rank_has_no_disk_all_raise(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed) as failure:
        run_processes(2, lost, str(tmp_path), timeout=60)
    assert sorted(failure.value.accounts) == [0, 1]
    assert all("absent is not a directory" in account for account in failure.value.accounts.values())


def exchanged(rank: int) -> tuple[list[str], str]:
    """Exchange texts as a calibration does; nothing that another rank sends is unpickled."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a rank unpickles what it gets: that may be code of whoever reaches its port")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist.distributed_c10d, "_unpickler", refuse)
        ranks = CalibrationRanks.current()
        return ranks.gather_text(f"text of {rank}"), ranks.broadcast_text(f"plan of {rank}")


def test_ranks_that_calibrate_send_each_other_data_and_no_code() -> None:
    assert run_processes(2, exchanged) == [(["text of 0", "text of 1"], "plan of 0")] * 2
