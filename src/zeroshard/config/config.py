"""Config: every option of :func:`zeroshard.shard`, in one frozen, validated dataclass."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, fields
from importlib import import_module
from typing import Any

import torch
from torch import nn

from zeroshard.config.offload import Offload, check_option_names

PRECISIONS = (None, "fp32", "bf16", "fp16", "fp8")
PARTITIONS = {
    # over which axes of a mesh with two data axes: parameters, gradients, optimizer states
    "hybrid": ("inner", "inner", "inner"),
    "hierarchical": ("inner", "both", "both"),
    "full": ("both", "both", "both"),
    "hierarchical-gradients": ("inner", "inner", "both"),
    "inner-gradients": ("both", "inner", "both"),
}
EIGHT_BIT_DTYPES = (None, "int8", "fp8")
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class Config:
    """The options of :func:`zeroshard.shard`.

    >>> Config(stage=2, precision="bf16").bucket_size
    134217728
    >>> Config(stagee=2)
    Traceback (most recent call last):
        ...
    TypeError: unknown option 'stagee': did you mean 'stage'?
    """

    stage: int = 3
    """Which states are partitioned. 0: none (plain data parallelism). 1: optimizer states. 2: also gradients. 3: also
    parameters. The stage changes memory and traffic, not the numbers (beyond rounding). :func:`zeroshard.shard` also
    accepts "auto" for it, and for ``offload``."""

    partition: str = "hybrid"
    """How a mesh with two data axes divides the states that the stage partitions. "hybrid": over the inner axis, and
    the outer axis has replicas. "full": over both axes. "hierarchical": optimizer states and gradients over both,
    parameters over the inner axis: they are gathered over the outer axis once per step, and inside the inner axis
    otherwise. "hierarchical-gradients": gradients over the inner axis too, until the last backward of a step (see
    ``backwards``): they are reduced over the outer axis once per step, and inside the inner axis otherwise.
    "inner-gradients": only gradients are so, parameters are partitioned over both. Without such a mesh, all are the
    same. The numbers are those of "hybrid" (beyond rounding)."""

    local_steps: int = 1
    """Above 1, on a mesh with two data axes: the replicas of the outer axis train alone and average their parameters
    after every so many optimizer steps, as local SGD does, for links that are too slow for gradients. Gradients, norms
    and unused parameters are those of the replica. This is another algorithm: it does not give the numbers of a plain
    run. In stage 0 with one data axis, every rank is a replica. Needs ``partition="hybrid"``."""

    outer_optimizer: Callable[..., torch.optim.Optimizer] | None = None
    """With ``local_steps``: a function of parameters that returns one of torch's elementwise optimizers, such as
    ``functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)`` (DiLoCo). It updates the values of the
    last average with the replicas' mean change since then as the gradient. None: the mean is the new value."""

    precision: str | None = None
    """None: each parameter is computed and updated in its own dtype. "fp32": everything in fp32. "bf16", "fp16":
    compute in 16 bits, update an fp32 master weight that is partitioned like the optimizer states. "fp8": as "bf16",
    but linear layers multiply their matrices in float8, on a GPU that can (Ada, Hopper, Blackwell);
    :func:`zeroshard.report` lists the layers that do not."""

    reduce_dtype: str | torch.dtype | None = None
    """The dtype in which gradients are reduced and stored. None: the compute dtype of the parameters."""

    gather_dtype: str | None = None
    """Stage 3: the dtype in which parameters are all-gathered. None: the compute dtype. "int8", "fp8": 8 bits per
    element, and a scale for each 64 elements: about half the bytes of bf16. Forward and backward then compute with
    values that are off by at most 0.4 % of the largest in 64 ("fp8": by 6.3 % of the value itself, or 0.0003 % of the
    largest if that is more), before they are rounded to the compute dtype. If one of 64 is infinite or NaN, all are
    NaN. Shards, master weights and checkpoints stay exact; a forward inside ``gathered()`` computes with exact values.
    Parameters that stay in fp32 under "bf16" and "fp16", or are in float64, are gathered in their own dtype; weights of
    float8 layers (``precision="fp8"``) as without it: in float8, or in bf16 if that cannot be."""

    reduce_wire: str | None = None
    """Stages 1 to 3: the dtype in which gradients are sent to be reduced. None: ``reduce_dtype``. "int8", "fp8": 8 bits
    per element, with scales as for ``gather_dtype``. Each rank gets its part of the gradient from all others and adds
    these in fp32. On a mesh with two axes, ``partition`` must not be "hybrid" (unless there are ``local_steps``); sums
    of the inner axis are then sent in 8 bits over the outer one. Parameters that stay in fp32 under "bf16" and "fp16",
    or are in float64, are not affected."""

    error_feedback: bool = False
    """With ``reduce_wire``: add what 8 bits could not express of a gradient to the parameter's next one, so that errors
    do not add up. Each rank keeps a full gradient for it, in ``reduce_dtype``. It is not saved: after a load, it
    starts from zero. On a mesh with two axes, it covers the first hop."""

    keep_fp32: tuple[str | type[nn.Module], ...] = ()
    """Modules, by class or by shell pattern of their name, and parameters, by pattern, that stay in fp32 under "bf16",
    "fp16" and "fp8". Such a module gets its floating-point inputs in fp32 and returns its outputs in 16 bits. Batch
    norms always stay in fp32, because their running statistics need it."""

    keep_bf16: tuple[str | type[nn.Module], ...] = ()
    """Linear layers that compute in bf16 under "fp8", by class or by shell pattern of the name of the layer or of a
    module around it: the output layer of a language model ("lm_head") is the common choice."""

    cast_inputs: bool | str = True
    """Under "bf16", "fp16" and "fp8", cast the floating-point inputs of the model and of its ``units`` (if they are
    None, of its repeated blocks), as FSDP2 does, and those of torch's own layers, which would raise without it.
    "model": units get their inputs unchanged, so that an fp32 table or mask that is passed to them stays exact: in 16
    bits a mask of ``finfo(float32).min`` is -inf, and a row that is masked entirely NaN. False: cast none."""

    cast_on_gather: bool = True
    """Stage 3 under "bf16", "fp16" and "fp8": keep no 16-bit copy of this rank's parameter shard; each all-gather casts
    the master weights. States take 14Ψ/N bytes instead of 16Ψ/N, but unsharding a unit reads 4 bytes per element
    instead of 2. With a single rank, too, parameters then exist only during forward and backward. Off, or in another
    stage, a single rank always has its parameters. Parameters that are frozen, stay in fp32 or are offloaded keep their
    copy; other precisions are not affected. The numbers are bitwise equal."""

    units: tuple[str | type[nn.Module], ...] | None = None
    """Which modules are units: classes, or shell patterns of module names ("layers.*"). None: the repeated blocks of
    the model, detected automatically."""

    bucket_size: int = 2**27
    """Elements per collective and per fused buffer, independent of the size of the model (the paper's C_B). A parameter
    of at least a third of this has its own collectives, and its gradient is reduced without a copy. A step also updates
    this many elements at a time: torch's own optimizers are stepped several times if a rank's shard is larger. An
    optimizer of another class, or one with hooks on ``step`` or its own ``step``, is called once, with all gradients
    of its shard: if these need an fp32 copy, that takes 4Ψ/N bytes."""

    ring: int = 2
    """How many gradient buckets may be in flight at once. Each takes ``bucket_size`` elements, and up to a third more
    if there are short ones too."""

    backwards: int | None = None
    """Stages 0 and 1: how many backwards a step has. The last of them reduces the gradients while it computes. Those
    inside ``no_sync()`` count, but do not reduce; ``torch.autograd.grad()`` through the model counts too. None: it is
    learnt from the loop; two steps with the same number are enough. 0: always reduce in ``step()``. If a step has
    another number of backwards, ``step()`` reduces what is left: that takes time, and the numbers differ by rounding at
    most. The same in stages 2 and 3, for the reduction over the outer axis, if ``partition`` has gradients over the
    inner one."""

    prefetch: bool = True
    """All-gather the next unit while the current one computes. Off: one unit less in memory, no overlap."""

    broadcast_buffers: bool = True
    """Copy rank 0's buffers (running statistics) to all ranks before a forward in which they have changed, like DDP."""

    defragment: bool = True
    """On a GPU, find out in the first steps which segments to preallocate in PyTorch's allocator, so that the model's
    temporaries take the least memory (the paper's M_D); this empties the allocator's cache. Also keep one cuBLAS
    workspace at a time instead of one per thread. Off: the allocator is not touched."""

    offload: Any = None
    """Which states are placed in host memory or on disk: "host" (optimizer states, and gradients with them), a
    :class:`zeroshard.Offload`, or its options as a dictionary. Changes memory and time, never the numbers."""

    elementwise: bool | None = None
    """Whether the optimizer updates each element from that element alone. If so, it runs on flat slices of the
    parameters; if not, on whole parameters, each on one rank. None: torch's own optimizers are known; others are tested
    on small tensors, group by group, and rejected if they read several parameters at once or the test is inconclusive.
    True or False: you assert it for all groups of all optimizers, and nothing is tested; torch's own that need whole
    parameters get them anyway. False also asserts that each parameter is updated from that parameter alone."""

    init_fn: Callable[[nn.Module], None] | None = None
    """Called on every module of a model built on the meta device, instead of its own ``reset_parameters``."""

    timeout: float | None = None
    """Seconds that a rank waits for others that are alive and have done nothing else meanwhile; then it raises
    :class:`RanksDisagreeError`. None: the timeout of the process group. A rank that has died, raised, exited or does
    something else is named to all ranks within 10 seconds, independent of this. Under NCCL the process group's timeout
    applies to collectives on the device."""

    heartbeat_timeout: float = 8.0
    """Seconds without a heartbeat after which a rank on another machine counts as dead. For ranks on the same machine
    the operating system knows. Increase it if Python code holds the GIL for longer."""

    loss_scale: float = 2.0**16
    """fp16: the initial loss scale of ``optimizer.scale(loss)``. It halves after an overflow and doubles after 2000
    steps without one."""

    def __new__(cls, **options: Any) -> Config:
        check_option_names([field.name for field in fields(cls)], options)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        """Validate all options and convert them to one form."""
        if type(self.stage) is not int or self.stage not in (0, 1, 2, 3):
            hint = ": only zeroshard.shard() accepts it" if str(self.stage) == "auto" else ""
            raise ValueError(f"stage must be 0, 1, 2 or 3, got {self.stage!r}{hint}")
        if self.partition not in PARTITIONS:
            raise ValueError(f"partition must be one of {', '.join(map(repr, PARTITIONS))}, got {self.partition!r}")
        if self.precision not in PRECISIONS:
            raise ValueError(f"precision must be None, 'fp32', 'bf16', 'fp16' or 'fp8', got {self.precision!r}")
        object.__setattr__(self, "offload", Offload.from_option(self.offload))
        object.__setattr__(self, "reduce_dtype", _parse_dtype("reduce_dtype", self.reduce_dtype))
        _check_eight_bit_options(self)
        for name in ("keep_fp32", "keep_bf16", "units"):
            object.__setattr__(self, name, _parse_patterns(name, getattr(self, name)))
        for name, least in (("bucket_size", 1), ("ring", 1), ("backwards", 0), ("local_steps", 1)):
            value = getattr(self, name)
            if name == "backwards" and value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")
        if self.cast_inputs not in (True, False, "model") or type(self.cast_inputs) not in (bool, str):
            raise ValueError(f"cast_inputs must be True, 'model' or False, got {self.cast_inputs!r}")
        for name in ("error_feedback", "cast_on_gather", "prefetch", "broadcast_buffers", "defragment"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if self.elementwise is not None and not isinstance(self.elementwise, bool):
            raise ValueError(f"elementwise must be True or False, or None to test it, got {self.elementwise!r}")
        if self.init_fn is not None and not callable(self.init_fn):
            raise ValueError(f"init_fn must be a function of a module, got {self.init_fn!r}")
        _check_local_steps(self)
        for name in ("timeout", "heartbeat_timeout", "loss_scale"):
            value = getattr(self, name)
            if name == "timeout" and value is None:
                continue
            if not isinstance(value, (int, float)) or not 0 < value < float("inf"):
                raise ValueError(f"{name} must be a positive number, got {value!r}")

    @classmethod
    def from_deepspeed(
        cls, config: str | os.PathLike[str] | Mapping[str, Any], *, handled: Collection[str] = (), **options: Any
    ) -> Config:
        """Return the options that a DeepSpeed configuration stands for: a file, or the same as a dictionary.

        A key that changes the numbers of a run and is not an option (clipping, the optimizer, sparse attention, a
        key that is not known) raises, with all others like it. Write what the error says in the script, or accept the
        difference, and name the key in ``handled``; a section stands for all of its keys. ``options`` come before the
        file's, and replace "auto". The command ``zeroshard migrate`` shows what every key becomes.

        >>> Config.from_deepspeed({"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}).precision
        'bf16'
        >>> config = {"zero_optimization": {"stage": 2}, "gradient_clipping": 1.0}
        >>> Config.from_deepspeed(config, handled=["gradient_clipping"]).stage
        2
        """
        reader = import_module("zeroshard.integrations.deepspeed.reader")  # on first use: it knows another library
        return cls(**reader.config_options(config, handled, options))

    @property
    def compute_dtype(self) -> torch.dtype | None:
        """The compute dtype that ``precision`` sets; None leaves each parameter as it is."""
        if self.precision is None:
            return None
        return torch.bfloat16 if self.precision == "fp8" else _DTYPES[self.precision]

    @property
    def has_master(self) -> bool:
        """Whether parameters have fp32 master weights separate from the compute-dtype parameters."""
        return self.precision in ("bf16", "fp16", "fp8")

    @property
    def outer_optimizer_text(self) -> str:
        """The class and the options of the outer optimizer; "None" without one."""
        if self.outer_optimizer is None:
            return "None"
        outer = self.outer_optimizer([nn.Parameter(torch.zeros(1, device="cpu"))])
        return f"{type(outer).__name__} {outer.defaults}"

    @property
    def needs_cast_on_gather(self) -> bool:
        """Whether the master weights are a rank's only copy of its shard of partitioned parameters."""
        return self.cast_on_gather and self.has_master


def check_inner_axis(config: Config, inner_ranks: int) -> None:
    """Raise if states should be partitioned over an inner axis of one rank.

    >>> check_inner_axis(Config(stage=2, partition="hierarchical"), inner_ranks=1)
    """
    params_axes, grads_axes, _ = PARTITIONS[config.partition]
    has_inner_grads, has_inner_params = grads_axes == "inner" and config.stage >= 2, params_axes == "inner"
    if inner_ranks == 1 and (has_inner_grads or (has_inner_params and config.stage == 3)):
        what, stage = ("gradients", 1) if has_inner_grads else ("parameters", 2)
        raise ValueError(
            f"partition={config.partition!r} partitions {what} over the inner axis of the mesh, which has one rank: "
            f"use stage={stage}, or partition='full'"
        )


def check_replicas(config: Config, replicas: int) -> None:
    """Raise if gradients that are summed over ``replicas`` should be sent in 8 bits.

    >>> check_replicas(Config(reduce_wire="int8", partition="full"), replicas=2)
    """
    sums_over_replicas = replicas > 1 and config.partition == "hybrid" and config.local_steps == 1
    if config.reduce_wire is not None and sums_over_replicas:
        raise ValueError(
            f"reduce_wire={config.reduce_wire!r} reduce-scatters gradients over all ranks, but partition='hybrid' "
            "all-reduces them over the outer axis of the mesh: use partition='hierarchical' or 'full'"
        )


def _check_eight_bit_options(config: Config) -> None:
    for name in ("gather_dtype", "reduce_wire"):
        if getattr(config, name) not in EIGHT_BIT_DTYPES:
            raise ValueError(f"{name} must be None, 'int8' or 'fp8', got {getattr(config, name)!r}")
    if config.gather_dtype is not None and config.stage != 3:
        raise ValueError(
            f"gather_dtype={config.gather_dtype!r} needs stage=3, got stage={config.stage}: the other stages keep full "
            "parameters, and 8 bits are not enough to keep them. reduce_wire works in stages 1 to 3"
        )
    if config.error_feedback and (config.reduce_wire is None or config.precision == "fp16"):
        raise ValueError(
            "error_feedback=True needs reduce_wire='int8' or 'fp8', and not precision='fp16', whose loss scale "
            f"changes between steps; got reduce_wire={config.reduce_wire!r}, precision={config.precision!r}"
        )
    if config.reduce_wire is not None and config.stage == 0:
        raise ValueError(f"reduce_wire={config.reduce_wire!r} needs stage 1, 2 or 3: stage 0 all-reduces gradients")
    if config.reduce_wire is not None and config.reduce_dtype in (torch.float32, torch.float64):
        raise ValueError(
            f"reduce_wire={config.reduce_wire!r} sends gradients in 8 bits, but reduce_dtype asks for "
            f"{config.reduce_dtype}: leave one of them out"
        )


def _check_local_steps(config: Config) -> None:
    if config.local_steps > 1 and config.partition != "hybrid":
        raise ValueError(
            f"local_steps={config.local_steps} averages replicas, and partition={config.partition!r} has none: use "
            "partition='hybrid', or local_steps=1"
        )
    if config.outer_optimizer is None:
        return
    if config.local_steps == 1:
        raise ValueError("outer_optimizer updates parameters when replicas are averaged: set local_steps above 1")
    if not callable(config.outer_optimizer) or isinstance(config.outer_optimizer, torch.optim.Optimizer):
        raise ValueError(
            "outer_optimizer must be a function of parameters that returns an optimizer, such as "
            f"functools.partial(torch.optim.SGD, lr=0.7), got {config.outer_optimizer!r}"
        )
    outer = config.outer_optimizer([nn.Parameter(torch.zeros(1, device="cpu"))])
    if not isinstance(outer, torch.optim.Optimizer):
        raise ValueError(f"outer_optimizer must return a torch.optim.Optimizer, got a {type(outer).__name__}")


def _parse_dtype(name: str, value: str | torch.dtype | None) -> torch.dtype | None:
    if isinstance(value, str):
        if value not in _DTYPES:
            raise ValueError(f"{name} must be one of {', '.join(map(repr, _DTYPES))} or a torch.dtype, got {value!r}")
        return _DTYPES[value]
    if value is not None and not (isinstance(value, torch.dtype) and value.is_floating_point):
        raise ValueError(f"{name} must be a floating-point torch.dtype, got {value!r}")
    return value


def _parse_patterns(name: str, value: Any) -> tuple[str | type[nn.Module], ...] | None:
    if value is None:
        return None
    if isinstance(value, (str, type)) or not isinstance(value, Iterable):  # a single value instead of a tuple
        value = (value,)
    for item in value:
        if not isinstance(item, str) and not (isinstance(item, type) and issubclass(item, nn.Module)):
            raise ValueError(f"{name} must contain module classes or name patterns, got {item!r}")
    return tuple(value)
