"""BlockRecomputation: a block's forward without saved tensors, and its recomputation in backward.

[Note: lean recomputation]
Forward builds the graph as usual, but packs each tensor that autograd would save into its index. When backward unpacks
the first of them, the block is recomputed from its saved inputs, up to the last tensor that autograd saved; anything
after that is not computed twice. The other tensors come from the same recomputation. torch's own checkpointing works
in the same way, but supports more: nested checkpoints, policies, and graphs traversed by several backwards at once. For
that it needs objects and tables per saved tensor, which cost more host time than launching the block. Here the cost is
an integer and a list entry.

Each tensor is returned once, so it is freed as soon as backward no longer needs it. A second backward through a
retained graph recomputes the block again.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_unflatten

from zeroshard.utils.profiling import label
from zeroshard.utils.tree import tensors_in

LEAF_TYPES = (torch.Tensor, bool, int, float, str, type(None))  # arguments that contain no other arguments


class ThreadState(threading.local):
    """State of one thread."""

    is_in_block = False  # whether a checkpointed block is running


thread_state = ThreadState()


class RngAndAutocast:
    """The RNG and autocast state that a block's result depends on, in addition to its inputs."""

    def __init__(self, inputs: Sequence[torch.Tensor]) -> None:
        devices = dict.fromkeys(tensor.device for tensor in inputs if tensor.is_cuda)
        self._generators = [torch.default_generator, *(_cuda_generator(device) for device in devices)]
        is_cached = torch.is_autocast_cache_enabled()
        self._autocast_args = [
            (device_type, torch.get_autocast_dtype(device_type), torch.is_autocast_enabled(device_type), is_cached)
            for device_type in ("cpu", *dict.fromkeys(device.type for device in devices))
        ]
        self._rng_states = [generator.get_state() for generator in self._generators]

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Restore the captured state inside the context, and the current RNG state after it."""
        with contextlib.ExitStack() as stack:
            for device_type, dtype, is_enabled, is_cached in self._autocast_args:
                if is_enabled or torch.is_autocast_enabled(device_type):
                    stack.enter_context(torch.amp.autocast(device_type, dtype, is_enabled, is_cached))
            current_states = [generator.get_state() for generator in self._generators]
            for generator, state, current in zip(self._generators, self._rng_states, current_states, strict=True):
                if not torch.equal(state, current):
                    generator.set_state(state)
            try:
                yield
            finally:
                for generator, state in zip(self._generators, current_states, strict=True):
                    generator.set_state(state)


def _cuda_generator(device: torch.device) -> torch.Generator:
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]


ShapeAndDtype = tuple[torch.Size, torch.dtype]


class _StopRecomputation(BaseException):
    """Stops recomputation once all saved tensors exist. A block's own ``except Exception`` does not catch it."""


class BlockRecomputation:
    """Runs ``run`` on ``inputs`` in forward and recomputes it in backward: see [Note: lean recomputation].

    >>> weight = torch.ones(2, requires_grad=True)
    >>> recomputation = BlockRecomputation("tanh", lambda x: (x * weight).tanh(), [torch.ones(2)])
    >>> recomputation.forward(lambda: [torch.ones(2)]).sum().backward()
    >>> torch.allclose(weight.grad, 1 - torch.ones(2).tanh() ** 2)
    True
    """

    def __init__(self, name: str, run: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> None:
        self._name, self._run, self._first_inputs = name, run, inputs
        self._requires_grad = [tensor.requires_grad for tensor in inputs]
        self._rng_and_autocast = RngAndAutocast(inputs)
        self._load_inputs: Callable[[], Sequence[torch.Tensor]] = list
        self._saved_metadata: list[ShapeAndDtype] = []  # of the tensors that autograd would have saved
        self._recomputed: list[torch.Tensor | None] = []  # recomputed tensors; None once returned to autograd

    def forward(self, load_inputs: Callable[[], Sequence[torch.Tensor]]) -> Any:
        """Run the forward. ``load_inputs`` returns the input tensors in backward."""
        self._load_inputs = load_inputs
        inputs, self._first_inputs = self._first_inputs, ()
        with saved_tensors_hooks(self._pack, self._unpack):
            output = self._run(*inputs)
        self._recomputed = []  # the block may have computed gradients in its forward
        return output

    def _pack(self, tensor: torch.Tensor) -> int:
        saved = self._saved_metadata
        saved.append((tensor.shape, tensor.dtype))
        return len(saved) - 1

    def _unpack(self, index: int) -> torch.Tensor:
        recomputed = self._recomputed
        tensor = recomputed[index] if index < len(recomputed) else None
        if tensor is None:
            with label("recompute {!r}", self._name):
                recomputed = self._recompute()
            tensor = recomputed[index]
            assert tensor is not None
        recomputed[index] = None
        return tensor

    def _recompute(self) -> list[torch.Tensor | None]:
        tensors: list[torch.Tensor | None] = []
        saved = self._saved_metadata

        def record(tensor: torch.Tensor) -> torch.Tensor:
            if len(tensors) == len(saved):  # the block has caught the exception
                raise _StopRecomputation
            if (tensor.shape, tensor.dtype) != saved[len(tensors)]:
                self._raise_mismatch(len(tensors), f"but now has shape {tuple(tensor.shape)} and {tensor.dtype}")
            detached = tensor.detach()
            tensors.append(detached)
            if len(tensors) == len(saved):
                raise _StopRecomputation
            return detached  # the block may compute gradients in its forward

        inputs = [
            tensor.detach().requires_grad_(requires_grad)
            for tensor, requires_grad in zip(self._load_inputs(), self._requires_grad, strict=True)
        ]
        hooks = saved_tensors_hooks(record, lambda detached: detached)
        with torch.enable_grad(), self._rng_and_autocast.restored(), hooks, contextlib.suppress(_StopRecomputation):
            self._run(*inputs)
        if len(tensors) < len(saved):
            self._raise_mismatch(len(tensors), "but is now missing")
        self._recomputed = tensors
        return tensors

    def _raise_mismatch(self, index: int, difference: str) -> None:
        shape, dtype = self._saved_metadata[index]
        raise RuntimeError(
            f"block {self._name!r} was not recomputed as in forward: tensor {index} that autograd saved had shape "
            f"{tuple(shape)} and {dtype}, {difference}. A checkpointed block must compute the same from the "
            "same inputs: remove what changes in between, or leave the block out of checkpoint_activations()"
        )


def flatten_arguments(
    forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[torch.Tensor], Callable[..., Any]]:
    """Return the distinct tensors among the arguments, and a function that runs the block on such tensors.

    torch's checkpointing packs only positional tensors, not those in containers or keyword arguments.
    """
    leaves, rebuild = _flatten_containers(args, kwargs)
    leaves = [None if _is_empty_kv_cache(leaf) else leaf for leaf in leaves]
    tensors = list({id(leaf): leaf for leaf in leaves if isinstance(leaf, torch.Tensor)}.values())
    indices = {id(tensor): index for index, tensor in enumerate(tensors)}
    positions = [indices.get(id(leaf), -1) if isinstance(leaf, torch.Tensor) else -1 for leaf in leaves]
    other_leaves = [None if position >= 0 else leaf for leaf, position in zip(leaves, positions, strict=True)]

    def run(*given: torch.Tensor) -> Any:
        filled = [
            given[position] if position >= 0 else leaf for leaf, position in zip(other_leaves, positions, strict=True)
        ]
        args, kwargs = rebuild(filled)
        was_in_block, thread_state.is_in_block = thread_state.is_in_block, True
        try:
            return forward(*args, **kwargs)
        finally:
            thread_state.is_in_block = was_in_block

    return tensors, run


def _flatten_containers(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """Return the arguments without their containers, and a function that restores the containers."""
    leaves, count, names = [*args, *kwargs.values()], len(args), tuple(kwargs)
    if all(isinstance(leaf, LEAF_TYPES) for leaf in leaves):  # the fast path, which most blocks take
        return leaves, lambda filled: (filled[:count], dict(zip(names, filled[count:], strict=True)))
    leaves, spec = tree_flatten((args, kwargs))
    return leaves, lambda filled: tree_unflatten(filled, spec)


def is_kv_cache(value: Any) -> bool:
    """Return whether an argument is a KV cache of Hugging Face."""
    if isinstance(value, (*LEAF_TYPES, nn.Module)):
        return False
    return hasattr(value, "update") and hasattr(value, "get_seq_length")


def _is_empty_kv_cache(value: Any) -> bool:
    """Return whether an argument is an empty KV cache, which Hugging Face models create by default.

    A block writes into the cache, and would do so again in recomputation. Training needs no cache, so the block is
    called with None instead.
    """
    if not is_kv_cache(value):
        return False
    if tensors_in(value, depth=8):
        raise ValueError(
            f"a checkpointed block got a {type(value).__name__} that contains keys and values, and would write into it "
            "again when it is recomputed: call the model with use_cache=False"
        )
    return True
