"""The command `zeroshard train`: read options from the command line, a file and an earlier run, and train.

The command line has the highest priority.
"""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import tyro

from zeroshard.train.options import PLANNED_OPTIONS, AutoOption, TrainingError, TrainOptions, describe_bug
from zeroshard.utils.command_line import print_error
from zeroshard.utils.lazy_import import uncollected_imports


def main(argv: Sequence[str]) -> int:
    """Run the command and return the exit status. An error is one line, whatever was passed."""
    try:
        options = read_options(argv)
        with nullcontext() if "torch" in sys.modules else uncollected_imports():
            from zeroshard.train import run_training  # imports torch, which `--help` does not need

        return run_training(options)
    except Exception as error:
        is_explained = isinstance(error, (TrainingError, ValueError, OSError, ImportError))
        print_error("train", error if is_explained else describe_bug(error))
        return 1


def _parse(flags: Sequence[str], source: str = "") -> dict[str, Any]:
    """Return the options that one source sets; tyro prints what is wrong with one, and ends the program."""
    where = f" (options of {source})" if source else ""
    parsed = tyro.cli(
        TrainOptions, args=list(flags), prog=f"zeroshard train{where}", config=(tyro.conf.OmitArgPrefixes,)
    )
    words = {flag[2:].partition("=")[0].replace("-", "_") for flag in flags if flag.startswith("--")}
    words |= {word.removeprefix("no_") for word in words}
    given = {name: value for name, value in parsed.to_flat_dict().items() if name in words}
    both = _explicit(given) & set(given.get("auto", ()))
    if both:
        raise ValueError(f"{' and '.join(sorted(both))} is set explicitly and in --auto{where}: omit one of them")
    return given


def _apply(options: TrainOptions, given: Mapping[str, Any]) -> TrainOptions:
    """Return a copy of the options with those of one source: its configuration first, then single options."""
    auto = set(given.get("auto", options.sharding.auto))
    if "auto" in given and not auto:
        auto = set(PLANNED_OPTIONS)
    auto -= _explicit(given)
    if given.get("configuration") is not None:
        options = options.with_configuration(given["configuration"])
    return options.with_values(given).with_auto(tuple(name for name in PLANNED_OPTIONS if name in auto))


def read_options(argv: Sequence[str]) -> TrainOptions:
    """Read the options of a command line, and of the file and the run that it names. Raise if they do not fit.

    >>> read_options(["--stage", "2", "--micro-batch", "4"]).training.micro_batch
    4
    """
    sources = [_parse(argv)]
    config = sources[0].get("config")
    if config is not None:
        sources.insert(0, _parse(_to_flags(_read_options_file(Path(config))), config))
    given = {name: value for source in sources for name, value in source.items()}
    if given.get("resume"):
        sources.insert(0, _parse(_to_flags(_saved_options(given.get("out"))), "the run's config.json"))
    options = TrainOptions()
    for source in sources:
        options = _apply(options, source)
    options.check()
    return options


def _explicit(values: Mapping[str, Any]) -> set[AutoOption]:
    """Return the options that --auto could choose and ``values`` set."""
    return {name for name, options in PLANNED_OPTIONS.items() if values.keys() & set(options.split())}


def _saved_options(out: str | None) -> dict[str, Any]:
    """Return the options of the run to resume, with its directory; empty if it would be a new run."""
    from zeroshard.train.run_directory import RunDirectory, newest_run  # imports torch, which `--help` does not need

    path = Path(out) if out is not None else newest_run(Path("runs"))
    if path is None:
        raise ValueError("there is no run under runs/ to resume: pass its directory as --out")
    run = RunDirectory(path)
    return {**run.read_config(), "out": str(path)} if run.has_run() else {}


def _read_options_file(path: Path) -> dict[str, Any]:
    """Read a TOML or JSON file of options."""
    is_json = path.suffix == ".json"
    try:
        text = path.read_text()
        values = json.loads(text) if is_json else tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not {'JSON' if is_json else 'TOML'}: {error}") from error
    if not isinstance(values, dict) or any(isinstance(value, dict) for value in values.values()):
        raise ValueError(f"{path} must be a flat table of options, such as `stage = 3`")
    return values


def _to_flags(values: Mapping[str, Any]) -> list[str]:
    """Return options as command-line flags."""
    flags: list[str] = []
    for name, value in values.items():
        flag = "--" + name.replace("_", "-")
        if name == "auto" and (value is False or value == []):
            continue  # none: a bare flag would mean all options
        if isinstance(value, bool):
            flags.append(flag if value else flag.replace("--", "--no-", 1))
        elif isinstance(value, (list, tuple)):
            flags += [flag, *map(str, value)]
        else:
            flags.append(f"{flag}={value}")  # also works for values that begin with a dash
    return flags
