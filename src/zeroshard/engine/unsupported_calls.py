"""Unsupported calls: raise on calls that torch would accept but that would corrupt a sharded model."""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn

from zeroshard.engine.model_checks import POST_HOOK_ERROR
from zeroshard.engine.parameter import param_info

SECOND_REDUCTION_ERROR = (
    "would reduce the gradients of a model that zeroshard has sharded a second time: use the model as it is "
    "(stage 0 is plain data parallelism). Accelerator.prepare, Trainer and Lightning wrap the model by themselves: run "
    "them without a distributed strategy of their own"
)


class AttributeOverride:
    """Overrides an attribute of an object while its model is sharded; :meth:`remove` restores it."""

    def __init__(self, owner: Any, name: str, value: Any) -> None:
        self._owner, self._name = weakref.ref(owner), name
        self._previous = vars(owner).get(name, self)
        vars(owner)[name] = value

    def remove(self) -> None:
        """Restore the previous attribute."""
        owner = self._owner()
        if owner is not None and self._previous is not self:
            vars(owner)[self._name] = self._previous
        elif owner is not None:
            vars(owner).pop(self._name, None)


def block_unsupported_calls(model: nn.Module) -> Iterator[AttributeOverride]:
    """Override all unsupported calls of a sharded model; yield the overrides."""
    yield AttributeOverride(model, "_ddp_params_and_buffers_to_ignore", _DDPBlocker())
    yield AttributeOverride(model, "join_hook", raise_on_join)
    for module in model.modules():
        if module is model or next(module.parameters(recurse=False), None) is not None:
            yield AttributeOverride(module, "_apply", _ApplyOverride(module))
    for name, parameter in model.named_parameters():
        yield AttributeOverride(parameter, "register_post_accumulate_grad_hook", partial(_raise_on_post_hook, name))
        yield AttributeOverride(parameter, "share_memory_", partial(_raise_on_share_memory, name))


class _DDPBlocker:
    """Replaces the list of ignored parameters, which DistributedDataParallel's constructor reads first."""

    def __iter__(self) -> Iterator[str]:
        raise RuntimeError(f"DistributedDataParallel {SECOND_REDUCTION_ERROR}")


def raise_on_join(**_: object) -> NoReturn:
    """Replace ``join_hook`` of torch's Joinable: raise."""
    raise RuntimeError(
        "torch's Join cannot be used with zeroshard, whose ranks take every step together: give all ranks the same "
        "number of batches (drop_last=True), or an empty loss such as model(x).sum() * 0 to those that have fewer"
    )


def _raise_on_post_hook(name: str, hook: object) -> NoReturn:
    """Replace a parameter's ``register_post_accumulate_grad_hook``: raise."""
    raise RuntimeError(f"a post-accumulate-grad hook cannot be registered on {name!r}. {POST_HOOK_ERROR}")


def _raise_on_share_memory(name: str) -> NoReturn:
    """Replace a parameter's ``share_memory_``: raise."""
    raise RuntimeError(
        f"{name!r} is sharded: its memory is zeroshard's own and cannot be shared with other processes. "
        "Share the model before zeroshard.shard(), or a state_dict() taken inside `with zeroshard.gathered(model):`"
    )


class _ApplyOverride:
    """Replaces a module's ``_apply``, which ``to``, ``cuda``, ``half``, ``share_memory`` and others call.

    A call that would not change parameters is applied to the buffers only, so it needs no values. Others raise.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return the method of the class for a copied module: a copy is not sharded."""
        copied = memo.get(id(self._module()))
        return types.MethodType(type(copied)._apply, copied) if copied is not None else self

    def __call__(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        module = self._module()
        if module is None:
            raise RuntimeError("the module is gone")
        _check_keeps_params(module, fn, recurse)
        parameters, module._parameters = module._parameters, {}
        try:  # an RNN's own method only collects its parameters again, which have not changed
            kind = nn.Module if isinstance(module, nn.RNNBase) else type(module)
            kind._apply(module, fn, recurse) if not recurse else kind._apply(module, fn)  # type: ignore[no-untyped-call]
        finally:
            module._parameters = parameters
        return module


def _check_keeps_params(module: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool) -> None:
    """Try a function on small tensors like the parameters; raise if it replaces one."""
    seen: set[Any] = set()
    for name, parameter in module.named_parameters(recurse=recurse):
        kind = (parameter.dtype, parameter.device, parameter.dim(), parameter.stride())
        if kind in seen or parameter.is_meta:
            continue
        seen.add(kind)
        probe = _small_like(parameter)
        with torch.no_grad():
            result = fn(probe)
        info = param_info(parameter)
        full_name = info.name if info is not None else name
        if result.untyped_storage().is_shared() and result.device.type == "cpu":
            _raise_on_share_memory(full_name)
        if result is not probe:
            raise RuntimeError(
                f"{full_name!r} is sharded as {_describe(probe)}, and this call would replace it by a new tensor, "
                f"{_describe(result)}, which its partition, master copy and optimizer states would not follow. Do it "
                "before zeroshard.shard(), or after zeroshard.unwrap(); for 16-bit computation give shard() "
                'precision="bf16"'
            )


def _small_like(parameter: nn.Parameter) -> torch.Tensor:
    """Return a small tensor with the parameter's dtype, device and order of dimensions."""
    strides, shape = parameter.stride(), [min(size, 2) for size in parameter.shape]
    order = sorted(range(len(shape)), key=lambda dim: strides[dim], reverse=True)
    dense = torch.empty([shape[dim] for dim in order], dtype=parameter.dtype, device=parameter.device)
    return dense.permute([order.index(dim) for dim in range(len(shape))])


def _describe(tensor: torch.Tensor) -> str:
    text = f"{str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"
    return text if tensor.is_contiguous() else f"{text} with strides {tensor.stride()}"
