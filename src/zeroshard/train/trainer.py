"""Trainer: the training loop. It steps, logs, evaluates and saves checkpoints, and ends a run without losing work."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.profiler import record_function

import zeroshard
from zeroshard.comm import all_gather_object
from zeroshard.memory import Profile
from zeroshard.planner import gpu_peak_flops
from zeroshard.train.data.corpus import TOKENIZER_FILE
from zeroshard.train.data.token_loader import TokenLoader
from zeroshard.train.generation import generate_sample
from zeroshard.train.metrics import (
    MetricsFile,
    StepMetrics,
    StepStats,
    StepStatsReducer,
    count_matmul_params,
    flops_per_token,
    start_tracker,
)
from zeroshard.train.options import AllRanksError, StepOptions, TrainingError
from zeroshard.train.rank import StopRequest
from zeroshard.train.report import write_html_report
from zeroshard.train.run_directory import checkpoint_path, checkpoint_step, complete_checkpoints, quarantine
from zeroshard.train.run_record import memory_by_kind, memory_timeline, state_bytes
from zeroshard.train.run_view import RunView
from zeroshard.train.summary import footer_lines, header_lines, open_view, resume_command
from zeroshard.train.training_setup import TrainingSetup

# steps after which memory and time per step are steady: the optimizer has its states, the collectives their order
STEADY_AFTER_STEPS = 2


def learning_rate(step: int, options: StepOptions, rule: str = "adamw") -> float:
    """Return the learning rate of a step, counted from 0: linear warmup, then cosine decay to the minimum.

    Muon's has the same form, scaled to its own maximum.

    >>> options = StepOptions(steps=100, warmup=10, lr=1.0, min_lr=0.1)
    >>> [round(learning_rate(step, options), 3) for step in (0, 9, 10, 55, 99)]
    [0.1, 1.0, 1.0, 0.55, 0.1]
    >>> learning_rate(9, StepOptions(optimizer="muon", warmup=10, lr=1.0, muon_lr=4.0), "muon")
    4.0
    """
    if rule == "muon" and options.muon_lr is not None:
        return learning_rate(step, options) * (options.muon_lr / options.lr)
    min_lr = options.lr / 10 if options.min_lr is None else options.min_lr
    if step < options.warmup:
        return options.lr * (step + 1) / options.warmup
    progress = (step - options.warmup) / max(options.steps - options.warmup, 1)
    return min_lr + (options.lr - min_lr) * (1 + math.cos(math.pi * min(progress, 1.0))) / 2


@torch.no_grad()
def evaluate(setup: TrainingSetup, loader: TokenLoader) -> float:
    """Return the mean loss over the first windows of the validation text, without side effects on training.

    They are the same for any number of ranks. All ranks call it together and run equally many forwards; one that has no
    window left runs a forward that does not count. Tensor-parallel ranks get the same windows.
    """
    rank_info, micro = setup.rank_info, setup.batching.micro
    count = min(setup.options.run.eval_sequences, loader.num_windows)
    own = range(rank_info.dp_rank, count, rank_info.dp_size)
    total = torch.zeros((), device=rank_info.device)
    setup.model.eval()
    try:
        for first in range(0, math.ceil(count / rank_info.dp_size), micro):
            chunk = own[first : first + micro]
            tokens, targets = (part.to(rank_info.device) for part in loader.read_windows(chunk or (0,)))
            total += setup.language_model.loss(setup.model, tokens, targets) * len(chunk)
    finally:
        setup.model.train()
    dist.all_reduce(total)
    return float(total) / (count * rank_info.tp_size)


class CheckpointSaver:
    """Writes the checkpoints of a run in the background. All ranks call its methods together."""

    def __init__(self, setup: TrainingSetup) -> None:
        self._setup = setup
        self._directory = setup.directory.checkpoints_dir
        self._pending: zeroshard.Save | None = None
        self.last_saved_step = setup.start_step

    def start(self, step: int, is_last: bool) -> Path:
        """Start to write a checkpoint and return its path; the oldest checkpoints are deleted afterwards."""
        self.wait()
        setup = self._setup
        path = checkpoint_path(self._directory, step)
        keep = setup.options.run.keep
        with self._with_resume_hint():
            self._pending = zeroshard.save(
                path,
                setup.model,
                setup.optimizer,
                extra={"step": step, "seconds": round(setup.record.seconds, 3)},
                frozen=not setup.language_model.is_pretrained,  # frozen weights stay in their own files
                # the newest checkpoint is known to be good only after a step from it, so the previous one is kept too
                keep=keep if is_last else max(keep, 2),
                wait=False,
            )
        self.last_saved_step = step
        return path

    def wait(self) -> None:
        """Wait until the pending checkpoint is complete."""
        if self._pending is not None:
            with self._with_resume_hint():
                self._pending.wait()
            self._pending = None
            self._setup.record.checkpoints = [path.name for path in complete_checkpoints(self._directory)]
            if self._setup.rank_info.is_rank_zero:
                self._setup.directory.write_record(self._setup.record.as_dict())

    def abort(self, reason: str, first_bad_step: int) -> NoReturn:
        """End the run on all ranks, and quarantine checkpoints of ``first_bad_step`` or later."""
        self.wait()
        complete = complete_checkpoints(self._directory)
        good = [path for path in complete if checkpoint_step(path) < first_bad_step]
        if self._setup.rank_info.is_rank_zero:
            for path in complete[len(good) :]:
                quarantine(path)
            self._setup.record.checkpoints = [path.name for path in good]
        advice = "A lower --lr, a longer --warmup or a smaller --clip may help."
        raise AllRanksError(f"{reason}. {self._resume_hint(good)} {advice}")

    @contextmanager
    def _with_resume_hint(self) -> Iterator[None]:
        """Add the last good checkpoint to the error if a checkpoint cannot be written."""
        try:
            yield
        except zeroshard.CheckpointError as error:
            self._pending = None
            raise AllRanksError(f"{error}. {self._resume_hint(complete_checkpoints(self._directory))}") from error

    def _resume_hint(self, good_checkpoints: Sequence[Path]) -> str:
        if not good_checkpoints:
            return "There is no good checkpoint."
        return f"The last good checkpoint is {good_checkpoints[-1]}: resume with `{resume_command(self._setup)}`."


class StepTracer:
    """Profiles the steps of ``--profile-steps``. If training raises, ``with tracer.trace:`` writes nothing."""

    def __init__(self, setup: TrainingSetup) -> None:
        self._setup = setup
        self._steps = setup.options.profiled_steps(setup.start_step)
        self.trace = ExitStack()  # holds the profiler while it is running

    def begin_step(self, step: int) -> AbstractContextManager[Any] | None:
        """Return the range of a profiled step, with the name that tools for traces look for; start with the first."""
        if step not in self._steps:
            return None
        directory, rank = self._setup.directory, self._setup.rank_info.rank
        if step == self._steps[0]:
            directory.traces_dir.mkdir(exist_ok=True)
            directory.trace_path(step, f"-rank{rank}").unlink(missing_ok=True)  # of the same step, before a resume
            self.trace.enter_context(zeroshard.profile(self._setup.model, trace=directory.trace_path(step)))
        return record_function(f"ProfilerStep#{step}")

    def end_step(self, step: int, is_last: bool = False) -> str:
        """Write the trace if this is its last step, or the last of the run; return a message for the user."""
        if is_last and self._steps and step < self._steps[0]:
            return f"no step was profiled: the run stopped before step {self._steps[0]}"
        if step not in self._steps or (step < self._steps[-1] and not is_last):
            return ""
        self.trace.close()
        first = self._steps[0]
        self._steps = range(0)
        paths = self._setup.directory.trace_path(first, "-rank*")
        return f"profile of steps {first} to {step}: open {paths} in ui.perfetto.dev or chrome://tracing"


class Trainer:
    """Runs training from the start step to the last step, or until a stop request."""

    def __init__(self, setup: TrainingSetup, stop_request: StopRequest) -> None:
        self.setup, self.stop_request = setup, stop_request
        self.options, self.rank_info, self.record = setup.options, setup.rank_info, setup.record
        self.start_step = setup.start_step
        self.steps_done = self.start_step
        self.is_stopping = False
        self._saver = CheckpointSaver(setup)
        self._tracer = StepTracer(setup)
        self._stats_reducer = StepStatsReducer(setup.rank_info.device)
        # by step: fraction of a profiled step spent waiting for communication
        self._wait_fractions: dict[int, float] = {}
        self._peak_flops = gpu_peak_flops(setup.record.device, setup.record.precision)
        self._flops_per_token = flops_per_token(
            *count_matmul_params(setup.language_model.module),
            setup.language_model.layers,
            setup.language_model.width,
            setup.train_loader.sequence,
        )
        self.view = RunView()
        self._metrics_file: MetricsFile | None = None

    def run(self) -> None:
        """Train, and write a complete run directory, however the run ends."""
        run_options = self.options.run
        if self.rank_info.is_rank_zero:
            self.view = open_view(
                total_steps=self.options.training.steps,
                start_step=self.start_step,
                plain=run_options.plain,
                log_every=run_options.log_every,
            )
            record = self.record.as_dict()
            self.setup.directory.write_record(record)
            trackers = [
                start_tracker(name, record, self.setup.directory.path, self.start_step) for name in run_options.tracker
            ]
            self._metrics_file = MetricsFile(self.setup.directory.metrics_path, self.start_step, trackers)
        with self.view, self._metrics_file or nullcontext():
            self.view.show_header(header_lines(self.setup))
            try:
                with self._tracer.trace:
                    self._train()
                self._finish()
            except Exception as error:
                message = str(error) if isinstance(error, TrainingError) else f"{type(error).__name__}: {error}"
                self._write_report("stopped", message)
                if isinstance(error, AllRanksError):
                    dist.barrier()  # otherwise the launcher would kill rank 0 while it writes
                raise

    # -- steps --------------------------------------------------------------------------------------------------

    def _train(self) -> None:
        run_options = self.options.run
        if self.start_step == 0 and run_options.eval_every:
            self._evaluate()
        while not self.is_stopping and not self.is_finished:
            self._step()
            self._process_stats()
            if self.steps_done == self.start_step + STEADY_AFTER_STEPS + 1:
                self._record_memory()
            if self.is_stopping or self.is_finished:
                break
            if run_options.eval_every and self.steps_done % run_options.eval_every == 0:
                self._evaluate()
            if run_options.checkpoint_every and self.steps_done % run_options.checkpoint_every == 0:
                self._save()
        self._process_stats(flush=True)
        self._end_traced_step(is_last=True)

    def _step(self) -> None:
        """Run one optimizer step. Its randomness depends only on seed, step and rank, so a resumed run repeats it."""
        step, training, rank_info = self.steps_done, self.options.training, self.rank_info
        torch.manual_seed(((training.seed * 1_000_003 + step) * rank_info.dp_size + rank_info.dp_rank) % 2**63)
        for group in self.setup.optimizer.param_groups:
            group["lr"] = learning_rate(step, training, group.get("rule", "adamw"))
        is_steady = step - self.start_step == STEADY_AFTER_STEPS
        step_range = self._tracer.begin_step(step + 1)
        if step_range is not None:
            self._stats_reducer.restart_timer()  # without the start of the profiler
        is_profiled = (is_steady or (step + 1) % self.options.run.log_every == 0) and step_range is None
        with (
            step_range or nullcontext(),
            zeroshard.profile(self.setup.model) if is_profiled else nullcontext(Profile()) as profile,
        ):
            loss = self._forward_backward(step, profile)
            profile.phase("step")
            norm = self.setup.optimizer.clip_grad_norm_(training.clip or math.inf)
            self.setup.optimizer.step()
            self.setup.optimizer.zero_grad()
        if is_profiled:
            self._wait_fractions[step + 1] = profile.waited / profile.seconds
        if is_steady:
            self.record.memory_over_step = memory_timeline(profile)
        self._stats_reducer.start_reduce(step + 1, loss, norm, self.stop_request.signal is not None)
        self.steps_done += 1
        self._end_traced_step()

    def _end_traced_step(self, is_last: bool = False) -> None:
        message = self._tracer.end_step(self.steps_done, is_last)
        if message:
            self.view.show_message(message)
            self._stats_reducer.restart_timer()

    def _forward_backward(self, step: int, profile: Profile) -> torch.Tensor:
        """Run forward and backward over this rank's part of the batch; return its mean loss."""
        setup = self.setup
        device = self.rank_info.device
        batch = setup.train_loader.batch(step, self.rank_info.dp_rank, self.rank_info.dp_size)
        total = torch.zeros((), device=device)
        for micro_batch in zip(*(torch.split(tensor, setup.batching.micro) for tensor in batch), strict=True):
            profile.phase("forward")
            inputs, labels = (tensor.to(device, non_blocking=True) for tensor in micro_batch)
            loss = setup.language_model.loss(setup.model, inputs, labels) / setup.batching.accumulate
            profile.phase("backward")
            torch.autograd.backward(setup.optimizer.scale(loss))
            total += loss.detach()
        return total

    def _process_stats(self, flush: bool = False) -> None:
        """Log the reduced stats of finished steps, and abort if the loss or the gradient norm is not finite."""
        for stats in self._stats_reducer.read_ready(flush):
            self._log_step(stats)
            self.is_stopping |= stats.has_stop_request
            if not math.isfinite(stats.loss):
                self._saver.abort(f"the loss is {stats.loss} at step {stats.step}", stats.step - 1)
            overflows_are_skipped = self.record.precision == "fp16"  # by the loss scaler
            if not math.isfinite(stats.grad_norm) and not overflows_are_skipped:
                self._saver.abort(f"the gradient norm is {stats.grad_norm} at step {stats.step}", stats.step)

    def _log_step(self, stats: StepStats) -> None:
        rate = self.setup.tokens_per_step / max(stats.seconds, 1e-9)
        flops = rate * self._flops_per_token / self.rank_info.world_size
        metrics = StepMetrics(
            step=stats.step,
            loss=stats.loss,
            lr=learning_rate(stats.step - 1, self.options.training),
            grad_norm=stats.grad_norm,
            tokens=stats.step * self.setup.tokens_per_step,
            tokens_per_s=rate,
            seconds=round(self.record.seconds, 3),
            communication=self._wait_fractions.pop(stats.step, None),
            tflops=flops / 1e12 if self.rank_info.device.type == "cuda" else None,
            mfu=None if self._peak_flops is None else flops / self._peak_flops,
        )
        self.view.show_step(metrics)
        if self._metrics_file is not None:
            self._metrics_file.write(metrics)

    def _record_memory(self) -> None:
        """Record memory and traffic of a step, once both are steady."""
        report = zeroshard.report(self.setup.model)
        memory = all_gather_object(memory_by_kind(report), dist.group.WORLD, "record the memory", None)
        self.record.set_step(memory, report)
        ddp_bytes = {kind: nbytes for kind, nbytes in self.record.ddp_state_bytes.items() if nbytes}
        self.view.show_memory(state_bytes(memory[0]), ddp_bytes)

    # -- evaluation and checkpoints -----------------------------------------------------------------------------

    def _evaluate(self) -> None:
        """Compute and log the validation loss, without side effects on training."""
        if self.setup.validation_loader is None:
            return
        self._process_stats(flush=True)
        loss = evaluate(self.setup, self.setup.validation_loader)
        if not math.isfinite(loss):
            self._saver.abort(f"the held-out loss is {loss} after step {self.steps_done}", self.steps_done)
        self.view.show_evaluation(self.steps_done, loss)
        if self._metrics_file is not None:
            self._metrics_file.write_evaluation(self.steps_done, loss)
        self._stats_reducer.restart_timer()

    def _save(self) -> None:
        """Start to write a checkpoint of the current step."""
        if self._saver.last_saved_step != self.steps_done:
            self._process_stats(flush=True)  # aborts first if the loss is not finite
            path = self._saver.start(self.steps_done, is_last=self.is_finished)
            self.view.show_message(f"checkpoint {path}")
            self._stats_reducer.restart_timer()

    # -- the end ------------------------------------------------------------------------------------------------

    @property
    def is_finished(self) -> bool:
        """Whether all steps are done."""
        return self.steps_done >= self.options.training.steps

    def _finish(self) -> None:
        has_trained = self.steps_done > self.start_step
        if self.is_finished:
            zeroshard.average_replicas(self.setup.model)
            if has_trained:
                self._evaluate()
        self._save()
        self._saver.wait()
        if self.is_finished:
            self._export()
            sample = generate_sample(self.setup) if has_trained else None
            if sample is not None:
                self.record.samples.append({"step": self.steps_done, **sample})
                self.view.show_sample(**sample)
            self._write_report("finished", "")
        else:
            self._write_report("interrupted", "stopped by a signal")

    def _export(self) -> None:
        """Write the trained weights in the model's original format, with the tokenizer."""
        setup = self.setup
        directory = setup.directory.model_dir if self.rank_info.is_rank_zero else None
        if directory is not None:
            directory.mkdir(exist_ok=True)
        setup.language_model.save(setup.model, directory)
        if directory is None or setup.corpus.tokenizer is None:
            return
        if not (directory / TOKENIZER_FILE).exists():  # a Hugging Face model has saved its own
            setup.corpus.tokenizer.save(str(directory / TOKENIZER_FILE))

    def _write_report(self, outcome: str, message: str) -> None:
        """Write the record and the report. A failure is shown, but does not fail the run."""
        if not self.rank_info.is_rank_zero:
            return
        self.record.outcome, self.record.message = outcome, message
        report_path: Path | None = None
        try:
            self.setup.directory.write_record(self.record.as_dict())
            report_path = write_html_report(self.setup.directory.path)
        except (OSError, ValueError) as error:
            self.view.show_message(f"cannot write the report: {error}. Run `zeroshard report` later.")
        self.view.show_footer(footer_lines(self.setup, self.steps_done, report_path))
