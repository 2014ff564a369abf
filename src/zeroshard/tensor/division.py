"""Division: a model whose parameters are divided along the tensor axis, and how it becomes one.

[Note: dividing a model]
torch's ``parallelize_module`` makes parameters DTensors and hooks modules. It is let loose on the model with meta
parameters in place of the real ones, which costs neither memory nor communication: what it leaves behind are the hooks
and, for each parameter, how it is to be divided. The real values come later, unit by unit (``engine/build.py``), from
the first rank, so that a divided model begins with the values it would have undivided.

A model that the user has parallelised already is taken as it is.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from zeroshard.tensor.plans import Plan, matches, plan_of
from zeroshard.tensor.share import Share
from zeroshard.tensor.styles import PIECES

Weak = weakref.ref[nn.Module]  # a divided model carries its division: it must not keep itself alive
Homes = list[tuple[Weak, str]]  # where a parameter is found: module and key


@dataclass(frozen=True)
class Divided:
    """How one parameter is a DTensor."""

    mesh: DeviceMesh  # the tensor axis
    placement: Placement
    share: Share | None  # None: every rank has all of it
    shape: torch.Size  # of the whole

    @property
    def pieces(self) -> int:
        """How many pieces are fused in the divided dimension."""
        return len(self.share.spans[0]) if self.share is not None else 1

    def wrap(self, local: torch.Tensor) -> DTensor:
        """A DTensor of this rank's part."""
        stride = torch.empty(self.shape, device="meta").stride()
        return DTensor.from_local(
            local.detach(), self.mesh, [self.placement], run_check=False, shape=self.shape, stride=stride
        )


class Division:
    """The parameters of a model that are DTensors over the tensor axis, by name, and how to undo it."""

    def __init__(self, model: nn.Module, parameters: dict[str, Divided]) -> None:
        self.parameters = parameters
        self._modules: list[Weak] = [weakref.ref(module) for module in model.modules()]
        self.homes: dict[str, Homes] = {}
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        for module in model.modules():
            for key, parameter in module._parameters.items():
                if parameter is not None:
                    self.homes.setdefault(names[id(parameter)], []).append((weakref.ref(module), key))
        self._hooks: list[tuple[dict[int, Any], int]] = []  # (a module's hooks, the one torch has added)
        self._attributes: list[tuple[Weak, str, Any]] = []
        self.originals: dict[str, nn.Parameter] = {}  # the user's own parameters, in whose place DTensors are

    def replace(self, name: str, parameter: nn.Parameter) -> None:
        """Put a parameter in the place of the model's, wherever it is found; :meth:`undo` puts the other back."""
        self.originals.setdefault(name, next(_found(self.homes[name])))
        self._set(name, parameter)

    def undo(self) -> None:
        """Make the model undivided again: its own parameters, no hooks of torch's."""
        for name, original in self.originals.items():
            self._set(name, original)
        for hooks, number in self._hooks:
            hooks.pop(number, None)
        for narrowed, attribute, value in self._attributes:
            setattr(narrowed(), attribute, value)
        for module in self._alive() if self._hooks else ():
            module.__dict__.pop("_distribute_module_applied", None)  # torch's mark, so that it can be done again

    def divide_states(self, state: dict[str, Any], groups: list[list[str]]) -> None:
        """Divide an optimizer's whole states of parameters that stay DTensors, since the user has made them so."""
        for number, name in enumerate(name for group in groups for name in group):
            divided = self.parameters.get(name) if name not in self.originals else None
            states = state.get("state", {}).get(number, {}) if divided is not None else {}
            for key, value in states.items():
                if divided is not None and isinstance(value, torch.Tensor) and value.shape == divided.shape:
                    part = value if divided.share is None else divided.share.take(value)
                    states[key] = divided.wrap(part.contiguous())

    def _alive(self) -> list[nn.Module]:
        return [module for weak in self._modules if (module := weak()) is not None]

    def _set(self, name: str, parameter: nn.Parameter) -> None:
        for weak, key in self.homes[name]:
            if (module := weak()) is not None:
                module._parameters[key] = parameter

    def apply(self, model: nn.Module, mesh: DeviceMesh, plan: Plan) -> None:
        """Have torch hook the model, and find out how it divides the parameters: see [Note: dividing a model]."""
        before = [(hooks, set(hooks)) for module in self._alive() for hooks in _hooks_of(module)]
        buffers = [(module, dict(module._buffers)) for module in self._alive()]
        real = {name: next(_found(homes)) for name, homes in self.homes.items()}
        try:
            for name, parameter in real.items():
                meta = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
                self._set(name, meta)
            parallelize_module(model, mesh, plan.styles, src_data_rank=None)
            self.parameters = {
                name: _divided(name, homes, mesh)
                for name, homes in self.homes.items()
                if any(isinstance(parameter, DTensor) for parameter in _found(homes))
            }
        finally:
            for name, parameter in real.items():
                self._set(name, parameter)
            self._hooks = [(hooks, number) for hooks, known in before for number in hooks if number not in known]
            for module, plain in buffers:  # torch makes DTensors of them too, which every rank has whole anyway
                module._buffers.update(plain)
        for pattern, attributes in plan.narrowed.items():
            for name, module in model.named_modules():
                for attribute in attributes if matches(name, pattern) else ():
                    width = getattr(module, attribute)
                    self._attributes.append((weakref.ref(module), attribute, width))
                    setattr(module, attribute, width // mesh.size())


def divide(model: nn.Module, mesh: DeviceMesh, styles: Mapping[str, ParallelStyle] | None) -> Division:
    """Divide a model along ``mesh``, the tensor axis: by ``styles``, as it is already, or by the plan known for it."""
    found = {name: p for name, p in model.named_parameters() if isinstance(p, DTensor)}
    if found and styles is not None:
        raise ValueError(
            f"{next(iter(found))!r} is a DTensor, so the model is parallelised already: leave tensor_plan out"
        )
    if found:
        return Division(model, {name: _as_is(name, parameter, mesh) for name, parameter in found.items()})
    plan = Plan(dict(styles)) if styles is not None else plan_of(model)
    if plan is None:
        raise ValueError(
            f"the mesh has a tensor axis of {mesh.size()} ranks, and no plan is known for {type(model).__name__}: give "
            "shard(tensor_plan={module name: style, …}), as torch.distributed.tensor.parallel.parallelize_module takes "
            "it, or parallelise the model before shard(). Known are zeroshard's GPT and Hugging Face's Llama and GPT-2"
        )
    _check(model, plan)
    plan.check(mesh.size())
    division = Division(model, {})
    try:
        division.apply(model, mesh, plan)
        if not division.parameters:
            raise ValueError("tensor_plan divides no parameter: leave the tensor axis out, or name layers to divide")
    except BaseException:
        division.undo()
        raise
    return division


def _check(model: nn.Module, plan: Plan) -> None:
    names = [name for name, _ in model.named_modules()]
    for pattern, style in plan.styles.items():
        if not isinstance(style, ParallelStyle):
            raise TypeError(
                f"tensor_plan[{pattern!r}] is a torch.distributed.tensor.parallel style, got {type(style).__name__}"
            )
        if not any(matches(name, pattern) for name in names):
            raise ValueError(f"tensor_plan[{pattern!r}] matches no module; modules are named like {names[1:6]}")


def _hooks_of(module: nn.Module) -> tuple[dict[int, Any], ...]:
    return (
        module._forward_pre_hooks,
        module._forward_hooks,
        module._forward_pre_hooks_with_kwargs,
        module._forward_hooks_with_kwargs,
    )


def _found(homes: Homes) -> Iterator[nn.Parameter]:
    """The parameter, as each module has it."""
    for weak, key in homes:
        module = weak()
        parameter = module._parameters[key] if module is not None else None
        if parameter is not None:
            yield parameter


def _divided(name: str, homes: Homes, mesh: DeviceMesh) -> Divided:
    """How torch has divided a parameter, the same wherever it is found."""
    found = list(_found(homes))
    placements = {p.placements if isinstance(p, DTensor) else None for p in found}
    first = found[0]
    if len(placements) > 1 or not isinstance(first, DTensor):
        raise ValueError(
            f"{name!r} is used by {len(homes)} modules, and the plan divides it in one and not, or otherwise, in "
            "another: a shared parameter is divided alike everywhere"
        )
    return _as_is(name, first, mesh)


def _as_is(name: str, parameter: DTensor, mesh: DeviceMesh) -> Divided:
    placements = parameter.placements
    if parameter.device_mesh != mesh:
        raise ValueError(
            f"{name!r} is a DTensor over {parameter.device_mesh}, and the tensor axis is {mesh}: parallelise the model "
            "over the tensor axis of the mesh that shard() is given, mesh['tensor']"
        )
    (placement,) = placements
    if isinstance(placement, Replicate):
        return Divided(mesh, placement, None, parameter.shape)
    if type(placement) is not Shard:
        raise ValueError(f"{name!r} is placed as {placement} on the tensor axis: Shard and Replicate can be sharded")
    pieces = getattr(parameter, PIECES, 1)
    share = Share.even(parameter.shape, placement.dim, mesh.size(), mesh.get_local_rank(), pieces)
    return Divided(mesh, placement, share, parameter.shape)
