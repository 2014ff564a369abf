"""Flags: options from the command line, a file and an earlier run, one over the other."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import tyro

from zeroshard.train.options import AutoOption, ConfigurationName, TrainOptions
from zeroshard.train.run_directory import RunDirectory, newest_run

AUTO_OPTIONS: tuple[AutoOption, ...] = get_args(AutoOption)
EXPLICIT_FLAGS: dict[AutoOption, set[str]] = {  # what --auto can choose → flags that say it already
    "stage": {"stage", "configuration"},
    "offload": {"offload", "offload-fraction", "offload-parameters"},
    "recompute": {"recompute", "offload-activations", "configuration"},
    "micro-batch": {"micro-batch", "accumulate"},
}


def read_options(argv: Sequence[str]) -> TrainOptions:
    """Turn a command line into options; what is wrong with it is printed, and ends the program with status 2.

    >>> read_options(["--stage", "2", "--micro-batch", "4"]).training.micro_batch
    4
    """
    layers = [(list(argv), "")]
    options = _merge_layers(layers)
    if options.run.config is not None:
        layers.insert(0, (_to_flags(read_options_file(Path(options.run.config))), options.run.config))
        options = _merge_layers(layers)
    if options.run.resume:
        saved = saved_options(options)
        if saved is not None:
            options = _merge_layers([(_to_flags(saved), "the run's config.json"), *layers])
    _check_planning_flags(options)
    return options


def _check_planning_flags(options: TrainOptions) -> None:
    """Refuse what only a plan would look at where there is none."""
    sharding = options.sharding
    idle = [f"--{name}" for name in ("memory", "machine") if getattr(sharding, name) is not None]
    if idle and not sharding.auto:
        verb, them = ("is", "it") if len(idle) == 1 else ("are", "them")
        raise SystemExit(
            f"zeroshard train: {' and '.join(idle)} {verb} for planning, and nothing is left to a plan: add --auto, or "
            f"leave {them} out"
        )


def _merge_layers(layers: Sequence[tuple[list[str], str]]) -> TrainOptions:
    """Options from several sources, a later one over an earlier one."""
    options = TrainOptions()
    for flags, source in layers:
        options = _apply_layer(options, flags, source)
    return options


def _apply_layer(base: TrainOptions, flags: Sequence[str], source: str) -> TrainOptions:
    """Options from one source over those below it: its configuration over theirs, its other flags over both."""
    flags, wanted = _split_auto_flags(flags)
    options = _parse(flags, _set_configuration(base, None), source)
    chosen = options.sharding.configuration
    if chosen is None:
        options = _set_configuration(options, base.sharding.configuration)
    else:
        options = _parse(flags, base.with_configuration(chosen), source)
    return options.with_auto(_auto_names(options.sharding.auto, wanted, flags, source))


def _split_auto_flags(flags: Sequence[str]) -> tuple[list[str], set[AutoOption]]:
    """Flags without those that say "auto" of what a plan can choose, and what these are.

    >>> _split_auto_flags(["--stage", "auto", "--device", "auto"])
    (['--device', 'auto'], {'stage'})
    """
    rest: list[str] = []
    found: set[AutoOption] = set()
    for flag in flags:
        last = rest[-1] if rest and flag == "auto" else flag.removesuffix("=auto") if flag.endswith("=auto") else ""
        name = next((name for name in AUTO_OPTIONS if last.replace("_", "-") == f"--{name}"), None)
        if name is None:
            rest.append(flag)
            continue
        found.add(name)
        if flag == "auto":
            rest.pop()
    return rest, found


def _auto_names(
    auto_flag_values: tuple[AutoOption, ...], auto_values: set[AutoOption], flags: Sequence[str], source: str
) -> tuple[AutoOption, ...]:
    """What is left to a plan, once the flags of one source have been read; ``listed`` are the names after --auto."""
    names = {flag[2:].partition("=")[0].replace("_", "-") for flag in flags if flag.startswith("--")}
    names |= {name.removeprefix("no-") for name in names}
    settled = {name for name in AUTO_OPTIONS if names & EXPLICIT_FLAGS[name]}
    if "auto" in names and not auto_flag_values:
        found = set(AUTO_OPTIONS) - settled
    elif "auto" in names and settled & set(auto_flag_values):
        both = " and ".join(sorted(settled & set(auto_flag_values)))
        where = f" (options of {source})" if source else ""
        raise SystemExit(f"zeroshard train{where}: {both} is given, and left to --auto: leave one of them out")
    else:
        found = set(auto_flag_values) - settled
    return tuple(name for name in AUTO_OPTIONS if name in found | auto_values)


def _set_configuration(options: TrainOptions, configuration: ConfigurationName | None) -> TrainOptions:
    return replace(options, sharding=replace(options.sharding, configuration=configuration))


def saved_options(options: TrainOptions) -> dict[str, Any] | None:
    """The options of the run that is to be resumed; None where it would be a new one."""
    path = Path(options.run.out) if options.run.out is not None else newest_run(Path("runs"))
    if path is None:
        raise SystemExit("zeroshard train: there is no run under runs/ to resume: give its directory with --out")
    run = RunDirectory(path)
    return {**run.read_config(), "out": str(path)} if run.has_run() else None


def read_options_file(path: Path) -> dict[str, Any]:
    """Read a TOML or JSON file of options."""
    try:
        text = path.read_text()
        values = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise SystemExit(f"zeroshard train: cannot read the options in {path}: {error.strerror}") from error
    except ValueError as error:
        kind = "JSON" if path.suffix == ".json" else "TOML"
        raise SystemExit(f"zeroshard train: {path} is not {kind}: {error}") from error
    if not isinstance(values, dict) or any(isinstance(value, dict) for value in values.values()):
        raise SystemExit(f"zeroshard train: {path} is not a plain table of options: write them as `stage = 3`")
    return values


def _to_flags(values: Mapping[str, Any]) -> list[str]:
    """Write options as the command line has them."""
    flags: list[str] = []
    for name, value in values.items():
        flag = "--" + name.replace("_", "-")
        if name == "auto" and (value is False or value == []):
            continue  # nothing: a lone flag would be everything
        if isinstance(value, bool):
            flags.append(flag if value else flag.replace("--", "--no-", 1))
        elif isinstance(value, (list, tuple)):
            flags += [flag, *map(str, value)]
        else:
            flags.append(f"{flag}={value}")  # also where the value begins with a dash
    return flags


def _parse(flags: Sequence[str], default: TrainOptions, source: str = "") -> TrainOptions:
    prog = f"zeroshard train (options of {source})" if source else "zeroshard train"
    return tyro.cli(TrainOptions, args=list(flags), default=default, prog=prog, config=(tyro.conf.OmitArgPrefixes,))
