"""Real ranks on this machine: processes that exit when the process that started them ends, also if it is killed.

Over NCCL, ranks share the first GPU if there are not enough. NCCL refuses two ranks on one GPU only if they seem to be
on the same host, so each gets a host id of its own; data then goes through loopback sockets.
"""

from __future__ import annotations

import contextlib
import datetime
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

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.harness.record import Result
from zeroshard.rehearse.rank import share_gpu


def default_backend(device: str) -> str:
    """Return the backend that training uses on a device."""
    return "nccl" if device == "cuda" else "gloo"


def use_deterministic_kernels() -> None:
    """Have torch choose kernels that give the same bits in every run, where it has them."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # takes time, and changes no result


def join_group(backend: str, store: dist.Store, rank: int, ranks: int, seconds: float = 600.0) -> torch.device:
    """Be a rank of a new process group; return its device. Collectives fail after ``seconds``."""
    device = torch.device("cpu")
    if backend == "nccl":
        is_shared = torch.cuda.device_count() < ranks
        device = torch.device("cuda", 0 if is_shared else rank)
        if is_shared:
            share_gpu(f"rank-{os.getpid()}")
        torch.cuda.set_device(device)
    timeout = datetime.timedelta(seconds=seconds)
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=timeout)
    return device


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
    join_group(backend, dist.FileStore(f"{folder}/store", ranks), rank, ranks)
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
