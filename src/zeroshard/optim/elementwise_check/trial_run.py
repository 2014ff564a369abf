"""One run of a trial: a copy of the user's optimizer steps its own parameters, and their values are recorded."""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from zeroshard.optim.elementwise_check.trial import ElementwiseMismatchError, Span, Trial, is_number, short_repr
from zeroshard.optim.optimizer_copy import (
    ElementwiseUndecidedError,
    OptimizerCopier,
    OptimizerRefusedError,
    SideEffectGuard,
)
from zeroshard.optim.slices import is_elementwise, is_scalar_state

JUMPS_TO_STEP = (9_998, 999_998)  # new values of step counters: after warmups, and just before multiples of periods
UNUSED_PERIOD = 3  # every third tensor has no gradient in one step


class _TrialParameter(nn.Parameter):
    """A parameter of a trial: has the attributes of one of the user's parameters, and records which are read."""

    def __getattr__(self, name: str) -> Any:
        """Return an attribute that the user has set."""
        found: _UserAttributes | None = self.__dict__.get("_user_attributes")
        if found is None or name not in found.all_names:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        found.reads.append(name)
        if name not in found.values:
            raise AttributeError(name)
        return found.values[name]


class _UserAttributes(NamedTuple):
    """The attributes that the user has set on one parameter."""

    values: dict[str, Any]
    all_names: Collection[str]  # of the attributes of any parameter
    reads: list[str]  # shared by all parameters of a trial


class _ParamNames(list[str]):
    """The names of a group's parameters; records that they are read."""

    reads: list[str]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names."""
        self.reads.append("param_names")
        return super().__iter__()

    def __getitem__(self, index: Any) -> Any:
        """Return a name, or several."""
        self.reads.append("param_names")
        return super().__getitem__(index)


class TrialRun:
    """A copy of the user's optimizer with its own parameters, and their values after each step."""

    def __init__(self, trial: Trial, spans: list[list[Span]], is_seeded: bool, is_full: bool = False) -> None:
        """``spans``: the tensors of each group."""
        self.trial, self.spans, self.is_seeded, self._is_full = trial, spans, is_seeded, is_full
        self.has_jumped = self.has_unused = False
        self._counters: set[Any] | None = None  # keys of the numbers that count steps
        self.values: list[torch.Tensor] = []  # [groups, elements] after each step; NaN: in no tensor
        self.parameters: list[list[nn.Parameter]] = []
        self.reads: list[str] = []  # attributes of parameters
        self._copier = OptimizerCopier(trial.optimizer, trial.device)
        self.inner = self._copier.clone
        for number, (group, values) in enumerate(zip(trial.groups, trial.initial_values, strict=True)):
            parameters: list[nn.Parameter] = [
                _TrialParameter(values[start:end].reshape(shape).clone()) for start, end, shape in spans[number]
            ]
            self.parameters.append(parameters)
            options = self._copier.copy_options(group, number)
            if is_number(options.get("lr")):
                options["lr"] = trial.lr(options)
            if is_full or trial.is_whole[number]:
                self._set_attributes(parameters, group["params"], spans[number])
            if "param_names" in group:
                options["param_names"] = self._choose_names(group, spans[number])
            self.inner.param_groups.append({**options, "params": parameters})
            if is_seeded:
                self._seed_states(group, parameters, spans[number])

    @cached_property
    def is_covered(self) -> torch.Tensor:
        """Which elements it has, as [groups, elements]."""
        covered = torch.zeros(len(self.spans), self.trial.spec.numel, dtype=torch.bool, device=self.trial.device)
        for number, spans in enumerate(self.spans):
            for start, end, _ in spans:
                covered[number, start:end] = True
        return covered

    def _set_attributes(self, parameters: list[nn.Parameter], originals: list[Any], spans: list[Span]) -> None:
        """Give the tensors the attributes that the user has set on parameters of as many dimensions; slices have none.

        A tensor has the same ones in all runs.
        """
        found = [(p.dim(), {k: v for k, v in vars(p).items() if not k.startswith("_zeroshard")}) for p in originals]
        all_names = {name for _, attributes in found for name in attributes}
        if not all_names:
            return
        for parameter, span in zip(parameters, spans, strict=True):
            same_dims = [attributes for dims, attributes in found if dims == len(span.shape)]
            distinct = list(
                {repr(attributes): attributes for attributes in same_dims or [a for _, a in found]}.values()
            )
            values = distinct[self._index_in_dims(span) % len(distinct)]
            parameter.__dict__["_user_attributes"] = _UserAttributes(values, all_names, self.reads)

    def _choose_names(self, group: Mapping[str, Any], spans: list[Span]) -> _ParamNames:
        """Return a name for each tensor, of a parameter of as many dimensions; the same one in all runs."""
        named, chosen = list(zip(group["params"], group["param_names"], strict=True)), _ParamNames()
        for span in spans:
            names = [name for p, name in named if p.dim() == len(span.shape)] or [name for _, name in named]
            is_full = span in self.trial.spec.tensors
            chosen.append(names[self._index_in_dims(span) % len(names)] if is_full else names[0])
        chosen.reads = self.reads
        return chosen

    def _index_in_dims(self, span: Span) -> int:
        """Return the index of a full tensor among those of as many dimensions."""
        return [tensor for tensor in self.trial.spec.tensors if len(tensor.shape) == len(span.shape)].index(span)

    def _seed_states(self, group: Mapping[str, Any], parameters: list[nn.Parameter], spans: list[Span]) -> None:
        """Create states like those of the optimizer: its constructor may have made states that a step needs."""
        original, numel = self.trial.optimizer.state, self.trial.spec.numel
        example: Any = next((p for p in group["params"] if original.get(p)), None)
        for key, value in original[example].items() if example is not None else ():
            if is_elementwise(key, value, example.shape):
                sample = value.detach().flatten()[:numel].to(self.trial.device)
                if not sample.numel():
                    continue
                flattened = sample.repeat(-(-numel // sample.numel()))[:numel]
                dtype = parameters[0].dtype if parameters and value.is_floating_point() else value.dtype
                for parameter, (start, end, _) in zip(parameters, spans, strict=True):
                    part = flattened[start:end].to(dtype).reshape(parameter.shape)
                    self.inner.state[parameter][key] = part.clone()
            elif is_scalar_state(value):
                for parameter in parameters:
                    where = f"the state {key!r} of a parameter"
                    self.inner.state[parameter][key] = self._copier.copy(value, where)
            else:
                raise ElementwiseMismatchError(
                    f"the state {key!r} of a parameter of shape {tuple(example.shape)} is {short_repr(value)}"
                )

    def run(self, jump: bool, has_unused: bool) -> None:
        """Step with each gradient; if ``jump``, advance the step counters in between.

        If ``has_unused``, some tensors have no gradient in one of the steps.
        """
        device, spec = self.trial.device, self.trial.spec
        gradients = self.trial.gradients
        default_device = device if torch.get_default_device() != device else nullcontext()
        self.has_unused = has_unused
        # The guard takes as long as all else. What a rank has is part of what it has seen in the run on full tensors.
        guard = SideEffectGuard() if self._is_full else nullcontext()  # type: ignore[no-untyped-call]
        with torch.no_grad(), default_device:
            self._call("train", guard)
            before: dict[Any, float] = {}
            for step in range(len(spec.grad_scales) + len(spec.grad_scales_after_jump)):
                if step == len(spec.grad_scales) - 2:
                    before = {key: value for key, value, _ in self._stored_numbers()}
                if jump and step >= len(spec.grad_scales) and (step - len(spec.grad_scales)) % 3 == 0:
                    self._advance_counters(before, JUMPS_TO_STEP[(step - len(spec.grad_scales)) // 3])
                self._set_gradients([values[step] for values in gradients], has_unused and step == 2)
                with guard:
                    type(self.inner).step(self.inner)
                self._record_values()
            if self._call("eval", guard):  # schedule-free optimizers swap parameter values here
                self._record_values()
                with guard:
                    self.inner.train()
                self._record_values()

    def _call(self, name: str, guard: AbstractContextManager[Any]) -> bool:
        """Call a method that not every optimizer has; return whether it has it."""
        method = getattr(self.inner, name, None)
        if not callable(method):
            return False
        with guard:
            method()
        return True

    def _set_gradients(self, gradients: list[torch.Tensor], has_unused: bool) -> None:
        unused_starts = {span.start for span in self.trial.spec.tensors[1::UNUSED_PERIOD]}
        for number, (parameters, spans) in enumerate(zip(self.parameters, self.spans, strict=True)):
            can_be_unused = has_unused and (self.trial.is_whole[number] or not self.trial.has_whole)
            for parameter, span in zip(parameters, spans, strict=True):
                gradient = gradients[number][span.start : span.end].reshape(span.shape).clone()
                is_unused = can_be_unused and span.start in unused_starts
                parameter.grad = None if is_unused else gradient

    def check_values(self) -> None:
        """Raise if the values cannot be compared."""
        first, last = torch.stack(self.trial.initial_values)[self.is_covered], self.values[-1][self.is_covered]
        if not bool(last.isfinite().all()):
            raise ElementwiseUndecidedError("its values became infinite or NaN")
        if len(self.values) > 1 and torch.equal(first, last):  # a warmup may begin with a learning rate of 0
            raise ElementwiseUndecidedError("its steps changed nothing")

    def check_storable(self) -> None:
        """Raise if the optimizer keeps states that a checkpoint would not contain."""
        own_ids = {id(p) for parameters in self.parameters for p in parameters}
        for key in self.inner.state:
            if id(key) not in own_ids:
                raise OptimizerRefusedError(
                    f"it keeps a state under {short_repr(key)}, which is not one of its parameters: a checkpoint "
                    "would not contain it, and ranks may have different ones. Keep it in the states of a parameter"
                )
        for parameter in (p for parameters in self.parameters for p in parameters if self.trial.has_whole):
            own_memory = parameter.untyped_storage().data_ptr()
            for key, value in self.inner.state.get(parameter, {}).items():
                if any(own_memory == t.untyped_storage().data_ptr() for t in tree_leaves(value) if _is_plain(t)):
                    raise OptimizerRefusedError(
                        f"its state {key!r} shares the memory of its parameter, and an owner has the values of a "
                        "parameter only in a step: clone it in the optimizer"
                    )
        if type(self.inner).state_dict is not torch.optim.Optimizer.state_dict:
            more = sorted(map(str, self.inner.state_dict().keys() - {"state", "param_groups"}))
            if more:
                raise OptimizerRefusedError(
                    f"its state_dict() also has {', '.join(map(repr, more))}, which a checkpoint would not contain. "
                    "Keep it in the groups or in the states of parameters"
                )

    def _record_values(self) -> None:
        spec, trial = self.trial.spec, self.trial
        recorded = torch.full((len(self.spans), spec.numel), math.nan, dtype=trial.dtype, device=trial.device)
        flattened = [p.detach().flatten() for parameters in self.parameters for p in parameters]
        recorded[self.is_covered] = torch.cat(flattened) if flattened else recorded.new_zeros(0)
        self.values.append(recorded)

    def _stored_numbers(self) -> Iterable[tuple[Any, float, Callable[[Any], Any]]]:
        """Yield every number that the optimizer stores: its key, its value, and a function that sets it."""
        states = [self.inner.state[p] for group in self.parameters for p in group if p in self.inner.state]
        stores: list[Any] = [*self.inner.param_groups, *(s for s in states if isinstance(s, dict)), vars(self.inner)]
        for store_index, store in enumerate(stores):
            for key, value in list(store.items()):
                if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex():
                    yield (store_index, key), value.item(), value.fill_
                elif is_number(value):
                    yield (store_index, key), value, partial(store.__setitem__, key)

    def _advance_counters(self, before: dict[Any, float], to_step: int) -> None:
        """Set every number that counts steps to ``to_step``; ``before``: the numbers two steps before the first jump.

        A number counts steps if it has grown by 2 since then.
        """
        numbers = list(self._stored_numbers())
        if self._counters is None:
            self._counters = {key for key, value, _ in numbers if key in before and value - before[key] == 2}
        for key, value, set_value in numbers:
            if key in self._counters and value < to_step:
                set_value(type(value)(to_step))
                self.has_jumped = True

    @property
    def stored(self) -> dict[str, Any]:
        """What the optimizer stores in its groups and in its own attributes, by description."""
        groups = self.inner.param_groups
        found: dict[str, Any] = {}
        for number, group in enumerate(groups):
            of = "" if len(groups) == 1 else f" of group {number}"
            found |= {
                f"the group's number {key + of!r}": value
                for key, value in group.items()
                if key not in ("params", "param_names")
            }
        for key, value in vars(self.inner).items():
            is_function = isinstance(value, (types.MethodType, types.FunctionType, partial))
            is_torchs = key in ("param_groups", "state", "defaults") or key.startswith("_optimizer_")
            if not is_function and not is_torchs:
                found[f"its attribute {key!r}"] = value
        return found


def _is_plain(value: Any) -> bool:
    return type(value) in (torch.Tensor, nn.Parameter, _TrialParameter)
