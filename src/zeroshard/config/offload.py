"""Offload: which training states are placed outside the device, in which tier, and how much of them."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

TIERS = ("device", "host", "disk")  # the fastest first
STATE_KINDS = ("optimizer", "gradients", "parameters")
_BYTES_PER_UNIT = {
    "": 1,
    "B": 1,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
}
_SIZE_PATTERN = re.compile(r"\s*([0-9]{1,18}(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


@dataclass(frozen=True, kw_only=True)
class Offload:
    """Where states are placed. Each kind moves fully or by fraction; the first units in forward get the fastest tier.

    Backward visits those units last, so their gradients are ready last, and the next forward needs them first: in the
    fastest tier they do not wait for a slower one.

    >>> Offload(optimizer=("host", 0.75)).optimizer
    {'host': 0.75}
    >>> Offload(optimizer={"host": 0.5, "disk": 0.25}, directory=".").optimizer
    {'disk': 0.25, 'host': 0.5}
    >>> Offload(optimizer="hots")
    Traceback (most recent call last):
        ...
    ValueError: the tier of optimizer must be 'device', 'host' or 'disk', got 'hots'
    """

    optimizer: Any = "device"
    """Optimizer states and master weights: "host", "disk", ("host", 0.5), or {"host": 0.5, "disk": 0.5}. The CPU
    updates what is offloaded."""

    gradients: Any = None
    """Reduced gradients, if they are partitioned (stages 2 and 3, or one rank). None: on the host if no optimizer
    states are on the device, since the gradients are copied there in any case; else on the device."""

    parameters: Any = "device"
    """This rank's parameter shards, in stage 3: copied to the device for each use."""

    host_bytes: int | str | None = None
    """Host memory limit of this rank: bytes, or a string like "64GB". What does not fit stays in a faster tier."""

    disk_bytes: int | str | None = None
    """The same for disk."""

    directory: str | os.PathLike[str] | None = None
    """Directory of this rank's file, for states on disk. The file has no name, so nothing is left after a crash."""

    speculate: bool = True
    """Start CPU updates while backward is still running, if the loop is expected to step next. Results are written to
    shadow buffers and take effect only when ``step()`` commits them; that needs the same amount of host memory
    again, and is limited to what is available. Off: updates start with ``step()``."""

    threads: int | None = None
    """Threads for CPU updates. None: this rank's share of the cores, less two for PyTorch."""

    def __new__(cls, **options: Any) -> Offload:
        check_option_names([field.name for field in fields(cls)], options, "offload option")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        """Validate all options, and convert every kind to fractions by tier, the slowest first."""
        for kind in STATE_KINDS:
            given = getattr(self, kind)
            if kind != "gradients" or given is not None:
                object.__setattr__(self, kind, _parse_fractions(kind, given))
        for name in ("host_bytes", "disk_bytes"):
            object.__setattr__(self, name, parse_bytes(name, getattr(self, name)))
        if not isinstance(self.speculate, bool):
            raise ValueError(f"speculate must be True or False, got {self.speculate!r}")
        if self.threads is not None and (type(self.threads) is not int or self.threads < 1):
            raise ValueError(f"threads must be None or an integer of at least 1, got {self.threads!r}")
        if self.directory is None:
            for kind in STATE_KINDS:
                if "disk" in (getattr(self, kind) or ()):
                    raise ValueError(f"{kind} is placed on disk: set directory=… to a path on a fast local disk")
        elif not isinstance(self.directory, (str, os.PathLike)):
            raise ValueError(f"directory must be a path, got {self.directory!r}")

    @classmethod
    def from_option(cls, option: Any) -> Offload | None:
        """Convert the ``offload`` option: None, a tier for the optimizer states, a dictionary, or an Offload.

        >>> Offload.from_option("host") == Offload.from_option({"optimizer": "host"}) == Offload(optimizer="host")
        True
        >>> Offload.from_option(Offload()) is None  # nothing leaves the device
        True
        """
        if option is None or option is False:
            return None
        if isinstance(option, str):
            option = cls(optimizer=option)
        elif isinstance(option, Mapping):
            option = cls(**option)
        if not isinstance(option, Offload):
            raise ValueError(f"offload must be None, 'host', a dictionary or a zeroshard.Offload, got {option!r}")
        return option if any(getattr(option, kind) for kind in STATE_KINDS) else None

    def byte_limit(self, tier: str) -> int | None:
        """Return the byte limit of a tier; None if there is none."""
        limit: int | None = getattr(self, f"{tier}_bytes", None)
        return limit

    @property
    def summary(self) -> str:
        """The options that must be equal on all ranks. The directory and the threads may differ."""
        return ", ".join(f"{name} {getattr(self, name)}" for name in (*STATE_KINDS, "host_bytes", "disk_bytes"))

    @property
    def needs_disk(self) -> bool:
        return any("disk" in (getattr(self, kind) or ()) for kind in STATE_KINDS)


def _parse_fractions(kind: str, given: Any) -> dict[str, float]:
    """Return nonzero fractions by tier, the slowest first, without the device's."""
    if isinstance(given, str):
        given = {given: 1.0}
    elif isinstance(given, (tuple, list)) and len(given) == 2:
        given = {given[0]: given[1]}
    if not isinstance(given, Mapping):
        raise ValueError(
            f"{kind} must be a tier, a pair of a tier and a fraction, or fractions by tier, such as 'host', ('host', "
            f"0.5) or {{'host': 0.5, 'disk': 0.5}}, got {given!r}"
        )
    for tier, fraction in given.items():
        if tier not in TIERS:
            raise ValueError(f"the tier of {kind} must be 'device', 'host' or 'disk', got {tier!r}")
        if isinstance(fraction, bool) or not isinstance(fraction, (int, float)) or not 0 <= fraction <= 1:
            raise ValueError(f"the fraction of {kind} on {tier} must be from 0 to 1, got {fraction!r}")
    if sum(given.values()) > 1 + 1e-9:
        raise ValueError(f"the fractions of {kind} add up to {sum(given.values()):g}, which is more than 1")
    return {tier: float(given[tier]) for tier in reversed(TIERS[1:]) if given.get(tier)}


def parse_bytes(name: str, given: Any) -> int | None:
    """Return a number of bytes given as an integer, as a string like "64GB", or as None.

    >>> parse_bytes("host_bytes", "1.5GiB")
    1610612736
    """
    match = _SIZE_PATTERN.fullmatch(given) if isinstance(given, str) else None
    if match is not None and match[2] in _BYTES_PER_UNIT:
        return int(float(match[1]) * _BYTES_PER_UNIT[match[2]])
    if given is None or (type(given) is int and 0 <= given < 2**63):
        return given
    raise ValueError(f"{name} is a number of bytes, or one with a unit as in '64GB' or '60GiB', got {given!r}")


def check_option_names(known: Sequence[str], given: Iterable[str], what: str = "option") -> None:
    """Raise if an option is unknown, and suggest the closest one.

    >>> check_option_names(["stage", "precision"], ["stagee"])
    Traceback (most recent call last):
        ...
    TypeError: unknown option 'stagee': did you mean 'stage'?
    """
    for name in given:
        if name not in known:
            matches = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f"did you mean {matches[0]!r}?" if matches else f"the options are {', '.join(known)}"
            raise TypeError(f"unknown {what} {name!r}: {hint}")
