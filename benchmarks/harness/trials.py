"""Trials: measurements in processes of their own, so that nothing an earlier one left in memory, or broke, counts.

Processes are forked from one that has imported torch and the suite and done nothing else: on some machines that takes
longer than what is measured.

A result has the arguments and what was measured or, instead, `out_of_memory` with torch's message if the device was too
small, and `error` if something else failed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import multiprocessing
import os
import sys
import tempfile
import threading
import time
import unittest.mock
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.record import Record, Result, describe, failure

TIMED_OUT = "no result after"
ERROR_LENGTH = 3000  # characters that are kept of a failed process, its last ones
STARTING = threading.Lock()  # trials may start from several threads, which share the environment
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # removed: all trials have the allocator's defaults
Measure = Callable[..., Result]


class Trials:
    """The trials of one command, within a budget of seconds. ``given`` are arguments of all of them."""

    def __init__(self, command: str, measure: Measure, options: argparse.Namespace, **given: Any) -> None:
        self._measure, self._given = measure, given
        self._record = Record(command, options.device, options.out)
        print(describe(self._record.machine), flush=True)
        self.show = self._record.show
        self._budget, self._timeout = options.budget, options.timeout
        self._end = time.monotonic() + options.budget
        self._lock = threading.Lock()

    def run_variants(self, variants: Sequence[str], repeats: int, **given: Any) -> dict[str, str]:
        """Measure variants in turns. Return a note for each: why it failed, after which it is not repeated."""
        has_deepspeed = importlib.util.find_spec("deepspeed") is not None
        notes = {name: "" if has_deepspeed or "DeepSpeed" not in name else "not installed" for name in variants}
        for _ in range(repeats):
            for variant in variants:
                if not notes[variant]:
                    notes[variant] = failure(self.run(variant=variant, **given))
        return notes

    def matching(self, **arguments: Any) -> list[Result]:
        """Return the results so far of trials with these arguments."""
        return [result for result in self._record.results if arguments.items() <= result.items()]

    def run(self, **arguments: Any) -> Result:
        """Measure once. Several threads may call this."""
        arguments = {**self._given, **arguments}
        begin = time.monotonic()
        seconds = min(self._timeout, self._end - begin)
        if seconds > 0:
            measured = run_process(self._measure, arguments, seconds)
            if seconds < self._timeout and failure(measured).startswith(TIMED_OUT):
                measured["error"] += f"\nthe budget of {self._budget:.0f} s was spent by then (see --budget)"
        else:
            measured = {"error": f"not run: the budget of {self._budget:.0f} s was spent (see --budget)"}
        result = {**arguments, **measured, "seconds": round(time.monotonic() - begin, 1)}
        with self._lock:
            self._record.add(result)
            outcome = f"{failure(result) or 'done'}, {result['seconds']} s"
            print(f"{json.dumps(arguments)}: {outcome}", file=sys.stderr, flush=True)
        return result


def run_process(measure: Measure, arguments: dict[str, Any], seconds: float) -> Result:
    """Measure in a process of its own."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([measure.__module__])
    with tempfile.TemporaryDirectory() as folder:
        result, log = Path(folder, "result"), Path(folder, "log")
        process = context.Process(target=_run_trial, args=(measure, arguments, result, log))
        # one thread on a CPU: threads that wait for each other would count as the host's work. torch.set_num_threads
        # is too late for oneDNN's threads
        threads = {"OMP_NUM_THREADS": "1"} if arguments.get("device") == "cpu" else {}
        with STARTING, unittest.mock.patch.dict(os.environ, threads):
            process.start()
        process.join(seconds)
        timed_out = process.is_alive()
        if timed_out:
            process.kill()
            process.join()
        output = log.read_text(errors="replace")[-ERROR_LENGTH:] if log.exists() else ""
        if timed_out:
            return {"error": f"{output.strip()}\n{TIMED_OUT} {seconds:.0f} s".strip()}  # tables show the last line
        with contextlib.suppress(ValueError, OSError):
            if process.exitcode == 0:
                return dict(json.loads(result.read_text()))
        return {"error": f"the process ended with status {process.exitcode}\n{output}".strip()}


def _run_trial(measure: Measure, arguments: dict[str, Any], result: Path, log: Path) -> None:
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(file, stream)
    for name in ALLOCATOR:
        os.environ.pop(name, None)
    result.write_text(json.dumps(catch_out_of_memory(measure, **arguments)))


def catch_out_of_memory(measure: Measure, **arguments: Any) -> Result:
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


def make_parser(description: str | None, timeout: float = 150.0, **numbers: int) -> argparse.ArgumentParser:
    """Return a parser with the options that all suites have, and with options for whole numbers and their defaults."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    import torch

    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default, help="cuda or cpu (default: a GPU if there is one)")
    parser.add_argument("--tiny", action="store_true", help="shapes that a CPU runs in seconds, to check the suite")
    parser.add_argument("--out", type=Path, help="write a record of the run as JSON")
    parser.add_argument("--budget", type=float, default=540.0, help="seconds for all trials together")
    parser.add_argument("--timeout", type=float, default=timeout, help="seconds a trial may take")
    for name, default in numbers.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default, help="(default: %(default)s)")
    return parser
