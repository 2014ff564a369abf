"""Trainer: the loop. It steps, watches, evaluates and keeps, and ends a run so that nothing is lost."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

import zeroshard
from zeroshard.memory.profile import Profile
from zeroshard.train.data.token_loader import TokenLoader
from zeroshard.train.errors import AllRanksError, TrainingError
from zeroshard.train.flops import count_matmul_params, flops_per_token, peak_flops
from zeroshard.train.generation import generate_sample
from zeroshard.train.launch import StopRequest
from zeroshard.train.metrics import MetricsFile, StepMetrics
from zeroshard.train.models.language_model import copy_tokenizer
from zeroshard.train.options import StepOptions
from zeroshard.train.report.html_report import write_html_report
from zeroshard.train.run_checkpoints import checkpoint_path, checkpoint_step, complete_checkpoints, quarantine
from zeroshard.train.run_record import (
    max_state_bytes,
    memory_by_kind,
    memory_timeline,
    tensor_parallel_traffic,
    traffic_by_collective,
)
from zeroshard.train.step_stats import StepStats, StepStatsReducer
from zeroshard.train.summary import footer_lines, header_lines, resume_command
from zeroshard.train.training_setup import TrainingSetup
from zeroshard.train.view.view import RunView, open_view


def learning_rate(step: int, options: StepOptions) -> float:
    """The rate of a step, counted from 0: a linear rise, then half a cosine down to the lowest.

    >>> options = StepOptions(steps=100, warmup=10, lr=1.0, min_lr=0.1)
    >>> [round(learning_rate(step, options), 3) for step in (0, 9, 10, 55, 99)]
    [0.1, 1.0, 1.0, 0.55, 0.1]
    """
    lowest = options.lr / 10 if options.min_lr is None else options.min_lr
    if step < options.warmup:
        return options.lr * (step + 1) / options.warmup
    done = (step - options.warmup) / max(options.steps - options.warmup, 1)
    return lowest + (options.lr - lowest) * (1 + math.cos(math.pi * min(done, 1.0))) / 2


@torch.no_grad()
def evaluate(setup: TrainingSetup, loader: TokenLoader) -> float:
    """The mean loss over the first windows of the held-out text. Nothing that training depends on changes.

    All ranks call it together, each with as many windows as the others: where there are too few, some count twice.
    Ranks that divide a layer have the same windows.
    """
    world = setup.rank_info
    count = max(min(setup.options.run.eval_sequences, loader.num_windows) // world.dp_size, 1)
    places = [(index * world.dp_size + world.dp_rank) % loader.num_windows for index in range(count)]
    total = torch.zeros((), device=world.device)
    setup.model.eval()
    try:
        for first in range(0, count, setup.batching.micro):
            pairs = [loader.sequential_batch(place, 1) for place in places[first : first + setup.batching.micro]]
            tokens, targets = (torch.cat(part).to(world.device) for part in zip(*pairs, strict=True))
            total += setup.language_model.loss(setup.model, tokens, targets) * len(tokens)
    finally:
        setup.model.train()
    dist.all_reduce(total)
    return float(total) / (count * world.world_size)


STEADY_AFTER_STEPS = (
    2  # steps after which a step takes what it will always take: the optimizer has its states, units their order
)


class Trainer:
    """Runs a job from the step it begins at to its end, or to a request to stop."""

    def __init__(self, setup: TrainingSetup, stop_request: StopRequest) -> None:
        self.setup, self.stop_request = setup, stop_request
        self.options, self.rank_info, self.record = setup.options, setup.rank_info, setup.record
        self.start_step = setup.resume_checkpoint.step if setup.resume_checkpoint is not None else 0
        self.steps_done = self.start_step
        self.is_stopping = False
        self._pending_save: zeroshard.Save | None = None
        self._last_saved_step = self.start_step if setup.resume_checkpoint is not None else -1
        self._stats_reducer = StepStatsReducer(setup.rank_info.device)
        self._wait_fractions: dict[int, float] = {}  # share of a profiled step that waited for communication
        self._tokens_per_step = setup.batching.batch * setup.train_loader.sequence
        name = torch.cuda.get_device_name(setup.rank_info.device) if setup.rank_info.device.type == "cuda" else "cpu"
        self._peak_flops = peak_flops(name, setup.precision)
        self._flops_per_token = flops_per_token(
            *count_matmul_params(setup.language_model.module),
            setup.language_model.layers,
            setup.language_model.width,
            setup.train_loader.sequence,
        )
        self.view: RunView = RunView()
        self._metrics_file: MetricsFile | None = None

    def run(self) -> None:
        """Train, and leave the directory complete, however it ends."""
        run = self.options.run
        if self.rank_info.is_rank_zero:
            self.view = open_view(
                total_steps=self.options.training.steps,
                start_step=self.start_step,
                plain=run.plain,
                log_every=run.log_every,
            )
            events = self.setup.directory.path / "tensorboard" if run.tensorboard else None
            self._metrics_file = MetricsFile(
                self.setup.directory.metrics_path, tensorboard=events, resume_step=self.start_step
            )
            self.setup.directory.write_record(self.record.as_dict())
        with self.view, self._metrics_file or nullcontext():
            self.view.show_header(header_lines(self.setup, self.start_step))
            try:
                self._train()
                self._finish()
            except Exception as error:
                told = str(error) if isinstance(error, TrainingError) else f"{type(error).__name__}: {error}"
                self._write_report("stopped", told)
                if isinstance(error, AllRanksError):
                    dist.barrier()  # or the launcher would end the first rank while it writes
                raise

    # -- steps --------------------------------------------------------------------------------------------------

    def _train(self) -> None:
        run = self.options.run
        if self.start_step == 0 and run.eval_every:
            self._evaluate()
        while self.steps_done < self.options.training.steps and not self.is_stopping:
            self._step()
            self._process_stats()
            if self.steps_done == self.start_step + STEADY_AFTER_STEPS + 1:
                self._record_memory()
            if self.is_stopping or self.steps_done == self.options.training.steps:
                break
            if run.eval_every and self.steps_done % run.eval_every == 0:
                self._evaluate()
            if run.checkpoint_every and self.steps_done % run.checkpoint_every == 0:
                self._start_save()
        self._process_stats(flush=True)

    def _step(self) -> None:
        """One optimizer step. Everything random in it is a function of seed, step and rank: resuming repeats it."""
        step, training, world = self.steps_done, self.options.training, self.rank_info
        torch.manual_seed(((training.seed * 1_000_003 + step) * world.dp_size + world.dp_rank) % 2**63)
        for group in self.setup.optimizer.param_groups:
            group["lr"] = learning_rate(step, training)
        settled = step - self.start_step == STEADY_AFTER_STEPS
        watched = settled or (step + 1) % self.options.run.log_every == 0
        with zeroshard.profile(self.setup.model) if watched else nullcontext(Profile()) as profile:
            loss = self._forward_backward(step, profile)
            profile.phase("step")
            norm = self.setup.optimizer.clip_grad_norm_(training.clip or math.inf)
            self.setup.optimizer.step()
            self.setup.optimizer.zero_grad()
        if watched:
            self._wait_fractions[step + 1] = profile.waited / profile.seconds
        if settled:
            self.record.timeline = memory_timeline(profile)
        self._stats_reducer.start_reduce(step + 1, loss, norm, self.stop_request.signal is not None)
        self.steps_done += 1

    def _forward_backward(self, step: int, profile: Profile) -> torch.Tensor:
        """Forward and backward over this rank's part of the batch; returns its mean loss."""
        batching, device = self.setup.batching, self.rank_info.device
        tokens, targets = self.setup.train_loader.batch(step, self.rank_info.dp_rank, self.rank_info.dp_size)
        total = torch.zeros((), device=device)
        for inputs, following in zip(
            torch.split(tokens, batching.micro), torch.split(targets, batching.micro), strict=True
        ):
            profile.phase("forward")
            inputs, following = (part.to(device, non_blocking=True) for part in (inputs, following))
            loss = self.setup.language_model.loss(self.setup.model, inputs, following) / batching.accumulate
            profile.phase("backward")
            torch.autograd.backward(self.setup.optimizer.scale(loss))
            total += loss.detach()
        return total

    def _process_stats(self, flush: bool = False) -> None:
        """Take in what all ranks know of the steps so far, and stop where it is no use to go on."""
        for beat in self._stats_reducer.read_ready(flush):
            self._log_step(beat)
            self.is_stopping |= beat.has_stop_request
            if not math.isfinite(beat.loss):
                self._abort(f"the loss is {beat.loss} at step {beat.step}", beat.step - 1)
            overflows_are_skipped = self.setup.precision == "fp16"  # by the loss scale
            if beat.grad_norm is not None and not math.isfinite(beat.grad_norm) and not overflows_are_skipped:
                self._abort(f"the norm of the gradients is {beat.grad_norm} at step {beat.step}", beat.step)

    def _abort(self, reason: str, first_bad_step: int) -> NoReturn:
        """End the run on all ranks, without the checkpoints of weights that are ``spoilt`` steps old or more."""
        self._wait_save()
        whole = complete_checkpoints(self.setup.directory.checkpoints_dir)
        good = [path for path in whole if checkpoint_step(path) < first_bad_step]
        if self.rank_info.is_rank_zero:
            for path in whole[len(good) :]:
                quarantine(path)
            self.record.checkpoints = [path.name for path in good]
        advice = "A lower --lr, a longer --warmup or a smaller --clip may help."
        raise AllRanksError(f"{reason}. {self._resume_hint(good)} {advice}")

    def _log_step(self, stats: StepStats) -> None:
        rate = self._tokens_per_step / max(stats.seconds, 1e-9)
        on_gpu = self.rank_info.device.type == "cuda"
        tflops = rate * self._flops_per_token / self.rank_info.world_size / 1e12 if on_gpu else None
        metrics = StepMetrics(
            step=stats.step,
            loss=stats.loss,
            lr=learning_rate(stats.step - 1, self.options.training),
            grad_norm=stats.grad_norm,
            tokens=stats.step * self._tokens_per_step,
            tokens_per_s=rate,
            seconds=round(self.record.seconds, 3),
            communication=self._wait_fractions.pop(stats.step, None),
            tflops=tflops,
            mfu=tflops * 1e12 / self._peak_flops if tflops is not None and self._peak_flops is not None else None,
        )
        self.view.show_step(metrics)
        if self._metrics_file is not None:
            self._metrics_file.write(metrics)

    def _record_memory(self) -> None:
        """Note what a step takes, once it takes what it always will."""
        report = zeroshard.report(self.setup.model)
        memory: list[dict[str, Any]] = [{} for _ in range(self.rank_info.world_size)]
        dist.all_gather_object(memory, memory_by_kind(report))
        self.record.memory, self.record.traffic = memory, traffic_by_collective(report)
        self.record.tensor_traffic = tensor_parallel_traffic(report)
        plain = {kind: nbytes for kind, nbytes in self.record.plain.items() if nbytes}
        self.view.show_memory(
            {kind: nbytes for kind, nbytes in max_state_bytes(memory).items() if kind in plain}, plain
        )

    # -- beside the steps ---------------------------------------------------------------------------------------

    def _evaluate(self) -> None:
        """The loss on held-out text. Nothing that training depends on changes."""
        if self.setup.validation_loader is None:
            return
        self._process_stats(flush=True)
        loss = evaluate(self.setup, self.setup.validation_loader)
        if not math.isfinite(loss):
            self._abort(f"the held-out loss is {loss} after step {self.steps_done}", self.steps_done)
        self.view.show_evaluation(self.steps_done, loss)
        if self._metrics_file is not None:
            self._metrics_file.write_evaluation(self.steps_done, loss)
        self._stats_reducer.restart_timer()

    def _start_save(self) -> None:
        """Write a checkpoint of the steps done, then let the oldest go."""
        if self._last_saved_step == self.steps_done:
            return
        self._process_stats(flush=True)  # not after a loss that was not finite
        self._wait_save()
        path = checkpoint_path(self.setup.directory.checkpoints_dir, self.steps_done)
        with self._with_checkpoint_hint():
            self._pending_save = zeroshard.save(
                path,
                self.setup.model,
                self.setup.optimizer,
                extra={"step": self.steps_done, "seconds": round(self.record.seconds, 3)},
                frozen=not self.setup.language_model.is_pretrained,  # what is not trained is read from where it was
                # the newest is only known to be good when a step from it was: until then the one before is kept, too
                keep=self.options.run.keep if self.is_finished else max(self.options.run.keep, 2),
                wait=False,
            )
        self._last_saved_step = self.steps_done
        self.view.show_message(f"checkpoint {path}")
        self._stats_reducer.restart_timer()

    def _wait_save(self) -> None:
        """Wait until the checkpoint under way is whole."""
        if self._pending_save is not None:
            with self._with_checkpoint_hint():
                self._pending_save.wait()
            self._pending_save = None
        self.record.checkpoints = [path.name for path in complete_checkpoints(self.setup.directory.checkpoints_dir)]

    @contextmanager
    def _with_checkpoint_hint(self) -> Iterator[None]:
        """Say which checkpoint is left where one could not be written. All ranks come here together."""
        try:
            yield
        except zeroshard.CheckpointError as error:
            self._pending_save = None
            good = complete_checkpoints(self.setup.directory.checkpoints_dir)
            raise AllRanksError(f"{error}. {self._resume_hint(good)}") from error

    def _resume_hint(self, good_checkpoints: Sequence[Path]) -> str:
        if not good_checkpoints:
            return "No good checkpoint was written before."
        return f"The last good checkpoint is {good_checkpoints[-1]}: `{resume_command(self.setup)}` goes on from there."

    # -- the end ------------------------------------------------------------------------------------------------

    @property
    def is_finished(self) -> bool:
        """Whether all steps are done."""
        return self.steps_done >= self.options.training.steps

    def _finish(self) -> None:
        finished = self.is_finished
        learnt = self.steps_done > self.start_step
        if finished and learnt:
            self._evaluate()
        self._start_save()
        self._wait_save()
        if finished:
            self._export()
            if learnt:
                self._generate_sample()
        self._write_report("finished" if finished else "interrupted", "" if finished else "told to stop by a signal")

    def _generate_sample(self) -> None:
        """Let the model go on with a text, on all ranks together."""
        sample = generate_sample(self.setup)
        if sample is not None:
            self.record.samples.append({"step": self.steps_done, "prompt": sample.prompt, "text": sample.text})
            self.view.show_sample(sample.prompt, sample.text)

    def _export(self) -> None:
        """Write the trained weights in the format the model came in."""
        directory = self.setup.directory.model_dir
        if self.rank_info.is_rank_zero:
            directory.mkdir(exist_ok=True)
        self.setup.language_model.save(self.setup.model, directory if self.rank_info.is_rank_zero else None)
        if self.rank_info.is_rank_zero and self.setup.corpus.tokenizer_path is not None:
            copy_tokenizer(self.setup.corpus.tokenizer_path, directory)

    def _write_report(self, outcome: str, message: str) -> None:
        """Write the record and the report. That this cannot be done is told, but is no failure of the run."""
        if not self.rank_info.is_rank_zero:
            return
        self.record.outcome, self.record.message = outcome, message
        page: Path | None = None
        try:
            self.setup.directory.write_record(self.record.as_dict())
            page = write_html_report(self.setup.directory.path)
        except (OSError, ImportError) as error:
            self.view.show_message(f"no report was written: {error}. `zeroshard report` makes it later.")
        self.view.show_footer(footer_lines(self.setup, self.steps_done, page))
