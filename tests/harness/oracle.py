"""The oracle: the same programs under the sources of another commit, in a process of their own.

A program is data: the options of a model and the calls of `Lockstep`, by the grammar of the state machine. After each
call a digest is taken by public functions alone: the bits of parameters (of masters, where there are some) and of
optimizer states, the collectives of rank 0 as (kind, ranks, bytes), the peak of each kind of memory, and the round
trips between ranks. `differences` compares two runs, call by call;
`differences_of_cores` the numbers of the two cores.

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


def run_programs(sources: Path, programs: Sequence[Program], core: str = "old") -> list[list[Digest]]:
    """Run programs with the library in ``sources``, on a core; return the digests of each."""
    result = subprocess.run(
        [sys.executable, __file__],
        env={**os.environ, "PYTHONPATH": str(sources), "ZEROSHARD_CORE": core},
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
            parts = [part for part in parts if part not in ("numbers", "text")]  # bits are compared, and outcomes
            lines += [f"program {number}, {call}: {part}: {other.get(part)}, was {one[part]}" for part in parts]
            if parts:
                break
    return lines


# Where the bits of the two cores differ, for sums are in another order. Then numbers are compared within CLOSE.
OTHER_SUMS = {
    "stage 0, two axes": "the old core all-reduces over the outer axis first, the new one over the inner axis first",
    "stages 0 and 1, several backwards in a step": "the cores expect the last backward by other rules: one adds up "
    "backwards before it reduces, the other one reduces each",
    "a backward after a gradient was assigned": "the new core adds it to this rank's next summand and reduces the sum, "
    "the old one adds it to what is reduced",
}
CLOSE = {None: 1e-6, "bf16": 2e-2}  # by precision


def other_sums(options: dict[str, Any], calls: Sequence[Any]) -> str | None:
    """Return why the cores sum in another order somewhere in these calls, if they do: a key of OTHER_SUMS."""
    if options["stage"] == 0 and options["world"] == 4:
        return "stage 0, two axes"
    backwards, is_assigned = 0, False
    for name, given in calls:
        is_backward = name in ("backward", "train")
        if is_backward and is_assigned:
            return "a backward after a gradient was assigned"
        backwards += is_backward
        if backwards > 1 and options["stage"] < 2:
            return "stages 0 and 1, several backwards in a step"
        is_assigned = is_assigned or name == "assign_gradient"
        if name in ("train", "zero_grad") or given.get("closure") is not None:
            backwards, is_assigned = 0, False
    return None


def differences_of_cores(programs: Sequence[Program], old: list[list[Digest]], new: list[list[Digest]]) -> list[str]:
    """Return one line for each program of which the new core gets other numbers than the old one, or an error.

    A program ends at the first call that one core refuses and the other one does not. Inside contexts, what is read is
    not compared.
    """
    lines = []
    for number, (program, before, after) in enumerate(zip(programs, old, new, strict=True)):
        calls = [("shard", {}), *program["calls"]]
        for end, (one, other) in enumerate(zip(before, after, strict=False), 1):
            what = f"program {number}, {program['options']}, {calls[:end]}"
            if other["outcome"] == "wrong" and one["outcome"] != "wrong":
                lines.append(f"{what}: {other['text']}")
            if one["outcome"] != other["outcome"]:
                break
            if one["is_inside"] or "numbers" not in one:
                continue
            if "numbers" not in other:
                lines.append(f"{what}: {other['error']}")
                break
            apart = max(abs(ours - theirs) for ours, theirs in zip(other["numbers"][0], one["numbers"][0], strict=True))
            reason = other_sums(program["options"], calls[:end])
            if apart > (CLOSE[program["options"].get("precision")] if reason else 0):
                lines.append(f"{what}: off by {apart} ({reason})")
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


def _numbers(values: Any) -> list[float]:
    """Return all numbers in nested dicts."""
    import torch

    if isinstance(values, dict):
        return [number for key in sorted(values) for number in _numbers(values[key])]
    return values.flatten().tolist() if isinstance(values, torch.Tensor) else []


def _states(both: Any) -> dict[str, Any]:
    """Read parameters and states by public functions; an error is read by its type."""
    import zeroshard

    def read(rank: int) -> dict[str, Any]:
        side = both.sides[rank]
        parameters = {name: zeroshard.full_parameter(side.model, name) for name in both.names}
        states = side.optimizer.state_dict()["state"]
        numbers = _numbers({0: parameters, 1: states}) if rank == 0 else []
        return {"parameters": _bits(parameters), "states": _bits(states), "numbers": numbers}

    outcomes = both._outcomes("digest", read)
    found: dict[str, Any] = defaultdict(list)
    for value, error in outcomes:
        for part, digest in (value or {"error": type(error).__name__}).items():
            found[part].append(digest)
    return dict(found)


def _peaks(both: Any) -> dict[str, int]:
    import zeroshard

    try:
        memory = zeroshard.report(both.sides[0].model).memory
    except NotImplementedError:  # of the new core
        return {}
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
        try:
            both = Lockstep(Options(**program["options"]))
        except Counterexample as error:
            if isinstance(error.__cause__, NotImplementedError):
                return [{"outcome": "unsupported", "text": str(error.__cause__)}]
            raise
        try:
            for name, given in [("", {}), *program["calls"]]:
                refused, outcome, text = both.refused.total(), "done", ""
                try:
                    if name and not both.over and GRAMMAR[name][0](both):
                        both.act(name, given)
                except Counterexample as error:
                    outcome = "unsupported" if isinstance(error.__cause__, NotImplementedError) else "wrong"
                    text = str(error)[:1000]
                    both.over = True
                outcome = "refused" if both.refused.total() > refused else outcome
                digest = {"outcome": outcome, "text": text, "collectives": list(moved), "round trips": len(trips)}
                digest["is_inside"] = bool(both.opened)
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
