"""Open the model to plan on the meta device: a preset, a Hugging Face config or a user-defined function."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from zeroshard.models import GPT, PRESETS, GPTConfig
from zeroshard.planner import Inputs, model_arguments

CONFIG_FILE = "config.json"
_PRESET_OVERRIDES = ("layers", "heads", "width", "sequence", "vocabulary")
_ACCEPTED_MODELS = (
    f"a preset ({', '.join(list(PRESETS)[:4])}, …: see `zeroshard presets`), a Hugging Face model's directory or its "
    f"{CONFIG_FILE}, or module:callable for your own model"
)


class OpenedModel(NamedTuple):
    """A model on the meta device."""

    model: nn.Module
    inputs: Inputs  # None if they are known
    description: str  # one line

    def tokens_per_sample(self, sequence: int | None = None) -> int | None:
        """Return the tokens per sample of a known language model; None for all others.

        >>> open_model("gpt2").tokens_per_sample()
        1024
        """
        if self.inputs is not None:
            return None
        args, kwargs = model_arguments(self.model, None, 1, sequence)
        tokens: torch.Tensor = kwargs["input_ids"] if kwargs else args[0]
        return int(tokens.shape[1])


def open_model(name: str, **changes: int | None) -> OpenedModel:
    """Open a model on the meta device.

    ``name`` is a preset, a Hugging Face model's directory or config.json (nothing is downloaded), or
    "module:callable", a function without arguments that returns a model, or a model and its inputs as in
    :func:`zeroshard.plan`. ``changes`` (layers, heads, width, sequence, vocabulary) override a preset's shape.

    >>> model, inputs, description = open_model("gpt2", layers=2)
    >>> description, inputs, next(model.parameters()).is_meta
    ('GPT, 2 layers, 12 heads, width 768', None, True)
    """
    overrides = {key: value for key, value in changes.items() if value is not None}
    for key in overrides:
        if key not in _PRESET_OVERRIDES:
            raise ValueError(f"unknown preset field {key!r}: the fields are {', '.join(_PRESET_OVERRIDES)}")
    if name in PRESETS:
        return _open_preset(name, overrides)
    overrides.pop("sequence", None)  # valid for any language model: it changes the inputs, not the model's shape
    if overrides:
        raise ValueError(
            f"{name!r} is not a preset, so {', '.join(overrides)} cannot be changed: change the model itself"
        )
    path = Path(name).expanduser()
    if path.exists():
        return _open_hugging_face(path)
    if ":" in name:
        return _open_callable(name)
    matches = difflib.get_close_matches(name, PRESETS, n=1)
    hint = f"did you mean {matches[0]!r}? " if matches else ""
    raise ValueError(f"unknown model {name!r}, and there is no such file: {hint}Expected {_ACCEPTED_MODELS}")


def open_inputs(name: str) -> Inputs:
    """Load a model's inputs from "module:callable": a function of the batch size, or an example batch."""
    found = import_attribute(name)
    if callable(found) or isinstance(found, torch.Tensor | tuple | Mapping):
        return cast("Inputs", found)
    raise ValueError(
        f"{name} must be a function of the batch size, such as lambda batch: torch.empty(batch, 3, 224, 224, "
        f"device='meta'), or an example batch, got {type(found).__name__}"
    )


def import_attribute(name: str) -> Any:
    """Import "module:attribute"; the current directory is searched for modules, too.

    >>> import_attribute("torch:nn.Linear") is nn.Linear
    True
    """
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise ValueError(f"expected module:callable, such as models:build for build() in models.py, got {name!r}")
    cwd = os.getcwd()
    if cwd not in sys.path:
        sys.path.insert(0, cwd)
    importlib.invalidate_caches()
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.split(".")[0] and error.name != module:
            raise ValueError(f"importing {module} failed: {error}. Install what it needs, or fix it") from error
        raise ValueError(
            f"module {module!r} is not installed and not in {cwd}: run this in the directory of "
            f"{module.split('.')[0]}.py, or set PYTHONPATH"
        ) from error
    except Exception as error:
        raise ValueError(f"importing {module} failed with {type(error).__name__}: {error}") from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            matches = difflib.get_close_matches(part, dir(found), n=1)
            public = [attr for attr in vars(found) if not attr.startswith("_") and callable(getattr(found, attr))]
            hint = f"did you mean {matches[0]!r}?" if matches else f"it has {', '.join(public[:8]) or 'no callables'}"
            raise ValueError(f"{module} has no attribute {part!r}: {hint}")
        found = getattr(found, part)
    return found


# ------------------------------------------------------------------------------------------- three kinds of models


def _open_preset(name: str, changes: dict[str, int]) -> OpenedModel:
    changes = {"context" if key == "sequence" else key: value for key, value in changes.items()}
    shape = asdict(replace(PRESETS[name], **changes))
    config = GPTConfig(vocab_size=shape.pop("vocabulary"), **shape)
    with torch.device("meta"):
        model = GPT(config)
    return OpenedModel(model, None, f"GPT, {config.layers} layers, {config.heads} heads, width {config.width}")


def _open_hugging_face(path: Path) -> OpenedModel:
    from zeroshard.integrations.pretrained import causal_lm_config, meta_causal_lm

    model = meta_causal_lm(causal_lm_config(path))
    text = model.config.get_text_config()
    layers, width = getattr(text, "num_hidden_layers", "?"), getattr(text, "hidden_size", "?")
    return OpenedModel(model, None, f"{type(model).__name__}, {layers} layers, width {width}")


def _open_callable(name: str) -> OpenedModel:
    make = import_attribute(name)
    if isinstance(make, nn.Module):
        return _split_model_and_inputs(name, make)
    if not callable(make):
        raise ValueError(f"{name} must be a function that returns a model, got {type(make).__name__}")
    try:
        with torch.device("meta"):
            made = make()
    except Exception as error:
        raise ValueError(
            f"{name}() failed with {type(error).__name__}: {error}. It is called without arguments under "
            "torch.device('meta'), where tensors have shapes but no values: do not read values or load weights in it"
        ) from error
    return _split_model_and_inputs(name, made)


def _split_model_and_inputs(name: str, made: Any) -> OpenedModel:
    model, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        got = type(made).__name__ if model is made else f"a tuple whose first element is {type(model).__name__}"
        raise ValueError(
            f"{name} must return an nn.Module, or a module and its inputs (a function of the batch size, or an example "
            f"batch), got {got}"
        )
    return OpenedModel(model, inputs, f"{type(model).__name__} of {name}")
