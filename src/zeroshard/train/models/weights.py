"""Load the weights of a transformers model module by module, and convert them back for saving.

[Note: conversion of stored weights]
For most models a stored tensor is a tensor of the model, perhaps under another name. For some, mainly mixtures of
experts, transformers stacks, concatenates or splits tensors on loading. The rules are transformers' own; here they are
applied to a few tensors at a time, so that no rank holds them all.

[Note: initializing one module at a time]
transformers initializes by ``_init_weights(module)``, children before parents, and a parent may overwrite its children
(GPT-2's attention re-initializes its projection with a smaller deviation). ``zeroshard.shard`` initializes modules one
by one in another order, and needs a module's tensors final after its turn. So every ``_init_weights`` call first runs
on the meta device, where it costs nothing but raises the version of each tensor it writes. Then, at a module's turn,
all calls that write into it run in transformers' order, while every other tensor has the mark that makes transformers
skip it. Buffers that are not stored (rotary frequencies, masks) get their values in the same way, as in
``from_pretrained``. A few constructors create values on the CPU even under ``torch.device("meta")``. Those tensors are
moved to the meta device here, and their values are kept if nothing else initializes them.
"""

from __future__ import annotations

import copy
import importlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

TensorSlot = tuple[nn.Module, str]  # the module that holds a tensor, and its key there
_INITIALIZED_ATTR = "_is_hf_initialized"
_MAX_LISTED_NAMES = 12  # names per category in an error message
ReadTensor = Callable[[str], torch.Tensor]


class WeightInitializer:
    """Initializes modules with the stored values, or with transformers' initialization if nothing is stored."""

    def __init__(self, model: Any, stored: Mapping[str, torch.Tensor] | None, source: str) -> None:
        self._model, self._stored = model, stored or {}
        self._constructor_values = _move_to_meta(model)
        self._prefixes = {module: f"{name}." if name else "" for name, module in model.named_modules()}
        self.slots = {self._fqn(slot): slot for slot, _ in _unique_tensors(model)}  # tied tensors: first name only
        self._conversions = {} if stored is None else self._match_stored_weights(source)
        # by slot: (the model whose _init_weights is called, its argument)
        self._init_calls: dict[TensorSlot, list[tuple[Any, nn.Module]]] = {}
        self._dry_run_init()
        unstored = {slot: name for name, slot in self.slots.items() if name not in self._conversions}
        self._constructor_values = {
            s: t for s, t in self._constructor_values.items() if s in unstored and s not in self._init_calls
        }
        missing = [
            name
            for slot, name in unstored.items()
            if slot not in self._init_calls and slot not in self._constructor_values
        ]
        if missing:
            hint = "" if stored is None else f", and {source} does not have them"
            raise ValueError(
                f"transformers cannot initialize {_join_names(missing)} of {type(model).__name__}{hint}: pass a "
                "directory with all weights"
            )

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the model's parameters under their own names, even if adapters were added since."""
        for name, (module, key) in self.slots.items():
            parameter = module._parameters.get(key)
            if parameter is not None:
                yield name, parameter

    def named_persistent_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the model's persistent buffers."""
        for name, (module, key) in self.slots.items():
            buffer = module._buffers.get(key)
            if buffer is not None and key not in module._non_persistent_buffers_set:
                yield name, buffer

    def __contains__(self, module: nn.Module) -> bool:
        return module in self._prefixes

    @torch.no_grad()
    def initialize(self, module: nn.Module) -> None:
        """Initialize a module's own parameters and buffers. Only rank 0 reads files; its values are broadcast later."""
        reads_files = not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0
        for key, tensor in _own_tensors(module):
            slot, name = (module, key), self._fqn((module, key))
            if name in self._conversions:
                conversion, converted_name = self._conversions[name]
                if reads_files:
                    tensor.copy_(conversion.convert(self._stored.__getitem__, self._model)[converted_name])
            elif slot in self._constructor_values:
                tensor.copy_(self._constructor_values[slot])
            # no calls if the tensor is stored, or tied and initialized by another module
            for owner, argument in self._init_calls.get(slot, ()):
                with _mark_initialized(other for _, other in _unique_tensors(argument) if other is not tensor):
                    owner._init_weights(argument)

    def _fqn(self, slot: TensorSlot) -> str:
        return f"{self._prefixes[slot[0]]}{slot[1]}"

    def _dry_run_init(self) -> None:
        """Find which ``_init_weights`` calls write each tensor: see [Note: initializing one module at a time]."""
        for argument, owner in _children_first(self._model, self._model):
            tensors = list(_unique_tensors(argument))
            skipped = {
                slot for slot, _ in tensors if self._fqn(slot) in self._conversions or self._fqn(slot) not in self.slots
            }
            versions = [tensor._version for _, tensor in tensors]
            with _mark_initialized(tensor for slot, tensor in tensors if slot in skipped):
                owner._init_weights(argument)
            for (slot, tensor), version in zip(tensors, versions, strict=True):
                if tensor._version != version and slot not in skipped:
                    self._init_calls.setdefault(slot, []).append((owner, argument))

    def _match_stored_weights(self, source: str) -> dict[str, tuple[WeightConversion, str]]:
        """Return each tensor's conversion and its name there; raise with the names of all mismatches."""
        shapes = {name: torch.empty_like(tensor, device="meta") for name, tensor in self._stored.items()}
        converted: dict[str, tuple[WeightConversion, torch.Tensor]] = {}
        for conversion in load_conversions(self._model, shapes):
            try:
                result = conversion.convert(shapes.__getitem__, self._model)
            except (RuntimeError, ValueError, IndexError, KeyError) as error:
                inputs = _join_names([name for _, name in conversion.sources])
                raise ValueError(f"{source}: cannot make {conversion.target} from {inputs} ({error})") from error
            converted.update({name: (conversion, tensor) for name, tensor in result.items()})
        state = self._model.state_dict(keep_vars=True)  # tied tensors under all their names
        first_names = {id(tensor): self._fqn(slot) for slot, tensor in _unique_tensors(self._model)}
        names = {name: first_names.get(id(tensor), name) for name, tensor in state.items()}
        parameters = {name for name, _ in self.named_parameters()}
        mismatches = {
            "missing": sorted(parameters - {names[name] for name in converted if name in names}),
            "unexpected": [name for name in converted if name not in names and not self._is_legacy_key(name)],
            "of the wrong shape": [
                f"{name} {tuple(tensor.shape)}, expected {tuple(state[name].shape)}"
                for name, (_, tensor) in converted.items()
                if name in state and state[name].shape != tensor.shape
            ],
        }
        if any(mismatches.values()):
            details = "; ".join(f"{kind}: {_join_names(found)}" for kind, found in mismatches.items() if found)
            raise ValueError(
                f"the weights in {source} do not match its config, a {type(self._model).__name__}. {details}. Pass "
                "config.json and weights of the same model"
            )
        found: dict[str, tuple[WeightConversion, str]] = {}
        for name, (conversion, _) in converted.items():
            first_source = found.setdefault(names[name], (conversion, name)) if name in names else (conversion, name)
            if not self._has_equal_tied_values(first_source, conversion, name):
                raise ValueError(
                    f"{source} has different values for {first_source[1]} and {name}, which its config ties: "
                    'set "tie_word_embeddings" to false in the config'
                )
        return found

    def _has_equal_tied_values(
        self, first: tuple[WeightConversion, str], conversion: WeightConversion, name: str
    ) -> bool:
        """Return whether a tied tensor that is stored twice has equal values."""
        read = self._stored.__getitem__
        return first[1] == name or torch.equal(
            first[0].convert(read, self._model)[first[1]], conversion.convert(read, self._model)[name]
        )

    def _is_legacy_key(self, name: str) -> bool:
        """Return whether older versions of transformers stored the tensor and newer ones compute it."""
        patterns = [*self._model._keys_to_ignore_on_load_unexpected, r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$"]
        return name in self.slots or any(re.search(pattern, name) for pattern in patterns)


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for tensors in (module._parameters, module._buffers):
        yield from ((key, tensor) for key, tensor in tensors.items() if tensor is not None)


def _unique_tensors(module: nn.Module) -> Iterator[tuple[TensorSlot, torch.Tensor]]:
    """Yield each tensor of a module and its submodules once, at its first slot."""
    seen: set[int] = set()
    for inner in module.modules():
        for key, tensor in _own_tensors(inner):
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield (inner, key), tensor


def _move_to_meta(model: nn.Module) -> dict[TensorSlot, torch.Tensor]:
    """Move all tensors to the meta device, keep ties, and return the values of those that were not there."""
    values: dict[TensorSlot, torch.Tensor] = {}
    moved: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for key, tensor in tensors.items():
                if tensor is not None and not tensor.is_meta:
                    values[module, key] = tensor
                    tensors[key] = moved.setdefault(id(tensor), _empty_meta_like(tensor))  # type: ignore[assignment]
    return values


def _empty_meta_like(tensor: torch.Tensor) -> torch.Tensor:
    empty = torch.empty_like(tensor, device="meta")
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def _children_first(module: nn.Module, owner: Any) -> Iterator[tuple[nn.Module, Any]]:
    """Yield each module in transformers' initialization order, with the model whose ``_init_weights`` gets it."""
    model_class = importlib.import_module("transformers").PreTrainedModel
    for child in module.children():
        yield from _children_first(child, child if isinstance(child, model_class) else owner)
    yield module, owner


@contextmanager
def _mark_initialized(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Make transformers' initialization skip the tensors inside the context."""
    marked = list(tensors)
    for tensor in marked:
        setattr(tensor, _INITIALIZED_ATTR, True)
    try:
        yield
    finally:
        for tensor in marked:
            delattr(tensor, _INITIALIZED_ATTR)


def _join_names(names: list[str]) -> str:
    more = f" and {len(names) - _MAX_LISTED_NAMES} more" if len(names) > _MAX_LISTED_NAMES else ""
    return ", ".join(names[:_MAX_LISTED_NAMES]) + more


# ------------------------------------------------------------------------------------------------ conversion


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
