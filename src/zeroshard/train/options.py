"""All options of `zeroshard train`, as typed dataclasses.

The command line and the configuration file are made from these classes: a field is a flag (`--micro-batch 4`) and a key
of the file (`micro_batch = 4`). Each group of fields is a class, shown as one box by `--help`. The docstrings of fields
are the help texts: one line each, because tyro keeps line breaks.

[Note: values and combinations]
Options that belong together may come from different sources: a file, an earlier run, the command line. Each source is
parsed on its own. So ``__post_init__`` checks single numbers, and ``check`` all else; it is called once all sources are
read.
"""

from __future__ import annotations

import math
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from zeroshard.config.offload import parse_bytes
from zeroshard.models import CONFIGURATIONS, PRESETS

if TYPE_CHECKING:
    import torch

Stage = Literal[0, 1, 2, 3]
ConfigurationName = Literal["C1", "C2", "C3", "C4", "C5"]
TrackerName = Literal["tensorboard", "wandb", "trackio"]
AutoOption = Literal["stage", "offload", "recompute", "micro-batch"]
PLANNED_OPTIONS: dict[AutoOption, str] = {  # what --auto decides on
    "stage": "stage configuration",
    "offload": "offload offload_fraction offload_parameters",
    "recompute": "recompute offload_activations configuration",
    "micro-batch": "micro_batch accumulate",
}
DEFAULT_BATCH_SEQUENCES = 8  # sequences per step by default
WARM_UP_STEPS = 3  # not profiled: they allocate states, learn the order of collectives, and record memory
MAX_PROFILE_STEPS = 10  # a trace has some ten thousand events per step


# numbers without an entry have no limit of their own
AT_LEAST_1 = (
    "layers heads width sequence lora_rank vocabulary steps batch micro_batch accumulate "
    "ranks tensor replicas local_steps eval_sequences keep log_every"
)
AT_LEAST_0 = "warmup weight_decay clip min_lr seed outer_momentum eval_every checkpoint_every sample_tokens"
MINIMUM = {**dict.fromkeys(AT_LEAST_1.split(), 1), **dict.fromkeys(AT_LEAST_0.split(), 0)}
POSITIVE = ("lora_alpha", "lr", "muon_lr", "outer_lr", "timeout")
MAX_INT = 2**63 - 1
MAX_TIMEOUT = 1e9  # seconds, 30 years: longer ones overflow


class TrainingError(RuntimeError):
    """A run cannot continue. The message explains everything, so no stack trace is shown."""


class AllRanksError(TrainingError):
    """An error that every rank raises at the same point, so that all ranks can end together."""


def describe_bug(error: BaseException, directory: Path | None = None) -> str:
    """Return an error that nothing explains in one line; its stack trace goes to a file in ``directory``, or in /tmp.

    >>> describe_bug(KeyError("lr"))
    "KeyError: 'lr'. The stack trace is in ....txt"
    """
    stack = "".join(traceback.format_exception(error))
    summary = f"{type(error).__name__}: {error}".partition("\n")[0]
    try:
        descriptor, path = tempfile.mkstemp(".txt", "zeroshard-", directory)
        with open(descriptor, "w", errors="replace") as file:
            file.write(stack)
    except OSError:
        return f"{summary}\n{stack}"
    return f"{summary}. The stack trace is in {path}"


class OptionGroup:
    """Options that are shown together. Each value is checked on its own: see [Note: values and combinations]."""

    def __post_init__(self) -> None:
        """Raise if a text is empty or a number is out of range."""
        for name, value in vars(self).items():
            if value == "" or (isinstance(value, tuple) and "" in value):
                raise ValueError(f"{name} is empty: pass a value, or omit the option")
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                continue
            if name in POSITIVE and not value > 0:
                raise ValueError(f"{name} must be positive (got {value})")
            if name in MINIMUM and not value >= MINIMUM[name]:
                raise ValueError(f"{name} must be at least {MINIMUM[name]} (got {value})")
            largest = MAX_TIMEOUT if name == "timeout" else MAX_INT if isinstance(value, int) else sys.float_info.max
            if value > largest:
                limit = f"at most {largest:g}" if math.isfinite(value) else "finite"
                raise ValueError(f"{name} must be {limit} (got {value:g})")


@dataclass(frozen=True, kw_only=True)
class ModelOptions(OptionGroup):
    """The model to train"""

    model: str = "tiny"
    """a preset (see `zeroshard presets`), a Hugging Face model's directory, or its config.json to train from scratch"""
    layers: int | None = None
    """number of blocks; None: the preset's"""
    heads: int | None = None
    """number of attention heads; None: the preset's"""
    width: int | None = None
    """hidden size; None: the preset's"""
    sequence: int | None = None
    """tokens per sequence; None: the model's context, at most 1024"""
    recompute: bool = False
    """activation checkpointing: keep only the inputs of blocks, and recompute the other activations in backward"""
    partition_activations: bool = True
    """with --tensor: partition the kept inputs over the tensor-parallel ranks (P_a)"""
    offload_activations: bool = False
    """keep the inputs of blocks in host memory (P_a+cpu); implies --recompute"""
    lora: bool = False
    """train LoRA adapters of a Hugging Face model with PEFT; the model itself is frozen"""
    lora_rank: int = 8
    """rank of the adapters"""
    lora_alpha: float = 16.0
    """the adapters are scaled by alpha / rank"""
    lora_targets: tuple[str, ...] = ("all-linear",)
    """names of the modules that get adapters"""

    @property
    def has_activation_checkpointing(self) -> bool:
        """Whether activations are recomputed in backward.

        >>> ModelOptions(offload_activations=True).has_activation_checkpointing
        True
        """
        return self.recompute or self.offload_activations

    @property
    def checkpoint_kwargs(self) -> dict[str, Any]:
        """Keyword arguments for :func:`zeroshard.checkpoint_activations`.

        >>> ModelOptions(recompute=True).checkpoint_kwargs
        {'partition': None, 'offload': False}
        """
        return {"partition": None if self.partition_activations else False, "offload": self.offload_activations}


@dataclass(frozen=True, kw_only=True)
class DataOptions(OptionGroup):
    """The text to train on"""

    data: tuple[str, ...] = ()
    """text files, or one token file (.npy, or .bin of 16-bit ids); none: plays by Shakespeare"""
    validation: tuple[str, ...] = ()
    """validation data in the same formats; none: the last part of the training data"""
    holdout: float = 0.1
    """fraction of the data used for validation if --validation is not given"""
    tokenizer: str | None = None
    """a tokenizer.json, or a directory with one; None: the model's tokenizer, or a BPE trained on the data"""
    vocabulary: int | None = None
    """vocabulary size of the model and of a newly trained BPE; None: the preset's"""


@dataclass(frozen=True, kw_only=True)
class StepOptions(OptionGroup):
    """Batch, learning rate and optimizer"""

    steps: int = 400
    """number of optimizer steps"""
    batch: int | None = None
    """sequences per step; None: micro-batch × ranks × accumulate, or 8. A tensor-parallel group counts as one rank"""
    micro_batch: int | None = None
    """sequences per rank and backward; None: batch / ranks / accumulate"""
    accumulate: int | None = None
    """backwards per step; None: batch / ranks / micro-batch"""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """adamw, or muon: Muon for the matrices of blocks, and AdamW for embeddings, head, norms and biases"""
    lr: float = 3e-3
    """maximum learning rate"""
    muon_lr: float | None = None
    """with --optimizer muon: maximum learning rate of Muon, whose updates have the size of AdamW's; None: lr"""
    warmup: int = 20
    """steps of linear warmup"""
    min_lr: float | None = None
    """learning rate at the end of the cosine decay; None: lr / 10"""
    weight_decay: float = 0.1
    """weight decay of matrices; vectors have none"""
    betas: tuple[float, float] = (0.9, 0.95)
    """betas of AdamW"""
    clip: float = 1.0
    """maximum gradient norm; 0: no clipping"""
    seed: int = 0
    """seed of the weights, the data order, dropout and the samples"""


@dataclass(frozen=True, kw_only=True)
class ShardOptions(OptionGroup):
    """How states are partitioned, and where they are stored"""

    stage: Stage = 3
    """ZeRO stage. 0: nothing is partitioned; 1: optimizer states; 2: also gradients; 3: also parameters"""
    tensor: int = 1
    """tensor-parallel degree, for presets, Llama and GPT-2: a divisor of the number of ranks and of attention heads"""
    replicas: int = 1
    """rows of a 2-D mesh of the data-parallel ranks, usually the number of nodes: see --partition"""
    partition: Literal["hybrid", "hierarchical", "full", "hierarchical-gradients", "inner-gradients"] = "hybrid"
    """with --replicas: what is partitioned over one row (hybrid), over all ranks (full), or parameters over one row and
    the rest over all ranks (hierarchical); gradients too, until the last backward of a step (hierarchical-gradients);
    only these (inner-gradients)"""
    gather_dtype: Literal["int8", "fp8"] | None = None
    """stage 3: all-gather parameters in 8 bits. It changes the numbers, and halves what is gathered"""
    reduce_wire: Literal["int8", "fp8"] | None = None
    """stages 1 to 3: send gradients in 8 bits, and sum them in fp32. It changes the numbers, and halves what is sent"""
    local_steps: int = 1
    """with --replicas, or stage 0: rows train alone and average their parameters every so many steps, for slow links"""
    outer_lr: float | None = None
    """with --local-steps: learning rate of an outer SGD with Nesterov momentum (DiLoCo); None: plain averages"""
    outer_momentum: float = 0.9
    """with --outer-lr: its momentum"""
    configuration: ConfigurationName | None = None
    """a configuration of the ZeRO paper (see `zeroshard presets`); sets --stage and activation checkpointing"""
    offload: Literal["device", "host", "disk"] = "device"
    """where optimizer states and gradients are stored. The CPU updates states outside the device"""
    offload_fraction: float = 1.0
    """fraction of the optimizer states to offload, 0 to 1"""
    offload_parameters: bool = False
    """stage 3: also keep this rank's parameter shards in host memory"""
    offload_directory: str | None = None
    """with --offload disk: a directory on a fast local disk. The files are deleted at the end"""
    auto: tuple[AutoOption, ...] = ()
    """let the planner choose these options, or without names all that are not set, as in `--auto stage offload`"""
    allow_lossy: bool = False
    """with --auto: also try --gather-dtype int8 and --reduce-wire int8, which change the numbers"""
    memory: str | None = None
    """with --auto: limit of device memory, for example 40GB; None: what is free"""
    machine: str | None = None
    """with --auto: plan with the rates of a machine (h100, …) or JSON file; None: measured here, or the most similar"""
    precision: Literal["auto", "fp32", "bf16", "fp16", "fp8"] = "auto"
    """compute precision; bf16, fp16 and fp8 have fp32 master weights; fp8: as bf16, with the products of linear layers
    except the last in float8; auto: bf16 if the GPU supports it, otherwise fp32"""
    cast_on_gather: bool = True
    """stage 3 with bf16, fp16 or fp8: keep no 16-bit shards, and cast the master weights for each all-gather"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """device type; auto: GPUs if there are any"""
    ranks: int | None = None
    """processes to start on this machine, without torchrun or srun; None: one per GPU, or 2"""
    timeout: float = 600.0
    """seconds until ranks that wait for each other at different points raise an error"""

    @property
    def outer_optimizer(self) -> Callable[..., torch.optim.Optimizer] | None:
        """The ``outer_optimizer`` argument of :func:`zeroshard.shard`."""
        if self.outer_lr is None:
            return None
        from torch.optim import SGD  # here: the command line starts without torch

        has_momentum = self.outer_momentum > 0
        return partial(SGD, lr=self.outer_lr, momentum=self.outer_momentum, nesterov=has_momentum)

    @property
    def shard_options(self) -> dict[str, Any]:
        """The options of :func:`zeroshard.shard` that these set, except the precision."""
        names = "stage partition gather_dtype reduce_wire local_steps outer_optimizer cast_on_gather"
        return {"offload": self.offload_config, **{name: getattr(self, name) for name in names.split()}}

    @property
    def offload_config(self) -> dict[str, Any]:
        """The ``offload`` argument of :func:`zeroshard.shard`.

        >>> ShardOptions(offload="host", offload_fraction=0.5).offload_config
        {'optimizer': ('host', 0.5), 'parameters': 'device', 'directory': None}
        """
        return {
            "optimizer": (self.offload, self.offload_fraction),
            "parameters": "host" if self.offload_parameters else "device",
            "directory": self.offload_directory,
        }


@dataclass(frozen=True, kw_only=True)
class RunOptions(OptionGroup):
    """Directory, evaluation, checkpoints and output"""

    config: str | None = None
    """a .toml or .json file of options; flags override it"""
    out: str | None = None
    """directory of the run; None: runs/MODEL, with a number if it exists"""
    resume: bool = False
    """resume the run in --out, or the newest, from its last checkpoint, with its options; start one if there is none"""
    eval_every: int = 50
    """steps between evaluations on validation data; 0: only at the end"""
    eval_sequences: int = 64
    """sequences per evaluation"""
    checkpoint_every: int = 200
    """steps between checkpoints; 0: only at the end"""
    keep: int = 2
    """number of checkpoints to keep at the end; during the run at least two are kept"""
    log_every: int = 10
    """steps between log lines if the output is not a terminal"""
    plain: bool = False
    """print log lines instead of the live view"""
    tracker: tuple[TrackerName, ...] = ()
    """also log the metrics to tensorboard, wandb or trackio, or several of them"""
    profile: bool = False
    """run torch's profiler in some steps: each rank writes a Chrome trace into the run directory"""
    profile_steps: tuple[int, int] = (4, 6)
    """with --profile: the first and the last of these steps, counted from where this run starts or resumes"""
    prompt: str | None = None
    """prompt of the sample that is generated at the end; None: some validation text"""
    sample_tokens: int = 120
    """length of the sample; 0: no sample"""
    dry_run: bool = False
    """print the settings of the run and the memory per rank, and exit"""


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Train a language model with ZeRO: its states are partitioned over all ranks.

    Without options, it trains a small GPT on Shakespeare, on 2 CPU ranks or all GPUs, for a minute or two. Under
    torchrun or srun it joins their ranks; otherwise it starts its own.
    """

    model: ModelOptions = field(default_factory=ModelOptions)
    data: DataOptions = field(default_factory=DataOptions)
    training: StepOptions = field(default_factory=StepOptions)
    sharding: ShardOptions = field(default_factory=ShardOptions)
    run: RunOptions = field(default_factory=RunOptions)

    def check(self) -> None:
        """Raise if options do not fit together: see [Note: values and combinations]."""
        model, data, training, sharding, run = self.model, self.data, self.training, self.sharding, self.run
        parse_bytes("memory", sharding.memory)  # raises before a rank is started
        first, last = run.profile_steps
        if not WARM_UP_STEPS < first <= last < first + MAX_PROFILE_STEPS:
            raise ValueError(
                f"profile_steps must be the first step, at least {WARM_UP_STEPS + 1} because earlier ones warm up, and "
                f"the last, at most {MAX_PROFILE_STEPS - 1} later (got {first} and {last})"
            )
        if not 0 < data.holdout < 1:
            raise ValueError(f"holdout must be between 0 and 1 (got {data.holdout:g})")
        if not all(0 <= beta < 1 for beta in training.betas):
            raise ValueError(f"betas must be at least 0 and below 1 (got {training.betas})")
        if training.min_lr is not None and training.min_lr > training.lr:
            raise ValueError(f"min_lr must be at most lr, {training.lr:g} (got {training.min_lr:g})")
        if sharding.offload == "disk" and sharding.offload_directory is None:
            raise ValueError("offload disk needs --offload-directory: a directory on a fast local disk")
        if sharding.local_steps > 1 and sharding.replicas == 1 and sharding.stage > 0:
            raise ValueError("local_steps averages the rows of a mesh: set --replicas to their number, or use stage 0")
        chooses_offload = "offload" in sharding.auto
        uses_stage_3 = sharding.stage == 3 or "stage" in sharding.auto
        for group, names, has_effect, why in (  # options that have an effect only with others
            (model, "lora_rank lora_alpha lora_targets", model.lora, "without lora: the whole model is trained"),
            (training, "muon_lr", training.optimizer == "muon", "without optimizer muon"),
            (data, "holdout", not data.validation, "with validation, whose data is used as it is"),
            (sharding, "partition", sharding.replicas > 1, "without replicas above 1, the rows of a mesh"),
            (sharding, "outer_lr", sharding.local_steps > 1, "without local_steps above 1"),
            (sharding, "outer_momentum", sharding.outer_lr is not None, "without outer_lr"),
            (sharding, "offload_fraction", chooses_offload or sharding.offload != "device", "without offload"),
            (sharding, "offload_directory", chooses_offload or sharding.offload == "disk", "without offload disk"),
            (sharding, "gather_dtype cast_on_gather offload_parameters", uses_stage_3, "below stage 3"),
            (sharding, "reduce_wire", sharding.stage > 0, "in stage 0, which all-reduces gradients"),
            (sharding, "memory machine allow_lossy", bool(sharding.auto), "without auto"),
            (run, "profile_steps", run.profile, "without profile"),
            (run, "prompt", run.sample_tokens > 0, "with sample_tokens 0, which generates no sample"),
        ):
            for name in names.split():
                if not has_effect and getattr(group, name) != getattr(type(group), name):
                    raise ValueError(f"{name} has no effect {why}: leave one of them out")

    def batching(self, ranks: int) -> Batching:
        """Return how the batch is split over ranks and backwards; raise if it cannot be."""
        training = self.training
        batching = Batching.resolve(
            ranks, training.batch, training.micro_batch, training.accumulate, tensor=self.sharding.tensor
        )
        data_ranks = ranks // self.sharding.tensor
        if data_ranks % self.sharding.replicas:
            raise ValueError(
                f"--replicas {self.sharding.replicas} does not divide the {data_ranks} data-parallel ranks: change one "
                "of them"
            )
        return batching

    def profiled_steps(self, start_step: int) -> range:
        """Return the steps to profile if ``start_step`` steps are already done; empty if there are none.

        >>> TrainOptions(run=RunOptions(profile=True), training=StepOptions(steps=105)).profiled_steps(100)
        range(104, 106)
        """
        first, last = self.run.profile_steps if self.run.profile else (1, 0)
        return range(start_step + first, min(start_step + last, self.training.steps) + 1)

    def to_flat_dict(self) -> dict[str, Any]:
        """Return all options by name.

        >>> TrainOptions().to_flat_dict()["stage"]
        3
        """
        return {name: value for group in vars(self).values() for name, value in vars(group).items()}

    def with_values(self, values: Mapping[str, Any]) -> TrainOptions:
        """Return a copy with other values of the options named; lists are those of a JSON file.

        >>> TrainOptions().with_values({"stage": 2, "betas": [0.9, 0.99]}).training.betas
        (0.9, 0.99)
        """
        given = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
        groups = {}
        for title, group in vars(self).items():
            groups[title] = replace(group, **{name: given[name] for name in vars(group).keys() & given.keys()})
        return TrainOptions(**groups)

    def with_configuration(self, name: ConfigurationName) -> TrainOptions:
        """Return a copy with one of the paper's configurations applied.

        >>> TrainOptions().with_configuration("C1").sharding.stage
        1
        """
        chosen = CONFIGURATIONS[name]
        activations = {
            "recompute": True,
            "partition_activations": chosen.partition_activations,
            "offload_activations": chosen.offload_activations,
        }
        return self.with_values({"configuration": name, "stage": chosen.stage, **activations})

    def with_auto(self, names: tuple[AutoOption, ...]) -> TrainOptions:
        """Return a copy with the named options left to the planner; until then they have their defaults.

        >>> TrainOptions(training=StepOptions(micro_batch=4)).with_auto(("micro-batch",)).training.micro_batch
        """
        defaults = TrainOptions().to_flat_dict()
        chosen = [option for name in names for option in PLANNED_OPTIONS[name].split()]
        return self.with_values({"auto": names, **{option: defaults[option] for option in chosen}})

    @property
    def name(self) -> str:
        """A short name of the model."""
        model = self.model.model
        if model in PRESETS:
            return model
        path = Path(model).resolve()
        return (path.parent if path.name == "config.json" else path).name or "model"


@dataclass(frozen=True)
class Batching:
    """``batch`` sequences per step = ``micro`` per rank and backward × ranks × ``accumulate`` backwards.

    The ``tensor`` tensor-parallel ranks of a group have the same sequences, and count as one.

    >>> Batching.resolve(ranks=2, batch=16, micro=4, accumulate=None)
    Batching(batch=16, micro=4, accumulate=2)
    >>> Batching.resolve(ranks=2, batch=16, micro=4, accumulate=None, tensor=2)
    Batching(batch=16, micro=4, accumulate=4)
    """

    batch: int
    micro: int
    accumulate: int

    @classmethod
    def resolve(
        cls, ranks: int, batch: int | None, micro: int | None, accumulate: int | None, tensor: int = 1
    ) -> Batching:
        """Compute the values that are None; raise if the values do not match."""
        if ranks % tensor:
            raise ValueError(f"--tensor {tensor} does not divide the {ranks} ranks: set --ranks to a multiple of it")
        ranks //= tensor
        parts = ranks * (accumulate or 1)
        if batch is None:
            batch = parts * (micro or max(DEFAULT_BATCH_SEQUENCES // parts, 1))
        micro = micro or max(batch // parts, 1)
        accumulate = accumulate or max(batch // (ranks * micro), 1)
        if micro * ranks * accumulate != batch:
            ranks_text = f"{ranks} ranks" if tensor == 1 else f"{ranks} groups of {tensor} ranks"
            raise ValueError(
                f"a batch of {batch} sequences is not {micro} per rank and backward × {ranks_text} × {accumulate} "
                f"backwards, which is {micro * ranks * accumulate}: omit or change one of batch, micro-batch and "
                "accumulate"
            )
        return cls(batch, micro, accumulate)
