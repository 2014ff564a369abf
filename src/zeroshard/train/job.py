"""Job: everything a run needs, made from its options: directory, data, model, optimizer, and where it begins."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import zeroshard
from zeroshard.presets import PRESETS
from zeroshard.tensor.plans import plan_of
from zeroshard.train.batching import Batching
from zeroshard.train.check import batching_of, refuse_taken
from zeroshard.train.checkpoint import Checkpoint, whole_checkpoints
from zeroshard.train.data.corpus import Corpus, encode_corpus, open_corpus
from zeroshard.train.data.loader import Loader
from zeroshard.train.data.tokens import TokenFile, is_token_file
from zeroshard.train.directory import RunDirectory, new_directory
from zeroshard.train.errors import TrainingError
from zeroshard.train.models.language_model import LanguageModel, open_language_model
from zeroshard.train.options import Options
from zeroshard.train.record import Record, begin_record
from zeroshard.train.sample import prompt_tokens
from zeroshard.train.settled import settle
from zeroshard.train.world import World

NOT_KEPT = ("out", "resume", "config", "dry_run")  # options that say where a run is, not what it is
PLANNED = ("auto", "memory", "machine")  # options whose outcome is kept


@dataclass
class Job:
    """What the loop runs on."""

    options: Options
    world: World
    directory: RunDirectory
    language_model: LanguageModel
    model: nn.Module
    optimizer: zeroshard.ShardedOptimizer
    corpus: Corpus
    batching: Batching
    training: Loader
    held_out: Loader | None
    precision: str
    record: Record
    checkpoint: Checkpoint | None
    """Where the run goes on from."""
    why: str = ""
    """What a plan has chosen, and why, where something was left to it."""


def prepare(options: Options, world: World) -> Job:
    """Make everything. What is wrong with the options, files or sizes is told before anything is trained."""
    try:
        return _prepare(options, world)
    except (ValueError, OSError, ImportError, zeroshard.CheckpointError) as error:
        raise TrainingError(str(error)) from error


def check_tensor(options: Options, module: nn.Module) -> None:
    """Refuse a number of ranks that cannot divide the model's layers."""
    tensor = options.sharding.tensor
    if tensor == 1:
        return
    plan = plan_of(module)
    if plan is None:
        what = "a model with LoRA adapters" if options.model.lora else f"a {type(module).__name__}"
        raise ValueError(
            f"--tensor {tensor}: how to divide the layers of {what} is not known, only those of the presets and of "
            "Hugging Face's Llama and GPT-2: leave --tensor out"
        )
    for what, count in plan.counts.items():
        if count % tensor:
            raise ValueError(f"--tensor {tensor} does not divide the model's {count} {what}: give a number that does")


def _prepare(options: Options, world: World) -> Job:
    batching = batching_of(options, world.ranks)
    language_model = open_language_model(options.model, options.data)
    check_tensor(options, language_model.module)
    world = replace(world, tensor=options.sharding.tensor)
    sequence = sequence_length(options, language_model)
    precision = chosen_precision(options, world.device.type)
    options, why = settle(options, batching, language_model, sequence, precision, world)
    batching = batching_of(options, world.ranks)
    directory = _open_directory(options, world)
    found = whole_checkpoints(directory.checkpoints) if options.run.resume else []
    checkpoint = Checkpoint(found[-1]) if found else None
    corpus = _open_corpus(options, world, directory, language_model)

    def loader(tokens: TokenFile, rows: int) -> Loader:
        seed, vocabulary = options.training.seed, language_model.vocabulary
        return Loader(tokens, sequence=sequence, batch=rows, seed=seed, vocabulary=vocabulary)

    held_out = loader(corpus.validation, world.data_ranks) if corpus.validation is not None else None
    training = loader(corpus.train, batching.batch)
    record = begin_record(options, world, language_model, precision, batching, sequence)
    if checkpoint is not None:
        record.go_on(directory.read_record(), checkpoint.seconds)
    model, optimizer = _shard(options, world, language_model, precision, checkpoint)
    if world.first:  # last: what was refused before leaves no run behind, and one that was there as it was
        directory.write_config(_kept(options))
    return Job(
        options=options,
        world=world,
        directory=directory,
        language_model=language_model,
        model=model,
        optimizer=optimizer,
        corpus=corpus,
        batching=batching,
        training=training,
        held_out=held_out,
        precision=precision,
        record=record,
        checkpoint=checkpoint,
        why=why,
    )


def sequence_length(options: Options, language_model: LanguageModel) -> int:
    """Tokens a sequence: what was asked for, else the model's context, at most 1024."""
    context = language_model.context
    wanted = options.model.sequence or min(context or 1024, 1024)
    if context is not None and wanted > context:
        raise ValueError(f"sequences of {wanted} tokens do not fit the model's context of {context}: shorten them")
    return wanted


def chosen_precision(options: Options, device: str) -> str:
    """The precision that "auto" stands for on a device."""
    if options.sharding.precision != "auto":
        return options.sharding.precision
    return "bf16" if device == "cuda" and torch.cuda.is_bf16_supported() else "fp32"


def _kept(options: Options) -> dict[str, Any]:
    """What a run's config.json holds: all that says what the run is, with paths that are right from anywhere."""
    kept = {name: value for name, value in options.flat().items() if name not in NOT_KEPT + PLANNED}
    for name in ("model", "tokenizer", "data", "validation"):
        value = kept[name]
        if isinstance(value, tuple):
            kept[name] = [os.path.abspath(path) for path in value]
        elif value is not None and value not in PRESETS:
            kept[name] = os.path.abspath(value)
    return kept


def _open_directory(options: Options, world: World) -> RunDirectory:
    """Choose and make the run's directory on the first rank, and tell the others."""
    chosen: list[Any] = [None]
    if world.first:
        out = Path(options.run.out) if options.run.out is not None else new_directory(Path("runs"), options.name)
        refuse_taken(options, out)
        out.mkdir(parents=True, exist_ok=True)
        directory = RunDirectory(out)
        directory.lock()
        chosen = [os.fspath(out)]
    dist.broadcast_object_list(chosen, src=0)
    return directory if world.first else RunDirectory(Path(chosen[0]))


def _open_corpus(options: Options, world: World, directory: RunDirectory, language_model: LanguageModel) -> Corpus:
    """Encode the texts on the first rank, and open the tokens on all."""
    patient = dist.new_group(backend="gloo", timeout=timedelta(days=1))  # much text takes long
    if world.first:
        tokenizer = options.data.tokenizer or language_model.tokenizer
        encoded = bool(options.data.data) and all(is_token_file(Path(path)) for path in options.data.data)
        if language_model.pretrained and tokenizer is None and not encoded:
            raise ValueError(
                f"{options.model.model} has weights but no tokenizer.json, and text encoded otherwise would mean "
                "nothing to it: give --tokenizer, or --data as a file of tokens"
            )
        encode_corpus(
            options.data.data,
            directory.data,
            tokenizer=tokenizer,
            vocabulary=language_model.vocabulary,
            validation=options.data.validation,
        )
    dist.barrier(group=patient)
    corpus = open_corpus(directory.data, holdout=options.data.holdout)
    if corpus.vocabulary is not None and corpus.vocabulary > language_model.vocabulary:
        more = f"--vocabulary {corpus.vocabulary}, or " if options.model.model in PRESETS else ""
        raise ValueError(
            f"the tokenizer has {corpus.vocabulary} ids, the model {language_model.vocabulary}: give {more}another "
            "--tokenizer"
        )
    prompt = options.run.prompt
    if prompt is not None and corpus.tokenizer is not None and not prompt_tokens(corpus.tokenizer, prompt):
        raise ValueError(f"--prompt {prompt!r} has no tokens: give another beginning, or leave it out")
    return corpus


def _shard(
    options: Options, world: World, language_model: LanguageModel, precision: str, checkpoint: Checkpoint | None
) -> tuple[nn.Module, zeroshard.ShardedOptimizer]:
    """Fill and partition the model unit by unit, and give the optimizer its states back."""
    training, module = options.training, language_model.module
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": training.weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    given = [group for group in groups if group["params"]]
    adamw = torch.optim.AdamW(given, lr=training.lr, betas=training.betas, fused=True)
    torch.manual_seed(training.seed)
    model, optimizer = zeroshard.shard(
        module,
        adamw,
        mesh=world.mesh(),
        stage=options.sharding.stage,
        offload=options.sharding.offloaded,
        precision=precision,
        cast_on_gather=options.sharding.cast_on_gather,
        timeout=options.sharding.timeout,
        init_fn=language_model.init_fn,
    )
    if checkpoint is not None:
        zeroshard.load(checkpoint.path, model, optimizer)
    return model, optimizer
