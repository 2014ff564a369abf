"""The command `zeroshard presets`: list the named models and ZeRO configurations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import tyro

from zeroshard.models import CONFIGURATIONS, PRESETS
from zeroshard.utils.format import format_count


@dataclass(frozen=True)
class PresetsOptions:
    """List the models for `zeroshard train --model NAME`, with those of the ZeRO paper (tables 5 and 10), and the
    paper's configurations (table 3) for `--configuration NAME`."""


def main(argv: Sequence[str]) -> int:
    """Run the command and return the exit status."""
    tyro.cli(PresetsOptions, args=list(argv), prog="zeroshard presets")
    print(f"{'name':<14}{'parameters':>12}{'layers':>8}{'heads':>7}{'width':>7}{'context':>9}{'vocabulary':>12}")
    for name, preset in PRESETS.items():
        shape = f"{preset.layers:>8}{preset.heads:>7}{preset.width:>7}{preset.context:>9}{preset.vocabulary:>12}"
        print(f"{name:<14}{format_count(preset.parameters):>12}{shape}")
    print(f"\n{'configuration':<16}{'in the paper':<19}{'stage':<7}activation checkpoints")
    for name, configuration in CONFIGURATIONS.items():
        checkpoints = "partitioned over tensor-parallel ranks" if configuration.partition_activations else "replicated"
        location = ", in host memory" if configuration.offload_activations else ""
        print(f"{name:<16}{configuration.notation:<19}{configuration.stage:<7}{checkpoints}{location}")
    return 0
