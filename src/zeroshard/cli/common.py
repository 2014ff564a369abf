"""Shared helpers of the commands: parse numbers, print lines, check output files before the work."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TextIO

STDOUT = "-"  # value of --json for standard output
HTML_REQUIREMENTS = ("plotly", "jinja2")  # packages needed to write a page


def positive_int(text: str) -> int:
    """Parse a positive integer.

    >>> positive_int("64")
    64
    """
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"wanted a whole number from 1 up, got {text!r}")
    return int(text)


def make_echo(stream: TextIO) -> Callable[[str], None]:
    """Return a function that prints lines to ``stream``, and stops silently when the reader closes the pipe.

    >>> import sys
    >>> make_echo(sys.stdout)("a line")
    a line
    """

    def echo(text: str) -> None:
        try:
            print(text, file=stream, flush=True)
        except BrokenPipeError:  # as in `zeroshard … | head`
            os.dup2(
                os.open(os.devnull, os.O_WRONLY), stream.fileno()
            )  # otherwise the interpreter prints an error at exit

    return echo


def check_output_files(*, json: str | None = None, html: str | None = None) -> None:
    """Raise for files that cannot be written and for missing packages, before any work is done.

    >>> check_output_files(json="nowhere/plan.json")
    Traceback (most recent call last):
    ValueError: nowhere/plan.json cannot be written: nowhere is no directory here
    """
    for target in (None if json == STDOUT else json, html):
        reason = None if target is None else _write_error(Path(target))
        if reason is not None:
            raise ValueError(f"{target or repr(target)} cannot be written: {reason}")
    missing = [name for name in HTML_REQUIREMENTS if html is not None and find_spec(name) is None]
    if missing:
        verb = "is not installed" if len(missing) == 1 else "are not installed"
        raise ImportError(f"--html needs {' and '.join(missing)}, which {verb}: pip install 'zeroshard[train]'")


def _write_error(path: Path) -> str | None:
    if not path.parent.is_dir():
        return f"{path.parent} is no directory here"
    if path.is_dir():
        return "it is a directory: give the name of a file"
    if path.exists():
        return None if os.access(path, os.W_OK) else "it may not be changed: its permissions say so"
    return None if os.access(path.parent, os.W_OK | os.X_OK) else f"nothing may be written in {path.parent}"
