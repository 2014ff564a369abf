"""The command `zeroshard rehearse`: run a training script with several real ranks here, and check what they do."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import socket
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zeroshard.rehearse.checks import FAILED, WARNING, RankRecord, RehearsalCheck, name_ranks, run_checks
from zeroshard.utils.command_line import CommandParser, check_local_ranks, make_echo, positive_int, print_error
from zeroshard.utils.format import format_bytes

if TYPE_CHECKING:
    import subprocess

    from torch._C._distributed_c10d import TCPStore

END_GRACE_SECONDS = 30  # for a script to end after its last step
FAILURE_GRACE_SECONDS = 15  # for the other ranks to learn of a failure: zeroshard needs at most 10
STACK_GRACE_SECONDS = 2  # for ranks that hang to write their stacks
POLL_SECONDS = 0.1
LOOPBACK = "127.0.0.1"
LOG_LINES, STACK_LINES = 15, 8  # shown of a rank that died or hangs
RANK_PROGRAM = """
from zeroshard.utils.lazy_import import uncollected_imports
with uncollected_imports():
    from zeroshard.rehearse.rank import main
main()
"""  # not with -m: `__main__` is the user's script
HINTS = {
    "EOFError: ": "The ranks of a rehearsal have no standard input: pass what the script asks for as options.",
    "OutOfMemoryError: ": "Ranks that share a GPU share its memory: rehearse with a smaller model or batch, or fewer "
    "ranks.",
}
DESCRIPTION = """\
Run a training script with several real ranks on this machine, check what they do, and end after some optimizer steps:
a rehearsal before renting a cluster. The script is not changed: it runs as under torchrun, calls zeroshard.shard() and
steps the optimizer. It runs for real: files and checkpoints that it writes are written."""
EPILOG = """\
One rank runs per GPU if there are enough GPUs. Otherwise the ranks share the GPUs over NCCL, and LOCAL_RANK is the rank
modulo the number of GPUs. Without a GPU they use gloo.

It does not show how fast a cluster is: ranks that share a machine say nothing about bandwidth, step time or overlap."""


def main(argv: Sequence[str]) -> int:
    """Run the command and return the exit status: 1 if a check or a rank fails."""
    options = _parser().parse_args(argv)
    try:
        _check_usage(options)
    except ValueError as error:
        print_error("rehearse", error)
        return 2
    outcome = rehearse(options)
    if outcome.signal:
        return 128 + outcome.signal
    make_echo(sys.stdout)(json.dumps(to_dict(outcome), indent=1) if options.json else render_text(outcome))
    return 0 if outcome.has_passed and not (options.strict and outcome.warnings) else 1


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="zeroshard rehearse",
        description=DESCRIPTION,
        epilog=EPILOG,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--ranks", type=positive_int, required=True, metavar="N", help="number of ranks")
    parser.add_argument("--steps", type=positive_int, default=5, metavar="K", help="optimizer steps (default: 5)")
    parser.add_argument(
        "--timeout", type=positive_int, default=600, metavar="SECONDS", help="for all of it (default: 600)"
    )
    parser.add_argument("--strict", action="store_true", help="exit status 1 also for warnings")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object; rank 0's output goes to standard error"
    )
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is a module, as for `python -m`")
    parser.add_argument("script", metavar="SCRIPT", help="the training script; options of the rehearsal go before it")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="its arguments, passed unchanged")
    return parser


def _check_usage(options: argparse.Namespace) -> None:
    """Raise if the script or the ranks cannot be started."""
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise ValueError("it starts its own ranks: run it without torchrun or srun (WORLD_SIZE is set)")
    check_local_ranks(options.ranks)
    if options.module:
        package = options.script.partition(".")[0]  # its modules are found only by importing it
        sys.path.insert(0, os.getcwd())
        found = find_spec(package)
        sys.path.pop(0)
        if found is None:
            raise ValueError(f"there is no module {package!r}: without -m it is a file")
    elif Path(options.script).is_dir():
        raise ValueError(f"{options.script} is a directory: pass the script in it, or -m and a module")
    elif not Path(options.script).is_file():
        raise ValueError(f"there is no script {options.script!r}")


# ------------------------------------------------------------------------------------------------ the ranks


@dataclass
class RehearsalOutcome:
    """What came of a rehearsal."""

    script: str
    ranks: int
    gpus: int
    records: list[RankRecord] = field(default_factory=list)
    checks: list[RehearsalCheck] = field(default_factory=list)
    failure: str = ""  # why the run ended early, with the traceback of the rank that failed first
    other_failures: dict[int, str] = field(default_factory=dict)  # of the ranks that failed as a result
    notes: list[str] = field(default_factory=list)
    signal: int = 0

    @property
    def has_passed(self) -> bool:
        """Whether no rank and no check has failed."""
        return not self.failure and not any(check.status == FAILED for check in self.checks)

    @property
    def warnings(self) -> list[RehearsalCheck]:
        """The checks that warn."""
        return [check for check in self.checks if check.status == WARNING]


def rehearse(options: argparse.Namespace) -> RehearsalOutcome:
    """Start the ranks, wait until they have ended, and compare what they have recorded."""
    import torch

    from zeroshard.train import ERROR_DIR_ENV, local_ranks

    gpus = torch.cuda.device_count()
    outcome = RehearsalOutcome(f"{'-m ' if options.module else ''}{options.script}", options.ranks, gpus)
    make_echo(sys.stderr)(f"rehearsing {outcome.script}: {_describe_ranks(outcome)}, {options.steps} steps")
    with tempfile.TemporaryDirectory(prefix="zeroshard-rehearsal-") as name:
        directory, deadline = Path(name), time.time() + options.timeout
        settings = {
            "steps": options.steps,
            "gpus": gpus,
            "ranks": options.ranks,
            "deadline": deadline,
            "is_quiet": options.json,
        }
        (directory / "settings.json").write_text(json.dumps(settings))
        kind = "module" if options.module else "script"
        command = [sys.executable, "-c", RANK_PROGRAM, name, kind, options.script, *options.arguments]
        store = _open_local_store()
        environment = {ERROR_DIR_ENV: name, "PYTHONUNBUFFERED": "1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
        environment |= {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(store.port)}
        with local_ranks(options.ranks, command, environment) as (processes, signals):
            ending = _wait(processes, signals, directory, deadline)
        if signals:
            outcome.signal = signals[0]
            return outcome
        _read_outcome(outcome, directory, ending)
        error = _error_line(outcome.failure)
        disagreement = error if error.startswith("RanksDisagreeError: ") else ""
        outcome.checks = run_checks(outcome.records, options.ranks, options.steps, disagreement)
        if not outcome.failure and ending.is_timeout:
            outcome.failure = f"the script did not end within {options.timeout} s (--timeout)"
            outcome.failure += "".join(_stacks(directory, outcome))
    return outcome


def _open_local_store() -> TCPStore:
    """Return a store for a script that opens MASTER_ADDR:MASTER_PORT itself; it listens only on loopback.

    torch's own store listens on every interface, whatever its address. So the socket is bound here. There is no
    password: other users of this machine can reach it. So init_process_group() does not use it: see rank.py.
    """
    from torch._C._distributed_c10d import TCPStore

    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.bind((LOOPBACK, 0))
        listener.listen(128)
        port = listener.getsockname()[1]
        descriptor = listener.detach()  # now owned by the store, which closes it
    return TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor)


@dataclass
class _Ending:
    """How the processes ended."""

    statuses: dict[int, int] = field(default_factory=dict)  # exit statuses of ranks that failed
    killed: list[int] = field(default_factory=list)  # ranks that did not end by themselves after their last step
    is_timeout: bool = False


def _wait(processes: list[subprocess.Popen[bytes]], signals: list[int], directory: Path, deadline: float) -> _Ending:
    """Wait until the ranks have ended, let them end together, and kill those that do not."""
    ending, kill_time = _Ending(), float("inf")
    while running := [rank for rank, process in enumerate(processes) if process.poll() is None]:
        now = time.time()
        failed = {
            rank: status
            for rank, process in enumerate(processes)
            if (status := process.poll()) and not _is_finished(directory, rank)
        }
        if failed and not ending.statuses:
            ending.statuses = failed
            kill_time = min(kill_time, now + FAILURE_GRACE_SECONDS)
        end_file = directory / "end"
        if not end_file.exists() and all(_is_finished(directory, rank) for rank in running):
            end_file.touch()
            kill_time = min(kill_time, now + END_GRACE_SECONDS)
        if signals or now > min(kill_time, deadline + STACK_GRACE_SECONDS):
            ending.killed = running
            ending.is_timeout = not (signals or end_file.exists() or ending.statuses)
            return ending
        time.sleep(POLL_SECONDS)
    failed = {rank: process.returncode for rank, process in enumerate(processes) if process.returncode}
    ending.statuses = ending.statuses or {
        rank: status for rank, status in failed.items() if not _is_finished(directory, rank)
    }
    return ending


def _is_finished(directory: Path, rank: int) -> bool:
    """Return whether a rank has made all its steps."""
    return (directory / f"{rank}.finished").exists()


def _read_record(directory: Path, rank: int) -> RankRecord | None:
    path = directory / f"{rank}.json"
    return RankRecord.from_json(path.read_text()) if path.exists() else None


def _read_outcome(outcome: RehearsalOutcome, directory: Path, ending: _Ending) -> None:
    """Read the records of the ranks, and why some failed."""
    from zeroshard.train import describe_first_failure, read_errors

    records = [_read_record(directory, rank) for rank in range(outcome.ranks)]
    outcome.records = [record for record in records if record is not None]
    outcome.notes = list(dict.fromkeys(note for record in outcome.records for note in record.notes))
    finished = {record.rank for record in outcome.records if record.is_finished}
    late = [rank for rank in ending.killed if rank in finished]
    if late:
        outcome.notes.append(
            f"the rehearsal killed {name_ranks(late)}, which still ran {END_GRACE_SECONDS} s after the last step: the "
            "script catches SystemExit, or does more at its end"
        )
    if not ending.statuses:
        return
    outcome.failure = describe_first_failure(directory, ending.statuses)
    reports = {report["rank"]: str(report["message"]) for report in read_errors(directory)}
    outcome.other_failures = {
        rank: _error_line(message) for rank, message in sorted(reports.items()) if message != outcome.failure
    }
    for rank in ending.statuses:
        log = directory / f"{rank}.log"
        lines = log.read_text(errors="replace").splitlines()[-LOG_LINES:] if log.exists() else []
        if rank not in reports and lines:
            outcome.failure += "".join(f"\n  {line}" for line in (f"last output of rank {rank}:", *lines))
    for error, hint in HINTS.items():
        outcome.failure += f"\n{hint}" if error in _error_line(outcome.failure) else ""


def _error_line(message: str) -> str:
    """Return the last line of a traceback, without the module of the exception, advice and gloo's text.

    >>> _error_line("Traceback …\\nzeroshard.comm.RanksDisagreeError: rank 1 has died: its process was killed")
    'RanksDisagreeError: rank 1 has died: its process was killed'
    """
    last = message.strip().splitlines()[-1] if message.strip() else ""
    return re.split(r"\. All ranks must | \(\[/", re.sub(r"^[\w.]+\.(\w+:)", r"\1", last))[0]


def _stacks(directory: Path, outcome: RehearsalOutcome) -> Iterator[str]:
    """Yield where each rank was at the timeout."""
    finished = {record.rank for record in outcome.records if record.is_finished}
    for rank in range(outcome.ranks):
        path = directory / f"{rank}.stacks"
        dump = path.read_text(errors="replace") if path.exists() else ""
        frames = dump.rpartition("(most recent call first):\n")[2].splitlines()  # of the main thread, which is last
        shown = [line for number, line in enumerate(frames) if not number or not _is_library_frame(line)]
        if rank in finished:
            yield f"\nrank {rank} has made its steps and waits for the others"
        elif shown:
            yield f"\nrank {rank} was at (most recent call first):\n" + "\n".join(shown[:STACK_LINES])
        else:
            yield f"\nrank {rank} was starting"


def _is_library_frame(line: str) -> bool:
    return any(part in line for part in ('"<', f"{os.sep}zeroshard{os.sep}", f"{os.sep}torch{os.sep}"))


# ------------------------------------------------------------------------------------------------- as text


def to_dict(outcome: RehearsalOutcome) -> dict[str, Any]:
    """Return the outcome as plain JSON data."""
    records = [asdict(record) for record in outcome.records]
    for record in records:
        for model in record["models"]:
            for checksums in ("values", "batches"):
                del model[checksums]
    return {
        "script": outcome.script,
        "ranks": outcome.ranks,
        "gpus": outcome.gpus,
        "passed": outcome.has_passed,
        "failure": outcome.failure,
        "other_failures": outcome.other_failures,
        "checks": [asdict(check) for check in outcome.checks],
        "notes": outcome.notes,
        "records": records,
    }


def render_text(outcome: RehearsalOutcome) -> str:
    """Return the outcome as readable text."""
    lines = [""]
    if outcome.failure:
        lines += [outcome.failure, *(f"rank {rank}: {text}" for rank, text in outcome.other_failures.items()), ""]
    backend = next((record.backend for record in outcome.records if record.backend), "")
    lines.append(f"rehearsal of {outcome.script}: {_describe_ranks(outcome)}{backend and ', '}{backend}")
    first = next((record for record in outcome.records if record.models), None)
    for model in first.models if first is not None else ():
        parameters = f"{format_bytes(model.parameter_bytes)} of parameters"
        lines.append(f"{model.name}: stage {model.stage}, precision {model.precision}, {parameters}")
    lines += [f"note: {note}" for note in outcome.notes]
    name_width = max((len(check.name) for check in outcome.checks), default=0) + 2
    lines += ["", *(_check_line(check, name_width) for check in outcome.checks), ""]
    lines += [*_held_lines([record for record in outcome.records if record.models]), ""]
    failed = [check.name for check in outcome.checks if check.status == FAILED]
    if outcome.has_passed:
        warned = f", with a warning about {', '.join(check.name for check in outcome.warnings)}"
        lines.append(f"The rehearsal has passed{warned if outcome.warnings else ''}.")
    else:
        why = f": {', '.join(failed)}" if failed else ""
        lines.append(f"The rehearsal has FAILED{why}.")
    lines.append("It says nothing about bandwidth, step time or overlap on a cluster.")
    return "\n".join(lines)


def _check_line(check: RehearsalCheck, name_width: int) -> str:
    head = f"{check.status:<12}{check.name:<{name_width}}"
    width = max(60, shutil.get_terminal_size((120, 24)).columns)
    return textwrap.fill(
        check.text, width, initial_indent=head, subsequent_indent=" " * len(head), break_on_hyphens=False
    )


def _describe_ranks(outcome: RehearsalOutcome) -> str:
    ranks = f"{outcome.ranks} ranks" if outcome.ranks > 1 else "1 rank"
    gpus = f"{outcome.gpus} GPUs" if outcome.gpus > 1 else "1 GPU"
    if not outcome.gpus:
        cores = os.cpu_count() or 1
        return f"{ranks} on the CPU" + (f" ({cores} cores: slow)" if cores < outcome.ranks else "")
    if outcome.gpus < outcome.ranks:
        return f"{ranks} share {gpus} (LOCAL_RANK is the rank modulo {outcome.gpus})"
    return f"{ranks}, one per GPU"


def _held_lines(records: list[RankRecord]) -> Iterator[str]:
    """Yield what each rank held after its last step; ranks with the same bytes share a line."""
    ranks_by_text: dict[str, list[RankRecord]] = {}
    for record in records:
        held = [item for model in record.models for item in model.held.items()]
        texts = [f"{key.removesuffix(', device')} {format_bytes(nbytes)}" for key, nbytes in held]
        texts.append(f"peak {format_bytes(sum(model.peak for model in record.models))}")
        ranks_by_text.setdefault(", ".join(texts), []).append(record)
    for text, same in ranks_by_text.items():
        gpu = max(record.allocated for record in same)
        allocated = f", allocated {format_bytes(gpu)}" if gpu else ""
        host = format_bytes(max(record.host for record in same))
        yield f"held on {name_ranks(record.rank for record in same)}: {text}{allocated}, host process {host}"
