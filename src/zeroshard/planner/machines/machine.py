"""Machine: what a plan has to know of the devices that it plans for.

A machine is one node's devices and how nodes are joined; a cluster is as many nodes as there are ranks to place. It has
a name (``presets.py``), comes from a JSON file, or was measured (``calibrate.py``).
"""

from __future__ import annotations

import difflib
import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from zeroshard.config.offload import parse_bytes
from zeroshard.planner.machines import cache
from zeroshard.planner.machines.efficiency_curve import EfficiencyCurve
from zeroshard.planner.machines.presets import PRESETS

PRECISIONS = ("fp32", "bf16", "fp16")
DEVICE_KINDS = ("cuda", "cpu")
LOCAL_MACHINE = "here"

_BYTES_FIELDS = ("memory", "context", "workspace", "host_memory", "disk")  # bytes
_BANDWIDTH_FIELDS = ("bandwidth", "pcie", "disk_read", "disk_write")  # bytes/s
_FRACTION_FIELDS = ("attention", "convolution", "sustained")  # of the peak, or of the rates
_SECONDS_FIELDS = ("gap", "op", "unit", "latency")  # seconds


@dataclass(frozen=True, kw_only=True)
class Link:
    """What a device, or a node, sends and receives at once.

    >>> Link(bandwidth="25GB", latency=5e-6).bandwidth
    25000000000.0
    """

    bandwidth: float
    """Bytes/s each way, as collectives reach it."""
    latency: float
    """Seconds from one end to the other, whatever is sent."""

    def __post_init__(self) -> None:
        """Refuse what is no link."""
        _normalize_fields(self, ("bandwidth", "latency"), "a link's ")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One node's devices, and how nodes are joined. Sizes and bytes/s may be given as in "80GB".

    >>> machine = Machine.resolve("h100", devices=4, memory="60GB")
    >>> machine.devices, machine.memory, f"{machine.matmul_seconds(1e12, 'bf16') * 1e3:.2f} ms"
    (4, 60000000000, '1.45 ms')
    >>> Machine.resolve("h1000")
    Traceback (most recent call last):
        ...
    ValueError: no machine is called 'h1000': did you mean 'h100'? There are dgx2, a100, a100-40gb, h100, h200, cpu, ...
    """

    name: str
    kind: str
    """"cuda" or "cpu": which kernels run. On "cpu" a device's memory is a part of the host's, and its links are
    gloo's."""
    devices: int
    """Of a node; one rank runs on each."""
    memory: int
    """Bytes of a device that a process can have, ``context`` included."""
    flops: Mapping[str, float] = field(hash=False)
    """Peak FLOP/s by precision, "fp32", "bf16", "fp16": dense matrix products. One that is not here is not computed
    in."""
    efficiency: EfficiencyCurve
    """The share of the peak that a matrix product of so many FLOPs reaches, in the fastest precision; in others the
    same time is lost: :meth:`matmul_seconds`."""
    attention: float
    """The share of the peak that fused attention reaches, forward and backward together. FLOPs that a causal mask
    spares do not count."""
    convolution: float = 0.4
    """The same for convolutions, whose kernels often reorder what they read and write."""
    sustained: float = 1.0
    """The share of all these rates that a device keeps up while it trains: clocks fall under load, and one kernel
    leaves the caches to the next. Measured on a whole model, where the rates are measured one by one."""
    bandwidth: float
    """Bytes/s of a device's memory, reading and writing together, as elementwise kernels reach it."""
    gap: float
    """Seconds that a device loses with each kernel, however small."""
    op: float
    """Seconds of the host for one operation that launches a kernel in forward or backward: Python, views and autograd
    included."""
    unit: float
    """Seconds of the host that zeroshard takes when a unit is gathered, released or reduced."""
    context: int
    """Bytes of device memory that the runtime takes for itself, outside the allocator."""
    workspace: int
    """Bytes that cuBLAS holds in the allocator for a thread that multiplies."""
    host_memory: int
    """Bytes of a node."""
    host_update: float
    """Parameters/s that a node's processors update with Adam, all together."""
    pcie: float
    """Bytes/s each way between the host and one device."""
    disk: int
    """Bytes of a node's disk."""
    disk_read: float
    """Bytes/s of a node, past the page cache."""
    disk_write: float
    """The same for writing."""
    inside: Link
    """Between the devices of a node; each device has one."""
    outside: Link
    """Between nodes; each node has one, which its devices share."""

    def __post_init__(self) -> None:
        """Refuse what is no machine, and read sizes that are words."""
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"a machine's name is a word, got {self.name!r}")
        if self.kind not in DEVICE_KINDS:
            raise ValueError(f"kind is 'cuda' or 'cpu', got {self.kind!r}")
        if type(self.devices) is not int or self.devices < 1:
            raise ValueError(f"devices is a whole number from 1 up, got {self.devices!r}")
        for name, cls in (("efficiency", EfficiencyCurve), ("inside", Link), ("outside", Link)):
            object.__setattr__(self, name, _parse_nested(name, getattr(self, name), cls))
        names = [found.name for found in fields(self)]
        _normalize_fields(
            self,
            [
                name
                for name in names
                if name in (*_BYTES_FIELDS, *_BANDWIDTH_FIELDS, *_SECONDS_FIELDS, *_FRACTION_FIELDS, "host_update")
            ],
        )
        if self.memory <= self.context:
            raise ValueError(f"memory is {self.memory} bytes, and the runtime alone takes {self.context} (context)")
        object.__setattr__(self, "flops", _check_flops(self.flops))

    @classmethod
    def resolve(cls, given: str | os.PathLike[str] | Machine, **changes: Any) -> Machine:
        """A machine by its name, from a JSON file, or as it is; with changes, if any.

        "here" is this machine as ``calibrate`` has measured it. A file may begin from a name, {"like": "h100", …}.
        """
        if isinstance(given, Machine):
            machine = given
        elif isinstance(given, str) and given in PRESETS:
            machine = cls(name=given, **PRESETS[given])
        elif given == LOCAL_MACHINE:
            machine = _load_local_machine()
        elif isinstance(given, os.PathLike) or (isinstance(given, str) and (given.endswith(".json") or "/" in given)):
            machine = _load_machine_file(Path(given).expanduser(), "correct it, or name another")
        else:
            names = [*PRESETS, LOCAL_MACHINE]
            near = difflib.get_close_matches(given, names, 1) if isinstance(given, str) else []
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ValueError(
                f"no machine is called {given!r}: {hint}There are {', '.join(names)} (as measured), or give a JSON file"
            )
        _check_field_names(changes)
        return replace(machine, **changes) if changes else machine

    @classmethod
    def from_json(cls, text: str, name: str = "machine") -> Machine:
        """Read what :meth:`to_json` wrote, or a person. ``name``: where the text says none.

        >>> Machine.from_json('{"like": "a100", "devices": 4, "outside": {"bandwidth": "25GB", "latency": 1e-5}}').pcie
        24000000000.0
        """
        try:
            given = json.loads(text)
        except ValueError as error:
            raise ValueError(f"no JSON: {error}") from None
        if not isinstance(given, dict):
            raise ValueError(f"a machine is an object with a value for each name, got {type(given).__name__}")
        like = given.pop("like", None)
        _check_field_names(given)
        if like is not None:
            if like not in (*PRESETS, LOCAL_MACHINE):
                raise ValueError(f"like is one of {', '.join((*PRESETS, LOCAL_MACHINE))}, got {like!r}")
            return cls.resolve(like, **{"name": name, **given})
        given.setdefault("name", name)
        missing = [f.name for f in fields(cls) if f.name not in given and f.default is MISSING]
        if missing:
            begin = '"like": "h100"'
            raise ValueError(f"without {', '.join(missing)}: give these, or a machine to begin from, as in {begin}")
        return cls(**given)

    def to_json(self) -> str:
        """All of it.

        >>> Machine.from_json(Machine.resolve("dgx2").to_json()) == Machine.resolve("dgx2")
        True
        """
        return json.dumps(asdict(self), indent=2) + "\n"

    def shared_by(self, ranks: int) -> Machine:
        """This very computer's processors, measured by one process, as so many ranks have them: all on one node.

        Any other machine is what it says, and more ranks are more nodes.

        >>> Machine.resolve("cpu", devices=1, name="elsewhere").shared_by(2).devices
        1
        """
        if self.kind != "cpu" or self.name != cache.local_machine_name("cpu") or ranks <= self.devices:
            return self
        share = self.devices / ranks
        return replace(
            self,
            devices=ranks,
            memory=int(self.memory * share),
            flops={name: rate * share for name, rate in self.flops.items()},
            bandwidth=self.bandwidth * share,
        )

    def peak_flops(self, precision: str) -> float:
        """Peak FLOP/s in a precision.

        >>> Machine.resolve("dgx2").peak_flops("bf16")
        Traceback (most recent call last):
            ...
        ValueError: 'dgx2' computes in fp32 and fp16, not in bf16: plan with precision='fp16'
        """
        if precision in self.flops:
            return self.flops[precision]
        fastest = max(self.flops, key=lambda name: self.flops[name])
        raise ValueError(
            f"{self.name!r} computes in {' and '.join(self.flops)}, not in {precision}: plan with precision={fastest!r}"
        )

    def matmul_seconds(self, flops: float, precision: str) -> float:
        """How long one matrix product takes on a device, as far as computing is the limit.

        [Note: the efficiency curve] says why the time that is lost with a small one is the same in all precisions.
        """
        lost = self.efficiency.half / max(self.flops.values())
        return (flops / self.peak_flops(precision) + lost) / self.efficiency.share

    def attention_seconds(self, flops: float, precision: str) -> float:
        """How long fused attention takes on a device."""
        return flops / (self.attention * self.peak_flops(precision))

    def convolution_seconds(self, flops: float, precision: str) -> float:
        """How long a convolution takes on a device."""
        return flops / (self.convolution * self.peak_flops(precision))


def _load_local_machine() -> Machine:
    path = cache.local_machine_path()
    if path is None:
        raise ValueError(
            f"this machine was not measured yet: run {cache.CALIBRATE_COMMAND}, or name one of "
            f"{', '.join(PRESETS)} instead"
        )
    return _load_machine_file(path, f"run {cache.CALIBRATE_COMMAND} again")


def _load_machine_file(path: Path, advice: str) -> Machine:
    try:
        return Machine.from_json(path.read_text(encoding="utf-8"), name=path.stem)
    except OSError as error:
        raise ValueError(f"no machine can be read from {path}: {error.strerror or error}: {advice}") from None
    except ValueError as error:  # of which what is no UTF-8 is one
        raise ValueError(f"{path} describes no machine: {error}: {advice}") from None


def _check_field_names(names: Iterable[str]) -> None:
    known = [found.name for found in fields(Machine)]
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            raise ValueError(
                f"a machine has no {name!r}: did you mean {near[0]!r}?"
                if near
                else f"a machine has no {name!r}: it has {', '.join(known)}"
            )


def _parse_nested(name: str, given: Any, cls: type[EfficiencyCurve] | type[Link]) -> Any:
    """A curve or a link, perhaps from what JSON has in its place."""
    if isinstance(given, cls):
        return given
    wanted = [found.name for found in fields(cls)]
    if not isinstance(given, Mapping) or sorted(given) != sorted(wanted):
        raise ValueError(f"{name} has {' and '.join(wanted)}, got {given!r}")
    try:
        return cls(**given)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _check_flops(given: Any) -> dict[str, float]:
    if not isinstance(given, Mapping) or not given or not set(given) <= set(PRECISIONS):
        raise ValueError(f"flops has FLOP/s for some of {', '.join(PRECISIONS)}, got {given!r}")
    for name, value in given.items():
        if not _is_number(value) or value <= 0:
            raise ValueError(f"flops in {name} are a number of FLOP/s above 0, got {value!r}")
    return {name: float(given[name]) for name in PRECISIONS if name in given}


def _normalize_fields(part: Machine | Link, names: Iterable[str], prefix: str = "") -> None:
    """Check numbers, and bring those that are words with a unit into their form."""
    for name in names:
        value = getattr(part, name)
        if name in _BYTES_FIELDS:
            number = parse_bytes(name, value)
            if number is None:
                raise ValueError(f"{name} is a number of bytes, or one with a unit as in '64GB', got None")
            object.__setattr__(part, name, number)
            continue
        if name in _BANDWIDTH_FIELDS and isinstance(value, str):
            value = parse_bytes(f"{prefix}{name}, a second,", value.removesuffix("/s"))
        if not _is_number(value) or value < 0 or (value == 0 and name not in _SECONDS_FIELDS):
            wanted = "seconds from 0 up" if name in _SECONDS_FIELDS else "a number above 0"
            raise ValueError(f"{prefix}{name} is {wanted}, got {value!r}")
        object.__setattr__(part, name, float(value))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
