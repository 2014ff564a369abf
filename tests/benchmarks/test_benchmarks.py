"""The benchmarks' scripts: that they run, on tiny shapes, and that what they share measures what it says.

Scripts run in this process, their trials too; one runs as a user runs it.
"""

from __future__ import annotations

import argparse
import doctest
import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ranks import run_processes

from benchmarks.harness import record, search, shared_gpu, training, trials, workloads
from benchmarks.harness.record import ROOT, Record, median, ratio, spread
from benchmarks.paper import measured as paper
from benchmarks.suites import (
    checkpoint,
    cores,
    fp8,
    local_steps,
    memory,
    offload,
    optimizer,
    peers,
    planner,
    pretrained,
    scaling,
    sockets,
    stages,
    wire,
)
from zeroshard.models import GPT, GPTConfig
from zeroshard.optim import step
from zeroshard.planner import Strategy
from zeroshard.planner.machines.machine import Link


@pytest.fixture
def inline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have trials run in this process."""

    def measured(measure: trials.Measure, arguments: dict[str, Any], seconds: float) -> dict[str, Any]:
        result = trials.catch_out_of_memory(measure, **arguments)
        return dict(json.loads(json.dumps(result)))

    monkeypatch.setattr(trials, "run_process", measured)


def run(main: Callable[[list[str]], None], out: Path, *arguments: str) -> list[dict[str, Any]]:
    """Run a suite on tiny shapes, and return its results."""
    main(["--tiny", "--device", "cpu", "--out", str(out / "out.json"), *arguments])
    results = json.loads((out / "out.json").read_text())["results"]
    assert not [result["error"] for result in results if "error" in result]
    return list(results)


def cells(output: str) -> list[list[str]]:
    """The rows of the tables that were printed, heads and rules included."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in output.splitlines() if line[:1] == "|"]


# ------------------------------------------------------------------------------------------------ trials


def trials_of(directory: Path, code: str, monkeypatch: pytest.MonkeyPatch, **options: Any) -> trials.Trials:
    """Trials of a function with this code."""
    (directory / "subject.py").write_text(code)
    monkeypatch.syspath_prepend(directory)
    monkeypatch.delitem(sys.modules, "subject", raising=False)
    given = {"device": "cpu", "out": directory / "out.json", "budget": 60.0, "timeout": 30.0, **options}
    return trials.Trials("subject", importlib.import_module("subject").measure, argparse.Namespace(**given))


def test_a_trial_is_a_process_with_the_allocators_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    code = """
import os
def measure(size): return {"pid": os.getpid(), "allocator": os.environ.get("PYTORCH_ALLOC_CONF"), "twice": 2 * size}
"""
    many = trials_of(tmp_path, code, monkeypatch)
    first, second = many.run(size=1), many.run(size=2)
    assert first["pid"] != second["pid"]
    assert (first["twice"], second["twice"], first["allocator"]) == (2, 4, None)
    assert many.matching(size=2) == [second]
    assert json.loads((tmp_path / "out.json").read_text())["results"] == [first, second]


@pytest.mark.parametrize(
    ("body", "timeout", "first", "last"),
    [
        ("raise ValueError('no such row')", 60, "the process ended with status 1", "ValueError: no such row"),
        ("import os; os.kill(os.getpid(), 9)", 60, "the process ended with status -9", ""),
        (
            "import sys, time; print('half way', file=sys.stderr, flush=True); time.sleep(60)",
            10,  # so much longer than a process takes to start that it has said something
            "half way",
            "no result after 10 s",
        ),
    ],
)
def test_a_failed_trial_keeps_what_it_said(
    body: str, timeout: int, first: str, last: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = trials_of(tmp_path, f"def measure(): {body}", monkeypatch, timeout=timeout).run()["error"]
    assert error.startswith(first) and error.endswith(last), error


def test_no_trial_runs_after_the_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    many = trials_of(tmp_path, "def measure(): return {}", monkeypatch, budget=0.0)
    assert "budget of 0 s was spent" in many.run()["error"]


def test_running_out_of_memory_is_a_result_also_behind_another_error() -> None:
    def measure(behind: bool) -> dict[str, Any]:
        try:
            raise torch.OutOfMemoryError("tried to allocate 2 GiB")
        except torch.OutOfMemoryError as error:
            if behind:
                raise RuntimeError("unit 'blocks.3'") from error
            raise

    assert trials.catch_out_of_memory(measure, behind=False) == {"out_of_memory": "tried to allocate 2 GiB"}
    assert trials.catch_out_of_memory(measure, behind=True) == {"out_of_memory": "tried to allocate 2 GiB"}
    with pytest.raises(TypeError):
        trials.catch_out_of_memory(measure)


def test_a_script_runs_as_a_user_runs_it(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    command = [sys.executable, "-m", "benchmarks", "buckets", "--tiny", "--device", "cpu", "--out", str(out)]
    command += ["--stages", "2", "--powers", "14", "--steps", "1"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    (result,) = json.loads(out.read_text())["results"]
    assert result["bucket_size"] == 2**14 and result["allocated"] > 0, result
    assert "latency of a network is not in these figures" in done.stdout
    assert cells(done.stdout)[2][:3] == ["tiny", "2", "2^14"]


# ------------------------------------------------------------------------------------------------ searches


@given(
    base=st.integers(0, 10**6),
    slope=st.integers(1, 10**4),
    waste=st.floats(1.0, 1.6),
    limit=st.integers(1, 10**7),
    within=st.sampled_from([0.02, 0.05]),
)
def test_a_search_ends_between_what_fits_and_what_does_not(
    base: int, slope: int, waste: float, limit: int, within: float
) -> None:
    def attempt(size: int) -> dict[str, Any]:
        allocated = base + slope * size
        if allocated > limit:
            return {"out_of_memory": ""}
        return {"allocated": allocated, "reserved": min(waste * allocated, limit)}  # caches are given back in need

    found = search.find_largest(attempt, (4, 8), limit, within, attempts=40)
    fits = max(0, (limit - base) // slope)
    assert found.error is None and found.fails is not None
    assert found.fits <= fits < found.fails and found.is_within(within)
    if waste < 1.1 and 20 <= fits <= 400:
        assert len(found.tried) <= 9


def test_a_search_ends_with_an_error_that_is_not_of_memory() -> None:
    found = search.find_largest(lambda size: {"error": "no such preset"} if size > 4 else {}, (4, 8), 1e9)
    assert (found.fits, found.fails, found.error) == (4, None, "no such preset")


def test_a_search_is_not_led_astray_by_a_line_that_bends() -> None:
    def attempt(size: int) -> dict[str, Any]:
        held = 10**6 + size + 10**5 * max(0, size - 16)  # bytes: nearly flat, then steep
        return {"out_of_memory": ""} if held > 3 * 10**6 else {"allocated": held, "reserved": held}

    found = search.find_largest(attempt, (4, 8), 3e6)
    assert (found.fits, found.fails) == (35, 36)


def test_a_search_ends_after_the_given_attempts() -> None:
    found = search.find_largest(lambda size: {"allocated": 1, "reserved": 1}, (4, 8), 1e9, attempts=4)
    assert found.fits == 32 and found.error is not None and found.error.startswith("ended after 4 attempts")


# ------------------------------------------------------------------------------------------------ what is shared


def test_a_table_is_markdown(capsys: pytest.CaptureFixture[str]) -> None:
    Record("stages", "cpu", None).show("stages", ("GPT", "", "GB"), [["1.4B", 12.345, None], ["é", 0.5, 1234.5]])
    assert capsys.readouterr().out.splitlines() == [
        "| GPT  |       | GB   |",
        "|------|-------|------|",
        "| 1.4B | 12.35 |      |",
        "| é    | 0.500 | 1234 |",
    ]


def test_what_is_missing_is_left_out_of_the_figures() -> None:
    runs = [{"ms": 1.0}, {"error": ""}, {"ms": 4.0}, {"ms": 2.0}]
    assert (median(runs, "ms"), spread(runs, "ms")) == (2.0, 3.0)
    assert median(runs, "reserved") is spread(runs, "reserved") is None
    assert ratio(None, 2.0) is ratio(2.0, None) is None
    assert ratio(3.0, 2.0) == 1.5


@pytest.mark.parametrize("module", [record, scaling])
def test_examples_in_docstrings(module: ModuleType) -> None:
    found = doctest.testmod(module)
    assert found.attempted > 0 and found.failed == 0


def test_memory_is_counted_on_a_cpu_and_its_limit_kept() -> None:
    with training.Memory("cpu", limit=10**7) as measured:
        kept = torch.zeros(10**6, dtype=torch.uint8)
        torch.zeros(5 * 10**6, dtype=torch.uint8)
        measured.restart()
        assert measured.now == 10**6
        torch.zeros(3 * 10**6, dtype=torch.uint8)
        assert measured.peak()["allocated"] == 4 * 10**6
        torch.zeros(10**7, dtype=torch.uint8)
        with pytest.raises(torch.OutOfMemoryError, match="11000000 bytes were allocated, but the limit is 10000000"):
            measured.wait()
        measured.restart()  # the limit holds for what comes after
        assert measured.peak()["allocated"] == kept.nbytes


def test_the_frugal_loss_is_the_same_loss() -> None:
    config = GPTConfig(vocab_size=32, context=8, layers=2, heads=2, width=8)
    torch.manual_seed(0)
    plain, frugal = GPT(config), workloads.FrugalGPT(config)
    frugal.load_state_dict(plain.state_dict())
    tokens = torch.randint(32, (3, 8))
    losses = [model(tokens, tokens) for model in (plain, frugal)]
    torch.testing.assert_close(*losses)
    for loss in losses:
        loss.backward()
    for (name, ours), theirs in zip(frugal.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, msg=name)
    torch.testing.assert_close(frugal(tokens), plain(tokens))


def test_workloads_have_the_sizes_in_their_names() -> None:
    psi = [f"{workloads.WORKLOADS[name].config.parameters / 1e9:.1f}" for name in workloads.GPTS]
    assert psi == ["1.4", "1.4", "0.2", "7.7", "0.0"]


# ------------------------------------------------------------------------------------------------ the scripts


def test_memory_in_steady_state(inline: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = run(memory.main, tmp_path, "--steps", "1")
    shown = {row[1]: row for row in cells(capsys.readouterr().out)}
    by_variant = {result["variant"]: result for result in results}
    assert shown["zeroshard"][2] == f"{by_variant['zeroshard']['allocated'] / 1e9:.2g}"
    assert shown["fsdp2"][5] == "1.00"
    assert shown["zeroshard"][5] == f"{by_variant['zeroshard']['reserved'] / by_variant['fsdp2']['reserved']:.2f}"


def test_memory_under_stress_tells_the_step_at_which_it_ran_out(
    inline: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(memory, "FILLED", 1.05)  # a little less than the longest sequence needs
    tiny = replace(workloads.WORKLOADS["tiny"], batch=16)  # enough to be most of the memory
    monkeypatch.setitem(workloads.WORKLOADS, "tiny", tiny)
    monkeypatch.setattr(memory, "lengths", lambda context, steps: [context // 4, context // 2, context][:steps])
    results = run(memory.main, tmp_path, "--stress", "--steps", "3")
    ends = [(result["completed"], result.get("ended_by")) for result in results if "limit" in result]
    assert ends[:2] == [(2, "memory")] * 2
    assert "bytes were allocated" in results[-2]["said"]
    assert [row[2] for row in cells(capsys.readouterr().out)[2:4]] == ["2 of 3"] * 2


def test_lengths_vary_up_to_the_context_and_are_the_same_in_every_run() -> None:
    lengths = memory.lengths(1024, 200)
    assert lengths == memory.lengths(1024, 200)
    assert set(lengths) == set(range(256, 1025, 64))


def test_the_cost_of_recomputation(inline: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = run(memory.activations, tmp_path, "--only", "steps", "--steps", "1", "--repeats", "1")
    assert [result["mode"] for result in results] == ["torch", "zeroshard", "zeroshard+cpu"]
    assert cells(capsys.readouterr().out)[2][4] == "1.00"


def test_the_largest_batch(
    inline: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(memory, "MODES", {mode: memory.MODES[mode] for mode in ("none", "zeroshard")})
    monkeypatch.setattr(memory, "FIRST", {"none": (2, 4), "zeroshard": (2, 4)})
    monkeypatch.setattr(memory, "LIMIT_ON_CPU", 2e6)
    none, kept = run(memory.activations, tmp_path, "--only", "batches", "--frugal")
    assert none["fails"] - none["fits"] == kept["fails"] - kept["fits"] == 1
    assert 0 < none["fits"] < kept["fits"]
    assert {attempt["left"] for attempt in kept["tried"].values()} == {0}
    assert cells(capsys.readouterr().out)[3][1:4] == ["zeroshard", str(kept["fits"]), str(kept["fails"])]


def test_the_stages(inline: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(stages.main, tmp_path, "--batch", "1", "--world", "2")
    rows = cells(capsys.readouterr().out)[2:]
    assert [row[1] == row[3] for row in rows] == [True] * 4  # as predicted
    assert [float(row[5].rstrip("Ψ")) for row in rows] == pytest.approx([2, 2, 2, 3], rel=0.01)


def test_the_cores(
    inline: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cores, "MOST", 2)
    monkeypatch.setitem(cores.CORES, "new", "zeroshard")  # the old one again: both have the same figures
    monkeypatch.setitem(cores.CORES, "gone", "zeroshard.no_such_core")
    given = ("--cases", "48x512", "--stages", "3", "--cores", "old,new,floor,gone", "--repeats", "2")
    (result,) = run(cores.main, tmp_path, *given)
    assert [one["core"] for one in result["runs"]] == ["old", "new", "floor", "gone", "old", "new", "floor"]
    old, new, floor, gone, *_ = result["runs"]
    assert old["opcodes"] > 10 * old["calls"] > 0 == floor["calls"] == floor["opcodes"]
    exact = ("calls", "opcodes", "allocated", "loss")
    assert [new[key] for key in exact] == [old[key] for key in exact]
    assert gone["error"].endswith("No module named 'zeroshard.no_such_core'\n")
    printed = capsys.readouterr().out
    lines = [json.loads(line) for line in printed.splitlines() if line.startswith('{"case"')]
    assert [line["core"] for line in lines] == [one["core"] for one in result["runs"]]
    heads, _, *rows = cells(printed)
    assert rows[1][heads.index("bytecodes / old")] == rows[2][heads.index("ms / floor")] == "1.00"


@pytest.mark.parametrize(("name", "parts"), [("C1", 1), ("C5", 25)])
def test_one_rank_of_the_papers_mesh(name: str, parts: int) -> None:
    work = replace(workloads.WORKLOADS["tiny"], model="frugal gpt", batch=1)
    result = paper.measure(name, asdict(work), "cpu", 1e9)
    whole = work.config.parameters
    assert whole / 16 < result["parameters_here"] < whole / 8  # its part of matrices, norms and positions whole
    assert result["steps"] == 2 and result["allocated"] > 4 * result["parameters_here"]
    here = 4 * result["parameters_here"] / parts  # bytes of fp32 gradients
    assert here <= result["held"]["gradients, device"] < 2 * here  # a small model's shards are mostly alignment


def test_the_papers_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a model of memory: 0.6 GB a layer, less 0.1 for what a configuration saves."""
    saves = {"C1": 0, "C2": 1, "C3": 2, "C4": 3, "C5": 4}

    def measured(measure: trials.Measure, arguments: dict[str, Any], seconds: float) -> dict[str, Any]:
        each = 0.6e9 - 0.1e9 * saves[arguments["configuration"]]
        assert (measure, arguments["limit"]) == (paper.measure, 32e9)
        held = each * arguments["shape"]["layers"]
        return {"out_of_memory": "full"} if held > 32e9 else {"allocated": held, "reserved": held}

    monkeypatch.setattr(trials, "run_process", measured)
    paper.main(["--device", "cpu", "--out", str(tmp_path / "out.json")])
    rows = cells(capsys.readouterr().out)
    cached = {tuple(row[:3]): row[4:7] for row in rows if row[0] in ("40B", "100B")}
    assert cached["40B", "16", "C1"] == ["29.70", "30.00", "1.01"]
    assert cached["100B", "32", "C4"] == ["29.60", "", ""]
    largest = {row[0]: (row[2], *row[3:6], row[8]) for row in rows if row[0] in saves}
    assert largest["C1"] == ("40", "43.52", "1.09", "53", "54")
    assert int(largest["C5"][3]) <= 160 < int(largest["C5"][4]) <= 1.02 * int(largest["C5"][3])


# ------------------------------------------------------------------------------------------------ tiers of memory


@given(
    psi=st.integers(10**6, 10**11),
    space=st.fixed_dictionaries({tier: st.floats(1e9, 1e12) for tier in ("device", "host", "disk")}),
    taken=st.fixed_dictionaries({tier: st.floats(0, 1e9) for tier in ("device", "host")}),
)
def test_tiers_hold_every_byte_and_are_filled_equally(
    psi: int, space: dict[str, float], taken: dict[str, float]
) -> None:
    filled = offload.fill(psi, space, taken)
    assert sum(filled.held.values()) == pytest.approx(16 * psi + sum(taken.values()))
    on_host, on_disk = filled.optimizer.get("host", 0), filled.optimizer.get("disk", 0)
    assert on_host >= 0 and on_disk >= 0 and on_host + on_disk <= 1 + 1e-9
    assert filled.held["disk"] == pytest.approx(12 * on_disk * psi, abs=1e-6 * psi)
    near = 2 * (1 - filled.parameters.get("host", 0)) + 14 * (1 - on_host - on_disk)
    assert filled.held["device"] == pytest.approx(near * psi + taken["device"], rel=1e-6)
    if min(on_host, on_disk, 1 - on_host - on_disk) > 1e-6:  # no tier is empty, so none is limited by what it may hold
        for tier, nbytes in filled.held.items():
            assert nbytes == pytest.approx(filled.share * space[tier])


def test_a_tier_is_not_overfilled() -> None:
    space = {"device": 100e9, "host": 60e9}
    assert offload.fill(10**9 * 155 // 16, space, {}).explain_excess(space) is None
    refused = offload.fill(10**9 * 156 // 16, space, {}).explain_excess(space)
    assert refused == "58.5 GB are needed on host, but at most 58.2 may be used"


def test_the_largest_model_over_three_tiers(
    inline: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measure_depth, fails = offload.measure_depth, [True]

    def first_fails(**given: Any) -> dict[str, Any]:
        if fails.pop() if fails else False:
            raise torch.OutOfMemoryError("full")
        return measure_depth(**given)

    monkeypatch.setattr(offload, "measure_depth", first_fails)
    results = run(offload.main, tmp_path, "--only", "disk", "--directory", str(tmp_path))
    shown = [row for row in cells(capsys.readouterr().out) if row[0].isdigit()]
    assert [row[-1].partition(":")[0] for row in shown] == ["not started", "full", ""]
    assert [int(row[0]) - int(shown[-1][0]) for row in shown] == [2, 1, 0]
    last = results[-1]
    work = workloads.Workload(**last["shape"])
    buffers, held = offload.buffers_of(work, on_gpu=False), last["filling"]["held"]
    assert held["disk"] == pytest.approx(last["disk"], rel=0.03)  # to vectors
    assert held["host"] - buffers["host"] <= last["host"] <= held["host"]  # buffers are smaller on a CPU


def test_no_run_begins_for_which_the_host_has_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "available_host_memory", lambda: 10**9)
    needs = {"optimizer": {"host": 1.0}, "parameters": {}, "held": {"host": 2e9}}
    with pytest.raises(torch.OutOfMemoryError, match="2 GB of host memory are needed, 1 are left"):
        offload.measure("depth", shape={}, device="cpu", filling=needs, host_bytes=1, directory=None, steps=1)


def test_a_step_with_states_on_the_host(
    inline: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(offload, "WARMUP", 1)
    results = run(offload.main, tmp_path, "--only", "step", "--steps", "1", "--repeats", "1")
    shown = {row[0]: row for row in cells(capsys.readouterr().out)[2:]}
    ms = {result["variant"]: result["ms"] for result in results}
    floor = max(ms["device floor"], ms["host floor"])
    assert float(shown["zeroshard"][3]) == pytest.approx(ms["zeroshard"] / floor, rel=0.01)
    assert shown["FSDP2, CPUOffloadPolicy"][4] == "1.00"
    assert all(float(shown[name][7]) > 0 for name in offload.OURS)  # bytes on the host


# ------------------------------------------------------------------------------------------------ the other suites


def test_float8_and_bf16_of_a_gpt_and_a_curve(inline: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = ("7.6B, batch 4", "curve")
    results = run(fp8.main, tmp_path, "--rows", *rows, "--steps", "1", "--curve-steps", "2")
    assert [(result["row"], result["variant"]) for result in results] == [
        (row, variant) for row in rows for variant in ("bf16", "fp8")
    ]
    assert results[1]["float8"] == "8 layers; not head (in keep_bf16)"
    assert results[1]["communicated"] < results[0]["communicated"]
    assert len(results[3]["losses"]) == 2
    printed = cells(capsys.readouterr().out)
    assert [row[1] for row in printed[2:6]] == ["bf16", "fp8"] * 2
    assert printed[6] == ["mean loss of steps", "1 to 1", "2 to 2"]
    assert [row[0] for row in printed[8:]] == ["bf16", "fp8"]
    assert [float(cell) for cell in printed[8][1:]] == pytest.approx(results[2]["losses"], abs=0.01)


def test_the_update_alone(
    inline: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(step, "kernel_for", step.kernel_for)  # restored afterwards
    (result,) = run(optimizer.update, tmp_path, "--clip", "--precision", "fp16")
    assert result["way"] == "torch's way" and result["numel"] == 9216
    assert result["gb_s"] == pytest.approx(28 * 9216 / result["ms"] / 1e6)
    assert result["taken"] >= 4 * 9216  # gradients in fp32
    row = capsys.readouterr().out.splitlines()[-1]
    assert row.startswith("| torch's way") and row.split("|")[-2].strip() == "1.00"
    with pytest.raises(ValueError, match="a CPU has no update in one pass"):
        optimizer.measure_update("one pass", 9216, "cpu", 1, False, "bf16")


def measure_rank(rank: int, measure: Callable[..., dict[str, Any]], arguments: dict[str, Any]) -> dict[str, Any]:
    """Be one rank of a benchmark, in a process that has torch imported already."""
    return measure(**arguments)


@pytest.fixture
def pooled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the ranks of suites run in processes that have torch imported already."""

    def run_pooled(measure: Any, ranks: int, backend: str = "gloo", **arguments: Any) -> dict[str, Any]:
        assert backend == "gloo"
        return dict(json.loads(json.dumps(run_processes(ranks, measure_rank, measure, arguments)[0])))

    for suite in (checkpoint, local_steps, pretrained, sockets):
        monkeypatch.setattr(suite, "run_ranks", run_pooled)


def test_checkpoints_are_saved_and_loaded_by_two_ranks(
    pooled: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (result,) = run(checkpoint.main, tmp_path, "--repeats", "1", "--directory", str(tmp_path))
    psi = 2 * 12 * 64**2  # and a little more
    assert result["ranks"] == 2 and 12 * psi < result["bytes"] < 15 * psi
    assert {row[0] for row in cells(capsys.readouterr().out)} >= {"raw", "zeroshard", "fsdp2", "host copy"}


def test_a_transformers_model_is_loaded_by_two_ranks(pooled: None, tmp_path: Path) -> None:
    results = run(pretrained.main, tmp_path, "--ranks", "2", "--directory", str(tmp_path))
    assert [result["variant"] for result in results] == [*pretrained.VARIANTS, *pretrained.VARIANTS]
    for result in results:
        share = result["read"] / result["file"]
        assert share == 1 if result["variant"].startswith("transformers") else 0.45 < share < 0.55
        assert result["seconds"] >= result["own seconds"] > 0


@pytest.mark.parametrize(
    ("main", "arguments"),
    [
        (optimizer.host_adam, ["--threads", "1", "--kinds", "copy of memory", "torch fused, bf16"]),
        (optimizer.muon, []),
        (planner.main, ["--cases", "0.4B, fp32", "2.7B, stage 1 of 16"]),
        (offload.main, ["--only", "fractions", "--steps", "1", "--repeats", "1"]),
        (paper.main, ["--figures", "7", "--parallel", "1"]),
        (peers.main, ["--steps", "1", "--repeats", "1", "--variants", "FSDP2", "zeroshard 3"]),
        (scaling.main, ["--steps", "1", "--only", "depth", "--variants", "floor", "zeroshard 3"]),
        (local_steps.main, ["--variants", "local_steps=8", "--steps", "16"]),
        (sockets.main, ["--turns", "1"]),
        (sockets.main, ["--wire", "--ranks", "2"]),
    ],
)
def test_a_suite_runs_on_tiny_shapes(
    main: Any, arguments: list[str], inline: None, pooled: None, tmp_path: Path
) -> None:
    machine = tmp_path / "machine.json"
    machine.write_text('{"like": "cpu"}')
    given = [*arguments, "--machine", str(machine)] if main is planner.main else arguments
    assert run(main, tmp_path, *given)


# ------------------------------------------------------------------------------------------- ranks that share a GPU


def test_a_step_of_ranks_that_share_a_gpu_is_its_bytes_and_its_computation() -> None:
    """They take turns: nothing overlaps with computation. Bytes share the link, latencies of two streams overlap."""
    config = GPTConfig(vocab_size=512, context=32, layers=3, heads=4, width=128)
    traced = shared_gpu.trace_gpt(config, precision="bf16", backwards=1)

    def predict(strategy: Strategy, ranks: int, latency: float, **rates: float) -> Any:
        kinds = {"all-gather": "gather", "reduce-scatter": "reduce", "all-to-all": "exchange"}
        links = {kind: Link(bandwidth=rates.get(name, 1e18), latency=latency) for kind, name in kinds.items()}
        return shared_gpu.SharedDevice(ranks, "NVIDIA H200", 2.0, links).predict(traced, strategy)

    for strategy in wire.VARIANTS.values():
        slow = predict(strategy, 4, 0.0, gather=4e4, reduce=2e4, exchange=3e4)
        reduce_rate = 3e4 if strategy.reduce_wire else 2e4
        bytes_seconds = 0.75 * (slow.traffic["all-gather"] / 4e4 + slow.traffic["reduce-scatter"] / reduce_rate)
        assert slow.step == pytest.approx(2 + bytes_seconds, rel=0.01)
        assert predict(strategy, 2, 0.0).step == pytest.approx(2.0, rel=0.01)
        for ranks in (2, 4):  # 5 units; in every stage their all-gathers and reductions, one after the other, or beside
            late = predict(strategy, ranks, 100.0).step / (100.0 * (ranks - 1))
            assert late == pytest.approx(2 * 5, abs=1.5)


def test_sizes_of_the_socket_runs_are_those_of_their_names() -> None:
    for name, billions in (("150m", 0.162), ("1.4b", 1.415)):
        assert GPTConfig(**wire.SHAPES[name]).parameters / 1e9 == pytest.approx(billions, rel=0.01)  # type: ignore[arg-type]
