"""Store the rates of measured machines in the user's cache directory.

A file is named after its machine, so machines that share a home directory have separate files.
"""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path

from zeroshard.utils.atomic_file import write_atomic

CALIBRATE_COMMAND = "`zeroshard plan --calibrate`"  # measures this machine


def cache_dir() -> Path:
    """Return the directory of the files: under $XDG_CACHE_HOME, or ~/.cache."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    return root / "zeroshard" / "machines"


def local_machine_name(kind: str) -> str:
    """Return the name of this machine with devices of a kind.

    >>> local_machine_name("cuda").endswith("-cuda")
    True
    """
    return f"{re.sub(r'[^A-Za-z0-9._-]+', '-', platform.node()).strip('.-') or 'machine'}-{kind}"


def machine_path(name: str) -> Path:
    """Return the path of a machine's file."""
    return cache_dir() / f"{name}.json"


def write_machine(name: str, text: str) -> Path:
    """Write a machine's file atomically."""
    target = machine_path(name)
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_atomic(target, text.encode(), target.with_name(f".{name}.{os.getpid()}.partial"))
    return target


def local_machine_path() -> Path | None:
    """Return this machine's file: for its GPUs if measured, else for its CPUs; None if neither was measured."""
    return next((path for kind in ("cuda", "cpu") if (path := machine_path(local_machine_name(kind))).exists()), None)
