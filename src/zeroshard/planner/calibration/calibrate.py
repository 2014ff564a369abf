"""Calibration: this machine's rates, measured in under a minute and kept.

[Note: what is measured]
Everything a :class:`~zeroshard.planner.machines.machine.Machine` has is measured on the machine itself, but for what
one process cannot see: links without a job of several ranks, and the host's time for a unit, which is the preset's,
made longer or shorter as this host's operations are. Where the device has a preset, its published peaks stay and the
curve says what is reached of them; elsewhere the peak is what very large products were seen to reach. Each measurement
has its share of the time and ends with it: a precision that this device computes slowly is measured on small products
alone. Kernels in a row are slower than each was alone, so a few layers are trained in the end (``sustained.py``).
"""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from zeroshard.memory.disk import DiskError
from zeroshard.memory.workspace import give_back_workspaces, take_workspace
from zeroshard.planner.calibration.device_rates import (
    attention_rate,
    convolution_rate,
    copy_rate,
    has_attention,
    kernel_gap,
    memory_rate,
    operation_seconds,
    product_times,
)
from zeroshard.planner.calibration.link_rates import Ranks, measured_links
from zeroshard.planner.calibration.node_rates import disk_rates, host_memory, update_rate
from zeroshard.planner.calibration.sustained import sustained
from zeroshard.planner.machines import kept
from zeroshard.planner.machines.curve import Curve
from zeroshard.planner.machines.machine import PRECISIONS, Machine
from zeroshard.planner.machines.presets import preset_of_gpu

ENOUGH = 45.0  # seconds that let every measurement run with its full sizes
SHARES = {  # of the time
    "products": 0.28,
    "attention": 0.05,
    "convolution": 0.03,
    "training": 0.08,
    "memory": 0.05,
    "gap": 0.02,
    "operations": 0.11,
    "copies": 0.08,
    "updates": 0.15,
    "disk": 0.15,
}
CONTEXTS = range(50 * 2**20, 3 * 2**30)  # bytes that are a runtime's own; more is another process's


def calibrate(
    device: str | torch.device | None = None,
    directory: str | os.PathLike[str] | None = None,
    seconds: float = ENOUGH,
) -> Machine:
    """Measure this machine, keep the result for ``Machine.of("here")``, and return it: [Note: what is measured].

    ``device``: None for the present GPU, or the CPU where there is none. ``directory`` is on the disk to be measured;
    None: the current one, and where no file can be made there the disk is left out, with a warning. Where
    ``torch.distributed`` runs, all ranks call this together, and all get the first rank's result.

    >>> import os, tempfile
    >>> from unittest.mock import patch
    >>> with tempfile.TemporaryDirectory() as cache, patch.dict(os.environ, XDG_CACHE_HOME=cache):
    ...     measured = calibrate("cpu", directory=cache, seconds=0.1)
    ...     Machine.of("here") == measured
    True
    """
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 < seconds < float("inf"):
        raise ValueError(f"seconds is a positive number, got {seconds!r}")
    chosen, ranks = _device(device), Ranks.now()
    base = _base(chosen)
    with _on(chosen), torch.random.fork_rng(devices=[chosen.index] if chosen.type == "cuda" else []):
        rates = _disk(directory, seconds, ranks)
        rates |= _device_rates(chosen, base, seconds, ranks)
        rates |= _node_rates(chosen, base, seconds, ranks)
        rates |= _sizes(chosen, base, ranks)
        rates["unit"] = base.unit * rates["op"] / base.op
        rates["sustained"] = sustained(Machine.of(base, **rates), chosen, SHARES["training"] * seconds)
    name = kept.name_here(chosen.type)
    machine = Machine.of(base, name=name, **{key: _rounded(value) for key, value in rates.items()})
    machine = Machine.from_json(ranks.agreed(machine.to_json()))
    if ranks.first_here:
        _keep(replace(machine, name=name))
    return machine


def _keep(machine: Machine) -> None:
    try:
        kept.keep(machine.name, machine.to_json())
    except OSError as error:  # what was measured is still good for this process
        warnings.warn(
            f"the rates could not be kept in {kept.directory()}: {error.strerror or error}. Set XDG_CACHE_HOME to a "
            "directory that can be written",
            RuntimeWarning,
            stacklevel=3,
        )


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """Makes a GPU the present one: events belong to the present one's stream."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _device(given: str | torch.device | None) -> torch.device:
    device = torch.device(given or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type not in ("cuda", "cpu"):
        raise ValueError(f"device is a GPU of CUDA's or the CPU, got {device}")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(
                f"device is {device}, and torch finds no GPU here: calibrate on 'cpu', or where there is one"
            )
        device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
    return device


def _base(device: torch.device) -> Machine:
    """The machine to begin from."""
    if device.type == "cpu":
        return Machine.of("cpu")
    gpu = torch.cuda.get_device_name(device)
    preset = preset_of_gpu(gpu)
    if preset is not None:
        return Machine.of(preset)
    warnings.warn(
        f"{gpu} has no preset: links between GPUs are taken to be an A100's, unless several ranks measure them",
        RuntimeWarning,
        stacklevel=3,
    )
    return Machine.of("a100")


def _device_rates(device: torch.device, base: Machine, seconds: float, ranks: Ranks) -> dict[str, Any]:
    """What one device does: all ranks of a node at once, as in training."""
    ranks.meet()
    each = SHARES["products"] * seconds / len(PRECISIONS)
    usable = [name for name in PRECISIONS if has_attention(device, name)]
    seen = {name: times for name in usable if (times := product_times(device, name, each))}
    if not seen:
        raise RuntimeError(f"no matrix product ran on {device}: see whether another process has taken its memory")
    published = device.type == "cuda" and preset_of_gpu(torch.cuda.get_device_name(device)) is not None
    flops, curve = products(seen, base.flops if published else {})
    fastest, moved = max(seen, key=lambda name: flops[name]), _part(2**28, seconds)
    return {
        "flops": flops,
        "efficiency": curve,
        "attention": attention_rate(device, fastest, SHARES["attention"] * seconds) / flops[fastest],
        "convolution": convolution_rate(device, fastest, SHARES["convolution"] * seconds) / flops[fastest],
        "bandwidth": memory_rate(device, SHARES["memory"] * seconds, moved),
        "gap": kernel_gap(device, SHARES["gap"] * seconds),
        "op": operation_seconds(device, fastest, SHARES["operations"] * seconds),
        "pcie": copy_rate(device, SHARES["copies"] * seconds, moved),
    }


def _node_rates(device: torch.device, base: Machine, seconds: float, ranks: Ranks) -> dict[str, Any]:
    """What the ranks of a node share, all of them at it."""
    ranks.meet()
    updated = update_rate(SHARES["updates"] * seconds, _part(25_000_000, seconds))
    links = measured_links(ranks, device, base, _part(2**28, seconds))
    return {"host_memory": host_memory(), "host_update": len(ranks.here) * updated, **links}


def _disk(directory: str | os.PathLike[str] | None, seconds: float, ranks: Ranks) -> dict[str, Any]:
    """What the disk does; all ranks of a node share it. Where one cannot use it, none does."""
    ranks.meet()
    found, trouble = {}, ""
    try:
        where = os.curdir if directory is None else directory
        found = disk_rates(where, SHARES["disk"] * seconds, _part(2**28, seconds))
    except DiskError as error:
        trouble = str(error)
    trouble = next((words for words in ranks.all_have(trouble) if words), "")
    if trouble and directory is not None:
        raise DiskError(trouble)
    if trouble:
        warnings.warn(f"the disk was not measured: {trouble}. Name a directory for it", RuntimeWarning, stacklevel=3)
        return {}
    return {name: int(value) if name == "disk" else value * len(ranks.here) for name, value in found.items()}


def products(
    seen: dict[str, list[tuple[float, float]]], published: Mapping[str, float]
) -> tuple[dict[str, float], Curve]:
    """Peaks and the curve that give the (FLOPs, seconds) that were seen, by precision.

    The fastest precision keeps its published peak, or has as peak what very large products reach. The others get the
    one with which their largest product takes what it took: they lose the same time and reach the same share.

    >>> products({"fp32": [(1e9, 3e-3), (4e9, 6e-3)], "bf16": [(4e9, 1e-2)]}, {})
    ({'fp32': 1000000000000.0, 'bf16': 500000000000.0}, Curve(share=1.0, half=2000000000.0))
    """
    rates = {name: max(x / t for x, t in times) for name, times in seen.items()}
    preferred = {**rates, "bf16": float("inf")} if published else rates  # of two with equal peaks
    fastest = max(rates, key=lambda name: (published.get(name, 0.0), len(seen[name]) > 1, preferred[name]))
    unreached = 1e30  # FLOP/s: the share of it is then the rate itself
    peak = published.get(fastest) or _rounded(Curve.fit(seen[fastest], unreached).share * unreached)
    curve = Curve.fit(seen[fastest], peak)
    lost = curve.half / (curve.share * peak)
    flops = {**published, fastest: peak}
    for name, times in seen.items():
        if name != fastest:
            x, t = times[-1]
            flops[name] = min(_rounded(x / (curve.share * max(t - lost, 0.1 * t))), peak)
    return {name: flops[name] for name in PRECISIONS if name in flops}, curve


def _sizes(device: torch.device, base: Machine, ranks: Ranks) -> dict[str, int]:
    """Devices of this node, and their memory."""
    if device.type == "cpu":
        return {"devices": len(ranks.here), "memory": host_memory() // len(ranks.here)}
    gc.collect()
    give_back_workspaces()
    held = torch.cuda.memory_allocated(device)
    take_workspace()
    workspace = torch.cuda.memory_allocated(device) - held
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    context = total - free - torch.cuda.memory_reserved(device)
    return {
        "devices": max(torch.cuda.device_count(), len(ranks.here)),
        "memory": total,
        "context": context if context in CONTEXTS else base.context,
        "workspace": workspace if workspace > 0 else base.workspace,
    }


def _part(whole: int, seconds: float) -> int:
    """What is moved when there is less time than enough."""
    return max(2**20, int(whole * min(1.0, seconds / ENOUGH)))


def _rounded(value: Any) -> Any:
    """Six digits: a measurement has no more."""
    return float(f"{value:.6g}") if isinstance(value, float) else value
