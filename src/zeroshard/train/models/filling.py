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

from zeroshard.train.models.conversion import Recipe, loading

Slot = tuple[nn.Module, str]  # a tensor's place: a module that holds it, and its key there
_MARK = "_is_hf_initialized"
_SHOWN = 12  # names of a kind in an error


class Filling:
    """Gives modules their values: the stored ones, or transformers' own initialisation where nothing is stored."""

    def __init__(self, model: Any, stored: Mapping[str, torch.Tensor] | None, where: str) -> None:
        self._model, self._stored = model, stored or {}
        self._made = _evict(model)
        self._prefixes = {module: f"{name}." if name else "" for name, module in model.named_modules()}
        self.slots = {self._name(slot): slot for slot, _ in _below(model)}  # tied tensors under their first name
        self._recipes = {} if stored is None else self._match(where)
        self._writers: dict[
            Slot, list[tuple[Any, nn.Module]]
        ] = {}  # (the model whose _init_weights it is, its argument)
        self._rehearse()
        unstored = {slot: name for name, slot in self.slots.items() if name not in self._recipes}
        self._made = {s: t for s, t in self._made.items() if s in unstored and s not in self._writers}
        lost = [name for slot, name in unstored.items() if slot not in self._writers and slot not in self._made]
        if lost:
            absent = "" if stored is None else f", and {where} does not hold them"
            raise ValueError(
                f"transformers cannot initialise {_listed(lost)} of {type(model).__name__} by itself{absent}: "
                "give a directory with all its weights"
            )

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The model's parameters under its own names, whatever adapters were put around it since."""
        for name, (module, key) in self.slots.items():
            parameter = module._parameters.get(key)
            if parameter is not None:
                yield name, parameter

    def saved_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The persistent ones of the model's buffers."""
        for name, (module, key) in self.slots.items():
            buffer = module._buffers.get(key)
            if buffer is not None and key not in module._non_persistent_buffers_set:
                yield name, buffer

    def __contains__(self, module: nn.Module) -> bool:
        return module in self._prefixes

    @torch.no_grad()
    def fill(self, module: nn.Module) -> None:
        """Fill a module's own parameters and buffers. Only the first rank reads: its values go to all."""
        reads = not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0
        for key, tensor in _own(module):
            slot, name = (module, key), self._name((module, key))
            if name in self._recipes:
                recipe, made = self._recipes[name]
                if reads:
                    tensor.copy_(recipe.make(self._stored.__getitem__, self._model)[made])
            elif slot in self._made:
                tensor.copy_(self._made[slot])
            for owner, writer in self._writers.get(slot, ()):  # none where it is stored, or tied and another's to fill
                with _marked(other for _, other in _below(writer) if other is not tensor):
                    owner._init_weights(writer)

    def _name(self, slot: Slot) -> str:
        return f"{self._prefixes[slot[0]]}{slot[1]}"

    def _rehearse(self) -> None:
        """See [Note: who initialises what]."""
        for writer, owner in _children_first(self._model, self._model):
            below = list(_below(writer))
            kept = {
                slot for slot, _ in below if self._name(slot) in self._recipes or self._name(slot) not in self.slots
            }
            versions = [tensor._version for _, tensor in below]
            with _marked(tensor for slot, tensor in below if slot in kept):
                owner._init_weights(writer)
            for (slot, tensor), version in zip(below, versions, strict=True):
                if tensor._version != version and slot not in kept:
                    self._writers.setdefault(slot, []).append((owner, writer))

    def _match(self, where: str) -> dict[str, tuple[Recipe, str]]:
        """Find what makes each tensor, and as what; raise with the names of all that does not match."""
        shapes = {name: torch.empty_like(tensor, device="meta") for name, tensor in self._stored.items()}
        made: dict[str, tuple[Recipe, torch.Tensor]] = {}
        for recipe in loading(self._model, shapes):
            try:
                result = recipe.make(shapes.__getitem__, self._model)
            except (RuntimeError, ValueError, IndexError, KeyError) as error:
                raise ValueError(f"{where}: {_listed(recipe.names)} do not make {recipe.target} ({error})") from error
            made.update({name: (recipe, tensor) for name, tensor in result.items()})
        everything = self._model.state_dict(keep_vars=True)  # tied tensors under each of their names
        first = {id(tensor): self._name(slot) for slot, tensor in _below(self._model)}
        names = {name: first.get(id(tensor), name) for name, tensor in everything.items()}
        parameters = {name for name, _ in self.parameters()}
        _refuse(
            f"{where} does not hold the weights of the {type(self._model).__name__} that its config describes",
            missing=sorted(parameters - {names[name] for name in made if name in names}),
            unexpected=[name for name in made if name not in names and not self._is_leftover(name)],
            misshapen=[
                f"{name} {tuple(tensor.shape)}, wanted {tuple(everything[name].shape)}"
                for name, (_, tensor) in made.items()
                if name in everything and everything[name].shape != tensor.shape
            ],
        )
        found: dict[str, tuple[Recipe, str]] = {}
        for name, (recipe, _) in made.items():
            kept = found.setdefault(names[name], (recipe, name)) if name in names else (recipe, name)
            if not self._is_twin(kept, recipe, name):
                raise ValueError(
                    f"{where} holds different values for {kept[1]} and {name}, which its config ties: "
                    'set "tie_word_embeddings" to false there'
                )
        return found

    def _is_twin(self, kept: tuple[Recipe, str], recipe: Recipe, name: str) -> bool:
        """Whether a tied tensor that is stored twice has the same values both times."""
        read = self._stored.__getitem__
        return kept[1] == name or torch.equal(
            kept[0].make(read, self._model)[kept[1]], recipe.make(read, self._model)[name]
        )

    def _is_leftover(self, name: str) -> bool:
        """Whether older versions of transformers stored the tensor and newer ones compute it."""
        patterns = [*self._model._keys_to_ignore_on_load_unexpected, r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$"]
        return name in self.slots or any(re.search(pattern, name) for pattern in patterns)


def _own(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for tensors in (module._parameters, module._buffers):
        yield from ((key, tensor) for key, tensor in tensors.items() if tensor is not None)


def _below(module: nn.Module) -> Iterator[tuple[Slot, torch.Tensor]]:
    """Each tensor of a module and those inside it, at its first place."""
    seen: set[int] = set()
    for inner in module.modules():
        for key, tensor in _own(inner):
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield (inner, key), tensor


def _evict(model: nn.Module) -> dict[Slot, torch.Tensor]:
    """Put everything on the meta device, tied tensors as one, and return what was elsewhere."""
    gone: dict[Slot, torch.Tensor] = {}
    moved: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for key, tensor in tensors.items():
                if tensor is not None and not tensor.is_meta:
                    gone[module, key] = tensor
                    tensors[key] = moved.setdefault(id(tensor), _on_meta(tensor))  # type: ignore[assignment]
    return gone


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    empty = torch.empty_like(tensor, device="meta")
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def _children_first(module: nn.Module, owner: Any) -> Iterator[tuple[nn.Module, Any]]:
    """Each module in the order transformers initialises them, with the model whose ``_init_weights`` it is given to."""
    model_class = importlib.import_module("transformers").PreTrainedModel
    for child in module.children():
        yield from _children_first(child, child if isinstance(child, model_class) else owner)
    yield module, owner


@contextmanager
def _marked(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Have transformers' initialisation leave the tensors alone."""
    marked = list(tensors)
    for tensor in marked:
        setattr(tensor, _MARK, True)
    try:
        yield
    finally:
        for tensor in marked:
            delattr(tensor, _MARK)


def _refuse(complaint: str, missing: list[str], unexpected: list[str], misshapen: list[str]) -> None:
    kinds = {"missing": missing, "unexpected": unexpected, "of another shape": misshapen}
    told = "; ".join(f"{kind}: {_listed(names)}" for kind, names in kinds.items() if names)
    if told:
        raise ValueError(f"{complaint}. {told}. Give config.json and weights of one and the same model")


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
