"""When sums over backwards are reduced: inside the last backward before a step, if that is known, else by the step."""

from __future__ import annotations

from zeroshard.engine.context import ShardContext
from zeroshard.engine.flat_grad import FlatGrad
from zeroshard.engine.reduce import GradReducer, Hops, ReduceQueue
from zeroshard.engine.unit import Unit
from zeroshard.utils.profiling import label

HOLD_OFF_STEPS = 8  # steps without predictions after the first misprediction
MAX_HOLD_OFF_STEPS = 128  # each misprediction doubles them, up to this


class StepPredictor:
    """Predict after which backward the loop calls ``step()``.

    >>> predictor = StepPredictor()
    >>> predictor.on_step(backwards=2)
    >>> predictor.on_step(backwards=2)
    >>> predictor.expects_step(1), predictor.expects_step(2)
    (False, True)
    >>> predictor.on_misprediction()
    >>> predictor.expects_step(2)
    False
    """

    def __init__(self) -> None:
        self._backwards_per_step = 0
        self._is_steady = False
        self._hold_off_steps = HOLD_OFF_STEPS  # after the next misprediction
        self._hold_off_steps_left = 0

    def expects_step(self, backward: int) -> bool:
        """Whether a step is expected after this backward; ``backward`` counts them from 1 since the last step."""
        return self._is_steady and not self._hold_off_steps_left and backward == self._backwards_per_step

    def on_step(self, backwards: int) -> None:
        """Record a step after ``backwards`` backwards."""
        self._is_steady = backwards == self._backwards_per_step
        self._backwards_per_step = backwards
        self._hold_off_steps_left = max(0, self._hold_off_steps_left - 1)

    def on_misprediction(self) -> None:
        """Record that work done in the expectation of a step was in vain: expect none for a while."""
        if not self._hold_off_steps_left:
            self._hold_off_steps_left = self._hold_off_steps
            self._hold_off_steps = min(2 * self._hold_off_steps, MAX_HOLD_OFF_STEPS)


class LastBackward:
    """Predicts whether a backward is the last one before ``step()``, so that it should reduce replicated gradients.

    [Note: reducing in the last backward]
    Replicated gradients are summed locally over the backwards of a step and reduced once. Inside the last backward this
    overlaps with compute, but nobody says which one is the last. ``Config.backwards`` does; otherwise it is predicted:
    two steps with the same number of backwards outside ``no_sync()``, the last backward being one of these, suggest a
    third. A wrong prediction costs time. If the step comes earlier, it reduces, as without a prediction. If another
    backward follows, the reduced gradients are carried over (``FlatGrad.carried_over``) and the step reduces the rest.

    If a model has several optimizers, the next step may be that of any: it reduces the gradients of all. Their numbers
    of backwards may differ, as in a GAN. So the prediction depends on which one was stepped last. The steps of further
    optimizers after the same backward do not count.

    The reductions are a pass of their own in ``CollectiveOrder``, in backward and in ``step()`` alike. So it is not
    an error if ranks predict differently, e.g. because they use ``no_sync()`` differently: one reduces later.

    The same holds for inner sums ([Note: inner sums]) and their reduction over the outer axis, except that all ranks
    predict the same: partitioned gradients do not allow ranks to use ``no_sync()`` differently, and the kind of the
    pass says which it is.

    >>> prediction = LastBackward(backwards=2)
    >>> [prediction.on_backward(number, needs_grad_sync=True) for number in (1, 2, 3)]
    [False, True, False]
    """

    def __init__(self, backwards: int | None) -> None:
        """``backwards``: see :class:`zeroshard.Config`."""
        self._backwards = backwards
        self._predictors = [StepPredictor()]  # by the number of the optimizer that was stepped last
        self._last_optimizer = 0
        self._synced_count = 0  # backwards outside no_sync() since the last step
        self._ends_synced = False  # whether the last backward was outside no_sync()
        self._has_reduced = False  # whether a backward since the last step has reduced

    def on_backward(self, backward_count: int, needs_grad_sync: bool) -> bool:
        """Return the prediction for a backward that begins; ``backward_count`` counts from 1 since the last step."""
        self.on_pending_grads()
        self._synced_count, self._ends_synced = self._synced_count + needs_grad_sync, needs_grad_sync
        if self._backwards is None:
            is_expected = self._predictor.expects_step(self._synced_count)
        else:
            is_expected = backward_count == self._backwards
        self._has_reduced = needs_grad_sync and is_expected
        return self._has_reduced

    def on_pending_grads(self) -> None:
        """Record that there are gradients to reduce. If a backward of this step has reduced, it was not the last."""
        if self._has_reduced:
            self._predictor.on_misprediction()
        self._has_reduced = False

    def on_step(self, optimizer: int, has_backwards: bool) -> None:
        """Record a step of the optimizer with this number; ``has_backwards``: since the last step of any."""
        if has_backwards:
            self._predictor.on_step(self._synced_count if self._ends_synced else 0)
        self._synced_count, self._has_reduced, self._ends_synced = 0, False, False
        self._predictors += [StepPredictor() for _ in range(optimizer + 1 - len(self._predictors))]
        self._last_optimizer = optimizer

    @property
    def _predictor(self) -> StepPredictor:
        return self._predictors[self._last_optimizer]


class LocalSums:
    """When sums over backwards are reduced over all ranks: see [Note: reducing in the last backward].

    They are the local sums of replicated gradients, or the inner sums of partitioned ones.
    """

    def __init__(
        self,
        unit_grads: dict[Unit, list[FlatGrad]],
        queue: ReduceQueue,
        reducer: GradReducer,
        context: ShardContext,
    ) -> None:
        self._unit_grads, self._queue, self._reducer, self._context = unit_grads, queue, reducer, context
        self._order = context.order
        self._prediction = LastBackward(context.config.backwards if context.comm.data_parallel_size > 1 else 0)
        self._has_inner_sums = context.placement.keeps_inner_sums
        self.is_used = self._has_inner_sums or not context.placement.gradients
        self.is_last_backward = False  # whether the running backward reduces local sums
        self.hops = Hops.BOTH  # of the reductions of partitioned gradients in the running backward
        self._backward_count = 0  # since the last step

    def begin_backward(self, backward_count: int, needs_grad_sync: bool) -> None:
        """Predict whether a backward is the last one before a step; ``backward_count`` counts since the last step."""
        self._backward_count = backward_count
        is_last = self._prediction.on_backward(backward_count, needs_grad_sync)
        self.is_last_backward = is_last and not self._has_inner_sums
        self.hops = Hops.BOTH if is_last or not self._has_inner_sums else Hops.INNER

    def is_reducing(self, unit: Unit) -> bool:
        """Return whether the running backward has started to reduce a unit, which gets more gradients now."""
        return self.is_last_backward and self._queue.is_ahead_of(unit)

    def on_accumulated(self, unit: Unit) -> None:
        """Start to reduce the units whose turn it is: this one is done, and its gradients are added to its sum."""
        if not self._queue.is_agreed:
            self._queue.last_done[unit] = None
        if self.is_last_backward:
            has_begun = self._queue.is_partial
            self._start(self._queue.add(unit), has_begun)

    def start_remaining(self) -> None:
        """Start to reduce the units that are left in the queue."""
        has_begun = self._queue.is_partial
        self._start(self._queue.drain(), has_begun)
        self.is_last_backward = False

    def finish_aborted(self) -> bool:
        """Reduce what a backward that raised has got so far: other ranks may wait for it inside theirs.

        Return whether it was a backward that reduces.
        """
        is_reducing = self.is_last_backward
        if is_reducing:
            self.start_remaining()
            self._reducer.wait()
        return is_reducing

    def reduce_all(self, has_unreduced: bool) -> None:
        """Reduce the units that are left in the queue, then all, if there are newer sums (``has_unreduced``)."""
        with self._order.nested_pass():
            if self._queue.is_partial:
                self.start_remaining()
                self._reducer.wait()
            if has_unreduced:
                self._prediction.on_pending_grads()
                self.start_remaining()

    def reduce_inner_sums(self) -> None:
        """Start to reduce the inner sums that no backward has reduced over the outer axis."""
        for unit in self._queue.order:
            flat_grads = [flat_grad for flat_grad in self._unit_grads[unit] if flat_grad.inner_sum is not None]
            if flat_grads:
                what = unit.reduce_label + Hops.OUTER.value  # a rank with local sums takes both hops
                self._order.check(what)
                self._reducer.begin_unit()
                with label("reduce gradients {!r} over the outer axis", unit.name):
                    for flat_grad in flat_grads:
                        self._reducer.start(flat_grad, what, Hops.OUTER)

    def on_step(self, backwards: int, optimizer: int) -> None:
        """Learn from a step after ``backwards`` backwards; the first of them fixes the order of reductions.

        ``optimizer``: the number of the optimizer, of several.
        """
        self._backward_count = 0
        self._prediction.on_step(optimizer, has_backwards=backwards > 0)
        if backwards and self._context.comm.data_axes and not self._queue.is_agreed and not self._has_inner_sums:
            self._queue.agree(list(self._queue.last_done), self._context)

    def cancel(self) -> None:
        """Begin with the first unit next time: all gradients are cleared."""
        self._queue.drain()
        self.is_last_backward = False

    def _start(self, units: list[Unit], has_begun: bool) -> None:
        """Start to reduce units, in a pass of their own, which may have begun."""
        if units:
            begin_pass = self._order.resume_pass if has_begun else self._order.begin_pass
            begin_pass(f"reduction of gradients after {self._backward_count} backwards")
        for unit in units:
            self._order.check(unit.reduce_label)
            with label("reduce gradients {!r}", unit.name):
                for flat_grad in self._unit_grads[unit]:
                    self._reducer.start_local_sum(flat_grad, unit.reduce_label)
