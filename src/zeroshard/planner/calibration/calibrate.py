"""Measure the rates of the local machine in under a minute and cache them.

[Note: what is measured]
Calibration measures every field of a :class:`~zeroshard.planner.Machine`, except what one process cannot see. Links
need a job with several ranks. The host time per unit is the preset's value, scaled by how fast this host launches
operations. If the device has a preset, its published peaks are used and the efficiency curve gives the
fraction reached; otherwise the peak is extrapolated from the matmuls. Each measurement has a time limit: a precision
that is slow on this device is measured with small matmuls only. Kernels in sequence are slower than each one alone, so
calibration ends with training a few layers (``sustained_fraction``).
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

from zeroshard.memory import CublasWorkspace, DiskError, host_memory
from zeroshard.planner.calibration.device_rates import (
    attention_rate,
    convolution_rate,
    copy_rate,
    has_attention,
    kernel_gap,
    memory_rate,
    operation_seconds,
    sustained_fraction,
    time_matmuls,
)
from zeroshard.planner.calibration.node_rates import (
    CalibrationRanks,
    disk_rates,
    measure_links,
    update_rate,
)
from zeroshard.planner.machines import cache
from zeroshard.planner.machines.machine import PRECISIONS, EfficiencyCurve, Machine, round_measurement
from zeroshard.planner.machines.presets import FALLBACK_PRESET, preset_of_gpu

FULL_CALIBRATION_SECONDS = 45.0  # enough for every measurement at its full size
TIME_SHARES = {  # fractions of the total time
    "matmuls": 0.28,
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
CONTEXT_BYTES_RANGE = range(50 * 2**20, 3 * 2**30)  # plausible for the CUDA context; more belongs to another process


def calibrate(
    device: str | torch.device | None = None,
    directory: str | os.PathLike[str] | None = None,
    seconds: float = FULL_CALIBRATION_SECONDS,
) -> Machine:
    """Measure this machine, cache the result for ``Machine.resolve("here")``, and return it.

    See [Note: what is measured].

    ``device``: None selects the current GPU, or the CPU if there is no GPU. ``directory`` is a directory on the disk to
    measure. None selects the current directory; if no file can be created there, the disk is skipped with a warning.
    If ``torch.distributed`` is initialized, all ranks must call this together; all return the first rank's result.

    >>> import os, tempfile
    >>> from unittest.mock import patch
    >>> with tempfile.TemporaryDirectory() as cache, patch.dict(os.environ, XDG_CACHE_HOME=cache):
    ...     measured = calibrate("cpu", directory=cache, seconds=0.1)
    ...     Machine.resolve("here") == measured
    True
    """
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 < seconds < float("inf"):
        raise ValueError(f"seconds must be a positive number, got {seconds!r}")
    chosen, ranks = _resolve_device(device), CalibrationRanks.current()
    base, on_gpu = _base_machine(chosen), chosen.type == "cuda"
    # Events are recorded on the current device's stream, so the GPU is made the current device.
    current_device: AbstractContextManager[Any] = torch.cuda.device(chosen) if on_gpu else nullcontext()
    with current_device, torch.random.fork_rng(devices=[chosen.index] if on_gpu else []):
        rates = _disk_rates(directory, seconds, ranks)
        rates |= _device_rates(chosen, base, seconds, ranks)
        rates |= _node_rates(chosen, base, seconds, ranks)
        rates |= _device_sizes(chosen, base, ranks)
        rates["unit"] = base.unit * rates["op"] / base.op
        rates["sustained"] = sustained_fraction(
            Machine.resolve(base, **rates), chosen, TIME_SHARES["training"] * seconds
        )
    name = cache.local_machine_name(chosen.type)
    machine = Machine.resolve(base, name=name, **{key: _rounded(value) for key, value in rates.items()})
    machine = Machine.from_json(ranks.broadcast_text(machine.to_json()))
    if ranks.is_first_local:
        _save_machine(replace(machine, name=name))
    return machine


def _save_machine(machine: Machine) -> None:
    try:
        cache.write_machine(machine.name, machine.to_json())
    except OSError as error:  # the measured rates are still valid for this process
        warnings.warn(
            f"the measured rates could not be saved in {cache.cache_dir()}: {error.strerror or error}. Set "
            "XDG_CACHE_HOME to a writable directory",
            RuntimeWarning,
            stacklevel=3,
        )


def _resolve_device(given: str | torch.device | None) -> torch.device:
    device = torch.device(given or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type not in ("cuda", "cpu"):
        raise ValueError(f"device must be a CUDA GPU or the CPU, got {device}")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(f"device {device} is not available: torch finds no GPU here. Calibrate on 'cpu' instead")
        device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
    return device


def _base_machine(device: torch.device) -> Machine:
    """Return the preset to start from; it supplies what cannot be measured."""
    if device.type == "cpu":
        return Machine.resolve("cpu")
    gpu = torch.cuda.get_device_name(device)
    preset = preset_of_gpu(gpu)
    if preset is not None:
        return Machine.resolve(preset)
    warnings.warn(
        f"{gpu} has no preset: the links between GPUs are assumed to be an A100's, unless several ranks measure them",
        RuntimeWarning,
        stacklevel=3,
    )
    return Machine.resolve(FALLBACK_PRESET)


def _device_rates(device: torch.device, base: Machine, seconds: float, ranks: CalibrationRanks) -> dict[str, Any]:
    """Measure the rates of one device, with all ranks of a node running concurrently as in training."""
    ranks.barrier()
    seconds_per_precision = TIME_SHARES["matmuls"] * seconds / len(PRECISIONS)
    precisions = [name for name in PRECISIONS if has_attention(device, name)]
    measured = {name: times for name in precisions if (times := time_matmuls(device, name, seconds_per_precision))}
    if not measured:
        raise RuntimeError(f"no matmul could run on {device}: check whether another process uses its memory")
    published = device.type == "cuda" and preset_of_gpu(torch.cuda.get_device_name(device)) is not None
    flops, curve = fit_matmul_rates(measured, base.flops if published else {})
    fastest, max_bytes = max(measured, key=lambda name: flops[name]), _scale_to_time(2**28, seconds)
    return {
        "flops": flops,
        "efficiency": curve,
        "attention": attention_rate(device, fastest, TIME_SHARES["attention"] * seconds) / flops[fastest],
        "convolution": convolution_rate(device, fastest, TIME_SHARES["convolution"] * seconds) / flops[fastest],
        "bandwidth": memory_rate(device, TIME_SHARES["memory"] * seconds, max_bytes),
        "gap": kernel_gap(device, TIME_SHARES["gap"] * seconds),
        "op": operation_seconds(device, fastest, TIME_SHARES["operations"] * seconds),
        "pcie": copy_rate(device, TIME_SHARES["copies"] * seconds, max_bytes),
    }


def _node_rates(device: torch.device, base: Machine, seconds: float, ranks: CalibrationRanks) -> dict[str, Any]:
    """Measure what the ranks of a node share, with all of them using it."""
    ranks.barrier()
    rate_per_rank = update_rate(TIME_SHARES["updates"] * seconds, _scale_to_time(25_000_000, seconds))
    links = measure_links(ranks, device, base, _scale_to_time(2**28, seconds))
    return {"host_memory": host_memory(), "host_update": len(ranks.local_ranks) * rate_per_rank, **links}


def _disk_rates(directory: str | os.PathLike[str] | None, seconds: float, ranks: CalibrationRanks) -> dict[str, Any]:
    """Measure the disk that all ranks of a node share.

    If one rank cannot use it, all ranks skip it with a warning, or raise if ``directory`` is given.
    """
    ranks.barrier()
    rates, error_text = {}, ""
    try:
        disk_dir = os.curdir if directory is None else directory
        rates = disk_rates(disk_dir, TIME_SHARES["disk"] * seconds, _scale_to_time(2**28, seconds))
    except DiskError as error:
        error_text = str(error)
    error_text = next((text for text in ranks.gather_text(error_text) if text), "")
    if error_text and directory is not None:
        raise DiskError(error_text)
    if error_text:
        warnings.warn(f"the disk was not measured: {error_text}. Pass a directory on it", RuntimeWarning, stacklevel=3)
        return {}
    return {name: int(value) if name == "disk" else value * len(ranks.local_ranks) for name, value in rates.items()}


def fit_matmul_rates(
    measured: dict[str, list[tuple[float, float]]], published: Mapping[str, float]
) -> tuple[dict[str, float], EfficiencyCurve]:
    """Fit the peak FLOP/s per precision and one efficiency curve to the measured (FLOPs, seconds) of each precision.

    The fastest precision keeps its published peak; without one, its peak is the extrapolated rate of very large
    matmuls. The peak of every other precision is chosen so that the curve predicts the time of its largest matmul: all
    precisions have the same fixed time per matmul and reach the same fraction of their peak.

    >>> fit_matmul_rates({"fp32": [(1e9, 3e-3), (4e9, 6e-3)], "bf16": [(4e9, 1e-2)]}, {})
    ({'fp32': 1000000000000.0, 'bf16': 500000000000.0}, EfficiencyCurve(share=1.0, half=2000000000.0))
    """
    rates = {name: max(x / t for x, t in times) for name, times in measured.items()}
    preferred = {**rates, "bf16": float("inf")} if published else rates  # bf16 wins if two peaks are equal
    fastest = max(rates, key=lambda name: (published.get(name, 0.0), len(measured[name]) > 1, preferred[name]))
    unreached = 1e30  # FLOP/s: well above any device, so share * unreached is the rate itself
    peak = published.get(fastest) or round_measurement(
        EfficiencyCurve.fit(measured[fastest], unreached).share * unreached
    )
    curve = EfficiencyCurve.fit(measured[fastest], peak)
    overhead_seconds = curve.half / (curve.share * peak)
    flops = {**published, fastest: peak}
    for name, times in measured.items():
        if name != fastest:
            x, t = times[-1]
            flops[name] = min(round_measurement(x / (curve.share * max(t - overhead_seconds, 0.1 * t))), peak)
    return {name: flops[name] for name in PRECISIONS if name in flops}, curve


def _device_sizes(device: torch.device, base: Machine, ranks: CalibrationRanks) -> dict[str, int]:
    """Return the number of devices of this node and the memory sizes of one."""
    if device.type == "cpu":
        return {"devices": len(ranks.local_ranks), "memory": host_memory() // len(ranks.local_ranks)}
    gc.collect()
    CublasWorkspace.clear_all()
    allocated_before = torch.cuda.memory_allocated(device)
    CublasWorkspace.allocate()
    workspace = torch.cuda.memory_allocated(device) - allocated_before
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
    """Return the size for a measurement, reduced in proportion if there is less than the full calibration time."""
    return max(2**20, int(full_size * min(1.0, seconds / FULL_CALIBRATION_SECONDS)))


def _rounded(value: Any) -> Any:
    return round_measurement(value) if isinstance(value, float) else value
