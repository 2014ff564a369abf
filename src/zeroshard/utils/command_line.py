"""Shared helpers of the commands: parse numbers, print lines, check output files before the work."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, TextIO

from zeroshard.utils.format import escape_control_chars

STDOUT = "-"  # value of --json for standard output
MAX_RANKS_PER_CPU = 16  # more would exhaust the machine before the first step


def positive_int(text: str) -> int:
    """Parse a positive integer.

    >>> positive_int("64")
    64
    """
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a positive integer (got {text!r})")
    return int(text)


def check_local_ranks(ranks: int) -> None:
    """Raise if a command would start more ranks than this machine can run.

    >>> check_local_ranks(1000000)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: --ranks 1000000 would start as many processes on this machine: pass at most ...
    """
    max_ranks = MAX_RANKS_PER_CPU * (os.cpu_count() or 1)
    if ranks > max_ranks:
        raise ValueError(f"--ranks {ranks} would start as many processes on this machine: pass at most {max_ranks}")


class CommandParser(argparse.ArgumentParser):
    """Parses the options of a command. A wrong option ends it with one line, in place of argparse's long usage.

    >>> parser = CommandParser(prog="zeroshard plan")
    >>> parser.parse_args([]).__dict__
    {}
    """

    def error(self, message: str) -> NoReturn:
        """Print the message and end with status 2."""
        make_echo(sys.stderr)(f"{self.prog}: {message} (--help shows all options)")
        sys.exit(2)


def make_echo(stream: TextIO) -> Callable[[str], None]:
    """Return a function that prints lines to ``stream``, and stops silently when the reader closes the pipe.

    Names from files and messages of libraries may hold what controls a terminal: all control characters are escaped,
    and all that the stream cannot encode.

    >>> import sys
    >>> make_echo(sys.stdout)("a line")
    a line
    """

    encoding = stream.encoding or "utf-8"

    def echo(text: str) -> None:
        shown = escape_control_chars(text).encode(encoding, "backslashreplace").decode(encoding)
        try:
            print(shown, file=stream, flush=True)
        except BrokenPipeError:  # as in `zeroshard … | head`; otherwise the interpreter prints an error at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())

    return echo


def print_error(command: str, error: object) -> None:
    """Print an error or a warning as every command does: on standard error, after the command's name."""
    make_echo(sys.stderr)(f"zeroshard {command}: {error}")


def check_output_files(*, json: str | None = None, svg: str | None = None) -> None:
    """Raise for files that cannot be written, before any work is done.

    >>> check_output_files(json="nowhere/plan.json")
    Traceback (most recent call last):
    ValueError: cannot write nowhere/plan.json: nowhere is not a directory
    """
    for target in (None if json == STDOUT else json, svg):
        reason = None if target is None else _write_error(Path(target))
        if reason is not None:
            raise ValueError(f"cannot write {target or repr(target)}: {reason}")


def _write_error(path: Path) -> str | None:
    if not path.parent.is_dir():
        return f"{path.parent} is not a directory"
    if path.is_dir():
        return "it is a directory: pass the name of a file"
    existing = path if path.exists() else path.parent
    mode = os.W_OK if path.exists() else os.W_OK | os.X_OK
    return None if os.access(existing, mode) else f"no permission to write {existing}"
