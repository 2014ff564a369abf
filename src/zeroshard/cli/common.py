"""Console: what commands share that tell a lot and write files: a flag's numbers, lines, targets checked first."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TextIO

STDOUT = "-"  # as the target of --json
HTML_REQUIREMENTS = ("plotly", "jinja2")  # what a page is made with


def positive_int(text: str) -> int:
    """A flag's whole number from 1 up.

    >>> positive_int("64")
    64
    """
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"wanted a whole number from 1 up, got {text!r}")
    return int(text)


def make_echo(stream: TextIO) -> Callable[[str], None]:
    """What prints lines there, for as long as someone reads them.

    >>> import sys
    >>> make_echo(sys.stdout)("a line")
    a line
    """

    def say(text: str) -> None:
        try:
            print(text, file=stream, flush=True)
        except BrokenPipeError:  # of `zeroshard … | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # else the interpreter tells of it at its end

    return say


def check_output_files(*, json: str | None = None, html: str | None = None) -> None:
    """Refuse files that cannot be written, and a page that cannot be made, before any work is done for them.

    >>> check_output_files(json="nowhere/plan.json")
    Traceback (most recent call last):
    ValueError: nowhere/plan.json cannot be written: nowhere is no directory here
    """
    for target in (None if json == STDOUT else json, html):
        why = None if target is None else _write_error(Path(target))
        if why is not None:
            raise ValueError(f"{target or repr(target)} cannot be written: {why}")
    missing = [name for name in HTML_REQUIREMENTS if html is not None and find_spec(name) is None]
    if missing:
        installed = "is not installed" if len(missing) == 1 else "are not installed"
        raise ImportError(f"--html needs {' and '.join(missing)}, which {installed}: pip install 'zeroshard[train]'")


def _write_error(path: Path) -> str | None:
    if not path.parent.is_dir():
        return f"{path.parent} is no directory here"
    if path.is_dir():
        return "it is a directory: give the name of a file"
    if path.exists():
        return None if os.access(path, os.W_OK) else "it may not be changed: its permissions say so"
    return None if os.access(path.parent, os.W_OK | os.X_OK) else f"nothing may be written in {path.parent}"
