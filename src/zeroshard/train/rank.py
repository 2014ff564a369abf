"""This process as one rank: its place among the ranks, its stop signals, and how it reports its failure."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
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
from torch.distributed import DistError
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import ErrorHandler

from zeroshard.train.options import TrainingError

ERROR_DIR_ENV = "ZEROSHARD_ERROR_DIR"  # environment variable: the directory for error reports of failed ranks
ERROR_GRACE_SECONDS = 3  # for a rank to write its error report after another rank failed
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
    def init(cls, device: str, timeout: float) -> RankInfo:
        """Join the process group that torchrun, srun or another launcher started: NCCL on GPUs, gloo elsewhere."""
        env = launcher_environment(os.environ)
        if env is None:
            raise RuntimeError("RANK and WORLD_SIZE are not set: start it with torchrun, or by `zeroshard train`")
        os.environ.update(env)
        local_rank = int(env["LOCAL_RANK"])
        on_gpu = device == "cuda" or (device == "auto" and torch.cuda.is_available())
        count = torch.cuda.device_count() if on_gpu else 0
        # with `srun --gpus-per-task=1` each rank sees only its own GPU
        device_index = 0 if count == 1 and "SLURM_LOCALID" in os.environ else local_rank
        if on_gpu and device_index >= count:
            raise TrainingError(
                f"rank {env['RANK']} has local rank {local_rank}, but its machine has {count} GPUs: start at most one "
                "rank per GPU, or pass --device cpu"
            )
        torch_device = torch.device("cuda", device_index) if on_gpu else torch.device("cpu")
        if on_gpu:
            torch.cuda.set_device(torch_device)
        dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", timeout=timedelta(seconds=timeout))
        return cls(dist.get_rank(), dist.get_world_size(), torch_device, "nccl" if on_gpu else "gloo")

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


def launcher_environment(environment: Mapping[str, str]) -> dict[str, str] | None:
    """Return the launcher's settings as torchrun's variables; None if no launcher started this process.

    >>> launcher_environment({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"})["LOCAL_RANK"]
    '0'
    >>> launcher_environment({}) is None
    True
    """
    if "RANK" in environment and "WORLD_SIZE" in environment:  # torchrun, Kubernetes' PyTorchJob, Ray
        names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        missing = [name for name in names if name not in environment]
        if missing:
            raise TrainingError(f"RANK and WORLD_SIZE are set, but not {' and '.join(missing)}: set all or none")
        given = {name: environment[name] for name in names}
        local = str(int(given["RANK"]) % max(1, torch.cuda.device_count()))
        return {**given, "LOCAL_RANK": environment.get("LOCAL_RANK", local)}
    tasks = int(environment.get("SLURM_STEP_NUM_TASKS", "1"))  # set by srun, not by sbatch; 1: for example a shell
    if tasks > 1 and "SLURM_PROCID" in environment:
        hosts = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "127.0.0.1")
        job_step = environment.get("SLURM_JOB_ID", "0") + environment.get("SLURM_STEP_ID", "0").zfill(2)[-2:]
        return {
            "RANK": environment["SLURM_PROCID"],
            "WORLD_SIZE": environment["SLURM_STEP_NUM_TASKS"],
            "LOCAL_RANK": environment.get("SLURM_LOCALID", "0"),
            "MASTER_ADDR": environment.get("MASTER_ADDR") or first_slurm_host(hosts),
            # one of 10,000 ports: the same on all ranks of a job step, another one for the next step
            "MASTER_PORT": environment.get("MASTER_PORT") or str(20000 + int(job_step) % 10000),
        }
    return None


def first_slurm_host(hosts: str) -> str:
    """Return the first host of a compressed Slurm node list.

    >>> first_slurm_host("node[007-012,020],other"), first_slurm_host("rack[1-2]node[3,5]")
    ('node007', 'rack1node3')
    """
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", hosts).partition(",")[0]


# -------------------------------------------------------------------------------- signals and failures


def report_failure(error: BaseException, rank: int) -> None:
    """Report what ended this rank: to our own launcher, or to the terminal and torchrun."""
    from zeroshard.comm import RanksDisagreeError  # late: it imports DTensor, which the launcher does not need

    stack = "".join(traceback.format_exception(error)).rstrip()
    message = str(error) if isinstance(error, TrainingError) else f"rank {rank} failed\n{stack}"
    directory = os.environ.get(ERROR_DIR_ENV)
    if directory is not None:
        partial = Path(directory, f"{rank}.partial")
        is_peer_lost = isinstance(error, (RanksDisagreeError, DistError)) or any(
            fragment in str(error) for fragment in PEER_LOST_MESSAGES
        )
        report = {"rank": rank, "time": time.time(), "message": message, "is_peer_lost": is_peer_lost}
        partial.write_text(json.dumps(report))
        partial.rename(partial.with_suffix(".error.json"))
        return
    print(f"zeroshard train: {message}", file=sys.stderr)
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        ErrorHandler().record_exception(error)


class StopRequest:
    """Records a stop signal: Ctrl-C, a scheduler's SIGTERM, a closed terminal. A second signal ends the process.

    [Note: ranks whose peer failed] When one rank fails, the launcher sends SIGTERM to the others. They may wait for the
    failed rank in a call that runs no Python code, so their signal handler would never run. The signal also writes a
    byte to a pipe on which a thread waits. The thread then polls for an error report of another rank, and ends this
    process soon after it finds one.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        for number in STOP_SIGNALS:
            signal.signal(number, self._on_signal)
        directory = os.environ.get(ERROR_DIR_ENV)
        if directory is not None:
            wakeup_read_fd, wakeup_write_fd = os.pipe()
            os.set_blocking(wakeup_write_fd, False)
            signal.set_wakeup_fd(wakeup_write_fd, warn_on_full_buffer=False)
            threading.Thread(
                target=self._exit_when_peer_failed, args=(wakeup_read_fd, Path(directory)), daemon=True
            ).start()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.signal = signal.Signals(number)
        for other in STOP_SIGNALS:
            signal.signal(other, signal.SIG_DFL)

    @staticmethod
    def _exit_when_peer_failed(wakeup_fd: int, error_dir: Path) -> None:
        os.read(wakeup_fd, 1)
        while not any(error_dir.glob("*.error.json")):
            time.sleep(0.2)
        time.sleep(ERROR_GRACE_SECONDS)
        os._exit(1)


def read_errors(error_dir: Path) -> list[dict[str, Any]]:
    """Read the error reports of failed ranks."""
    return [json.loads(path.read_text()) for path in error_dir.glob("*.error.json")]
