"""Read options from the command line, a file and an earlier run; the command line has the highest priority."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import tyro

from zeroshard.train.options import AutoOption, ConfigurationName, TrainOptions

AUTO_OPTIONS: tuple[AutoOption, ...] = get_args(AutoOption)
EXPLICIT_FLAGS: dict[AutoOption, set[str]] = {  # option that --auto can choose → flags that set it explicitly
    "stage": {"stage", "configuration"},
    "offload": {"offload", "offload-fraction", "offload-parameters"},
    "recompute": {"recompute", "offload-activations", "configuration"},
    "micro-batch": {"micro-batch", "accumulate"},
}


def read_options(argv: Sequence[str]) -> TrainOptions:
    """Parse a command line into options; errors are printed and end the program with status 2.

    >>> read_options(["--stage", "2", "--micro-batch", "4"]).training.micro_batch
    4
    """
    layers = [(list(argv), "")]
    options = _merge_layers(layers)
    if options.run.config is not None:
        layers.insert(0, (_to_flags(_read_options_file(Path(options.run.config))), options.run.config))
        options = _merge_layers(layers)
    if options.run.resume:
        saved = _saved_options(options)
        if saved is not None:
            options = _merge_layers([(_to_flags(saved), "the run's config.json"), *layers])
    try:
        options.check()
    except ValueError as error:
        raise SystemExit(f"zeroshard train: {error}") from error
    planning_flags = [f"--{name}" for name in ("memory", "machine") if getattr(options.sharding, name) is not None]
    planning_flags += ["--allow-lossy"] if options.sharding.allow_lossy else []
    if planning_flags and not options.sharding.auto:
        raise SystemExit(f"zeroshard train: {' and '.join(planning_flags)} can only be used with --auto")
    return options


def _merge_layers(layers: Sequence[tuple[list[str], str]]) -> TrainOptions:
    """Merge options from several sources; a later one overrides an earlier one."""
    options = TrainOptions()
    for flags, source in layers:
        options = _apply_layer(options, flags, source)
    return options


def _apply_layer(base: TrainOptions, flags: Sequence[str], source: str) -> TrainOptions:
    """Apply the flags of one source to ``base``: its configuration overrides base, its other flags override both."""
    flags, auto_values = _split_auto_flags(flags)
    options = _parse(flags, _set_configuration(base, None), source)
    configuration = options.sharding.configuration
    if configuration is None:
        options = _set_configuration(options, base.sharding.configuration)
    else:
        options = _parse(flags, base.with_configuration(configuration), source)
    return options.with_auto(_auto_names(options.sharding.auto, auto_values, flags, source))


def _split_auto_flags(flags: Sequence[str]) -> tuple[list[str], set[AutoOption]]:
    """Split off flags with the value "auto" that the planner can choose; return the other flags and these names.

    >>> _split_auto_flags(["--stage", "auto", "--device", "auto"])
    (['--device', 'auto'], {'stage'})
    """
    other_flags: list[str] = []
    auto_names: set[AutoOption] = set()
    for flag in flags:
        is_separate = flag == "auto" and bool(other_flags)
        option = other_flags[-1] if is_separate else flag.removesuffix("=auto") if flag.endswith("=auto") else ""
        name = next((name for name in AUTO_OPTIONS if option.replace("_", "-") == f"--{name}"), None)
        if name is None:
            other_flags.append(flag)
            continue
        auto_names.add(name)
        if is_separate:
            other_flags.pop()
    return other_flags, auto_names


def _auto_names(
    auto_flag_values: tuple[AutoOption, ...], auto_values: set[AutoOption], flags: Sequence[str], source: str
) -> tuple[AutoOption, ...]:
    """Return the options left to the planner by one source; ``auto_flag_values`` are the names after --auto."""
    names = {flag[2:].partition("=")[0].replace("_", "-") for flag in flags if flag.startswith("--")}
    names |= {name.removeprefix("no-") for name in names}
    explicit = {name for name in AUTO_OPTIONS if names & EXPLICIT_FLAGS[name]}
    if "auto" in names and not auto_flag_values:
        auto_names = set(AUTO_OPTIONS) - explicit
    elif "auto" in names and explicit & set(auto_flag_values):
        both = " and ".join(sorted(explicit & set(auto_flag_values)))
        where = f" (options of {source})" if source else ""
        raise SystemExit(f"zeroshard train{where}: {both} is set explicitly and in --auto: omit one of them")
    else:
        auto_names = set(auto_flag_values) - explicit
    return tuple(name for name in AUTO_OPTIONS if name in auto_names | auto_values)


def _set_configuration(options: TrainOptions, configuration: ConfigurationName | None) -> TrainOptions:
    return replace(options, sharding=replace(options.sharding, configuration=configuration))


def _saved_options(options: TrainOptions) -> dict[str, Any] | None:
    """Return the options of the run to resume; None if it would be a new run."""
    from zeroshard.train.run_directory import RunDirectory, newest_run  # imports torch, which `--help` does not need

    path = Path(options.run.out) if options.run.out is not None else newest_run(Path("runs"))
    if path is None:
        raise SystemExit("zeroshard train: there is no run under runs/ to resume: pass its directory as --out")
    run = RunDirectory(path)
    return {**run.read_config(), "out": str(path)} if run.has_run() else None


def _read_options_file(path: Path) -> dict[str, Any]:
    """Read a TOML or JSON file of options."""
    try:
        text = path.read_text()
        values = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise SystemExit(f"zeroshard train: cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        kind = "JSON" if path.suffix == ".json" else "TOML"
        raise SystemExit(f"zeroshard train: {path} is not {kind}: {error}") from error
    if not isinstance(values, dict) or any(isinstance(value, dict) for value in values.values()):
        raise SystemExit(f"zeroshard train: {path} must be a flat table of options, such as `stage = 3`")
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


def _parse(flags: Sequence[str], default: TrainOptions, source: str = "") -> TrainOptions:
    prog = f"zeroshard train (options of {source})" if source else "zeroshard train"
    return tyro.cli(TrainOptions, args=list(flags), default=default, prog=prog, config=(tyro.conf.OmitArgPrefixes,))
