"""Read options from the command line, a file and an earlier run; the command line has the highest priority."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import tyro

from zeroshard.train.options import AutoOption, TrainOptions

AUTO_OPTIONS: tuple[AutoOption, ...] = get_args(AutoOption)
EXPLICIT_OPTIONS: dict[AutoOption, set[str]] = {  # option that --auto can choose → options that set it explicitly
    "stage": {"stage", "configuration"},
    "offload": {"offload", "offload_fraction", "offload_parameters"},
    "recompute": {"recompute", "offload_activations", "configuration"},
    "micro-batch": {"micro_batch", "accumulate"},
}


@dataclass
class _Source:
    """The options that one source sets: a file, an earlier run, or the command line."""

    values: dict[str, Any]
    auto: set[AutoOption] | None
    """What ``--auto`` leaves to the planner; None: ``--auto`` is not given."""
    auto_values: set[AutoOption]
    """What ``--stage auto`` and the like leave to it."""

    @classmethod
    def parse(cls, flags: Sequence[str], name: str = "") -> _Source:
        """Parse flags; tyro prints what is wrong with one, and ends the program with status 2."""
        program = f"zeroshard train (options of {name})" if name else "zeroshard train"
        flags, auto_values = _split_auto_flags(flags)
        parsed = tyro.cli(TrainOptions, args=flags, prog=program, config=(tyro.conf.OmitArgPrefixes,))
        words = {flag[2:].partition("=")[0].replace("-", "_") for flag in flags if flag.startswith("--")}
        given = words | {word.removeprefix("no_") for word in words}
        values = {option: value for option, value in parsed.to_flat_dict().items() if option in given}
        if "auto" not in values:
            return cls(values, None, auto_values)
        explicit, names = _explicit(values), set(values.pop("auto"))
        if explicit & names:
            both = " and ".join(sorted(explicit & names))
            raise ValueError(f"{both} is set explicitly and in --auto{f' ({name})' if name else ''}: omit one of them")
        return cls(values, names or set(AUTO_OPTIONS) - explicit, auto_values)

    def apply(self, options: TrainOptions) -> TrainOptions:
        """Return a copy of ``options`` with those of this source: its configuration first, then single options."""
        auto = set(options.sharding.auto) - _explicit(self.values) if self.auto is None else self.auto
        configuration = self.values.get("configuration")
        if configuration is not None:
            options = options.with_configuration(configuration)
        names = auto | self.auto_values
        return options.with_values(self.values).with_auto(tuple(name for name in AUTO_OPTIONS if name in names))


def read_options(argv: Sequence[str]) -> TrainOptions:
    """Read the options of a command line, and of the file and the run that it names. Raise if they do not fit.

    >>> read_options(["--stage", "2", "--micro-batch", "4"]).training.micro_batch
    4
    """
    sources = [_Source.parse(argv)]
    config = sources[0].values.get("config")
    if config is not None:
        sources.insert(0, _Source.parse(_to_flags(_read_options_file(Path(config))), config))
    given = {name: value for source in sources for name, value in source.values.items()}
    if given.get("resume"):
        saved = _saved_options(given.get("out"))
        if saved:
            sources.insert(0, _Source.parse(_to_flags(saved), "the run's config.json"))
    options = TrainOptions()
    for source in sources:
        options = source.apply(options)
    options.check()
    return options


def _explicit(values: Mapping[str, Any]) -> set[AutoOption]:
    """Return the options that --auto could choose and ``values`` set."""
    return {name for name in AUTO_OPTIONS if values.keys() & EXPLICIT_OPTIONS[name]}


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
