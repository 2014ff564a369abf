"""Trial: one measurement in a process of its own, so that nothing an earlier one left in memory, or broke, counts.

    python -m benchmarks.trial MODULE '{"argument": 1}'     # prints what MODULE.measure(argument=1) returns, as JSON

A result is a plain dictionary: the arguments and what was measured. In place of the latter stands `out_of_memory`, with
torch's words, where the device was too small, and `error` where something else went wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.record import ROOT, Record
from benchmarks.table import Result

LATE = "no result after"
ERROR_LENGTH = 3000  # characters of a failed process that are kept, its last ones
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
            if seconds < self._timeout and "error" in measured and measured["error"].startswith(LATE):
                measured["error"] += f"\nthe budget of {self._budget:.0f} s was spent by then (see --budget)"
        else:
            measured = {"error": f"not run: the budget of {self._budget:.0f} s was spent (see --budget)"}
        result = {**arguments, **measured, "seconds": round(time.monotonic() - begin, 1)}
        with self._lock:
            self._record.add(result)
            print(f"{json.dumps(arguments)}: {_outcome(result)}, {result['seconds']} s", file=sys.stderr, flush=True)
        return result


def _measured(module: str, arguments: dict[str, Any], seconds: float) -> Result:
    command = [sys.executable, "-m", "benchmarks.trial", module, json.dumps(arguments)]
    environment = {name: value for name, value in os.environ.items() if name not in ALLOCATOR}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), environment.get("PYTHONPATH"))))
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, env=environment, check=False)
    except subprocess.TimeoutExpired as expired:
        said = (expired.stderr or b"").decode(errors="replace")
        return {"error": f"{LATE} {seconds:.0f} s\n{said[-ERROR_LENGTH:]}".strip()}
    with contextlib.suppress(ValueError, IndexError):
        if done.returncode == 0:
            return dict(json.loads(done.stdout.splitlines()[-1]))
    return {"error": f"the process ended with status {done.returncode}\n{done.stderr[-ERROR_LENGTH:]}".strip()}


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


if __name__ == "__main__":
    name, given = sys.argv[1:]
    print(json.dumps(guarded(import_module(name).measure, **json.loads(given))))
