"""Small files: written atomically, and read with errors that name the file."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any


def write_atomic(path: Path, data: bytes, partial: Path | None = None) -> None:
    """Write a file atomically: at any time, its name refers to the old content or to all of the new.

    The content is first written into the file ``partial``. Several processes may write ``path`` at the same time if
    each passes a different one, on the same file system.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "note"
    >>> write_atomic(path, b"all of it")
    >>> path.read_bytes()
    b'all of it'
    """
    partial = partial or path.with_name(f".{path.name}.partial")
    try:
        with open(partial, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        fsync_directory(path.parent)
    except OSError as error:
        with suppress(OSError):  # the first error is the one to raise
            partial.unlink()
        raise OSError(error.errno, f"cannot write {path}: {error.strerror}") from error


def fsync_directory(directory: Path) -> None:
    """Make new names in a directory survive a crash of the machine."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_file_name(name: Any) -> bool:
    """Return whether ``name`` is a file name without a path.

    >>> is_file_name("model-00000-0a1b2c3d.safetensors"), is_file_name("../a"), is_file_name("/etc/passwd")
    (True, False, False)
    """
    return isinstance(name, str) and name not in ("", ".", "..") and not any(c in name for c in "/\\\0")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON ({error}): another program wrote it, or it is damaged") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must contain a JSON object (got a {type(value).__name__})")
    return value


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON object atomically."""
    write_atomic(path, json.dumps(value, indent=2).encode())
