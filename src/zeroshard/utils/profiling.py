"""label(): ranges that profilers show. ChromeTrace: what a profiler has seen, as a file that trace viewers open."""

from __future__ import annotations

import gzip
import json
import os
import threading
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch._C._profiler import _ExperimentalConfig
from torch.autograd import profiler
from torch.profiler import record_function

from zeroshard.utils.atomic_file import write_atomic

PREFIX = "zeroshard: "  # of all labels
MAX_EVENTS = 1_000_000  # in one file, about 300 MB uncompressed: viewers become slow with more
SUFFIXES = (".json.gz", ".json")


class _NoLabel:
    """A context that does nothing, without a call of Python code: its methods take any arguments and return ""."""

    __enter__ = __exit__ = "".format


_NO_LABEL = cast("AbstractContextManager[Any]", _NoLabel())


def label(text: str, *args: object) -> AbstractContextManager[Any]:
    """Return a context that a running profiler shows as a range named ``zeroshard: text``, with ``args`` filled in.

    Without a profiler it does nothing, and ``text`` is not formatted: that takes 1/50 of an unused ``record_function``.
    The flag it reads is that of the process: a profiler that another thread has started counts.

    >>> with profiler.profile() as found, label("unshard {!r}", "blocks.3"):
    ...     pass
    >>> [event.name for event in found.function_events]
    ["zeroshard: unshard 'blocks.3'"]
    """
    if not profiler._is_profiler_enabled:
        return _NO_LABEL
    name = (PREFIX + text.format(*args)).removesuffix(" ''")  # the model itself has no name
    # torch's traces show other characters as "unknown", and break at a double quote
    return record_function(name.replace('"', "'").encode("ascii", "replace").decode())


class ChromeTrace:
    """Context manager: profiles all threads of this process, and writes a Chrome trace when the block ends.

    Each rank of the job writes its own file: ``trace.json`` becomes ``trace-rank0.json``. Nothing is written if the
    block raises.

    >>> import tempfile
    >>> with ChromeTrace(tempfile.mkdtemp() + "/trace.json", torch.device("cpu")) as trace:
    ...     with label("a phase"):
    ...         pass
    >>> trace.path.name, "zeroshard: a phase" in trace.path.read_text()
    ('trace-rank0.json', True)
    """

    def __init__(self, path: str | os.PathLike[str], device: torch.device) -> None:
        is_distributed = dist.is_available() and dist.is_initialized()
        self._rank, self._ranks = (dist.get_rank(), dist.get_world_size()) if is_distributed else (0, 1)
        self.path = _rank_path(Path(path), self._rank)
        self._partial = self.path.with_name(f".{self.path.name}.torch")  # as torch writes it
        self._profiler = profiler.profile(
            use_kineto=True,
            use_device="cuda" if device.type == "cuda" else None,
            experimental_config=_ExperimentalConfig(profile_all_threads=True),  # those of CPU updates too
        )

    def __enter__(self) -> ChromeTrace:
        if profiler._is_profiler_enabled:
            raise RuntimeError(
                "a profiler is already running in this process, and torch has one at a time: its own trace will show "
                "zeroshard's labels. Leave out trace=…, or end that profiler first"
            )
        _check_writable(self.path, self._partial)
        try:
            self._profiler.__enter__()  # type: ignore[no-untyped-call]
        except BaseException:
            self._partial.unlink(missing_ok=True)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self._profiler.__exit__(kind, error, traceback)  # type: ignore[no-untyped-call]
            if kind is None:
                self._write()
        finally:
            self._partial.unlink(missing_ok=True)

    def _write(self) -> None:
        self._profiler.export_chrome_trace(str(self._partial))  # type: ignore[no-untyped-call]
        try:
            trace = json.loads(self._partial.read_text(encoding="utf-8", errors="replace"))
        except ValueError as error:
            raise ValueError(
                f"no trace was written to {self.path}: what torch wrote is not JSON ({error}). Remove double quotes "
                "from the names of your own record_function ranges"
            ) from error
        _name_lanes(trace["traceEvents"], f"rank {self._rank}", _thread_names())
        trace["traceEvents"] = _limit_events(trace["traceEvents"])
        # as torch.profiler writes it: tools that read the traces of several ranks look for it
        trace["distributedInfo"] = {"rank": self._rank, "world_size": self._ranks}
        trace["traceName"] = self.path.name
        data = json.dumps(trace, separators=(",", ":")).encode()
        write_atomic(self.path, gzip.compress(data) if self.path.suffix == ".gz" else data)


def _rank_path(path: Path, rank: int) -> Path:
    """Return the path of one rank's file.

    >>> _rank_path(Path("traces/step.json.gz"), 3).as_posix()
    'traces/step-rank3.json.gz'
    """
    suffix = next((suffix for suffix in SUFFIXES if path.name.endswith(suffix)), None)
    if suffix is None or path.name == suffix:
        raise ValueError(f"the path of a trace must end in a name with .json or .json.gz, got {str(path)!r}")
    return path.with_name(f"{path.name.removesuffix(suffix)}-rank{rank}{suffix}")


def _check_writable(path: Path, partial: Path) -> None:
    """Raise if a new file cannot be written to ``path``. Creates ``partial``."""
    if not path.parent.is_dir():
        raise FileNotFoundError(f"cannot write the trace {path}: {path.parent} is not a directory. Create it first")
    if path.exists():
        raise FileExistsError(f"the trace {path} exists: pass another path, or delete it")
    try:
        partial.touch()
    except OSError as error:
        raise OSError(error.errno, f"cannot write the trace {path}: {error.strerror}") from error


def _thread_names() -> dict[int | None, str]:
    """Return the names of this process's threads, by native id: Python's, or those that libraries gave (Linux)."""
    names: dict[int | None, str] = {}
    for path in Path("/proc/self/task").glob("*/comm"):
        with suppress(OSError):  # it has just ended
            names[int(path.parent.name)] = path.read_text().strip()
    return names | {thread.native_id: thread.name for thread in threading.enumerate()}


def _name_lanes(events: list[dict[str, Any]], process: str, threads: dict[int | None, str]) -> None:
    """Name the processes (the host's and the devices') by rank, and the threads by ``threads``."""
    for event in events:
        if event.get("ph") == "M" and event["name"] == "process_name":
            event["args"]["name"] = process
        elif event.get("ph") == "M" and event["name"] == "thread_name":
            lane: str = event["args"]["name"]  # of a thread, or of a stream, whose number may be a thread's
            event["args"]["name"] = threads.get(event["tid"], lane) if lane.startswith("thread ") else lane
    # The profiler sometimes gives a thread no name at all.
    named = {event["tid"] for event in events if event.get("ph") == "M" and event["name"] == "thread_name"}
    lanes = {event["tid"]: event["pid"] for event in events if event.get("cat") == "user_annotation"}
    for thread in lanes.keys() - named:
        name = threads.get(thread, f"thread {thread}")
        arguments = {"ph": "M", "ts": 0, "pid": lanes[thread], "tid": thread}
        events.append({"name": "thread_name", **arguments, "args": {"name": name}})


def _limit_events(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return at most MAX_EVENTS events: without the shortest operators of the host."""
    excess = len(events) - MAX_EVENTS
    if excess <= 0:
        return events
    operators = sorted((event for event in events if event.get("cat") == "cpu_op"), key=lambda event: event["dur"])
    dropped = {id(event) for event in operators[:excess]}
    return [event for event in events if id(event) not in dropped]
