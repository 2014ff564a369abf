"""What commands print: names and messages of strangers do not control the terminal, and bad input is told in a line."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from torch import nn

import zeroshard
from zeroshard.cli.main import main

ESCAPES = "\x1b]0;title\x07\x1b[2J\x9b31m"


def is_plain(text: str) -> bool:
    return all(char.isprintable() or char == "\n" for char in text)


def test_a_checkpoint_with_escapes_is_shown_without_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Module()
    model.register_parameter(f"{ESCAPES}\nintact", nn.Parameter(torch.ones(2)))
    path = zeroshard.save(tmp_path / "saved", model, extra={ESCAPES: 1}).path
    assert main(["inspect", str(path)]) == 0
    shown = capsys.readouterr().out
    assert is_plain(shown) and r"\x1b]0;title\x07" in shown
    assert not any(line.startswith("intact") for line in shown.splitlines())


@pytest.mark.parametrize(
    "arguments",
    [
        ["inspect", ESCAPES],
        ["export", ESCAPES, "out"],
        ["migrate", ESCAPES],
        ["generate", ESCAPES, "--prompt", "a"],
        ["report", ESCAPES],
        ["plan", ESCAPES, "--devices", "2"],
        ["simulate", ESCAPES],
        ["rehearse", "--ranks", "2", ESCAPES],
    ],
    ids=lambda arguments: arguments[0],
)
def test_an_error_holds_no_escapes(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) in (1, 2)
    error = capsys.readouterr().err
    assert is_plain(error) and error.startswith(f"zeroshard {arguments[0]}: ")


def test_a_configuration_with_escapes_is_shown_without_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps({ESCAPES: 1, "optimizer": {"type": ESCAPES}, "scheduler": {"type": ESCAPES}}))
    assert main(["migrate", str(path)]) == 1
    assert "\x1b" not in capsys.readouterr().out


def test_an_index_that_cannot_be_one_is_not_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = zeroshard.save(tmp_path / "saved", nn.Linear(1, 1)).path
    os.truncate(path / "index.json", 10**12)  # sparse
    assert main(["inspect", str(path)]) == 1
    assert "expected at most 1073741824" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["inspect"], ["export", "a"], ["migrate"], ["rehearse", "--ranks", "2"]])
def test_a_path_that_cannot_be_one_is_told_in_a_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    for path in ("a\0b", "x" * 5000):
        assert main([*arguments, path]) in (1, 2)
        assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    "text",
    ["[]", "3", "[" * 100_000, '{"fp16": 3}', '{"optimizer": [1]}', '{"scheduler"', '{"fp16": {"enabled": []}}', "é"],
)
def test_a_configuration_of_another_shape_is_told_in_a_line(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ds_config.json").write_text(text, encoding="latin-1")
    assert main(["migrate", str(tmp_path / "ds_config.json")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("command", ["plan", "simulate", "rehearse", "export", "inspect", "migrate"])
def test_a_wrong_option_is_told_in_a_line(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([command, "a", "b", f"--{ESCAPES}"])
    error = capsys.readouterr().err
    assert error.startswith(f"zeroshard {command}: ") and error.count("\n") == 1 and is_plain(error)


def test_a_deleted_directory_is_told_in_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, gone = os.getcwd(), tmp_path / "gone"
    gone.mkdir()
    os.chdir(gone)
    gone.rmdir()
    try:
        assert main(["inspect", "."]) == 2
    finally:
        os.chdir(before)
    assert capsys.readouterr().err == (
        "zeroshard inspect: the current directory has been deleted: change to another one\n"
    )
