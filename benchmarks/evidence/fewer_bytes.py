"""Loss curves of stage 3, with 8-bit gathers, and with 8-bit reductions too, trained as in the section *curves*."""

from __future__ import annotations

import argparse

from benchmarks.evidence import FEWER_BYTES, curves

run = curves.run


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what can be chosen on the command line."""
    curves.add_options(parser, tuple(FEWER_BYTES))
