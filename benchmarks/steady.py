"""Steady: what a step takes once training runs steadily: time, work of the host, memory, and what is communicated."""

from __future__ import annotations

import statistics
import time

import torch
from torch.utils.flop_counter import FlopCounterMode

import zeroshard
from benchmarks.rank import Memory
from benchmarks.rows import Row
from benchmarks.table import Result
from benchmarks.traffic import Traffic
from benchmarks.variants import VARIANTS, Job, Trained

WARMUP = {"cuda": 8, "cpu": 3}  # steps: on a GPU, zeroshard tries which segments are best in the first few


def steady(job: Job, variant: str, steps: int) -> Result:
    """Train a row by a variant within the process group that there is, in which this is the only process.

    On a CPU memory is looked at in steps of its own, before those that are timed, for that takes time there; and so are
    collectives anywhere, at the end.
    """
    with Memory(job.device) as memory:
        training = _warm(job, variant)
        memory.restart()
        training.step()  # zeroshard makes its segments anew, which for a moment counts as allocated
        memory.restart(empty=False)
        training.step()
        peak = memory.peak()
    measured = timed(training, steps, job.device)
    if job.device == "cuda":
        peak = memory.peak()
    found = _model_of(job.row) if variant == "floor" else {}
    return {**measured, **peak, **found, **communicated(training)}


def steady_rank(job: Job, variant: str, steps: int) -> Result:
    """The same as one of several real ranks: times alone.

    Torch's profiler, by which memory is seen on a CPU, knows nothing of gloo's threads. A tensor that one of them is
    the last to hold is never seen to be freed: of FSDP2 and DeepSpeed more seemed to be held with every step. And where
    it stops while a collective is under way, the process may end with a fault.
    """
    training = _warm(job, variant)
    return timed(training, steps, job.device)


def timed(training: Trained, steps: int, device: str) -> Result:
    """Times of single steps, in ms: whole, until the call returned, and what this process worked in that call.

    And their losses: where all libraries begin with the same values, these say whether they do the same.
    """
    whole, returned, busy, losses = [], [], [], []
    for _ in range(steps):
        begin, worked = time.perf_counter(), time.process_time()
        training.step()
        busy.append(1e3 * (time.process_time() - worked))
        returned.append(1e3 * (time.perf_counter() - begin))
        if device == "cuda":
            torch.cuda.synchronize()
        whole.append(1e3 * (time.perf_counter() - begin))
        losses.append(training.loss)
    middle = {"ms": whole, "returned_ms": returned, "host_ms": busy}
    medians = {name: statistics.median(times) for name, times in middle.items()}
    found = [loss.item() for loss in losses if loss is not None]
    return {**medians, "all_ms": whole, "losses": found, **({"loss": found[-1]} if found else {}), "steps": steps}


def communicated(training: Trained) -> Result:
    """Collectives of one step, as :class:`Traffic` sees them; of zeroshard, also as it counts them itself."""
    with Traffic() as traffic:
        training.step()
    found: Result = {**traffic.total, "kinds": traffic.kinds}
    try:
        kinds = zeroshard.report(training.model).collectives
    except ValueError:  # another library's model
        return found
    return {**found, "own_bytes": sum(kind.bytes for kind in kinds.values())}


def _warm(job: Job, variant: str) -> Trained:
    training = VARIANTS[variant](job)
    for _ in range(WARMUP[job.device]):
        training.step()
    return training


def _model_of(row: Row) -> Result:
    """Parameters, and the operations of a step without recomputation, of one rank."""
    with torch.device("meta"):
        model, inputs = row.build(recomputed=False), row.inputs("meta")
    with FlopCounterMode(display=False) as counter:
        model(*inputs).backward()
    parameters = list(model.parameters())
    return {
        "parameters": sum(parameter.numel() for parameter in parameters),
        "tensors": len(parameters),
        "flops": counter.get_total_flops() * row.accumulate,
    }
