"""Records of runs and their tables: printed, written as JSON with --out, and shown on the pages by report.py.

A record has the command, the machine with its versions, the date, all results, and the printed tables as numbers.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]  # the repository
Result = dict[str, Any]  # the arguments of a measurement and what was measured


class Record:
    """A run of a suite. If a file is wanted, it holds all results so far at any time."""

    def __init__(self, command: str, device: str, out: Path | None) -> None:
        self.results: list[Result] = []
        self._tables: dict[str, dict[str, Any]] = {}
        self._out, self.machine = out, machine(device)
        self._head = {
            "command": shlex.join(["python", "-m", "benchmarks", command, *_arguments(command)]),
            "date": datetime.date.today().isoformat(),
            "machine": self.machine,
        }

    def add(self, result: Result) -> None:
        self.results.append(result)
        self._write()

    def show(self, name: str, heads: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """Print a table and keep it. None leaves a cell empty."""
        print(markdown(heads, rows, is_padded=True))
        self._tables[name] = {"heads": list(heads), "rows": [list(row) for row in rows]}
        self._write()

    def _write(self) -> None:
        if self._out is not None:
            self._out.write_text(encode({**self._head, "tables": self._tables, "results": self.results}) + "\n")


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
    """Describe the machine and its versions."""
    import torch

    try:
        git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
        commit = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        commit = None
    versions = {"nccl": ".".join(map(str, torch.cuda.nccl.version()))} if device == "cuda" else {}
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else f"CPU ({platform.machine()})",
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "torch": torch.__version__,
        **versions,
        "python": platform.python_version(),
        "commit": commit,
    }


def describe(found: Result) -> str:
    """Return what is known of a machine in a line."""
    forms = {"device": "{}", "cores": "{} cores", "torch": "torch {}", "nccl": "NCCL {}", "python": "Python {}"}
    return ", ".join(form.format(found[key]) for key, form in forms.items() if found.get(key))


def _arguments(command: str) -> list[str]:
    """Return what followed the command on the command line, without --out."""
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    parser.add_argument("--out")
    return parser.parse_known_args(sys.argv[2:] if sys.argv[1:2] == [command] else [])[1]


def median(results: Sequence[Result], key: str) -> float | None:
    """Return the median over the runs that have this measurement, None if none has."""
    values = [result[key] for result in results if key in result]
    return statistics.median(values) if values else None


def spread(results: Sequence[Result], key: str) -> float | None:
    """Return the largest value minus the smallest, None unless there are several."""
    values = [result[key] for result in results if key in result]
    return max(values) - min(values) if len(values) > 1 else None


def ratio(value: float | None, base: float | None) -> float | None:
    """Return value / base, None if either is missing."""
    return value / base if value is not None and base else None


def gigabytes(nbytes: float | None) -> float | None:
    """Return GB as the paper counts them: 10^9 bytes."""
    return ratio(nbytes, 1e9)


def failure(result: Result) -> str:
    """Return the last line of what went wrong, empty if nothing did."""
    words = result.get("error") or result.get("out_of_memory") or ""
    return str(words.splitlines()[-1]) if words else ""


def markdown(heads: Sequence[str], rows: Sequence[Sequence[object]], is_padded: bool = False) -> str:
    """Return a table as Markdown, with columns of equal width if it is padded."""
    lines = [heads, *([cell(value) for value in row] for row in rows)]
    escaped = [[" ".join(words.split()).replace("|", "\\|") for words in line] for line in lines]
    widths = [max(map(len, column)) if is_padded else 0 for column in zip(*escaped, strict=True)]
    first, *rest = ("| " + " | ".join(map(str.ljust, line, widths)) + " |" for line in escaped)
    rule = "|".join("-" * max(3, width + 2) for width in widths)
    return "\n".join([first, f"|{rule}|", *rest])


def cell(value: object) -> str:
    """Return a number with three or four figures. Text stays as it is, None is empty.

    >>> [cell(value) for value in (0.00123, 0.5, 12.345, 1234.5, 7, None)]
    ['0.0012', '0.500', '12.35', '1234', '7', '']
    """
    if not isinstance(value, float):
        return "" if value is None else str(value)
    size = abs(value)
    return f"{value:{'.2g' if size < 0.01 else '.3f' if size < 1 else '.2f' if size < 100 else '.0f'}}"
