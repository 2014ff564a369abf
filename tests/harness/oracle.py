"""The oracle: the same programs under the sources of another commit, in a process of their own.

A program is data: the options of a model and the calls of `Lockstep`, by the grammar of the state machine. After each
call a digest is taken by public functions alone: the bits of parameters (of masters, where there are some) and of
optimizer states, the collectives of rank 0 as (kind, ranks, bytes), the peak of each kind of memory, and the round
trips between ranks. `differences` compares two runs, call by call.

As a command it runs the programs that it reads: `PYTHONPATH=SRC python tests/harness/oracle.py < PROGRAMS`. The tests'
own files are the same for both runs, so they use only what is public in both.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
COMMIT = "7b662b1930bb6fd21fd53979b31e919a800cfe84"
KINDS = {
    "all_gather_single": "all-gather",
    "all_gather_into_tensor": "all-gather",
    "reduce_scatter_single": "reduce-scatter",
    "reduce_scatter_tensor": "reduce-scatter",
    "all_reduce": "all-reduce",
    "all_to_all_single": "all-to-all",
    "broadcast": "broadcast",
}
Program = dict[str, Any]  # {"options": fields of Options, "calls": [(name, arguments), …]}
Digest = dict[str, Any]


# ------------------------------------------------------------------------------------------------- in the test


def has_commit() -> bool:
    """Return whether the clone has the oracle's commit."""
    command = ["git", "cat-file", "-e", f"{COMMIT}^{{commit}}"]
    return shutil.which("git") is not None and subprocess.run(command, cwd=ROOT, capture_output=True).returncode == 0


def extract_sources(target: Path) -> Path:
    """Write the oracle's sources into a folder, and return what to put on the path."""
    archive = subprocess.run(["git", "archive", COMMIT, "src"], cwd=ROOT, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(target, filter="data")
    return target / "src"


def run_programs(sources: Path, programs: Sequence[Program]) -> list[list[Digest]]:
    """Run programs with the library in ``sources``; return the digests of each."""
    result = subprocess.run(
        [sys.executable, __file__],
        env={**os.environ, "PYTHONPATH": str(sources)},
        input=json.dumps(programs),
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    found = json.loads(result.stdout.splitlines()[-1])
    assert Path(found["library"]).is_relative_to(sources), found["library"]
    return found["digests"]


MEANT = {("add_group", "round trips")}  # ranks agree on a group that is added


def differences(programs: Sequence[Program], old: list[list[Digest]], new: list[list[Digest]]) -> list[str]:
    """Return one line for each difference.

    A program ends at the first call that the old sources refuse, or get wrong, and the new ones do not: that is meant.
    """
    lines = []
    for number, (program, before, after) in enumerate(zip(programs, old, new, strict=True)):
        for call, one, other in zip([("shard", {}), *program["calls"]], before, after, strict=False):
            if one["outcome"] != "done" and other["outcome"] == "done":
                break
            parts = [part for part in one if one[part] != other.get(part) and (call[0], part) not in MEANT]
            lines += [f"program {number}, {call}: {part}: {other.get(part)}, was {one[part]}" for part in parts]
            if parts:
                break
    return lines


# ------------------------------------------------------------------------------------------------- in the process


class Collectives:
    """Records the collectives of rank 0."""

    def __init__(self) -> None:
        self.found: list[list[Any]] = []
        self._inside = threading.local()

    def install(self) -> None:
        import torch.distributed as dist

        for name, kind in KINDS.items():
            if hasattr(dist, name):
                setattr(dist, name, self._recording(getattr(dist, name), kind))

    def _recording(self, function: Callable[..., Any], kind: str) -> Callable[..., Any]:
        import torch
        import torch.distributed as dist

        def record(*args: Any, **kwargs: Any) -> Any:
            if getattr(self._inside, "depth", 0):  # one of these calls another
                return function(*args, **kwargs)
            tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
            groups = [value for value in (*args, *kwargs.values()) if isinstance(value, dist.ProcessGroup)]
            if dist.get_rank() == 0:
                ranks = dist.get_process_group_ranks(groups[0] if groups else dist.group.WORLD)
                self.found.append([kind, ranks, max(tensor.numel() * tensor.itemsize for tensor in tensors)])
            self._inside.depth = 1
            try:
                return function(*args, **kwargs)
            finally:
                self._inside.depth = 0

        return record

    @contextmanager
    def new(self) -> Iterator[list[list[Any]]]:
        """Yield a list that gets the collectives until the end of the context."""
        found: list[list[Any]] = []
        self.found = found
        yield found
        self.found = []


def _bits(values: Any) -> str:
    """Return a digest of the bits of all tensors and numbers in nested dicts."""
    import torch

    digest = hashlib.blake2b(digest_size=8)

    def add(value: Any) -> None:
        if isinstance(value, dict):
            for key in sorted(value):
                digest.update(str(key).encode())
                add(value[key])
        elif isinstance(value, torch.Tensor):
            digest.update(f"{value.dtype} {tuple(value.shape)}".encode())
            digest.update(bytes(value.detach().contiguous().view(-1).view(torch.uint8).tolist()))
        else:
            digest.update(repr(value).encode())

    add(values)
    return digest.hexdigest()


def _states(both: Any) -> dict[str, Any]:
    """Read parameters, states and peaks by public functions; an error is read by its type."""
    import zeroshard

    def read(rank: int) -> dict[str, Any]:
        side = both.sides[rank]
        parameters = {name: zeroshard.full_parameter(side.model, name) for name in both.names}
        states = {name: zeroshard.full_state(side.optimizer, name) for name in both.names}
        return {"parameters": _bits(parameters), "states": _bits(states)}

    outcomes = both._outcomes("digest", read)
    found: dict[str, Any] = defaultdict(list)
    for value, error in outcomes:
        for part, digest in (value or {"error": type(error).__name__}).items():
            found[part].append(digest)
    return dict(found)


def _peaks(both: Any) -> dict[str, int]:
    import zeroshard

    memory = zeroshard.report(both.sides[0].model).memory
    return {
        f"{kind} on {tier}": held.peak
        for (kind, tier), held in memory.items()
        # how far updates are ahead, and when the first one of a worker thread makes its states, depends on time
        if kind != "ahead of the step" and (kind, tier) != ("optimizer states", "host")
    }


def digests_of(program: Program, collectives: Collectives) -> list[Digest]:
    """Run a program and return a digest after ``shard()`` and after each call."""
    from lockstep import Counterexample, Lockstep, Options
    from round_trips import counted
    from test_state_machine import GRAMMAR

    digests: list[Digest] = []
    with counted() as trips, collectives.new() as moved:
        both = Lockstep(Options(**program["options"]))
        try:
            for name, given in [("", {}), *program["calls"]]:
                refused, outcome = both.refused.total(), "done"
                try:
                    if name and not both.over and GRAMMAR[name][0](both):
                        both.act(name, given)
                except Counterexample:
                    outcome = "wrong"
                    both.over = True
                outcome = "refused" if both.refused.total() > refused else outcome
                digest = {"outcome": outcome, "collectives": list(moved), "round trips": len(trips)}
                if not both.over:
                    digest |= {**_states(both), "peaks": _peaks(both)}
                digests.append(digest)
                moved.clear()
                trips.clear()
                if both.over:
                    break
        finally:
            both.close()
    return digests


def main() -> None:
    """Run the programs of the standard input."""
    sys.path[:0] = [str(ROOT / "tests" / folder) for folder in ("harness", "equivalence")]
    collectives = Collectives()
    collectives.install()  # before the library takes these functions
    from ranks import settle_torch

    import zeroshard

    settle_torch()
    digests = [digests_of(program, collectives) for program in json.load(sys.stdin)]
    print(json.dumps({"library": zeroshard.__file__, "digests": digests}))


if __name__ == "__main__":
    main()
