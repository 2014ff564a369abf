"""The evidence that an expert asks for, section by section. Each section writes a record; report.py builds the page.

    python -m benchmarks evidence                              # measure all, on one GPU: about half an hour
    python -m benchmarks evidence --sections curves kills      # some
    python -m benchmarks evidence --tiny --device cpu          # a trial run, in minutes

Sections are run one after another, each by a command of its own, which its record shows. Records are written to
`benchmarks/results/evidence/`, those of a trial run only with `--out`. The section *predictions* is not run by default:
its record was committed before what it predicts was measured here.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from benchmarks.harness.record import ROOT
from benchmarks.harness.trials import make_parser

SECTIONS = ("curves", "fewer_bytes", "titan", "predictions", "kills", "endurance")
MEASURED = tuple(name for name in SECTIONS if name != "predictions")
RESULTS = Path("benchmarks/results/evidence")
BASE, CONTROL = "DDP", "DDP, learning rate 1 % higher"  # curves: with which all are compared, and what must differ
FEWER_BYTES: dict[str, dict[str, str]] = {  # options of stage 3 whose curves are compared with the first one's
    "full precision": {},
    "gathers in int8": {"gather_dtype": "int8"},
    "gathers in fp8": {"gather_dtype": "fp8"},
    "gathers and reductions in int8": {"gather_dtype": "int8", "reduce_wire": "int8"},
    "gathers and reductions in fp8": {"gather_dtype": "fp8", "reduce_wire": "fp8"},
    "full precision, learning rate 1 % higher": {},
}
COUNTED = {  # endurance: what is counted, and its name
    "allocated": "device MB",
    "reserved": "reserved MB",
    "resident": "host MB",
    "threads": "threads",
    "files": "open files",
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run sections."""
    arguments = list(sys.argv[2:] if argv is None else argv)
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--sections", nargs="+", choices=SECTIONS, default=MEASURED)
    chosen, rest = first.parse_known_args(arguments)
    if len(chosen.sections) == 1:
        _run_section(chosen.sections[0], rest)
        return
    if "-h" in rest or "--help" in rest:
        print(f"{__doc__}\nOptions of a section: --sections SECTION --help. Sections: {', '.join(SECTIONS)}")
        return
    if any(argument.partition("=")[0] == "--out" for argument in rest):
        raise SystemExit("--out is the record of one section: name it by --sections SECTION")
    command = [sys.executable, "-m", "benchmarks", "evidence", *rest]
    failed = [name for name in chosen.sections if subprocess.run([*command, "--sections", name], cwd=ROOT).returncode]
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


def _run_section(name: str, rest: Sequence[str]) -> None:
    section = import_module(f"benchmarks.evidence.{name}")
    parser = make_parser(section.__doc__, timeout=900.0)
    parser.set_defaults(budget=1500.0)
    parser.add_argument("--jobs", type=int, help="how much runs at the same time (default: what the section needs)")
    section.add_options(parser)
    chosen = parser.parse_args(rest)
    if chosen.out is None and not chosen.tiny:
        (ROOT / RESULTS).mkdir(parents=True, exist_ok=True)
        chosen.out = ROOT / RESULTS / f"{name}.json"
    section.run(chosen)
