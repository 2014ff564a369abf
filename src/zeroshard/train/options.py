"""All options of `zeroshard train`, as typed dataclasses.

The command line and the configuration file are made from these classes: a field is a flag (`--micro-batch 4`) and a key
of the file (`micro_batch = 4`). Each group of fields is a class, shown as one box by `--help`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, cast

from zeroshard.config.offload import Offload, parse_bytes
from zeroshard.presets import CONFIGURATIONS, PRESETS

Stage = Literal[0, 1, 2, 3]
ConfigurationName = Literal["C1", "C2", "C3", "C4", "C5"]
AutoOption = Literal["stage", "offload", "recompute", "micro-batch"]


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """What is trained"""

    model: str = "tiny"
    """a preset (tiny, gpt2, gpt2-xl, paper-100b, …: see `zeroshard presets`), a Hugging Face model's directory, or its
    config.json"""
    layers: int | None = None
    """blocks, instead of the preset's"""
    heads: int | None = None
    """attention heads, instead of the preset's"""
    width: int | None = None
    """size of the residual stream, instead of the preset's"""
    sequence: int | None = None
    """tokens a sequence; without it, the model's context, at most 1024"""
    recompute: bool = False
    """activation checkpointing: keep only the blocks' inputs and compute the rest again in backward"""
    partition_activations: bool = True
    """with --tensor, each of its ranks keeps only its part of those inputs (P_a)"""
    offload_activations: bool = False
    """keep those inputs in host memory (P_a+cpu); implies --recompute"""
    lora: bool = False
    """train LoRA adapters of a Hugging Face model through PEFT; the model itself stays frozen"""
    lora_rank: int = 8
    """rank of the adapters"""
    lora_alpha: float = 16.0
    """their scale is alpha / rank"""
    lora_targets: tuple[str, ...] = ("all-linear",)
    """names of the modules that get an adapter"""

    def __post_init__(self) -> None:
        """Validate the options."""
        _check_at_least_one(self, "layers", "heads", "width", "sequence", "lora_rank")
        _check_positive(self, "lora_alpha")

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
class DataOptions:
    """What it is trained on"""

    data: tuple[str, ...] = ()
    """text files, directories of them, or one file of tokens (.npy, or .bin of 16-bit ids); none: the eight plays of
    Shakespeare that come with zeroshard"""
    validation: tuple[str, ...] = ()
    """held-out data of the same sorts; without it, the last part of the training data"""
    holdout: float = 0.1
    """how much of the data is held out when `validation` is not given"""
    tokenizer: str | None = None
    """a tokenizer.json, or a directory with one; without it, the model's own, or a BPE trained on the data"""
    vocabulary: int | None = None
    """token ids of the model and of the BPE that is trained; without it, the preset's"""

    def __post_init__(self) -> None:
        """Validate the options."""
        if not 0 < self.holdout < 1:
            raise ValueError(f"holdout is a share between 0 and 1, got {self.holdout:g}")
        _check_at_least_one(self, "vocabulary")


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """How it is trained"""

    steps: int = 400
    """optimizer steps in all"""
    batch: int | None = None
    """sequences a step, over all ranks; without it, micro-batch × ranks × accumulate, or 8. With --tensor, the ranks
    that divide a layer count as one here and below"""
    micro_batch: int | None = None
    """sequences a rank and backward; without it, batch / ranks / accumulate"""
    accumulate: int | None = None
    """backwards a step; without it, batch / ranks / micro-batch"""
    lr: float = 3e-3
    """highest learning rate"""
    warmup: int = 20
    """steps over which it rises"""
    min_lr: float | None = None
    """where the cosine ends; without it, a tenth of lr"""
    weight_decay: float = 0.1
    """of matrices; vectors are not decayed"""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's averages"""
    clip: float = 1.0
    """largest norm of the gradients; 0: no clipping"""
    seed: int = 0
    """of the weights, the order of the data, dropout and the samples"""

    def __post_init__(self) -> None:
        """Validate the options."""
        _check_at_least_one(self, "steps", "batch", "micro_batch", "accumulate")
        _check_positive(self, "lr")
        for name in ("warmup", "weight_decay", "clip", "min_lr", "seed"):
            value = getattr(self, name)
            if value is not None and not (value >= 0 and math.isfinite(value)):
                raise ValueError(f"{name} is a number from 0 up, got {value}")
        if self.min_lr is not None and self.min_lr > self.lr:
            raise ValueError(f"min_lr is at most lr, {self.lr:g}, got {self.min_lr:g}")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas are two numbers from 0 to below 1, got {self.betas}")


@dataclass(frozen=True, kw_only=True)
class ShardOptions:
    """How its states are partitioned"""

    stage: Stage = 3
    """0: nothing is partitioned. 1: optimizer states. 2: and gradients. 3: and parameters"""
    tensor: int = 1
    """ranks that divide each layer and work on the same sequences (tensor parallelism): a divisor of the ranks and of
    the model's heads; for presets, and Hugging Face's Llama and GPT-2"""
    configuration: ConfigurationName | None = None
    """one of the paper's, see `zeroshard presets`: sets stage, recompute, partition-activations and
    offload-activations, where these are not given beside it"""
    offload: Literal["device", "host", "disk"] = "device"
    """where optimizer states rest, and gradients with them: outside the device, the host's processors update"""
    offload_fraction: float = 1.0
    """how much of them, from 0 to 1"""
    offload_parameters: bool = False
    """in stage 3: this rank's part of the parameters in host memory, too"""
    offload_directory: str | None = None
    """for disk: a directory on a fast local disk. Nothing is left there afterwards"""
    auto: tuple[AutoOption, ...] = ()
    """what is left to a plan: the fastest that fits the memory there is. Alone, all that is not given beside it;
    `--stage auto` is the same as `--auto stage`"""
    memory: str | None = None
    """for --auto: the most that may be taken of a device, as in 40GB; without it, what is left of it"""
    machine: str | None = None
    """for --auto: whose rates count, by name (h100, …, here) or from a JSON file; without it, as measured here by
    `zeroshard plan --calibrate`, or those of the nearest kind"""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """of computation; auto: bf16 on a GPU that has it, else fp32. 16 bits have an fp32 master copy"""
    cast_on_gather: bool = True
    """in stage 3 and 16 bits: keep no 16-bit copy of this rank's part, and cast the master whenever it is gathered.
    With --no-cast-on-gather a copy is kept, and one GPU alone brings and releases nothing"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """where it runs; auto: on GPUs where there are any"""
    ranks: int | None = None
    """processes to start on this machine, where torchrun or srun does not; without it, one a GPU, or 2"""
    timeout: float = 600.0
    """seconds after which ranks that wait for each other at different places get an error"""

    def __post_init__(self) -> None:
        """Validate the options."""
        _check_at_least_one(self, "ranks", "tensor")
        _check_positive(self, "timeout")
        parse_bytes("memory", self.memory)
        Offload.from_option(self.offload_config)
        if self.offload_parameters and self.stage != 3:
            raise ValueError(f"offload_parameters is for stage 3, got stage {self.stage}")

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
class RunOptions:
    """What is shown and kept"""

    config: str | None = None
    """a file of options, .toml or .json; flags count more than the file"""
    out: str | None = None
    """directory of the run; without it, runs/ and the model's name, numbered"""
    resume: bool = False
    """go on from the last whole checkpoint in `out` (without `out`: of the newest run), with that run's options where
    none is given here; from the start where there is none in a given `out`"""
    eval_every: int = 50
    """steps between evaluations on held-out data; 0: only at the end"""
    eval_sequences: int = 64
    """sequences of an evaluation"""
    checkpoint_every: int = 200
    """steps between checkpoints; 0: only at the end"""
    keep: int = 2
    """checkpoints that are kept in the end; the last two always are while it runs"""
    log_every: int = 10
    """steps between lines where the output is not a terminal"""
    plain: bool = False
    """lines instead of a live view"""
    tensorboard: bool = False
    """write TensorBoard events beside metrics.jsonl"""
    prompt: str | None = None
    """beginning of the text that is generated at the end; without it, a piece of held-out text"""
    sample_tokens: int = 120
    """length of that text; 0: none"""
    dry_run: bool = False
    """print what would be used, memory per rank included, and exit"""

    def __post_init__(self) -> None:
        """Validate the options."""
        _check_at_least_one(self, "eval_sequences", "keep", "log_every")
        if self.prompt == "":
            raise ValueError("prompt is empty: give the beginning of a text, or leave it out")
        for name in ("eval_every", "checkpoint_every", "sample_tokens"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is a whole number from 0 up, got {getattr(self, name)}")


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Train a language model with its states partitioned over all ranks (ZeRO).

    Without options: a small GPT on Shakespeare, 2 CPU ranks (or all GPUs), a minute or two. Under torchrun or srun it
    joins the ranks it is started as; otherwise it starts its own.
    """

    model: ModelOptions = field(default_factory=ModelOptions)
    data: DataOptions = field(default_factory=DataOptions)
    training: StepOptions = field(default_factory=StepOptions)
    sharding: ShardOptions = field(default_factory=ShardOptions)
    run: RunOptions = field(default_factory=RunOptions)

    def to_flat_dict(self) -> dict[str, Any]:
        """Return all options by name.

        >>> TrainOptions().to_flat_dict()["stage"]
        3
        """
        groups = [getattr(self, group.name) for group in fields(self)]
        return {option.name: getattr(group, option.name) for group in groups for option in fields(group)}

    def with_configuration(self, name: ConfigurationName) -> TrainOptions:
        """Return a copy with one of the paper's configurations applied.

        >>> TrainOptions().with_configuration("C1").sharding.stage
        1
        """
        configuration = CONFIGURATIONS[name]
        model = replace(
            self.model,
            recompute=True,
            partition_activations=configuration.partition_activations,
            offload_activations=configuration.offload_activations,
        )
        sharding = replace(self.sharding, configuration=name, stage=cast("Stage", configuration.stage))
        return replace(self, model=model, sharding=sharding)

    def with_auto(self, names: tuple[AutoOption, ...]) -> TrainOptions:
        """Return a copy with the named options left to the planner; until then they have their defaults.

        >>> TrainOptions(training=StepOptions(micro_batch=4)).with_auto(("micro-batch",)).training.micro_batch
        """
        model, training, sharding = self.model, self.training, replace(self.sharding, auto=names)
        if "stage" in names:
            sharding = replace(sharding, stage=3)
        if "offload" in names:
            sharding = replace(sharding, offload="device", offload_fraction=1.0, offload_parameters=False)
        if "recompute" in names:
            model = replace(model, recompute=False, offload_activations=False)
        if "micro-batch" in names:
            training = replace(training, micro_batch=None)
        return replace(self, model=model, training=training, sharding=sharding)

    @property
    def name(self) -> str:
        """A short name of the model."""
        model = self.model.model
        if model in PRESETS:
            return model
        path = Path(model).resolve()
        return (path.parent if path.name == "config.json" else path).name or "model"


def _check_at_least_one(options: Any, *names: str) -> None:
    for name in names:
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"{name} is a whole number from 1 up, got {value}")


def _check_positive(options: Any, *names: str) -> None:
    for name in names:
        value = getattr(options, name)
        if not 0 < value < math.inf:
            raise ValueError(f"{name} is a positive number, got {value}")
