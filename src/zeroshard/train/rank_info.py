"""World: the ranks of a job, however they were started, and this one's place among them."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from zeroshard.train.errors import TrainingError


@dataclass(frozen=True)
class RankInfo:
    """This rank's place.

    With ``tensor`` > 1, so many neighbours divide each layer. To the data they are one: they read the same sequences
    and draw the same random numbers.

    >>> place = RankInfo(rank=3, world_size=8, device=torch.device("cpu"), backend="gloo", tp_size=2)
    >>> place.dp_rank, place.dp_size
    (1, 4)
    """

    rank: int
    world_size: int
    device: torch.device
    backend: str
    tp_size: int = 1

    @classmethod
    def init(cls, device: str, timeout: float) -> RankInfo:
        """Join the ranks that torchrun, srun or another launcher has started, over NCCL on GPUs and gloo elsewhere."""
        place = launcher_environment(os.environ)
        if place is None:
            raise RuntimeError("no launcher has said which rank this is: start it with torchrun, or `zeroshard train`")
        os.environ.update(place)
        local_rank = int(place["LOCAL_RANK"])
        on_gpu = device == "cuda" or (device == "auto" and torch.cuda.is_available())
        count = torch.cuda.device_count() if on_gpu else 0
        # `srun --gpus-per-task=1` shows each rank its own GPU alone
        number = 0 if count == 1 and "SLURM_LOCALID" in os.environ else local_rank
        if on_gpu and number >= count:
            raise TrainingError(
                f"rank {place['RANK']} is number {local_rank + 1} on its machine, which has {count} GPUs: start at "
                "most one rank a GPU, or give --device cpu"
            )
        where = torch.device("cuda", number) if on_gpu else torch.device("cpu")
        if on_gpu:
            torch.cuda.set_device(where)
        dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", timeout=timedelta(seconds=timeout))
        return cls(dist.get_rank(), dist.get_world_size(), where, "nccl" if on_gpu else "gloo")

    @property
    def is_rank_zero(self) -> bool:
        """Whether this is the rank that writes and shows."""
        return self.rank == 0

    @property
    def dp_size(self) -> int:
        """How many share the batch."""
        return self.world_size // self.tp_size

    @property
    def dp_rank(self) -> int:
        """Whose part of the batch this rank has."""
        return self.rank // self.tp_size

    def make_mesh(self) -> DeviceMesh | None:
        """The ranks as :func:`zeroshard.shard` takes them; None where it needs nothing said. All ranks call it."""
        if self.tp_size == 1:
            return None
        shape = (self.dp_size, self.tp_size)  # neighbours, mostly of one machine, have most to tell each other
        return init_device_mesh(self.device.type, shape, mesh_dim_names=("shard", "tensor"))


def launcher_environment(environment: Mapping[str, str]) -> dict[str, str] | None:
    """What a launcher says about this process, in torchrun's words; None where no launcher has started it.

    >>> launcher_environment({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"})["LOCAL_RANK"]
    '0'
    >>> launcher_environment({}) is None
    True
    """
    if "RANK" in environment and "WORLD_SIZE" in environment:  # torchrun, Kubernetes' PyTorchJob, Ray
        words = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        missing = [name for name in words if name not in environment]
        if missing:
            raise TrainingError(f"RANK and WORLD_SIZE are set, but not {' and '.join(missing)}: set all or none")
        kept = {name: environment[name] for name in words}
        local = str(int(kept["RANK"]) % max(1, torch.cuda.device_count()))
        return {**kept, "LOCAL_RANK": environment.get("LOCAL_RANK", local)}
    tasks = int(environment.get("SLURM_STEP_NUM_TASKS", "1"))  # set by srun, not by sbatch; 1: a shell, say
    if tasks > 1 and "SLURM_PROCID" in environment:
        return {
            "RANK": environment["SLURM_PROCID"],
            "WORLD_SIZE": environment["SLURM_STEP_NUM_TASKS"],
            "LOCAL_RANK": environment.get("SLURM_LOCALID", "0"),
            "MASTER_ADDR": environment.get("MASTER_ADDR") or _slurm_first_host(environment),
            # one of 10,000 ports, the same on every rank of a job step and another for the next
            "MASTER_PORT": environment.get("MASTER_PORT") or str(20000 + int(_slurm_job_number(environment)) % 10000),
        }
    return None


def _slurm_job_number(environment: Mapping[str, str]) -> str:
    return environment.get("SLURM_JOB_ID", "0") + environment.get("SLURM_STEP_ID", "0").rjust(2, "0")[-2:]


def _slurm_first_host(environment: Mapping[str, str]) -> str:
    hosts = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "127.0.0.1")
    if "[" not in hosts:
        return hosts.partition(",")[0]
    try:
        listed = subprocess.run(["scontrol", "show", "hostnames", hosts], capture_output=True, text=True, check=True)
        return listed.stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return first_slurm_host(hosts)


def first_slurm_host(hosts: str) -> str:
    """The first host of Slurm's short form of a list, for machines without scontrol.

    >>> first_slurm_host("node[007-012,020],other")
    'node007'
    """
    found = re.match(r"([^\[,]*)\[([^\],-]+)[^\]]*\]([^,]*)", hosts)
    return "".join(found.groups()) if found else hosts.partition(",")[0]
