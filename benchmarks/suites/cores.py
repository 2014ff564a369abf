"""The new core beside the old one and the floor: a step's time, its host time, its Python and its memory.

    python -m benchmarks cores                                        # all cases, on a GPU
    python -m benchmarks cores --cases 1.4b-16,7.6b --stages 3 --cores old,floor
    python -m benchmarks cores --tiny --device cpu --cores old,floor

One rank of many: the others do not exist and nothing is sent; memory, compute and the work of the host are real. With
`--backend fake` collectives are torch's: its reduce-scatter writes nothing, so losses may become NaN, which makes
products cheaper. bf16 over fp32 master weights, fused AdamW. *Floor* is forward and backward alone of the unsharded
bf16 model.

A case and a stage are a process of their own. It builds the cores in turns (old, new, floor, old, …), one at a time,
and deletes each before the next; *left* is what was still allocated by then. No turns begin after `--turn-limit`
seconds. Steps are timed from end to end, and the
host does not wait between them. *Host* is the time until a step on few tokens returns, so that the GPU has little to
do. Calls and bytecodes are those of one step in zeroshard's own files but its models, by unit of the old core; *all
calls* counts every file. With `--trace`, each run also says what one step launches: calls of the CUDA runtime and
kernels, by name, how often and how long. Losses only show that values are finite: the cores gather different copies of
their shards.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import import_module
from itertools import pairwise, product
from types import FrameType
from typing import Any

import torch

import zeroshard
from benchmarks.harness.collectives import ECHO
from benchmarks.harness.record import Result, failure, median, ratio, spread
from benchmarks.harness.training import Memory, measure_steps, one_rank
from benchmarks.harness.trials import ERROR_LENGTH, Trials, make_parser
from benchmarks.harness.variants import Job, Loop, adamw
from benchmarks.harness.workloads import WORKLOADS, Workload
from zeroshard.config.config import Config
from zeroshard.models import GPTPreset
from zeroshard.sharding import plan_units

CORES = {"old": "zeroshard", "new": "zeroshard.core", "floor": ""}  # where shard() is
HOST = "tiny-cpu"
CASES = {  # the first begins the server of all processes, so with one thread
    HOST: Workload.gpt(GPTPreset(24, 2, 16, context=8, vocabulary=64), 1, recomputed=False, ranks=2),
    "1.4b-16": replace(WORKLOADS["1.4B, batch 16"], recomputed=False, ranks=2),
    "1.4b-2": replace(WORKLOADS["1.4B, batch 2"], recomputed=False, ranks=2),
    "48x512": replace(WORKLOADS["0.2B (48×512), batch 2"], ranks=2),
    "7.6b": WORKLOADS["7.6B, batch 4"],
}
STAGES = (1, 3)
WARMUP = {"cuda": 6, "cpu": 3}  # steps: on a GPU, the old core searches its segments in the first few
TIMED_MS, FEWEST, MOST = 1500.0, 5, 30  # steps that are timed: as many as take this long, within bounds
HOST_STEPS, SHORT = 5, 16  # for the host's time: steps, and tokens a sequence
TRACED_NAMES = 15  # of each kind
OLD, BOTH = ("old",), ("old", "floor")
COLUMNS: dict[str, tuple[str, float | None, Sequence[str]]] = {  # key → head, divisor (None: units), compared with
    "ms": ("ms", 1.0, BOTH),
    "host_ms": ("host ms", 1.0, BOTH),
    "calls": ("calls", None, OLD),
    "opcodes": ("bytecodes", None, OLD),
    "all_calls": ("all calls", None, ()),
    "allocated": ("allocated GB", 1e9, OLD),
    "reserved": ("reserved GB", 1e9, OLD),
    "left": ("left GB", 1e9, ()),
    "loss": ("loss", 1.0, ()),
}
PACKAGE = os.path.dirname(zeroshard.__file__) + os.sep
MODELS = os.path.join(PACKAGE, "models") + os.sep


def train(job: Job, core: str, stage: int) -> Loop:
    """Build the model on a core."""
    model = job.model()
    if core == "floor":
        return Loop(job, model.bfloat16())
    shard = import_module(CORES[core]).shard
    model, optimizer = shard(model, adamw(model), stage=stage, precision="bf16", mesh=job.mesh)
    return Loop(job, model, optimizer)


def time_steps(training: Loop, steps: int, device: str) -> list[float]:
    """Return the ms between the ends of steps. The host does not wait for a GPU in between."""
    if device != "cuda":
        ends = []
        for _ in range(1 + steps):
            training.step()
            ends.append(1e3 * time.perf_counter())
        return [end - begin for begin, end in pairwise(ends)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(1 + steps)]  # type: ignore[no-untyped-call]
    for event in events:
        training.step()
        event.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) for begin, end in pairwise(events)]


def time_host(training: Loop, steps: int, device: str) -> float:
    """Return the ms until a step on short sequences returns, while the GPU is idle; on a CPU, processor time."""
    clock = time.perf_counter if device == "cuda" else time.process_time
    times = []
    for _ in range(2 + steps):
        if device == "cuda":
            torch.cuda.synchronize()
        begin = clock()
        training.step(SHORT)
        times.append(1e3 * (clock() - begin))
    return statistics.median(times[2:])


def count_python(step: Callable[[], object]) -> dict[str, int]:
    """Run two steps; return the second's Python calls and bytecodes in zeroshard's own files, and all its calls.

    Backward runs on this thread meanwhile. A generator that goes on counts as a call. Python 3.13 traces the bytecodes
    of a function from its second call.
    """
    counts: dict[str, int] = {}

    def enter(frame: FrameType, event: str, _: object) -> Any:
        counts["all_calls"] += 1
        file = frame.f_code.co_filename
        if not file.startswith(PACKAGE) or file.startswith(MODELS):
            return None
        counts["calls"] += 1
        frame.f_trace_lines = False
        frame.f_trace_opcodes = True
        return inside

    def inside(frame: FrameType, event: str, _: object) -> Any:
        counts["opcodes"] += event == "opcode"
        return inside

    sys._getframe().f_trace_opcodes = True  # before settrace, or Python 3.12 traces none
    with torch.autograd.set_multithreading_enabled(False):
        sys.settrace(enter)
        try:
            for _ in range(2):
                counts |= dict.fromkeys(("calls", "opcodes", "all_calls"), 0)
                step()
        finally:
            sys.settrace(None)
    return counts


def trace_step(training: Loop) -> dict[str, list[tuple[str, int, float]]]:
    """Return the longest calls of the CUDA runtime and the longest kernels of a step: name, count, ms in all."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        training.step()
        torch.cuda.synchronize()
    found: dict[str, list[tuple[str, int, float]]] = {"runtime": [], "kernels": []}
    for event in profiler.key_averages():
        if event.key.startswith("cuda"):
            found["runtime"].append((event.key, event.count, round(event.self_cpu_time_total / 1e3, 2)))
        elif event.self_device_time_total and event.device_type != torch.autograd.DeviceType.CPU:
            found["kernels"].append((event.key[:80], event.count, round(event.self_device_time_total / 1e3, 2)))
    return {kind: sorted(rows, key=lambda row: -row[2])[:TRACED_NAMES] for kind, rows in found.items()}


def measure_core(job: Job, core: str, stage: int, with_python: bool, with_trace: bool) -> Result:
    """Build the model on a core, warm it up and measure its steps."""
    is_gpu = job.device == "cuda"
    left = torch.cuda.memory_allocated() if is_gpu else 0
    with Memory(job.device) as memory:
        training = train(job, core, stage)
        found = measure_steps(training, memory, WARMUP[job.device], steps=1)
    steps = min(MOST, max(FEWEST, round(TIMED_MS / found["ms"])))
    times = time_steps(training, steps, job.device)
    peaks = memory.peak() if is_gpu else found  # on a CPU, the profiler that counts memory takes time
    assert training.loss is not None
    loss = training.loss.item()
    python = count_python(training.step) if with_python else {}
    traced = trace_step(training) if with_trace and is_gpu else {}
    return {
        "core": core,
        "ms": round(statistics.median(times), 3),
        "host_ms": round(time_host(training, HOST_STEPS, job.device), 3),
        "steps": steps,
        "loss": loss,
        "allocated": peaks["allocated"],
        "reserved": peaks["reserved"],
        "left": left,
        **python,
        **traced,
    }


def measure(
    case: str,
    stage: int,
    cores: Sequence[str],
    device: str,
    repeats: int,
    turn_limit: float,
    tiny: bool,
    backend: str,
    trace: bool,
) -> Result:
    """Measure the cores in turns, in this process. No turns begin after the limit, and none of a core that failed."""
    begin = time.perf_counter()
    torch.set_num_threads(1)
    work = CASES[case].tiny if tiny else CASES[case]
    with torch.device("meta"):
        units = len(plan_units(work.build(), None, Config().bucket_size))
    runs: list[Result] = []
    waiting = list(cores)
    with one_rank(device, (work.ranks,), backend=backend) as mesh:
        for repeat in range(repeats):
            if repeat and time.perf_counter() - begin > turn_limit:
                break
            for core in tuple(waiting):
                try:
                    first = repeat == 0
                    run = measure_core(Job(work, device, mesh), core, stage, first, with_trace=first and trace)
                except Exception:
                    run = {"core": core, "error": traceback.format_exc()[-ERROR_LENGTH:]}
                    waiting.remove(core)
                runs.append(run)
                gc.collect()
                torch.cuda.empty_cache()
                print(json.dumps(run), flush=True)  # if this process is stopped, its error has what it printed
    return {"units": units, "runs": runs}


def compare(result: Result) -> list[dict[str, object]]:
    """Return the rows of a case and a stage: for each core, the head of a column → its value."""
    if "runs" not in result:
        return [{"case": result["case"], "stage": result["stage"], "note": failure(result)}]
    runs = {core: [run for run in result["runs"] if run["core"] == core] for core in result["cores"]}
    rows = []
    for core, own in runs.items():
        row: dict[str, object] = {"case": result["case"], "stage": result["stage"], "core": core}
        row["repeats"] = sum("ms" in run for run in own)
        for key, (head, divisor, others) in COLUMNS.items():
            value = median(own, key)
            row[head] = ratio(value, divisor or result["units"])
            if key == "ms":
                row["spread"] = spread(own, key)
            for other in others:
                row[f"{head} / {other}"] = ratio(value, median(runs.get(other, ()), key))
        row["note"] = next((failure(run) for run in own if "error" in run), "")
        rows.append(row)
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    """Measure all cases, and print a line of JSON for each run and a table."""
    parser = make_parser(__doc__, repeats=3, turn_limit=45)
    parser.add_argument("--cases", help=f"of {','.join(CASES)} (default: those for the device)")
    parser.add_argument("--cores", default=",".join(CORES), help="(default: %(default)s)")
    parser.add_argument("--stages", type=int, nargs="+", default=STAGES)
    parser.add_argument("--backend", choices=(ECHO, "fake"), default=ECHO)
    parser.add_argument("--trace", action="store_true", help="what one step launches, on a GPU")
    chosen = parser.parse_args(argv)
    default = ",".join(CASES) if chosen.device == "cuda" or chosen.tiny else HOST
    cases, cores = (chosen.cases or default).split(","), chosen.cores.split(",")
    if unknown := [*(set(cases) - set(CASES)), *(set(cores) - set(CORES))]:
        parser.error(f"no such case or core: {', '.join(unknown)}")
    given = {"cores": cores, "repeats": chosen.repeats, "turn_limit": chosen.turn_limit}
    trials = Trials("cores", measure, chosen, **given, tiny=chosen.tiny, backend=chosen.backend, trace=chosen.trace)
    rows = []
    for case, stage in product(cases, chosen.stages):
        result = trials.run(case=case, stage=stage, device="cpu" if case == HOST else chosen.device)
        for run in result.get("runs", [result]):
            print(json.dumps({"case": case, "stage": stage, **run}), flush=True)
        rows += compare(result)
    heads = list(dict.fromkeys(head for row in rows for head in row))
    trials.show("cores", heads, [[row.get(head) for head in heads] for row in rows])
