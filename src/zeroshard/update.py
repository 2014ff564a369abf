"""Update: one step of the user's optimizer over this rank's runs, through one buffer of constant size.

[Note: the update in batches]
torch's optimizers want a gradient in the dtype of its parameter. Under bf16 and fp16 gradients are kept in 16 bits and
the master is in fp32, so each run needs a copy: of this rank's whole part it would take 4Ψ/N bytes. Instead the runs,
none longer than ``bucket_size`` elements, are updated in batches of at most as many: fill the buffer with the batch's
gradients, step the optimizer, which leaves parameters without gradient alone, take the gradients away again, and go on
to the next batch. Where no copy is needed this bounds the scratch of the optimizer's own kernels. A part that fits one
batch is updated by one call.

Every element is updated once, from its own gradient and with a step count of its run's own, so the result is the same
to the bit. That holds for torch's own elementwise optimizers. One that is not torch's may count its own calls, and a
hook on the step, or a step that was replaced, is to see all gradients and one call: there the batch is everything.

Under fp16 nothing may be updated when one gradient overflowed on any rank, so that is looked for first, in 16 bits.

On a GPU fused Adam and AdamW need no copy, and no batches: see [Note: one pass]. What follows here is for the rest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from zeroshard.device.one_pass import OnePass, kernel_for
from zeroshard.device.strip import Factors
from zeroshard.engine.engine import Engine
from zeroshard.engine.flat import Flat
from zeroshard.engine.flat_gradient import norms_of
from zeroshard.host.updates import HostUpdates
from zeroshard.host.verdict import Verdict
from zeroshard.layout import ALIGN, round_up
from zeroshard.precision import LossScale
from zeroshard.runs import Guard, Run, is_elementwise, longest_run

# Their step() looks at nothing but the parameters with a gradient, and counts for each of them apart.
COUNT_BY_PARAMETER = (
    torch.optim.ASGD,
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
)


@dataclass(frozen=True)
class Due:
    """A run that is to be updated, and its reduced gradient."""

    run: Run
    reduced: list[torch.Tensor]  # where the gradient lies, in the dtype it was reduced in

    @property
    def copied(self) -> bool:
        """Whether the optimizer needs a copy: the gradient lies in several places, elsewhere, or has another dtype."""
        first, parameter = self.reduced[0], self.run.parameter
        return len(self.reduced) > 1 or first.dtype != parameter.dtype or first.device != parameter.device

    @property
    def room(self) -> int:
        """Bytes of the buffer that the copy takes."""
        parameter = self.run.parameter
        return round_up(parameter.numel(), ALIGN) * parameter.element_size() if self.copied else 0


class Update:
    """Steps one optimizer: see [Note: the update in batches]."""

    def __init__(
        self, inner: torch.optim.Optimizer, engine: Engine, scale: LossScale | None, host: HostUpdates | None
    ) -> None:
        self._inner: Any = inner
        self._engine, self._scale, self._host = engine, scale, host
        self.guard = Guard(engine)
        self._most = longest_run(engine.config.bucket_size)  # elements of a batch
        kernel = kernel_for(inner, engine.comm.device)
        self._one_pass = None if kernel is None else OnePass(inner, engine, kernel)

    @property
    def longest(self) -> int | None:
        """Elements of a run; None: as many as there are, since all are updated by one call anyway."""
        return self._most if type(self._inner) in COUNT_BY_PARAMETER else None

    def _in_one_call(self) -> bool:
        if type(self._inner) not in COUNT_BY_PARAMETER:
            return True
        # A learning rate scheduler's replacement only notes that there was a call; of any other nothing is known.
        replaced = vars(self._inner).get("step")
        noted = hasattr(replaced, "_wrapped_by_lr_sched") and replaced.__wrapped__ is type(self._inner).step
        hooks = (
            self._inner._optimizer_step_pre_hooks,
            self._inner._optimizer_step_post_hooks,
            _global_optimizer_pre_hooks,
            _global_optimizer_post_hooks,
        )
        return any(hooks) or not (replaced is None or noted)

    def run(self, runs: list[Run], backwards: int) -> list[Flat] | None:
        """Update the runs, which all have a gradient. None: one overflowed on some rank, and nothing was updated.

        Returned are the flats whose new values are in the master alone. What rests outside the device is only started:
        see [Note: just in time].
        """
        gradients = self._engine.gradients
        apart = self._host is not None and not self._in_one_call()
        if self._host is not None:
            self._host.wait()  # its thread may be stepping the very optimizer that is stepped here
        ours, theirs = self._sorted([run for run in runs if not (apart and run.stretch is not None)])
        due = [Due(run, run.reduced(gradients.of_flat)) for run in theirs]
        uncopied = list(dict.fromkeys(part.flat for run in theirs for part in run.parts)) if ours else self._flats()
        if self._scale is None:
            self._step_at_once(ours, Factors(gradients.inverse, gradients.coefficient))
            self._step(due)
            self._owe(ours, theirs)
            self._step_far(runs, apart, backwards, Verdict(gradients.inverse, gradients.coefficient))
            return uncopied
        self._scale.look(*self._to_look_at(runs))
        what = "look for overflow"
        self._engine.order.check(what)
        self._engine.comm.all_reduce_everywhere(self._scale.overflow, what, dist.ReduceOp.MAX)
        verdict = Verdict(gradients.inverse, gradients.coefficient, self._scale.overflow)
        self._step_at_once(ours, Factors(gradients.inverse, gradients.coefficient, self._scale.overflow))
        updated = self._step_unless_overflow(due, self._scale)
        self._owe(ours, theirs)
        self._step_far(runs, apart, backwards, verdict)
        if gradients.inverse is not None:
            self._scale.update()
        else:  # no loss was scaled: the scale has nothing to learn from this step
            self._scale.forget()
        return uncopied if updated else None

    def _step_unless_overflow(self, due: list[Due], scale: LossScale) -> bool:
        """Step torch's way; False: all ranks have seen an overflow, and nothing has changed on any."""
        if self._skips_on_device():  # the kernel itself leaves everything as it is: no host sync
            self._inner.found_inf, self._inner.grad_scale = scale.overflow, None
            self._step(due)
            del self._inner.found_inf, self._inner.grad_scale
            return True
        # A rank that has nothing to step here need not look: where there may be such, all go on as it does.
        some_need_not = self._host is not None or any(group.get("fused") for group in self._inner.param_groups)
        if (due or not some_need_not) and bool(scale.overflow):
            return some_need_not
        self._step(due)
        return True

    def _flats(self) -> list[Flat]:
        return [flat for unit in self._engine.units for flat in unit.flats]

    def _sorted(self, runs: list[Run]) -> tuple[list[Run], list[Run]]:
        """The runs that are updated in one pass, and those that the optimizer itself is to step."""
        if self._one_pass is None or self._in_one_call():
            return [], runs
        return self._one_pass.sorted(runs)

    def _step_at_once(self, runs: list[Run], factors: Factors) -> None:
        if self._one_pass is not None and runs:
            self._one_pass.step(runs, factors)

    def _owe(self, ours: list[Run], theirs: list[Run]) -> None:
        """Note that gradients were clipped on their way only: a loop may go on without zero_grad()."""
        gradients = self._engine.gradients
        if gradients.coefficient is None or not ours:
            return
        alone = not theirs and self._host is None
        views = gradients.shards() if alone else [v for run in ours for v in run.reduced(gradients.of_flat)]
        gradients.owed.append((views, gradients.coefficient))

    def _step_far(self, runs: list[Run], apart: bool, backwards: int, verdict: Verdict) -> None:
        if self._host is None:
            return
        if not apart:
            self._host.together(runs)
            return
        self._host.step(runs, verdict, backwards)
        gradients = self._engine.gradients
        if gradients.coefficient is not None:
            far = [view for run in runs if run.stretch is not None for view in run.reduced(gradients.of_flat)]
            gradients.owed.append((far, gradients.coefficient))

    def _to_look_at(self, runs: list[Run]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The runs' gradients on the device, and the largest magnitudes of those measured on their way out of it."""
        near: list[torch.Tensor] = []
        magnitudes: list[torch.Tensor] = []
        gradients = {part.flat: self._engine.gradients.of_flat[part.flat] for run in runs for part in run.parts}
        for run in runs:
            parts = [(part, gradients[part.flat]) for part in run.parts]
            near += [part.of(g.shard) for part, g in parts if g.shard is not None and not g.far]
        for gradient in gradients.values():
            magnitudes += [norm for norms in gradient.largest.values() for norm in norms]
            if gradient.far and not gradient.largest and gradient.shard is not None:  # changed where it rests
                gradient.settle()
                magnitudes += [norm.to(self._engine.comm.device) for norm in norms_of([gradient.shard], math.inf)]
        return near, magnitudes

    def _skips_on_device(self) -> bool:
        fused = all(group.get("fused") for group in self._inner.param_groups)
        if not (getattr(self._inner, "_step_supports_amp_scaling", False) and fused):
            return False
        if not isinstance(self._inner, torch.optim.SGD):
            return True
        # Its fused kernel would leave a momentum that it has just made uninitialised.
        parameters = [parameter for group in self._inner.param_groups for parameter in group["params"]]
        return all(self._inner.state.get(parameter) for parameter in parameters)

    def _step(self, due: list[Due]) -> None:
        batches = self._batches(due)
        nbytes = max(sum(one.room for one in batch) for batch in batches)
        buffer = torch.empty(nbytes, dtype=torch.uint8, device=self._engine.comm.device)
        self._engine.ledger.add("step", nbytes)
        try:
            for batch in batches:
                self._step_batch(batch, buffer)
        finally:
            self._engine.ledger.add("step", -nbytes)

    def _step_batch(self, batch: list[Due], buffer: torch.Tensor) -> None:
        new = [one.run.parameter for one in batch if not self._inner.state.get(one.run.parameter)]
        with self.guard.lifted([one.run.parameter for one in batch]):  # gradients are gone after it
            self._set_gradients(batch, buffer)
            self._engine.gradients.memory.shown |= self._in_one_call()  # to whom the library does not know
            self._inner.step()
            self._house(new)
        coefficient = self._engine.gradients.coefficient
        copied = [view for one in batch if one.copied for view in one.reduced]
        if coefficient is not None and copied:  # only the copy was clipped, and a loop may go on without zero_grad()
            self._engine.gradients.multiply(copied, coefficient)

    def _house(self, parameters: list[torch.nn.Parameter]) -> None:
        """Move states that were just made, among the step's temporaries, to memory apart: [Note: memory apart]."""
        if self._engine.comm.device.type == "cpu":
            return
        self._engine.pool.make_room(
            value.nbytes for parameter in parameters for value in self._elementwise(parameter).values()
        )
        for parameter in parameters:
            for key in list(self._elementwise(parameter)):  # the keys alone: each value goes when its copy is there
                with self._engine.pool:
                    self._inner.state[parameter][key] = self._inner.state[parameter][key].clone()

    def _elementwise(self, parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
        """Of its states, those with as many elements."""
        states = self._inner.state.get(parameter, {}).items()
        return {key: value for key, value in states if is_elementwise(key, value, parameter.shape)}

    def _batches(self, due: list[Due]) -> list[list[Due]]:
        """Cut the list into batches; into one at least, since the optimizer is stepped in any case."""
        if self._in_one_call():
            return [due]
        batches: list[list[Due]] = [[]]
        left = self._most
        for one in due:
            numel = round_up(one.run.parameter.numel(), ALIGN)
            if numel > left:
                batches.append([])
                left = self._most
            batches[-1].append(one)
            left -= numel
        return batches

    def _set_gradients(self, batch: list[Due], buffer: torch.Tensor) -> None:
        """Give each run its gradient, unscaled and clipped: the reduced one itself or a copy in the buffer."""
        taken, found = 0, []
        for one in batch:
            parameter, gradient = one.run.parameter, one.reduced[0]
            if one.copied:
                gradient = buffer[taken : taken + parameter.nbytes].view(parameter.dtype)
                if parameter.device != buffer.device:
                    self._engine.gradients.settle_far()
                    gradient = torch.empty_like(parameter)
                places = list(torch.split(gradient, [view.numel() for view in one.reduced]))
                torch._foreach_copy_(places, one.reduced)
                taken += one.room
            parameter.grad = gradient
            found.append(gradient)
        gradients = self._engine.gradients
        if gradients.inverse is not None:
            gradients.multiply(found, gradients.inverse)
            themselves = [one.reduced[0] for one in batch if not one.copied]
            if themselves:  # whoever reads or adds to them finds them scaled, as the others are
                gradients.owed.append((themselves, 1 / gradients.inverse))
        if gradients.coefficient is not None:
            gradients.multiply(found, gradients.coefficient)
