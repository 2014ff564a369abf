"""History: the checkpoints of one directory, which of them is the latest, and which are let go.

[Note: a save under way]
A directory with data files and no index is what a killed save leaves, and also what a save under way looks like. So the
first rank of a save holds a lock (``flock``) on the directory itself while it writes, which the system releases however
the process ends. Nobody removes a directory that is locked, and nobody saves into it. Some file systems (NFS) lock no
directories: there a directory in which something changed within the last hour counts as in use.
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

from zeroshard.checkpoint.errors import CheckpointError
from zeroshard.checkpoint.index import INDEX_FILE, CheckpointIndex, is_checkpoint
from zeroshard.utils.atomic_file import is_file_name, write_atomic

LATEST_FILE = "latest"
MAX_NAME_BYTES = 4096  # bytes of the file `latest`
IN_USE_SECONDS = (
    3600.0  # seconds since the last change of a directory that cannot be locked: see [Note: a save under way]
)
LOCK_TIMEOUT_SECONDS = 5.0  # seconds to wait for one who looks whether a directory may be removed
RUN_SUBDIRECTORY = "checkpoints"  # where a run of `zeroshard train` has them
_DATA_FILE_PATTERN = re.compile(r"(model|optimizer|other)-\d{5,}-[0-9a-f]{8}\.safetensors")
_PARTIAL_FILE_PATTERN = re.compile(rf"\.{re.escape(INDEX_FILE)}\.partial")


def list_checkpoints(parent: Path) -> list[Path]:
    """The whole checkpoints in a directory, the newest last: by step, whatever the clock said when they were written.

    The step is the last number of a name; of a name without one, what ``extra["step"]`` says.
    """
    found = []
    for path in parent.iterdir() if parent.is_dir() else ():
        with suppress(FileNotFoundError):  # another run may remove it meanwhile
            if is_checkpoint(path):
                found.append(((_read_step(path), (path / INDEX_FILE).stat().st_mtime_ns, path.name), path))
    return [path for _, path in sorted(found)]


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
    """Make ``latest``, a file beside the checkpoint, name it."""
    pointer = checkpoint.with_name(LATEST_FILE)
    deadline = time.monotonic() + LOCK_TIMEOUT_SECONDS
    while True:
        with try_lock(pointer.parent) as free:  # two runs may point it at once
            if free or time.monotonic() > deadline:
                write_atomic(pointer, f"{checkpoint.name}\n".encode(), writer=_name_without_step(checkpoint))
                return
        time.sleep(0.01)


def find_checkpoint(path: Path) -> Path:
    """The checkpoint a path means: itself, or the latest in a directory or a run's (also as ``DIRECTORY/latest``)."""
    if (path / INDEX_FILE).is_file():
        return path
    parent = path.parent if path.name == LATEST_FILE else path
    if (parent / RUN_SUBDIRECTORY).is_dir():
        parent = parent / RUN_SUBDIRECTORY
    name = _read_latest(parent / LATEST_FILE)
    if name:
        named = parent / name
        if (named / INDEX_FILE).is_file():  # also where it is damaged: to go back is for people to decide
            return named
    whole = list_checkpoints(parent)
    if whole:
        return whole[-1]
    if not path.exists() and path.name != LATEST_FILE:
        raise CheckpointError(f"{path} is not there: give a checkpoint, or a directory of checkpoints")
    raise CheckpointError(f"{path} is no checkpoint, and no directory with a whole one: it has no {INDEX_FILE}")


def _read_latest(pointer: Path) -> str:
    """What the file ``latest`` names: a checkpoint beside it, never something elsewhere. Empty: nothing."""
    if not pointer.is_file():
        return ""
    with open(pointer, "rb") as file:
        content = file.read(MAX_NAME_BYTES)
    name = content.decode(errors="replace").strip()
    if name and not is_file_name(name):
        raise CheckpointError(
            f"{pointer} names {name[:200]!r}, expected the name of a checkpoint in {pointer.parent}: give the path of "
            f"the checkpoint itself, or remove {pointer} to take the newest by step"
        )
    return name


def prune(parent: Path, keep: int, newest: Path) -> None:
    """Remove all but the ``keep`` checkpoints of the highest steps, and what killed saves left. ``newest`` stays.

    Only directories count that are called like the newest but for their last number: others are somebody else's. What
    cannot be removed, or is being written, is left, with a warning: the newest is whole all the same.
    """
    alike = [
        path
        for path in parent.iterdir()
        if _name_without_step(path) == _name_without_step(newest) and not path.is_symlink()
    ]
    others = [path for path in list_checkpoints(parent) if path in alike and path != newest]
    for path in others[: max(len(others) - (keep - 1), 0)]:
        _remove_checkpoint(path)
    for path in alike:
        if path != newest and path.is_dir() and not is_checkpoint(path) and is_interrupted_save(path):
            _remove_checkpoint(path)


def _remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint, or what is left of one, unless somebody is writing it."""
    try:
        with try_lock(path) as free:
            if free:
                (path / INDEX_FILE).unlink(missing_ok=True)  # from this moment on it is no checkpoint
                shutil.rmtree(path)
    except FileNotFoundError:
        return  # somebody else has removed it
    except OSError as error:
        _warn_not_removed(path, error)


@contextmanager
def try_lock(directory: Path) -> Iterator[bool]:
    """Hold a directory's lock, or say that somebody else has it: see [Note: a save under way]."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            free = True
        except BlockingIOError:
            free = False
        except OSError:  # it cannot be locked
            free = (
                is_checkpoint(directory)
                or not is_interrupted_save(directory)
                or _seconds_since_change(directory) > IN_USE_SECONDS
            )
        yield free
    finally:
        os.close(descriptor)


def _seconds_since_change(directory: Path) -> float:
    """Seconds since something in a directory changed."""
    return time.time() - max(path.stat().st_mtime for path in (directory, *directory.iterdir()))


class SaveLock:
    """The lock of a directory that is saved into: see [Note: a save under way].

    >>> import tempfile
    >>> directory = Path(tempfile.mkdtemp()) / "step-1"
    >>> lock = SaveLock(directory)
    >>> with try_lock(directory) as free:
    ...     free
    False
    >>> lock.release()
    """

    def __init__(self, directory: Path) -> None:
        """Make the directory and lock it; raises CheckpointError where another save into it is under way."""
        deadline = time.monotonic() + LOCK_TIMEOUT_SECONDS
        while True:
            directory.mkdir(parents=True, exist_ok=True)
            try:
                self._descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            except FileNotFoundError:  # removed in between, as what a killed save has left
                continue
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_same_directory(directory, self._descriptor):
                    return
            except BlockingIOError:
                if time.monotonic() > deadline:
                    os.close(self._descriptor)
                    raise CheckpointError(
                        f"another process is saving into {directory}: give each run a directory of its own, or wait "
                        "until that save is over"
                    ) from None
                time.sleep(0.05)
            except OSError:
                return  # it cannot be locked
            os.close(self._descriptor)

    def release(self) -> None:
        """Let others have the directory."""
        if self._descriptor >= 0:
            with suppress(OSError):  # it could not be locked
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # also for forked processes that have the descriptor
            os.close(self._descriptor)
        self._descriptor = -1


def _is_same_directory(directory: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(directory.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _name_without_step(path: Path) -> str:
    """A name without its last number: ``pp0-step-100`` and ``pp0-step-200`` are of one series, ``pp1-step-200`` not."""
    return re.sub(r"\d+(?=\D*$)", "", path.name)


def is_interrupted_save(path: Path) -> bool:
    """Whether a directory holds nothing, or nothing but what a save that was cut off leaves."""
    try:
        return all(
            _DATA_FILE_PATTERN.fullmatch(child.name) or _PARTIAL_FILE_PATTERN.fullmatch(child.name)
            for child in path.iterdir()
        )
    except FileNotFoundError:
        return False  # somebody else has removed it


def remove_stale_files(checkpoint: Path, current: set[str]) -> None:
    """Remove what earlier saves left in a checkpoint's directory; what cannot be removed is a warning."""
    for path in checkpoint.iterdir():
        if (_DATA_FILE_PATTERN.fullmatch(path.name) and path.name not in current) or _PARTIAL_FILE_PATTERN.fullmatch(
            path.name
        ):
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                _warn_not_removed(path, error)


def _warn_not_removed(path: Path, error: OSError) -> None:
    """Say that something old stays where it is, beside a save that is whole."""
    warnings.warn(
        f"{path}, of an earlier save, cannot be removed: {error.strerror or error}. The new checkpoint is whole. "
        "Remove the old files by hand, and see to the rights on their directory",
        stacklevel=3,
    )
