"""The checkpoints of one directory: find the latest and remove old ones.

[Note: asynchronous save]
A directory with data files and no index is either an interrupted save or a save in progress. To tell them apart, the
first rank of a save locks the directory (``flock``) while it writes; the system releases the lock however the process
ends. A locked directory is not removed, and no other save writes into it. Where the file system cannot lock directories
(some NFS), only complete checkpoints are removed; of others a warning is given.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from zeroshard.checkpoint.group import CheckpointError
from zeroshard.checkpoint.index import INDEX_FILE, CheckpointIndex, is_checkpoint
from zeroshard.checkpoint.schema import TENSOR_KINDS
from zeroshard.utils.atomic_file import is_file_name, write_atomic

LATEST_FILE = "latest"
MAX_NAME_BYTES = 4096  # read from the file `latest`
LOCK_TIMEOUT_SECONDS = 5.0  # another process holds the lock briefly while it decides about removal
RUN_SUBDIRECTORY = "checkpoints"  # in the output directory of `zeroshard train`
# data files, and an index or a pointer that is being written
_SAVE_FILE_PATTERN = re.compile(
    rf"({'|'.join(TENSOR_KINDS)})-\d{{5,}}-[0-9a-f]{{8}}\.safetensors|\.({re.escape(INDEX_FILE)}|{LATEST_FILE})\.partial"
)


def list_checkpoints(parent: Path) -> list[Path]:
    """Return the complete checkpoints in a directory in order of step, the newest last.

    The step is the last number in a name, or ``extra["step"]`` if the name has no number. Time decides only between
    equal steps.
    """
    sortable = []
    for path in parent.iterdir() if parent.is_dir() else ():
        with suppress(FileNotFoundError):  # another process may remove it concurrently
            if is_checkpoint(path):
                sortable.append(((_read_step(path), (path / INDEX_FILE).stat().st_mtime_ns, path.name), path))
    return [path for _, path in sorted(sortable)]


def _read_step(path: Path) -> int:
    numbers = re.findall(r"[0-9]+", path.name)
    if numbers:
        return int(numbers[-1][-100:])
    try:
        extra = CheckpointIndex.read(path).extra
    except CheckpointError:
        return -1
    step = extra.get("step") if isinstance(extra, dict) else None
    return step if type(step) is int else -1


def update_latest(checkpoint: Path) -> None:
    """Write the checkpoint's name into the file ``latest`` next to it.

    >>> import tempfile
    >>> parent = Path(tempfile.mkdtemp())
    >>> (parent / "step-7").mkdir()
    >>> update_latest(parent / "step-7")
    >>> (parent / "latest").read_text()
    'step-7\\n'
    """
    # first in the checkpoint's directory, which is locked: other jobs may update the same pointer
    partial = checkpoint / f".{LATEST_FILE}.partial"
    write_atomic(checkpoint.with_name(LATEST_FILE), f"{checkpoint.name}\n".encode(), partial)


def find_checkpoint(path: Path) -> Path:
    """Resolve a path: a checkpoint, or the latest in a directory or training output (also ``DIRECTORY/latest``)."""
    if (path / INDEX_FILE).is_file():
        return path
    parent = path.parent if path.name == LATEST_FILE else path
    if (parent / RUN_SUBDIRECTORY).is_dir():
        parent = parent / RUN_SUBDIRECTORY
    name = _read_latest(parent / LATEST_FILE)
    if name and (parent / name / INDEX_FILE).is_file():  # even if damaged: the user decides whether to go back
        return parent / name
    checkpoints = list_checkpoints(parent)
    if checkpoints:
        return checkpoints[-1]
    if not path.exists() and path.name != LATEST_FILE:
        raise CheckpointError(f"{path} does not exist: pass a checkpoint, or a directory of checkpoints")
    raise CheckpointError(f"{path} is neither a checkpoint nor a directory with a complete one: it has no {INDEX_FILE}")


def _read_latest(pointer: Path) -> str:
    """Return the checkpoint that the file ``latest`` names, or "". It must be in the same directory."""
    if not pointer.is_file():
        return ""
    with open(pointer, "rb") as file:
        content = file.read(MAX_NAME_BYTES)
    name = content.decode(errors="replace").strip()
    if name and not is_file_name(name):
        raise CheckpointError(
            f"{pointer} names {name[:200]!r}, expected the name of a checkpoint in {pointer.parent}: pass the path of "
            f"the checkpoint itself, or remove {pointer} to load the checkpoint of the highest step"
        )
    return name


def prune(parent: Path, keep: int, newest: Path) -> None:
    """Remove all but the ``keep`` checkpoints with the highest steps, and interrupted saves. ``newest`` stays.

    Only directories whose names differ from ``newest`` in the last number count; others belong to other jobs. A
    directory that is being written stays. One that cannot be removed causes a warning, because ``newest`` is complete
    in any case.
    """
    same_series = [
        path
        for path in parent.iterdir()
        if _name_without_step(path) == _name_without_step(newest) and not path.is_symlink()
    ]
    others = [path for path in list_checkpoints(parent) if path in same_series and path != newest]
    for path in others[: max(len(others) - (keep - 1), 0)]:
        _remove_checkpoint(path)
    for path in same_series:
        if path != newest and path.is_dir() and is_interrupted_save(path):
            _remove_checkpoint(path)


def _remove_checkpoint(path: Path) -> None:
    """Remove a complete or partial checkpoint, unless another process is writing it."""
    try:
        descriptor = _open_directory(path)
        try:
            is_locked = _try_flock(descriptor)
            if is_locked is None and not is_checkpoint(path):
                raise OSError("the file system cannot lock it, so a save into it may be in progress")
            if is_locked is not False:
                (path / INDEX_FILE).unlink(missing_ok=True)  # first: without an index it is not a checkpoint
                shutil.rmtree(path)
        finally:
            os.close(descriptor)
    except FileNotFoundError:
        return  # another process has removed it
    except OSError as error:
        warnings.warn(
            f"{path} of an earlier save cannot be removed: {error.strerror or error}. The new checkpoint is complete. "
            "Remove the old files yourself, and check the permissions of their directory",
            stacklevel=2,
        )


def _open_directory(directory: Path) -> int:
    return os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def _try_flock(descriptor: int) -> bool | None:
    """Try to lock an open directory; return whether it is locked now, or None if the file system cannot do so."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    except OSError:
        return None


@contextmanager
def lock_for_save(directory: Path) -> Iterator[None]:
    """Create and lock a directory; raise CheckpointError if another save into it is in progress.

    >>> import tempfile
    >>> with lock_for_save(Path(tempfile.mkdtemp()) / "step-1"):
    ...     pass  # another process cannot lock it now
    """
    deadline = time.monotonic() + LOCK_TIMEOUT_SECONDS
    while True:
        directory.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = _open_directory(directory)
        except FileNotFoundError:  # another process removed it as an interrupted save
            continue
        is_locked = _try_flock(descriptor)
        if is_locked is None or (is_locked and _is_same_directory(directory, descriptor)):
            break
        os.close(descriptor)
        if not is_locked:
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"another process is saving into {directory}: give each run its own directory, or wait until "
                    "that save is done"
                )
            time.sleep(0.05)
    try:
        yield
    finally:
        with suppress(OSError):  # it was not locked
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # explicitly, as forked processes share the descriptor
        os.close(descriptor)


def _is_same_directory(directory: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(directory.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _name_without_step(path: Path) -> str:
    """Return a name without its last number: equal for ``pp0-step-100`` and ``pp0-step-200``, not ``pp1-step-200``."""
    return re.sub(r"\d+(?=\D*$)", "", path.name)


def is_interrupted_save(path: Path) -> bool:
    """Return whether a directory is empty or contains only files of an interrupted save."""
    try:
        return all(_SAVE_FILE_PATTERN.fullmatch(child.name) for child in path.iterdir())
    except FileNotFoundError:
        return False  # another process has removed it


def finish_save(checkpoint: Path, files: set[str], keep: int | None) -> None:
    """Point ``latest`` at a checkpoint that is complete, and remove what is not needed any more.

    ``files`` are the checkpoint's own. Problems cause warnings: the save itself has succeeded.
    """
    try:
        update_latest(checkpoint)
        if keep is not None:
            prune(checkpoint.parent, keep, checkpoint)
        for path in checkpoint.iterdir():  # of earlier saves to the same path
            if _SAVE_FILE_PATTERN.fullmatch(path.name) and path.name not in files:
                path.unlink()
    except OSError as error:
        warnings.warn(
            f"{checkpoint} is complete, but {checkpoint.parent} is not up to date: {error}. A load of the latest "
            f"checkpoint may read an earlier one, and old ones stay: load it by its own path",
            stacklevel=2,
        )
