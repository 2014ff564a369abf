"""parallelize: shard a model's parameters along the tensor axis.

[Note: tensor parallelism]
torch's ``parallelize_module`` turns parameters into DTensors and adds hooks to modules. It runs on the model with meta
parameters in place of the real ones, which costs neither memory nor communication. Its results are the hooks and the
placement of each parameter. The real values follow unit by unit from rank 0 (``engine/build.py``), so a tensor-parallel
model starts with the same values as one without tensor parallelism.

A model that the user has already parallelized is used as it is.
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

from zeroshard.tensor_parallel.plans import TensorPlan, modules_matching, tensor_plan_for
from zeroshard.tensor_parallel.styles import NUM_FUSED_ATTR
from zeroshard.tensor_parallel.tp_shard import TPShard

ModuleRef = weakref.ref[nn.Module]  # weak: the model refers to its TensorParallelState and must not keep itself alive
ParamLocations = list[tuple[ModuleRef, str]]  # the modules and keys of a parameter


@dataclass(frozen=True)
class TPParam:
    """How one parameter is placed as a DTensor."""

    mesh: DeviceMesh  # the tensor axis
    placement: Placement
    shard: TPShard | None  # None: replicated over the tensor axis
    full_shape: torch.Size

    @property
    def num_fused(self) -> int:
        """Number of matrices fused in the sharded dimension."""
        return len(self.shard.rank_ranges[0]) if self.shard is not None else 1

    def to_dtensor(self, local: torch.Tensor) -> DTensor:
        """Return the DTensor whose local tensor is ``local``."""
        stride = torch.empty(self.full_shape, device="meta").stride()
        return DTensor.from_local(
            local.detach(), self.mesh, [self.placement], run_check=False, shape=self.full_shape, stride=stride
        )


class TensorParallelState:
    """The DTensor parameters of a model over the tensor axis, by name, and what is needed to undo it."""

    def __init__(self, model: nn.Module, parameters: dict[str, TPParam]) -> None:
        self.tp_params = parameters
        self._module_refs: list[ModuleRef] = [weakref.ref(module) for module in model.modules()]
        self.param_locations: dict[str, ParamLocations] = {}
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        for module in model.modules():
            for key, parameter in module._parameters.items():
                if parameter is not None:
                    self.param_locations.setdefault(names[id(parameter)], []).append((weakref.ref(module), key))
        self._added_hooks: list[tuple[dict[int, Any], int]] = []  # (hook dict of a module, id of the hook torch added)
        self._resized_attributes: list[tuple[ModuleRef, str, Any]] = []
        self.original_params: dict[str, nn.Parameter] = {}  # the user's parameters that DTensors replaced

    def replace_param(self, name: str, parameter: nn.Parameter) -> None:
        """Replace a parameter of the model in all its modules; :meth:`restore` undoes it."""
        self.original_params.setdefault(name, next(_params_at(self.param_locations[name])))
        self._set_param(name, parameter)

    def restore(self) -> None:
        """Undo tensor parallelism: restore the model's own parameters and remove torch's hooks."""
        for name, original in self.original_params.items():
            self._set_param(name, original)
        for hooks, hook_id in self._added_hooks:
            hooks.pop(hook_id, None)
        for module_ref, attribute, value in self._resized_attributes:
            setattr(module_ref(), attribute, value)
        for module in self._live_modules() if self._added_hooks else ():
            module.__dict__.pop("_distribute_module_applied", None)  # torch's mark: it can be parallelized again

    def shard_optimizer_states(self, state: dict[str, Any], groups: list[list[str]]) -> None:
        """Shard the full optimizer states of parameters that stay DTensors because the user parallelized them."""
        for index, name in enumerate(name for group in groups for name in group):
            tp_param = self.tp_params.get(name) if name not in self.original_params else None
            states = state.get("state", {}).get(index, {}) if tp_param is not None else {}
            for key, value in states.items():
                if tp_param is not None and isinstance(value, torch.Tensor) and value.shape == tp_param.full_shape:
                    local = value if tp_param.shard is None else tp_param.shard.slice(value)
                    states[key] = tp_param.to_dtensor(local.contiguous())

    def _live_modules(self) -> list[nn.Module]:
        return [module for module_ref in self._module_refs if (module := module_ref()) is not None]

    def _set_param(self, name: str, parameter: nn.Parameter) -> None:
        for module_ref, key in self.param_locations[name]:
            if (module := module_ref()) is not None:
                module._parameters[key] = parameter

    def apply_plan(self, model: nn.Module, mesh: DeviceMesh, plan: TensorPlan) -> None:
        """Let torch add its hooks, and record how it shards the parameters: see [Note: tensor parallelism]."""
        hooks_before = [(hooks, set(hooks)) for module in self._live_modules() for hooks in _forward_hook_dicts(module)]
        buffers = [(module, dict(module._buffers)) for module in self._live_modules()]
        real_params = {name: next(_params_at(locations)) for name, locations in self.param_locations.items()}
        try:
            for name, parameter in real_params.items():
                meta = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
                self._set_param(name, meta)
            parallelize_module(model, mesh, plan.styles, src_data_rank=None)
            self.tp_params = {
                name: _make_tp_param(name, locations, mesh)
                for name, locations in self.param_locations.items()
                if any(isinstance(parameter, DTensor) for parameter in _params_at(locations))
            }
        finally:
            for name, parameter in real_params.items():
                self._set_param(name, parameter)
            self._added_hooks = [
                (hooks, hook_id) for hooks, known_ids in hooks_before for hook_id in hooks if hook_id not in known_ids
            ]
            for module, plain_buffers in buffers:  # torch turns them into DTensors too, but they are replicated anyway
                module._buffers.update(plain_buffers)
        for module, attribute, width in plan.resize_attributes(model, mesh.size()):
            self._resized_attributes.append((weakref.ref(module), attribute, width))


def parallelize(model: nn.Module, mesh: DeviceMesh, styles: Mapping[str, ParallelStyle] | None) -> TensorParallelState:
    """Shard a model along ``mesh``, the tensor axis: by ``styles``, by its existing DTensors, or by the known plan."""
    dtensors = {name: p for name, p in model.named_parameters() if isinstance(p, DTensor)}
    if dtensors and styles is not None:
        raise ValueError(
            f"{next(iter(dtensors))!r} is a DTensor, so the model is already parallelized: do not pass tensor_plan"
        )
    if dtensors:
        return TensorParallelState(
            model, {name: _from_dtensor(name, parameter, mesh) for name, parameter in dtensors.items()}
        )
    plan = TensorPlan(dict(styles)) if styles is not None else tensor_plan_for(model)
    if plan is None:
        raise ValueError(
            f"the mesh has a tensor axis of {mesh.size()} ranks, but no plan is known for {type(model).__name__}: pass "
            "shard(tensor_plan={module name: style, …}), in the format of torch's parallelize_module, or parallelize "
            "the model before shard(). Plans exist for zeroshard's GPT and Hugging Face's Llama and GPT-2"
        )
    _check_plan(model, plan)
    plan.check_divisible(mesh.size())
    state = TensorParallelState(model, {})
    try:
        state.apply_plan(model, mesh, plan)
        if not state.tp_params:
            raise ValueError("tensor_plan shards no parameter: select layers, or use a mesh without a tensor axis")
    except BaseException:
        state.restore()
        raise
    return state


def _check_plan(model: nn.Module, plan: TensorPlan) -> None:
    for pattern, style in plan.styles.items():
        if not isinstance(style, ParallelStyle):
            expected = "a style of torch.distributed.tensor.parallel"
            raise TypeError(f"tensor_plan[{pattern!r}] must be {expected}, got {type(style).__name__}")
        if next(modules_matching(model, pattern), None) is None:
            names = [name for name, _ in model.named_modules()]
            raise ValueError(f"tensor_plan[{pattern!r}] matches no module. Examples of module names: {names[1:6]}")


def _forward_hook_dicts(module: nn.Module) -> tuple[dict[int, Any], ...]:
    return (
        module._forward_pre_hooks,
        module._forward_hooks,
        module._forward_pre_hooks_with_kwargs,
        module._forward_hooks_with_kwargs,
    )


def _params_at(locations: ParamLocations) -> Iterator[nn.Parameter]:
    """Yield the parameter from each module that has it."""
    for module_ref, key in locations:
        module = module_ref()
        parameter = module._parameters[key] if module is not None else None
        if parameter is not None:
            yield parameter


def _make_tp_param(name: str, locations: ParamLocations, mesh: DeviceMesh) -> TPParam:
    """Return how torch sharded a parameter; raise if its modules differ."""
    parameters = list(_params_at(locations))
    placements = {p.placements if isinstance(p, DTensor) else None for p in parameters}
    first = parameters[0]
    if len(placements) > 1 or not isinstance(first, DTensor):
        raise ValueError(
            f"{name!r} is shared by {len(locations)} modules, but the plan does not shard it in the same way in all of "
            "them: use one style for all modules that share it"
        )
    return _from_dtensor(name, first, mesh)


def _from_dtensor(name: str, parameter: DTensor, mesh: DeviceMesh) -> TPParam:
    placements = parameter.placements
    if parameter.device_mesh != mesh:
        raise ValueError(
            f"{name!r} is a DTensor over {parameter.device_mesh}, but the tensor axis is {mesh}: parallelize the model "
            "over mesh['tensor'] of the mesh that you pass to shard()"
        )
    (placement,) = placements
    if isinstance(placement, Replicate):
        return TPParam(mesh, placement, None, parameter.shape)
    if type(placement) is not Shard:
        raise ValueError(f"{name!r} is placed as {placement} on the tensor axis: use Shard or Replicate")
    num_fused = getattr(parameter, NUM_FUSED_ATTR, 1)
    tp_shard = TPShard.split_evenly(parameter.shape, placement.dim, mesh.size(), mesh.get_local_rank(), num_fused)
    return TPParam(mesh, placement, tp_shard, parameter.shape)
