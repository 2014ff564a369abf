"""The command `zeroshard migrate`: say what each key of a DeepSpeed configuration becomes. It does not import torch."""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zeroshard.cli.common import make_echo, print_error
from zeroshard.config.deepspeed import (
    NO_COUNTERPART,
    NOT_NEEDED,
    OPTION,
    SCRIPT,
    UNKNOWN,
    MigratedKey,
    Migration,
    read_deepspeed,
)

TITLES = {
    OPTION: "becomes an option of zeroshard",
    SCRIPT: "to write in the script",
    NOT_NEEDED: "not needed",
    NO_COUNTERPART: "without a counterpart",
    UNKNOWN: "unknown",
}
WIDTH = 100  # columns


def main(argv: Sequence[str]) -> int:
    """Run the command and return the exit status: 1 if a key that changes the numbers has no counterpart."""
    options = _parser().parse_args(argv)
    try:
        migration = read_deepspeed(options.config)
        merged = migration.options
    except (OSError, ValueError) as error:
        print_error("migrate", error)
        return 2
    lost = [key for key in migration.keys if key.kind in (NO_COUNTERPART, UNKNOWN) and key.changes_numbers]
    if options.json:
        keys = [{name: getattr(key, name) for name in FIELDS} for key in migration.keys]
        text = json.dumps({"options": merged, "keys": keys, "can_be_migrated": not lost}, indent=2)
    else:
        text = render_text(migration, options.config)
    make_echo(sys.stdout)(text)
    return 1 if lost else 0


FIELDS = ("key", "value", "kind", "text", "changes_numbers")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="zeroshard migrate",
        description="Say what each key of a DeepSpeed configuration becomes with zeroshard. Exit status 1 if a key "
        "that changes the numbers of a run has no counterpart.",
    )
    parser.add_argument("config", type=Path, metavar="DS_CONFIG", help="a DeepSpeed configuration, in JSON")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def render_text(migration: Migration, source: Path) -> str:
    """Return all keys by what they become, and the lines of a script."""
    lines: list[str] = []
    for kind, title in TITLES.items():
        keys = [key for key in migration.keys if key.kind == kind]
        if keys:
            lines += [f"{title}:", *(line for key in keys for line in _render_key(key)), ""]
    lines += ["in the script:", "", *(f"    {line}".rstrip() for line in script_lines(migration, source))]
    return "\n".join(lines)


def _render_key(key: MigratedKey) -> list[str]:
    value = json.dumps(key.value)
    head = f"  {key.key} = {value if len(value) < 50 else value[:46] + ' ...'}"
    marks = {NO_COUNTERPART: "CHANGES THE NUMBERS. ", UNKNOWN: "MAY CHANGE THE NUMBERS. "}
    mark = marks.get(key.kind, "") if key.changes_numbers else ""
    return [head, *textwrap.wrap(mark + key.text, WIDTH, initial_indent="      ", subsequent_indent="      ")]


def script_lines(migration: Migration, source: Path) -> list[str]:
    """Return the lines that take the place of deepspeed.initialize and of the engine's calls."""
    keys = migration.keys
    needed = {key.needs: "..." for key in keys if key.needs}
    options = {name: _source(name, value) for name, value in {**migration.options, **needed}.items()}
    handled = [key.key for key in migration.unhandled(given=needed) if key.kind == SCRIPT]  # others stay an error
    arguments = [*(f"{name}=..." for name in needed), *([f"handled={handled}"] if handled else [])]
    loss = "loss"
    for key in sorted(keys, key=lambda key: key.loss.startswith("optimizer")):  # the loss scale comes last
        loss = key.loss.format(loss)
    return [
        *(line for key in keys for line in key.before_shard.splitlines()),
        *_call(
            "model, optimizer = zeroshard.shard(", ["model", "optimizer", *(f"{n}={v}" for n, v in options.items())]
        ),
        "# or, from the same file: zeroshard.shard(model, optimizer, config=config), with",
        *_call("config = zeroshard.Config.from_deepspeed(", [f'"{source}"', *arguments]),
        *(line for key in keys for line in key.after_shard.splitlines()),
        "",
        "# in the loop, instead of engine.backward(loss) and engine.step()",
        f"{f'({loss})' if '/' in loss and not loss.startswith('optimizer') else loss}.backward()",
        *(key.in_loop for key in keys if key.in_loop),
        "optimizer.step()",
        *("scheduler.step()" for key in keys if key.key == "scheduler"),
        "optimizer.zero_grad()",
    ]


def _call(start: str, arguments: Sequence[str]) -> list[str]:
    """Return a call in one line, or one line per argument."""
    line = f"{start}{', '.join(arguments)})"
    return [line] if len(line) <= WIDTH else [start, *(f"    {argument}," for argument in arguments), ")"]


def _source(name: str, value: Any) -> str:
    if name == "offload" and isinstance(value, dict):
        return f"zeroshard.Offload({', '.join(f'{option}={_source(option, part)}' for option, part in value.items())})"
    return value if value == "..." else json.dumps(value) if isinstance(value, str) else repr(value)
