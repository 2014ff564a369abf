"""Trial: one measurement in a process of its own, so that nothing an earlier one left in memory, or broke, counts.

Processes are forked from one that has imported the benchmark and torch, and done nothing else: on some machines that
takes longer than what is measured.

A result is a plain dictionary: the arguments and what was measured. In place of the latter stands `out_of_memory`, with
torch's words, where the device was too small, and `error` where something else went wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.record import Record
from benchmarks.table import Result, said

LATE = "no result after"
ERROR_LENGTH = 3000  # characters of a failed process that are kept, its last ones
THREADS = "OMP_NUM_THREADS"
STARTING = threading.Lock()  # trials are started from several threads, and the environment is all threads'
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # all is measured with the allocator's defaults


class Trials:
    """The trials of one script, within a budget of seconds. All results so far are in the file at any time."""

    def __init__(self, module: str, options: argparse.Namespace) -> None:
        self._module, self._record = module, Record(module.rpartition(".")[2], options.device, options.out)
        self.show = self._record.show
        self._budget, self._timeout = options.budget, options.timeout
        self._end = time.monotonic() + options.budget
        self._lock = threading.Lock()

    def of(self, **arguments: Any) -> list[Result]:
        """The results so far that these arguments belong to."""
        return [result for result in self._record.results if arguments.items() <= result.items()]

    def run(self, **arguments: Any) -> Result:
        """Measure once. May be called from several threads."""
        begin = time.monotonic()
        seconds = min(self._timeout, self._end - begin)
        if seconds > 0:
            measured = _measured(self._module, arguments, seconds)
            if seconds < self._timeout and said(measured).startswith(LATE):
                measured["error"] += f"\nthe budget of {self._budget:.0f} s was spent by then (see --budget)"
        else:
            measured = {"error": f"not run: the budget of {self._budget:.0f} s was spent (see --budget)"}
        result = {**arguments, **measured, "seconds": round(time.monotonic() - begin, 1)}
        with self._lock:
            self._record.add(result)
            print(f"{json.dumps(arguments)}: {_outcome(result)}, {result['seconds']} s", file=sys.stderr, flush=True)
        return result


def _measured(module: str, arguments: dict[str, Any], seconds: float) -> Result:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([module])
    with tempfile.TemporaryDirectory() as folder:
        result, words = Path(folder, "result"), Path(folder, "words")
        process = context.Process(target=_be, args=(module, arguments, result, words))
        with STARTING, _one_thread(arguments):
            process.start()
        process.join(seconds)
        late = process.is_alive()
        if late:
            process.kill()
            process.join()
        told = words.read_text(errors="replace")[-ERROR_LENGTH:] if words.exists() else ""
        if late:
            return {"error": f"{told.strip()}\n{LATE} {seconds:.0f} s".strip()}  # a table has its last line
        with contextlib.suppress(ValueError, OSError):
            if process.exitcode == 0:
                return dict(json.loads(result.read_text()))
        return {"error": f"the process ended with status {process.exitcode}\n{told}".strip()}


@contextlib.contextmanager
def _one_thread(arguments: dict[str, Any]) -> Iterator[None]:
    """Inside, what is started computes with one thread if it is a trial on a CPU: the work of the host counts there.

    `torch.set_num_threads` is too late for that: threads of oneDNN's stay, and a step of small layers takes longer.
    """
    before = os.environ.get(THREADS)
    if arguments.get("device") == "cpu":
        os.environ[THREADS] = "1"
    try:
        yield
    finally:
        os.environ.pop(THREADS, None)
        os.environ.update({} if before is None else {THREADS: before})


def _be(module: str, arguments: dict[str, Any], result: Path, words: Path) -> None:
    """Be a trial: what it prints goes to one file, what it finds to another."""
    file = os.open(words, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(file, stream)
    for name in ALLOCATOR:
        os.environ.pop(name, None)
    result.write_text(json.dumps(guarded(import_module(module).measure, **arguments)))


def _outcome(result: Result) -> str:
    for kind in ("out_of_memory", "error"):
        if kind in result:
            return f"{kind.replace('_', ' ')}: {result[kind].splitlines()[-1]}"
    return "done"


def guarded(measure: Callable[..., Result], **arguments: Any) -> Result:
    """Measure in this process; running out of memory is a result."""
    try:
        return measure(**arguments)
    except Exception as error:
        import torch

        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, torch.OutOfMemoryError):
            cause = cause.__cause__ or cause.__context__
        if cause is None:
            raise
        return {"out_of_memory": str(cause)}


def options(description: str | None, budget: float = 540.0, timeout: float = 150.0) -> argparse.ArgumentParser:
    """The options that every script has."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", help="cuda or cpu; without it, a GPU where there is one")
    parser.add_argument("--tiny", action="store_true", help="shapes that a CPU runs in seconds, to check the script")
    parser.add_argument("--out", type=Path, help="write all results as JSON")
    parser.add_argument("--budget", type=float, default=budget, help="seconds for all trials together")
    parser.add_argument("--timeout", type=float, default=timeout, help="seconds a trial may take")
    return parser


def parsed(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line, and find the device where none is named."""
    import torch

    found = parser.parse_args(argv)
    found.device = found.device or ("cuda" if torch.cuda.is_available() else "cpu")
    return found
