"""zeroshard, its peers and the floor: workloads, each trained by every library that can.

    python -m benchmarks peers                                                     # all workloads, on a GPU
    python -m benchmarks peers --rows "1.4B, batch 2" --variants FSDP2 "zeroshard 3" --repeats 5
    python -m benchmarks peers --device cpu --ranks 2                              # real ranks over gloo
    python -m benchmarks peers --tiny --device cpu --repeats 1

Every trial is a process of its own; repeats are interleaved. `harness/variants.py` says what each library does,
`harness/workloads.py` what is trained. One rank of many: the others do not exist and nothing is sent; memory, compute
and the work of the host are real. With `--backend fake` collectives are torch's, whose all-gather copies for each rank.

*Floor* is forward and backward alone of the unsharded bf16 model, recomputed by torch or by zeroshard. Figures are also
given relative to the smaller floor and to the best peer: plain PyTorch, DDP, FSDP2 or DeepSpeed. Tokens and TFLOPS are
one rank's, without recomputation. *Host* is the processor time of this process until a step returns. *Sent* counts an
all-gather by its output, a reduce-scatter by its input and an all-reduce twice, as a multiple of all parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.flop_counter import FlopCounterMode

import zeroshard
from benchmarks.harness.collectives import ECHO, Traffic
from benchmarks.harness.ranks import run_ranks
from benchmarks.harness.record import Result, machine, median, ratio, spread
from benchmarks.harness.training import Memory, alone, measure_steps, one_rank, time_steps
from benchmarks.harness.trials import Trials, make_parser
from benchmarks.harness.variants import PEERS, VARIANTS, Job, precision
from benchmarks.harness.workloads import FLOORS, ON_CPU, ON_GPU, WORKLOADS, Workload
from zeroshard.planner import gpu_peak_flops

WARMUP = {"cuda": 8, "cpu": 3}  # steps: on a GPU, zeroshard searches its segments in the first few
NOT_NCCL = """\
Real ranks, over gloo, on one machine: times here are not NCCL's. Memory and communication are counted as one of as many
ranks that do not exist: gloo's threads free memory unseen, its own reduce-scatter is an all-reduce, and zeroshard's
over gloo is an all-to-all with a buffer to receive in."""


def choose(name: str, tiny: bool, over: int) -> Workload:
    """Return a workload as it is to run: small, or by real ranks."""
    work = WORKLOADS[name].tiny if tiny else WORKLOADS[name]
    return work.over(over) if over > 1 else work


def measure(
    row: str, variant: str, device: str, steps: int, tiny: bool = False, over: int = 0, backend: str = ECHO
) -> Result:
    """Run one variant of a workload, in this process or, ``over`` several ranks, in theirs."""
    work = choose(row, tiny, over)
    if work.place == "ranks":
        with one_rank(device, (work.ranks,), backend=ECHO) as mesh:
            counted = measure_variant(Job(replace(work, place="one of many"), device, mesh), variant, steps=1)
        return {**counted, **run_ranks(measure_rank, over, row=row, variant=variant, steps=steps, tiny=tiny)}
    with open_mesh(work, device, backend) as mesh:
        return measure_variant(Job(work, device, mesh), variant, steps)


def measure_rank(row: str, variant: str, steps: int, tiny: bool) -> Result:
    """Time one variant of a workload as one of several real ranks.

    Memory is not measured here: torch's profiler does not see what gloo's threads free, so that FSDP2 and DeepSpeed
    seemed to hold more with every step; and if it stops during a collective, the process may crash.
    """
    torch.set_num_threads(1)  # threads that wait for each other would count as work
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
    training = VARIANTS[variant](Job(choose(row, tiny, mesh.size()), "cpu", mesh))
    for _ in range(WARMUP["cpu"]):
        training.step()
    return time_steps(training, steps, "cpu")


def measure_variant(job: Job, variant: str, steps: int) -> Result:
    """Train a workload by a variant, as the only process.

    On a CPU steps are timed without the profiler, which counts memory there and takes time.
    """
    is_cpu = job.device == "cpu"
    with Memory(job.device) as memory:
        training: Any = VARIANTS[variant](job)
        found = measure_steps(training, memory, WARMUP[job.device], 1 if is_cpu else steps)
    if is_cpu:
        found |= time_steps(training, steps, job.device)
    if variant == "floor":
        found |= count_flops(job.work)
    with Traffic() as traffic:
        training.step()
    found |= {**traffic.total, "kinds": traffic.kinds}
    if variant.startswith("zeroshard"):
        kinds = zeroshard.report(training.model).collectives
        found["own_bytes"] = sum(kind.bytes for kind in kinds.values())  # as it counts itself
    return found


def count_flops(work: Workload) -> Result:
    """Return the parameters, and the operations of a step of one rank without recomputation."""
    with torch.device("meta"):
        model, inputs = replace(work, recomputed=False).build(), work.inputs("meta")
    with FlopCounterMode(display=False) as counter:
        model(*inputs).backward()
    parameters = list(model.parameters())
    return {
        "parameters": sum(parameter.numel() for parameter in parameters),
        "tensors": len(parameters),
        "flops": counter.get_total_flops() * work.accumulate,
    }


def open_mesh(work: Workload, device: str, backend: str) -> AbstractContextManager[DeviceMesh]:
    """Be the rank that a workload runs on."""
    return alone(device) if work.place == "alone" else one_rank(device, (work.ranks,), backend=backend)


FIGURES = {  # key of a result → the head of its column, which ends in its unit, and that unit
    "ms": ("ms a step", 1.0),
    "host_ms": ("host ms", 1.0),
    "allocated": ("allocated GB", 1e9),
    "reserved": ("reserved GB", 1e9),
}


def show(name: str, work: Workload, notes: dict[str, str], trials: Trials, peak: float | None) -> None:
    """Print the table of a workload; ``peak`` is FLOP/s of the device."""
    found = {variant: trials.matching(row=name, variant=variant) for variant in notes}
    medians = {key: {variant: median(runs, key) for variant, runs in found.items()} for key in FIGURES}
    floors, best = ({key: _least(values, names) for key, values in medians.items()} for names in (FLOORS, PEERS))
    units = {key: unit for key, (_, unit) in FIGURES.items()}
    flops, parameters = (median(found[FLOORS[0]], key) for key in ("flops", "parameters"))
    rows = []
    for variant, runs in found.items():
        step, *others = ([ratio(medians[key][variant], base[key]) for base in (units, floors, best)] for key in FIGURES)
        speed = ratio(flops and 1e3 * flops, medians["ms"][variant])
        items = ratio(1e3 * work.items, medians["ms"][variant])
        rates = [spread(runs, "ms"), items, ratio(speed, 1e12), ratio(speed, peak)]
        elements, collectives = (median(runs, key) for key in ("elements", "collectives"))
        reserved = ratio(medians["reserved"][variant], medians["allocated"][variant])
        ends = [reserved, ratio(elements, parameters), collectives and int(collectives), notes[variant]]
        rows.append([variant, *step, *rates, *chain(*others), *ends])
    (head, _), *rest = FIGURES.values()
    heads = ["variant", head, "of the floor", "of the best peer", "spread", f"{work.item}/s", "TFLOPS", "MFU"]
    heads += chain(*((head, f"{head[:-3]} of the floor", f"{head[:-3]} of the best peer") for head, _ in rest))
    print(f"\n{name}: {f'{parameters:,.0f} parameters' if parameters else 'size unknown'}, {work.ranks} ranks")
    trials.show(name, [*heads, "of allocated", "sent Ψ", "collectives", "note"], rows)


def _least(values: dict[str, float | None], names: Sequence[str]) -> float | None:
    return min((value for name in names if (value := values.get(name)) is not None), default=None)


def main(argv: Sequence[str] | None = None) -> None:
    """Run all variants of all workloads, interleaved, and print tables."""
    parser = make_parser(__doc__, steps=10, repeats=3)
    parser.add_argument("--rows", nargs="+", choices=list(WORKLOADS), help="workloads (default: those for the device)")
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS), help="and the floor")
    parser.add_argument("--ranks", type=int, default=0, help="real processes over gloo, on a CPU")
    parser.add_argument("--backend", choices=(ECHO, "fake"), default=ECHO, help="of one rank of many")
    chosen = parser.parse_args(argv)
    if chosen.ranks > 1 and chosen.device != "cpu":
        parser.error(f"--ranks {chosen.ranks} needs a CPU, where ranks run over gloo: give --device cpu")
    trials = Trials("peers", measure, chosen)
    rows = chosen.rows or (["tiny"] if chosen.tiny else ON_GPU if chosen.device == "cuda" else ON_CPU)
    if chosen.ranks > 1:
        print(NOT_NCCL)
    peak = gpu_peak_flops(machine(chosen.device)["device"], precision(chosen.device))
    for name in rows:
        work = choose(name, chosen.tiny, chosen.ranks)
        wanted = [variant for variant in work.variants if variant in chosen.variants or variant == FLOORS[0]]
        given = {"device": chosen.device, "steps": chosen.steps, "tiny": chosen.tiny, "over": chosen.ranks}
        notes = trials.run_variants(wanted, chosen.repeats, row=name, backend=chosen.backend, **given)
        show(name, work, notes, trials, peak)
