"""Hooks: report module events to the engine. The model's code and classes do not change.

The hooks are hidden from torch.compile: a compiled block is unsharded before its compiled code, which sees plain
parameters, and guarded after it.

[Note: losses stored as attributes]
A loss may depend only on a tensor inside a module: a router's penalty, stored as an attribute. No gradient then arrives
at the module's outputs. So graph tensors that the module or one of its submodules stores, as an attribute or in a list,
tuple or dictionary that is an attribute, get the same hooks as its outputs. (Tensors stored elsewhere are not found:
return them as outputs.)
"""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import FrameType
from typing import Any, ParamSpec, TypeVar

import torch
import torch._compile
from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from zeroshard.engine.engine import Engine, has_pre_backward_hook, is_in_backward, outside_functorch
from zeroshard.engine.param_access import ReplacedParamDetector
from zeroshard.engine.parameter import is_guarded, param_info
from zeroshard.engine.unit import Unit, unit_of
from zeroshard.engine.unsupported_calls import SECOND_REDUCTION_ERROR, AttributeOverride, block_unsupported_calls
from zeroshard.sharding import UnitSpec, find_cast_blocks
from zeroshard.utils.tree import cast_floats, tensors_in

_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
_SCANNED_TYPES = {torch.Tensor, list, tuple, dict}
MAX_CONTAINER_ITEMS = 64  # larger containers are skipped: per-layer losses are few, a vocabulary is not
P = ParamSpec("P")
T = TypeVar("T")


def _disable_compile(hook: Callable[P, T]) -> Callable[P, T]:
    """Hide a hook from torch.compile. (torch's own decorator imports the compiler at the first call, not here.)"""
    disabled: Callable[P, T] = torch._compile._disable_dynamo(hook)
    return disabled


def install_hooks(
    model: nn.Module, engine: Engine, unit_specs: list[UnitSpec]
) -> list[RemovableHandle | AttributeOverride]:
    """Hook the model and the modules of its units; return the handles that remove the hooks."""
    units_by_module: dict[str, tuple[Unit, ...]] = {"": ()}
    for spec, unit in zip(unit_specs, engine.units, strict=True):
        for name in spec.modules:
            units_by_module[name] = (*units_by_module.get(name, ()), unit)
    handles: list[RemovableHandle | AttributeOverride] = list(block_unsupported_calls(model))
    detector = ReplacedParamDetector(model)
    config = engine.context.config
    compute_dtype, cast_inputs = config.compute_dtype, config.cast_inputs
    for name in engine.context.precision.fp32_modules:  # casts are registered first: the unit's hook below is prepended
        module = model.get_submodule(name)
        if compute_dtype is not None:
            handles.append(module.register_forward_pre_hook(partial(_cast_inputs, torch.float32), with_kwargs=True))
            handles.append(module.register_forward_hook(partial(_cast_outputs, compute_dtype)))
    hooked = {model.get_submodule(name) for name, units in units_by_module.items() if units}
    casts = _InputCasts(compute_dtype, handles) if cast_inputs and config.has_master and compute_dtype else None
    cast_blocks = find_cast_blocks(model, config)
    for name, units in units_by_module.items():
        module = model.get_submodule(name)
        for unit in units:
            unit.access.add_module(name, module)
        is_root = module is model
        hooks = ModuleHooks(engine, name, units, None if is_root else casts, detector if is_root else None)
        hooks.casts_inputs = module in cast_blocks
        handles += hooks.install(module, hooked)
    if casts is not None:
        for block in cast_blocks - hooked:  # all its parameters are in blocks inside it
            handles.append(block.register_forward_pre_hook(casts.cast, with_kwargs=True))
    if cast_inputs and compute_dtype is not None:
        handles.append(model.register_forward_pre_hook(partial(_cast_inputs, compute_dtype), with_kwargs=True))
    pre_read = partial(_pre_state_dict, engine)
    pre_load, post_load = partial(_pre_load_state_dict, engine), partial(_post_load_state_dict, engine, detector)
    for module in model.modules():
        if module is model or next(module.parameters(recurse=False), None) is not None:
            handles.append(module.register_state_dict_pre_hook(pre_read))  # type: ignore[no-untyped-call]
            handles.append(module.register_load_state_dict_pre_hook(pre_load))  # type: ignore[no-untyped-call]
    handles.append(model.register_load_state_dict_post_hook(post_load))  # type: ignore[no-untyped-call]
    return handles


class ModuleHooks:
    """The hooks before and after the forward of one module: the model, which has a detector, or one that has units."""

    def __init__(
        self,
        engine: Engine,
        name: str,
        units: tuple[Unit, ...],
        casts: _InputCasts | None,
        replaced_param_detector: ReplacedParamDetector | None,
    ) -> None:
        self._engine, self._name, self._units = engine, name, units
        self._casts, self._replaced_param_detector = casts, replaced_param_detector
        self.casts_inputs = False  # whether the module is a block that gets its inputs cast
        self._has_layer_casts = False
        self._scanners: list[GraphTensorScanner] = []
        self._post_hook_id = -1  # not installed: of a registered method

    def install(self, module: nn.Module, hooked_modules: set[nn.Module]) -> Iterator[RemovableHandle]:
        """Register both hooks; yield their handles."""
        if self._units:
            self._scanners = scanners_for(module, hooked_modules)
        post_handle = module.register_forward_hook(self.post_forward, always_call=True)
        self._post_hook_id = post_handle.id
        yield module.register_forward_pre_hook(self.pre_forward, prepend=True, with_kwargs=True)
        yield post_handle

    @_disable_compile
    def pre_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run before the module's forward."""
        engine, inputs = self._engine, tensors_in((args, kwargs))
        is_root_call = False
        if self._replaced_param_detector is not None:
            _check_not_wrapped(module)
            self._replaced_param_detector.check(module)
            engine.pre_model_forward(inputs)
            is_root_call = not (engine.schedule.forward.running_calls and _is_reentrant_call(module))
        with outside_functorch():
            engine.pre_forward((*self._units, *units_of_views(inputs, self._units)), self._name, is_root_call)
        hooks = module._forward_hooks
        # hooks registered later also use the parameters
        if self._post_hook_id >= 0 and next(reversed(hooks)) != self._post_hook_id:
            hooks.move_to_end(self._post_hook_id)  # type: ignore[attr-defined]
        if self._casts is not None and self._casts.are_needed(inputs):
            return self._cast(self._casts, module, args, kwargs)
        return None

    def _cast(self, casts: _InputCasts, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Cast the inputs of a block, and have those of the layers inside it cast from now on."""
        is_layer = False
        if not self._has_layer_casts:
            is_layer, self._has_layer_casts = casts.install(module), True
        return casts.cast(module, args, kwargs) if self.casts_inputs or is_layer else None

    @_disable_compile
    def post_forward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Run after the module's forward, also if it raised."""
        if is_in_backward():  # recomputation
            return
        if output is None and (error := sys.exc_info()[1]) is not None:
            with outside_functorch():
                self._engine.on_forward_error(error)
            return
        owns_storage_of = self._engine.out_of_module_use.owns_storage_of
        outputs, returns_views = [], False
        for tensor in tensors_in(output):
            if tensor.grad_fn is not None:
                outputs.append(tensor)
            base = tensor._base if tensor._is_view() else tensor
            returns_views = returns_views or (isinstance(base, nn.Parameter) and param_info(base) is not None)
            # a detached tensor is not a view for autograd
            returns_views = returns_views or (tensor.grad_fn is None and owns_storage_of(tensor))
        detaches_graph = not outputs and any(tensor.requires_grad for tensor in tensors_in(args))
        has_graph = bool(outputs) and torch.is_grad_enabled()
        stored_tensors = [tensor for scanner in self._scanners for tensor in scanner.find()] if has_graph else []
        with outside_functorch():
            self._engine.post_forward(outputs, stored_tensors, returns_views, detaches_graph)

    def run_method(
        self, module: nn.Module, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run another method of the module as its forward would run: see forward_methods.py."""
        is_installed = self._post_hook_id >= 0
        try:
            if not is_installed:
                self.pre_forward(module, args, kwargs)
            for hook in _own_hooks(module._forward_pre_hooks):
                args, kwargs = hook(module, args, kwargs) or (args, kwargs)
            output = method(*args, **kwargs)
        except BaseException:
            self.post_forward(module, args, None)
            raise
        for hook in _own_hooks(module._forward_hooks):
            changed = hook(module, args, output)
            output = output if changed is None else changed
        if not is_installed:
            self.post_forward(module, args, output)
        return output


def _own_hooks(hooks: Mapping[int, Callable[..., Any]]) -> list[Callable[..., Any]]:
    """Return zeroshard's own among the hooks of a module: the casts, and those of :class:`ModuleHooks`."""
    casts = (_cast_inputs, _cast_layer_inputs, _cast_outputs)
    return [
        hook
        for hook in hooks.values()
        if getattr(hook, "func", None) in casts or isinstance(getattr(hook, "__self__", None), ModuleHooks)
    ]


def units_of_views(inputs: list[torch.Tensor], known_units: tuple[Unit, ...]) -> list[Unit]:
    """Return the other units whose storage the inputs of a module are views of: the module reads their parameters."""
    found: list[Unit] = []
    for tensor in inputs:
        base = tensor._base if type(tensor) is torch.Tensor and tensor._is_view() else None
        unit = unit_of(base) if isinstance(base, nn.Parameter) else None
        if unit is not None and unit.is_partitioned and unit not in known_units and unit not in found:
            found.append(unit)
    return found


def _is_reentrant_call(module: nn.Module) -> bool:
    """Return whether this call runs inside another call of the same module: in its forward or in one of its hooks."""
    frame: FrameType | None = sys._getframe()
    depth = 0
    while frame is not None:
        depth += frame.f_code is nn.Module._call_impl.__code__ and frame.f_locals.get("self") is module
        depth += frame.f_code is ModuleHooks.run_method.__code__ and frame.f_locals.get("module") is module
        frame = frame.f_back
    return depth > 1


def _check_not_wrapped(model: nn.Module) -> None:
    """Raise if the forward runs inside a wrapper that would also reduce the model's gradients, or that copies it."""
    wrapper = DistributedDataParallel._active_ddp_module
    if wrapper is not None and any(param_info(parameter) is not None for parameter in wrapper._module_parameters):
        raise RuntimeError(f"DistributedDataParallel {SECOND_REDUCTION_ERROR}")
    if "replicate" in vars(model).get(REGISTRY_KEY, ()):
        raise RuntimeError(f"torch.distributed's replicate() {SECOND_REDUCTION_ERROR}")
    if "_is_replica" in vars(model):
        raise RuntimeError(
            "nn.DataParallel copies a model to several GPUs of one process, which a sharded model cannot follow: start "
            "one process a GPU (torchrun), and use the model without DataParallel"
        )


class GraphTensorScanner:
    """Finds graph tensors in a module's attributes and containers: see [Note: losses stored as attributes]."""

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        # torch's own modules store none, unless the user has added an attribute
        is_torch_module = type(module).__module__.startswith("torch.nn.")
        self._ignored_names = _MODULE_ATTRIBUTES.union(vars(module)) if is_torch_module else _MODULE_ATTRIBUTES
        self._candidate_names: frozenset[str] = frozenset()  # attributes that may store a tensor
        self._attribute_count = -1  # of all attributes, when the candidates were found

    def find(self) -> list[torch.Tensor]:
        """Return the graph tensors that the module stores now and that have no pre-backward hook yet."""
        module = self._module()
        attributes = vars(module) if module is not None else {}
        if len(attributes) != self._attribute_count or not attributes.keys() >= self._candidate_names:
            self._candidate_names, self._attribute_count = frozenset(attributes) - self._ignored_names, len(attributes)
        if not self._candidate_names:
            return []
        names = [name for name in self._candidate_names if type(attributes[name]) in _SCANNED_TYPES]
        tensors = [tensor for name in names for tensor in _tensors_in_containers(attributes[name])]
        return [tensor for tensor in tensors if tensor.grad_fn is not None and not has_pre_backward_hook(tensor)]


def _tensors_in_containers(value: Any, depth: int = 4) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested lists, tuples and dictionaries of at most MAX_CONTAINER_ITEMS items."""
    kind = type(value)
    if kind is torch.Tensor:
        yield value
    elif kind in _SCANNED_TYPES and depth and len(value) <= MAX_CONTAINER_ITEMS:
        for item in value.values() if kind is dict else value:
            yield from _tensors_in_containers(item, depth - 1)


def scanners_for(module: nn.Module, hooked_modules: set[nn.Module]) -> list[GraphTensorScanner]:
    """Return scanners for a module and its submodules, except submodules that have hooks themselves."""
    scanners = [GraphTensorScanner(module)]
    for child in module.children():
        scanners += scanners_for(child, hooked_modules) if child not in hooked_modules else []
    return scanners


def _cast_inputs(dtype: torch.dtype, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Hook: cast a module's floating-point inputs."""
    return cast_floats(args, dtype), cast_floats(kwargs, dtype)


def _cast_layer_inputs(dtype: torch.dtype, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Hook: cast a layer's inputs; return early in the common case that no cast is needed."""
    if len(args) == 1 and not kwargs and isinstance(args[0], torch.Tensor) and args[0].dtype is dtype:
        return None
    return cast_floats(args, dtype), cast_floats(kwargs, dtype)


def _cast_outputs(dtype: torch.dtype, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    """Hook: cast a module's floating-point outputs."""
    return cast_floats(output, dtype)


class _InputCasts:
    """Casts inputs to 16 bits: those of blocks, as FSDP2 does, and those of torch's own layers.

    Without the cast such a layer raises. The hooks of layers are installed when a module first receives another float
    dtype. Modules between, with their own code, get what they are given.
    """

    def __init__(self, dtype: torch.dtype, handles: list[RemovableHandle | AttributeOverride]) -> None:
        self._dtype, self._handles = dtype, handles
        self._other_dtypes = {torch.float16, torch.bfloat16, torch.float32, torch.float64} - {dtype}
        self.cast = partial(_cast_layer_inputs, dtype)

    def are_needed(self, inputs: list[torch.Tensor]) -> bool:
        return any(tensor.dtype in self._other_dtypes for tensor in inputs)

    def install(self, module: nn.Module) -> bool:
        """Hook the layers of a module that is about to run; return whether it is such a layer itself.

        Its hooks are then running already: the new one is not called yet.
        """
        layers = [layer for layer in module.modules() if self._needs_cast(layer)]
        for layer in layers:
            self._handles.append(layer.register_forward_pre_hook(self.cast, with_kwargs=True))
        return module in layers

    def _needs_cast(self, layer: nn.Module) -> bool:
        dtypes = [parameter.dtype for parameter in layer.parameters(recurse=False)]
        is_torch_layer = type(layer).__module__.startswith("torch.nn.") and not isinstance(layer, nn.RMSNorm)
        return is_torch_layer and self._dtype in dtypes


def _pre_state_dict(engine: Engine, *_: object) -> None:
    """Raise before replicated parameters are read whose last step another rank has not finished."""
    engine.comm.check_results("read the state_dict()")


def _pre_load_state_dict(
    engine: Engine, module: nn.Module, state: Mapping[str, Any], prefix: str, metadata: dict[str, Any], *_: object
) -> None:
    """Hook: before ``load_state_dict`` changes anything, raise on what would fail halfway, and warn of rounding."""
    engine.state_guard.check_states_reloaded()
    engine.state_guard.check_not_averaged("load_state_dict()")
    if metadata.get("assign_to_params_buffers"):
        raise RuntimeError(
            f"load_state_dict(assign=True) would replace the parameters of {prefix.rstrip('.') or 'the model'} by "
            "others, which nobody would train: leave assign out, or load before zeroshard.shard()"
        )
    for parameter in module.parameters():
        info, unit = param_info(parameter), unit_of(parameter)
        if unit is not None and unit.detects_edits and not unit.has_gathered_copy:
            unit.record_checksum()
        if info is not None and unit is not None and unit.is_partitioned and is_guarded(parameter):
            raise RuntimeError(
                f"load_state_dict() cannot write into {info.name!r}, whose values are not there: load inside `with "
                "zeroshard.gathered(model, write_rank=0):`, or call zeroshard.load(path, model)"
            )
    if not prefix and engine.context.config.has_master:  # once, not for each submodule
        named = module.named_parameters()
        rounded = (name for name, parameter in named if _is_rounded(state.get(name), parameter.dtype))
        if (name := next(rounded, None)) is not None:
            warnings.warn(
                f"load_state_dict() rounds {name!r}, and so its master weight, to the dtype in which the model "
                "computes: zeroshard.load(state_dict, model) loads master weights exactly",
                stacklevel=2,
            )


def _is_rounded(value: Any, dtype: torch.dtype) -> bool:
    """Return whether a tensor loses bits in a dtype."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.itemsize <= dtype.itemsize:
        return False
    return bool(((value.to(dtype).to(value.dtype) != value) & ~value.isnan()).any())


def _post_load_state_dict(
    engine: Engine, detector: ReplacedParamDetector, module: nn.Module, incompatible: Any
) -> None:
    """Hook: write the values that ``load_state_dict`` has loaded to shards and master weights."""
    detector.check(module)
    engine.state_guard.write_back_params()
