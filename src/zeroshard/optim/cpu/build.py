"""Library: C source compiled where it runs, kept for the next process, loaded.

[Note: built at first use]
A wheel for every processor would have to be compiled for the oldest one; compiled where it runs, the same source uses
the vectors that this machine has. So the file's name carries a hash of everything that it depends on: source, compiler,
flags and processor. Machines that share a home directory build their own, a new release builds anew, and old files are
never written again.

Ranks start together. Each that finds no file builds one under a name of its own and renames it: whoever is last
replaces a file by an equal one, and nobody ever loads half of one. What is loaded is code, so the directory must be
this user's and closed to others. Where none can be had, or nothing can be loaded from it, the library is built in a
temporary directory, for this process alone.
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

# fp-contract: fused only where fmaf() is written. The other two let loops with sqrtf() and with selects be vectorised.
EXACT_FP_FLAGS = ("-std=c11", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
LINK_FLAGS = ("-fPIC", "-shared", "-pthread")
# Not every compiler knows each word for "this machine"; without any, the result is right but slow.
TUNING_FLAGS = (("-march=native",), ("-mcpu=native",), ())
COMPILERS = ("cc", "gcc", "clang")
COMPILE_TIMEOUT_SECONDS = 120  # seconds for one run of a compiler
CPUINFO_FIELDS = ("vendor_id", "cpu family", "model", "model name", "flags", "Features", "CPU implementer", "CPU part")


class KernelBuildError(Exception):
    """No library: why, in words for the user."""


def load_library(source: Path) -> ctypes.CDLL:
    """Return the library of one C file, built if it is not there yet: [Note: built at first use].

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
        for place in (cache_dir, temp_dir):
            try:
                with place() as directory:
                    return _load_or_build(source, compiler, directory)
            except (KernelBuildError, OSError) as error:
                reasons.append(f"{shlex.join(compiler)}: {error}")
    raise KernelBuildError("; ".join(dict.fromkeys(reasons)) or "no C compiler was found")


def compilers() -> list[list[str]]:
    """The commands to try: $CC first, then the usual names that are there.

    >>> all(shutil.which(command[0]) for command in compilers())
    True
    """
    commands = [shlex.split(os.environ.get("CC", "")), *([name] for name in COMPILERS)]
    return [command for command in commands if command and shutil.which(command[0])]


@contextlib.contextmanager
def cache_dir() -> Iterator[Path]:
    """The user's cache, made if it is not there. OSError where it cannot be used."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    directory = root / "zeroshard"
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = directory.stat()
    if found.st_uid != os.getuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"{directory} can be written by others: no code is loaded from it; chmod it to 700")
    yield directory


@contextlib.contextmanager
def temp_dir() -> Iterator[Path]:
    """A directory that is gone afterwards; a library that was loaded stays loaded."""
    with tempfile.TemporaryDirectory(prefix="zeroshard-") as directory:
        yield Path(directory)


def cpu_description() -> str:
    """What this machine's processor says of itself, as far as compiled code depends on it.

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
    depends = (
        source.read_text(),
        _run([*compiler, "--version"]),
        repr((EXACT_FP_FLAGS, LINK_FLAGS, TUNING_FLAGS)),
        cpu_description(),
    )
    identity = "\n".join(depends)
    target = directory / f"{source.stem}-{hashlib.sha256(identity.encode()).hexdigest()[:24]}.so"
    if not target.exists():
        _build(source, compiler, target)
    return ctypes.CDLL(str(target))


def _build(source: Path, compiler: list[str], target: Path) -> None:
    handle, name = tempfile.mkstemp(suffix=".tmp", prefix=target.stem, dir=target.parent)
    os.close(handle)
    try:
        for tuned in TUNING_FLAGS:
            try:
                _run([*compiler, *EXACT_FP_FLAGS, *tuned, *LINK_FLAGS, str(source), "-o", name, "-lm"])
                break
            except KernelBuildError:
                if tuned == TUNING_FLAGS[-1]:
                    raise
        os.replace(name, target)
    finally:
        Path(name).unlink(missing_ok=True)


def _run(command: list[str]) -> str:
    """Run a compiler and return what it prints; NotBuiltError with its first complaint."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise KernelBuildError(f"it took over {COMPILE_TIMEOUT_SECONDS} s") from None
    if done.returncode:
        complaint = (done.stderr or done.stdout).strip().splitlines() or ["no message"]
        raise KernelBuildError(f"it exited with {done.returncode} ({complaint[0]})")
    return done.stdout
