"""Filling: how the modules of a transformers model on the meta device get their values, one by one.

[Note: who initialises what]
transformers initialises by ``_init_weights(module)``, children before parents, and a parent may write into its children
(GPT-2's attention draws its projection anew, narrower). ``zeroshard.shard`` fills modules one by one, in another order,
and wants a module's tensors final when its turn is over. So every ``_init_weights`` is first rehearsed on the meta
device, where drawing costs nothing but raises the version of each tensor written. Then, at a module's turn, all that
write into it run in transformers' order, while every other tensor wears the mark by which transformers knows what not
to initialise. Buffers that are not stored (rotary frequencies, masks) get their values in the same way, which is also
how ``from_pretrained`` makes them. A few constructors draw on the CPU even under ``torch.device("meta")``: what they
made is put on the meta device here, and kept for those tensors that nothing else gives values to.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zeroshard.train.models.weight_conversion import WeightConversion, load_conversions

TensorSlot = tuple[nn.Module, str]  # a tensor's place: a module that holds it, and its key there
_INITIALIZED_ATTR = "_is_hf_initialized"
_MAX_LISTED_NAMES = 12  # names of a kind in an error


class WeightInitializer:
    """Gives modules their values: the stored ones, or transformers' own initialisation where nothing is stored."""

    def __init__(self, model: Any, stored: Mapping[str, torch.Tensor] | None, source: str) -> None:
        self._model, self._stored = model, stored or {}
        self._constructor_values = _move_to_meta(model)
        self._prefixes = {module: f"{name}." if name else "" for name, module in model.named_modules()}
        self.slots = {
            self._fqn(slot): slot for slot, _ in _unique_tensors(model)
        }  # tied tensors under their first name
        self._conversions = {} if stored is None else self._match_stored_weights(source)
        self._init_calls: dict[
            TensorSlot, list[tuple[Any, nn.Module]]
        ] = {}  # (the model whose _init_weights it is, its argument)
        self._dry_run_init()
        unstored = {slot: name for name, slot in self.slots.items() if name not in self._conversions}
        self._constructor_values = {
            s: t for s, t in self._constructor_values.items() if s in unstored and s not in self._init_calls
        }
        lost = [
            name
            for slot, name in unstored.items()
            if slot not in self._init_calls and slot not in self._constructor_values
        ]
        if lost:
            absent = "" if stored is None else f", and {source} does not hold them"
            raise ValueError(
                f"transformers cannot initialise {_join_names(lost)} of {type(model).__name__} by itself{absent}: "
                "give a directory with all its weights"
            )

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The model's parameters under its own names, whatever adapters were put around it since."""
        for name, (module, key) in self.slots.items():
            parameter = module._parameters.get(key)
            if parameter is not None:
                yield name, parameter

    def named_persistent_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The persistent ones of the model's buffers."""
        for name, (module, key) in self.slots.items():
            buffer = module._buffers.get(key)
            if buffer is not None and key not in module._non_persistent_buffers_set:
                yield name, buffer

    def __contains__(self, module: nn.Module) -> bool:
        return module in self._prefixes

    @torch.no_grad()
    def initialize(self, module: nn.Module) -> None:
        """Fill a module's own parameters and buffers. Only the first rank reads: its values go to all."""
        reads = not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0
        for key, tensor in _own_tensors(module):
            slot, name = (module, key), self._fqn((module, key))
            if name in self._conversions:
                recipe, made = self._conversions[name]
                if reads:
                    tensor.copy_(recipe.convert(self._stored.__getitem__, self._model)[made])
            elif slot in self._constructor_values:
                tensor.copy_(self._constructor_values[slot])
            for owner, writer in self._init_calls.get(
                slot, ()
            ):  # none where it is stored, or tied and another's to fill
                with _mark_initialized(other for _, other in _unique_tensors(writer) if other is not tensor):
                    owner._init_weights(writer)

    def _fqn(self, slot: TensorSlot) -> str:
        return f"{self._prefixes[slot[0]]}{slot[1]}"

    def _dry_run_init(self) -> None:
        """See [Note: who initialises what]."""
        for writer, owner in _children_first(self._model, self._model):
            below = list(_unique_tensors(writer))
            kept = {
                slot for slot, _ in below if self._fqn(slot) in self._conversions or self._fqn(slot) not in self.slots
            }
            versions = [tensor._version for _, tensor in below]
            with _mark_initialized(tensor for slot, tensor in below if slot in kept):
                owner._init_weights(writer)
            for (slot, tensor), version in zip(below, versions, strict=True):
                if tensor._version != version and slot not in kept:
                    self._init_calls.setdefault(slot, []).append((owner, writer))

    def _match_stored_weights(self, source: str) -> dict[str, tuple[WeightConversion, str]]:
        """Find what makes each tensor, and as what; raise with the names of all that does not match."""
        shapes = {name: torch.empty_like(tensor, device="meta") for name, tensor in self._stored.items()}
        made: dict[str, tuple[WeightConversion, torch.Tensor]] = {}
        for recipe in load_conversions(self._model, shapes):
            try:
                result = recipe.convert(shapes.__getitem__, self._model)
            except (RuntimeError, ValueError, IndexError, KeyError) as error:
                raise ValueError(
                    f"{source}: {_join_names(recipe.source_names)} do not make {recipe.target} ({error})"
                ) from error
            made.update({name: (recipe, tensor) for name, tensor in result.items()})
        everything = self._model.state_dict(keep_vars=True)  # tied tensors under each of their names
        first = {id(tensor): self._fqn(slot) for slot, tensor in _unique_tensors(self._model)}
        names = {name: first.get(id(tensor), name) for name, tensor in everything.items()}
        parameters = {name for name, _ in self.named_parameters()}
        _raise_on_mismatch(
            f"{source} does not hold the weights of the {type(self._model).__name__} that its config describes",
            missing=sorted(parameters - {names[name] for name in made if name in names}),
            unexpected=[name for name in made if name not in names and not self._is_legacy_key(name)],
            misshapen=[
                f"{name} {tuple(tensor.shape)}, wanted {tuple(everything[name].shape)}"
                for name, (_, tensor) in made.items()
                if name in everything and everything[name].shape != tensor.shape
            ],
        )
        found: dict[str, tuple[WeightConversion, str]] = {}
        for name, (recipe, _) in made.items():
            kept = found.setdefault(names[name], (recipe, name)) if name in names else (recipe, name)
            if not self._has_equal_tied_values(kept, recipe, name):
                raise ValueError(
                    f"{source} holds different values for {kept[1]} and {name}, which its config ties: "
                    'set "tie_word_embeddings" to false there'
                )
        return found

    def _has_equal_tied_values(
        self, first: tuple[WeightConversion, str], conversion: WeightConversion, name: str
    ) -> bool:
        """Whether a tied tensor that is stored twice has the same values both times."""
        read = self._stored.__getitem__
        return first[1] == name or torch.equal(
            first[0].convert(read, self._model)[first[1]], conversion.convert(read, self._model)[name]
        )

    def _is_legacy_key(self, name: str) -> bool:
        """Whether older versions of transformers stored the tensor and newer ones compute it."""
        patterns = [*self._model._keys_to_ignore_on_load_unexpected, r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$"]
        return name in self.slots or any(re.search(pattern, name) for pattern in patterns)


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for tensors in (module._parameters, module._buffers):
        yield from ((key, tensor) for key, tensor in tensors.items() if tensor is not None)


def _unique_tensors(module: nn.Module) -> Iterator[tuple[TensorSlot, torch.Tensor]]:
    """Each tensor of a module and those inside it, at its first place."""
    seen: set[int] = set()
    for inner in module.modules():
        for key, tensor in _own_tensors(inner):
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield (inner, key), tensor


def _move_to_meta(model: nn.Module) -> dict[TensorSlot, torch.Tensor]:
    """Put everything on the meta device, tied tensors as one, and return what was elsewhere."""
    gone: dict[TensorSlot, torch.Tensor] = {}
    moved: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for key, tensor in tensors.items():
                if tensor is not None and not tensor.is_meta:
                    gone[module, key] = tensor
                    tensors[key] = moved.setdefault(id(tensor), _empty_meta_like(tensor))  # type: ignore[assignment]
    return gone


def _empty_meta_like(tensor: torch.Tensor) -> torch.Tensor:
    empty = torch.empty_like(tensor, device="meta")
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def _children_first(module: nn.Module, owner: Any) -> Iterator[tuple[nn.Module, Any]]:
    """Each module in the order transformers initialises them, with the model whose ``_init_weights`` it is given to."""
    model_class = importlib.import_module("transformers").PreTrainedModel
    for child in module.children():
        yield from _children_first(child, child if isinstance(child, model_class) else owner)
    yield module, owner


@contextmanager
def _mark_initialized(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Have transformers' initialisation leave the tensors alone."""
    marked = list(tensors)
    for tensor in marked:
        setattr(tensor, _INITIALIZED_ATTR, True)
    try:
        yield
    finally:
        for tensor in marked:
            delattr(tensor, _INITIALIZED_ATTR)


def _raise_on_mismatch(message: str, missing: list[str], unexpected: list[str], misshapen: list[str]) -> None:
    kinds = {"missing": missing, "unexpected": unexpected, "of another shape": misshapen}
    told = "; ".join(f"{kind}: {_join_names(names)}" for kind, names in kinds.items() if names)
    if told:
        raise ValueError(f"{message}. {told}. Give config.json and weights of one and the same model")


def _join_names(names: list[str]) -> str:
    more = f" and {len(names) - _MAX_LISTED_NAMES} more" if len(names) > _MAX_LISTED_NAMES else ""
    return ", ".join(names[:_MAX_LISTED_NAMES]) + more
