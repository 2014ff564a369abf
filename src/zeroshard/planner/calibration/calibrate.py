"""Calibration: this machine's rates, measured in under a minute and kept.

[Note: what is measured]
Everything a :class:`~zeroshard.planner.machines.machine.Machine` has is measured on the machine itself, but for what
one process cannot see: links without a job of several ranks, and the host's time for a unit, which is the preset's,
made longer or shorter as this host's operations are. Where the device has a preset, its published peaks stay and the
curve says what is reached of them; elsewhere the peak is what very large products were seen to reach. Each measurement
has its share of the time and ends with it: a precision that this device computes slowly is measured on small products
alone. Kernels in a row are slower than each was alone, so a few layers are trained in the end
(``sustained_fraction.py``).
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

from zeroshard.memory.allocator.cublas_workspace import allocate_cublas_workspace, clear_cublas_workspaces
from zeroshard.memory.disk.disk import DiskError
from zeroshard.planner.calibration.device_rates import (
    attention_rate,
    convolution_rate,
    copy_rate,
    has_attention,
    kernel_gap,
    memory_rate,
    operation_seconds,
    time_matmuls,
)
from zeroshard.planner.calibration.link_rates import CalibrationRanks, measure_links
from zeroshard.planner.calibration.node_rates import disk_rates, host_memory, update_rate
from zeroshard.planner.calibration.sustained_fraction import sustained_fraction
from zeroshard.planner.machines import cache
from zeroshard.planner.machines.efficiency_curve import EfficiencyCurve
from zeroshard.planner.machines.machine import PRECISIONS, Machine
from zeroshard.planner.machines.presets import preset_of_gpu

FULL_CALIBRATION_SECONDS = 45.0  # seconds that let every measurement run with its full sizes
TIME_SHARES = {  # of the time
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
CONTEXT_BYTES_RANGE = range(50 * 2**20, 3 * 2**30)  # bytes that are a runtime's own; more is another process's


def calibrate(
    device: str | torch.device | None = None,
    directory: str | os.PathLike[str] | None = None,
    seconds: float = FULL_CALIBRATION_SECONDS,
) -> Machine:
    """Measure this machine, keep the result for ``Machine.resolve("here")``, and return it: [Note: what is measured].

    ``device``: None for the present GPU, or the CPU where there is none. ``directory`` is on the disk to be measured;
    None: the current one, and where no file can be made there the disk is left out, with a warning. Where
    ``torch.distributed`` runs, all ranks call this together, and all get the first rank's result.

    >>> import os, tempfile
    >>> from unittest.mock import patch
    >>> with tempfile.TemporaryDirectory() as cache, patch.dict(os.environ, XDG_CACHE_HOME=cache):
    ...     measured = calibrate("cpu", directory=cache, seconds=0.1)
    ...     Machine.resolve("here") == measured
    True
    """
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 < seconds < float("inf"):
        raise ValueError(f"seconds is a positive number, got {seconds!r}")
    chosen, ranks = _resolve_device(device), CalibrationRanks.current()
    base = _base_machine(chosen)
    with _device_context(chosen), torch.random.fork_rng(devices=[chosen.index] if chosen.type == "cuda" else []):
        rates = _disk_rates(directory, seconds, ranks)
        rates |= _device_rates(chosen, base, seconds, ranks)
        rates |= _node_rates(chosen, base, seconds, ranks)
        rates |= _device_sizes(chosen, base, ranks)
        rates["unit"] = base.unit * rates["op"] / base.op
        rates["sustained"] = sustained_fraction(
            Machine.resolve(base, **rates), chosen, TIME_SHARES["training"] * seconds
        )
    name = cache.local_machine_name(chosen.type)
    machine = Machine.resolve(base, name=name, **{key: _round_measurement(value) for key, value in rates.items()})
    machine = Machine.from_json(ranks.broadcast_text(machine.to_json()))
    if ranks.is_first_local:
        _save_machine(replace(machine, name=name))
    return machine


def _save_machine(machine: Machine) -> None:
    try:
        cache.write_machine(machine.name, machine.to_json())
    except OSError as error:  # what was measured is still good for this process
        warnings.warn(
            f"the rates could not be kept in {cache.cache_dir()}: {error.strerror or error}. Set XDG_CACHE_HOME to a "
            "directory that can be written",
            RuntimeWarning,
            stacklevel=3,
        )


def _device_context(device: torch.device) -> AbstractContextManager[Any]:
    """Makes a GPU the present one: events belong to the present one's stream."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _resolve_device(given: str | torch.device | None) -> torch.device:
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


def _base_machine(device: torch.device) -> Machine:
    """The machine to begin from."""
    if device.type == "cpu":
        return Machine.resolve("cpu")
    gpu = torch.cuda.get_device_name(device)
    preset = preset_of_gpu(gpu)
    if preset is not None:
        return Machine.resolve(preset)
    warnings.warn(
        f"{gpu} has no preset: links between GPUs are taken to be an A100's, unless several ranks measure them",
        RuntimeWarning,
        stacklevel=3,
    )
    return Machine.resolve("a100")


def _device_rates(device: torch.device, base: Machine, seconds: float, ranks: CalibrationRanks) -> dict[str, Any]:
    """What one device does: all ranks of a node at once, as in training."""
    ranks.barrier()
    each = TIME_SHARES["products"] * seconds / len(PRECISIONS)
    usable = [name for name in PRECISIONS if has_attention(device, name)]
    seen = {name: times for name in usable if (times := time_matmuls(device, name, each))}
    if not seen:
        raise RuntimeError(f"no matrix product ran on {device}: see whether another process has taken its memory")
    published = device.type == "cuda" and preset_of_gpu(torch.cuda.get_device_name(device)) is not None
    flops, curve = fit_matmul_rates(seen, base.flops if published else {})
    fastest, moved = max(seen, key=lambda name: flops[name]), _scale_to_time(2**28, seconds)
    return {
        "flops": flops,
        "efficiency": curve,
        "attention": attention_rate(device, fastest, TIME_SHARES["attention"] * seconds) / flops[fastest],
        "convolution": convolution_rate(device, fastest, TIME_SHARES["convolution"] * seconds) / flops[fastest],
        "bandwidth": memory_rate(device, TIME_SHARES["memory"] * seconds, moved),
        "gap": kernel_gap(device, TIME_SHARES["gap"] * seconds),
        "op": operation_seconds(device, fastest, TIME_SHARES["operations"] * seconds),
        "pcie": copy_rate(device, TIME_SHARES["copies"] * seconds, moved),
    }


def _node_rates(device: torch.device, base: Machine, seconds: float, ranks: CalibrationRanks) -> dict[str, Any]:
    """What the ranks of a node share, all of them at it."""
    ranks.barrier()
    updated = update_rate(TIME_SHARES["updates"] * seconds, _scale_to_time(25_000_000, seconds))
    links = measure_links(ranks, device, base, _scale_to_time(2**28, seconds))
    return {"host_memory": host_memory(), "host_update": len(ranks.local_ranks) * updated, **links}


def _disk_rates(directory: str | os.PathLike[str] | None, seconds: float, ranks: CalibrationRanks) -> dict[str, Any]:
    """What the disk does; all ranks of a node share it. Where one cannot use it, none does."""
    ranks.barrier()
    found, trouble = {}, ""
    try:
        where = os.curdir if directory is None else directory
        found = disk_rates(where, TIME_SHARES["disk"] * seconds, _scale_to_time(2**28, seconds))
    except DiskError as error:
        trouble = str(error)
    trouble = next((words for words in ranks.gather_text(trouble) if words), "")
    if trouble and directory is not None:
        raise DiskError(trouble)
    if trouble:
        warnings.warn(f"the disk was not measured: {trouble}. Name a directory for it", RuntimeWarning, stacklevel=3)
        return {}
    return {name: int(value) if name == "disk" else value * len(ranks.local_ranks) for name, value in found.items()}


def fit_matmul_rates(
    measured: dict[str, list[tuple[float, float]]], published: Mapping[str, float]
) -> tuple[dict[str, float], EfficiencyCurve]:
    """Peaks and the curve that give the (FLOPs, seconds) that were seen, by precision.

    The fastest precision keeps its published peak, or has as peak what very large products reach. The others get the
    one with which their largest product takes what it took: they lose the same time and reach the same share.

    >>> fit_matmul_rates({"fp32": [(1e9, 3e-3), (4e9, 6e-3)], "bf16": [(4e9, 1e-2)]}, {})
    ({'fp32': 1000000000000.0, 'bf16': 500000000000.0}, EfficiencyCurve(share=1.0, half=2000000000.0))
    """
    rates = {name: max(x / t for x, t in times) for name, times in measured.items()}
    preferred = {**rates, "bf16": float("inf")} if published else rates  # of two with equal peaks
    fastest = max(rates, key=lambda name: (published.get(name, 0.0), len(measured[name]) > 1, preferred[name]))
    unreached = 1e30  # FLOP/s: the share of it is then the rate itself
    peak = published.get(fastest) or _round_measurement(
        EfficiencyCurve.fit(measured[fastest], unreached).share * unreached
    )
    curve = EfficiencyCurve.fit(measured[fastest], peak)
    lost = curve.half / (curve.share * peak)
    flops = {**published, fastest: peak}
    for name, times in measured.items():
        if name != fastest:
            x, t = times[-1]
            flops[name] = min(_round_measurement(x / (curve.share * max(t - lost, 0.1 * t))), peak)
    return {name: flops[name] for name in PRECISIONS if name in flops}, curve


def _device_sizes(device: torch.device, base: Machine, ranks: CalibrationRanks) -> dict[str, int]:
    """Devices of this node, and their memory."""
    if device.type == "cpu":
        return {"devices": len(ranks.local_ranks), "memory": host_memory() // len(ranks.local_ranks)}
    gc.collect()
    clear_cublas_workspaces()
    held = torch.cuda.memory_allocated(device)
    allocate_cublas_workspace()
    workspace = torch.cuda.memory_allocated(device) - held
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    context = total - free - torch.cuda.memory_reserved(device)
    return {
        "devices": max(torch.cuda.device_count(), len(ranks.local_ranks)),
        "memory": total,
        "context": context if context in CONTEXT_BYTES_RANGE else base.context,
        "workspace": workspace if workspace > 0 else base.workspace,
    }


def _scale_to_time(full_size: int, seconds: float) -> int:
    """What is moved when there is less time than enough."""
    return max(2**20, int(full_size * min(1.0, seconds / FULL_CALIBRATION_SECONDS)))


def _round_measurement(value: Any) -> Any:
    """Six digits: a measurement has no more."""
    return float(f"{value:.6g}") if isinstance(value, float) else value
