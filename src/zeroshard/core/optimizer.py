"""ShardedOptimizer: the user's groups, and a private optimizer of the same class that steps slices of the masters."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch.optim import Optimizer

from zeroshard.core.checks.optimizers import is_known, names_to_add, replace_methods
from zeroshard.core.checks.steps import Groups, check_step, without_gradient
from zeroshard.core.engine import Engine
from zeroshard.core.flat import Flat
from zeroshard.core.fused_adam import FusedAdam
from zeroshard.core.loss_scale import LossScale
from zeroshard.core.norms import norms_over_ranks
from zeroshard.core.order import Kind
from zeroshard.core.slices import Slice, joined, split_by_gradient


class NoStates(dict[Any, Any]):
    """What ``optimizer.state`` is: empty, and not to be asked by parameter. Clearing it drops all states."""

    def __init__(self, states: dict[Any, Any]) -> None:
        self.clear = states.clear  # type: ignore[method-assign]

    def __missing__(self, parameter: Any, *_: Any) -> NoReturn:
        raise RuntimeError(
            "optimizer.state has no states of whole parameters, since each rank has a part of them: read them with "
            "optimizer.state_dict(), and change them with optimizer.load_state_dict()"
        )

    __setitem__ = __delitem__ = __contains__ = get = pop = setdefault = __missing__


class ShardedOptimizer(Optimizer):
    """Updates this rank's part of every parameter: what :func:`zeroshard.shard` returns for an optimizer.

    Its groups, defaults and hooks are those of the given optimizer, so a scheduler that was made for that works.
    """

    def __init__(self, engine: Engine, user: Optimizer) -> None:
        self._groups: Groups = [(group, list(map(id, group["params"]))) for group in user.param_groups]
        self._label = f"of optimizer {len(engine.groups)}"
        engine.groups.append(self._groups)
        shared = {name: value for name, value in vars(user).items() if not callable(value)}
        self.__dict__.update(shared)
        self._patch_step_function()
        self._engine = engine
        self._user = user
        self._inner = _private_copy(user)
        self._step_inner = type(user).step.__wrapped__  # type: ignore[attr-defined]  # without torch's global hooks
        self._is_known = is_known(type(user))
        self._slices: list[Slice] = []
        self._set_slices(self._new_slices())
        self._fused = FusedAdam.of(self._inner, engine)
        if user.state:
            self.load_state_dict(user.state_dict())
            user.state.clear()
        self._join_slices()
        self._user_attributes = replace_methods(user)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raise: this rank has a part of the states."""
        return self._engine.__reduce__()

    @property
    def state(self) -> NoStates:  # type: ignore[override]
        """Nothing: see :meth:`state_dict`."""
        return NoStates(self._inner.state)

    # -- slices -------------------------------------------------------------------------------------------------

    def _new_slices(self, first: int = 0) -> list[Slice]:
        """Return one slice for each parameter of the groups from this one on."""
        found = []
        for number, group in list(enumerate(self.param_groups))[first:]:
            for flat, index in map(self._engine.place.__getitem__, map(id, group["params"])):
                if flat.is_trainable:
                    found.append(Slice(number, flat, range(index, index + 1)))
        return found

    def _set_slices(self, slices: list[Slice]) -> None:
        self._slices = slices
        for number, group in enumerate(self._inner.param_groups):
            group["params"] = [each.values for each in slices if each.group == number]

    def _slices_with_gradient(self) -> list[Slice]:
        """Divide the slices, so that all parameters of each have a gradient or none has; return those that have."""
        gradients = self._engine.gradient_of
        slices = split_by_gradient(self._slices, gradients, self._inner.state)
        if len(slices) > len(self._slices):
            self._set_slices(slices)
        return [each for each in slices if gradients[each.flat].has_grad[each.indices[0]]]

    def _join_slices(self) -> None:
        self._set_slices(joined(self._slices, self._engine.flats, self._inner.state))

    def _places(self) -> Iterator[tuple[Flat, int]]:
        for group in self.param_groups:
            for parameter in group["params"]:
                yield self._engine.place[id(parameter)]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters of the model."""
        params = param_group["params"]
        params = [params] if isinstance(params, torch.Tensor) else list(params)
        names = names_to_add(params, self._engine)
        self._engine.order.record(Kind.ADD, f"of {names}, {self._label}")
        super().add_param_group({**param_group, "params": params})
        group = self.param_groups[-1]
        self._groups.append((group, list(map(id, group["params"]))))
        self._inner.param_groups.append({**group, "params": []})
        self._set_slices(self._slices + self._new_slices(len(self.param_groups) - 1))
        self._join_slices()

    # -- a step -------------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters with the mean of the gradients over the ranks."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        engine = self._engine
        if engine.gathered_count:
            raise RuntimeError("a step inside gathered(model) would be lost at its end: call step() after it")
        engine.finish_gradients()
        engine.observers.on_step(engine)
        check_step(self._groups, self.param_groups, engine)
        with torch.no_grad():
            slices = self._slices_with_gradient()
            is_all = len(slices) == len(self._slices)
            engine.order.record(Kind.STEP, self._label + ("" if is_all else without_gradient(self._slices, slices)))
            for unit in engine.units:
                if unit.refresh is not None:  # of another optimizer's step
                    unit.finish_refresh()
            found_inf = None if engine.loss_scale is None else self._find_overflow(slices, engine.loss_scale)
            is_written = False
            try:
                with self._options_shared():
                    is_written = self._update(slices, found_inf)
            finally:  # also after an error: what has changed by then is known to all ranks
                engine.end_step({each.flat: is_written for each in slices})
        return loss

    def _find_overflow(self, slices: list[Slice], loss_scale: LossScale) -> torch.Tensor:
        """Return 1 if a gradient has overflowed on any rank, else 0."""
        engine = self._engine
        gradients = engine.gradient_of
        is_scaled = any(gradients[each.flat].summand_factor is not None for each in slices)
        engine.order.record(Kind.OVERFLOW)
        return loss_scale.find_overflow([each.gradient(gradients) for each in slices], engine.axes, is_scaled)

    def _update(self, slices: list[Slice], found_inf: torch.Tensor | None) -> bool:
        """Update slices, unless a gradient has overflowed; return whether this rank's parameters are written, too."""
        if self._fused is not None and self._fused.can_step():
            self._fused.step(slices, found_inf)
            return True
        if found_inf is not None and bool(found_inf):
            return False
        batches = _batches(slices, self._engine) if self._is_known else [slices]
        for batch in batches:
            for each in batch:
                each.set_gradient(self._engine.gradient_of)
            self._step_inner(self._inner)
            for each in batch:
                each.values.grad = None
                if not self._is_known:
                    each.take_back()
        return False

    @contextmanager
    def _options_shared(self) -> Iterator[None]:
        """Give the private optimizer the options of the user's groups, and these what it changes."""
        pairs = list(zip(self.param_groups, self._inner.param_groups, strict=True))
        for group, inner in pairs:
            inner.update({name: value for name, value in group.items() if name != "params"})
        try:
            yield
        finally:
            for group, inner in pairs:
                group.update({name: value for name, value in inner.items() if name != "params"})

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of this optimizer's parameters, or make them zero."""
        self._engine.abort_backward()
        with torch._C.DisableTorchFunctionSubclass():
            if set_to_none:
                for group in self.param_groups:
                    for parameter in group["params"]:
                        parameter.grad = None
                for gradient in self._engine.gradients:
                    gradient.collect()
            else:
                self._engine.order.record(Kind.ZERO, self._label)
                super().zero_grad(set_to_none=False)

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return what a backward starts from: with fp16 a scaled loss, else the loss itself."""
        scale = self._engine.loss_scale
        return loss if scale is None else scale.scale(loss)

    @property
    def loss_scale(self) -> torch.Tensor | None:
        """The scale of the next loss, with fp16."""
        scale = self._engine.loss_scale
        return None if scale is None else scale.value

    def loss_scale_state(self) -> list[float] | None:
        """Return the loss scale of fp16 and the steps since the last overflow, for :meth:`load_loss_scale`."""
        scale = self._engine.loss_scale
        return None if scale is None else scale.state()

    def load_loss_scale(self, state: list[float]) -> None:
        """Load what :meth:`loss_scale_state` has returned; nothing with other precisions."""
        if self._engine.loss_scale is not None:
            self._engine.loss_scale.load(state)

    # -- clipping -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale the gradients so that their norm over all parameters and ranks is at most ``max_norm``.

        Return the norm before. All ranks call it together.
        """
        if not norm_type > 0:
            raise ValueError(f"norm_type is a positive number or infinity, got {norm_type}")
        slices = self._gradient_slices()
        engine = self._engine
        gradients = engine.gradient_of
        flats = Counter(each.flat for each in slices for _ in each.indices)
        factors = {gradients[flat].factor for flat in flats}
        earlier = factors.pop() if len(factors) == 1 else None  # of all: the norm is multiplied, and not the gradients
        for flat in flats:
            if gradients[flat].factor is not earlier:
                gradients[flat].set_factor(None)
        parts = [each.gradient(gradients) for each in slices if each.flat.layout.counts(each.flat.grad_placements)]
        engine.order.record(Kind.NORM)
        total = norms_over_ranks(parts, norm_type, engine.axes, engine.device, is_total=True)[0]
        total = total if earlier is None else total * earlier
        if error_if_nonfinite and not bool(torch.isfinite(total)):
            raise RuntimeError(f"the gradient norm is {total.item()}: the gradients were not clipped")
        coefficient = (max_norm / (total + 1e-6)).clamp(max=1.0)
        factor = coefficient if earlier is None else earlier * coefficient
        for flat, count in flats.items():
            if count == sum(gradients[flat].has_grad):
                gradients[flat].factor = factor
        for each in slices:
            if gradients[each.flat].factor is not factor:  # other parameters of the flat are not clipped
                each.gradient(gradients).mul_(coefficient)
        return total

    @torch.no_grad()
    def clip_grad_value_(self, clip_value: float) -> None:
        """Clamp every element of the gradients to [-clip_value, clip_value]."""
        slices = self._gradient_slices()
        gradients = self._engine.gradient_of
        for each in slices:
            gradients[each.flat].set_factor(None)
        parts = [each.gradient(gradients) for each in slices]
        if parts:
            torch._foreach_clamp_min_(parts, -clip_value)
            torch._foreach_clamp_max_(parts, clip_value)

    def _gradient_slices(self) -> list[Slice]:
        """Return the slices that have a gradient, of which this rank's parts may be changed in place."""
        self._engine.finish_gradients()
        return self._slices_with_gradient()

    # -- states -------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the states of whole parameters, as the given optimizer would: a collective."""
        engine = self._engine
        engine.order.record(Kind.VALUES)
        slice_of = {(each.flat, index): each for each in self._slices for index in each.indices}
        states: dict[int, dict[str, Any]] = {}
        for number, (flat, index) in enumerate(self._places()):
            each = slice_of.get((flat, index))
            state = {} if each is None else each.cut(self._inner.state.get(each.values, {}), range(index, index + 1))
            for name, value in state.items():
                is_part = isinstance(value, torch.Tensor) and value.dim() > 0
                states.setdefault(number, {})[name] = flat.gather_one(value, index) if is_part else value
        return {"state": states, "param_groups": self._packed_groups()}

    def _packed_groups(self) -> list[dict[str, Any]]:
        packed = []
        count = 0
        for group in self.param_groups:
            numbers = list(range(count, count + len(group["params"])))
            packed.append({**{name: value for name, value in group.items() if name != "params"}, "params": numbers})
            count += len(numbers)
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the states of whole parameters, as :meth:`state_dict` returns them or a plain optimizer does."""
        self._set_slices(self._new_slices())
        numbers = {place: number for number, place in enumerate(self._places())}
        kept: dict[int, dict[str, Any]] = {}
        groups = []
        if [len(given["params"]) for given in state_dict["param_groups"]] != [
            len(g["params"]) for g in self.param_groups
        ]:
            raise ValueError("the loaded groups have other numbers of parameters than those of this optimizer")
        for given, inner in zip(state_dict["param_groups"], self._inner.param_groups, strict=True):
            groups.append({**given, "params": list(range(len(kept), len(kept) + len(inner["params"])))})
            for each in (each for each in self._slices if any(each.values is value for value in inner["params"])):
                number = numbers[each.flat, each.indices[0]]
                kept[len(kept)] = each.cut_whole(state_dict["state"].get(number, {}))
        self._inner.load_state_dict({**state_dict, "state": kept, "param_groups": groups})
        for group, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            group.update({name: value for name, value in inner.items() if name != "params"})
        self._join_slices()

    def unwrapped(self, state_dict: dict[str, Any]) -> Optimizer:
        """Return the given optimizer with these states."""
        vars(self._user).clear()
        vars(self._user).update(self._user_attributes)
        self._user.load_state_dict(state_dict)
        return self._user


def _private_copy(user: Optimizer) -> Optimizer:
    """Return an optimizer of the same class, options and attributes, whose parameters are still to come."""
    inner: Optimizer = object.__new__(type(user))
    inner.__dict__.update(vars(user))
    inner.__dict__.pop("step", None)  # of a scheduler
    for name in vars(user):
        if name.startswith("_optimizer_"):
            setattr(inner, name, OrderedDict())  # hooks see the user's groups
    inner.state = defaultdict(dict)
    inner.param_groups = [{**group, "params": []} for group in user.param_groups]
    return inner


def _batches(slices: list[Slice], engine: Engine) -> list[list[Slice]]:
    """Divide slices, so that copies of their gradients in the dtype of the masters need constant memory."""
    batches: list[list[Slice]] = [[]]
    left = engine.context.config.bucket_size
    for each in slices:
        needs_copy = each.flat.dtype != each.values.dtype
        if needs_copy and batches[-1] and each.values.numel() > left:
            batches.append([])
            left = engine.context.config.bucket_size
        batches[-1].append(each)
        left -= each.values.numel() if needs_copy else 0
    return batches
