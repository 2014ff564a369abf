"""The entry to all benchmarks.

python -m benchmarks                        # list them
python -m benchmarks stages --batch 4       # run one; --help lists its options
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

COMMANDS = {  # name → where its function is, and what it measures
    "activations": ("suites.memory:activations", "recomputed and offloaded activations: a step, and the largest batch"),
    "buckets": ("suites.stages:buckets", "a step by the size of buckets"),
    "checkpoint": ("suites.checkpoint:main", "saving and loading, compared with a raw write and FSDP2"),
    "cores": ("suites.cores:main", "the new core beside the old one and the floor"),
    "docs": ("report:main", "rebuild the tables and charts of the pages from the records, or check them"),
    "evidence": ("evidence:main", "what experts ask for: curves, a Llama, predictions, kills, endurance"),
    "fp8": ("suites.fp8:main", "float8 products beside bf16: a step, its memory, and a loss curve"),
    "host_adam": ("suites.optimizer:host_adam", "Adam on the host: nanoseconds a parameter"),
    "local_steps": ("suites.local_steps:main", "the loss of replicas that average every so many steps"),
    "memory": ("suites.memory:main", "reserved and allocated memory, and training in memory that is nearly full"),
    "muon": ("suites.optimizer:muon", "a step of Muon, compared with its matrix products and with FSDP2"),
    "offload": ("suites.offload:main", "states on the host and on disk: a step, and the largest model"),
    "paper": ("paper.measured:main", "Figures 6 and 7 of the paper"),
    "paper_predicted": ("paper.predicted:main", "the paper's tables and figures as the planner predicts them"),
    "peers": ("suites.peers:main", "zeroshard, DDP, FSDP2, DeepSpeed and the floor, on many workloads"),
    "planner": ("suites.planner:main", "predicted and measured memory and time"),
    "pretrained": ("suites.pretrained:main", "loading a transformers model into shards: time and memory"),
    "scaling": ("suites.scaling:main", "cost by ranks, by depth and by the number of parameters, with FSDP2"),
    "sockets": ("suites.sockets:main", "stages, and 8-bit collectives, on real ranks that share a GPU"),
    "stages": ("suites.stages:main", "what each stage holds and sends"),
    "update": ("suites.optimizer:update", "the optimizer's step alone, compared with a copy of memory"),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run one benchmark, or list all."""
    name, *rest = (sys.argv[1:] if argv is None else list(argv)) or ["--help"]
    if name in COMMANDS:
        module, _, function = COMMANDS[name][0].partition(":")
        getattr(import_module(f"benchmarks.{module}"), function)(rest)
        return
    listed = "\n".join(f"  {command:<15}  {what}" for command, (_, what) in COMMANDS.items())
    usage = f"usage: python -m benchmarks NAME [options]\n\n{listed}\n\nNAME --help lists the options of one."
    if name in ("-h", "--help"):
        print(usage)
        return
    raise SystemExit(f"no benchmark {name!r}\n\n{usage}")


if __name__ == "__main__":
    main()
