"""ShardedOptimizer: the user's own torch optimizer, run on this rank's shards.

[Note: runs]
The user's optimizer keeps its class, groups and hyper-parameters; in its groups the parameters are replaced by *runs*:
stretches of the shards (of the fp32 master copy under 16-bit precision) whose parameters share a group. Shards of all
units lie side by side in one arena, so that with one group a step is one fused kernel over one tensor, however many
parameters the model has. That is right for every optimizer whose update of an element looks at that element alone.

A parameter that got no gradient on any rank must be skipped, as torch does: no weight decay, no momentum, no step
count. The run that holds it is then cut, for good, into one run per parameter, its states with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zeroshard.engine.engine import Engine
from zeroshard.engine.gradients import FlatGradient
from zeroshard.engine.parameter import card_of
from zeroshard.engine.unit import Flat
from zeroshard.layout import Range
from zeroshard.precision import LossScale

# These look at whole rows, whole matrices or all parameters at once: on a shard their result would be another one.
NOT_ELEMENTWISE = ("Adafactor", "LBFGS", "Muon", "SparseAdam")


@dataclass
class Part:
    """A stretch of one flat's shard."""

    flat: Flat
    span: Range  # in the shard

    def of(self, shard: torch.Tensor) -> torch.Tensor:
        """View the stretch in a tensor laid out like the shard."""
        return shard[self.span.start : self.span.end]


class Run:
    """What the inner optimizer sees as one parameter: see [Note: runs]."""

    def __init__(self, parts: list[Part], tensor: torch.Tensor) -> None:
        self.parts = parts
        self.parameter = nn.Parameter(tensor)  # [numel], the master's or the parameters' own dtype

    def gradient(self, gradients: dict[Flat, FlatGradient]) -> torch.Tensor:
        """The gradient in the run's dtype: the shards themselves where they can be viewed as one, else a copy."""
        views = []
        for part in self.parts:
            shard = gradients[part.flat].shard
            assert shard is not None
            views.append(part.of(shard))
        if views[0].dtype == self.parameter.dtype:
            if len(views) == 1:
                return views[0]
            if all(a.data_ptr() + a.nbytes == b.data_ptr() for a, b in pairwise(views)):
                return views[0].as_strided(self.parameter.shape, (1,))
        fresh = torch.empty_like(self.parameter)
        torch._foreach_copy_(list(torch.split(fresh, [view.numel() for view in views])), views)
        return fresh


class ShardedOptimizer(torch.optim.Optimizer):
    """Returned by :func:`zeroshard.shard`: steps the inner optimizer on shards and brings the new parameters about."""

    def __init__(
        self, inner: torch.optim.Optimizer, engine: Engine, names: dict[int, str], loss_scale: LossScale | None
    ) -> None:
        if type(inner).__name__ in NOT_ELEMENTWISE and type(inner).__module__.startswith("torch.optim"):
            raise ValueError(
                f"torch.optim.{type(inner).__name__} looks at more than one element at a time, so it cannot run on "
                "shards; use an elementwise optimizer (SGD, Adam, AdamW, Adagrad, RMSprop, …)"
            )
        self.inner = inner
        self._engine = engine
        self._scale = loss_scale
        self._all_used = True  # whether every parameter had a gradient on some rank in this step
        self._used_cache: tuple[tuple[bool, ...], torch.Tensor] | None = None
        plain = [[names[id(parameter)] for parameter in group["params"]] for group in inner.param_groups]
        states = {names[id(p)]: state for p, state in inner.state.items() if id(p) in names}
        super().__init__([torch.zeros(0)], {})
        self.param_groups, self.state, self.defaults = inner.param_groups, inner.state, inner.defaults
        self.names = plain  # per group, in the order the user gave them
        self._runs: list[list[Run]] = []
        self.state.clear()
        for index in range(len(plain)):
            self._place_group(index)
        self._load_states(states)

    # -- the user's side ----------------------------------------------------------------------------------------

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Multiply the loss by fp16's loss scale; under other precisions return it as it is."""
        return loss if self._scale is None else loss * self._scale.scale.to(loss.dtype)

    @property
    def loss_scale(self) -> torch.Tensor | None:
        """fp16's present loss scale, on the device."""
        return None if self._scale is None else self._scale.scale

    @torch.no_grad()
    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale all gradients so that their global norm is at most ``max_norm``; return the norm before.

        All ranks call it together. The result stays on the device; nothing waits for it.
        """
        if norm_type not in (2, 2.0, math.inf):
            raise ValueError(f"norm_type is 2 or inf, got {norm_type!r}")
        self._begin("clip")
        self._engine.reduce_gradients()
        norm = self._global_norm(norm_type)
        if error_if_nonfinite and not bool(torch.isfinite(norm)):
            raise RuntimeError(f"the norm of the gradients is {norm.item()}: not clipped")
        coefficient = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        earlier = self._engine.gradients.coefficient
        self._engine.gradients.coefficient = coefficient if earlier is None else earlier * coefficient
        return norm

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Reduce what is still to be reduced, update this rank's shards, and start to bring the result to all ranks."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            self._begin("step")
            self._engine.reduce_gradients()
            self._cut_unused()
            self._set_gradients()
            if self._update():
                self._write_back()
            for runs in self._runs:
                for run in runs:
                    run.parameter.grad = None
            self._engine.gradients.coefficient = None
        self._engine.forget_uses()
        self._engine.ledger.set("optimizer states", self.state_bytes())
        self._engine.comm.counters.roll()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, or make them zero."""
        self._engine.gradients.clear(set_to_none)

    @torch.no_grad()
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters of the sharded model that no group holds yet."""
        if not hasattr(self, "_runs"):  # torch's own constructor
            super().add_param_group(param_group)
            return
        params = param_group["params"]
        params = [params] if isinstance(params, torch.Tensor) else list(params)
        taken = {name for group in self.names for name in group}
        names = []
        for parameter in params:
            card = card_of(parameter)
            if card is None or card.flat() not in self._flats():
                raise ValueError("add_param_group takes trainable parameters of the sharded model itself")
            if card.name in taken:
                raise ValueError(f"{card.name!r} is in a parameter group already")
            names.append(card.name)
        self._open_masters(set(names))
        self.inner.add_param_group({**param_group, "params": [torch.zeros(0, requires_grad=True)]})
        self.names.append(names)
        self._place_group(len(self.names) - 1)

    def state_bytes(self) -> int:
        """Bytes of the optimizer's states on this rank, the master copy not counted."""
        return sum(
            value.nbytes for state in self.state.values() for value in state.values() if isinstance(value, torch.Tensor)
        )

    # -- one step -----------------------------------------------------------------------------------------------

    def _begin(self, kind: str) -> None:
        self._engine.order.begin(kind)

    def _global_norm(self, norm_type: float) -> torch.Tensor:
        comm = self._engine.comm
        shards = [g.shard for g in self._engine.gradients.of_flat.values() if g.has_shard and g.shard is not None]
        infinite = norm_type == math.inf
        if shards:
            norms = torch._foreach_norm(shards, norm_type, dtype=torch.float32)
            total = torch.stack(norms).max() if infinite else torch.stack(norms).square().sum()
        else:
            total = torch.zeros((), device=comm.device)
        if comm.shard.size > 1:
            self._engine.order.check("sum the gradients' norm")
            op = dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM
            comm.all_reduce(total, comm.shard, "sum the gradients' norm", op).wait()
        norm = total if infinite else total.sqrt()
        coefficient = self._engine.gradients.coefficient
        if coefficient is not None:
            norm = norm * coefficient
        return norm if self._scale is None else norm * self._scale.inverse

    def _set_gradients(self) -> None:
        """Give each run its gradient, unscaled and clipped."""
        gradients = self._engine.gradients.of_flat
        found = []
        for runs in self._runs:
            for run in runs:
                if self._has_gradient(run):
                    run.parameter.grad = run.gradient(gradients)
                    found.append(run.parameter.grad)
        if self._scale is not None:
            if found:
                self._scale.unscale(found)
            self._engine.order.check("look for overflow")
            self._engine.comm.all_reduce_everywhere(self._scale.overflow, "look for overflow", dist.ReduceOp.MAX)
        coefficient = self._engine.gradients.coefficient
        if coefficient is not None and found:
            torch._foreach_mul_(found, coefficient)

    def _update(self) -> bool:
        """Run the inner optimizer, unless a gradient overflowed on any rank."""
        if self._scale is None:
            self.inner.step()
            return True
        on_device = getattr(self.inner, "_step_supports_amp_scaling", False) and self.inner.defaults.get("fused")
        if on_device:  # the kernel itself skips: no host sync
            self.inner.found_inf = self._scale.overflow  # type: ignore[attr-defined]
            self.inner.grad_scale = None  # type: ignore[attr-defined]
            self.inner.step()
            del self.inner.found_inf, self.inner.grad_scale  # type: ignore[attr-defined]
            overflowed = False
        else:
            overflowed = bool(self._scale.overflow)
            if not overflowed:
                self.inner.step()
        self._scale.update()
        return not overflowed

    def _write_back(self) -> None:
        """Copy the master's new values into the parameters in computation, and bring each rank's part to all."""
        places, sources = [], []
        for flat in self._flats():
            owned, master = flat.update_from_master()
            places += owned
            sources += master
        if places:
            torch._foreach_copy_(places, sources)
        self._engine.refresh_parameters()

    def _has_gradient(self, run: Run) -> bool:
        gradients = self._engine.gradients.of_flat
        with_gradient = [part for part in run.parts if gradients[part.flat].has_shard]
        return bool(with_gradient) and (self._all_used or any(any(self._used(part)) for part in with_gradient))

    # -- unused parameters --------------------------------------------------------------------------------------

    def _used(self, part: Part) -> Iterable[bool]:
        gradient = self._engine.gradients.of_flat[part.flat]
        for piece in part.flat.segments:
            if part.span.meet(Range(piece.at, piece.at + piece.within.numel)):
                yield gradient.used[piece.parameter]

    def _cut_unused(self) -> None:
        """Find the parameters without gradient on every rank; cut runs that hold some with and some without.

        Each rank takes part, but only one that misses a gradient itself needs to read the result: the others know it
        is "used" throughout. So where all parameters are used, the host never waits.
        """
        comm, gradients = self._engine.comm, self._engine.gradients.of_flat
        flags = tuple(flag for gradient in gradients.values() for flag in gradient.used)
        if comm.axes and comm.control.real:
            if self._used_cache is None or self._used_cache[0] != flags:
                self._used_cache = (flags, torch.tensor(flags, dtype=torch.uint8, device=comm.device))
            merged = self._used_cache[1].clone()
            self._engine.order.check("agree on unused parameters")
            comm.all_reduce_everywhere(merged, "agree on unused parameters", dist.ReduceOp.MAX)
            if not all(flags):
                flags = tuple(bool(flag) for flag in merged.tolist())
        self._all_used = all(flags)
        if self._all_used:
            return
        position = iter(flags)
        for gradient in gradients.values():
            gradient.used = [next(position) for _ in gradient.used]
        for index, runs in enumerate(self._runs):
            if any(len({u for p in run.parts for u in self._used(p)}) > 1 for run in runs):
                self._runs[index] = [small for run in runs for small in self._cut(run)]
                self.param_groups[index]["params"] = [run.parameter for run in self._runs[index]]

    def _cut(self, run: Run) -> list[Run]:
        """Cut a run into one run per parameter, each with its part of the states."""
        state = self.state.pop(run.parameter, {})
        cut, offset = [], 0
        for part in run.parts:
            for piece in part.flat.segments:
                span = part.span.meet(Range(piece.at, piece.at + piece.within.numel))
                if span is None:
                    continue
                start = offset + span.start - part.span.start
                small = Run([Part(part.flat, span)], run.parameter.data[start : start + span.numel])
                cut.append(small)
                if state:
                    self.state[small.parameter] = {
                        key: value[start : start + span.numel]
                        if isinstance(value, torch.Tensor) and value.shape == run.parameter.shape
                        else (value.clone() if isinstance(value, torch.Tensor) else value)
                        for key, value in state.items()
                    }
            offset += part.span.numel
        return cut

    # -- placing runs -------------------------------------------------------------------------------------------

    def _flats(self) -> list[Flat]:
        return list(self._engine.gradients.of_flat)

    def _place_group(self, index: int) -> None:
        """Replace a group's parameters by runs over this rank's shards."""
        wanted = set(self.names[index])
        stretches: list[tuple[Part, torch.Tensor]] = []
        for flat in self._flats():
            members = {i for i, name in enumerate(flat.names) if name in wanted}
            if not members:
                continue
            whole = len(members) == len(flat.names)
            for bucket, owned in zip(flat.layout.buckets, flat.owned, strict=True):
                home = flat.layout.in_shard(bucket)
                storage = owned if flat.master is None else flat.master[home.start : home.end]
                for span in [home] if whole else self._spans(flat, members, home):
                    stretches.append((Part(flat, span), storage[span.start - home.start : span.end - home.start]))
        joined: list[tuple[list[Part], list[torch.Tensor]]] = []
        for part, tensor in stretches:
            last = joined[-1] if joined else None
            if last is not None and _adjoin(last[1][-1], tensor):
                last[0].append(part)
                last[1].append(tensor)
            else:
                joined.append(([part], [tensor]))
        runs = [
            Run(_merge(parts), tensors[0].as_strided((sum(t.numel() for t in tensors),), (1,)))
            for parts, tensors in joined
        ]
        self._runs.append(runs)
        self.param_groups[index]["params"] = [run.parameter for run in runs]

    def _spans(self, flat: Flat, members: set[int], home: Range) -> list[Range]:
        """The stretches of a bucket's part that belong to ``members``."""
        spans: list[Range] = []
        for piece in flat.segments:
            span = home.meet(Range(piece.at, piece.at + piece.within.numel))
            if span is not None and piece.parameter in members:
                spans.append(span)
        return spans

    def _open_masters(self, names: set[str]) -> None:
        """Give an fp32 master copy to flats that had none because nobody trained them."""
        for flat in self._flats():
            if flat.master is None and names & set(flat.names) and self._engine.precision.has_master(flat.dtype):
                flat.master = torch.empty(flat.layout.shard_numel, device=flat.device)
                self._engine.ledger.add("master weights", flat.master.nbytes)
                owned, master = flat.update_from_master()
                torch._foreach_copy_(master, owned)

    # -- whole states -------------------------------------------------------------------------------------------

    @torch.no_grad()
    def full_state(self, name: str) -> dict[str, Any]:
        """Return the optimizer's state of one parameter, whole, in its plain shape. All ranks call it together."""
        flat, index = self._engine.find(name)
        places = self._places(flat, index)
        mine: dict[str, Any] = {}  # key → dtype of an elementwise state, or the value itself
        for run, _, _ in places[:1]:
            for key, value in self.state.get(run.parameter, {}).items():
                elementwise = isinstance(value, torch.Tensor) and value.shape == run.parameter.shape
                mine[key] = value.dtype if elementwise else value
        known: dict[str, Any] = next((said for said in self._engine.comm.all_gather_object(mine) if said), {})
        result: dict[str, Any] = {}
        for key, value in known.items():
            if not isinstance(value, torch.dtype):
                result[key] = value
                continue
            line = torch.zeros(flat.layout.numels[index], dtype=value, device=flat.device)
            for run, within, at in places:
                line[within.start : within.end] = self.state[run.parameter][key][at : at + within.numel]
            result[key] = self._engine.assemble(line, flat, index)
        return result

    def state_dict(self) -> dict[str, Any]:
        """Return what the plain optimizer's ``state_dict()`` would be, whole. All ranks call it together."""
        numbers = {name: number for number, name in enumerate(name for group in self.names for name in group)}
        states = {number: self.full_state(name) for name, number in numbers.items()}
        groups = [
            {**{key: value for key, value in group.items() if key != "params"}, "params": [numbers[n] for n in names]}
            for group, names in zip(self.param_groups, self.names, strict=True)
        ]
        return {"state": {number: state for number, state in states.items() if state}, "param_groups": groups}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a plain optimizer's ``state_dict()``, or one of :meth:`state_dict`: each rank keeps its part."""
        groups = state_dict["param_groups"]
        sizes, wanted = [len(g["params"]) for g in groups], [len(names) for names in self.names]
        if sizes != wanted:
            raise ValueError(f"the state dict has groups of {sizes} parameters, the optimizer has groups of {wanted}")
        for group, loaded in zip(self.param_groups, groups, strict=True):
            group.update({key: value for key, value in loaded.items() if key != "params"})
        names = [name for group in self.names for name in group]
        numbers = [number for group in groups for number in group["params"]]
        states = state_dict["state"]
        self.state.clear()
        self._load_states({name: states[n] for name, n in zip(names, numbers, strict=True) if n in states})

    def _places(self, flat: Flat, index: int) -> list[tuple[Run, Range, int]]:
        """Where this rank's states of a parameter lie: (run, elements of the parameter, first element in the run)."""
        places = []
        for run in (run for runs in self._runs for run in runs):
            offset = 0
            for part in run.parts:
                for piece in flat.segments if part.flat is flat else ():
                    span = part.span.meet(Range(piece.at, piece.at + piece.within.numel))
                    if span is not None and piece.parameter == index:
                        within = span.moved(piece.within.start - piece.at)
                        places.append((run, within, offset + span.start - part.span.start))
                offset += part.span.numel
        return places

    def _load_states(self, states: dict[str, dict[str, Any]]) -> None:
        """Fill the runs' states from whole states by name."""
        if not states:
            return
        for index, runs in enumerate(self._runs):
            cut = [[run] if self._uniform(run, states) else self._cut(run) for run in runs]
            self._runs[index] = [run for pieces in cut for run in pieces]
            self.param_groups[index]["params"] = [run.parameter for run in self._runs[index]]
        for flat in self._flats():
            for position, name in enumerate(flat.names):
                for run, within, at in self._places(flat, position) if name in states else ():
                    target = self.state.setdefault(run.parameter, {})
                    for key, value in states[name].items():
                        if isinstance(value, torch.Tensor) and value.shape == flat.shapes[position] and value.dim() > 0:
                            if key not in target:
                                target[key] = torch.zeros_like(run.parameter, dtype=value.dtype)
                            line = flat.line(value.to(flat.device), position)
                            target[key][at : at + within.numel] = line[within.start : within.end]
                        else:
                            target[key] = value.clone() if isinstance(value, torch.Tensor) else value
        self._engine.ledger.set("optimizer states", self.state_bytes())

    def _uniform(self, run: Run, states: dict[str, dict[str, Any]]) -> bool:
        """Whether all parameters of a run have the same counters, so that one set of states can serve them."""
        seen = []
        for part in run.parts:
            for piece in part.flat.segments:
                if part.span.meet(Range(piece.at, piece.at + piece.within.numel)):
                    state = states.get(part.flat.names[piece.parameter], {})
                    shape = part.flat.shapes[piece.parameter]
                    seen.append({k: None if getattr(v, "shape", ()) == shape != () else v for k, v in state.items()})
        return all(one.keys() == seen[0].keys() and all(one[k] == seen[0][k] for k in one) for one in seen)


def _adjoin(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two stretches are neighbours in one allocation."""
    same = left.untyped_storage().data_ptr() == right.untyped_storage().data_ptr()
    return same and left.storage_offset() + left.numel() == right.storage_offset()


def _merge(parts: list[Part]) -> list[Part]:
    """Join neighbouring stretches of one flat."""
    merged: list[Part] = []
    for part in parts:
        last = merged[-1] if merged else None
        if last is not None and last.flat is part.flat and last.span.end == part.span.start:
            merged[-1] = Part(part.flat, Range(last.span.start, part.span.end))
        else:
            merged.append(part)
    return merged
