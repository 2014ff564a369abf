"""The one entry to all benchmarks.

python -m benchmarks                        # what there is
python -m benchmarks stages --repeats 3     # one of them; --help says what it takes
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

COMMANDS = {
    "activations": "recomputed and offloaded activations: a step, and the largest batch",
    "buckets": "a step by the size of buckets",
    "checkpoint": "saving and loading, beside a raw write and FSDP2",
    "docs": "rebuild the pages' tables and charts from the records, or check them",
    "host_adam": "Adam on the host: nanoseconds a parameter",
    "memory": "reserved beside allocated memory, and training in memory that is nearly full",
    "offload": "states on the host and on disk: a step, and the largest model",
    "paper": "Figures 6 and 7 of the paper",
    "peers": "zeroshard beside DDP, FSDP2, DeepSpeed and the floor, in many rows",
    "planner": "what the planner foretells beside what is measured",
    "scaling": "cost by ranks, by depth and by the number of parameters, beside FSDP2",
    "stages": "what each stage holds and sends",
    "update": "the optimizer's step alone, beside a copy of memory",
}

MODULES = {"docs": "report"}  # where the file has another name


def main(argv: Sequence[str] | None = None) -> None:
    """Run one benchmark, or say which there are."""
    name, *rest = (sys.argv[1:] if argv is None else list(argv)) or ["--help"]
    if name in COMMANDS:
        import_module(f"benchmarks.{MODULES.get(name, name)}").main(rest)
        return
    width = max(map(len, COMMANDS))
    listed = "\n".join(f"  {command:<{width}}  {what}" for command, what in COMMANDS.items())
    told = f"usage: python -m benchmarks NAME [options]\n\n{listed}\n\nNAME --help says more of each."
    if name in ("-h", "--help"):
        print(told)
        return
    raise SystemExit(f"there is no benchmark {name!r}\n\n{told}")


if __name__ == "__main__":
    main()
