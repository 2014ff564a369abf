"""The figures of a step, their file, and what they are measured against."""

import json
from pathlib import Path

import pytest

from zeroshard.train.metrics import MetricsFile, StepMetrics, flops_per_token


def figures(step: int, loss: float = 5.0, **others: float | None) -> StepMetrics:
    known = {"lr": 1e-3, "grad_norm": 1.0, "tokens": 100 * step, "tokens_per_s": 50.0, "seconds": 2.0 * step}
    return StepMetrics(step=step, loss=loss, **(known | others))


def refuse(name: str) -> float:
    raise AssertionError(f"{name} is not JSON")


def records(path: Path) -> list[dict[str, object]]:
    text = path.read_text()
    assert text.endswith("\n") or not text
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def test_every_line_is_there_as_soon_as_it_is_written(tmp_path: Path) -> None:
    with MetricsFile(tmp_path / "metrics.jsonl", 0) as file:
        file.write(figures(1, communication=0.25))
        assert records(tmp_path / "metrics.jsonl") == [
            {
                "step": 1,
                "loss": 5.0,
                "lr": 1e-3,
                "grad_norm": 1.0,
                "tokens": 100,
                "tokens_per_s": 50.0,
                "seconds": 2.0,
                "communication": 0.25,
                "tflops": None,
                "mfu": None,
            }
        ]
        file.write_evaluation(1, 5.5)
        assert records(tmp_path / "metrics.jsonl")[1:] == [{"step": 1, "validation_loss": 5.5}]


def test_figures_that_are_not_finite_are_strict_json_and_differ_from_unmeasured(tmp_path: Path) -> None:
    with MetricsFile(tmp_path / "metrics.jsonl", 0) as file:
        file.write(figures(1, float("nan"), grad_norm=float("inf"), mfu=None))
        file.write_evaluation(1, float("-inf"))
    step, evaluation = records(tmp_path / "metrics.jsonl")
    assert (step["loss"], step["grad_norm"], step["mfu"]) == ("nan", "inf", None)
    assert evaluation["validation_loss"] == "-inf"


def test_a_resumed_run_drops_the_cut_line_and_the_steps_beyond_its_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path, 0) as file:
        for step in range(1, 6):
            file.write(figures(step))
            if step % 2 == 0:
                file.write_evaluation(step, 6.0)
    with path.open("a") as cut:
        cut.write('{"step": 6, "lo')
    with MetricsFile(path, start_step=3) as file:
        file.write(figures(4, loss=4.0))
    kept = records(path)
    assert [(r["step"], r.get("loss", r.get("validation_loss"))) for r in kept] == [
        (1, 5.0),
        (2, 5.0),
        (2, 6.0),
        (3, 5.0),
        (4, 4.0),
    ]
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize("cut", range(1, len('{"step": 2, "validation_loss": 6.0}') + 1))
def test_a_last_line_cut_anywhere_leaves_whole_lines(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "metrics.jsonl"
    last = '{"step": 2, "validation_loss": 6.0}'
    path.write_text('{"step": 1, "validation_loss": 7.0}\n' + last[:cut])
    MetricsFile(path, start_step=2).close()
    assert [r["step"] for r in records(path)] == ([1, 2] if cut == len(last) else [1])  # only the newline was cut


def test_a_run_that_starts_over_keeps_nothing(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path, 0) as file:
        file.write_evaluation(0, 7.0)
        file.write(figures(1))
    MetricsFile(path, 0).close()
    assert records(path) == []


def test_flops_of_a_token_by_hand() -> None:
    # 2 layers of width 8 over 16 tokens, Ψ = 1000. Parameters: 2 operations forward, 4 backward, each. Attention: a
    # token meets 16 others in scores and in the weighted sum, 2 · 16 · 8 operations each, thrice that with backward.
    attention = 2 * 3 * (2 * 16 * 8 + 2 * 16 * 8)
    assert flops_per_token(1000, 0, layers=2, width=8, sequence=16) == 6 * 1000 + attention == 9072
    assert flops_per_token(100, 900, layers=2, width=8, sequence=16) == 600 + 4 * 900 + attention
