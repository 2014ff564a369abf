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
from zeroshard.train.checkpoint import checkpoint_path, set_aside, step_of, whole_checkpoints
from zeroshard.train.errors import SharedError, TrainingError
from zeroshard.train.evaluation import evaluate
from zeroshard.train.flops import flops_per_token, multiplied, peak_flops
from zeroshard.train.job import Job
from zeroshard.train.launch import StopRequest
from zeroshard.train.metrics import Metrics, MetricsFile
from zeroshard.train.models.language_model import copy_tokenizer
from zeroshard.train.page.page import write_page
from zeroshard.train.pulse import Beat, Pulse
from zeroshard.train.record import fullest, memory_of, tensor_traffic_of, timeline_of, traffic_of
from zeroshard.train.sample import sample_text
from zeroshard.train.schedule import learning_rate
from zeroshard.train.summary import footer, header, resuming
from zeroshard.train.view.view import View, open_view

SETTLED = 2  # steps after which a step takes what it will always take: the optimizer has its states, units their order


class Trainer:
    """Runs a job from the step it begins at to its end, or to a request to stop."""

    def __init__(self, job: Job, stop: StopRequest) -> None:
        self.job, self.stop_request = job, stop
        self.options, self.world, self.record = job.options, job.world, job.record
        self.start = job.checkpoint.step if job.checkpoint is not None else 0
        self.done = self.start
        self.stopping = False
        self._save_under_way: zeroshard.Save | None = None
        self._saved_at = self.start if job.checkpoint is not None else -1
        self._pulse = Pulse(job.world.device)
        self._waits: dict[int, float] = {}  # share of a profiled step that waited for communication
        self._tokens_a_step = job.batching.batch * job.training.sequence
        name = torch.cuda.get_device_name(job.world.device) if job.world.device.type == "cuda" else "cpu"
        self._peak = peak_flops(name, job.precision)
        self._flops = flops_per_token(
            *multiplied(job.language_model.module),
            job.language_model.layers,
            job.language_model.width,
            job.training.sequence,
        )
        self.view: View = View()
        self._metrics: MetricsFile | None = None

    def run(self) -> None:
        """Train, and leave the directory complete, however it ends."""
        run = self.options.run
        if self.world.first:
            self.view = open_view(
                total_steps=self.options.training.steps, start_step=self.start, plain=run.plain, log_every=run.log_every
            )
            events = self.job.directory.path / "tensorboard" if run.tensorboard else None
            self._metrics = MetricsFile(self.job.directory.metrics, tensorboard=events, resume_step=self.start)
            self.job.directory.write_record(self.record.as_dict())
        with self.view, self._metrics or nullcontext():
            self.view.header(header(self.job, self.start))
            try:
                self._train()
                self._finish()
            except Exception as error:
                told = str(error) if isinstance(error, TrainingError) else f"{type(error).__name__}: {error}"
                self._close("stopped", told)
                if isinstance(error, SharedError):
                    dist.barrier()  # or the launcher would end the first rank while it writes
                raise

    # -- steps --------------------------------------------------------------------------------------------------

    def _train(self) -> None:
        run = self.options.run
        if self.start == 0 and run.eval_every:
            self._evaluate()
        while self.done < self.options.training.steps and not self.stopping:
            self._step()
            self._listen()
            if self.done == self.start + SETTLED + 1:
                self._take_stock()
            if self.stopping or self.done == self.options.training.steps:
                break
            if run.eval_every and self.done % run.eval_every == 0:
                self._evaluate()
            if run.checkpoint_every and self.done % run.checkpoint_every == 0:
                self._save()
        self._listen(to_the_end=True)

    def _step(self) -> None:
        """One optimizer step. Everything random in it is a function of seed, step and rank: resuming repeats it."""
        step, training, world = self.done, self.options.training, self.world
        torch.manual_seed(((training.seed * 1_000_003 + step) * world.data_ranks + world.data_rank) % 2**63)
        for group in self.job.optimizer.param_groups:
            group["lr"] = learning_rate(step, training)
        settled = step - self.start == SETTLED
        watched = settled or (step + 1) % self.options.run.log_every == 0
        with zeroshard.profile(self.job.model) if watched else nullcontext(Profile()) as profile:
            loss = self._passes(step, profile)
            profile.phase("step")
            norm = self.job.optimizer.clip_grad_norm_(training.clip or math.inf)
            self.job.optimizer.step()
            self.job.optimizer.zero_grad()
        if watched:
            self._waits[step + 1] = profile.waited / profile.seconds
        if settled:
            self.record.timeline = timeline_of(profile)
        self._pulse.send(step + 1, loss, norm, self.stop_request.signal is not None)
        self.done += 1

    def _passes(self, step: int, profile: Profile) -> torch.Tensor:
        """Forward and backward over this rank's part of the batch; returns its mean loss."""
        batching, device = self.job.batching, self.world.device
        tokens, targets = self.job.training.batch(step, self.world.data_rank, self.world.data_ranks)
        total = torch.zeros((), device=device)
        for inputs, following in zip(
            torch.split(tokens, batching.micro), torch.split(targets, batching.micro), strict=True
        ):
            profile.phase("forward")
            inputs, following = (part.to(device, non_blocking=True) for part in (inputs, following))
            loss = self.job.language_model.loss(self.job.model, inputs, following) / batching.accumulate
            profile.phase("backward")
            torch.autograd.backward(self.job.optimizer.scale(loss))
            total += loss.detach()
        return total

    def _listen(self, to_the_end: bool = False) -> None:
        """Take in what all ranks know of the steps so far, and stop where it is no use to go on."""
        for beat in self._pulse.read(to_the_end):
            self._show(beat)
            self.stopping |= beat.stop
            if not math.isfinite(beat.loss):
                self._give_up(f"the loss is {beat.loss} at step {beat.step}", beat.step - 1)
            overflows_are_skipped = self.job.precision == "fp16"  # by the loss scale
            if beat.norm is not None and not math.isfinite(beat.norm) and not overflows_are_skipped:
                self._give_up(f"the norm of the gradients is {beat.norm} at step {beat.step}", beat.step)

    def _give_up(self, what: str, spoilt: int) -> NoReturn:
        """End the run on all ranks, without the checkpoints of weights that are ``spoilt`` steps old or more."""
        self._await_save()
        whole = whole_checkpoints(self.job.directory.checkpoints)
        good = [path for path in whole if step_of(path) < spoilt]
        if self.world.first:
            for path in whole[len(good) :]:
                set_aside(path)
            self.record.checkpoints = [path.name for path in good]
        advice = "A lower --lr, a longer --warmup or a smaller --clip may help."
        raise SharedError(f"{what}. {self._last_good(good)} {advice}")

    def _show(self, beat: Beat) -> None:
        rate = self._tokens_a_step / max(beat.seconds, 1e-9)
        on_gpu = self.world.device.type == "cuda"
        tflops = rate * self._flops / self.world.ranks / 1e12 if on_gpu else None
        metrics = Metrics(
            step=beat.step,
            loss=beat.loss,
            lr=learning_rate(beat.step - 1, self.options.training),
            grad_norm=beat.norm,
            tokens=beat.step * self._tokens_a_step,
            tokens_per_s=rate,
            seconds=round(self.record.seconds, 3),
            communication=self._waits.pop(beat.step, None),
            tflops=tflops,
            mfu=tflops * 1e12 / self._peak if tflops is not None and self._peak is not None else None,
        )
        self.view.step(metrics)
        if self._metrics is not None:
            self._metrics.write(metrics)

    def _take_stock(self) -> None:
        """Note what a step takes, once it takes what it always will."""
        report = zeroshard.report(self.job.model)
        memory: list[dict[str, Any]] = [{} for _ in range(self.world.ranks)]
        dist.all_gather_object(memory, memory_of(report))
        self.record.memory, self.record.traffic = memory, traffic_of(report)
        self.record.tensor_traffic = tensor_traffic_of(report)
        plain = {kind: nbytes for kind, nbytes in self.record.plain.items() if nbytes}
        self.view.memory({kind: nbytes for kind, nbytes in fullest(memory).items() if kind in plain}, plain)

    # -- beside the steps ---------------------------------------------------------------------------------------

    def _evaluate(self) -> None:
        """The loss on held-out text. Nothing that training depends on changes."""
        if self.job.held_out is None:
            return
        self._listen(to_the_end=True)
        loss = evaluate(self.job, self.job.held_out)
        if not math.isfinite(loss):
            self._give_up(f"the held-out loss is {loss} after step {self.done}", self.done)
        self.view.evaluation(self.done, loss)
        if self._metrics is not None:
            self._metrics.write_evaluation(self.done, loss)
        self._pulse.restart()

    def _save(self) -> None:
        """Write a checkpoint of the steps done, then let the oldest go."""
        if self._saved_at == self.done:
            return
        self._listen(to_the_end=True)  # not after a loss that was not finite
        self._await_save()
        path = checkpoint_path(self.job.directory.checkpoints, self.done)
        with self._telling():
            self._save_under_way = zeroshard.save(
                path,
                self.job.model,
                self.job.optimizer,
                extra={"step": self.done, "seconds": round(self.record.seconds, 3)},
                frozen=not self.job.language_model.pretrained,  # what is not trained is read from where it was
                # the newest is only known to be good when a step from it was: until then the one before is kept, too
                keep=self.options.run.keep if self.finished else max(self.options.run.keep, 2),
                wait=False,
            )
        self._saved_at = self.done
        self.view.note(f"checkpoint {path}")
        self._pulse.restart()

    def _await_save(self) -> None:
        """Wait until the checkpoint under way is whole."""
        if self._save_under_way is not None:
            with self._telling():
                self._save_under_way.wait()
            self._save_under_way = None
        self.record.checkpoints = [path.name for path in whole_checkpoints(self.job.directory.checkpoints)]

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """Say which checkpoint is left where one could not be written. All ranks come here together."""
        try:
            yield
        except zeroshard.CheckpointError as error:
            self._save_under_way = None
            good = whole_checkpoints(self.job.directory.checkpoints)
            raise SharedError(f"{error}. {self._last_good(good)}") from error

    def _last_good(self, good: Sequence[Path]) -> str:
        if not good:
            return "No good checkpoint was written before."
        return f"The last good checkpoint is {good[-1]}: `{resuming(self.job)}` goes on from there."

    # -- the end ------------------------------------------------------------------------------------------------

    @property
    def finished(self) -> bool:
        """Whether all steps are done."""
        return self.done >= self.options.training.steps

    def _finish(self) -> None:
        finished = self.finished
        learnt = self.done > self.start
        if finished and learnt:
            self._evaluate()
        self._save()
        self._await_save()
        if finished:
            self._export()
            if learnt:
                self._sample()
        self._close("finished" if finished else "interrupted", "" if finished else "told to stop by a signal")

    def _sample(self) -> None:
        """Let the model go on with a text, on all ranks together."""
        sample = sample_text(self.job)
        if sample is not None:
            self.record.samples.append({"step": self.done, "prompt": sample.prompt, "text": sample.text})
            self.view.sample(sample.prompt, sample.text)

    def _export(self) -> None:
        """Write the trained weights in the format the model came in."""
        directory = self.job.directory.model
        if self.world.first:
            directory.mkdir(exist_ok=True)
        self.job.language_model.save(self.job.model, directory if self.world.first else None)
        if self.world.first and self.job.corpus.tokenizer is not None:
            copy_tokenizer(self.job.corpus.tokenizer, directory)

    def _close(self, outcome: str, message: str) -> None:
        """Write the record and the report. That this cannot be done is told, but is no failure of the run."""
        if not self.world.first:
            return
        self.record.outcome, self.record.message = outcome, message
        page: Path | None = None
        try:
            self.job.directory.write_record(self.record.as_dict())
            page = write_page(self.job.directory.path)
        except (OSError, ImportError) as error:
            self.view.note(f"no report was written: {error}. `zeroshard report` makes it later.")
        self.view.footer(footer(self.job, self.done, page))
