"""TrainingSetup: everything a run needs: directory, data, model, optimizer and resume checkpoint, made from options."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import zeroshard
from zeroshard.comm import all_gather_object
from zeroshard.memory import DiskError
from zeroshard.models import PRESETS, find_output_layers
from zeroshard.optim import MuonWithAdamW
from zeroshard.sharding import find_block_matrices
from zeroshard.tensor_parallel import tensor_plan_for
from zeroshard.train.auto_options import resolve_auto
from zeroshard.train.data.corpus import Corpus, encode_corpus, is_token_file, open_corpus
from zeroshard.train.data.token_loader import TokenLoader
from zeroshard.train.data.tokenizer import encode_prompt, tokenizer_vocab_size
from zeroshard.train.models.language_model import (
    LanguageModel,
    open_language_model,
    sequence_length,
)
from zeroshard.train.options import Batching, StepOptions, TrainingError, TrainOptions
from zeroshard.train.rank import RankInfo
from zeroshard.train.run_directory import RunCheckpoint, RunDirectory, create_run_directory, newest_checkpoint
from zeroshard.train.run_record import RunRecord, describe_run
from zeroshard.train.trackers import check_trackers

# options that say where a run is stored or what is printed of it, not what it trains
UNSAVED_OPTIONS = ("out", "resume", "config", "dry_run", "profile", "profile_steps")
PLANNING_OPTIONS = ("auto", "allow_lossy", "memory", "machine")  # planner options: their results are saved instead


@dataclass
class TrainingSetup:
    """Everything the training loop uses."""

    options: TrainOptions
    rank_info: RankInfo
    directory: RunDirectory
    language_model: LanguageModel
    model: nn.Module
    optimizer: zeroshard.ShardedOptimizer
    corpus: Corpus
    batching: Batching
    train_loader: TokenLoader
    validation_loader: TokenLoader | None
    precision: str
    record: RunRecord
    resume_checkpoint: RunCheckpoint | None
    """The checkpoint to resume from, if any."""
    plan_reason: str = ""
    """What the planner chose and why; empty if no option was left to auto."""

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one step, on all ranks."""
        return self.batching.batch * self.train_loader.sequence


def prepare_training(options: TrainOptions, rank_info: RankInfo) -> TrainingSetup:
    """Create the setup. Errors in options, files or sizes are raised before training starts."""
    try:
        return _prepare_training(options, rank_info)
    except (ValueError, OSError, ImportError, zeroshard.CheckpointError, DiskError) as error:
        raise TrainingError(str(error)) from error


def check_tensor_parallel(options: TrainOptions, module: nn.Module) -> None:
    """Raise if the model's layers cannot be split over the tensor-parallel ranks."""
    tensor = options.sharding.tensor
    if tensor == 1:
        return
    plan = tensor_plan_for(module)
    if plan is None:
        subject = "a model with LoRA adapters" if options.model.lora else f"a {type(module).__name__}"
        raise ValueError(
            f"--tensor {tensor} is not supported for {subject}, only for presets and Hugging Face's Llama and GPT-2: "
            "omit --tensor"
        )
    for subject, count in plan.divisible_sizes.items():
        if count % tensor:
            raise ValueError(f"--tensor {tensor} does not divide the model's {count} {subject}: pass a divisor")


def _prepare_training(options: TrainOptions, rank_info: RankInfo) -> TrainingSetup:
    options.batching(rank_info.world_size)  # raises before the model is built
    check_trackers(options.run.tracker)  # as the launcher does: torchrun starts ranks without it
    torch.manual_seed(options.training.seed)  # of adapters
    language_model = open_language_model(options.model, options.data)
    check_tensor_parallel(options, language_model.module)
    rank_info = replace(rank_info, tp_size=options.sharding.tensor)
    sequence = sequence_length(options.model, language_model)
    precision = resolve_precision(options, rank_info.device.type)
    options, plan_reason = resolve_auto(options, language_model, precision, rank_info)
    batching = options.batching(rank_info.world_size)
    directory = _open_directory(options, rank_info)
    checkpoint = newest_checkpoint(directory) if options.run.resume else None
    corpus = _open_corpus(options, rank_info, directory, language_model)

    make_loader = partial(
        TokenLoader, sequence=sequence, seed=options.training.seed, vocab_size=language_model.vocab_size
    )
    validation_loader = make_loader(corpus.validation, batch=rank_info.dp_size) if len(corpus.validation) else None
    train_loader = make_loader(corpus.train, batch=batching.batch)
    record = describe_run(options, rank_info, language_model, precision)
    if checkpoint is not None:
        record.resume_from(directory.read_record(), checkpoint.seconds)
    if rank_info.device.type == "cpu" and (precision in ("bf16", "fp8") or options.training.optimizer == "muon"):
        _settle_bf16_products()
    model, optimizer = _shard_model(options, rank_info, language_model, precision, checkpoint)
    if rank_info.is_rank_zero:  # last: an earlier error creates no run and leaves an existing one unchanged
        directory.write_config(_config_to_save(options))
    return TrainingSetup(
        options=options,
        rank_info=rank_info,
        directory=directory,
        language_model=language_model,
        model=model,
        optimizer=optimizer,
        corpus=corpus,
        batching=batching,
        train_loader=train_loader,
        validation_loader=validation_loader,
        precision=precision,
        record=record,
        resume_checkpoint=checkpoint,
        plan_reason=plan_reason,
    )


def _settle_bf16_products() -> None:
    """Have torch choose the library for products before the first step, so that a resumed run rounds as this one.

    On a CPU without bf16, a first bf16 product fails inside torch, which then uses another library for all products,
    fp32 included.
    """
    with warnings.catch_warnings(action="ignore"):
        matrix = torch.ones(32, 96, dtype=torch.bfloat16, device="cpu")
        torch.mm(matrix, matrix.T)


def resolve_precision(options: TrainOptions, device: str) -> str:
    """Return the precision; "auto" is resolved by the device."""
    if options.sharding.precision != "auto":
        return options.sharding.precision
    return "bf16" if device == "cuda" and torch.cuda.is_bf16_supported() else "fp32"


def _config_to_save(options: TrainOptions) -> dict[str, Any]:
    """Return the contents of config.json: the options that define the run, with absolute paths."""
    config = {
        name: value for name, value in options.to_flat_dict().items() if name not in UNSAVED_OPTIONS + PLANNING_OPTIONS
    }
    for name in ("model", "tokenizer", "data", "validation"):
        value = config[name]
        if isinstance(value, tuple):
            config[name] = [os.path.abspath(path) for path in value]
        elif value is not None and value not in PRESETS:
            config[name] = os.path.abspath(value)
    return config


def _open_directory(options: TrainOptions, rank_info: RankInfo) -> RunDirectory:
    """Choose and create the run directory on rank 0, and broadcast its path."""
    path = ""
    if rank_info.is_rank_zero:
        out = Path(options.run.out) if options.run.out is not None else create_run_directory(Path("runs"), options.name)
        directory = RunDirectory(out)
        directory.check_available(options.run.resume)
        out.mkdir(parents=True, exist_ok=True)
        directory.lock()
        path = os.fspath(out)
    (path, *_) = all_gather_object(path, dist.group.WORLD, "open the run directory", None)
    return directory if rank_info.is_rank_zero else RunDirectory(Path(path))


def _open_corpus(
    options: TrainOptions, rank_info: RankInfo, directory: RunDirectory, language_model: LanguageModel
) -> Corpus:
    """Encode the texts on rank 0, and open the tokens on all ranks."""
    slow_group = dist.new_group(backend="gloo", timeout=timedelta(days=1))  # encoding a large text takes long
    data = options.data
    given: dict[str, Any] = {
        "data": [os.path.abspath(path) for path in data.data],
        "validation": [os.path.abspath(path) for path in data.validation],
        "tokenizer": data.tokenizer and os.path.abspath(data.tokenizer),
        "vocabulary": data.vocabulary,
    }
    if rank_info.is_rank_zero and not directory.has_run():
        tokenizer = data.tokenizer or language_model.tokenizer_path
        is_encoded = bool(data.data) and all(is_token_file(path) for path in data.data)
        if language_model.is_pretrained and tokenizer is None and not is_encoded:
            raise ValueError(
                f"{options.model.model} has pretrained weights but no tokenizer.json: pass its tokenizer as "
                "--tokenizer, or a token file as --data"
            )
        encode_corpus(
            data.data,
            directory.data_dir,
            tokenizer=tokenizer,
            vocab_size=language_model.vocab_size,
            validation=data.validation,
            options=given,
        )
    dist.barrier(group=slow_group)
    corpus = open_corpus(directory.data_dir, holdout=data.holdout, options=given)
    if corpus.tokenizer is None:
        return corpus
    count = tokenizer_vocab_size(corpus.tokenizer)
    if count > language_model.vocab_size:
        option = f"--vocabulary {count}, or " if options.model.model in PRESETS else ""
        raise ValueError(
            f"the tokenizer has {count} ids, but the model has {language_model.vocab_size}: pass {option}another "
            "--tokenizer"
        )
    if options.run.prompt is not None:
        encode_prompt(corpus.tokenizer, options.run.prompt)  # raises if it cannot be encoded
    return corpus


def _shard_model(
    options: TrainOptions,
    rank_info: RankInfo,
    language_model: LanguageModel,
    precision: str,
    checkpoint: RunCheckpoint | None,
) -> tuple[nn.Module, zeroshard.ShardedOptimizer]:
    """Initialize and shard the model unit by unit, and load the checkpoint, if any."""
    training, module = options.training, language_model.module
    inner = make_optimizer(module, training)
    torch.manual_seed(training.seed)
    model, optimizer = zeroshard.shard(
        module,
        inner,
        mesh=rank_info.make_mesh(options.sharding.replicas),
        precision=precision,
        keep_bf16=find_output_layers(module),
        timeout=options.sharding.timeout,
        init_fn=language_model.init_fn,
        **options.sharding.shard_options,
    )
    if checkpoint is not None:
        zeroshard.load(checkpoint.path, model, optimizer)
    return model, optimizer


def make_optimizer(module: nn.Module, options: StepOptions) -> torch.optim.Optimizer:
    """Return the optimizer of a run: AdamW, or Muon for the matrices of blocks with AdamW for the others.

    Only matrices have weight decay. Muon's updates are scaled to the size of AdamW's, so both can have the same
    learning rate.
    """
    trained = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    matrices = find_block_matrices(module) if options.optimizer == "muon" else []
    others = [parameter for name, parameter in trained.items() if name not in set(matrices)]
    groups = [
        {"params": [p for p in others if p.dim() >= 2], "weight_decay": options.weight_decay},
        {"params": [p for p in others if p.dim() < 2], "weight_decay": 0.0},
    ]
    non_empty_groups = [group for group in groups if group["params"]]
    make_adamw = partial(torch.optim.AdamW, non_empty_groups, lr=options.lr, betas=options.betas, fused=True)
    if not matrices:
        return make_adamw()
    muon = torch.optim.Muon(
        [trained[name] for name in matrices],
        lr=options.lr if options.muon_lr is None else options.muon_lr,
        weight_decay=options.weight_decay,
        adjust_lr_fn="match_rms_adamw",
    )
    return MuonWithAdamW(muon, make_adamw() if non_empty_groups else None)
