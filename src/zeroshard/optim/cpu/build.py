"""Compile the C kernels on this machine, cache the library and load it.

[Note: built at first use]
A wheel for all CPUs would have to target the oldest one; compiled on this machine, the same source uses all vector
instructions of its CPU. The file name contains a hash of everything the library depends on: source, compiler, flags and
CPU. So machines that share a home directory each build their own library, a new release builds a new one, and existing
files are never overwritten by different ones.

Ranks start together. Each rank that finds no file builds one under a temporary name and renames it: the last rank
replaces the file by an equal one, and no rank ever loads a partial file. The library is executable code, so the
directory must belong to this user and not be writable by others. If there is no such directory, or loading from it
fails, the library is built in a temporary directory for this process only.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

# fp-contract: only explicit fmaf() is fused. The other two allow vectorisation of loops with sqrtf() and selects.
EXACT_FP_FLAGS = ("-std=c11", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
LINK_FLAGS = ("-fPIC", "-shared", "-pthread")
# Compilers differ in the flag for "this machine"; without any, the result is correct but slow.
TUNING_FLAGS = (("-march=native",), ("-mcpu=native",), ())
COMPILERS = ("cc", "gcc", "clang")
COMPILE_TIMEOUT_SECONDS = 120  # for one compiler call
CPUINFO_FIELDS = ("vendor_id", "cpu family", "model", "model name", "flags", "Features", "CPU implementer", "CPU part")


class KernelBuildError(Exception):
    """The library could not be built; the message says why."""


def load_library(source: Path) -> ctypes.CDLL:
    """Return the library of one C file; build it if it is not cached: [Note: built at first use].

    >>> from zeroshard.optim.cpu import build
    >>> try:
    ...     name = load_library(Path(build.__file__).with_name("kernels.c"))._name
    ... except KernelBuildError:
    ...     name = "kernels.so"
    >>> Path(name).suffix
    '.so'
    """
    reasons = []
    for compiler in compilers():
        for open_directory in (cache_dir, temp_dir):
            try:
                with open_directory() as directory:
                    return _load_or_build(source, compiler, directory)
            except (KernelBuildError, OSError) as error:
                reasons.append(f"{shlex.join(compiler)}: {error}")
    raise KernelBuildError("; ".join(dict.fromkeys(reasons)) or "no C compiler was found")


def compilers() -> list[list[str]]:
    """Return the compiler commands to try: $CC first, then the usual names that exist.

    >>> all(shutil.which(command[0]) for command in compilers())
    True
    """
    commands = [shlex.split(os.environ.get("CC", "")), *([name] for name in COMPILERS)]
    return [command for command in commands if command and shutil.which(command[0])]


@contextlib.contextmanager
def cache_dir() -> Iterator[Path]:
    """Yield the user's cache directory, created if missing. Raise OSError if it cannot be used."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    directory = root / "zeroshard"
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = directory.stat()
    if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"{directory} is writable by other users, so no code is loaded from it: chmod it to 700")
    yield directory


@contextlib.contextmanager
def temp_dir() -> Iterator[Path]:
    """Yield a temporary directory, deleted on exit; a library loaded from it stays loaded."""
    with tempfile.TemporaryDirectory(prefix="zeroshard-") as directory:
        yield Path(directory)


def cpu_description() -> str:
    """Return a description of this machine's CPU, as far as compiled code depends on it.

    >>> bool(cpu_description())
    True
    """
    try:
        first = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        first = []
    lines = [line for line in first if line.split(":")[0].strip() in CPUINFO_FIELDS]
    return "\n".join([platform.machine(), platform.processor(), *lines])


def _load_or_build(source: Path, compiler: list[str], directory: Path) -> ctypes.CDLL:
    inputs = (
        source.read_text(),
        _run([*compiler, "--version"]),
        repr((EXACT_FP_FLAGS, LINK_FLAGS, TUNING_FLAGS)),
        cpu_description(),
    )
    identity = "\n".join(inputs)
    target = directory / f"{source.stem}-{hashlib.sha256(identity.encode()).hexdigest()[:24]}.so"
    if not target.exists():
        _build(source, compiler, target)
    return ctypes.CDLL(str(target))


def _build(source: Path, compiler: list[str], target: Path) -> None:
    handle, name = tempfile.mkstemp(suffix=".tmp", prefix=target.stem, dir=target.parent)
    os.close(handle)
    try:
        for tuning in TUNING_FLAGS:
            try:
                _run([*compiler, *EXACT_FP_FLAGS, *tuning, *LINK_FLAGS, str(source), "-o", name, "-lm"])
                break
            except KernelBuildError:
                if tuning == TUNING_FLAGS[-1]:
                    raise
        os.replace(name, target)
    finally:
        Path(name).unlink(missing_ok=True)


def _run(command: list[str]) -> str:
    """Run a compiler and return its output; raise KernelBuildError with its first error line."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise KernelBuildError(f"it took over {COMPILE_TIMEOUT_SECONDS} s") from None
    if result.returncode:
        messages = (result.stderr or result.stdout).strip().splitlines() or ["no message"]
        raise KernelBuildError(f"it exited with {result.returncode} ({messages[0]})")
    return result.stdout
