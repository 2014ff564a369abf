"""TrainingSetup: everything a run needs: directory, data, model, optimizer and resume checkpoint, made from options."""

from __future__ import annotations

import os
import warnings
from dataclasses import replace
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
from zeroshard.planner import Machine, UntraceableError
from zeroshard.planner.auto import AUTO, JobTopology, choose_plan, choose_plan_for_machine, local_machine
from zeroshard.sharding import find_block_matrices
from zeroshard.tensor_parallel import local_numels
from zeroshard.train.data.corpus import (
    Corpus,
    encode_corpus,
    encode_prompt,
    is_token_file,
    open_corpus,
    tokenizer_vocab_size,
)
from zeroshard.train.data.token_loader import TokenLoader
from zeroshard.train.metrics import check_trackers
from zeroshard.train.models import LanguageModel, open_language_model
from zeroshard.train.options import ShardOptions, StepOptions, TrainingError, TrainOptions
from zeroshard.train.rank import RankInfo
from zeroshard.train.run_directory import RunDirectory, create_run_directory, newest_checkpoint
from zeroshard.train.run_record import describe_run

UNSAVED_OPTIONS = (
    *("out", "resume", "config", "dry_run", "profile", "profile_steps"),  # not what a run trains
    *("auto", "allow_lossy", "memory", "machine"),  # of the planner, whose results are saved instead
)


class TrainingSetup:
    """Everything the training loop uses: directory, data, sharded model, optimizer and record."""

    def __init__(self, options: TrainOptions, rank_info: RankInfo) -> None:
        options.batching(rank_info.world_size)  # raises before the model is built
        check_trackers(options.run.tracker)  # as the launcher does: torchrun starts ranks without it
        torch.manual_seed(options.training.seed)  # of adapters
        language_model = open_language_model(options.model, options.data)
        self.language_model = language_model
        module = language_model.module
        local_numels(module, options.sharding.tensor)  # raises if the layers cannot be split
        self.rank_info = replace(rank_info, tp_size=options.sharding.tensor)
        precision = resolve_precision(options, rank_info.device.type)
        options, self.plan_reason = resolve_auto(options, language_model, precision, self.rank_info)
        self.options = options
        self.batching = options.batching(rank_info.world_size)
        self.directory = _open_directory(options, rank_info)
        checkpoint = newest_checkpoint(self.directory) if options.run.resume else None
        self.corpus = _open_corpus(options, rank_info, self.directory, language_model)

        make_loader = partial(
            TokenLoader,
            sequence=language_model.sequence,
            seed=options.training.seed,
            vocab_size=language_model.vocab_size,
        )
        self.validation_loader: TokenLoader | None = None
        if len(self.corpus.validation):
            self.validation_loader = make_loader(self.corpus.validation, batch=self.rank_info.dp_size)
        self.train_loader = make_loader(self.corpus.train, batch=self.batching.batch)
        self.record = describe_run(options, self.rank_info, language_model, precision)
        self.start_step = 0
        if checkpoint is not None:
            self.start_step = checkpoint.step
            self.record.resume_from(self.directory.read_record(), checkpoint.seconds)
        if rank_info.device.type == "cpu" and (precision in ("bf16", "fp8") or options.training.optimizer == "muon"):
            _settle_bf16_products()
        inner = make_optimizer(module, options.training)
        torch.manual_seed(options.training.seed)
        self.model, self.optimizer = zeroshard.shard(
            module,
            inner,
            mesh=self.rank_info.make_mesh(options.sharding.replicas),
            precision=precision,
            keep_bf16=find_output_layers(module),
            timeout=options.sharding.timeout,
            init_fn=language_model.init_fn,
            **options.sharding.shard_options,
        )
        if checkpoint is not None:
            zeroshard.load(checkpoint.path, self.model, self.optimizer)
        if rank_info.is_rank_zero:  # last: an earlier error creates no run and leaves an existing one unchanged
            self.directory.write_config(_config_to_save(options))

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one step, on all ranks."""
        return self.batching.batch * self.train_loader.sequence


def prepare_training(options: TrainOptions, rank_info: RankInfo) -> TrainingSetup:
    """Create the setup. Errors in options, files or sizes are raised before training starts."""
    try:
        return TrainingSetup(options, rank_info)
    except (ValueError, OSError, ImportError, zeroshard.CheckpointError, DiskError) as error:
        raise TrainingError(str(error)) from error


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
    config = {name: value for name, value in options.to_flat_dict().items() if name not in UNSAVED_OPTIONS}
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
        path = options.run.out or os.fspath(create_run_directory(Path("runs"), options.name))
        directory = RunDirectory(Path(path))
        directory.check_available(options.run.resume)
        directory.path.mkdir(parents=True, exist_ok=True)
        directory.lock()
    (path, *_) = all_gather_object(path, dist.group.WORLD, "open the run directory", None)
    return directory if rank_info.is_rank_zero else RunDirectory(Path(path))


def _open_corpus(
    options: TrainOptions, rank_info: RankInfo, directory: RunDirectory, language_model: LanguageModel
) -> Corpus:
    """Encode the texts on rank 0, and open the tokens on all ranks."""
    slow_group = dist.new_group(backend="gloo", timeout=timedelta(days=1))  # encoding a large text takes long
    data = options.data
    saved = _config_to_save(options)
    given = {name: saved[name] for name in ("data", "validation", "tokenizer", "vocabulary")}
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


# ------------------------------------------------------------------------------------------------ --auto


def resolve_auto(
    options: TrainOptions, language_model: LanguageModel, precision: str, target: RankInfo | int
) -> tuple[TrainOptions, str]:
    """Return options without auto and a one-line reason; set up the model's activation checkpointing accordingly.

    With a RankInfo as ``target``, all ranks call it and rank 0 decides. With a world size alone, nothing is started,
    and a machine named by the options has all its memory free.
    """
    sharding, auto = options.sharding, options.sharding.auto
    if not auto:
        return options, ""
    if "recompute" in auto and sharding.tensor > 1 and not options.model.partition_activations:
        raise ValueError(
            "--auto with --tensor assumes partitioned activations: omit --no-partition-activations, or add --recompute "
            "or --no-recompute"
        )
    ranks = target.world_size if isinstance(target, RankInfo) else target
    batching = options.batching(ranks)
    is_micro_batch_free = "micro-batch" in auto and options.training.accumulate is None
    constraints: dict[str, Any] = {
        **sharding.shard_options,
        **dict.fromkeys({"stage", "offload"} & set(auto), AUTO),
        "allow_lossy": sharding.allow_lossy,
        "checkpoint": AUTO if "recompute" in auto else None,
        "micro_batch": None if is_micro_batch_free else batching.micro,
        "batch": batching.batch,
        "sequence": language_model.sequence,
        "precision": precision,
        "keep_bf16": find_output_layers(language_model.module),
        "optimizer": options.training.optimizer,
        "directory": sharding.offload_directory,
    }
    module = language_model.module
    try:
        if isinstance(target, RankInfo):
            limits: dict[str, Any] = {name: getattr(sharding, name) for name in ("machine", "memory", "timeout")}
            topology = JobTopology(target.device, ranks, sharding.tensor, sharding.replicas)
            decision = choose_plan(module, None, topology, **limits, **constraints)
        else:
            machine = target_machine(sharding, ranks)
            topology = JobTopology(torch.device(machine.kind), ranks, sharding.tensor, sharding.replicas)
            decision = choose_plan_for_machine(module, None, topology, machine, **constraints)
    except UntraceableError as error:
        raise ValueError(f"--auto: {error}. Omit --auto and set the options explicitly") from error
    strategy = decision.strategy
    changes: dict[str, Any] = {"auto": (), "allow_lossy": False}
    changes |= {name: getattr(strategy, name) for name in ("stage", "gather_dtype", "reduce_wire")}
    if "recompute" in auto:
        changes["recompute"] = strategy.checkpoint != "none"
        changes["offload_activations"] = strategy.checkpoint == "host"
    if "micro-batch" in auto:
        changes |= {"batch": batching.batch, "micro_batch": strategy.micro_batch}
    if "offload" in auto and strategy.offload is not None:
        ((tier, fraction),) = strategy.offload.optimizer.items()
        changes |= {"offload": tier, "offload_fraction": fraction}
        changes["offload_parameters"] = bool(strategy.offload.parameters)
    resolved = options.with_values(changes)
    if "recompute" in auto and resolved.model.has_activation_checkpointing:
        zeroshard.checkpoint_activations(module, language_model.blocks, **resolved.model.checkpoint_kwargs)
    return resolved, decision.reason


def target_machine(sharding: ShardOptions, ranks: int) -> Machine:
    """Return the machine to plan for without starting a run: the one that the options name, or this one."""
    if sharding.machine is not None:
        changes = {} if sharding.memory is None else {"memory": sharding.memory}
        return Machine.resolve(sharding.machine, **changes)
    on_gpu = sharding.device != "cpu" and torch.cuda.is_available()
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    return local_machine(device, ranks, sharding.memory, sharding.offload_directory)
