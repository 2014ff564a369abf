"""Model checks: shard() raises on unsupported modules and tensors before it changes anything."""

from __future__ import annotations

import bisect
import warnings
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel

from zeroshard.config.config import Config

_PARALLEL_WRAPPERS = (DistributedDataParallel, FullyShardedDataParallel, FSDPModule, DataParallel)
_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))  # attributes of every module


def check_model(model: nn.Module, has_tensor_axis: bool) -> None:
    """Raise if the model cannot be sharded, and name the parameter. ``has_tensor_axis``: the mesh has a tensor axis."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a torch.nn.Module, got {type(model).__name__}")
    _check_modules(model)
    for name, parameter in model.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise ValueError(f"{name!r} is not initialised yet: run one forward of the lazy module before shard()")
        if isinstance(parameter, DTensor) and not has_tensor_axis:
            raise ValueError(
                f"{name!r} is a DTensor: give shard() the mesh it is divided over, whose last axis is named 'tensor'"
            )
        if hasattr(parameter, "_zeroshard"):
            raise ValueError(f"{name!r} is sharded already: call zeroshard.unwrap() on its model first")
    _check_parameters(model)


def _check_modules(model: nn.Module) -> None:
    """Raise on modules that reduce gradients themselves, or that read parameters without calling hooks."""
    for name, module in model.named_modules():
        what = f"module {name!r}" if name else "the model"
        if "_zeroshard" in module.__dict__:
            raise ValueError(f"{what} is sharded already: call zeroshard.unwrap() on it first")
        kind = next((kind.__name__ for kind in _PARALLEL_WRAPPERS if isinstance(module, kind)), None)
        kind = kind or ("replicate()" if "replicate" in module.__dict__.get(REGISTRY_KEY, ()) else None)
        if kind is not None:
            inner = ": give shard() the module inside it" if hasattr(module, "module") else ""
            raise ValueError(
                f"{what} is wrapped by {kind}, which would reduce the gradients a second time{inner}. shard() takes "
                "the plain model; its stage 0 is plain data parallelism"
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise ValueError(
                f"{what} is a ScriptModule (torch.jit.trace or torch.jit.script), whose compiled code reads the "
                "parameters without calling any hook: give shard() the module it was made from, and call "
                "torch.compile on it if it is to be compiled"
            )


def _check_parameters(model: nn.Module) -> None:
    """Raise on parameters whose gradients or memory are also used elsewhere."""
    for name, parameter in model.named_parameters():
        if getattr(parameter, "_post_accumulate_grad_hooks", None) or hasattr(parameter, "_in_backward_optimizers"):
            raise ValueError(f"{name!r} has a post-accumulate-grad hook. {POST_HOOK_ERROR}")
    _check_aliases(model)
    for name, parameter in model.named_parameters():
        if type(parameter) is not nn.Parameter:
            continue  # a subclass may have no memory of its own
        storage = parameter.untyped_storage()
        has_own_memory = storage.nbytes() == parameter.nbytes  # not a part of what several parameters share
        if has_own_memory and torch._C._storage_Use_Count(storage._cdata) > 2:  # the parameter and ``storage``
            warnings.warn(
                f"the memory of {name!r} is also used elsewhere: by a state_dict(), a parameter.data, a NumPy "
                "array, a view or a graph made before shard(). It keeps its present values, and what is written to it "
                "does not reach the model: clone it, drop it, or make it after shard()",
                stacklevel=2,
            )
            return


POST_HOOK_ERROR = (
    "Such a hook sees the gradient of this rank alone, and what it does to the parameter is lost or differs from rank "
    "to rank, so an optimizer cannot be stepped inside backward. Give the optimizer to zeroshard.shard() and call its "
    "step(); to look at gradients, use register_hook() or zeroshard.full_gradient()"
)


def check_max_norm(model: nn.Module, config: Config, ranks: int) -> None:
    """Raise on embeddings that renormalise their weight in forward, unless a single rank updates this weight itself."""
    if ranks == 1 and not config.has_master and config.offload is None:
        return
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
            raise ValueError(
                f"{name!r} ({type(module).__name__}) has max_norm={module.max_norm}: its forward changes the rows that "
                "this rank's data look up, so the ranks' weights, or the weights and their master copy, would differ. "
                "Set max_norm to None, and renormalise the rows in forward without changing the weight, or after "
                "step() inside `with zeroshard.gathered(model, write_rank=0):`"
            )


# -- views of parameters ----------------------------------------------------------------------------------------


def _check_aliases(model: nn.Module) -> None:
    """Raise on tensors that are views of a parameter: they would keep the old memory when it is sharded."""
    parameters = {id(p): (name, p) for name, p in model.named_parameters()}
    ranges = sorted((*range_, name) for name, p in parameters.values() if (range_ := _address_range(p)) is not None)
    dense = {name for name, p in parameters.values() if _is_dense(p)}
    for (_, end, one), (start, _, other) in pairwise(ranges):
        if start < end and one in dense and other in dense:
            raise ValueError(
                f"{one!r} and {other!r} are two parameters over one memory, which shard() would separate: tie them by "
                "making them one nn.Parameter, or give one of them a copy"
            )
    for name, tensor in _tensor_attributes(model):
        range_ = _address_range(tensor) if id(tensor) not in parameters else None
        if range_ is None:
            continue
        before = bisect.bisect_left(ranges, (range_[1],)) - 1  # the last parameter that starts before its end
        if before >= 0 and range_[0] < ranges[before][1]:
            raise ValueError(
                f"{name!r} views the memory of parameter {ranges[before][2]!r}, which shard() moves: it would keep the "
                "old values. Make the view where it is used, in forward, or give it a copy"
            )


def _address_range(tensor: torch.Tensor) -> tuple[int, int] | None:
    """Return the start and end address of a tensor's elements, or None if it has no memory."""
    try:
        start = tensor.data_ptr()
    except (NotImplementedError, RuntimeError):
        return None
    if start == 0 or tensor.numel() == 0 or tensor.layout is not torch.strided:
        return None
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + extent * tensor.element_size()


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's elements fill its address range without gaps."""
    range_ = _address_range(tensor)
    return range_ is not None and range_[1] - range_[0] == tensor.numel() * tensor.element_size()


def _tensor_attributes(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the buffers of a model, and the tensors that its modules store as plain attributes."""
    yield from model.named_buffers()
    for prefix, module in model.named_modules():
        # torch's older spectral_norm and weight_norm set such an attribute again before each forward
        hooks = module._forward_pre_hooks.values()
        reset = {getattr(hook, field, None) for hook in hooks for field in ("name", "_tensor_name")}
        for key, value in vars(module).items():
            if key in _MODULE_ATTRIBUTES or key in reset:
                continue
            for tensor in _tensors_in(value):
                yield f"{prefix}.{key}" if prefix else key, tensor


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            if isinstance(item, torch.Tensor):
                yield item


def unwrap_compiled(model: nn.Module) -> nn.Module:
    """Return the model inside a ``torch.compile`` wrapper, or the model itself."""
    inner = getattr(model, "_orig_mod", model)
    return inner if isinstance(inner, nn.Module) else model
