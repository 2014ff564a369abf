"""Machines: named, written, measured; and what is refused, in which words."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zeroshard.planner.machines import cache as machine_cache
from zeroshard.planner.machines.machine import EfficiencyCurve, Link, Machine
from zeroshard.planner.machines.presets import MACHINE_PRESETS, gpu_peak_flops, preset_of_gpu


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "zeroshard" / "machines"


def written(path: Path, **changes: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**json.loads(Machine.resolve("a100").to_json()), **changes}))
    return path


# -- presets -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MACHINE_PRESETS)
def test_every_preset_is_a_machine_and_survives_its_json(name: str) -> None:
    machine = Machine.resolve(name)
    assert machine.name == name
    assert Machine.from_json(machine.to_json()) == machine
    assert pickle.loads(pickle.dumps(machine)) == machine
    assert hash(machine) == hash(Machine.resolve(name))


@pytest.mark.parametrize(
    ("name", "devices", "gigabytes", "tflops", "inside", "outside"),
    [  # of the data sheets: devices of a node, GiB of one, fastest TFLOP/s, GB/s each way of a device and of a node
        ("dgx2", 16, 32, 125, 150, 100),
        ("a100", 8, 80, 312, 300, 200),
        ("a100-40gb", 8, 40, 312, 300, 200),
        ("h100", 8, 80, 989.4, 450, 400),
        ("h200", 8, 141e9 / 2**30, 989.4, 450, 400),
        ("b200", 8, 180, 2250, 900, 400),
        ("gb200", 72, 186, 2500, 900, 3600),
        ("mi300x", 8, 192, 1307.4, 447, 400),
    ],
)
def test_presets_have_their_data_sheets_rates(
    name: str, devices: int, gigabytes: float, tflops: float, inside: float, outside: float
) -> None:
    machine = Machine.resolve(name)
    assert machine.devices == devices
    assert machine.memory == pytest.approx(gigabytes * 2**30, rel=0.07)  # a "GB" is now the one and now the other
    assert max(machine.flops.values()) == tflops * 1e12
    assert 0.7 <= machine.inside.bandwidth / (inside * 1e9) <= 1
    assert 0.7 <= machine.outside.bandwidth / (outside * 1e9) <= 1


def test_a_large_product_takes_what_was_seen_on_an_h200() -> None:
    """8192³ in bf16: 690 to 790 TFLOP/s."""
    flops = 2 * 8192**3
    assert 690e12 < flops / Machine.resolve("h200").matmul_seconds(flops, "bf16") < 790e12


def test_gpus_are_known_by_what_they_say_of_themselves() -> None:
    said = {
        "NVIDIA H200": "h200",
        "NVIDIA H100 80GB HBM3": "h100",
        "NVIDIA A100-SXM4-80GB": "a100",
        "NVIDIA A100-SXM4-40GB": "a100-40gb",
        "Tesla V100-SXM3-32GB": "dgx2",
        "NVIDIA GB200": "gb200",
        "NVIDIA B200": "b200",
        "AMD Instinct MI300X": "mi300x",
        "NVIDIA L40S": "l40s",
        "NVIDIA GeForce RTX 4090": "4090",
        "NVIDIA GeForce GTX 1080": None,
    }
    assert {name: preset_of_gpu(name) for name in said} == said


@pytest.mark.parametrize(
    ("name", "precision", "peak"),
    [
        ("Tesla V100-SXM2-16GB", "fp16", 125e12),
        ("Tesla V100-SXM2-16GB", "bf16", None),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312e12),
        ("NVIDIA A100-PCIE-40GB", "fp32", 19.5e12),
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4e12),
        ("NVIDIA H100 PCIe", "bf16", 756e12),
        ("NVIDIA H100 NVL", "bf16", None),
        ("NVIDIA H200", "fp16", 989.4e12),
        ("NVIDIA H20", "bf16", None),
        ("NVIDIA L4", "bf16", 121e12),
        ("NVIDIA L40", "bf16", None),
        ("NVIDIA L40S", "bf16", 362.05e12),
        ("NVIDIA A10", "bf16", 125e12),
        ("NVIDIA A10G", "bf16", None),
        ("NVIDIA B200", "bf16", 2250e12),
        ("NVIDIA GeForce RTX 4090", "bf16", 165.2e12),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16", None),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", "bf16", None),
        ("NVIDIA GB200", "bf16", 2500e12),
        ("AMD Instinct MI300X", "fp16", 1307.4e12),
        ("cpu", "fp32", None),
        ("", "bf16", None),
    ],
)
def test_peak_of_a_device_is_its_own_or_unknown(name: str, precision: str, peak: float | None) -> None:
    assert gpu_peak_flops(name, precision) == peak


# -- what is given ----------------------------------------------------------------------------------------------------


def test_changes_are_made_to_a_machine_and_sizes_may_be_words() -> None:
    machine = Machine.resolve(
        "h100", devices=2, memory="64GB", bandwidth="1TB/s", inside={"bandwidth": "9GB", "latency": 0}
    )
    assert (machine.devices, machine.memory, machine.bandwidth) == (2, 64 * 10**9, 1e12)
    assert machine.inside == Link(bandwidth=9e9, latency=0.0)
    assert machine.outside == Machine.resolve("h100").outside
    assert Machine.resolve(machine) is machine
    assert Machine.resolve(machine, devices=3) == replace(machine, devices=3)


def test_a_file_may_begin_from_a_preset_and_is_named_after_itself(tmp_path: Path) -> None:
    path = tmp_path / "ours.json"
    path.write_text('{"like": "a100", "devices": 4, "host_memory": "512GiB"}')
    assert Machine.resolve(path) == Machine.resolve(str(path))
    assert Machine.resolve(path) == Machine.resolve("a100", name="ours", devices=4, host_memory=512 * 2**30)
    assert Machine.resolve(path, devices=2).devices == 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"name": ""}, "name must be a non-empty string, got ''"),
        ({"kind": "tpu"}, "kind must be 'cuda' or 'cpu', got 'tpu'"),
        ({"devices": 0}, "devices must be a positive integer, got 0"),
        ({"devices": True}, "devices must be a positive integer, got True"),
        ({"memory": "80 gigabytes"}, "memory is a number of bytes, or one with a unit"),
        ({"memory": 1.5}, "memory is a number of bytes"),
        ({"memory": None}, "memory is a number of bytes"),
        ({"memory": 10**6}, r"memory must be more than the \d+ bytes that the runtime uses"),
        ({"bandwidth": 0}, "bandwidth must be a number above 0, got 0"),
        ({"bandwidth": "fast"}, "bandwidth per second is a number of bytes"),
        ({"pcie": float("nan")}, "pcie must be a number above 0, got nan"),
        ({"host_update": "1"}, "host_update must be a number above 0, got '1'"),
        ({"attention": True}, "attention must be a number above 0, got True"),
        ({"op": -1e-6}, "op must be a number of seconds, at least 0, got -1e-06"),
        ({"gap": float("inf")}, "gap must be a number of seconds, at least 0, got inf"),
        ({"flops": {}}, "flops must map some of fp32, bf16, fp16 to FLOP/s"),
        ({"flops": {"fp8": 1e15}}, "flops must map some of fp32, bf16, fp16 to FLOP/s"),
        ({"flops": {"fp32": 0}}, "flops of fp32 must be a number above 0, got 0"),
        ({"flops": 1e12}, "flops must map some of"),
        ({"efficiency": 0.5}, "efficiency must have the fields share and half, got 0.5"),
        ({"efficiency": {"share": 2, "half": 0}}, "efficiency: share must be above 0 and at most 1, got 2"),
        ({"inside": {"bandwidth": 1e9}}, "inside must have the fields bandwidth and latency"),
        ({"outside": {"bandwidth": 0, "latency": 0}}, "outside: bandwidth must be a number above 0, got 0"),
    ],
)
def test_a_wrong_machine_is_refused_as_an_argument_and_in_a_file(
    tmp_path: Path, changes: dict[str, object], words: str
) -> None:
    with pytest.raises(ValueError, match=words.replace("(", r"\(")):
        Machine.resolve("a100", **changes)
    path = written(tmp_path / "bad.json", **changes)
    with pytest.raises(ValueError, match=rf"bad\.json is not a valid machine file: .*{words.replace('(', '.')}"):
        Machine.resolve(path)


def test_unknown_names_are_refused_with_the_nearest_one(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown machine field 'devises': did you mean 'devices'"):
        Machine.resolve("a100", devises=2)
    with pytest.raises(ValueError, match="unknown machine field 'zzz': the fields are name, kind, devices"):
        Machine.resolve("a100", zzz=2)
    with pytest.raises(ValueError, match=r"ours\.json is not a valid machine file: unknown machine field 'devises'"):
        Machine.resolve(written(tmp_path / "ours.json", devises=2))
    with pytest.raises(ValueError, match="unknown machine 'dgx-2': did you mean 'dgx2'"):
        Machine.resolve("dgx-2")
    with pytest.raises(ValueError, match="unknown machine 7: Use one of dgx2"):
        Machine.resolve(7)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "it is not JSON"),
        ("[1]", "it must be a JSON object, got list"),
        ('{"name": "a"}', "missing kind, devices, memory"),
        ('{"like": "a1000"}', "like must be one of dgx2, .*, got 'a1000'"),
        ('{"like": "bad.json"}', "like must be one of"),
        ('{"like": ["a100"]}', "like must be one of"),
        ("[" * 100_000, "it is not JSON"),
        ('{"like": "a100", "memory": 1' + "0" * 400 + "}", "memory is a number of bytes"),
        ('{"like": "a100", "memory": "1' + "0" * 400 + 'GB"}', "memory is a number of bytes"),
        ('{"like": "a100", "pcie": 1' + "0" * 400 + "}", "pcie must be a number above 0"),
    ],
    ids=str.split("nothing list lacks unknown itself list-of-presets nested huge-bytes huge-size huge-rate"),
)
def test_a_file_that_describes_no_machine(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=rf"bad\.json is not a valid machine file: {words}.*Correct the file"):
        Machine.resolve(path)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot read machine file .*absent\.json: No such file"):
        Machine.resolve(tmp_path / "absent.json")
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"bytes\.json is not a valid machine file"):
        Machine.resolve(tmp_path / "bytes.json")


# -- here --------------------------------------------------------------------------------------------------------------


def test_here_is_what_was_kept_and_a_gpus_rates_come_first(cache: Path) -> None:
    with pytest.raises(ValueError, match="not been measured yet: run `zeroshard plan --calibrate`"):
        Machine.resolve("here")
    machine_cache.write_machine(machine_cache.local_machine_name("cpu"), Machine.resolve("cpu").to_json())
    assert Machine.resolve("here", name="cpu") == Machine.resolve("cpu")
    path = machine_cache.write_machine(machine_cache.local_machine_name("cuda"), Machine.resolve("h200").to_json())
    assert Machine.resolve("here") == Machine.resolve("h200")
    assert path.parent == cache
    assert [found.suffix for found in cache.iterdir()] == [".json", ".json"]  # and nothing half written


def test_a_kept_file_that_is_damaged_says_to_calibrate_again(cache: Path) -> None:
    path = machine_cache.write_machine(machine_cache.local_machine_name("cpu"), Machine.resolve("cpu").to_json())
    path.write_text(path.read_text()[:-40])
    with pytest.raises(
        ValueError, match=r"is not a valid machine file: it is not JSON.*Run `zeroshard plan --calibrate` again"
    ):
        Machine.resolve("here")


def test_a_file_that_cannot_be_written_as_a_whole_leaves_the_old_one(monkeypatch: pytest.MonkeyPatch) -> None:
    path = machine_cache.write_machine("ours", "old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(machine_cache.os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        machine_cache.write_machine("ours", "new")
    assert path.read_text() == "old"
    assert list(path.parent.iterdir()) == [path]


# -- rates -------------------------------------------------------------------------------------------------------------


def test_a_precision_that_is_not_computed_in_is_refused() -> None:
    with pytest.raises(ValueError, match="'dgx2' does not support bf16, only fp32 and fp16: use precision='fp16'"):
        Machine.resolve("dgx2").matmul_seconds(1e9, "bf16")


@pytest.mark.parametrize("name", MACHINE_PRESETS)
def test_products_reach_the_curves_share_and_lose_the_same_time_in_all_precisions(name: str) -> None:
    machine = Machine.resolve(name)
    fastest = max(machine.flops, key=lambda precision: machine.flops[precision])
    for flops in (1e6, 1e9, 1e12):
        seconds = machine.matmul_seconds(flops, fastest)
        assert flops / seconds == pytest.approx(machine.efficiency(flops) * machine.peak_flops(fastest))
    for precision, peak in machine.flops.items():
        share = machine.efficiency.share
        lost = machine.matmul_seconds(1e9, precision) - 1e9 / (share * peak)
        assert lost == pytest.approx(machine.efficiency.half / (share * max(machine.flops.values())), rel=1e-3)
        assert machine.attention_seconds(1e9, precision) == pytest.approx(1e9 / (machine.attention * peak))


@settings(max_examples=60, deadline=None)
@given(st.floats(0.01, 1.0), st.floats(0.0, 1e10), st.floats(1e10, 1e15))
def test_a_curve_is_found_again_from_the_times_it_gives(share: float, half: float, peak: float) -> None:
    curve = EfficiencyCurve(share=share, half=half)
    seen = [(x, x / (curve(x) * peak)) for x in (2.0 * n**3 for n in (256, 1024, 4096, 16384))]
    found = EfficiencyCurve.fit(seen, peak)
    for x, seconds in seen:
        assert x / (found(x) * peak) == pytest.approx(seconds, rel=1e-3)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.floats(1e3, 1e13), st.floats(1e-7, 10.0)), min_size=1, max_size=6), st.floats(1e9, 1e15))
def test_whatever_was_seen_makes_a_curve(seen: list[tuple[float, float]], peak: float) -> None:
    curve = EfficiencyCurve.fit(seen, peak)
    assert 0 < curve.share <= 1
    assert curve.half >= 0
    assert curve(1.0) <= curve(1e6) <= curve(1e12) <= curve.share


def test_a_curve_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="needs at least one measured matmul"):
        EfficiencyCurve.fit([], 1e12)


def test_ranks_on_this_computer_share_it() -> None:
    lone = Machine.resolve("cpu", devices=1, memory="8GB", name=machine_cache.local_machine_name("cpu"))
    shared = lone.shared_by(4)
    assert (shared.devices, shared.memory, shared.flops["fp32"]) == (4, 2 * 10**9, lone.flops["fp32"] / 4)
    assert lone.shared_by(1) is lone
    assert Machine.resolve("h100").shared_by(64).devices == 8
