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

from zeroshard.tensor_parallel.plans import TensorPlan, name_matches_pattern, tensor_plan_for
from zeroshard.tensor_parallel.styles import NUM_FUSED_ATTR
from zeroshard.tensor_parallel.tp_shard import TPShard

ModuleRef = weakref.ref[nn.Module]  # a divided model carries its division: it must not keep itself alive
ParamLocations = list[tuple[ModuleRef, str]]  # where a parameter is found: module and key


@dataclass(frozen=True)
class TPParam:
    """How one parameter is a DTensor."""

    mesh: DeviceMesh  # the tensor axis
    placement: Placement
    shard: TPShard | None  # None: every rank has all of it
    full_shape: torch.Size  # of the whole

    @property
    def num_fused(self) -> int:
        """How many pieces are fused in the divided dimension."""
        return len(self.shard.rank_ranges[0]) if self.shard is not None else 1

    def to_dtensor(self, local: torch.Tensor) -> DTensor:
        """A DTensor of this rank's part."""
        stride = torch.empty(self.full_shape, device="meta").stride()
        return DTensor.from_local(
            local.detach(), self.mesh, [self.placement], run_check=False, shape=self.full_shape, stride=stride
        )


class TensorParallelState:
    """The parameters of a model that are DTensors over the tensor axis, by name, and how to undo it."""

    def __init__(self, model: nn.Module, parameters: dict[str, TPParam]) -> None:
        self.tp_params = parameters
        self._module_refs: list[ModuleRef] = [weakref.ref(module) for module in model.modules()]
        self.param_locations: dict[str, ParamLocations] = {}
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        for module in model.modules():
            for key, parameter in module._parameters.items():
                if parameter is not None:
                    self.param_locations.setdefault(names[id(parameter)], []).append((weakref.ref(module), key))
        self._added_hooks: list[tuple[dict[int, Any], int]] = []  # (a module's hooks, the one torch has added)
        self._resized_attributes: list[tuple[ModuleRef, str, Any]] = []
        self.original_params: dict[str, nn.Parameter] = {}  # the user's own parameters, in whose place DTensors are

    def replace_param(self, name: str, parameter: nn.Parameter) -> None:
        """Put a parameter in the place of the model's, wherever it is found; :meth:`undo` puts the other back."""
        self.original_params.setdefault(name, next(_params_at(self.param_locations[name])))
        self._set_param(name, parameter)

    def restore(self) -> None:
        """Make the model undivided again: its own parameters, no hooks of torch's."""
        for name, original in self.original_params.items():
            self._set_param(name, original)
        for hooks, number in self._added_hooks:
            hooks.pop(number, None)
        for narrowed, attribute, value in self._resized_attributes:
            setattr(narrowed(), attribute, value)
        for module in self._live_modules() if self._added_hooks else ():
            module.__dict__.pop("_distribute_module_applied", None)  # torch's mark, so that it can be done again

    def shard_optimizer_states(self, state: dict[str, Any], groups: list[list[str]]) -> None:
        """Divide an optimizer's whole states of parameters that stay DTensors, since the user has made them so."""
        for number, name in enumerate(name for group in groups for name in group):
            divided = self.tp_params.get(name) if name not in self.original_params else None
            states = state.get("state", {}).get(number, {}) if divided is not None else {}
            for key, value in states.items():
                if divided is not None and isinstance(value, torch.Tensor) and value.shape == divided.full_shape:
                    part = value if divided.shard is None else divided.shard.slice(value)
                    states[key] = divided.to_dtensor(part.contiguous())

    def _live_modules(self) -> list[nn.Module]:
        return [module for weak in self._module_refs if (module := weak()) is not None]

    def _set_param(self, name: str, parameter: nn.Parameter) -> None:
        for weak, key in self.param_locations[name]:
            if (module := weak()) is not None:
                module._parameters[key] = parameter

    def apply_plan(self, model: nn.Module, mesh: DeviceMesh, plan: TensorPlan) -> None:
        """Have torch hook the model, and find out how it divides the parameters: see [Note: dividing a model]."""
        before = [(hooks, set(hooks)) for module in self._live_modules() for hooks in _forward_hook_dicts(module)]
        buffers = [(module, dict(module._buffers)) for module in self._live_modules()]
        real = {name: next(_params_at(homes)) for name, homes in self.param_locations.items()}
        try:
            for name, parameter in real.items():
                meta = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
                self._set_param(name, meta)
            parallelize_module(model, mesh, plan.styles, src_data_rank=None)
            self.tp_params = {
                name: _make_tp_param(name, homes, mesh)
                for name, homes in self.param_locations.items()
                if any(isinstance(parameter, DTensor) for parameter in _params_at(homes))
            }
        finally:
            for name, parameter in real.items():
                self._set_param(name, parameter)
            self._added_hooks = [(hooks, number) for hooks, known in before for number in hooks if number not in known]
            for module, plain in buffers:  # torch makes DTensors of them too, which every rank has whole anyway
                module._buffers.update(plain)
        for pattern, attributes in plan.resized_attributes.items():
            for name, module in model.named_modules():
                for attribute in attributes if name_matches_pattern(name, pattern) else ():
                    width = getattr(module, attribute)
                    self._resized_attributes.append((weakref.ref(module), attribute, width))
                    setattr(module, attribute, width // mesh.size())


def parallelize(model: nn.Module, mesh: DeviceMesh, styles: Mapping[str, ParallelStyle] | None) -> TensorParallelState:
    """Divide a model along ``mesh``, the tensor axis: by ``styles``, as it is already, or by the plan known for it."""
    found = {name: p for name, p in model.named_parameters() if isinstance(p, DTensor)}
    if found and styles is not None:
        raise ValueError(
            f"{next(iter(found))!r} is a DTensor, so the model is parallelised already: leave tensor_plan out"
        )
    if found:
        return TensorParallelState(
            model, {name: _from_dtensor(name, parameter, mesh) for name, parameter in found.items()}
        )
    plan = TensorPlan(dict(styles)) if styles is not None else tensor_plan_for(model)
    if plan is None:
        raise ValueError(
            f"the mesh has a tensor axis of {mesh.size()} ranks, and no plan is known for {type(model).__name__}: give "
            "shard(tensor_plan={module name: style, …}), as torch.distributed.tensor.parallel.parallelize_module takes "
            "it, or parallelise the model before shard(). Known are zeroshard's GPT and Hugging Face's Llama and GPT-2"
        )
    _check_plan(model, plan)
    plan.check_divisible(mesh.size())
    division = TensorParallelState(model, {})
    try:
        division.apply_plan(model, mesh, plan)
        if not division.tp_params:
            raise ValueError("tensor_plan divides no parameter: leave the tensor axis out, or name layers to divide")
    except BaseException:
        division.restore()
        raise
    return division


def _check_plan(model: nn.Module, plan: TensorPlan) -> None:
    names = [name for name, _ in model.named_modules()]
    for pattern, style in plan.styles.items():
        if not isinstance(style, ParallelStyle):
            raise TypeError(
                f"tensor_plan[{pattern!r}] is a torch.distributed.tensor.parallel style, got {type(style).__name__}"
            )
        if not any(name_matches_pattern(name, pattern) for name in names):
            raise ValueError(f"tensor_plan[{pattern!r}] matches no module; modules are named like {names[1:6]}")


def _forward_hook_dicts(module: nn.Module) -> tuple[dict[int, Any], ...]:
    return (
        module._forward_pre_hooks,
        module._forward_hooks,
        module._forward_pre_hooks_with_kwargs,
        module._forward_hooks_with_kwargs,
    )


def _params_at(locations: ParamLocations) -> Iterator[nn.Parameter]:
    """The parameter, as each module has it."""
    for weak, key in locations:
        module = weak()
        parameter = module._parameters[key] if module is not None else None
        if parameter is not None:
            yield parameter


def _make_tp_param(name: str, locations: ParamLocations, mesh: DeviceMesh) -> TPParam:
    """How torch has divided a parameter, the same wherever it is found."""
    found = list(_params_at(locations))
    placements = {p.placements if isinstance(p, DTensor) else None for p in found}
    first = found[0]
    if len(placements) > 1 or not isinstance(first, DTensor):
        raise ValueError(
            f"{name!r} is used by {len(locations)} modules, and the plan divides it in one and not, or otherwise, in "
            "another: a shared parameter is divided alike everywhere"
        )
    return _from_dtensor(name, first, mesh)


def _from_dtensor(name: str, parameter: DTensor, mesh: DeviceMesh) -> TPParam:
    placements = parameter.placements
    if parameter.device_mesh != mesh:
        raise ValueError(
            f"{name!r} is a DTensor over {parameter.device_mesh}, and the tensor axis is {mesh}: parallelise the model "
            "over the tensor axis of the mesh that shard() is given, mesh['tensor']"
        )
    (placement,) = placements
    if isinstance(placement, Replicate):
        return TPParam(mesh, placement, None, parameter.shape)
    if type(placement) is not Shard:
        raise ValueError(f"{name!r} is placed as {placement} on the tensor axis: Shard and Replicate can be sharded")
    pieces = getattr(parameter, NUM_FUSED_ATTR, 1)
    share = TPShard.split_evenly(parameter.shape, placement.dim, mesh.size(), mesh.get_local_rank(), pieces)
    return TPParam(mesh, placement, share, parameter.shape)
