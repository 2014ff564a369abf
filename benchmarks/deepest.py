"""The deepest GPT of a width that trains over device, host and disk, found by search.

Which tier holds how much is `filling.py`'s; a depth that would overfill one is not begun: on the host, the machine
would end the process.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import asdict, replace
from typing import Any

import torch

import zeroshard
from benchmarks.filling import EACH, Filling, fill, taken_beside
from benchmarks.rank import FrugalGPT, Memory, Training, alone, shape_of, zeroshard_gpt
from benchmarks.search import Largest, largest
from benchmarks.table import Result, gigabytes, listed, ratio, said
from benchmarks.trial import Trials
from zeroshard.memory import available_host_memory
from zeroshard.presets import GPTPreset
from zeroshard.train.metrics import flops_per_token

HEADS = {4096: 32, 6144: 48}  # by width: 128 each
SHARES = (0.97, 0.98)  # of the tiers, which a search begins with: the first is what may be filled
LEFT_ON_DISK = 4e9  # bytes
PRETENDED = {"device": 14e5, "host": 14e5, "disk": 6e5}  # bytes of the tiers under --tiny
TINIEST = GPTPreset(1, heads=2, width=32, context=8, vocabulary=64)  # many CPUs are slow at bf16


def measure_space(device: str, directory: str | None) -> Result:
    """Bytes of the tiers that a process which uses the device finds free."""
    found: Result = {}
    if device == "cuda":
        torch.zeros(1, device=device)
        found["device"] = torch.cuda.mem_get_info()[0]
    if directory is not None:
        disk = os.statvfs(directory)
        found["disk"] = max(0.0, disk.f_bavail * disk.f_frsize - LEFT_ON_DISK)
    return {**found, "host": available_host_memory()}


def measure_depth(
    shape: dict[str, int],
    batch: int,
    device: str,
    filling: dict[str, Any],
    host_bytes: int,
    directory: str | None,
    steps: int,
) -> Result:
    """Train one step, then ``steps`` that are measured. Nothing is begun where the host's memory would not do."""
    needed, left = filling["held"]["host"], available_host_memory()
    if left and needed > left:
        raise torch.OutOfMemoryError(f"{needed / 1e9:.4g} GB of host memory are needed, {left / 1e9:.4g} are left")
    tiers = {kind: filling[kind] for kind in ("optimizer", "parameters") if filling[kind]}
    offload = {**tiers, "host_bytes": host_bytes, "directory": directory, "speculate": False}
    config = shape_of(GPTPreset(**shape))
    with alone(device) as mesh, Memory(device) as memory:
        trained = zeroshard_gpt(config, mesh, {}, FrugalGPT, stage=3, precision="bf16", offload=offload)
        training = Training(trained, batch, memory)
        first = training.steady(warmup=0, steps=1)
        then = training.steady(warmup=0, steps=steps)
        with zeroshard.gathered(training.model.get_submodule("norm")):  # the last update is over, and has not failed
            pass
        held = held_by(training.model)
    tables = (config.vocab_size + config.context) * config.width  # rows of them are only looked up
    each = flops_per_token(config.parameters - tables, 0, config.layers, config.width, config.context)
    tflops = each * batch * config.context / (then["ms"] * 1e9)
    peaks = {key: max(first[key], then[key]) for key in ("allocated", "reserved")}
    return {**then, **peaks, **held, "first_ms": first["ms"], "tflops": tflops, "left": available_host_memory()}


def deepest(trials: Trials, chosen: argparse.Namespace, on_disk: bool) -> None:
    """Search for the deepest model that device and host, and the disk, hold."""
    directory = str(chosen.directory) if on_disk else None
    space = trials.run(what="space", device=chosen.device, directory=directory)
    if "error" in space:
        print(f"\nThe memory there is could not be found out: {space['error']}")
        return
    on_gpu = chosen.device == "cuda" and not chosen.tiny
    found = dict(space if on_gpu else PRETENDED)
    if on_disk and chosen.disk is not None:
        found["disk"] = min(found["disk"], chosen.disk * 1e9)
    tiers = {tier: float(found[tier]) for tier in (("device", "host", "disk") if on_disk else ("device", "host"))}
    shape = TINIEST if chosen.tiny else GPTPreset(1, HEADS[chosen.width], chosen.width)
    batch = 1 if chosen.tiny else chosen.batch
    fillings: dict[int, Filling] = {}

    def attempt(layers: int) -> Result:
        filling = fillings[layers] = filled(replace(shape, layers=layers), batch, tiers, on_gpu)
        refused = filling.too_large(tiers)
        if refused is not None:
            return {"out_of_memory": f"not begun: {refused}"}
        result = trials.run(
            what="depth",
            shape=asdict(replace(shape, layers=layers)),
            batch=batch,
            device=chosen.device,
            filling=asdict(filling),
            host_bytes=int(tiers["host"]),
            directory=directory,
            steps=chosen.largest_steps,
        )
        if "status -9" in result.get("error", ""):  # by the machine, when its memory ran out
            return {"out_of_memory": "killed"}
        return result

    first = [depth(shape, batch, tiers, on_gpu, share) for share in SHARES]
    search = largest(attempt, (first[0], max(first[1], first[0] + 1)), tiers["device"], 0.01, chosen.attempts)
    where = ", ".join(f"{tier} {nbytes / 1e9:.4g}" for tier, nbytes in tiers.items())
    print(f"\nThe largest GPT of width {shape.width}, batch {batch}. GB there are: {where}")
    show_tried(trials, search, shape, fillings, tiers)


def show_tried(
    trials: Trials, search: Largest, shape: GPTPreset, fillings: dict[int, Filling], tiers: dict[str, float]
) -> None:
    """Print every attempt, the shallowest first."""
    limit = sum(tiers.values()) / EACH / 1e9
    print(f"Limit: {limit:.4g} B. FSDP2's offload keeps all {EACH} bytes of a parameter on the host, where at most")
    print(f"{tiers['host'] / EACH / 1e9:.4g} B fit.")
    table = []
    for layers, result in sorted(search.tried.items()):
        billions, filling = replace(shape, layers=layers).parameters / 1e9, fillings[layers]
        peaks = [gigabytes(result.get(key)) for key in ("allocated", "reserved", "host", "disk")]
        rests = listed(filling.optimizer | {f"parameters {tier}": part for tier, part in filling.parameters.items()})
        cells = [layers, billions, ratio(billions, limit), filling.share, rests, *peaks, result.get("ms")]
        table.append([*cells, result.get("tflops"), said(result)])
    heads = ("layers", "B", "of the limit", "filled", "optimizer on", "allocated GB", "reserved GB", "host GB")
    trials.show("with disk" if "disk" in tiers else "largest", (*heads, "disk GB", "ms a step", "TFLOPS", ""), table)
    if search.error is not None:
        print(f"The search ended early: {search.error.splitlines()[-1]}")


def filled(shape: GPTPreset, batch: int, tiers: dict[str, float], on_gpu: bool) -> Filling:
    """Where the states of a GPT rest."""
    return fill(shape.parameters, tiers, taken_beside(shape, batch, on_gpu))


def depth(shape: GPTPreset, batch: int, tiers: dict[str, float], on_gpu: bool, share: float) -> int:
    """The most layers that fill no more than a share of the tiers; at least 1."""
    layers = 1
    while filled(replace(shape, layers=layers + 1), batch, tiers, on_gpu).share <= share:
        layers += 1
    return layers


def held_by(model: torch.nn.Module) -> Result:
    """Bytes by tier outside the device at peak, as zeroshard counts them."""
    found = {"host": 0, "disk": 0}
    for (_, tier), nbytes in zeroshard.report(model).memory.items():
        if tier in found:
            found[tier] += nbytes.peak
    return found
