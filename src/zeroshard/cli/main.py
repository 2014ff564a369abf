"""The command `zeroshard`: run the given subcommand. Torch is imported late, so `--help` is fast."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from zeroshard.utils.command_line import print_error
from zeroshard.utils.install_hint import install_hint

COMMANDS = {
    "plan": ("zeroshard.planner.commands.plan", "predict memory and time of training, and find the best settings"),
    "simulate": ("zeroshard.planner.commands.simulate", "predict how training scales to thousands of devices"),
    "train": (
        "zeroshard.train.commands.train",
        "train a language model with ZeRO; by default, a small one in a minute",
    ),
    "rehearse": ("zeroshard.rehearse.command", "run your training script with several real ranks here, and check them"),
    "generate": ("zeroshard.train.commands.generate", "generate text from a trained model"),
    "report": ("zeroshard.train.commands.report", "write the HTML report of a run again"),
    "export": ("zeroshard.checkpoint.commands.export", "export a checkpoint's weights in Hugging Face format"),
    "inspect": ("zeroshard.checkpoint.commands.inspect", "show the contents of a checkpoint, and verify it"),
    "migrate": ("zeroshard.integrations.deepspeed.migrate", "say what each key of a DeepSpeed configuration becomes"),
    "presets": ("zeroshard.train.commands.presets", "list the named models and configurations"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    >>> main(["--version"])  # doctest: +ELLIPSIS
    zeroshard 0...
    0
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = arguments[0] if arguments else "--help"
    if command in ("-h", "--help"):
        print(_overview())
        return 0
    if command == "--version":
        from zeroshard import __version__

        print(f"zeroshard {__version__}")
        return 0
    if command not in COMMANDS:
        matches = difflib.get_close_matches(command, COMMANDS, n=1)
        hint = f"did you mean {matches[0]!r}?" if matches else f"the commands are {', '.join(COMMANDS)}"
        print(f"zeroshard: unknown command {command!r}: {hint}", file=sys.stderr)
        return 2
    try:
        os.getcwd()
    except FileNotFoundError:
        print_error(command, "the current directory has been deleted: change to another one")
        return 2
    try:
        module = import_module(COMMANDS[command][0])
        status: int = module.main(arguments[1:])
        return status
    except KeyboardInterrupt:
        return 130
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("zeroshard"):
            raise
        print_error(command, f"it needs {error.name}: {install_hint('train')}")
        return 1
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        print_error(command, error)
        return 1


def _overview() -> str:
    lines = [f"  {name:<10}{text}" for name, (_, text) in COMMANDS.items()]
    hint = "`zeroshard COMMAND --help` shows the options of a command."
    return "\n".join(["usage: zeroshard COMMAND [OPTIONS]", "", *lines, "", hint])
