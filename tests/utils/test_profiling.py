"""What profilers show of a step: labels in order and nested, in a file that trace viewers open; errors before steps."""

from __future__ import annotations

import ast
import gzip
import json
import re
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from plain import sgd
from ranks import run_processes, run_threads
from torch import nn
from torch.profiler import ProfilerActivity
from zoo import make_net

import zeroshard
from zeroshard.utils import profiling

UNITS = ["embed", "blocks.0", "blocks.1", "head"]
STEPS = 2


class Model(nn.Module):
    """Four units that run one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Label(NamedTuple):
    """A label of zeroshard in a trace, with those around it, outermost first."""

    name: str
    around: tuple[str, ...]


def sharded(stage: int, **options: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    return zeroshard.shard(model, optimizer, stage=stage, units=[nn.Sequential], **options)


def train(model: nn.Module, optimizer: Any) -> None:
    model(torch.ones(2, 8)).sum().backward()
    optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()


def read(path: Path) -> dict[str, Any]:
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    found: dict[str, Any] = json.loads(data)
    return found


def labels(trace: dict[str, Any]) -> dict[str, list[Label]]:
    """The labels of each thread, by its name, in the order of their start; raise if they overlap without nesting."""
    events = trace["traceEvents"]
    threads = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    ranges = [e for e in events if e.get("cat") == "user_annotation" and e["name"].startswith("zeroshard: ")]
    found: dict[str, list[Label]] = {}
    for thread in {e["tid"] for e in ranges}:
        running: list[tuple[str, float]] = []  # name and end
        for event in sorted((e for e in ranges if e["tid"] == thread), key=lambda e: (e["ts"], -e["dur"])):
            end = event["ts"] + event["dur"]
            while running and running[-1][1] <= event["ts"]:
                running.pop()
            assert not running or end <= running[-1][1] + 0.01, (event, running)
            name = event["name"].removeprefix("zeroshard: ")
            found.setdefault(threads[thread], []).append(Label(name, tuple(name for name, _ in running)))
            running.append((name, end))
    return found


def collectives(names: list[str]) -> dict[str, tuple[int, int]]:
    """Count and bytes of the collectives, by kind."""
    matches = [re.fullmatch(r"([a-z-]+) \(.*, ([\d,]+) bytes\)", name) for name in names]
    counts: Counter[str] = Counter()
    nbytes: Counter[str] = Counter()
    for match in filter(None, matches):
        counts[match[1]] += 1
        nbytes[match[1]] += int(match[2].replace(",", ""))
    return {kind: (count, nbytes[kind]) for kind, count in counts.items()}


def traced(rank: int, directory: str, options: dict[str, Any]) -> Any:
    model, optimizer = sharded(**options)
    for _ in range(4):
        train(model, optimizer)
    with zeroshard.profile(model, trace=f"{directory}/trace.json") as profile:
        for _ in range(STEPS):
            train(model, optimizer)
    assert profile.trace == Path(directory) / f"trace-rank{rank}.json"
    counted = zeroshard.report(model).collectives
    return read(profile.trace), {kind: (traffic.count, traffic.bytes) for kind, traffic in counted.items()}


def expected_stage_3() -> list[Label]:
    """The labels of one step at stage 3, without collectives."""
    step, first, last = [Label("forward", ())], UNITS[0], UNITS[-1]
    for unit, before, after in zip(UNITS, [None, *UNITS], [*UNITS[1:], None], strict=False):
        step += [Label(f"reshard {before!r}", ("forward",))] if before else []
        step += [Label(f"unshard {unit!r}", ("forward",))] if unit == first else []  # later ones are prefetched
        step += [Label(f"wait for unshard {unit!r}", ("forward",))]
        step += [Label(f"unshard {after!r}", ("forward",))] if after else []
        step += [Label(f"forward {unit!r}", ("forward",))]
    step += [Label(f"reshard {last!r}", ()), Label("pre_backward", ())]
    backward = UNITS[::-1]
    for unit, before, after in zip(backward, [None, *backward], [*backward[1:], None], strict=False):
        around = (f"pre_backward {unit!r}",)
        step += [Label(around[0], ())]
        step += [Label(f"{what} {before!r}", around) for what in ("reduce gradients", "reshard")] if before else []
        step += [Label(f"unshard {unit!r}", around)] if unit == last else []
        step += [Label(f"wait for unshard {unit!r}", around)]
        step += [Label(f"unshard {after!r}", around)] if after else []
    around = ("finalize_backward",)
    step += [Label(around[0], ()), Label(f"reduce gradients {first!r}", around), Label("wait for reductions", around)]
    step += [Label(f"reshard {first!r}", around), Label("clip_grad_norm_", ())]
    return [*step, Label("update 4 slices (TorchUpdater)", ())]


def expected_stage_1() -> list[Label]:
    """The labels of one step at stage 1, without collectives."""
    step, backward = [Label("forward", ())], UNITS[::-1]
    for unit in UNITS:
        step += [Label(f"wait for unshard {unit!r}", ("forward",)), Label(f"forward {unit!r}", ("forward",))]
    step += [Label("pre_backward", ())]
    for unit, before in zip(backward, [None, *backward], strict=False):
        around = (f"pre_backward {unit!r}",)
        step += [Label(around[0], ())]
        step += [Label(f"{what} gradients {before!r}", around) for what in ("accumulate", "reduce") if before]
    around = ("finalize_backward",)
    step += [
        Label(around[0], ()),
        *(Label(f"{what} gradients {UNITS[0]!r}", around) for what in ("accumulate", "reduce")),
    ]
    step += [Label("wait for reductions", around), Label("clip_grad_norm_", ())]
    step += [Label("update 4 slices (TorchUpdater)", ())]
    return step + [Label(f"unshard {unit!r}", ()) for unit in UNITS]


@pytest.mark.parametrize(("stage", "expected"), [(3, expected_stage_3()), (1, expected_stage_1())])
def test_the_trace_of_a_step_has_labels_in_order_and_counts_the_collectives(
    stage: int, expected: list[Label], tmp_path: Path
) -> None:
    ranks = run_processes(2, traced, str(tmp_path), {"stage": stage})
    for rank, (trace, counted) in enumerate(ranks):
        processes = [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"]
        assert processes == [f"rank {rank}"] and trace["distributedInfo"] == {"rank": rank, "world_size": 2}
        found = labels(trace)["MainThread"]
        assert [label for label in found if "bytes)" not in label.name] == expected * STEPS
        of_steps = {kind: (count * STEPS, nbytes * STEPS) for kind, (count, nbytes) in counted.items()}
        assert collectives([label.name for label in found]) == of_steps
        for name, around in found:
            unit = re.fullmatch(r".* \((?:gather|reduce) unit (.*), .*\)", name)
            if unit is not None:  # inside what is done with that unit
                assert around[-1] == f"{'unshard' if 'gather' in name else 'reduce gradients'} {unit[1]}"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["trace-rank0.json", "trace-rank1.json"]


def test_the_worker_thread_of_offloaded_states_has_its_own_lane(tmp_path: Path) -> None:
    for trace, _ in run_processes(2, traced, str(tmp_path), {"stage": 2, "offload": {"optimizer": "host"}}):
        found = labels(trace)
        updates = [label.name for label in found["zeroshard update"]]
        for unit in UNITS:
            started = [name for name in updates if re.fullmatch(rf"start (speculative )?CPU update '{unit}'", name)]
            assert len(started) >= STEPS
            assert len([label for label in found["MainThread"] if label.name == f"wait for CPU update {unit!r}"]) >= 1


def one_rank(**options: Any) -> tuple[nn.Module, Any]:
    """A model of one rank that is unsharded and resharded as on many: see docs/architecture.md."""
    return sharded(3, precision="bf16", **options)


def test_recomputation_and_saves_have_labels(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = zeroshard.checkpoint_activations(Model(), blocks=["blocks.*"], offload=True)
    model, optimizer = zeroshard.shard(model, torch.optim.SGD(model.parameters()), stage=3, units=[nn.Sequential])
    with zeroshard.profile(model, trace=tmp_path / "a.json.gz") as profile:
        train(model, optimizer)
        zeroshard.save(tmp_path / "checkpoint", model, optimizer, wait=False).wait()
    assert profile.trace is not None
    found = [label.name for lane in labels(read(profile.trace)).values() for label in lane]
    assert [name for name in found if "recompute" in name] == ["recompute 'blocks.1'", "recompute 'blocks.0'"]
    assert found.count("offload activation") == 2
    assert {"save: copy parameters and buffers", "save: copy states"} <= set(found)


def test_a_forward_that_raises_ends_its_labels(tmp_path: Path) -> None:
    model, _ = one_rank()
    with zeroshard.profile(model, trace=tmp_path / "a.json") as profile:
        with pytest.raises(RuntimeError, match="shapes"):
            model(torch.ones(2, 9))
        model(torch.ones(2, 8)).sum().backward()
    assert profile.trace is not None
    forwards = [label for label in labels(read(profile.trace))["MainThread"] if label.name.startswith("forward")]
    units = [Label(f"forward {unit!r}", ("forward",)) for unit in UNITS]
    assert forwards == [Label("forward", ()), units[0], Label("forward", ()), *units]


@pytest.mark.parametrize("options", [{"stage": 1}, {"stage": 3}, {"stage": 3, "offload": {"optimizer": "host"}}])
def test_without_a_profiler_no_label_is_made(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def record(name: str) -> AbstractContextManager[None]:
        made.append(name)  # an exception would end the threads of CPU updates, which outlive the ranks
        return nullcontext()

    monkeypatch.setattr(profiling, "record_function", record)

    def body(rank: int) -> None:
        model, optimizer = sharded(**options)
        for _ in range(3):
            train(model, optimizer)

    run_threads(2, body)
    assert made == []
    model, _ = one_rank()
    with torch.profiler.profile(activities=[ProfilerActivity.CPU]):
        model(torch.ones(2, 8))
    assert "zeroshard: forward" in made


def test_labels_are_not_formatted_where_they_are_used() -> None:
    """Else they would be formatted without a profiler too."""
    sources = Path(zeroshard.__file__).parent
    calls = [
        (path.name, node)
        for path in sources.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "label"
    ]
    assert len(calls) > 20
    for name, call in calls:
        assert isinstance(call.args[0], ast.Constant), (name, call.lineno)
        assert not any(isinstance(part, ast.JoinedStr) for part in ast.walk(call)), (name, call.lineno)


def test_a_profiler_of_the_user_shows_the_labels_and_excludes_a_second_one(tmp_path: Path) -> None:
    model, optimizer = one_rank()
    with torch.profiler.profile(activities=[ProfilerActivity.CPU]) as theirs:
        with zeroshard.profile(model) as profile:  # without a trace: no second profiler
            train(model, optimizer)
        with pytest.raises(RuntimeError, match="a profiler is already running"):
            zeroshard.profile(model, trace=tmp_path / "a.json").__enter__()
    assert profile.trace is None
    names = {event.name for event in theirs.events()}
    assert {f"zeroshard: forward {unit!r}" for unit in UNITS} <= names
    with zeroshard.profile(model, trace=tmp_path / "a.json"):  # theirs has ended
        train(model, optimizer)
    assert [path.name for path in tmp_path.iterdir()] == ["a-rank0.json"]


def test_a_trace_that_cannot_be_written_is_an_error_before_the_steps(tmp_path: Path) -> None:
    model, _ = one_rank()
    (tmp_path / "old-rank0.json").write_text("{}")
    (tmp_path / "file").touch()
    for path, error, message in [
        ("trace.txt", ValueError, r"must end in a name with \.json or \.json\.gz, got '.*trace\.txt'"),
        ("missing/trace.json", FileNotFoundError, "missing is not a directory"),
        ("file/trace.json", FileNotFoundError, "file is not a directory"),
        ("old.json", FileExistsError, r"old-rank0\.json exists: pass another path, or delete it"),
        ("n" * 238 + ".json", OSError, "cannot write the trace .*name too long"),
    ]:
        with pytest.raises(error, match=message):
            zeroshard.profile(model, trace=tmp_path / path).__enter__()
        assert not torch.autograd.profiler._is_profiler_enabled
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "old-rank0.json"]
    assert (tmp_path / "old-rank0.json").read_text() == "{}"


def test_an_exception_inside_leaves_no_file_and_no_profiler(tmp_path: Path) -> None:
    model, optimizer = one_rank()
    with pytest.raises(KeyboardInterrupt), zeroshard.profile(model, trace=tmp_path / "a.json"):
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == [] and not torch.autograd.profiler._is_profiler_enabled
    train(model, optimizer)


def test_a_large_trace_keeps_its_labels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = one_rank()
    train(model, optimizer)  # the next steps prefetch
    found = []
    for name in ("full", "limited"):
        with zeroshard.profile(model, trace=tmp_path / f"{name}.json") as profile:
            train(model, optimizer)
        assert profile.trace is not None
        trace = read(profile.trace)
        found.append((len(trace["traceEvents"]), labels(trace)["MainThread"]))
        monkeypatch.setattr(profiling, "MAX_EVENTS", found[0][0] // 2)
    (full, full_labels), (limited, limited_labels) = found
    assert limited == full // 2
    assert limited_labels == full_labels


def test_any_name_gives_a_trace_that_is_json(tmp_path: Path) -> None:
    device = torch.device("cpu")
    with profiling.ChromeTrace(tmp_path / "a.json", device) as trace:
        for name in ('the "first"', "it's", "größe", "a\\b", "{}"):
            with profiling.label("unshard {!r}", name):
                pass
    found = [label.name for label in labels(read(trace.path))["MainThread"]]
    assert found == [f"unshard '{name}'" for name in ("the 'first'", "it's", "gr??e", "a//b", "{}")]
    other, quoted = profiling.ChromeTrace(tmp_path / "b.json", device), torch.profiler.record_function('a "b"')
    try:
        with other, quoted:
            pass
    except ValueError as error:  # before torch 2.15, which escapes quotes
        assert "Remove double quotes from the names" in str(error)
        assert [path.name for path in tmp_path.iterdir()] == ["a-rank0.json"]
    else:
        assert read(other.path)


def test_compiled_blocks_are_compiled_once_with_and_without_a_profiler() -> None:
    from torch._dynamo.testing import CompileCounter  # takes a second

    compiled = CompileCounter()
    torch._dynamo.reset()
    model = make_net()
    for block in model.blocks:
        block.compile(backend=compiled, fullgraph=True)
    model, optimizer = zeroshard.shard(model, sgd(model), stage=3, precision="bf16")

    def step() -> int:
        model(torch.zeros(1, 4, dtype=torch.int64)).sum().backward()
        optimizer.step()
        return compiled.frame_count

    graphs = step()
    with torch.profiler.profile(activities=[ProfilerActivity.CPU]) as found:
        assert step() == graphs > 0
    assert step() == graphs
    assert "zeroshard: forward 'blocks.0'" in {event.name for event in found.events()}
    torch._dynamo.reset()


def test_a_thread_that_the_profiler_does_not_name_gets_its_name() -> None:
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": 5, "args": {"name": "thread 5 (python)"}},
        {"ph": "X", "name": "zeroshard: step", "cat": "user_annotation", "pid": 1, "tid": 5, "ts": 1, "dur": 1},
        {"ph": "X", "name": "zeroshard: update", "cat": "user_annotation", "pid": 1, "tid": 7, "ts": 1, "dur": 1},
    ]
    profiling._name_lanes(events, "rank 0", {5: "MainThread", 7: "zeroshard update"})
    assert set(labels({"traceEvents": events})) == {"MainThread", "zeroshard update"}
