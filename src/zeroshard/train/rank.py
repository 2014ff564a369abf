"""This process as one rank: its place among the ranks, what stops it, and how it reports its failure."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import ErrorHandler

from zeroshard.train.options import TrainingError
from zeroshard.utils.command_line import print_error

ERROR_DIR_ENV = "ZEROSHARD_ERROR_DIR"  # environment variable: the directory for error reports of failed ranks
PEER_LOST_MESSAGES = ("Connection closed by peer", "remote worker")  # in gloo's errors when another rank has died
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class RankInfo:
    """This process's rank, device and group sizes.

    With ``tp_size`` > 1, that many neighbouring ranks share each layer. They count as one data-parallel rank: they read
    the same sequences and draw the same random numbers.

    >>> info = RankInfo(rank=3, world_size=8, device=torch.device("cpu"), backend="gloo", tp_size=2)
    >>> info.dp_rank, info.dp_size
    (1, 4)
    """

    rank: int
    world_size: int
    device: torch.device
    backend: str
    tp_size: int = 1

    @classmethod
    def init(cls, device: str, timeout: float, store: Store | None = None) -> RankInfo:
        """Join the ranks that meet in ``store``, or at MASTER_ADDR:MASTER_PORT: over NCCL on GPUs, gloo elsewhere."""
        rank = int(os.environ["RANK"])
        world_size = int(os.environ["WORLD_SIZE"])
        on_gpu = device == "cuda" or (device == "auto" and torch.cuda.is_available())
        count = torch.cuda.device_count() if on_gpu else 0
        local_rank = int(os.environ.get("LOCAL_RANK", rank % max(1, count)))
        # with `srun --gpus-per-task=1` each rank sees only its own GPU
        device_index = 0 if count == 1 and "SLURM_LOCALID" in os.environ else local_rank
        if on_gpu and device_index >= count:
            raise TrainingError(
                f"rank {rank} has local rank {local_rank}, but its machine has {count} GPUs: start at most one "
                "rank per GPU, or pass --device cpu"
            )
        torch_device = torch.device("cuda", device_index) if on_gpu else torch.device("cpu")
        if on_gpu:
            torch.cuda.set_device(torch_device)
        limit = timedelta(seconds=timeout)
        if store is not None:
            store.set_timeout(limit)
        elif rank:
            _wait_for_master(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout)
        backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
        try:
            dist.init_process_group(backend, timeout=limit, store=store, rank=rank, world_size=world_size)
        except (RuntimeError, ValueError, OSError) as error:
            reason = str(error).partition("\n")[0]
            raise TrainingError(f"rank {rank} cannot join the job of {world_size} ranks: {reason}") from error
        return cls(rank, world_size, torch_device, "nccl" if on_gpu else "gloo")

    @property
    def is_rank_zero(self) -> bool:
        """Whether this is rank 0, which writes files and prints."""
        return self.rank == 0

    @property
    def dp_size(self) -> int:
        """Number of data-parallel ranks."""
        return self.world_size // self.tp_size

    @property
    def dp_rank(self) -> int:
        """This rank's index among the data-parallel ranks."""
        return self.rank // self.tp_size

    def make_mesh(self, replicas: int) -> DeviceMesh | None:
        """Return the mesh for :func:`zeroshard.shard`; None if it has only one axis. All ranks call it."""
        # tensor-parallel ranks communicate most: they are neighbours, usually on one machine
        sizes = {"replicate": replicas, "shard": self.dp_size // replicas, "tensor": self.tp_size}
        axes = {name: size for name, size in sizes.items() if size > 1 or name == "shard"}
        if len(axes) == 1:
            return None
        return init_device_mesh(self.device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))


def _wait_for_master(host: str, port: int, timeout: float) -> None:
    """Wait until rank 0 listens. torch's own wait ends with a page of messages."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            socket.create_connection((host, port), timeout=5).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise TrainingError(
                    f"rank 0 does not answer at {host}:{port} after {timeout:g} s ({error.strerror or error}): check "
                    "MASTER_ADDR and MASTER_PORT, and that rank 0 is running"
                ) from error
            time.sleep(0.2)


def launcher_environment(environment: Mapping[str, str]) -> dict[str, str] | None:
    """Return the launcher's settings as torchrun's variables; None if no launcher started this process.

    >>> launcher_environment({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"})["RANK"]
    '1'
    >>> launcher_environment({}) is None
    True
    """
    if "RANK" in environment and "WORLD_SIZE" in environment:  # torchrun, Kubernetes' PyTorchJob, Ray
        names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        missing = [name for name in names if name not in environment]
        if missing:
            raise TrainingError(f"RANK and WORLD_SIZE are set, but not {' and '.join(missing)}: set all or none")
        given = {name: environment[name] for name in (*names, "LOCAL_RANK") if name in environment}
    elif environment.get("SLURM_STEP_NUM_TASKS", "1") != "1" and "SLURM_PROCID" in environment:
        # set by srun, not by sbatch; 1: for example a shell
        hosts = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "127.0.0.1")
        job_step = environment.get("SLURM_JOB_ID", "0") + environment.get("SLURM_STEP_ID", "0").zfill(2)[-2:]
        given = {
            "RANK": environment["SLURM_PROCID"],
            "WORLD_SIZE": environment["SLURM_STEP_NUM_TASKS"],
            "LOCAL_RANK": environment.get("SLURM_LOCALID", "0"),
            "MASTER_ADDR": environment.get("MASTER_ADDR") or first_slurm_host(hosts),
            # one of 10,000 ports: the same on all ranks of a job step, another one for the next step
            "MASTER_PORT": environment.get("MASTER_PORT") or str(20000 + int(job_step) % 10000),
        }
    else:
        return None
    for name, value in given.items():
        if name != "MASTER_ADDR" and not value.isdecimal():
            raise TrainingError(f"{name} must be a number (got {value!r}): the program that starts the ranks sets it")
    rank, world_size, port = (int(given[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    if rank >= world_size:
        raise TrainingError(f"RANK must be below WORLD_SIZE, {world_size} (got {rank})")
    if not 0 < port < 2**16:
        raise TrainingError(f"MASTER_PORT must be a port, 1 to {2**16 - 1} (got {port})")
    return given


def first_slurm_host(hosts: str) -> str:
    """Return the first host of a compressed Slurm node list.

    >>> first_slurm_host("node[007-012,020],other"), first_slurm_host("rack[1-2]node[3,5]")
    ('node007', 'rack1node3')
    """
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", hosts).partition(",")[0]


# -------------------------------------------------------------------------------- signals and failures


def is_peer_lost(error: BaseException) -> bool:
    """Whether an error only says that another rank has failed."""
    from zeroshard.comm import RanksDisagreeError  # late: it imports DTensor, which the launcher does not need

    is_told = any(fragment in str(error) for fragment in PEER_LOST_MESSAGES)
    return is_told or isinstance(error, (RanksDisagreeError, dist.DistError))


def report_failure(error: BaseException, rank: int, message: str | None = None) -> None:
    """Report what ended this rank, to our own launcher or to the terminal and torchrun; by default with the stack."""
    if message is None:
        message = f"rank {rank} failed\n" + "".join(traceback.format_exception(error)).rstrip()
    directory = os.environ.get(ERROR_DIR_ENV)
    if directory is not None:
        partial = Path(directory, f"{rank}.partial")
        report = {"rank": rank, "time": time.time(), "message": message, "is_peer_lost": is_peer_lost(error)}
        partial.write_text(json.dumps(report))
        partial.rename(partial.with_suffix(".error.json"))
        return
    print_error("train", message)
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        ErrorHandler().record_exception(error)


def end_with_launcher(directory: Path) -> None:
    """Start a thread that kills this rank and its children when the launcher is gone, and deletes its directory.

    The launcher holds the other end of this process's standard input, which may be replaced afterwards.
    """
    launcher = os.dup(0)

    def wait() -> None:
        while os.read(launcher, 1):
            pass
        shutil.rmtree(directory, ignore_errors=True)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=wait, daemon=True).start()


class StopRequest:
    """Records a stop signal: Ctrl-C, a scheduler's SIGTERM, a closed terminal. A second signal ends the process."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        for number in STOP_SIGNALS:
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.signal = signal.Signals(number)
        for other in STOP_SIGNALS:
            signal.signal(other, signal.SIG_DFL)


def read_errors(error_dir: Path) -> list[dict[str, Any]]:
    """Read the error reports of failed ranks."""
    return [json.loads(path.read_text()) for path in error_dir.glob("*.error.json")]
