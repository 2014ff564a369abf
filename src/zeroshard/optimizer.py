"""ShardedOptimizer: the user's own torch optimizer, run on this rank's shards (see [Note: runs] in runs.py)."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from zeroshard.engine.engine import Engine
from zeroshard.engine.flat import Flat
from zeroshard.engine.flat_gradient import FlatGradient
from zeroshard.engine.guards import refuse_join
from zeroshard.engine.parameter import NOT_PICKLED, card_of, versions_of
from zeroshard.engine.whole import assemble, find
from zeroshard.groups import Group, Told
from zeroshard.host.updates import HostUpdates
from zeroshard.layout import Range
from zeroshard.memory.spread import Spread, Stretch
from zeroshard.memory.tiers import Tiers
from zeroshard.offload import TIERS
from zeroshard.optimizer_probe import refuse_unfit_group
from zeroshard.precision import LossScale
from zeroshard.runs import Run, is_counter, is_elementwise, place_runs
from zeroshard.update import Update


@dataclass
class _Aside:
    """The states of a parameter that is in a group and frozen: no run holds them."""

    lines: dict[str, torch.Tensor]  # elementwise ones: what this rank owns, laid end to end
    counters: dict[str, Any]


class ShardedOptimizer(torch.optim.Optimizer):
    """Returned by :func:`zeroshard.shard`: steps the inner optimizer on shards and brings the new parameters about.

    It shares groups, hyper-parameters and states with the optimizer it was given, so schedulers work on either.

    >>> import zeroshard
    >>> model = torch.nn.Linear(2, 2)
    >>> model, optimizer = zeroshard.shard(model, torch.optim.Adam(model.parameters(), lr=0.1))
    >>> scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    >>> isinstance(optimizer, torch.optim.Optimizer), type(optimizer.inner).__name__
    (True, 'Adam')
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        engine: Engine,
        names: dict[int, str],
        loss_scale: LossScale | None,
        tiers: Tiers,
    ) -> None:
        self.inner = inner
        self._engine = engine
        self._scale = engine.states.loss_scale = loss_scale
        self._host = HostUpdates(inner, engine, tiers) if tiers.offload is not None else None
        self._update = Update(inner, engine, loss_scale, self._host)
        self._flats = list(engine.gradients.of_flat)
        self._compared = False  # gradients over the tensor axis, in the first step
        self._trained: list[torch.nn.Parameter] | None = None  # the groups' parameters, when last asked for
        self._all_used = True  # whether every parameter had a gradient on some rank in this step
        self._used_cache: tuple[tuple[bool, ...], torch.Tensor] | None = None
        self._told = Told(engine.comm.device)  # by all ranks, of the hyper-parameters
        self._apart: list[tuple[FlatGradient, int]] | None = None  # see ``_others``
        self._aside: dict[str, _Aside] = {}  # states of frozen parameters, by name
        plain = [[names[id(parameter)] for parameter in group["params"]] for group in inner.param_groups]
        states = {names[id(p)]: _whole(state) for p, state in inner.state.items() if id(p) in names}
        super().__init__([torch.zeros(0)], {})
        self.param_groups = [self._group(group, names) for group, names in zip(inner.param_groups, plain, strict=True)]
        self.state, self.defaults = inner.state, inner.defaults
        self.names = plain  # per group, in the order the user gave them
        self._runs: list[list[Run]] = [[] for _ in plain]
        self.state.clear()
        for index, group in enumerate(plain):
            self._set_runs(index, self._place_runs(group))
        self._load_states(states)
        self._modes = self._take_modes()
        engine.states.on_device = weakref.WeakMethod(self._states_on_device)
        if self._host is not None:
            engine.states.updates = weakref.ref(self._host)
            engine.gradients.landed = weakref.WeakMethod(self._host.landed)
            engine.gradients.look_for_overflow = loss_scale is not None

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse to be pickled or copied: a copy would share shards and collectives with the original."""
        raise RuntimeError(f"{NOT_PICKLED}. To copy the optimizer's states, use copy.deepcopy(optimizer.state_dict())")

    def join_hook(self, **options: object) -> NoReturn:
        """Refuse torch's Join."""
        refuse_join()

    # -- the user's side ----------------------------------------------------------------------------------------

    if not TYPE_CHECKING:  # which would take every name for one of these

        def __getattr__(self, name: str) -> Any:
            """Give ``train()`` and ``eval()`` where the inner optimizer has them, as schedule-free ones do.

            They change parameters, so all ranks call them together; forward then uses the new values on every rank.
            """
            if name in self.__dict__.get("_modes", ()):
                return partial(self._switch, name)
            raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")

    def _take_modes(self) -> dict[str, Callable[[], Any]]:
        """Take the inner optimizer's ``train()`` and ``eval()``: called there, they come here."""
        found = ((name, getattr(self.inner, name, None)) for name in ("train", "eval"))
        modes = {name: method for name, method in found if callable(method)}
        for name in modes:
            self.inner.__dict__[name] = partial(_switch_by_inner, weakref.ref(self), name)
        return modes

    def give_modes_back(self) -> None:
        """Undo what makes the inner optimizer's ``train()`` and ``eval()`` come here."""
        for name in self._modes:
            self.inner.__dict__.pop(name, None)

    def _switch(self, name: str) -> Any:
        engine = self._engine
        if engine.running:
            raise RuntimeError(f"optimizer.{name}() was called in a forward or backward: call it between steps")
        engine.order.begin(f"optimizer.{name}()")
        engine.states.refuse_spoilt("weights", "optimizer")
        engine.states.settle()
        engine.states.finish_updates()
        with torch.no_grad():
            result = self._modes[name]()
        engine.states.adopt()
        engine.drop_pins()
        return result

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Multiply the loss by fp16's loss scale; under other precisions return it as it is."""
        if self._scale is None:
            return loss
        scaled = self._scale.apply(loss)
        if scaled.requires_grad:
            gradients = self._engine.gradients
            scaled.register_hook(partial(gradients.expect_scaled, self._scale.inverse))  # type: ignore[no-untyped-call]
        return scaled

    @property
    def loss_scale(self) -> torch.Tensor | None:
        """fp16's present loss scale, on the device; None under other precisions."""
        return None if self._scale is None else self._scale.scale

    def loss_scale_state(self) -> list[float] | None:
        """fp16's loss scale and its streak without overflow, as :meth:`load_state_dict` takes them."""
        return None if self._scale is None else self._scale.state()

    def load_loss_scale(self, state: list[float]) -> None:
        """Go on from :meth:`loss_scale_state`; under other precisions there is nothing to do."""
        if self._scale is not None:
            self._scale.load(state)

    @torch.no_grad()
    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale all gradients so that their global norm is at most ``max_norm``; return the norm before.

        All ranks call it together. The result stays on the device; nothing waits for it.
        """
        if norm_type not in (2, math.inf):
            raise ValueError(f"norm_type is 2 or inf, got {norm_type!r}")
        self._engine.states.refuse_away()
        gradients = self._engine.gradients
        self._engine.order.begin("clip" + self._scaled)
        self._engine.reduce_rest()
        norm = self._norm_of_groups(norm_type) if self._others() else self._global_norm(norm_type)
        if error_if_nonfinite and not bool(torch.isfinite(norm)):
            raise RuntimeError(f"the norm of the gradients is {norm.item()}: not clipped")
        coefficient = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        if self._others():  # what is in no group is not clipped
            parts = [part for gradient, index in self._own() for _, part in gradient.parts_of(index)]
            self._engine.states.doubt()
            for gradient in gradients.of_flat.values():
                gradients.changed(gradient)
            gradients.multiply(parts, coefficient)
            return norm
        earlier = gradients.coefficient
        gradients.coefficient = coefficient if earlier is None else earlier * coefficient
        return norm

    @torch.no_grad()
    def clip_grad_value_(self, clip_value: float) -> None:
        """Limit every element of the gradients to ``-clip_value`` … ``clip_value``. All ranks call it together.

        >>> import zeroshard
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> model, optimizer = zeroshard.shard(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> model(torch.tensor([[3.0, -0.5]])).sum().backward()
        >>> optimizer.clip_grad_value_(1.0)
        >>> zeroshard.full_gradient(model, "weight")
        tensor([[ 1.0000, -0.5000]])
        """
        self._engine.states.refuse_away()
        gradients = self._engine.gradients
        self._engine.order.begin("clip" + self._scaled)
        self._engine.reduce_rest()
        gradients.apply_coefficient()
        self._engine.states.doubt()
        for gradient in gradients.of_flat.values():
            gradients.changed(gradient)
        parts = [part for gradient, index in self._own() for _, part in gradient.parts_of(index)]
        limit = torch.tensor(float(clip_value), device=self._engine.comm.device)
        limit = limit if gradients.inverse is None else limit / gradients.inverse
        for part in parts if self._others() else gradients.shards():
            high = limit.to(part.device, part.dtype)
            torch.clamp(part, -high, high, out=part)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Reduce what is still to be reduced, update this rank's shards, and start to bring the result to all ranks."""
        loss = None
        self._engine.states.refuse_away()
        self._engine.states.refuse_gathered("optimizer.step()")
        if closure is not None:
            self._refuse_frozen()
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            self._engine.order.begin(f"step after {self._engine.backwards} backwards{self._scaled}")
            for group in self.param_groups:
                group.refuse_changed()  # type: ignore[attr-defined]
            self._refuse_frozen()
            backwards, self._engine.backwards = self._engine.backwards, 0
            self._engine.reduce_rest()
            self._refuse_partial()
            self._find_unused()
            self._engine.states.settle()
            self._engine.states.take_in_edits()
            self._engine.drop_pins()
            changed = self._update.run([run for run in self._all_runs() if self._has_gradient(run)], backwards)
            if changed is not None:
                self._engine.states.copy_masters(changed, near=True)
                self._engine.states.values_changed(self._updated())
                self._engine.states.refresh_parameters()
            self._engine.gradients.coefficient = None
        self._count_states()
        self._engine.comm.counters.roll()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of the groups' parameters, or make them zero."""
        if self._engine.gradients.memory.held:
            self._engine.states.refuse_away()
        self._engine.states.doubt()
        if not set_to_none:
            self._engine.states.finish_updates()
        if self._others():
            self._clear_own(set_to_none)
        else:
            self._engine.gradients.clear(set_to_none)

    @torch.no_grad()
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters of the sharded model that no group holds yet."""
        if not hasattr(self, "_runs"):  # torch's own constructor
            super().add_param_group(param_group)
            return
        params = param_group["params"]
        params = [params] if isinstance(params, torch.Tensor) else list(params)
        titles = [entry[0] for entry in params if isinstance(entry, tuple)]  # from named_parameters()
        params = [entry[1] if isinstance(entry, tuple) else entry for entry in params]
        taken = {name for group in self.names for name in group}
        names = []
        for parameter in params:
            card = card_of(parameter)
            if card is None or card.flat() not in self._flats:
                raise ValueError("add_param_group takes trainable parameters of the sharded model itself")
            if card.name in taken:
                raise ValueError(f"{card.name!r} is in a parameter group already")
            names.append(card.name)
        self._engine.states.refuse_gathered("add_param_group()")
        config = self._engine.config
        dtype = None if config.precision is None else torch.float32
        refuse_unfit_group(self.inner, {**param_group, "params": params}, config.elementwise, dtype)
        self._engine.states.settle()
        self._engine.states.finish_updates()
        self._open_masters(set(names))
        stand_in = torch.zeros(0, requires_grad=True)  # lets the inner optimizer check the group and fill in defaults
        self.inner.add_param_group({**param_group, "params": [("", stand_in) if titles else stand_in]})
        if titles:
            self.inner.param_groups[-1]["param_names"] = titles
        self.names.append(names)
        self.param_groups.append(self._group(self.inner.param_groups[-1], names))
        self._apart = None
        self._runs.append([])
        self._set_runs(len(self.names) - 1, self._place_runs(names))

    def _place_runs(self, names: list[str]) -> list[Run]:
        return place_runs(self._flats, set(names), self._update.longest, self._engine.gradients.memory.pieces)

    def state_bytes(self, tier: str | None = None) -> int:
        """Bytes of the optimizer's states on this rank, or in one tier, the master copy not counted."""
        tensors = [
            value
            for run in self._all_runs()
            if tier is None or tier == ("device" if run.stretch is None else run.stretch.tier)
            for value in list(self.state.get(run.parameter, {}).values())  # an update under way may add to it
            if isinstance(value, torch.Tensor)
        ]
        return sum(tensor.nbytes for tensor in (*tensors, *(self._tensors_aside() if tier in (None, "device") else ())))

    def _states_on_device(self) -> list[torch.Tensor]:
        states = [self.state.get(run.parameter, {}) for run in self._all_runs() if run.stretch is None]
        tensors = [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]
        tensors += self._tensors_aside()
        return [tensor for tensor in tensors if tensor.device == self._engine.comm.device]

    def _count_states(self) -> None:
        for tier in TIERS if self._host is not None else TIERS[:1]:
            self._engine.ledger.set("optimizer states", self.state_bytes(tier), tier)

    # -- one step -----------------------------------------------------------------------------------------------

    def _global_norm(self, norm_type: float) -> torch.Tensor:
        comm, infinite = self._engine.comm, norm_type == math.inf
        found = self._engine.gradients.norms(norm_type)
        norms = torch.stack(found) if found else torch.zeros(1, device=comm.device)
        total = norms.max().nan_to_num(nan=math.inf, posinf=math.inf) if infinite else norms.square().sum()
        op = dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM
        for axis in (comm.shard, comm.tensor):  # along the other axes, every rank has the same
            if axis.size > 1:
                what = "sum the gradients' norm"
                self._engine.order.check(what)
                comm.all_reduce(total, axis, what, op).wait()
        norm = total if infinite else total.sqrt()
        for factor in (self._engine.gradients.coefficient, self._engine.gradients.inverse):
            norm = norm if factor is None else norm * factor
        return norm

    @property
    def _scaled(self) -> str:
        """For the name of a pass: gradients that carry a loss scale on one rank and none on another are not added."""
        return "" if self._engine.gradients.inverse is None else " of scaled losses"

    # -- what is in the groups, and what is not -----------------------------------------------------------------

    def _group(self, inner: dict[str, Any], names: list[str]) -> Group:
        flats = [flat for unit in self._engine.units for flat in unit.flats]
        parameters = {name: parameter for flat in flats for name, parameter in flat.named_parameters}
        return Group(inner, [parameters[name] for name in names])

    def _others(self) -> list[tuple[FlatGradient, int]]:
        """The trainable parameters that are in no group: their gradients are not this optimizer's."""
        if self._apart is None:
            own = {name for group in self.names for name in group}
            self._apart = [place for place in self._trainable() if place[0].flat.names[place[1]] not in own]
        return self._apart

    def _own(self) -> list[tuple[FlatGradient, int]]:
        own = {name for group in self.names for name in group}
        return [place for place in self._trainable() if place[0].flat.names[place[1]] in own]

    def _trainable(self) -> list[tuple[FlatGradient, int]]:
        gradients = self._engine.gradients.of_flat.values()
        return [(gradient, index) for gradient in gradients for index in range(len(gradient.used))]

    def _norm_of_groups(self, norm_type: float) -> torch.Tensor:
        own = {name for group in self.names for name in group}
        wanted = [gradient.flat.names[index] in own for gradient, index in self._trainable()]
        norms = self._engine.gradients.parameter_norms(norm_type)
        norm: torch.Tensor = torch.linalg.vector_norm(
            norms[torch.tensor(wanted, device=norms.device)], norm_type
        ).float()
        return norm

    def _clear_own(self, set_to_none: bool) -> None:
        gradients = self._engine.gradients
        gradients.end_reductions()
        gradients.apply_coefficient()
        for gradient, index in self._own():
            gradients.changed(gradient)
            gradient.clear(index) if set_to_none else gradient.zero(index)
        if set_to_none:
            gradients.forget_cleared()

    def _refuse_partial(self) -> None:
        """In the first step, refuse plain parameters of which each tensor rank has another gradient.

        One that is used between divided layers (a norm of the heads) has only its rank's part of the sum.
        """
        comm = self._engine.comm
        if self._compared or comm.tensor.size == 1:
            return
        self._compared = True
        names, squares = self._engine.gradients.undivided()
        what = "compare gradients over the tensor axis"
        self._engine.order.check(what)
        if comm.shard.size > 1:
            comm.all_reduce(squares, comm.shard, what).wait()
        most, least = squares.clone(), -squares
        for tensor in (most, least):
            comm.all_reduce(tensor, comm.tensor, what, dist.ReduceOp.MAX).wait()
        unlike = most + least > 0.1 * most  # kernels that add in any order differ by far less,
        unlike &= most > 1e-6 * most.sum()  # but for gradients that are nothing but rounding
        found = unlike.any().float()
        comm.all_reduce_everywhere(found, what, dist.ReduceOp.MAX)
        if bool(found):
            bad = [name for name, differs in zip(names, unlike.tolist(), strict=True) if differs] or ["a parameter"]
            raise RuntimeError(
                f"the gradient of {bad[0]!r} is not the same on all ranks of the tensor axis: it is used between "
                "divided layers, where each rank has a part of the sum. Give its module a style in tensor_plan, so "
                "that it becomes a DTensor, or leave those layers undivided"
            )

    def _updated(self) -> list[torch.nn.Parameter]:
        """The parameters of the groups that have a gradient."""
        if self._trained is None:
            trained = {name for group in self.names for name in group}
            self._trained = [p for flat in self._flats for name, p in flat.named_parameters if name in trained]
        if self._all_used:
            return self._trained
        gradients = self._engine.gradients.of_flat
        used = {id(p) for f, g in gradients.items() for p, flag in zip(f.parameters, g.used, strict=True) if flag}
        return [parameter for parameter in self._trained if id(parameter) in used]

    def _refuse_frozen(self) -> None:
        """Raise where somebody gave a gradient to a parameter of a group that was frozen at shard().

        torch would update it; here it has no place among the shards.
        """
        given = self._engine.states.frozen_with_gradients()
        if given:
            names = {name for group in self.names for name in group}
            given = [name for name in given if name in names]
        if given:
            raise RuntimeError(
                f"{given[0]!r} was frozen when shard() was called, and was given a gradient since: clear it "
                "(parameter.grad = None), or call zeroshard.unshard(), set requires_grad, and shard again"
            )

    # -- unused parameters --------------------------------------------------------------------------------------

    def _find_unused(self) -> None:
        """Find the parameters without gradient on every rank; cut runs that hold some with and some without.

        Each rank takes part, but only one that misses a gradient itself needs to read the result: the others know it
        is "used" throughout. So where all parameters are used, the host never waits.
        """
        comm, gradients = self._engine.comm, self._engine.gradients.of_flat
        flags = tuple(flag for gradient in gradients.values() for flag in gradient.used)
        if comm.axes and comm.control.real:
            if self._used_cache is None or self._used_cache[0] != flags:
                self._used_cache = (flags, torch.tensor(flags, dtype=torch.uint8, device=comm.device))
            merged = torch.cat([self._used_cache[1], self._told.mine(self.inner.param_groups)])
            what = "agree on unused parameters"
            self._engine.order.check(what)
            comm.all_reduce_everywhere(merged, what, dist.ReduceOp.MAX)
            self._told.compare(merged[len(flags) :], comm.control.rank)
            if not all(flags):
                flags = tuple(bool(flag) for flag in comm.on_host(merged[: len(flags)], what))
                self._engine.gradients.set_used(flags)
        self._all_used = all(flags)
        if self._all_used:
            return
        for index, runs in enumerate(self._runs):  # by group: so every stage cuts alike, and rounds alike
            if len({used for run in runs for used in self._used_in(run)}) > 1:
                if self._host is not None:
                    self._host.wait()  # an update of the step before may still write to what is cut
                self._set_runs(index, [small for run in runs for small in self._cut(run)])

    def _used_in(self, run: Run) -> set[bool]:
        gradients = self._engine.gradients.of_flat
        return {gradients[flat].used[parameter] for flat, parameter, _, _ in run.places()}

    def _has_gradient(self, run: Run) -> bool:
        gradients = self._engine.gradients.of_flat
        reduced = any(gradients[part.flat].has_shard for part in run.parts)
        return reduced and (self._all_used or True in self._used_in(run))

    def _cut(self, run: Run) -> list[Run]:
        cut = run.cut(self.state.pop(run.parameter, {}))
        for small, state in cut:
            if state:
                self.state[small.parameter] = state
        return [small for small, _ in cut]

    # -- runs ---------------------------------------------------------------------------------------------------

    def _all_runs(self) -> list[Run]:
        return [run for runs in self._runs for run in runs]

    def _set_runs(self, index: int, runs: list[Run]) -> None:
        self._runs[index] = runs
        self._trained = None
        self.inner.param_groups[index]["params"] = [run.parameter for run in runs]
        self._update.guard.put_on(runs)
        for run in runs:
            run.group = self.inner.param_groups[index]
        if self._host is not None:
            self._host.arrange(self._all_runs())

    def _open_masters(self, names: set[str]) -> None:
        """Give an fp32 master copy to flats that had none because nobody trained them."""
        for flat in self._flats:
            if flat.master is None and names & set(flat.names) and self._engine.precision.has_master(flat.dtype):
                master = torch.empty(flat.layout.shard_numel, device=flat.device)
                flat.master = Spread([Stretch(Range(0, flat.layout.shard_numel), "device", master)])
                self._engine.ledger.add("master weights", master.nbytes)
                for home, owned in zip(flat.homes, flat.owned, strict=True):
                    flat.master.write(home, owned)
                flat.known_versions = versions_of(flat.parameters)
        self._engine.states.rest()  # edits of what has a master are looked for from now on

    # -- whole states -------------------------------------------------------------------------------------------

    @torch.no_grad()
    def full_state(self, name: str) -> dict[str, Any]:
        """Return the optimizer's state of one parameter, whole, in its plain shape. All ranks call it together."""
        what = f"read the optimizer's state of {name!r}"
        return self._whole_state(name, self.describe_states([name], what)[name])

    def describe_states(
        self, names: Iterable[str] | None = None, what: str = "read the optimizer's states"
    ) -> dict[str, dict[str, Any]]:
        """Tell which states each parameter has, without bringing them: all, or those of ``names``.

        A state with a value for each element is described by its dtype; one that has not (a step count) is given. All
        ranks call it together, for the sake of ``what``.
        """
        self._engine.order.begin(f"to {what}")
        self._engine.states.finish_updates()
        self._engine.states.refuse_spoilt("optimizer")
        mine: dict[str, dict[str, Any]] = {name: {} for name in (names or [n for group in self.names for n in group])}
        refusal = ""
        for run in self._all_runs():
            state = self.state.get(run.parameter, {})
            known = {k: v.dtype if is_elementwise(k, v, run.parameter.shape) else v for k, v in state.items()}
            for flat, parameter, _, _ in run.places() if known else ():
                if flat.names[parameter] in mine:
                    mine[flat.names[parameter]] = known
                    refusal = refusal or self._complaint(flat.names[parameter], run.parameter, state)
        for name, aside in self._aside.items():
            if name in mine:
                mine[name] = {key: line.dtype for key, line in aside.lines.items()} | aside.counters
        if self._engine.comm.shard.size > 1 or self._engine.comm.tensor.size > 1:
            self._engine.order.check(what)
        told = self._engine.comm.all_gather_object((refusal, {} if refusal else mine), what)
        for complaint, _ in told:
            if complaint:
                raise RuntimeError(complaint)
        whole: dict[str, dict[str, Any]] = {}
        for name in mine:
            held = [rank[name] for _, rank in told if rank[name]]
            whole[name] = held[0] if held else {}
            for other in held[1:]:
                unlike = [key for key, value in whole[name].items() if key in other and not _same(value, other[key])]
                if unlike:
                    raise RuntimeError(
                        f"the state {unlike[0]!r} of {name!r} differs from rank to rank, so there is no whole one: "
                        f"{type(self.inner).__name__} computes it from the slices that each rank holds"
                    )
        return whole

    def _complaint(self, name: str, parameter: torch.Tensor, state: dict[str, Any]) -> str:
        """Why the states of a slice cannot be given as those of the parameter it is of; empty where they can."""
        for key, value in state.items():
            if not is_elementwise(key, value, parameter.shape) and not is_counter(value):
                what = f"has shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"is a {_kind(value)}"
                return (
                    f"the state {key!r} that {type(self.inner).__name__} keeps for {name!r} cannot be saved or read "
                    f"whole: it {what} for a slice of {parameter.numel()} elements, so it belongs to the slice that "
                    "this rank holds, and not to the parameter or its elements. Train with an optimizer whose states "
                    "are elementwise or numbers (AdamW, …), or save the model without the optimizer"
                )
        return ""

    def _whole_state(self, name: str, described: dict[str, Any]) -> dict[str, Any]:
        flat, index = find(self._engine.units, name)
        places = self._places(flat, index)
        result: dict[str, Any] = {}
        for key, value in described.items():
            if not isinstance(value, torch.dtype):
                result[key] = value.clone() if isinstance(value, torch.Tensor) else value
                continue
            line = torch.zeros(flat.layout.numels[index], dtype=value, device=flat.device)
            for state, within, at in places:
                line[within.start : within.end] = state[key][at : at + within.numel]
            result[key] = assemble(self._engine.comm, line, flat, index)
        return result

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """Return what the plain optimizer's ``state_dict()`` would be, whole. All ranks call it together.

        Under fp16 a key of its own, "loss_scale", goes with it.
        """
        numbers = {name: number for number, name in enumerate(name for group in self.names for name in group)}
        described = self.describe_states(numbers, "read the optimizer's state_dict()")
        states = {number: self._whole_state(name, described[name]) for name, number in numbers.items()}
        groups = [
            {**{key: value for key, value in group.items() if key != "params"}, "params": [numbers[n] for n in names]}
            for group, names in zip(self.param_groups, self.names, strict=True)
        ]
        whole: dict[str, Any] = {"state": {number: s for number, s in states.items() if s}, "param_groups": groups}
        return whole if self._scale is None else {**whole, "loss_scale": self.loss_scale_state()}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a plain optimizer's ``state_dict()``, or one of :meth:`state_dict`: each rank keeps its part."""
        self._engine.states.settle()
        self._engine.states.finish_updates()
        groups, states = state_dict["param_groups"], state_dict["state"]
        sizes, wanted = [len(group["params"]) for group in groups], [len(names) for names in self.names]
        if sizes != wanted:
            raise ValueError(f"the state dict has groups of {sizes} parameters, the optimizer has groups of {wanted}")
        names = [name for group in self.names for name in group]
        numbers = [number for group in groups for number in group["params"]]
        found = {name: states[number] for name, number in zip(names, numbers, strict=True) if number in states}
        refuse_states(described(found, self._shapes()))
        for group, loaded in zip(self.param_groups, groups, strict=True):
            group.update({key: value for key, value in loaded.items() if key != "params"})
        if "loss_scale" in state_dict:
            self.load_loss_scale(state_dict["loss_scale"])
        self.state.clear()
        self._load_states(found)

    def _places(self, flat: Flat, index: int) -> list[tuple[dict[str, Any], Range, int]]:
        """Where this rank's states of a parameter lie: (states, elements of the parameter, first element in them)."""
        if flat.names[index] in self._aside:
            return [(self._aside[flat.names[index]].lines, *place) for place in _owned(flat, index)]
        return [
            (self.state[run.parameter], within, at)
            for run in self._all_runs()
            if any(part.flat is flat for part in run.parts)
            for other, parameter, within, at in run.places()
            if other is flat and parameter == index
        ]

    def _shapes(self) -> dict[str, torch.Size]:
        flats = [flat for unit in self._engine.units for flat in unit.flats]
        return {name: shape for flat in flats for name, shape in zip(flat.names, flat.wholes, strict=True)}

    def _load_states(self, states: dict[str, dict[str, Any]]) -> None:
        """Fill the runs' states from whole states by name."""
        self._aside = {}
        if not states:
            return
        self.open_states(described(states, self._shapes()))
        for run in self._all_runs():
            for flat, parameter, within, at in run.places():
                for key, value in states.get(flat.names[parameter], {}).items():
                    if is_elementwise(key, value, flat.wholes[parameter]):
                        line = _line_of(value, flat, parameter)
                        self.state[run.parameter][key][at : at + within.numel] = line[within.start : within.end]
        for name, aside in self._aside.items():
            flat, parameter = find(self._engine.units, name)
            for key, values in aside.lines.items():
                line = _line_of(states[name][key], flat, parameter)
                for within, at in _owned(flat, parameter):
                    values[at : at + within.numel] = line[within.start : within.end]

    def open_states(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Make room for states, in place of those there are: zeros where a dtype is given, else the value itself.

        As with torch, states of floating point take their parameter's dtype, and step counts go where the optimizer's
        kernels want them.
        """
        refuse_states(states)
        self._engine.states.finish_updates()
        self._engine.states.doubt()
        before = dict(self.state)
        self.state.clear()
        self._place_aside(states)
        for index, runs in enumerate(self._runs):
            if not self._uniform(runs, states):
                self._set_runs(index, [small for run in runs for small in self._cut(run)])
        before = {run.parameter: before[run.parameter] for run in self._all_runs() if run.parameter in before}
        for group, runs in zip(self.param_groups, self._runs, strict=True):
            on_device = bool(group.get("capturable") or group.get("fused"))
            for run in runs:
                old = before.pop(run.parameter, {})
                for flat, parameter, _, _ in run.places():
                    for key, value in states.get(flat.names[parameter], {}).items():
                        if key not in self.state[run.parameter]:
                            room = old.pop(key, None)
                            if run.stretch is not None and self._host is not None and isinstance(value, torch.dtype):
                                room = self._host.room(run.stretch, run, key, state_dtype(value, run.parameter))
                            self.state[run.parameter][key] = opened(key, value, run.parameter, on_device, room)
        self._count_states()

    def held_states(self) -> Iterator[tuple[str, str, Range, torch.Tensor]]:
        """Yield (parameter, state, elements, their values) for every elementwise state this rank holds."""
        for name, aside in self._aside.items():
            places = _owned(*find(self._engine.units, name))
            for key, value in aside.lines.items():
                for within, at in places:
                    yield name, key, within, value[at : at + within.numel]
        for run in self._all_runs():
            for key, value in self.state.get(run.parameter, {}).items():
                if is_elementwise(key, value, run.parameter.shape):
                    for flat, parameter, within, at in run.places():
                        yield flat.names[parameter], key, within, value[at : at + within.numel]

    def held_counters(self) -> dict[str, dict[str, Any]]:
        """The states that have no value for each element, such as step counts, of the parameters this rank holds."""
        found: dict[str, dict[str, Any]] = {name: aside.counters for name, aside in self._aside.items()}
        for run in self._all_runs():
            state = self.state.get(run.parameter, {})
            counters = {k: v for k, v in state.items() if not is_elementwise(k, v, run.parameter.shape)}
            for flat, parameter, _, _ in run.places() if state else ():
                name = flat.names[parameter]
                complaint = self._complaint(name, run.parameter, counters)
                if complaint:
                    raise RuntimeError(complaint)
                found[name] = counters
        return found

    # -- states of frozen parameters ----------------------------------------------------------------------------

    def _place_aside(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Make room for states of parameters that are in a group and frozen now.

        No run holds them. Each rank keeps its part of them, and they are saved and given back like all others.
        """
        trainable = {name for flat in self._flats for name in flat.names}
        self._aside = {}
        for name, state in states.items():
            if state and name not in trainable:
                flat, index = find(self._engine.units, name)
                numel = sum(within.numel for within, _ in _owned(flat, index))
                dtypes = {key: value for key, value in state.items() if isinstance(value, torch.dtype)}
                self._aside[name] = _Aside(
                    {key: torch.zeros(numel, dtype=dtype, device=flat.device) for key, dtype in dtypes.items()},
                    {key: value for key, value in state.items() if key not in dtypes},
                )

    def _tensors_aside(self) -> list[torch.Tensor]:
        return [line for aside in self._aside.values() for line in aside.lines.values()]

    def _uniform(self, runs: list[Run], states: Mapping[str, Mapping[str, Any]]) -> bool:
        """Whether all parameters of the runs have the same counters, so that a run needs only one set of states."""
        places = (place for run in runs for place in run.places())
        seen = [states.get(flat.names[parameter], {}) for flat, parameter, _, _ in places]
        return all(
            one.keys() == seen[0].keys() and all(_same(one[key], seen[0][key]) for key in one) for one in seen[1:]
        )


def refuse_states(states: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise where states to be cut over the ranks, are neither elementwise (given as a dtype) nor numbers.

    >>> refuse_states({"weight": {"exp_avg": torch.float32, "step": torch.tensor(3.0)}})
    """
    for name, state in states.items():
        for key, value in state.items():
            if not isinstance(value, torch.dtype) and not is_counter(value):
                what = f"of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"a {_kind(value)}"
                raise ValueError(
                    f"the state {key!r} of {name!r}, {what}, is neither elementwise nor a number, so it cannot be cut "
                    "over the ranks: use an optimizer that is not sharded, or drop these states (a new optimizer; "
                    "load(path, model) for the weights alone)"
                )


def described(states: Mapping[str, Mapping[str, Any]], shapes: Mapping[str, torch.Size]) -> dict[str, dict[str, Any]]:
    """Describe whole states by parameter: elementwise ones by their dtype, others by themselves."""
    return {
        name: {k: v.dtype if is_elementwise(k, v, shapes[name]) else v for k, v in state.items()}
        for name, state in states.items()
    }


def _switch_by_inner(sharded: weakref.ref[ShardedOptimizer], name: str) -> Any:
    """The inner optimizer's ``train()`` or ``eval()``, called on itself."""
    optimizer = sharded()
    if optimizer is None:
        raise RuntimeError(f"{name}() was called on an optimizer whose sharded model is gone: make a new optimizer")
    return optimizer._switch(name)


def _owned(flat: Flat, index: int) -> list[tuple[Range, int]]:
    """What this rank owns of a parameter, and where each stretch begins when they are laid end to end."""
    found, at = [], 0
    for piece in flat.segments:
        if piece.parameter == index:
            found.append((piece.within, at))
            at += piece.within.numel
    return found


def _line_of(value: torch.Tensor, flat: Flat, index: int) -> torch.Tensor:
    """What this rank of the tensor axis has of a whole state, as the parameter lies in its flat."""
    share = flat.shares[index]
    return flat.line((value if share is None else share.take(value)).to(flat.device), index)


def _kind(value: Any) -> str:
    return type(value).__name__


def _whole(state: dict[str, Any]) -> dict[str, Any]:
    """The states of a parameter that was divided before it was sharded, whole."""
    return {key: value.full_tensor() if isinstance(value, DTensor) else value for key, value in state.items()}


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return torch.equal(left, right)
    return type(left) is type(right) and bool(left == right)


def state_dtype(dtype: torch.dtype, parameter: torch.Tensor) -> torch.dtype:
    """The dtype that a parameter keeps a state of ``dtype`` in."""
    return parameter.dtype if dtype.is_floating_point and parameter.is_floating_point() else dtype


def opened(key: str, value: Any, parameter: torch.Tensor, on_device: bool, old: Any = None) -> Any:
    """Room for one state of a parameter: that of the ``old`` one where it will do, since new memory takes time."""
    if isinstance(value, torch.dtype):
        dtype = state_dtype(value, parameter)
        if torch.is_tensor(old) and old.dtype == dtype and old.shape == parameter.shape:
            return old.zero_()
        return torch.zeros_like(parameter, dtype=dtype)
    if not isinstance(value, torch.Tensor):
        return value
    if key == "step":
        return value.clone() if not on_device else value.to(parameter.device, torch.float32, copy=True)
    return value.to(parameter.device, copy=True)
