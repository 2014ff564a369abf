"""Machine: the devices, nodes and links that a plan is made for.

A machine describes the devices of one node and the links between nodes; a cluster has as many nodes as its ranks need.
A machine is a preset (``presets.py``), comes from a JSON file, or was measured (``calibrate.py``).

[Note: the efficiency curve]
A matmul of x FLOPs takes a constant overhead (filling the device, and the last wave of tiles, which is only partly
used) plus a time proportional to x. So it reaches this fraction of the peak:

    share · x / (x + half)

``share`` is the fraction that very large matmuls reach, and ``half`` the FLOPs at which a matmul reaches half of it.
Two numbers describe a whole generation of devices. The overhead is a time: a slower precision has the same overhead in
seconds, not in FLOPs (:meth:`Machine.matmul_seconds`).
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from zeroshard.config.offload import parse_bytes
from zeroshard.planner.machines import cache
from zeroshard.planner.machines.presets import INFINIBAND_FRACTION, MACHINE_PRESETS

PRECISIONS = ("fp32", "bf16", "fp16")
DEVICE_KINDS = ("cuda", "cpu")
LOCAL_MACHINE = "here"
MAX_NUMBER = 1e30  # far above any rate; larger integers have no float

_BYTES_FIELDS = ("memory", "context", "workspace", "host_memory", "disk")  # bytes
_BANDWIDTH_FIELDS = ("bandwidth", "pcie", "disk_read", "disk_write")  # bytes/s
_SECONDS_FIELDS = ("gap", "op", "unit", "latency")  # seconds
_NUMBER_FIELDS = (*_BANDWIDTH_FIELDS, *_SECONDS_FIELDS, "attention", "convolution", "sustained", "host_update")


@dataclass(frozen=True, kw_only=True)
class EfficiencyCurve:
    """The fraction of the peak that one matmul reaches: [Note: the efficiency curve].

    >>> curve = EfficiencyCurve(share=0.8, half=1e9)
    >>> curve(1e9), round(curve(1e15), 3)
    (0.4, 0.8)
    """

    share: float
    """Fraction of the peak that very large matmuls reach: above 0, at most 1."""
    half: float
    """FLOPs of the matmul that reaches half of ``share``."""

    def __post_init__(self) -> None:
        if not _is_number(self.share) or not 0 < self.share <= 1:
            raise ValueError(f"share must be above 0 and at most 1, got {self.share!r}")
        if not _is_number(self.half) or self.half < 0:
            raise ValueError(f"half must be a number of FLOPs, at least 0, got {self.half!r}")
        object.__setattr__(self, "share", float(self.share))
        object.__setattr__(self, "half", float(self.half))

    def __call__(self, flops: float) -> float:
        """Return the fraction of the peak that a matmul of ``flops`` reaches."""
        return self.share * (flops / (flops + self.half)) if flops > 0 else 0.0

    @classmethod
    def fit(cls, measured: Sequence[tuple[float, float]], peak: float) -> EfficiencyCurve:
        """Fit a curve to measured (FLOPs, seconds) of a device with this peak.

        Errors are relative to the measured time, so small matmuls weigh as much as large ones.

        >>> EfficiencyCurve.fit([(1e9, 3e-3), (4e9, 6e-3)], peak=2e12)
        EfficiencyCurve(share=0.5, half=2000000000.0)
        """
        if not measured:
            raise ValueError("an efficiency curve needs at least one measured matmul, got none")
        # Least squares of lost + slope · x against the seconds t, each divided by t: lost/t + slope · x/t = 1.
        constants, slopes = [1 / t for _, t in measured], [x / t for x, t in measured]
        cc, ss = sum(c * c for c in constants), sum(s * s for s in slopes)
        cs = sum(c * s for c, s in zip(constants, slopes, strict=True))
        determinant = cc * ss - cs * cs
        lost, slope = 0.0, sum(slopes) / ss  # the best fit without overhead
        if len(measured) > 1 and determinant > 1e-9 * cc * ss:
            fitted_lost = (ss * sum(constants) - cs * sum(slopes)) / determinant
            fitted_slope = (cc * sum(slopes) - cs * sum(constants)) / determinant
            if fitted_lost > 0 and fitted_slope > 0:
                lost, slope = fitted_lost, fitted_slope
        slope = max(slope, 1 / peak)  # nothing is faster than its peak, except by measurement error
        return cls(share=round_measurement(1 / (slope * peak)), half=round_measurement(lost / slope))


@dataclass(frozen=True, kw_only=True)
class Link:
    """The link of a device or a node, for sending and receiving at the same time.

    >>> Link(bandwidth="25GB", latency=5e-6).bandwidth
    25000000000.0
    """

    bandwidth: float
    """Bytes/s in each direction, as collectives reach it."""
    latency: float
    """Seconds from one end to the other, independent of the size."""

    def __post_init__(self) -> None:
        _normalize_fields(self)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The devices of a node, and the links between nodes. Sizes and bytes/s may be strings such as "80GB".

    >>> machine = Machine.resolve("h100", devices=4, memory="60GB")
    >>> machine.devices, machine.memory, f"{machine.matmul_seconds(1e12, 'bf16') * 1e3:.2f} ms"
    (4, 60000000000, '1.45 ms')
    >>> Machine.resolve("h1000")
    Traceback (most recent call last):
        ...
    ValueError: unknown machine 'h1000': did you mean 'h100'? Use one of dgx2, a100, a100-40gb, h100, ...
    """

    name: str
    kind: str
    """"cuda" or "cpu": which kernels run. On "cpu" a device's memory is a part of the host's, and its links are
    gloo's."""
    devices: int
    """Devices per node; one rank runs on each."""
    memory: int
    """Bytes of a device that a process can use, including ``context``."""
    flops: Mapping[str, float] = field(hash=False)
    """Peak FLOP/s by precision, "fp32", "bf16", "fp16": dense matmuls. A missing precision is not
    supported."""
    fp8_flops: float | None = None
    """The same of float8 matmuls, which only ``precision="fp8"`` runs; None: they are not supported."""
    efficiency: EfficiencyCurve
    """The fraction of the peak that a matmul reaches by its FLOPs, in the fastest precision; other precisions have the
    same overhead in seconds: :meth:`matmul_seconds`."""
    attention: float
    """The fraction of the peak that fused attention reaches, forward and backward together. FLOPs that a causal mask
    skips do not count."""
    convolution: float = 0.4
    """The same for convolutions, whose kernels often reorder their inputs and outputs."""
    sustained: float = 1.0
    """The fraction of all these rates that a device sustains in training: clock frequencies drop under load, and
    kernels evict each other's cache lines. Measured on a full model; the rates are measured one by one."""
    bandwidth: float
    """Bytes/s of a device's memory, reads plus writes, as elementwise kernels reach it."""
    gap: float
    """Seconds of device overhead per kernel, independent of its size."""
    op: float
    """Host seconds per operation that launches a kernel in forward or backward, including Python, views and
    autograd."""
    unit: float
    """Host seconds that zeroshard needs to unshard, reshard or reduce a unit."""
    context: int
    """Bytes of device memory that the runtime uses outside the allocator."""
    workspace: int
    """Bytes that cuBLAS holds in the allocator for each thread that runs matmuls."""
    host_memory: int
    """Bytes of host memory per node."""
    host_update: float
    """Parameters/s that all CPUs of a node together update with Adam."""
    pcie: float
    """Bytes/s in each direction between the host and one device."""
    disk: int
    """Bytes of disk per node."""
    disk_read: float
    """Bytes/s per node, bypassing the page cache."""
    disk_write: float
    """The same for writing."""
    inside: Link
    """Between the devices of a node; each device has one."""
    outside: Link
    """Between nodes; each node has one, which its devices share."""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"name must be a non-empty string, got {self.name!r}")
        if self.kind not in DEVICE_KINDS:
            raise ValueError(f"kind must be 'cuda' or 'cpu', got {self.kind!r}")
        if type(self.devices) is not int or self.devices < 1:
            raise ValueError(f"devices must be a positive integer, got {self.devices!r}")
        for name, cls in (("efficiency", EfficiencyCurve), ("inside", Link), ("outside", Link)):
            object.__setattr__(self, name, _parse_nested(name, getattr(self, name), cls))
        _normalize_fields(self)
        if self.memory <= self.context:
            raise ValueError(
                f"memory must be more than the {self.context} bytes that the runtime uses, got {self.memory} bytes"
            )
        object.__setattr__(self, "flops", _check_flops(self.flops))
        if self.fp8_flops is not None and not (_is_number(self.fp8_flops) and self.fp8_flops > 0):
            raise ValueError(f"fp8_flops must be a number above 0, or None, got {self.fp8_flops!r}")

    @classmethod
    def resolve(cls, given: str | os.PathLike[str] | Machine, **changes: Any) -> Machine:
        """Return a machine by name, from a JSON file, or as given; apply ``changes``, if any.

        "here" is the local machine as measured by ``calibrate``. A file may extend a preset, {"like": "h100", …}.
        """
        if isinstance(given, Machine):
            machine = given
        elif isinstance(given, str) and given in MACHINE_PRESETS:
            machine = cls(name=given, **MACHINE_PRESETS[given])
        elif given == LOCAL_MACHINE:
            machine = _load_local_machine()
        elif isinstance(given, os.PathLike) or (isinstance(given, str) and (given.endswith(".json") or "/" in given)):
            machine = _load_machine_file(Path(given).expanduser(), "Correct the file, or name another machine")
        else:
            names = [*MACHINE_PRESETS, LOCAL_MACHINE]
            matches = difflib.get_close_matches(given, names, 1) if isinstance(given, str) else []
            hint = f"did you mean {matches[0]!r}? " if matches else ""
            raise ValueError(f"unknown machine {given!r}: {hint}Use one of {', '.join(names)}, or a JSON file")
        _check_field_names(changes)
        return replace(machine, **changes) if changes else machine

    def with_memory(self, memory: str | int | None) -> Machine:
        """Return the machine with another memory per device; None changes nothing.

        >>> Machine.resolve("h100").with_memory("60GB").memory
        60000000000
        """
        return self if memory is None else Machine.resolve(self, memory=memory)

    def with_network(self, gigabits: float) -> Machine:
        """Return the machine with another link between nodes, by its published rate in Gb/s and each direction.

        As in the presets, collectives reach 0.9 of it; the latency does not change.

        >>> Machine.resolve("h100").with_network(100).outside.bandwidth
        11250000000.0
        """
        return replace(self, outside=replace(self.outside, bandwidth=INFINIBAND_FRACTION * gigabits * 1e9 / 8))

    @classmethod
    def from_json(cls, text: str, name: str = "machine") -> Machine:
        """Parse the output of :meth:`to_json`, or a handwritten text. ``name`` is used if the text has none.

        >>> Machine.from_json('{"like": "a100", "devices": 4, "outside": {"bandwidth": "25GB", "latency": 1e-5}}').pcie
        24000000000.0
        """
        try:
            given = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"it is not JSON ({error})") from None
        if not isinstance(given, dict):
            raise ValueError(f"it must be a JSON object, got {type(given).__name__}")
        like = given.pop("like", None)
        _check_field_names(given)
        if like is not None:
            if like not in (*MACHINE_PRESETS, LOCAL_MACHINE):
                raise ValueError(f"like must be one of {', '.join((*MACHINE_PRESETS, LOCAL_MACHINE))}, got {like!r}")
            return cls.resolve(like, **{"name": name, **given})
        given.setdefault("name", name)
        missing = [f.name for f in fields(cls) if f.name not in given and f.default is MISSING]
        if missing:
            raise ValueError(f'missing {", ".join(missing)}: add them, or extend a preset with "like": "h100"')
        return cls(**given)

    def to_json(self) -> str:
        """Return all fields as JSON.

        >>> Machine.from_json(Machine.resolve("dgx2").to_json()) == Machine.resolve("dgx2")
        True
        """
        return json.dumps(asdict(self), indent=2) + "\n"

    @property
    def is_cpu(self) -> bool:
        """Whether its devices are CPUs."""
        return self.kind == "cpu"

    @property
    def default_precision(self) -> str:
        """The 16-bit precision of a GPU (fp32 if it has none), or fp32 on a CPU.

        >>> Machine.resolve("dgx2").default_precision, Machine.resolve("cpu").default_precision
        ('fp16', 'fp32')
        """
        return "fp32" if self.is_cpu else next(name for name in ("bf16", "fp16", "fp32") if name in self.flops)

    @property
    def saved_path(self) -> Path:
        """The file that ``calibrate`` saves this machine in."""
        return cache.machine_path(self.name)

    def local_ranks(self, ranks: int) -> int:
        """Return how many of ``ranks`` ranks are on the first node: nodes are filled one after the other."""
        return min(ranks, self.devices)

    def nodes(self, ranks: int) -> int:
        """Return how many nodes ``ranks`` ranks need.

        >>> Machine.resolve("h100").nodes(12)
        2
        """
        return -(-ranks // self.devices)

    def shared_by(self, ranks: int) -> Machine:
        """Return the local CPU machine, which one process has measured, divided among ``ranks`` on one node.

        Any other machine is returned unchanged: more ranks need more nodes.

        >>> Machine.resolve("cpu", devices=1, name="elsewhere").shared_by(2).devices
        1
        """
        if not self.is_cpu or self.name != cache.local_machine_name("cpu") or ranks <= self.devices:
            return self
        fraction = self.devices / ranks
        return replace(
            self,
            devices=ranks,
            memory=int(self.memory * fraction),
            flops={name: rate * fraction for name, rate in self.flops.items()},
            bandwidth=self.bandwidth * fraction,
        )

    def peak_flops(self, precision: str) -> float:
        """Return the peak FLOP/s in a precision.

        >>> Machine.resolve("dgx2").peak_flops("bf16")
        Traceback (most recent call last):
            ...
        ValueError: machine 'dgx2' does not support bf16, only fp32 and fp16: use precision='fp16'
        """
        if precision in self.flops:
            return self.flops[precision]
        if precision == "fp8" and self.fp8_flops is not None:
            return self.fp8_flops
        fastest = max(self.flops, key=lambda name: self.flops[name])
        raise ValueError(
            f"machine {self.name!r} does not support {precision}, only {' and '.join(self.flops)}: "
            f"use precision={fastest!r}"
        )

    def matmul_seconds(self, flops: float, precision: str) -> float:
        """Return how long one compute-bound matmul takes on a device.

        [Note: the efficiency curve] explains why the overhead is the same in all precisions.
        """
        overhead = self.efficiency.half / max(self.flops.values())
        return (flops / self.peak_flops(precision) + overhead) / self.efficiency.share

    def attention_seconds(self, flops: float, precision: str) -> float:
        """Return how long fused attention takes on a device."""
        return flops / (self.attention * self.peak_flops(precision))

    def convolution_seconds(self, flops: float, precision: str) -> float:
        """Return how long a convolution takes on a device."""
        return flops / (self.convolution * self.peak_flops(precision))


def _load_local_machine() -> Machine:
    path = cache.local_machine_path()
    if path is None:
        names = ", ".join(MACHINE_PRESETS)
        raise ValueError(
            f"this machine has not been measured yet: run {cache.CALIBRATE_COMMAND}, or use one of {names}"
        )
    return _load_machine_file(path, f"Run {cache.CALIBRATE_COMMAND} again")


def _load_machine_file(path: Path, advice: str) -> Machine:
    try:
        return Machine.from_json(path.read_text(encoding="utf-8"), name=path.stem)
    except OSError as error:
        raise ValueError(f"cannot read machine file {path}: {error.strerror or error}. {advice}") from None
    except ValueError as error:  # includes invalid UTF-8
        raise ValueError(f"{path} is not a valid machine file: {error}. {advice}") from None


def _check_field_names(names: Iterable[str]) -> None:
    known = [entry.name for entry in fields(Machine)]
    for name in names:
        if name not in known:
            matches = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {matches[0]!r}?" if matches else f"the fields are {', '.join(known)}"
            raise ValueError(f"unknown machine field {name!r}: {hint}")


def _parse_nested(name: str, given: Any, cls: type[EfficiencyCurve] | type[Link]) -> Any:
    """Return a curve or a link; build it if given as a JSON object."""
    if isinstance(given, cls):
        return given
    names = [entry.name for entry in fields(cls)]
    if not isinstance(given, Mapping) or sorted(given) != sorted(names):
        raise ValueError(f"{name} must have the fields {' and '.join(names)}, got {given!r}")
    try:
        return cls(**given)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _check_flops(given: Any) -> dict[str, float]:
    if not isinstance(given, Mapping) or not given or not set(given) <= set(PRECISIONS):
        raise ValueError(f"flops must map some of {', '.join(PRECISIONS)} to FLOP/s, got {given!r}")
    for name, value in given.items():
        if not _is_number(value) or value <= 0:
            raise ValueError(f"flops of {name} must be a number above 0, got {value!r}")
    return {name: float(given[name]) for name in PRECISIONS if name in given}


def _normalize_fields(part: Machine | Link) -> None:
    """Check the numbers, and parse strings with a unit."""
    for name in (entry.name for entry in fields(part)):
        value = getattr(part, name)
        if name in _BYTES_FIELDS:
            number = parse_bytes(name, value)
            if number is None:
                raise ValueError(f"{name} is a number of bytes, or one with a unit as in '64GB', got None")
            object.__setattr__(part, name, number)
        elif name in _NUMBER_FIELDS:
            if name in _BANDWIDTH_FIELDS and isinstance(value, str):
                value = parse_bytes(f"{name} per second", value.removesuffix("/s"))
            if not _is_number(value) or value < 0 or (value == 0 and name not in _SECONDS_FIELDS):
                expected = "a number of seconds, at least 0" if name in _SECONDS_FIELDS else "a number above 0"
                raise ValueError(f"{name} must be {expected}, got {value!r}")
            object.__setattr__(part, name, float(value))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < MAX_NUMBER


def round_measurement(value: float) -> float:
    """Round to six significant digits, the most that a measurement supports."""
    return float(f"{value:.6g}")
