"""WeightConversion: convert stored tensors to those of a transformers model, and back.

For most models a stored tensor is a tensor of the model, perhaps under another name. For some, mainly mixtures of
experts, transformers stacks, concatenates or splits tensors on loading. The rules are transformers' own; here they are
applied to a few tensors at a time, so that no rank holds them all.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

ReadTensor = Callable[[str], torch.Tensor]


@dataclass
class WeightConversion:
    """Converts a few source tensors to a few target tensors."""

    target: str
    """Name of the first target tensor."""
    converter: Any = None
    """transformers' WeightConverter; None: one tensor, unchanged."""
    renamings: list[Any] = field(default_factory=list)
    """transformers' WeightRenamings, applied to the target names."""
    sources: list[tuple[str, str]] = field(default_factory=list)
    """(matching pattern of the converter, name) of each source tensor."""

    @property
    def source_names(self) -> list[str]:
        """Names of the source tensors."""
        return [name for _, name in self.sources]

    def convert(self, read: ReadTensor, model: Any) -> dict[str, torch.Tensor]:
        """Read the sources and return the target tensors by name."""
        if self.converter is None:
            return {self.target: read(self.sources[0][1])}
        converter = copy.deepcopy(self.converter)  # a converter keeps references to its inputs
        for pattern, name in self.sources:
            converter.add_tensor(self.target, name, pattern, read(name))
        converted = converter.convert(self.target, model=model, config=model.config)
        rename = _core_model_loading().apply_renamings
        return {
            rename(name, self.renamings): value[0] if isinstance(value, list) else value
            for name, value in converted.items()
        }


def load_conversions(model: Any, stored: Mapping[str, torch.Tensor]) -> list[WeightConversion]:
    """Return the conversions from stored tensors to a model's; tensors that match no rule keep their names.

    Like transformers, it records the used rules on the model, for :func:`save_conversions`.
    """
    rules = _core_model_loading()
    mapping = importlib.import_module("transformers.conversion_mapping").get_model_conversion_mapping(model)
    renamings, converters = _split_rules(mapping)
    state = model.state_dict()
    conversions: dict[str, WeightConversion] = {}
    for name in sorted(stored, key=rules.dot_natural_key):
        target, pattern = rules.rename_source_key(name, renamings, converters, model.base_model_prefix, state)
        if target not in state and name in state:  # the rule matched a tensor that is already converted
            target, pattern = rules.rename_source_key(name, [], [], model.base_model_prefix, state)
        rule = None if pattern is None else _converter_for(pattern, converters)
        if rule is None and target in conversions:  # the same tensor with and without the base model's prefix
            target = name
        conversions.setdefault(target, WeightConversion(target, rule)).sources.append((pattern or name, name))
    model._weight_conversions = [rule for rule in mapping if rule.was_used()]
    return list(conversions.values())


def save_conversions(model: Any, names: Iterable[str]) -> list[WeightConversion]:
    """Return the conversions from a model's tensors back to the names and shapes they were loaded from."""
    rules = _core_model_loading()
    mapping = getattr(model, "_weight_conversions", None)
    if mapping is None:  # never loaded: use the published format, without prefix changes
        library = importlib.import_module("transformers.conversion_mapping")
        mapping = library.get_model_conversion_mapping(model, add_legacy=False)
        mapping = [rule for rule in mapping if not isinstance(rule, rules.PrefixChange)]
    renamings, converters = _split_rules([rule.reverse_transform() for rule in reversed(mapping)])
    conversions: dict[str, WeightConversion] = {}
    for name in sorted(names, key=rules.dot_natural_key):
        target, pattern = rules.apply_converters(name, converters)
        if pattern is None:
            target = rules.apply_renamings(name, renamings)
            conversion = WeightConversion(target)
        else:
            conversion = WeightConversion(target, _converter_for(pattern, converters), renamings)
        conversions.setdefault(target, conversion).sources.append((pattern or name, name))
    return list(conversions.values())


def _core_model_loading() -> Any:
    return importlib.import_module("transformers.core_model_loading")


def _split_rules(mapping: list[Any]) -> tuple[list[Any], list[Any]]:
    """Split the rules into renamings and converters."""
    rules = _core_model_loading()
    renamings = [rule for rule in mapping if isinstance(rule, rules.WeightRenaming)]
    return renamings, [rule for rule in mapping if isinstance(rule, rules.WeightConverter)]


def _converter_for(pattern: str, converters: list[Any]) -> Any:
    """Return the last converter with the pattern, because transformers' own table is a dict by pattern."""
    return next(rule for rule in reversed(converters) if pattern in rule.source_patterns)
