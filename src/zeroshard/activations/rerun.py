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

Form = tuple[torch.Size, torch.dtype]


class _Enough(BaseException):
    """Everything that backward will ask for is there. No block's own ``except Exception`` is meant to hear of it."""


class Rerun:
    """A run of ``run`` on some tensors, which are kept as ``inputs`` give them back: see [Note: lean recomputation].

    >>> weight = torch.ones(2, requires_grad=True)
    >>> again = Rerun("tanh", lambda x: (x * weight).tanh(), [torch.ones(2)])
    >>> again.forward(lambda: [torch.ones(2)]).sum().backward()
    >>> torch.allclose(weight.grad, 1 - torch.ones(2).tanh() ** 2)
    True
    """

    def __init__(self, name: str, run: Callable[..., Any], given: Sequence[torch.Tensor]) -> None:
        self._name, self._run, self._given = name, run, given
        self._differentiable = [tensor.requires_grad for tensor in given]
        self._surroundings = Surroundings(given)
        self._inputs: Callable[[], Sequence[torch.Tensor]] = list
        self._saved: list[Form] = []  # what autograd would have kept
        self._again: list[torch.Tensor | None] = []  # the same, computed again and not handed out yet

    def forward(self, inputs: Callable[[], Sequence[torch.Tensor]]) -> Any:
        """Run for the first time. ``inputs`` gives the tensors back when backward comes."""
        self._inputs = inputs
        given, self._given = self._given, ()
        with saved_tensors_hooks(self._number, self._answer):
            output = self._run(*given)
        self._again = []  # where the block has computed gradients inside
        return output

    def _number(self, tensor: torch.Tensor) -> int:
        saved = self._saved
        saved.append((tensor.shape, tensor.dtype))
        return len(saved) - 1

    def _answer(self, number: int) -> torch.Tensor:
        again = self._again
        tensor = again[number] if number < len(again) else None
        if tensor is None:
            again = self._run_again()
            tensor = again[number]
            assert tensor is not None
        again[number] = None
        return tensor

    def _run_again(self) -> list[torch.Tensor | None]:
        again: list[torch.Tensor | None] = []
        saved = self._saved

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            if len(again) == len(saved):  # somebody has caught it
                raise _Enough
            if (tensor.shape, tensor.dtype) != saved[len(again)]:
                self._refuse(f"{_form(saved[len(again)])}, and now {_form((tensor.shape, tensor.dtype))}", len(again))
            kept = tensor.detach()
            again.append(kept)
            if len(again) == len(saved):
                raise _Enough
            return kept  # a block may compute gradients inside

        given = [
            tensor.detach().requires_grad_(differentiable)
            for tensor, differentiable in zip(self._inputs(), self._differentiable, strict=True)
        ]
        hooks = saved_tensors_hooks(keep, lambda kept: kept)
        with torch.enable_grad(), self._surroundings.restored(), hooks, contextlib.suppress(_Enough):
            self._run(*given)
        if len(again) < len(saved):
            self._refuse(f"{_form(saved[len(again)])}, and now nothing", len(again))
        self._again = again
        return again

    def _refuse(self, differs: str, number: int) -> None:
        raise RuntimeError(
            f"block {self._name!r} did something else when it ran again in backward: the first time autograd saved as "
            f"its tensor number {number} one of {differs}. A block has to compute the same from the same inputs: see "
            "whether it looks at something that changes in between, or leave it out of checkpoint_activations()"
        )


def _form(form: Form) -> str:
    return f"shape {tuple(form[0])} and {form[1]}"


@dataclass(frozen=True)
class Autocast:
    """Whether, and to what, operations on a kind of device cast by themselves."""

    kind: str
    enabled: bool
    dtype: torch.dtype
    caches: bool

    @classmethod
    def now(cls, kind: str) -> Autocast:
        """What holds at this moment."""
        enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        return cls(kind, enabled, dtype, torch.is_autocast_cache_enabled())

    def entered(self) -> contextlib.AbstractContextManager[object]:
        """Have it hold inside."""
        return torch.amp.autocast(self.kind, self.dtype, self.enabled, self.caches)


class Surroundings:
    """What a run depends on beside its inputs: random states, and automatic casts."""

    def __init__(self, given: Sequence[torch.Tensor]) -> None:
        devices = dict.fromkeys(tensor.device for tensor in given if tensor.is_cuda)
        self._generators = [torch.default_generator, *(_generator(device) for device in devices)]
        self._casts = [Autocast.now(kind) for kind in ("cpu", *dict.fromkeys(device.type for device in devices))]
        self._states = [generator.get_state() for generator in self._generators]

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Have inside what there was."""
        with contextlib.ExitStack() as stack:
            for cast in self._casts:
                if cast.enabled or torch.is_autocast_enabled(cast.kind):
                    stack.enter_context(cast.entered())
            present = [generator.get_state() for generator in self._generators]
            for generator, state, now in zip(self._generators, self._states, present, strict=True):
                if not torch.equal(state, now):
                    generator.set_state(state)
            try:
                yield
            finally:
                for generator, state in zip(self._generators, present, strict=True):
                    generator.set_state(state)


def _generator(device: torch.device) -> torch.Generator:
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]
