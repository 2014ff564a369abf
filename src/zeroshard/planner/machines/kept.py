"""Kept: where the rates of measured machines lie, in the user's cache.

A file is named after its machine, so that machines with one home directory have one each.
"""

from __future__ import annotations

import os
import platform
import re
import tempfile
from pathlib import Path

CALIBRATE = "`zeroshard plan --calibrate`"  # what measures a machine


def directory() -> Path:
    """Where the files lie: under $XDG_CACHE_HOME, or ~/.cache."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    return root / "zeroshard" / "machines"


def name_here(kind: str) -> str:
    """What this machine is called, with devices of a kind.

    >>> name_here("cuda").endswith("-cuda")
    True
    """
    return f"{re.sub(r'[^A-Za-z0-9._-]+', '-', platform.node()).strip('.-') or 'machine'}-{kind}"


def path_of(name: str) -> Path:
    """The file of a machine."""
    return directory() / f"{name}.json"


def keep(name: str, text: str) -> Path:
    """Write a machine's file, as a whole or not at all."""
    target = path_of(name)
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(suffix=".tmp", prefix=name, dir=target.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, target)
    finally:
        Path(temporary).unlink(missing_ok=True)
    return target


def path_here() -> Path | None:
    """The file of this machine: with its GPUs where these were measured, else of its processors; None: neither was."""
    return next((path for kind in ("cuda", "cpu") if (path := path_of(name_here(kind))).exists()), None)
