"""The benchmarks against the peers: that all train the same, that what is sent is counted equally, and how it is shown.

Trials run in this process but for those of real ranks, which are processes whatever happens.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from processes import wait_until_gone

from benchmarks.harness import trials, variants, workloads
from benchmarks.harness.ranks import run_ranks
from benchmarks.harness.record import ROOT
from benchmarks.harness.variants import adamw
from benchmarks.harness.workloads import Adapter, SplitLinear, replace_linear
from benchmarks.suites import peers, scaling
from zeroshard.models import GPT, GPTConfig
from zeroshard.train.metrics import flops_per_token

SMALL = workloads.Workload(layers=3, heads=2, width=32, batch=2, sequence=8, vocabulary=32, ranks=4)
ALONE = replace(SMALL, place="alone", ranks=1)
REPEATED = "1.4B, batch 2, accumulated 8 times"  # as tiny as the others, it is the same data twice a step
HOLDING = ("DDP", "FSDP2", workloads.ACCUMULATED[1])  # those that hold reductions back until the last backward
BEFORE = peers.WARMUP["cpu"]  # steps before those that are timed, in a process of its own
ONE_BY_ONE = (  # what ranks do
    "from benchmarks.suites.peers import measure_rank; work = given.pop('work'); "
    "return {'found': [measure_rank(**given | {'row': row, 'variant': name}) for row, name in work]}"
)
DEEPSPEED = [name for name in variants.VARIANTS if name.startswith("DeepSpeed")]


@pytest.fixture(autouse=True)
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(peers.WARMUP, "cpu", 1)


def measured(row: workloads.Workload, variant: str, backend: str = "fake_echo") -> dict[str, Any]:
    with peers.open_mesh(row, "cpu", backend) as mesh:
        return peers.measure_variant(variants.Job(row, "cpu", mesh), variant, steps=1)


# ------------------------------------------------------------------------------------------------ the same work


@pytest.mark.parametrize("kind", ["gpt", "lora", "experts", "convolutions", "accumulated"])
def test_all_variants_train_equally(kind: str) -> None:
    row = replace(ALONE, accumulate=2) if kind == "accumulated" else replace(ALONE, model=kind)
    row = replace(row, recomputed=kind in ("gpt", "lora"))
    more = {
        "gpt": ["DDP", "zeroshard 0", workloads.OWN, workloads.KEPT],
        "accumulated": ["DDP", *workloads.ACCUMULATED],
    }
    names = ["FSDP2", "zeroshard 3", *more.get(kind, [])]
    want = measured(row, "plain")["loss"]
    for name in names:
        assert measured(row, name)["loss"] == pytest.approx(want, rel=1e-4), name
    assert measured(row, "floor")["loss"] != pytest.approx(want, rel=1e-4)  # it does not learn


@pytest.mark.parametrize("name", ["floor", "FSDP2", "zeroshard 3"])
def test_one_of_many_computes_with_values_that_all_ranks_draw(name: str) -> None:
    """Norms among them, so that what is said of a token is as good as nothing."""
    assert measured(SMALL, name)["loss"] == pytest.approx(math.log(SMALL.vocabulary), rel=1e-3)


def test_every_row_can_be_built_and_has_its_variants() -> None:
    for name, row in workloads.WORKLOADS.items():
        assert row.variants[0] == "floor" and set(row.variants) <= set(variants.VARIANTS), name
        loss = row.tiny.build()(*row.tiny.inputs("cpu"))
        assert loss.ndim == 0 and loss.requires_grad, name
    assert len(workloads.ON_GPU) >= 10 and not set(workloads.ON_CPU) & set(workloads.ON_GPU)


def test_operations_are_those_of_the_model_without_recomputation() -> None:
    row = replace(SMALL, accumulate=2)
    found = measured(row, "floor")
    matrices = sum(p.numel() for name, p in row.build().named_parameters() if p.ndim == 2 and "blocks" in name)
    each = flops_per_token(matrices + row.vocabulary * row.width, 0, row.layers, row.width, row.sequence)
    assert found["flops"] == each * row.items
    assert found["parameters"] == sum(parameter.numel() for parameter in row.build().parameters())


def test_adapters_begin_at_nothing_and_are_all_that_is_trained() -> None:
    config = GPTConfig(vocab_size=32, context=8, layers=2, heads=2, width=8)
    model, tokens = GPT(config), torch.randint(32, (2, 8))
    want = model(tokens)
    adapted = replace_linear(model.requires_grad_(False), Adapter)
    names = {name.rpartition(".")[2] for name, p in adapted.named_parameters() if p.requires_grad}
    assert names == {"down", "up"}
    torch.testing.assert_close(model(tokens), want)


def test_a_divided_model_is_the_same_in_more_parameters() -> None:
    config = GPTConfig(vocab_size=32, context=8, layers=2, heads=2, width=8)
    model, tokens = GPT(config), torch.randint(32, (2, 8))
    before, want, total = len(list(model.parameters())), model(tokens), config.parameters
    split = replace_linear(model, lambda layer: SplitLinear(layer, 4))
    torch.testing.assert_close(split(tokens), want)
    assert len(list(model.parameters())) == before + 3 * scaling.LAYERS * config.layers
    assert sum(parameter.numel() for parameter in model.parameters()) == total


# ------------------------------------------------------------------------------------------------ what is sent


@pytest.mark.parametrize(
    ("variant", "volume"),
    [("DDP", 2), ("FSDP2", 3), ("zeroshard 0", 2), ("zeroshard 1", 2), ("zeroshard 2", 2), ("zeroshard 3", 3)],
)
def test_what_is_sent_is_counted_equally(variant: str, volume: int) -> None:
    """FSDP2's root is gathered once, so it sends a little less; shards of a small model are partly alignment."""
    psi = sum(parameter.numel() for parameter in SMALL.build().parameters())
    found = measured(SMALL, variant)
    assert found["elements"] == pytest.approx(volume * psi, rel=0.08)
    assert found["bytes"] == 4 * found["elements"]
    assert found["bytes"] == found.get("own_bytes", found["bytes"])
    if volume == 3:  # DDP's reducer wants of a collective what the fake backend does not give
        fake = measured(SMALL, variant, backend="fake")
        assert (fake["kinds"], fake["bytes"]) == (found["kinds"], found["bytes"])


def test_a_group_of_one_sends_nothing() -> None:
    found = measured(ALONE, "DDP")
    assert (found["collectives"], found["bytes"]) == (1, 0)


# ------------------------------------------------------------------------------------------------ how it is shown


def cells(output: str, head: str) -> dict[str, dict[str, str]]:
    """The table under a line that begins so: by the first cell, cells by their heads."""
    lines = output[output.index(f"\n{head}") + 1 :].splitlines()[1:]
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line[:1] == "|"]
    end = next((at for at, line in enumerate(lines) if not line), len(lines))
    return {row[0]: dict(zip(table[0], row, strict=True)) for row in table[2:end]}


def test_every_figure_is_next_to_the_floor_and_the_best_peer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ms = {"floor": 100.0, "plain": 180.0, "FSDP2": 150.0, "zeroshard 2": 120.0, "zeroshard 3": 130.0}
    tried: list[str] = []

    def known(measure: Any, arguments: dict[str, Any], seconds: float) -> dict[str, Any]:
        tried.append(variant := arguments["variant"])
        if variant == "DDP":
            return {"error": "a stack\nRuntimeError: no such thing"}
        size = {"parameters": 1e9, "flops": 5e13} if variant == "floor" else {"elements": 2e9, "bytes": 4e9}
        each = ms[variant] + 2 * tried.count(variant) - 2
        memory = {"allocated": each * 1e8, "reserved": each * 1.1e8}
        return {"ms": each, "host_ms": 5.0, "collectives": 3, **size, **memory}

    monkeypatch.setattr(trials, "run_process", known)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(peers, "gpu_peak_flops", lambda *_: 1e15)
    chosen = [*ms, "DDP", *DEEPSPEED]
    row = "1.4B, batch 16, alone"
    peers.main(["--device", "cpu", "--rows", row, "--variants", *chosen, "--out", str(tmp_path / "out.json")])
    output = capsys.readouterr().out
    shown = cells(output, row)
    assert tried.count("DDP") == 1 and tried[:3] == ["floor", "plain", "DDP"]  # interleaved; a failure not repeated
    assert tried.count("zeroshard 2") == 3 and tried[-1] == "zeroshard 3"
    ours = shown["zeroshard 2"]
    assert (ours["ms a step"], ours["spread"], ours["of the floor"], ours["of the best peer"]) == (
        "122", "4.00", "1.20", "0.803",
    )  # fmt: skip
    assert (ours["tokens/s"], ours["TFLOPS"], ours["MFU"]) == (f"{16 * 1024 / 0.122:.0f}", "410", "0.410")
    assert (ours["allocated of the best peer"], ours["of allocated"], ours["sent Ψ"]) == ("0.803", "1.10", "2.00")
    assert (ours["allocated of the floor"], ours["host of the floor"]) == ("1.20", "1.00")
    assert shown["DDP"]["note"] == "RuntimeError: no such thing" and shown["DDP"]["ms a step"] == ""
    assert {shown[name]["note"] for name in DEEPSPEED} == {"not installed"}


def test_slopes_are_those_of_units_and_of_parameters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    costs = {"floor": (0.1, 0.001), "FSDP2": (0.4, 0.03), "zeroshard 3": (0.2, 0.001)}  # ms a block, a parameter

    def known(measure: Any, arguments: dict[str, Any], seconds: float) -> dict[str, Any]:
        row = scaling.point(arguments["axis"], arguments["size"], "cpu")
        block, parameter = costs[arguments["variant"]]
        host = 5 + block * row.layers + parameter * scaling.count("parameters", row)
        return {"host_ms": host, "ms": 2 * host}

    monkeypatch.setattr(trials, "run_process", known)
    scaling.main(["--device", "cpu", "--out", str(tmp_path / "out.json")])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| a ")]
    found = {tuple(cell.strip() for cell in line.split("|")[1:3]): line.split("|")[3:6] for line in lines}
    per = {key: [float(cell) for cell in row] for key, row in found.items()}
    assert per["a parameter", "FSDP2"] == pytest.approx([30, 29, 60])
    assert per["a parameter", "zeroshard 3"] == pytest.approx([1, 0, 2], abs=1e-9)
    assert per["a block", "zeroshard 3"] == pytest.approx([204, 100, 408])
    assert per["a rank", "FSDP2"] == pytest.approx([0, 0, 0], abs=1e-9)


@pytest.mark.parametrize(("axis", "tensors"), [("ranks", 0), ("depth", 12), ("parameters", 1)])  # of one more
def test_points_are_measured(axis: str, tensors: int) -> None:
    points = [scaling.point(axis, size, "cpu", tiny=True) for size in scaling.TINY[axis]]
    more = scaling.count(axis, points[1]) - scaling.count(axis, points[0])
    held = [len(list(row.build().parameters())) for row in points]
    assert more > 0 and held[1] - held[0] == tensors * more
    found = scaling.measure(axis, scaling.TINY[axis][1], "zeroshard 3", "cpu", steps=2, tiny=True)
    assert len(found["all_ms"]) == 2 and found["host_ms"] > 0 and found["allocated"] > 0


# ------------------------------------------------------------------------------------------------ real ranks


def trained_by_one(row: workloads.Workload, over: int, steps: int) -> list[float]:
    """The first rank's loss in each step, where one process trains plainly on the data of that many ranks."""
    jobs = [variants.Job(row, "cpu", SimpleNamespace(get_rank=lambda rank=rank: rank)) for rank in range(over)]
    model = jobs[0].model()
    optimizer, first = adamw(model), []
    for _ in range(steps):
        losses = torch.stack([model(*job.inputs()) for job in jobs])
        losses.mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        first.append(losses[0].item())
    return first


def check_losses(found: list[dict[str, Any]], work: list[tuple[str, str]]) -> None:
    """After the same steps every variant is where one process would be.

    All begin with the same values and compute in fp32, in other orders. The tolerance is a hundred times the rounding
    of a loss, and a hundredth of what a missed update makes, or a step on this rank's data alone. (The scale of
    gradients is not seen: AdamW takes it out.)
    """
    row = peers.choose("tiny", tiny=True, over=2)
    both, own = (trained_by_one(row, over, BEFORE + 1) for over in (2, 1))
    assert min(abs(other / both[-1] - 1) for other in (both[-2], own[-1])) > 1e-3
    assert {which: result["loss"] for which, result in zip(work, found, strict=True)} == {
        which: pytest.approx(both[-1], rel=1e-5) for which in work
    }


def test_ranks_are_processes_that_train_as_one_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All variants on the same two processes: to start them takes longer than to train."""
    act = subject(tmp_path, monkeypatch, ONE_BY_ONE)
    names = [name for name in workloads.REPLICATED if name not in (*workloads.FLOORS, *DEEPSPEED)]
    work = [*(("tiny", name) for name in names), *((REPEATED, name) for name in HOLDING)]
    found: list[dict[str, Any]] = []

    def one_by_one(function: Any, over: int, **given: Any) -> dict[str, Any]:
        assert function is peers.measure_rank
        found.extend(run_ranks(act, over, work=work, **given)["found"])
        return found[work.index((given["row"], given["variant"]))]

    monkeypatch.setattr(peers, "run_ranks", one_by_one)
    psi = sum(parameter.numel() for parameter in workloads.WORKLOADS["tiny"].tiny.build().parameters())
    for _ in range(3):
        found.clear()
        ours = peers.measure("tiny", "zeroshard 3", "cpu", steps=1, tiny=True, over=2)
        if ours["allocated"] > 2 * 4 * psi:  # else torch's profiler has missed some of it
            break
    assert ours["elements"] == pytest.approx(3 * psi, rel=0.08)
    assert ours["allocated"] > 2 * 4 * psi  # half of four fp32 states, and more
    assert ours["host_ms"] > 0 and not torch.distributed.is_initialized()
    check_losses(found, work)


def test_deepspeed_trains_as_one_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On processes of its own, where it may change torch as it likes."""
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed")
    act = subject(tmp_path, monkeypatch, ONE_BY_ONE)
    work = [(row, name) for row in ("tiny", REPEATED) for name in DEEPSPEED]
    found = run_ranks(act, 2, work=work, steps=1, tiny=True)["found"]
    check_losses(found, work)
    given = {"row": "tiny", "variant": "DeepSpeed 2", "device": "cpu", "steps": 1, "tiny": True, "over": 2}
    whole = trials.run_process(peers.measure, given, seconds=120)
    psi = sum(parameter.numel() for parameter in workloads.WORKLOADS["tiny"].tiny.build().parameters())
    assert whole["loss"] == found[work.index(("tiny", "DeepSpeed 2"))]["loss"]
    assert whole["elements"] == pytest.approx(3 * psi, rel=0.01)  # its bucket is all-reduced, its parameters gathered
    assert 2 * 4 * psi < whole["allocated"] < 8 * 4 * psi  # no buffer for 5e8 elements


def subject(directory: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> Any:
    """A function with this body, in a module that ranks can import."""
    (directory / "subject.py").write_text(f"import os, torch.distributed as dist\ndef act(**given):\n    {body}\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(ROOT), str(directory))))
    monkeypatch.syspath_prepend(directory)
    monkeypatch.delitem(sys.modules, "subject", raising=False)
    return importlib.import_module("subject").act


def test_a_rank_that_fails_ends_the_others_and_is_heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    act = subject(tmp_path, monkeypatch, "assert dist.get_rank() == 0, 'rank one is ill'; dist.barrier()")
    with pytest.raises(RuntimeError, match="rank 1 failed") as failure:
        run_ranks(act, 2)
    assert str(failure.value).strip().endswith("AssertionError: rank one is ill")


def test_ranks_end_with_the_process_that_started_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when it is killed while they wait for each other forever."""
    body = (
        f"open(f'{tmp_path}/{{os.getpid()}}.pid', 'w'); dist.get_rank() or dist.barrier(); __import__('time').sleep(99)"
    )
    subject(tmp_path, monkeypatch, body)
    code = "import subject; from benchmarks.harness.ranks import run_ranks; run_ranks(subject.act, 2)"
    parent = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    pids: list[int] = []
    try:
        end = time.monotonic() + 60
        while len(pids) < 2 and time.monotonic() < end:
            time.sleep(0.05)
            pids = [int(path.stem) for path in tmp_path.glob("*.pid")]
        assert len(pids) == 2
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        wait_until_gone(pids)
    finally:
        parent.kill()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def test_ranks_are_refused_on_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        peers.main(["--device", "cuda", "--ranks", "2"])
    assert "--ranks 2 needs a CPU, where ranks run over gloo: give --device cpu" in capsys.readouterr().err
