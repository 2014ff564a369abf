"""Measure the size of the sources, and keep `tests/budgets.toml`. Only with Python 3.11.

    python tests/harness/measure.py                   # what is measured, and the budgets that it exceeds
    python tests/harness/measure.py --write           # lower every budget to what is measured; raise none
    python tests/harness/measure.py --set NAME …      # take what is measured for these folders or rows, raising too

Later versions of Python split f-strings into tokens and inline comprehensions, so that their numbers are others.
"""

from __future__ import annotations

import argparse
import ast
import functools
import json
import os
import re
import subprocess
import sys
import tokenize
import tomllib
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "src" / "zeroshard"
BUDGETS = ROOT / "tests" / "budgets.toml"
HAS_PYTHON = sys.version_info[:2] == (3, 11)
CORE = ("engine", "sharding", "comm", "memory", "optim", "activations", "float8", "tensor_parallel", "api.py")
HEADER = """\
# What may only fall. tests/test_structure.py fails if more is measured (Python 3.11). A commit that lowers a number
# writes it here: python tests/harness/measure.py --write. Raising one (--set NAME) needs a commit that says why.
#
# src         by folder: tokens (without comments, docstrings and line ends), branches (of control flow, conditions and
#             comprehensions), names (distinct, of classes, functions, parameters and attributes), tuples (assignments
#             of several values in one line). tokens_a_statement is a ratio, so it is kept for the total alone:
#             deleting plain statements raises a folder's.
# repository  tokens of all Python files that git tracks, and of the other code: C, templates, style sheets.
# walk        what the fourth step of a small model in bf16 enters of the library's own code.
# round_trips between ranks, in the first ten steps of a loop and in the next ten: see tests/harness/round_trips.py.
# door        attributes of attributes of the core that other folders read: see names_used_from_outside().
"""

# A token or a comment, by the expressions of tokenize, which takes twice as long to find lines and positions too.
LEXEME = re.compile(
    tokenize.group(
        tokenize.Comment,
        tokenize.StringPrefix + tokenize.group("'''" + tokenize.Single3, '"""' + tokenize.Double3),
        tokenize.String,
        tokenize.Number,
        tokenize.Name,
        *(re.escape(operator) for operator in sorted(tokenize.EXACT_TOKEN_TYPES, reverse=True)),
    ),
    re.DOTALL,
)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
BRANCHES = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.IfExp, ast.comprehension)

Rows = dict[str, dict[str, float]]


def _num_docstrings(tree: ast.Module) -> int:
    documented = (ast.Module, ast.ClassDef, *FUNCTIONS)
    nodes = (node for node in ast.walk(tree) if isinstance(node, documented))
    return sum(ast.get_docstring(node, clean=False) is not None for node in nodes)


@functools.cache
def tokens_of(text: str) -> int:
    """Return the number of tokens that are neither comments, docstrings nor line ends.

    >>> tokens_of("x = 'a' # b")
    3
    """
    found = sum(not match.group().startswith("#") for match in LEXEME.finditer(text))
    return found - _num_docstrings(ast.parse(text))


class Size:
    """The size of some files."""

    def __init__(self) -> None:
        self.tokens = 0
        self.branches = 0
        self.tuples = 0
        self.statements = 0
        self.names: set[str] = set()

    def include(self, other: Size) -> None:
        self.tokens += other.tokens
        self.branches += other.branches
        self.tuples += other.tuples
        self.statements += other.statements
        self.names |= other.names

    def add(self, text: str) -> None:
        self.tokens += tokens_of(text)
        for node in ast.walk(ast.parse(text)):
            self._add_node(node)

    def _add_node(self, node: ast.AST) -> None:
        self.branches += isinstance(node, BRANCHES)
        self.statements += isinstance(node, ast.stmt)
        if isinstance(node, ast.BoolOp):
            self.branches += len(node.values) - 1
        elif isinstance(node, ast.comprehension):
            self.branches += len(node.ifs)
        elif isinstance(node, ast.Assign):
            self.tuples += isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple)
        self.names |= _defined(node)

    def row(self) -> dict[str, float]:
        return {
            "tokens": self.tokens,
            "branches": self.branches,
            "names": len(self.names),
            "tuples": self.tuples,
        }


def _defined(node: ast.AST) -> set[str]:
    """Return the name of a class, function, parameter or attribute that a node defines, if it does."""
    if isinstance(node, (ast.ClassDef, *FUNCTIONS)):
        return {node.name}
    if isinstance(node, ast.arg):
        return {node.arg}
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        return {node.attr}
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return {node.target.id}
    return set()


def _folder(path: Path) -> str:
    """Return the folder below src/zeroshard; a file there is its own."""
    return path.relative_to(SOURCES).parts[0]


def source_sizes() -> Rows:
    """Return the size of each folder of src."""
    sizes: dict[str, Size] = defaultdict(Size)
    for path in sorted(SOURCES.rglob("*.py")):
        sizes[_folder(path)].add(path.read_text())
    total = Size()
    for folder, size in sizes.items():
        if folder != "core":  # it stands beside the core that it replaces, and has a limit of its own
            total.include(size)
    sizes["total"] = total
    rows = {folder: size.row() for folder, size in sizes.items()}
    rows["total"]["tokens_a_statement"] = round(sizes["total"].tokens / sizes["total"].statements, 2)
    return rows


def repository_size() -> Rows:
    """Return the tokens of all files that git tracks or would track: of Python, and of the other code."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
    paths = [ROOT / name for name in names if (ROOT / name).exists()]
    others = (".c", ".css", ".j2", ".html", ".js")
    size = {
        "python": sum(tokens_of(path.read_text()) for path in paths if path.suffix == ".py"),
        "other": sum(len(re.findall(r"\w+|[^\w\s]", path.read_text())) for path in paths if path.suffix in others),
    }
    return {"tokens": size}


def names_used_from_outside() -> Rows:
    """Return how many names inside the core other folders know, as attributes of attributes.

    Of the distinct `….a.b` in their code: those where the core defines `a` and `b`, nobody else defines `b`, and
    neither is private.
    """
    inside: set[str] = set()
    outside: set[str] = set()
    chains: set[tuple[str, str]] = set()
    for path in sorted(SOURCES.rglob("*.py")):
        is_core = _folder(path) in CORE
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.ClassDef, ast.arg)):
                continue
            (inside if is_core else outside).update(_defined(node))
            if not is_core and isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute):
                chains.add((node.value.attr, node.attr))
    known = {(a, b) for a, b in chains if {a, b} <= inside and b not in outside}
    return {"core": {"names": sum(not a.startswith("_") and not b.startswith("_") for a, b in known)}}


# ------------------------------------------------------------------------------------------------- the walk


class Walk:
    """The functions, classes, files and calls of the library that this thread enters."""

    def __init__(self) -> None:
        import zeroshard

        self._home = os.path.dirname(os.path.abspath(zeroshard.__file__)) + os.sep
        self.functions: set[tuple[str, str]] = set()
        self.classes: set[str] = set()
        self.files: set[str] = set()
        self.calls = 0

    def __enter__(self) -> None:
        sys.setprofile(self._event)

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _event(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(self._home):
            return
        self.calls += 1
        self.files.add(code.co_filename)
        names = [name for name in code.co_qualname.split(".") if not name.startswith("<")]
        if names:
            self.functions.add((code.co_filename, ".".join(names)))
        if len(names) > 1 and names[0].lstrip("_")[:1].isupper():
            self.classes.add(names[0])


def walk(stage: int) -> dict[str, float]:
    """Return what the fourth step of one of four (fake) ranks enters."""
    import torch
    from torch import nn

    import zeroshard

    blocks = [nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(4)]
    model = nn.Sequential(nn.Embedding(64, 32), *blocks, nn.Linear(32, 64))
    adam = torch.optim.AdamW(model.parameters())
    model, optimizer = zeroshard.shard(model, adam, stage=stage, precision="bf16")
    for _ in range(4):
        step = Walk()
        with step:
            output = model(torch.arange(8))
        loss = output.float().sum()
        for event in (loss.backward, optimizer.step, optimizer.zero_grad):
            with step:
                event()
    return {
        "functions": len(step.functions),
        "classes": len(step.classes),
        "files": len(step.files),
        "calls": step.calls,
    }


def walks() -> Rows:
    """Return the walks of stages 1 and 3, from a process of their own: nothing in it is warm."""
    result = subprocess.run([sys.executable, __file__, "--walk"], check=True, capture_output=True, text=True)
    return json.loads(result.stdout.splitlines()[-1])


def _print_walks() -> None:
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    print(json.dumps({f"stage {stage}": walk(stage) for stage in (3, 1)}))


def round_trips() -> Rows:
    """Return the round trips between ranks in the first ten steps of some loops, and in the next ten."""
    from round_trips import all_round_trips

    return all_round_trips()


# ------------------------------------------------------------------------------------------------- budgets


MEASURES: dict[str, Callable[[], Rows]] = {
    "src": source_sizes,
    "repository": repository_size,
    "walk": walks,
    "door": names_used_from_outside,
    "round_trips": round_trips,
}


def budgets() -> dict[str, Rows]:
    return tomllib.loads(BUDGETS.read_text()) if BUDGETS.exists() else {}


def exceeded(found: dict[str, Rows]) -> list[str]:
    """Return one line for each number that is above its budget or has none, which says what to do."""
    known = budgets()
    lines = []
    for table, rows in found.items():
        for name, row in rows.items():
            budget = known.get(table, {}).get(name)
            if budget is None:
                lines.append(
                    f"{table} {name!r} has no budget in tests/budgets.toml: if it is new or was moved, write what is "
                    f"measured by `python tests/harness/measure.py --set {name!r}`, in a commit that says why"
                )
                continue
            for key, value in row.items():
                if value > budget[key]:
                    lines.append(
                        f"{table} {name!r} has {value} {key}, more than its budget of {budget[key]} in "
                        "tests/budgets.toml: delete something, or raise it in a commit that says why"
                    )
    return lines


def write(found: dict[str, Rows], taken: list[str]) -> None:
    """Lower all budgets to what is found, and take what is found for the rows of these names."""
    known = budgets()
    lines = [HEADER]
    for table in sorted({*found, *known}):
        lines.append(f"[{table}]")
        old, new = known.get(table, {}), found.get(table, known.get(table, {}))
        for name in sorted(new, key=lambda name: (name == "total", name)):
            row = dict(new[name])
            if name not in taken and name in old:
                row = {key: min(value, old[name].get(key, value)) for key, value in row.items()}
            elif name not in taken and old:
                continue  # it needs a decision
            values = ", ".join(f"{key} = {value}" for key, value in row.items())
            lines.append(f'"{name}" = {{ {values} }}')
        lines.append("")
    BUDGETS.write_text("\n".join(lines).rstrip() + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="lower the budgets to what is measured")
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME", help="take what is measured for these rows")
    parser.add_argument("--walk", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not HAS_PYTHON:
        sys.exit("measure with Python 3.11: later versions count other tokens and calls")
    if arguments.walk:
        _print_walks()
        return 0
    found = {table: measure() for table, measure in MEASURES.items()}
    if arguments.write or arguments.set:
        write(found, arguments.set)
    for table, rows in found.items():
        for name, row in rows.items():
            print(f"{table:12s} {name:16s}", ", ".join(f"{value} {key}" for key, value in row.items()))
    lines = exceeded(found)
    print(*lines, sep="\n")
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
