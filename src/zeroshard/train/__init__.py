"""The training program, `zeroshard train`. Names are imported on first use, so that `--help` does not import torch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zeroshard.train.data.corpus import shakespeare
    from zeroshard.train.flags import read_options
    from zeroshard.train.generation import generate_text
    from zeroshard.train.launch import run_training
    from zeroshard.train.models.huggingface import open_model
    from zeroshard.train.report.html_report import write_html_report

__all__ = ["generate_text", "open_model", "read_options", "run_training", "shakespeare", "write_html_report"]

_MODULE_OF = {
    "generate_text": "generation",
    "open_model": "models.huggingface",
    "read_options": "flags",
    "run_training": "launch",
    "shakespeare": "data.corpus",
    "write_html_report": "report.html_report",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
