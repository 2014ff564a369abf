"""Ranks: real processes over gloo on the loopback device, which end with the process that started them.

    python -m benchmarks.ranks MODULE FUNCTION '{"argument": 1}' RANK RANKS PORT RESULT      # one of them

Each rank holds the reading end of a pipe, its standard input, whose writing end only its parent has. However the parent
ends, killed by a timeout too, the pipe then ends, and the rank with it. The parent keeps the store that ranks meet in,
on a port that the system chose, so that no port is looked for, and lost, before it is used.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import IO, Any

from benchmarks.table import Result

LOOPBACK = "127.0.0.1"
GRACE = 2.0  # seconds that others have to end once a rank has failed, to say why it was
FAILED = "failed at"  # what a rank says first, with the clock that all have
TELLING = 2000  # characters of a failed rank's words that are kept, its last ones


def run(module: str, function: str, ranks: int, **arguments: Any) -> Result:
    """Call a function on so many ranks, each within an initialised process group; return what the first returns."""
    import torch.distributed as dist

    store = dist.TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
    threads = max(1, (os.cpu_count() or 1) // ranks)
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    if sys.platform == "linux":
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        result, started, words = Path(folder, "result"), [], []
        try:
            for rank in range(ranks):
                command = [sys.executable, "-m", "benchmarks.ranks", module, function, json.dumps(arguments)]
                command += [str(rank), str(ranks), str(store.port), str(result)]
                words.append(open(Path(folder, str(rank)), "w+", errors="replace"))  # noqa: SIM115
                streams = {"stdin": subprocess.PIPE, "stdout": words[-1], "stderr": subprocess.STDOUT}
                started.append(subprocess.Popen(command, env=environment, **streams))  # type: ignore[call-overload]
            _wait(started, words)
            return dict(json.loads(result.read_text()))
        finally:
            for process in started:
                process.kill()
                process.wait()
                process.stdin.close()
            for file in words:
                file.close()


def _wait(started: list[subprocess.Popen[bytes]], words: list[IO[str]]) -> None:
    """Wait until all have ended, or one has failed. The one that was the first to fail is told last."""
    end = math.inf
    while None in (states := [process.poll() for process in started]) and time.monotonic() < end:
        if any(states):
            end = min(end, time.monotonic() + GRACE)
        time.sleep(0.02)
    told: list[tuple[float, str]] = []
    for rank, process in enumerate(started):
        if status := process.poll():
            words[rank].seek(0)
            said = words[rank].read()[-TELLING:].strip()
            when = re.search(rf"^{FAILED} ([0-9.]+)$", said, re.MULTILINE)  # missing where it could not say so
            told.append((float(when[1]) if when else 0.0, f"--- rank {rank} ended with status {status}\n{said}"))
    if told:
        raise RuntimeError("\n".join(account for _, account in sorted(told, reverse=True)))


def _end_with_parent() -> None:
    def watch() -> None:
        while os.read(0, 1):  # not through sys.stdin, whose lock Python wants at its end
            pass
        os._exit(1)  # at once: another thread may wait in a collective for a rank that is gone

    threading.Thread(target=watch, daemon=True).start()


def main(module: str, function: str, arguments: str, rank: str, ranks: str, port: str, result: str) -> None:
    """Be one rank."""
    _end_with_parent()
    import torch.distributed as dist

    store = dist.TCPStore(LOOPBACK, int(port), is_master=False, timeout=timedelta(seconds=60))
    try:
        dist.init_process_group("gloo", store=store, rank=int(rank), world_size=int(ranks))
        found = getattr(import_module(module), function)(**json.loads(arguments))
        dist.barrier()
    except BaseException:
        print(FAILED, time.monotonic(), flush=True)
        raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    if rank == "0":
        Path(result).write_text(json.dumps(found))
    os._exit(0)  # libraries' threads, woken while Python ends, may abort the process: nothing is left to be done


if __name__ == "__main__":
    main(*sys.argv[1:])
