"""Record: what a benchmark was given and found, as a file that `python -m benchmarks docs` makes pages of.

It holds the command, the machine with its versions, the date, all results, and the tables that were printed: their
heads, and their rows as numbers.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.table import Result, show

ROOT = Path(__file__).parents[1]  # where benchmarks is found


class Record:
    """One run of one benchmark. Everything so far is in the file, where one is wanted, at any time."""

    def __init__(self, benchmark: str, device: str, out: Path | None) -> None:
        self.results: list[Result] = []
        self._tables: dict[str, dict[str, Any]] = {}
        self._out = out
        self._head = {
            "command": shlex.join(["python", "-m", "benchmarks", benchmark, *_given(benchmark)]),
            "date": datetime.date.today().isoformat(),
            "machine": machine(device),
        }

    def add(self, result: Result) -> None:
        """Take a result down."""
        self.results.append(result)
        self._write()

    def show(self, name: str, heads: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """Print a table, and keep it."""
        show(heads, rows)
        self._tables[name] = {"heads": list(heads), "rows": [list(row) for row in rows]}
        self._write()

    def _write(self) -> None:
        if self._out is not None:
            whole = {**self._head, "tables": self._tables, "results": self.results}
            self._out.write_text(encode(whole) + "\n")


def encode(value: Any, newline: str = "\n") -> str:
    """Return JSON with a line for each row of a table and for each result."""
    inner, pairs = newline + " ", value.items() if isinstance(value, dict) else ()
    if any(isinstance(item, (dict, list)) for _, item in pairs):
        items = [f"{json.dumps(key, ensure_ascii=False)}: {encode(item, inner)}" for key, item in pairs]
        return f"{{{inner}{f',{inner}'.join(items)}{newline}}}"
    if isinstance(value, list) and any(isinstance(item, (dict, list)) for item in value):
        items = [json.dumps(item, ensure_ascii=False) for item in value]
        return f"[{inner}{f',{inner}'.join(items)}{newline}]"
    return json.dumps(value, ensure_ascii=False)


def machine(device: str) -> Result:
    """What figures are taken on."""
    import torch

    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else f"CPU ({platform.machine()})",
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": _commit(),
    }


def described(found: Result) -> str:
    """A machine in a line."""
    return f"{found['device']}, {found['cores']} cores, torch {found['torch']}, Python {found['python']}"


def _given(benchmark: str) -> list[str]:
    """What followed the benchmark's name on the command line, but where results go."""
    given = sys.argv[2:] if sys.argv[1:2] == [benchmark] else []
    if "--out" in given:
        at = given.index("--out")
        del given[at : at + 2]
    return [word for word in given if not word.startswith("--out=")]


def _commit() -> str | None:
    """The commit that is measured; None where there is no repository."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
