"""The code on the pages runs: Python blocks on two ranks, commands as far as their options, data as what it is.

Every Python block starts with the names of `prelude`, among them a model, which is sharded unless the block does so.
Comments before a block change this: `<!-- continues -->` goes on where the block before has ended; `<!-- tested by
FILE::NAME -->` leaves it to a test that has the processes, packages or time that it needs; `<!-- not run: REASON -->`
only compiles it.
"""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import sys
import tomllib
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml
from ranks import run_processes, run_threads
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

import zeroshard
from zeroshard.checkpoint.async_save import wait_for_pending_save
from zeroshard.cli.main import COMMANDS
from zeroshard.models import GPT, GPTConfig
from zeroshard.train.commands.train import read_options

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/**/*.md")])
BLOCK = re.compile(r"(?:^<!-- (continues|tested by [^>]*?|not run: [^>]*?) -->\n\n)?^```(\w*)\n(.*?)^```", re.M | re.S)
CONFIG = GPTConfig(vocab_size=32, layers=2, heads=2, width=32, context=16)


def blocks(language: str) -> list[Any]:
    """Return the blocks of a language on all pages: page, line, directive, code."""
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in BLOCK.finditer(text):
            if match[2] == language:
                line = text.count("\n", 0, match.start(3))
                case = (page, line, match[1] or "", match[3])
                found.append(pytest.param(*case, id=f"{page.relative_to(ROOT)}:{line}"))
    return found


def stories() -> list[Any]:
    """Return the Python blocks that run together, those of `<!-- continues -->` with the ones before."""
    found: list[list[Any]] = []
    for case in blocks("python"):
        page, line, directive, code = case.values
        if directive == "continues":
            found[-1].append((line, code))
        else:
            found.append([page, directive, (line, code)])
    return [pytest.param(*case[:2], case[2:], id=f"{case[0].relative_to(ROOT)}:{case[2][0]}") for case in found]


class Block(nn.Module):
    """A norm and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))


class Blocks(nn.Module):
    """The pages' model: takes a batch of floats, or of images, and returns ten logits for each row."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(8, 10)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            batch = layer(batch)
        return self.head(batch)


class Net(nn.Sequential):
    """A model of images."""

    def __init__(self) -> None:
        super().__init__(nn.Conv2d(3, 8, 32, 32), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))


def two_rank_mesh(device: str, shape: tuple[int, ...], **names: Any) -> Any:
    """Return the mesh of a page on the two CPU ranks of the test: all of them on the last axis."""
    return init_device_mesh("cpu", (*(1 for _ in shape[:-1]), 2), **names)


def prelude(code: str) -> dict[str, Any]:
    """Return the names that a block finds."""
    torch.manual_seed(0)
    needs_gpt = '"tensor"' in code or "simulate(" in code or "GPT(config)" in code
    model: nn.Module = GPT(CONFIG) if needs_gpt else Blocks()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    loader = [torch.zeros(2, 8, dtype=torch.int64) if needs_gpt else torch.ones(2, 8) for _ in range(6)]
    return {
        **{"torch": torch, "nn": nn, "F": functional, "zeroshard": zeroshard, "Path": Path},
        "dist": dist,
        "init_device_mesh": two_rank_mesh,
        **{"GPT": lambda config: LossOf(GPT(config)), "config": CONFIG, "MyModel": Blocks, "Net": Net, "Block": Block},
        **{"model": model, "optimizer": optimizer, "loader": loader, "batch": loader[0], "step": 1},
        "scheduler": torch.optim.lr_scheduler.ConstantLR(optimizer),
        "targets": torch.zeros(2, dtype=torch.int64),
        "loss": torch.ones(()),
        **{"matrices": matrices, "others": [p for p in model.parameters() if p.ndim != 2]},
        "data": torch.ones(8, 8),
        **{"path": "checkpoints/step-1", "generate": lambda: None},
    }


class LossOf(nn.Module):
    """A language model that returns its loss, as `model(batch)` does on the pages."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.model(batch).flatten(0, 1).float(), batch.flatten())


def run_blocks(rank: int, page: str, story: list[tuple[int, str]]) -> None:
    names = {**prelude("\n".join(code for _, code in story)), "__name__": "__main__"}
    if not any(call in code for _, code in story for call in ("shard(", "simulate(", "Accelerator(", "Trainer(")):
        names["model"], names["optimizer"] = zeroshard.shard(names["model"], names["optimizer"], stage=3)
    for line, code in story:
        code = code.replace("dist.init_process_group()", "pass")  # the harness has done it
        names["print"] = lambda *values, **_: [str(value) for value in values]
        exec(compile("\n" * line + code, page, "exec"), names)


# checkpoints have threads of their own, tools have state of the whole process
NEEDS_PROCESSES = ("zeroshard.save(", "zeroshard.load(", "fully_shard(", "zeroshard.integrations")


def run_blocks_in(rank: int, folder: str, page: str, story: list[tuple[int, str]]) -> None:
    variables = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "ACCELERATE_USE_CPU": "true"}
    with contextlib.chdir(folder), pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        try:
            run_blocks(rank, page, story)
            wait_for_pending_save()  # as a program does at its end: the process runs other tests too
        finally:
            if "accelerate.state" in sys.modules:  # its state is that of the process, which runs other tests too
                state = sys.modules["accelerate.state"]
                state.AcceleratorState._reset_state(reset_partial_state=True)
                state.GradientState._reset_state()


@pytest.mark.parametrize(("page", "directive", "story"), stories())
def test_a_python_block_runs(page: Path, directive: str, story: list[tuple[int, str]], tmp_path: Path) -> None:
    if directive.startswith("not run"):
        for _, code in story:
            compile(code, page, "exec")
        return
    if directive:
        path, _, name = directive.removeprefix("tested by ").partition("::")
        assert f"def {name}(" in (ROOT / path).read_text(encoding="utf-8"), directive
        return
    (tmp_path / "llama").mkdir()
    save_file(Blocks().state_dict(), tmp_path / "llama" / "model.safetensors")
    torch.save({f"module.{name}": value for name, value in Blocks().state_dict().items()}, tmp_path / "weights.pt")
    with contextlib.chdir(tmp_path):
        if any(call in code for _, code in story for call in NEEDS_PROCESSES):
            run_processes(2, run_blocks_in, str(tmp_path), str(page), story)
        else:
            run_threads(2, run_blocks, str(page), story)


def command_lines() -> list[Any]:
    """Return the lines that call `zeroshard`, on all pages."""
    found = []
    for case in blocks(""):
        page, line, _, code = case.values
        for text in re.findall(r"^(?:\$ )?zeroshard (.*)", code.replace("\\\n", " "), re.M):
            if "…" not in text:
                found.append(pytest.param(text, id=f"{page.relative_to(ROOT)}:{line}:{text[:60]}"))
    return found


@pytest.mark.parametrize("text", command_lines())
def test_a_command_line_has_options_that_exist(text: str) -> None:
    command, *arguments = shlex.split(text, comments=True)
    module = import_module(COMMANDS[command][0])
    if command == "train":
        read_options([argument for argument in arguments if argument != "--resume"])
    elif hasattr(module, "_parser"):
        module._parser().parse_args(arguments)


PARSERS = {"json": json.loads, "toml": tomllib.loads, "yaml": lambda text: list(yaml.safe_load_all(text))}


@pytest.mark.parametrize("language", PARSERS)
def test_data_on_pages_can_be_read(language: str) -> None:
    for case in blocks(language):
        page, line, _, code = case.values
        assert PARSERS[language](code), (page, line)


def test_every_block_has_a_language_that_is_known() -> None:
    known = {"", "diff", "python", "pycon", *PARSERS}
    for page in PAGES:
        assert {match[2] for match in BLOCK.finditer(page.read_text(encoding="utf-8"))} <= known, page


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    listed = set(re.findall(r"^ +- (?:.*: )?([\w-]+\.md)$", nav, re.M))
    assert {path.name for path in ROOT.glob("docs/*.md")} <= listed
