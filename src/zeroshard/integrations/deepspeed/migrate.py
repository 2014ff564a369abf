"""The command `zeroshard migrate`: say what each key of a DeepSpeed configuration becomes. It does not import torch."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from zeroshard.integrations.deepspeed.reader import (
    NO_COUNTERPART,
    NOT_NEEDED,
    OPTION,
    SCRIPT,
    UNKNOWN,
    MigratedKey,
    find_unhandled,
    merge_options,
    read_deepspeed,
)
from zeroshard.utils.command_line import CommandParser, make_echo, print_error

TITLES = {
    OPTION: "becomes an option of zeroshard",
    SCRIPT: "to write in the script",
    NOT_NEEDED: "not needed, or off (the page From DeepSpeed says why)",
    NO_COUNTERPART: "without a counterpart",
    UNKNOWN: "unknown",
}
WIDTH = 100  # columns


def main(argv: Sequence[str]) -> int:
    """Run the command and return the exit status: 1 if a key that changes the numbers has no counterpart."""
    options = _parser().parse_args(argv)
    try:
        keys = read_deepspeed(options.config)
    except (OSError, ValueError) as error:
        print_error("migrate", error)
        return 2
    is_lost = any(key.kind in (NO_COUNTERPART, UNKNOWN) for key in keys)
    if options.json:
        rows = [{name: getattr(key, name) for name in FIELDS} for key in keys]
        text = json.dumps({"options": merge_options(keys), "keys": rows, "can_be_migrated": not is_lost}, indent=2)
    else:
        text = render_text(keys, options.config)
    make_echo(sys.stdout)(text)
    return 1 if is_lost else 0


FIELDS = ("key", "value", "kind", "text", "changes_numbers")


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="zeroshard migrate",
        description="Say what each key of a DeepSpeed configuration becomes with zeroshard. Exit status 1 if a key "
        "that changes the numbers of a run has no counterpart.",
    )
    parser.add_argument("config", type=Path, metavar="DS_CONFIG", help="a DeepSpeed configuration, in JSON")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def render_text(keys: Sequence[MigratedKey], source: Path) -> str:
    """Return all keys by what they become, and the calls that take the place of deepspeed.initialize."""
    lines: list[str] = []
    for kind, title in TITLES.items():
        found = [key for key in keys if key.kind == kind]
        if found:
            lines += [f"{title}:", *(line for key in found for line in _render_key(key)), ""]
    return "\n".join([*lines, "in the script:", "", *(f"    {line}" for line in script_lines(keys, source))])


def _render_key(key: MigratedKey) -> list[str]:
    head = f"  {key.key} = {textwrap.shorten(json.dumps(key.value), 50)}"
    indent = " " * 6
    return [head, *textwrap.wrap(key.text, WIDTH, initial_indent=indent, subsequent_indent=indent)]


def script_lines(keys: Sequence[MigratedKey], source: Path) -> list[str]:
    """Return the calls that take the place of deepspeed.initialize."""
    needed = [key.needs for key in keys if key.needs]
    handled = [key.key for key in find_unhandled(keys, given=needed) if key.kind == SCRIPT]  # others stay an error
    arguments = [f'"{source}"', *(f"{name}=..." for name in needed), *([f"handled={handled}"] if handled else [])]
    return [
        f"config = zeroshard.Config.from_deepspeed({', '.join(arguments)})",
        "model, optimizer = zeroshard.shard(model, optimizer, config=config)",
    ]
