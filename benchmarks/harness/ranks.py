"""Real ranks on this machine: processes that exit when the process that started them ends, also if it is killed."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import threading
import time
import traceback
import unittest.mock
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.harness.record import Result


def run_ranks(function: Callable[..., Result], ranks: int, backend: str = "gloo", **arguments: Any) -> Result:
    """Call a function on each rank, within a process group; return what the first rank returns."""
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    environment = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // ranks)), "GLOO_SOCKET_IFNAME": loopback}
    with tempfile.TemporaryDirectory() as folder, unittest.mock.patch.dict(os.environ, environment):
        given = (os.getpid(), folder, function, ranks, backend, arguments)
        try:
            mp.start_processes(_run_rank, given, nprocs=ranks, start_method="spawn")
        except mp.ProcessRaisedException:
            if (first_error := Path(folder, "error")).exists():
                raise RuntimeError(first_error.read_text()) from None
            raise
        return dict(json.loads(Path(folder, "result").read_text()))


def _run_rank(
    rank: int, parent: int, folder: str, function: Callable[..., Result], ranks: int, backend: str, arguments: Any
) -> None:
    threading.Thread(target=_exit_after, args=(parent,), daemon=True).start()
    dist.init_process_group(backend, store=dist.FileStore(f"{folder}/store", ranks), rank=rank, world_size=ranks)
    try:
        found = function(**arguments)
    except Exception:
        with contextlib.suppress(FileExistsError), Path(folder, "error").open("x") as file:  # the first cause of all
            file.write(f"rank {rank} failed\n{traceback.format_exc()}")
        raise  # other ranks see this one exit, and fail after it
    dist.barrier()
    dist.destroy_process_group()
    if rank == 0:
        Path(folder, "result").write_text(json.dumps(found))
    os._exit(0)  # threads of libraries that wake while Python ends may abort the process


def _exit_after(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.2)
    os._exit(1)  # at once: another thread may wait in a collective for a rank that is gone
