"""The command `zeroshard presets`: the models that have a name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import tyro

from zeroshard.presets import PRESETS


@dataclass(frozen=True)
class CatalogueOptions:
    """List the models that `zeroshard train --model NAME` knows; the paper's are Table 5's and Table 10's."""


def main(argv: Sequence[str]) -> int:
    """Run it and return the exit status."""
    tyro.cli(CatalogueOptions, args=list(argv), prog="zeroshard presets")
    print(f"{'name':<14}{'parameters':>12}{'layers':>8}{'heads':>7}{'width':>7}{'context':>9}{'vocabulary':>12}")
    for name, preset in PRESETS.items():
        count = f"{preset.parameters / 1e9:.2f}B" if preset.parameters >= 1e9 else f"{preset.parameters / 1e6:.1f}M"
        shape = f"{preset.layers:>8}{preset.heads:>7}{preset.width:>7}{preset.context:>9}{preset.vocabulary:>12}"
        print(f"{name:<14}{count:>12}{shape}")
    return 0
