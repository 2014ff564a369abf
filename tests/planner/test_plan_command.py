"""`zeroshard plan` as a user runs it: what it prints, writes and refuses."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

import zeroshard
from zeroshard import planner
from zeroshard.cli.main import main
from zeroshard.models import GPT, GPTConfig
from zeroshard.planner import predict_traffic
from zeroshard.planner.commands.open_model import open_model
from zeroshard.planner.commands.plan_text import (
    COLUMNS,
    fit_summary,
    format_table,
    python_calls,
    sort_plans,
    summary_rows,
    train_command,
)
from zeroshard.planner.footprint import MemoryUsage
from zeroshard.planner.machines.machine import Machine
from zeroshard.planner.plan_json import TIME_PARTS, plans_to_dict
from zeroshard.planner.plans import Plans
from zeroshard.planner.strategy import Strategy
from zeroshard.utils import version

pytestmark = pytest.mark.usefixtures("traced_once")

QUICK = "--batch 8 --tensor 1 --checkpoint none --offload none".split()

OWN = '''
import torch
from torch import nn


class Net(nn.Module):
    """A convolutional net."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten())
        self.head = nn.Linear(16 * 8 * 8, 10)

    def forward(self, images):
        return self.head(self.layers(images))


class Graph(nn.Module):
    """Messages over the edges of a graph."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

    def forward(self, nodes, edges):
        for layer in self.layers:
            messages = layer(nodes)[edges[:, 0]]
            nodes = nodes + torch.zeros_like(nodes).index_add(0, edges[:, 1], messages)
        return nodes.mean()


class Experts(nn.Module):
    """A mixture of experts, each given as many tokens as all others."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(32, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(4))

    def forward(self, tokens):
        flat = tokens.flatten(0, 1)
        weights = self.router(flat).softmax(-1)  # [tokens, experts]
        result = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            best = weights[:, number].topk(flat.shape[0] // 4)
            result = result.index_add(0, best.indices, expert(flat[best.indices]) * best.values[:, None])
        return result


class Stubborn(nn.Linear):
    def forward(self, x):
        return super().forward(x) if x.sum().item() > 0 else x


def conv():
    return Net(), torch.empty(1, 3, 8, 8)


def graph():
    return Graph(), lambda batch: (torch.empty(20 * batch, 32), torch.zeros(60 * batch, 2, dtype=torch.int64))


def experts():
    return Experts(), lambda batch: torch.empty(batch, 16, 32)


def bare():
    return Net()


def images(batch):
    return torch.empty(batch, 3, 8, 8)


def fails():
    raise KeyError("weights")


def no_batch(batch):
    return batch / 0


def number():
    return 7


def pair():
    return 7, 8


def stubborn():
    return Stubborn(4, 4), torch.empty(1, 4)


answer = 42
'''


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module in the current directory, under a name of its own."""
    name = f"own_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(OWN)
    (tmp_path / f"{name}_broken.py").write_text("import nothing_of_that_name\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return name


def run(*argv: str) -> int:
    """Run `zeroshard plan` and return its exit status."""
    try:
        return main(["plan", *argv])
    except SystemExit as error:  # argparse's
        return int(str(error.code))


def planned(**options: Any) -> Plans:
    """What the command with QUICK is to tell."""
    model, inputs, _ = open_model("tiny")
    return zeroshard.plan(
        model, inputs, **{"devices": 2, "batch": 8, "tensor": 1, "checkpoint": "none", "offload": None, **options}
    )


@pytest.fixture(scope="module")
def plans() -> Plans:
    """All ways to train a small model on a machine that is short of memory."""
    model, inputs, _ = open_model("tiny")
    machine = Machine.resolve("h100", context=0, workspace=0, memory="16MB")
    return zeroshard.plan(model, inputs, devices=4, machine=machine, batch=16, tensor=[1, 2])


# ------------------------------------------------------------------------------------------------ as a user


def test_help_is_printed_without_torch() -> None:
    code = "import sys, zeroshard.cli.main as cli\n"
    code += "try: cli.main(['plan', '--help'])\nfinally: print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("False\n")
    for flag in "--devices --machine --memory --batch --micro-batch --sequence --stage --tensor --checkpoint".split():
        assert flag in done.stdout
    assert "usage: zeroshard plan" in done.stdout and "h200" in done.stdout


def test_the_command_prints_costs_and_how_to_run_it() -> None:
    ran = [sys.executable, "-m", "zeroshard", "plan", "tiny", "--devices", "2", "--stage", "1,3", *QUICK]
    done = subprocess.run(ran, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    expected = planned(stage=(1, 3))
    lines = done.stdout.splitlines()
    assert lines[0] == ("model     GPT, 4 layers, 4 heads, width 128, 1,071,872 parameters, 128 tokens a sample")
    assert lines[1].startswith("machine   2 × h100, one node: 85.00 GB a device, 2.00 TB of host memory")
    assert format_table(expected, tokens=128) in done.stdout
    assert expected.reason in lines
    assert "  " + train_command(expected.best.strategy, "tiny", 2, Machine.resolve("h100"), "bf16") in lines
    assert "  " + python_calls(expected.best.strategy, 2, Machine.resolve("h100"), "bf16") in lines


def test_json_has_every_figure_of_every_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.json"
    assert run("tiny", "--devices", "2", "--json", str(file), *QUICK) == 0
    told, expected = json.loads(file.read_text()), planned()
    assert told == json.loads(
        json.dumps(plans_to_dict(expected, model="GPT, 4 layers, 4 heads, width 128", tokens=128))
    )
    assert expected.reason == told["reason"] and expected.reason in capsys.readouterr().out
    assert len(told["plans"]) == len(expected.candidates) and told["plans"][told["chosen"]]["fits"]
    assert Machine.from_json(json.dumps(told["machine"])) == expected.machine
    assert told["version"] == 1 and told["software"]["torch"] == torch.__version__
    for given, plan in zip(told["plans"], expected.candidates, strict=True):
        held = plan.footprint
        assert given["device_bytes"] == plan.memory and given["state_bytes"] == held.states
        assert sum(given["peak_bytes"].values()) == pytest.approx(held.peak.total)
        stays = {kind: nbytes for kind, nbytes in given["state_bytes"].items() if kind != "gradients"}
        assert given["peak_bytes"]["states"] == sum(stays.values())
        assert given["peak_bytes"]["gradients"] in (0, given["state_bytes"]["gradients"])
        assert given["between_steps_bytes"] == held.between_steps and given["node_bytes"]["host"] == 2 * held.host
        assert given["seconds"]["step"] == plan.step_time.step and set(given["seconds"]) == {"step", *TIME_PARTS}
        assert given["samples_per_second"] * 128 == given["tokens_per_second"]
        backwards = plan.strategy.accumulate
        volume = {0: 2, 1: 2, 2: backwards + 1, 3: 3 * backwards}[plan.strategy.stage]  # the paper's, in Ψ
        assert given["data_parallel_bytes_per_parameter_byte"] == pytest.approx(volume, rel=0.01)


def test_json_on_standard_output_is_alone_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("tiny", "--devices", "2", "--stage", "2", "--json", "-", *QUICK) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["plans"][0]["strategy"] == {
        "stage": 2, "replicas": 1, "partition": "hybrid", "gather_dtype": None, "reduce_wire": None,
        "local_steps": 1, "tensor": 1, "checkpoint": "none", "offload": None,
        "micro_batch": 1, "accumulate": 4,
    }  # fmt: skip
    assert "1,071,872 parameters" in err


def test_offload_narrows_to_a_tier(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    narrow = "--micro-batch 2 --checkpoint none --tensor 1 --memory 20GB --json".split()
    assert run("tiny", "--devices", "2", "--offload", "host", *narrow, str(file)) == 0
    found = json.loads(file.read_text())["plans"]
    assert all(plan["node_bytes"] == {"host": 2 * plan["host_bytes"], "disk": 2 * plan["disk_bytes"]} for plan in found)
    assert all(
        plan["host_bytes"] > sum(tiers.get("host", 0) for tiers in plan["offloaded_bytes"].values()) > 0
        for plan in found
    )
    told = [plan["strategy"]["offload"] for plan in found]
    assert {"optimizer": {"host": 0.5}} in told and {"optimizer": {"host": 1.0}, "parameters": {"host": 1.0}} in told
    assert all(fractions and "disk" not in fractions["optimizer"] for fractions in told)
    assert run("tiny", "--devices", "2", "--offload", "disk", *narrow, str(file)) == 0
    told = [plan["strategy"]["offload"] for plan in json.loads(file.read_text())["plans"]]
    assert told and all("disk" in fractions["optimizer"] for fractions in told)


def test_8_bits_are_shown_where_they_are_allowed(capsys: pytest.CaptureFixture[str]) -> None:
    quick = ["plan", "tiny", "--devices", "16", *QUICK[2:], "--batch", "16", "--stage", "3", "--replicas", "2"]
    assert main(quick) == 0
    assert "8 bits" not in capsys.readouterr().out
    assert main([*quick, "--partition", "full", "--allow-lossy"]) == 0
    out = capsys.readouterr().out
    assert "int8 gather, int8 reduce" in out
    assert main([*quick, "--gather-dtype", "int8"]) == 0
    out = capsys.readouterr().out
    assert "--gather-dtype int8" in out and 'gather_dtype="int8"' in out and "reduce_wire" not in out
    assert main([*quick, "--reduce-wire", "int9"]) == 2
    assert "reduce_wire must be one of none, int8, fp8, got 'int9'" in capsys.readouterr().err


def test_muon_is_planned_and_its_owners_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["plan", "7.6b", "--devices", "64", "--optimizer", "muon", "--stage", "3", "--micro-batch", "4"]
    assert main([*argv, "--tensor", "1", "--checkpoint", "none"]) == 0
    output = capsys.readouterr().out
    assert (
        "whole parameters, 64 owners: the fullest has 134M elements (1.19 × the mean of 113M), 452.98 MB of states "
        "(1.00 ×), 12.4 TFLOP a step (1.14 ×); no assignment of whole parameters' work is below 1.14 ×"
    ) in output
    assert re.search(r"-m zeroshard train .* --optimizer muon\n", output)
    assert main([*argv, "--offload", "host"]) == 2
    assert "--offload host cannot be planned with --optimizer muon" in capsys.readouterr().err


def test_where_nothing_fits_the_status_is_1_and_the_nearest_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("gpt2", "--devices", "1", "--memory", "1GB", "--micro-batch", "2", "--offload", "none") == 1
    out = capsys.readouterr().out
    assert "nothing fits: even with stage 3, recomputing, inputs on the host, micro-batch 2" in out
    assert "per device, but a device has 1.00 GB" in out
    assert "to train with this plan" not in out and "chosen" not in out


def test_calibration_is_printed_kept_and_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert run("tiny", "--devices", "2", "--machine", "here", *QUICK) == 2
    assert "not been measured yet: run `zeroshard plan --calibrate`" in capsys.readouterr().err
    real = planner.calibrate
    monkeypatch.setattr(planner, "calibrate", lambda: real("cpu", tmp_path, seconds=0.1))
    assert run("--calibrate") == 0
    out = capsys.readouterr().out
    assert '"host_update": ' in out and f"saved in {tmp_path}" in out
    assert run("tiny", "--devices", "2", "--machine", "here", *QUICK) == 0
    here = Machine.resolve("here")
    assert f"2 × {here.name}" in capsys.readouterr().out


def test_the_machine_of_the_docs_is_one() -> None:
    page = (Path(__file__).parents[2] / "docs" / "planning.md").read_text(encoding="utf-8")
    described = re.findall(r"```json\n(.*?)```", page, re.S)
    machine = Machine.from_json(described[0])
    assert (machine.devices, machine.pcie, machine.outside.bandwidth) == (4, 25e9, 12e9)


# ------------------------------------------------------------------------------------------------ models


@pytest.mark.parametrize("kind", ["conv", "graph", "experts"])
def test_a_model_of_ones_own_is_planned(own: str, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    assert all(parameter.is_meta for parameter in open_model(f"{own}:{kind}")[0].parameters())
    assert run(f"{own}:{kind}", "--devices", "4", "--batch", "32", "--json", "plan.json") == 0
    out, told = capsys.readouterr().out, json.loads(Path("plan.json").read_text())
    assert "samples" in out and "tokens" not in out
    assert "zeroshard train" not in out and "zeroshard.shard(" in out
    assert told["tokens_per_sample"] is None and told["chosen"] is not None
    assert {plan["strategy"]["stage"] for plan in told["plans"]} == {0, 1, 2, 3}
    held = {
        plan["strategy"]["micro_batch"]: sum(plan["peak_bytes"].values())
        for plan in told["plans"]
        if plan["strategy"]["stage"] == 0
    }
    assert sorted(held) == [1, 2, 4, 8] and held[8] > held[1]
    assert told["parameters"] == {"conv": 10_730, "graph": 3_168, "experts": 16_900}[kind]


def test_inputs_may_be_named_with_the_model(own: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(f"{own}:bare", "--devices", "2", "--stage", "3", *QUICK) == 2
    assert "the arguments of Net are not known: pass inputs=" in capsys.readouterr().err
    assert run(f"{own}:bare", "--devices", "2", "--stage", "3", "--inputs", f"{own}:images", *QUICK) == 0


def test_a_hugging_face_config_is_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 256}
    config = {"model_type": "llama", "num_attention_heads": 4, "max_position_embeddings": 512, **shape}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for given in (tmp_path, tmp_path / "config.json"):
        model, inputs, description = open_model(str(given))
        assert next(model.parameters()).is_meta and inputs is None
        assert description == "LlamaForCausalLM, 2 layers, width 64"
    assert run(str(tmp_path), "--devices", "2", "--stage", "3", "--sequence", "64", *QUICK) == 0
    out = capsys.readouterr().out
    assert "LlamaForCausalLM, 2 layers, width 64" in out and "64 tokens a sample" in out
    assert f"zeroshard train --model {tmp_path} --ranks 2 --sequence 64" in out


def test_what_a_hugging_face_model_needs_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    monkeypatch.setitem(version.TESTED, "transformers", ("99.0", "99.0"))
    version.check_version.cache_clear()
    monkeypatch.delitem(sys.modules, "zeroshard.integrations.pretrained", raising=False)
    with pytest.raises(ImportError, match=r"needs transformers 99\.0 or newer \(found .*\): pip install"):
        open_model(str(tmp_path))


def test_a_presets_shape_may_be_changed() -> None:
    model, _, description = open_model("gpt2", layers=2, sequence=2048)
    assert description == "GPT, 2 layers, 12 heads, width 768" and model.config.context == 2048
    with pytest.raises(ValueError, match="unknown preset field 'depth': the fields are layers, heads"):
        open_model("gpt2", depth=2)


# ------------------------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("gpt2-xxl", "unknown model 'gpt2-xxl', and there is no such file: did you mean 'gpt2-xl'?"),
        ("OWN_:conv", "module 'OWN_' is not installed and not in"),
        ("OWN:", "expected module:callable"),
        ("OWN:convv", "did you mean 'conv'?"),
        ("OWN_broken:conv", "No module named 'nothing_of_that_name'"),
        ("OWN:fails", "OWN:fails() failed with KeyError: 'weights'"),
        ("OWN:number", "OWN:number must return an nn.Module"),
        ("OWN:pair", "got a tuple whose first element is int"),
        ("OWN:answer", "OWN:answer must be a function that returns a model, got int"),
        ("OWN:stubborn", "Stubborn cannot run on tensors without values"),
        ("OWN.py", "is not a valid JSON file"),
        (".", ". has no config.json"),
        ("OWN:conv --inputs OWN:answer", "OWN:answer must be a function of the batch size"),
        ("tiny --machine h1000", "unknown machine 'h1000': did you mean 'h100'?"),
        ("tiny --machine dgx2 --precision bf16", "'dgx2' does not support bf16, only fp32 and fp16"),
        ("tiny --memory lots", "memory is a number of bytes, or one with a unit as in '64GB'"),
        ("tiny --stage 4", "expected stages from 0 to 3 such as 3 or 1,2,3, got '4'"),
        ("tiny --stage all", "expected stages from 0 to 3 such as 3 or 1,2,3, got 'all'"),
        ("tiny --checkpoint some", "checkpoint must be one of none, recompute, host, got 'some'"),
        ("tiny --tensor 3", "devices (2) must be a multiple of the tensor degree (3)"),
        ("tiny --batch 7 --tensor 1", "batch 7 cannot be divided over 2 devices"),
        (
            "tiny --partition full",
            "--partition has no effect without the rows of a mesh: give --replicas above 1, or more",
        ),
        ("tiny --replicas 1 --partition full --devices 16", "--partition has no effect without the rows of a mesh"),
        ("--calibrate --batch 4", "--calibrate only measures this machine: leave out --devices, --batch"),
        ("tiny --batch 0", "expected a positive integer (got '0')"),
        ("tiny --devices 0", "expected a positive integer (got '0')"),
        ("tiny --devices 9999999", "expected at most 1,048,576 devices (got 9,999,999)"),
        ("tiny --memory 1kB", "memory must be more than the 629145600 bytes that the runtime uses"),
        ("OWN:conv --inputs OWN:no_batch", "inputs(1) failed with ZeroDivisionError: division by zero"),
        ("tiny --sequence " + "9" * 30, "zeroshard plan: "),
        ("tiny --machine cpu --offload host", "--offload host is not possible on a CPU, whose memory is the host's"),
        (
            "tiny --offload host --stage 0 --micro-batch 2 --tensor 1",
            "no plan can use --offload host here: use",
        ),
        ("tiny --json nowhere/plan.json", "cannot write nowhere/plan.json: nowhere is not a directory"),
        ("tiny --svg nowhere/plan.svg", "cannot write nowhere/plan.svg"),
        ("tiny --json .", "cannot write .: it is a directory: pass the name of a file"),
        ("tiny --json OWN.py/plan.json", "OWN.py/plan.json: OWN.py is not a directory"),
        ("", "the following argument is required: MODEL"),
    ],
)
def test_bad_input_gets_a_reason(own: str, capsys: pytest.CaptureFixture[str], argv: str, words: str) -> None:
    given = argv.replace("OWN", own).split()
    status = run(*(["--devices", "2"] if "--devices" not in given else []), *given)
    err = capsys.readouterr().err
    assert status == 2
    assert words.replace("OWN", own) in err.replace("\n", " ")
    assert err.startswith("zeroshard plan: ") and err.count("\n") == 1


def fail(*_: Any, **__: Any) -> None:
    raise AssertionError("work was done first")


@pytest.mark.parametrize("flag", ["--json", "--svg"])
def test_targets_are_looked_at_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flag: str
) -> None:
    monkeypatch.setattr("zeroshard.planner.commands.open_model.open_model", fail)
    monkeypatch.setattr(planner, "calibrate", fail)
    monkeypatch.setattr("os.access", lambda path, mode: False)  # permissions do not stop every user
    (tmp_path / "old").touch()
    for name, words in (
        ("none/new", f"{tmp_path / 'none'} is not a directory"),
        ("", "it is a directory"),
        ("new", f"no permission to write {tmp_path}"),
        ("old", "no permission to write"),
    ):
        assert run("tiny", "--devices", "2", "--calibrate", flag, str(tmp_path / name)) == 2
        said = capsys.readouterr()
        assert said.out == "" and f"cannot write {tmp_path / name}: {words}" in said.err


def test_a_picture_shows_memory_and_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.svg"
    assert run("tiny", "--devices", "4", "--machine", "h100", "--offload", "none", "--svg", str(path)) == 0
    assert f"picture: {path}" in capsys.readouterr().out
    text = " ".join(ElementTree.fromstring(path.read_text(encoding="utf-8")).itertext())
    for words in ("Memory of a device", "optimizer states", "memory of a device, 85.00 GB", "computing", ", chosen"):
        assert words in text


def test_a_reader_that_has_gone_is_not_a_failure() -> None:
    flags = "tiny --devices 2 --stage 3 --json -".split()
    code = f"import sys; from zeroshard.cli.main import main; sys.exit(main({['plan', *flags, *QUICK]!r}))"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        said = process.stderr.read().decode()
    assert process.returncode == 0 and "Error" not in said and "Broken" not in said


def test_devices_have_to_be_given(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("tiny") == 2
    assert "the following argument is required: --devices N" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------ the table


def test_the_table_has_what_fits_first_and_the_chosen_plan_marked(plans: Plans) -> None:
    text = format_table(plans, show_all=True)
    rows = text.splitlines()[2:]
    assert len(rows) == len(plans.fastest_per_strategy())
    fits = [" fits" in row for row in rows]
    assert True in fits and False in fits and fits == sorted(fits, reverse=True)
    marked = [row for row in rows if row.startswith("►")]
    assert len(marked) == 1 and marked[0].endswith("fits, chosen")
    assert marked[0].split()[1] == str(plans.best.strategy.stage)
    speeds = [plan.samples_per_second for plan in sort_plans(plans.candidates) if plan.fits]
    assert speeds == sorted(speeds, reverse=True)


def test_the_chosen_plan_stands_for_its_way_though_another_is_a_little_faster(plans: Plans) -> None:
    best = plans.best
    faster = replace(best.step_time, step=best.step_time.step * 0.995)
    larger = replace(best, footprint=replace(best.footprint, peak=MemoryUsage("", {"states": 20e6})))
    vars(larger)["step_time"] = faster
    both = replace(plans, candidates=(*plans.candidates, larger))
    assert both.best is best and larger in both.fastest_per_strategy()
    assert (
        best in both.best_per_strategy()
        and larger not in both.best_per_strategy()
        and len(both.best_per_strategy()) == len(both.fastest_per_strategy())
    )
    assert format_table(both, show_all=True).count("►") == 1


def test_by_default_the_rows_that_answer_most_are_shown(plans: Plans) -> None:
    shown = summary_rows(plans)
    assert plans.best in shown and len(shown) == len(set(map(id, shown))) < len(plans.fastest_per_strategy())
    mine = [plan.strategy for plan in shown if plan.strategy.tensor == plans.best.strategy.tensor]
    assert {choice.stage for choice in mine} == {0, 1, 2, 3}
    assert {plan.strategy.tensor for plan in shown} == {1, 2}
    assert {(c.stage, c.offload_summary, c.checkpoint) for c in mine} >= {
        (stage, "nothing", "none") for stage in range(4)
    }
    assert len(format_table(plans).splitlines()) == 2 + len(shown)


def test_the_columns_are_figures_of_the_plan(plans: Plans) -> None:
    far = next(
        plan
        for plan in plans.candidates
        if plan.strategy.offload_summary == "optimizer host" and plan.strategy.stage == 2
    )
    alone = replace(plans, candidates=(far,))
    heads, names, row = format_table(alone, tokens=10).splitlines()
    assert "tokens" in heads and "a second" in names
    for cell in ("opt. host", f"{far.memory / 1e6:.2f} MB", f"{far.samples_per_second * 10:,.0f}"):
        assert cell in row
    assert len(COLUMNS) >= 15


def test_a_row_says_what_there_is_too_little_of(plans: Plans) -> None:
    plan = plans.best
    assert fit_summary(plan) == "fits"
    small = replace(plan, machine=Machine.resolve(plan.machine, memory=int(plan.memory / 1.5)), shortfall="…")
    assert fit_summary(small) == "needs 1.50 × the device"
    far = next(plan for plan in plans.candidates if plan.footprint.host and plan.fits)
    host = int(far.footprint.host * 4 / 2)
    poor = replace(far, machine=Machine.resolve(far.machine, host_memory=host), shortfall="…")
    assert fit_summary(poor) == "needs 2.22 × the usable host memory"  # of which nine tenths may be taken
    disk = next(plan for plan in plans.candidates if plan.footprint.disk and plan.memory <= plan.machine.memory)
    full = replace(disk, machine=Machine.resolve(disk.machine, disk=int(disk.footprint.disk * 2)), shortfall="…")
    assert fit_summary(full) == "needs 2.00 × the disk"


# ------------------------------------------------------------------------------------------------ how to run it


CHOICES = [
    Strategy(stage=0, micro_batch=3),
    Strategy(stage=2, checkpoint="recompute", micro_batch=4, accumulate=2),
    Strategy(stage=1, tensor=2, checkpoint="host", offload=zeroshard.Offload(optimizer=("host", 0.5))),
    Strategy(offload=zeroshard.Offload(optimizer="host", parameters="host"), micro_batch=16),
    Strategy(stage=3, gather_dtype="int8", reduce_wire="fp8", micro_batch=2),
    Strategy(offload=zeroshard.Offload(optimizer="disk", parameters="host", directory="/path/on/a/fast/disk")),
]


@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: choice.description)
def test_the_flags_that_are_printed_make_the_choice(choice: Strategy) -> None:
    command = pytest.importorskip("zeroshard.train.commands.train")
    told = shlex.split(train_command(choice, "gpt2", 8, Machine.resolve("h100"), "bf16", sequence=256))
    assert told[:2] == ["zeroshard", "train"]
    options = command.read_options(told[2:])
    assert (options.model.model, options.model.sequence, options.sharding.ranks) == ("gpt2", 256, 8)
    assert (options.sharding.stage, options.sharding.tensor) == (choice.stage, choice.tensor)
    assert options.sharding.precision == "bf16"
    assert (options.sharding.gather_dtype, options.sharding.reduce_wire) == (choice.gather_dtype, choice.reduce_wire)
    assert options.model.has_activation_checkpointing == (choice.checkpoint != "none")
    assert options.model.offload_activations == (choice.checkpoint == "host")
    assert zeroshard.Offload.from_option(options.sharding.offload_config) == choice.offload
    assert (options.training.micro_batch, options.training.accumulate or 1) == (choice.micro_batch, choice.accumulate)


@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: choice.description)
def test_the_calls_that_are_printed_make_the_choice(choice: Strategy, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def shard(model: str, optimizer: str, **options: Any) -> tuple[str, str]:
        seen.update(options)
        return model, optimizer

    monkeypatch.setattr(zeroshard, "shard", shard)
    monkeypatch.setattr(zeroshard, "checkpoint_activations", lambda model, **options: seen.update(recompute=options))
    text = python_calls(choice, 8, Machine.resolve("h100"), "bf16")
    names = {"init_device_mesh": lambda kind, shape, mesh_dim_names: (kind, shape), "zeroshard": zeroshard}
    exec(text, names | {"model": "model", "optimizer": "optimizer"})
    assert (seen["stage"], seen["precision"], seen.get("offload")) == (choice.stage, "bf16", choice.offload)
    assert seen.get("mesh") == (("cuda", (8 // choice.tensor, choice.tensor)) if choice.tensor > 1 else None)
    assert (seen.get("gather_dtype"), seen.get("reduce_wire")) == (choice.gather_dtype, choice.reduce_wire)
    kept = {"none": None, "recompute": {}, "host": {"offload": True}}
    assert seen.get("recompute") == kept[choice.checkpoint]


def test_several_nodes_are_for_torchrun() -> None:
    told = train_command(Strategy(), "gpt2", 32, Machine.resolve("h100"))
    assert told.startswith("torchrun --nnodes 4 --nproc-per-node 8 … -m zeroshard train --model gpt2 --stage 3")
    assert "--ranks" not in told


@pytest.mark.parametrize(("devices", "nodes", "each"), [(12, 2, 6), (20, 4, 5), (9, 2, None), (17, 3, None)])
def test_as_many_ranks_are_printed_as_were_planned(devices: int, nodes: int, each: int | None) -> None:
    machine = Machine.resolve("h100", devices=6 if devices == 20 else 8)
    told = train_command(Strategy(), "gpt2", devices, machine)
    if each is not None:
        assert told.startswith(f"torchrun --nnodes {nodes} --nproc-per-node {each} … -m zeroshard train --model gpt2")
        assert nodes * each == devices
        return
    words, line = told.splitlines()
    assert words.startswith(f"# {devices} ranks do not divide evenly over {nodes} nodes: give torchrun each node's own")
    assert line.startswith("torchrun … -m zeroshard train --model gpt2")


def test_a_name_with_spaces_is_one_word_of_the_command() -> None:
    told = train_command(Strategy(), "my models/it's; rm", 8, Machine.resolve("h100"))
    assert shlex.split(told)[:4] == ["zeroshard", "train", "--model", "my models/it's; rm"]


def test_with_fp8_the_layer_that_training_keeps_in_bf16_is_planned_so(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "plan.json"
    given = (
        "gpt2 --devices 2 --stage 3 --tensor 1 --checkpoint none --offload none --sequence 64 --micro-batch 1".split()
    )
    assert main(["plan", *given, "--machine", "h100", "--precision", "fp8", "--json", str(file)]) == 0
    out = capsys.readouterr().out
    assert 'precision="fp8", keep_bf16=["head"]' in out and "--precision fp8" in out
    (found,) = json.loads(file.read_text())["plans"]
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab_size=50304, context=64, layers=12, heads=12, width=768))
    expected = predict_traffic(model, ranks=2, stage=3, precision="fp8", keep_bf16="head").step
    assert found["traffic_bytes"]["all-gather"] == pytest.approx(expected["all-gather"], rel=0.001)
