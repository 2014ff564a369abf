"""Wait for processes to end: one that was killed is still there for a moment."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

LIMIT_SECONDS = 20


def is_gone(pid: int) -> bool:
    """Return whether a process has ended; a zombie has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def wait_until_gone(pids: Sequence[int]) -> None:
    """Wait until all processes have ended; fail if some have not in time."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while not all(map(is_gone, pids)):
        assert time.monotonic() < deadline, f"still there: {[pid for pid in pids if not is_gone(pid)]}"
        time.sleep(0.05)
