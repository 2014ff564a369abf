"""Conversion: how tensors as they lie in files become those of a transformers model, and back.

For most models a stored tensor is one of the model's, perhaps under another name. For some, mixtures of experts above
all, transformers stacks, joins or splits tensors on loading. The rules are transformers' own; here they are applied to
a few tensors at a time, so that nobody holds them all.
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
    """How a few tensors are made from a few others."""

    target: str
    """The first of those that are made."""
    converter: Any = None
    """transformers' WeightConverter; None: one tensor, as it is."""
    renamings: list[Any] = field(default_factory=list)
    """transformers' WeightRenamings, for the names of what the rule makes."""
    sources: list[tuple[str, str]] = field(default_factory=list)
    """(which of the rule's patterns it matches, name) of those it is made from."""

    @property
    def source_names(self) -> list[str]:
        """What it is made from."""
        return [name for _, name in self.sources]

    def convert(self, read: ReadTensor, model: Any) -> dict[str, torch.Tensor]:
        """Read the sources and give what they make, by name."""
        if self.converter is None:
            return {self.target: read(self.sources[0][1])}
        rule = copy.deepcopy(self.converter)  # it keeps what it is given
        for pattern, name in self.sources:
            rule.add_tensor(self.target, name, pattern, read(name))
        made = rule.convert(self.target, model=model, config=model.config)
        apply = _core_model_loading().apply_renamings
        return {
            apply(name, self.renamings): value[0] if isinstance(value, list) else value for name, value in made.items()
        }


def load_conversions(model: Any, stored: Mapping[str, torch.Tensor]) -> list[WeightConversion]:
    """How a model's tensors are made from stored ones; those that match nothing are passed on under their names.

    Leaves on the model which rules were used, as transformers does, for :func:`save_conversions`.
    """
    rules = _core_model_loading()
    mapping = importlib.import_module("transformers.conversion_mapping").get_model_conversion_mapping(model)
    renamings, converters = _split_rules(mapping)
    state = model.state_dict()
    recipes: dict[str, WeightConversion] = {}
    for name in sorted(stored, key=rules.dot_natural_key):
        target, pattern = rules.rename_source_key(name, renamings, converters, model.base_model_prefix, state)
        if target not in state and name in state:  # a rule matched what is converted already
            target, pattern = rules.rename_source_key(name, [], [], model.base_model_prefix, state)
        rule = None if pattern is None else _converter_for(pattern, converters)
        if rule is None and target in recipes:  # the same tensor with and without the base model's prefix
            target = name
        recipes.setdefault(target, WeightConversion(target, rule)).sources.append((pattern or name, name))
    model._weight_conversions = [rule for rule in mapping if rule.was_used()]
    return list(recipes.values())


def save_conversions(model: Any, names: Iterable[str]) -> list[WeightConversion]:
    """How the tensors of a model's files are made from its own: back to the names and shapes they were loaded from."""
    rules = _core_model_loading()
    mapping = getattr(model, "_weight_conversions", None)
    if mapping is None:  # never loaded: as its published weights are, which have no prefix to be changed
        library = importlib.import_module("transformers.conversion_mapping")
        mapping = library.get_model_conversion_mapping(model, add_legacy=False)
        mapping = [rule for rule in mapping if not isinstance(rule, rules.PrefixChange)]
    renamings, converters = _split_rules([rule.reverse_transform() for rule in reversed(mapping)])
    recipes: dict[str, WeightConversion] = {}
    for name in sorted(names, key=rules.dot_natural_key):
        target, pattern = rules.apply_converters(name, converters)
        if pattern is None:
            target = rules.apply_renamings(name, renamings)
            recipe = WeightConversion(target)
        else:
            recipe = WeightConversion(target, _converter_for(pattern, converters), renamings)
        recipes.setdefault(target, recipe).sources.append((pattern or name, name))
    return list(recipes.values())


def _core_model_loading() -> Any:
    return importlib.import_module("transformers.core_model_loading")


def _split_rules(mapping: list[Any]) -> tuple[list[Any], list[Any]]:
    """Rules that only rename, and those that compute."""
    rules = _core_model_loading()
    renamings = [rule for rule in mapping if isinstance(rule, rules.WeightRenaming)]
    return renamings, [rule for rule in mapping if isinstance(rule, rules.WeightConverter)]


def _converter_for(pattern: str, converters: list[Any]) -> Any:
    """The last rule with the pattern: transformers' own table is a dict of them."""
    return next(rule for rule in reversed(converters) if pattern in rule.source_patterns)
