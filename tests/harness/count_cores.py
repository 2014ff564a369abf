"""Count the tests that are right on each core, by file: `python tests/harness/count_cores.py FILES --cases 3`.

Each file runs in a process of its own, once with each core; further arguments are pytest's. A test that fails because
the new core does not support something yet is refused, by the name of that. All others that fail are wrong. A file
that imports modules of the old core is internal.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import pytest

SECONDS = 600  # of a file
REFUSED = re.compile(r"(?:NotImplementedError: |Actual message: .)(?:the )?([\w. ]+).* is not (?:supported|known)")
OTHER = {"_zeroshard": "no attribute '_zeroshard'", "text": "Regex pattern did not match"}  # what only the old core has
INTERNAL = re.compile(r"(?:from|import) (zeroshard\.(?:engine|sharding|optim|memory|activations|float8|tensor_par)\w*)")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write how a test ended, so that it is known if a later one ends the process."""
    if report.when == "call" or report.outcome != "passed":
        text = report.longreprtext if report.failed else ""
        refused = REFUSED.search(text)
        others = [f"wrong: {what}" for what, words in OTHER.items() if words in text]
        failed = f"refused: {refused[1]}" if refused else (others or ["wrong"])[0]
        outcome = {"passed": "right", "failed": failed}.get(report.outcome, report.outcome)
        with open(os.environ["COUNT_CORES"], "a") as file:
            file.write(json.dumps([report.nodeid, outcome, text]) + "\n")


def outcomes(path: str, core: str, options: list[str]) -> dict[str, tuple[str, str]]:
    """Run a file on a core; return the outcome of each test, with the text of what is wrong."""
    with tempfile.NamedTemporaryFile() as file:
        own = str(Path(__file__).parent)
        paths = os.pathsep.join([os.environ.get("PYTHONPATH", own), own])
        env = {**os.environ, "ZEROSHARD_CORE": core, "COUNT_CORES": file.name, "PYTHONPATH": paths}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "count_cores", path, *options]
        try:
            code = subprocess.run(command, env=env, capture_output=True, text=True, timeout=SECONDS)
            end = {} if code.returncode in (0, 1, 5) else {path: ("wrong", code.stdout[-3000:])}
        except subprocess.TimeoutExpired:
            end = {path: ("wrong", f"the file took more than {SECONDS} s")}
        return {node: (outcome, text) for node, outcome, text in map(json.loads, file)} | end


def main(arguments: list[str]) -> None:
    """Print a line for each file and core, and then what is wrong."""
    files = [each for each in arguments if each.endswith(".py")]
    options = [each for each in arguments if each not in files]
    for path in files:
        internal = " ".join(sorted({f"internal {name}" for name in INTERNAL.findall(Path(path).read_text())}))
        for core in os.environ.get("CORES", "old new").split():  # CORES=new: only that one
            found = outcomes(path, core, options)
            counts = Counter(outcome for outcome, _ in found.values())
            print(path, core, dict(sorted(counts.items())), internal, flush=True)
            for node, (outcome, text) in found.items():
                if outcome.startswith("wrong"):
                    print(f"--- {outcome} {node}\n{text[-2500:]}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
