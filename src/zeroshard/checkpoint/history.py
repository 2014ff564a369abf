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
from zeroshard.checkpoint.index import INDEX, Index, is_checkpoint
from zeroshard.checkpoint.whole import is_file_name, write_whole

LATEST = "latest"
MOST_NAME = 4096  # bytes of the file `latest`
IN_USE = 3600.0  # seconds since the last change of a directory that cannot be locked: see [Note: a save under way]
PATIENCE = 5.0  # seconds to wait for one who looks whether a directory may be removed
RUN = "checkpoints"  # where a run of `zeroshard train` has them
_DATA = re.compile(r"(model|optimizer|other)-\d{5,}-[0-9a-f]{8}\.safetensors")
_PARTIAL = re.compile(rf"\.{re.escape(INDEX)}\.partial")


def checkpoints(parent: Path) -> list[Path]:
    """The whole checkpoints in a directory, the newest last: by step, whatever the clock said when they were written.

    The step is the last number of a name; of a name without one, what ``extra["step"]`` says.
    """
    found = []
    for path in parent.iterdir() if parent.is_dir() else ():
        with suppress(FileNotFoundError):  # another run may remove it meanwhile
            if is_checkpoint(path):
                found.append(((_step(path), (path / INDEX).stat().st_mtime_ns, path.name), path))
    return [path for _, path in sorted(found)]


def _step(path: Path) -> int:
    numbers = re.findall(r"[0-9]+", path.name)
    if numbers:
        return int(numbers[-1][-100:])
    try:
        extra = Index.read(path).extra
    except CheckpointError:
        return -1
    step = extra.get("step") if isinstance(extra, dict) else None
    return step if type(step) is int else -1


def point_latest(checkpoint: Path) -> None:
    """Make ``latest``, a file beside the checkpoint, name it."""
    pointer = checkpoint.with_name(LATEST)
    deadline = time.monotonic() + PATIENCE
    while True:
        with locked(pointer.parent) as free:  # two runs may point it at once
            if free or time.monotonic() > deadline:
                write_whole(pointer, f"{checkpoint.name}\n".encode(), writer=_series(checkpoint))
                return
        time.sleep(0.01)


def find_checkpoint(path: Path) -> Path:
    """The checkpoint a path means: itself, or the latest in a directory or a run's (also as ``DIRECTORY/latest``)."""
    if (path / INDEX).is_file():
        return path
    parent = path.parent if path.name == LATEST else path
    if (parent / RUN).is_dir():
        parent = parent / RUN
    name = _latest_name(parent / LATEST)
    if name:
        named = parent / name
        if (named / INDEX).is_file():  # also where it is damaged: to go back is for people to decide
            return named
    whole = checkpoints(parent)
    if whole:
        return whole[-1]
    if not path.exists() and path.name != LATEST:
        raise CheckpointError(f"{path} is not there: give a checkpoint, or a directory of checkpoints")
    raise CheckpointError(f"{path} is no checkpoint, and no directory with a whole one: it has no {INDEX}")


def _latest_name(pointer: Path) -> str:
    """What the file ``latest`` names: a checkpoint beside it, never something elsewhere. Empty: nothing."""
    if not pointer.is_file():
        return ""
    with open(pointer, "rb") as file:
        content = file.read(MOST_NAME)
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
    alike = [path for path in parent.iterdir() if _series(path) == _series(newest) and not path.is_symlink()]
    others = [path for path in checkpoints(parent) if path in alike and path != newest]
    for path in others[: max(len(others) - (keep - 1), 0)]:
        _remove(path)
    for path in alike:
        if path != newest and path.is_dir() and not is_checkpoint(path) and is_leftover(path):
            _remove(path)


def _remove(path: Path) -> None:
    """Remove a checkpoint, or what is left of one, unless somebody is writing it."""
    try:
        with locked(path) as free:
            if free:
                (path / INDEX).unlink(missing_ok=True)  # from this moment on it is no checkpoint
                shutil.rmtree(path)
    except FileNotFoundError:
        return  # somebody else has removed it
    except OSError as error:
        _warn_of(path, error)


@contextmanager
def locked(directory: Path) -> Iterator[bool]:
    """Hold a directory's lock, or say that somebody else has it: see [Note: a save under way]."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            free = True
        except BlockingIOError:
            free = False
        except OSError:  # it cannot be locked
            free = is_checkpoint(directory) or not is_leftover(directory) or _age(directory) > IN_USE
        yield free
    finally:
        os.close(descriptor)


def _age(directory: Path) -> float:
    """Seconds since something in a directory changed."""
    return time.time() - max(path.stat().st_mtime for path in (directory, *directory.iterdir()))


class SaveLock:
    """The lock of a directory that is saved into: see [Note: a save under way].

    >>> import tempfile
    >>> directory = Path(tempfile.mkdtemp()) / "step-1"
    >>> lock = SaveLock(directory)
    >>> with locked(directory) as free:
    ...     free
    False
    >>> lock.release()
    """

    def __init__(self, directory: Path) -> None:
        """Make the directory and lock it; raises CheckpointError where another save into it is under way."""
        deadline = time.monotonic() + PATIENCE
        while True:
            directory.mkdir(parents=True, exist_ok=True)
            try:
                self._descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            except FileNotFoundError:  # removed in between, as what a killed save has left
                continue
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_same(directory, self._descriptor):
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


def _is_same(directory: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(directory.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _series(path: Path) -> str:
    """A name without its last number: ``pp0-step-100`` and ``pp0-step-200`` are of one series, ``pp1-step-200`` not."""
    return re.sub(r"\d+(?=\D*$)", "", path.name)


def is_leftover(path: Path) -> bool:
    """Whether a directory holds nothing, or nothing but what a save that was cut off leaves."""
    try:
        return all(_DATA.fullmatch(child.name) or _PARTIAL.fullmatch(child.name) for child in path.iterdir())
    except FileNotFoundError:
        return False  # somebody else has removed it


def sweep(checkpoint: Path, current: set[str]) -> None:
    """Remove what earlier saves left in a checkpoint's directory; what cannot be removed is a warning."""
    for path in checkpoint.iterdir():
        if (_DATA.fullmatch(path.name) and path.name not in current) or _PARTIAL.fullmatch(path.name):
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                _warn_of(path, error)


def _warn_of(path: Path, error: OSError) -> None:
    """Say that something old stays where it is, beside a save that is whole."""
    warnings.warn(
        f"{path}, of an earlier save, cannot be removed: {error.strerror or error}. The new checkpoint is whole. "
        "Remove the old files by hand, and see to the rights on their directory",
        stacklevel=3,
    )
