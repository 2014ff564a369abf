"""Rerun: the run of a block of which autograd keeps nothing, and its second run in backward.

[Note: lean recomputation]
Forward builds the graph as ever, but of each tensor that autograd would save it keeps only the number. When backward
asks for the first of them, the block runs again on its kept inputs, up to the last tensor that was saved, and what
comes after that is not computed twice; the others are answered from there. torch's own checkpointing works in this way,
too. It serves more: checkpoints inside checkpoints, policies, graphs that are gone through by several backwards at
once, for which each saved tensor takes objects and tables of its own, more of the host's time than launching the
block. Here it is an integer and a place in a list.

A tensor is handed out once, so that it goes as soon as backward has no more use for it. Whoever asks again, in a second
backward through a graph that was retained, has the block run once more.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks


@dataclass(frozen=True)
class AutocastState:
    """Whether, and to what, operations on a kind of device cast by themselves."""

    device_type: str
    is_enabled: bool
    dtype: torch.dtype
    is_cache_enabled: bool

    @classmethod
    def capture(cls, device_type: str) -> AutocastState:
        """What holds at this moment."""
        enabled, dtype = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
        return cls(device_type, enabled, dtype, torch.is_autocast_cache_enabled())

    def context(self) -> contextlib.AbstractContextManager[object]:
        """Have it hold inside."""
        return torch.amp.autocast(self.device_type, self.dtype, self.is_enabled, self.is_cache_enabled)


class RngAndAutocast:
    """What a run depends on beside its inputs: random states, and automatic casts."""

    def __init__(self, inputs: Sequence[torch.Tensor]) -> None:
        devices = dict.fromkeys(tensor.device for tensor in inputs if tensor.is_cuda)
        self._generators = [torch.default_generator, *(_cuda_generator(device) for device in devices)]
        self._autocast_states = [
            AutocastState.capture(kind) for kind in ("cpu", *dict.fromkeys(device.type for device in devices))
        ]
        self._rng_states = [generator.get_state() for generator in self._generators]

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Have inside what there was."""
        with contextlib.ExitStack() as stack:
            for cast in self._autocast_states:
                if cast.is_enabled or torch.is_autocast_enabled(cast.device_type):
                    stack.enter_context(cast.context())
            present = [generator.get_state() for generator in self._generators]
            for generator, state, now in zip(self._generators, self._rng_states, present, strict=True):
                if not torch.equal(state, now):
                    generator.set_state(state)
            try:
                yield
            finally:
                for generator, state in zip(self._generators, present, strict=True):
                    generator.set_state(state)


def _cuda_generator(device: torch.device) -> torch.Generator:
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]


ShapeAndDtype = tuple[torch.Size, torch.dtype]


class _StopRecomputation(BaseException):
    """Everything that backward will ask for is there. No block's own ``except Exception`` is meant to hear of it."""


class BlockRecomputation:
    """A run of ``run`` on some tensors, which are kept as ``inputs`` give them back: see [Note: lean recomputation].

    >>> weight = torch.ones(2, requires_grad=True)
    >>> again = BlockRecomputation("tanh", lambda x: (x * weight).tanh(), [torch.ones(2)])
    >>> again.forward(lambda: [torch.ones(2)]).sum().backward()
    >>> torch.allclose(weight.grad, 1 - torch.ones(2).tanh() ** 2)
    True
    """

    def __init__(self, name: str, run: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> None:
        self._name, self._run, self._first_inputs = name, run, inputs
        self._requires_grad = [tensor.requires_grad for tensor in inputs]
        self._rng_and_autocast = RngAndAutocast(inputs)
        self._load_inputs: Callable[[], Sequence[torch.Tensor]] = list
        self._saved_metadata: list[ShapeAndDtype] = []  # what autograd would have kept
        self._recomputed: list[torch.Tensor | None] = []  # the same, computed again and not handed out yet

    def forward(self, load_inputs: Callable[[], Sequence[torch.Tensor]]) -> Any:
        """Run for the first time. ``inputs`` gives the tensors back when backward comes."""
        self._load_inputs = load_inputs
        given, self._first_inputs = self._first_inputs, ()
        with saved_tensors_hooks(self._pack, self._unpack):
            output = self._run(*given)
        self._recomputed = []  # where the block has computed gradients inside
        return output

    def _pack(self, tensor: torch.Tensor) -> int:
        saved = self._saved_metadata
        saved.append((tensor.shape, tensor.dtype))
        return len(saved) - 1

    def _unpack(self, index: int) -> torch.Tensor:
        again = self._recomputed
        tensor = again[index] if index < len(again) else None
        if tensor is None:
            again = self._recompute()
            tensor = again[index]
            assert tensor is not None
        again[index] = None
        return tensor

    def _recompute(self) -> list[torch.Tensor | None]:
        again: list[torch.Tensor | None] = []
        saved = self._saved_metadata

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            if len(again) == len(saved):  # somebody has caught it
                raise _StopRecomputation
            if (tensor.shape, tensor.dtype) != saved[len(again)]:
                self._raise_mismatch(
                    f"{_describe_shape(saved[len(again)])}, and now {_describe_shape((tensor.shape, tensor.dtype))}",
                    len(again),
                )
            kept = tensor.detach()
            again.append(kept)
            if len(again) == len(saved):
                raise _StopRecomputation
            return kept  # a block may compute gradients inside

        given = [
            tensor.detach().requires_grad_(differentiable)
            for tensor, differentiable in zip(self._load_inputs(), self._requires_grad, strict=True)
        ]
        hooks = saved_tensors_hooks(keep, lambda kept: kept)
        with torch.enable_grad(), self._rng_and_autocast.restored(), hooks, contextlib.suppress(_StopRecomputation):
            self._run(*given)
        if len(again) < len(saved):
            self._raise_mismatch(f"{_describe_shape(saved[len(again)])}, and now nothing", len(again))
        self._recomputed = again
        return again

    def _raise_mismatch(self, difference: str, index: int) -> None:
        raise RuntimeError(
            f"block {self._name!r} did something else when it ran again in backward: the first time autograd saved as "
            f"its tensor number {index} one of {difference}. A block has to compute the same from the same inputs: see "
            "whether it looks at something that changes in between, or leave it out of checkpoint_activations()"
        )


def _describe_shape(shape_and_dtype: ShapeAndDtype) -> str:
    return f"shape {tuple(shape_and_dtype[0])} and {shape_and_dtype[1]}"
