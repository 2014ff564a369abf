"""The planner's predictions for the tables and figures of the ZeRO paper. No GPU is needed.

    python -m benchmarks paper_predicted

[Note: simulating the paper's runs]
Table 1, Table 2 and Figure 1 follow from what is partitioned (``placement.py``). The other figures come from the
planner, as for any user: the GPTs of the paper's tables in fp16 with sequences of 1024 tokens and every block
recomputed. ZeRO is stage 2 with P_a (configuration C4; 170B is C5, the only one in which it fits). The baseline is
stage 0; that of Figure 2 reduces gradients after backward, as Megatron-LM's own data parallelism did, and that of
Figure 4 inside it, as DDP does. The machine is "dgx2" with its published rates. Only :data:`PAPER_CURVE` is fitted,
once for all figures: it gives the fraction of the peak that a matmul reached with the software of 2019. It is chosen
from a grid for the least mean error over the 33 bars of Figures 2, 3 and 4. So the errors of these figures are those of
a fit of two numbers; for Figures 6 and 7 nothing is fitted. The second number of the curve is large, about one
millisecond lost per matmul, and covers more than matmuls: inter-node links at a quarter of their published rate, with a
default curve, match the bars equally well. The bars cannot separate the two.

TFLOPS are computed from shapes, as was common then: 96·B·s·l·h²·(1 + s/6h + V/16lh) FLOPs per step for B sequences of
s tokens, l layers of width h and a vocabulary of V. Recomputation and the masked half of attention count, because both
were computed.

In all runs the logits and their loss are sharded over the tensor axis, as in Megatron-LM.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from decimal import ROUND_DOWN, ROUND_HALF_UP, Decimal
from functools import cache, partial
from pathlib import Path
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.harness.record import Record
from benchmarks.paper.printed import (
    FIGURE_1,
    FIGURE_2,
    FIGURE_3,
    FIGURE_4,
    FIGURE_6,
    FIGURE_7,
    TABLE_1,
    TABLE_2,
    PaperModelFit,
    PaperRun,
)
from zeroshard.models import CONFIGURATIONS, GPT, GPTConfig
from zeroshard.planner.machines.machine import EfficiencyCurve, Machine
from zeroshard.planner.scaling import find_deepest_member, gpt_family
from zeroshard.planner.step_time import StepTime
from zeroshard.planner.strategy import Strategy
from zeroshard.planner.traced_model import TracedModel, TrainingLoop
from zeroshard.planner.tracing.trace_model import CheckpointMode
from zeroshard.sharding import Placement

PAPER_CURVE: Final = EfficiencyCurve(share=0.34, half=4e10)  # least mean error over Figures 2, 3 and 4 together
NUM_GPUS, TENSOR_DEGREE, GPU_MEMORY = 400, 16, "32GB"  # of Figures 6 and 7
SEQUENCE_TOKENS, VOCAB_SIZE = 1024, 50304
STATE_BYTES_PER_PARAM = {"parameters": 2, "gradients": 2, "optimizer": 12}  # fp16 with Adam


@dataclass(frozen=True)
class PaperCell:
    """One number of the paper and zeroshard's prediction of it."""

    row: str
    column: str
    paper: str | float
    ours: str | float

    @property
    def error(self) -> float | None:
        """Relative error of the prediction; None if the two are compared as text."""
        if isinstance(self.paper, str) or isinstance(self.ours, str):
            return None
        return self.ours / self.paper - 1


@dataclass(frozen=True)
class PaperResult:
    """A table or figure of the paper."""

    name: str
    about: str
    cells: tuple[PaperCell, ...]

    @property
    def num_exact(self) -> int:
        """The number of cells that equal the printed text."""
        return sum(cell.paper == cell.ours for cell in self.cells)

    @property
    def mean_error(self) -> float | None:
        """Mean absolute relative error; None for a table that is compared as text."""
        return mean_error(self.cells)


def mean_error(cells: Sequence[PaperCell]) -> float | None:
    """Return the mean absolute relative error; None if no cell has one."""
    errors = [abs(cell.error) for cell in cells if cell.error is not None]
    return sum(errors) / len(errors) if errors else None


def paper_results() -> Iterator[PaperResult]:
    """Yield all tables and figures, each as soon as it is computed."""
    for compute in (figure_1, table_1, table_2, figure_2, figure_3, figure_4, figure_6, figure_7):
        yield compute()


# --------------------------------------------------------------------------------------- model states, compared as text


def bytes_per_parameter(stage: int, devices: int) -> Decimal:
    """Return the bytes of model states per parameter on each of ``devices`` devices.

    >>> bytes_per_parameter(2, 64)  # 2Ψ + 14Ψ/64
    Decimal('2.21875')
    """
    placement = Placement.from_stage(stage, devices)
    partitioned = {kind: getattr(placement, kind) for kind in STATE_BYTES_PER_PARAM}
    return sum(
        (Decimal(n) / (devices if partitioned[kind] else 1) for kind, n in STATE_BYTES_PER_PARAM.items()), Decimal(0)
    )


def figure_1() -> PaperResult:
    """Compute the memory of model states by stage."""
    names = {0: "baseline", 1: "P_os", 2: "P_os+g", 3: "P_os+g+p"}
    cells = [
        PaperCell(
            "7.5B on 64",
            names[stage],
            printed,
            _format_decimal(Decimal("7.5") * bytes_per_parameter(stage, 64), 1, half_up=True),
        )
        for stage, printed in FIGURE_1.items()
    ]
    return PaperResult("Figure 1", "GB of model states a device", tuple(cells))


def table_1() -> PaperResult:
    """Compute the memory of model states by model, devices and stage.

    The text follows the paper: the 7.5B column is rounded to about three digits; the others are truncated, to whole
    numbers from 100 up.
    """
    cells = []
    for billions, rows in TABLE_1.items():
        for devices, printed in rows.items():
            for stage, text in enumerate(printed, 1):
                gigabytes = Decimal(str(billions)) * bytes_per_parameter(stage, devices)
                if billions < 100:
                    predicted = _format_decimal(gigabytes, 1 if gigabytes >= 10 else 2, half_up=True)
                else:
                    predicted = _format_decimal(gigabytes, 0 if gigabytes >= 100 else 1)
                cells.append(
                    PaperCell(f"{_format_model_size(billions)}, N_d {devices}", f"stage {stage}", text, predicted)
                )
    return PaperResult("Table 1", "GB of model states a device", tuple(cells))


def table_2() -> PaperResult:
    """Compute the largest model in 32 GB on 64 data-parallel devices.

    The text follows the paper: the value without model parallelism, truncated to one decimal, times the model-parallel
    degree.
    """
    cells = []
    for tensor, printed in TABLE_2.items():
        for stage, text in enumerate(printed):
            without_tensor = (32 / bytes_per_parameter(stage, 64)).quantize(Decimal("0.1"), ROUND_DOWN)
            cells.append(
                PaperCell(
                    f"MP {tensor}, {64 * tensor} GPUs",
                    f"stage {stage}",
                    text,
                    _format_model_size(without_tensor * tensor),
                )
            )
    return PaperResult("Table 2", "the largest model in 32 GB, by states alone", tuple(cells))


def _format_decimal(value: Decimal, places: int, half_up: bool = False) -> str:
    rounded = value.quantize(Decimal(1).scaleb(-places), ROUND_HALF_UP if half_up else ROUND_DOWN)
    return f"{rounded:f}".rstrip("0").rstrip(".") if places else f"{rounded:f}"


def _format_model_size(billions: Decimal | float) -> str:
    exact = Decimal(str(billions))
    return f"{_format_decimal(exact / 1000, 1)}T" if exact >= 500 else f"{_format_decimal(exact, 1)}B"


# ------------------------------------------------------------------------------------------- predictions of the planner


class VocabParallelGPT(GPT):
    """The reference GPT with logits that stay sharded over the tensor axis, as on one rank of Megatron-LM."""

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return the loss over this rank's shard of the vocabulary, or the logits without ``targets``."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.head.weight)  # not self.head(): its hooks would all-gather the logits
        return logits if targets is None else F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def paper_machine() -> Machine:
    """Return the machine of the paper: published rates and the fitted curve."""
    return Machine.resolve("dgx2", efficiency=PAPER_CURVE)


def paper_step_time(run: PaperRun, machine: Machine | None = None) -> StepTime:
    """Predict the step time of one of the paper's runs with the planner, on the paper's machine or another."""
    is_zero = run.system == "ZeRO"
    checkpoint: CheckpointMode = "host" if is_zero and run.label == "170B" else "recompute"
    strategy = Strategy(stage=2 if is_zero else 0, tensor=run.tensor, checkpoint=checkpoint, micro_batch=run.batch)
    is_megatron = not is_zero and run.tensor > 1
    model = _paper_model(run.width, run.heads, True, backwards=0 if is_megatron else None).with_layers(run.layers)
    return model.step_time(strategy, run.gpus, machine or paper_machine())


def paper_flops(run: PaperRun) -> float:
    """Return the FLOPs per step and GPU as the paper counts them: see [Note: simulating the paper's runs]."""
    s, h, layers = SEQUENCE_TOKENS, run.width, run.layers
    return 96.0 * run.batch * s * layers * h * h * (1 + s / (6 * h) + VOCAB_SIZE / (16 * layers * h)) / run.tensor


@cache
def _paper_model(width: int, heads: int, partition: bool, backwards: int | None = None) -> TracedModel:
    config = GPTConfig(vocab_size=VOCAB_SIZE, context=SEQUENCE_TOKENS, heads=heads, width=width)
    loop = TrainingLoop(partition_activations=partition)
    family = gpt_family(config, VocabParallelGPT)
    return TracedModel.from_family(family, loop=loop, precision="fp16", backwards=backwards)


def _throughput_result(name: str, about: str, runs: Sequence[PaperRun]) -> PaperResult:
    cells = []
    for run in runs:
        tflops = paper_flops(run) / paper_step_time(run).step / 1e12
        row = f"{run.label}, {run.gpus} GPUs, MP {run.tensor}, batch {run.batch}"
        cells.append(PaperCell(row, run.system, run.tflops, tflops))
    return PaperResult(name, about, tuple(cells))


figure_2 = partial(_throughput_result, "Figure 2", "TFLOPS a GPU, ZeRO and Megatron-LM", FIGURE_2)
figure_3 = partial(_throughput_result, "Figure 3", "TFLOPS a GPU, 60B on more and more GPUs", FIGURE_3)
figure_4 = partial(_throughput_result, "Figure 4", "TFLOPS a GPU without model parallelism, ZeRO and DDP", FIGURE_4)


def _paper_strategy(fit: PaperModelFit) -> tuple[Strategy, bool]:
    """Return the planner's strategy for a configuration, and whether it partitions activations (P_a)."""
    config = CONFIGURATIONS[fit.configuration]
    checkpoint: CheckpointMode = "host" if config.offload_activations else "recompute"
    strategy = Strategy(stage=config.stage, tensor=TENSOR_DEGREE, checkpoint=checkpoint, micro_batch=fit.batch)
    return strategy, config.partition_activations


def figure_6() -> PaperResult:
    """Find the largest model by configuration."""
    cells, machine = [], paper_machine().with_memory(GPU_MEMORY)
    for fit in FIGURE_6:
        strategy, partition = _paper_strategy(fit)
        model = _paper_model(fit.width, fit.heads, partition)
        largest = find_deepest_member(model, strategy, NUM_GPUS, machine)
        row = f"{fit.configuration}, {CONFIGURATIONS[fit.configuration].notation}"
        cells.append(PaperCell(row, f"{largest.layers} layers", fit.value, largest.parameters / 1e9))
    return PaperResult("Figure 6", "the largest model in 32 GB, B of parameters", tuple(cells))


def figure_7() -> PaperResult:
    """Predict the memory that the allocator caches, by configuration."""
    cells = []
    for fit in FIGURE_7:
        strategy, partition = _paper_strategy(fit)
        model = _paper_model(fit.width, fit.heads, partition).with_layers(fit.layers)
        footprint = model.footprint(strategy, NUM_GPUS, paper_machine())
        row = f"{fit.label}, {fit.configuration}, {CONFIGURATIONS[fit.configuration].notation}"
        cells.append(PaperCell(row, "GB", fit.value, footprint.reserved / 1e9))
    return PaperResult("Figure 7", "GB cached by the allocator at the most", tuple(cells))


# ---------------------------------------------------------------------------------------------------------- the command


def show(record: Record, result: PaperResult) -> list[object]:
    """Print a table or figure, the paper's number beside ours; return its row in the summary."""
    rows = []
    for cell in result.cells:
        ours = cell.ours if cell.error is None else f"{cell.ours:.1f}"
        rows.append([cell.row, cell.column, cell.paper, ours, "" if cell.error is None else f"{cell.error:+.0%}"])
    print(f"\n{result.name}: {result.about}")
    record.show(result.name.lower(), ("", "", "paper", "zeroshard", "error"), rows)
    error = result.mean_error
    match = f"{result.num_exact} as printed" if error is None else f"mean error {error:.0%}"
    return [result.name, result.about, len(rows), match]


def main(argv: Sequence[str] | None = None) -> None:
    """Predict all tables and figures, and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write a record of the run as JSON")
    record = Record("paper_predicted", "cpu", parser.parse_args(argv).out)
    record.add({"machine": "dgx2", "fitted curve": asdict(PAPER_CURVE)})
    summary = [show(record, result) for result in paper_results()]
    print()
    record.show("summary", ("", "", "numbers", "predicted"), summary)
