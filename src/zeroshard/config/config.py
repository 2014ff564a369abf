"""Config: every option of :func:`zeroshard.shard`, in one frozen, validated dataclass."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn

from zeroshard.config.offload import Offload

PRECISIONS = (None, "fp32", "bf16", "fp16")
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
    """Which states are partitioned. 0: none (plain data parallelism). 1: optimizer states. 2: and gradients.
    3: and parameters. The stage changes memory and traffic, never the numbers. :func:`zeroshard.shard` also takes
    "auto" for it, and for ``offload``."""

    precision: str | None = None
    """None: each parameter is computed and updated in the dtype it has. "fp32": all in fp32. "bf16", "fp16": computed
    in 16 bits, updated in an fp32 master copy that is partitioned like the optimizer states."""

    reduce_dtype: str | torch.dtype | None = None
    """The dtype gradients are summed, and kept, in. None: that of the parameters in computation."""

    keep_fp32: tuple[str | type[nn.Module], ...] = ()
    """Modules, by class or by shell pattern of their name, and parameters, by pattern, that stay in fp32 under "bf16"
    and "fp16". Such a module gets its floating-point inputs in fp32 and gives its outputs back in 16 bits. Batch norms
    always stay in fp32, because their running statistics need it."""

    cast_inputs: bool = True
    """Under "bf16" and "fp16", cast the model's floating-point inputs, and those of torch's own layers inside it where
    a module is given floats of another dtype. A module with code of its own is given what it is called with."""

    cast_on_gather: bool = True
    """Stage 3 under "bf16" and "fp16": keep no 16-bit copy of this rank's part of the parameters; each gather casts the
    master. 14Ψ/N bytes of states instead of 16Ψ/N, for reading 4 bytes an element instead of 2 whenever a unit is
    brought. So one rank alone brings and releases units, too: its parameters are there in forward and backward only, as
    those of many ranks are. Off, or in another stage, one rank alone has its parameters all the time. What is not
    trained, stays in fp32 or rests outside the device keeps what it has; in other precisions nothing changes. The
    numbers are the same to the bit."""

    units: tuple[str | type[nn.Module], ...] | None = None
    """Which modules are units: classes, or shell patterns of module names ("layers.*"). None: the repeated blocks of
    the model are found by themselves."""

    bucket_size: int = 2**27
    """Elements of one collective and of each fused buffer, whatever the size of the model (the paper's C_B). A
    parameter of at least a third of them has collectives of its own, and its gradient needs no copy before it is
    reduced. A step also updates that many elements at a time: torch's elementwise optimizers are stepped several times
    where a rank's part is larger. An optimizer of another class, or one with hooks on its ``step`` or a ``step`` of its
    own, is called once, with all of its part's gradients: where these need a copy in fp32, that takes 4Ψ/N bytes."""

    ring: int = 2
    """How many gradient buckets may be on their way at once. Each takes ``bucket_size`` elements, and up to a third
    more where there are short ones too."""

    prefetch: bool = True
    """Gather the next unit while the present one computes. Off: one unit less in memory, no overlap."""

    broadcast_buffers: bool = True
    """Copy rank 0's buffers (running statistics) to all ranks before a forward in which they have changed, as DDP."""

    defragment: bool = True
    """On a GPU, find out in the first steps which segments PyTorch's allocator is best given beforehand, so that the
    model's own temporaries take least memory (the paper's M_D); its cache is emptied for it; and have one workspace of
    cuBLAS's at a time, where each thread would keep its own. Off: the allocator is left alone."""

    offload: Any = None
    """Which states rest in host memory or on disk: "host" (optimizer states, and gradients with them), a
    :class:`zeroshard.Offload`, or its options as a dictionary. Changes memory and time, never the numbers."""

    elementwise: bool | None = None
    """Whether the optimizer updates each element from that element alone, as it has to: it is run on flat slices of the
    parameters. None: torch's own elementwise optimizers are known, others are tried on small tensors, and refused where
    that shows a difference or decides nothing. True: your word for it, and nothing is tried."""

    init_fn: Callable[[nn.Module], None] | None = None
    """Called on every module of a model built on the meta device, instead of its own ``reset_parameters``."""

    timeout: float | None = None
    """Seconds that a rank waits for others that live and have done nothing else meanwhile; then it raises
    :class:`RanksDisagreeError`. None: the process group's own. A rank that has died, raised, ended or does something
    else is named to all within 10 seconds, whatever this is. Under NCCL the process group's own holds for collectives
    on the device."""

    heartbeat_timeout: float = 8.0
    """Seconds without a sign of life after which a rank on another machine counts as dead. Of a rank on the same
    machine the operating system knows whether it lives. Give more where Python code holds the interpreter's lock for
    longer."""

    loss_scale: float = 2.0**16
    """fp16: the first loss scale of ``optimizer.scale(loss)``. It halves after an overflow and doubles after 2000 steps
    without one."""

    def __new__(cls, **options: Any) -> Config:
        """Refuse unknown names, with the nearest right one."""
        _check_option_names(options)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        """Refuse what cannot work, saying what was got and what is wanted."""
        if type(self.stage) is not int or self.stage not in (0, 1, 2, 3):
            hint = ", which zeroshard.shard() takes and settles" if str(self.stage) == "auto" else ""
            raise ValueError(f"stage is 0, 1, 2 or 3, got {self.stage!r}{hint}")
        if self.precision not in PRECISIONS:
            raise ValueError(f"precision is None, 'fp32', 'bf16' or 'fp16', got {self.precision!r}")
        object.__setattr__(self, "offload", Offload.from_option(self.offload))
        object.__setattr__(self, "reduce_dtype", _parse_dtype("reduce_dtype", self.reduce_dtype))
        for name in ("keep_fp32", "units"):
            object.__setattr__(self, name, _parse_patterns(name, getattr(self, name)))
        for name, least in (("bucket_size", 1), ("ring", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name} is a whole number from {least} up, got {value!r}")
        for name in ("cast_inputs", "cast_on_gather", "prefetch", "broadcast_buffers", "defragment"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} is True or False, got {getattr(self, name)!r}")
        if self.elementwise is not None and self.elementwise is not True:
            raise ValueError(f"elementwise is True, or None to find out by trying, got {self.elementwise!r}")
        if self.init_fn is not None and not callable(self.init_fn):
            raise ValueError(f"init_fn is a function of a module, got {self.init_fn!r}")
        for name in ("timeout", "heartbeat_timeout", "loss_scale"):
            value = getattr(self, name)
            if name == "timeout" and value is None:
                continue
            if not isinstance(value, (int, float)) or not 0 < value < float("inf"):
                raise ValueError(f"{name} is a positive number, got {value!r}")

    @property
    def compute_dtype(self) -> torch.dtype | None:
        """The dtype that ``precision`` asks computation to be in; None leaves each parameter as it is."""
        return None if self.precision is None else _DTYPES[self.precision]

    @property
    def has_master(self) -> bool:
        """Whether parameters have an fp32 master copy apart from the one in computation."""
        return self.precision in ("bf16", "fp16")

    @property
    def needs_cast_on_gather(self) -> bool:
        """Whether that is the only copy that a rank keeps of what it has of partitioned parameters."""
        return self.cast_on_gather and self.has_master


def _parse_dtype(name: str, value: str | torch.dtype | None) -> torch.dtype | None:
    if isinstance(value, str):
        if value not in _DTYPES:
            raise ValueError(f"{name} is one of {', '.join(map(repr, _DTYPES))} or a torch.dtype, got {value!r}")
        return _DTYPES[value]
    if value is not None and not (isinstance(value, torch.dtype) and value.is_floating_point):
        raise ValueError(f"{name} is a floating-point torch.dtype, got {value!r}")
    return value


def _parse_patterns(name: str, value: Any) -> tuple[str | type[nn.Module], ...] | None:
    if value is None:
        return None
    if isinstance(value, (str, type)) or not isinstance(value, Iterable):  # one name, where a tuple of one was meant
        value = (value,)
    for item in value:
        if not isinstance(item, str) and not (isinstance(item, type) and issubclass(item, nn.Module)):
            raise ValueError(f"{name} holds module classes and name patterns, got {item!r}")
    return tuple(value)


def _check_option_names(options: dict[str, Any]) -> None:
    known = [field.name for field in fields(Config)]
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"the options are {', '.join(known)}"
            raise TypeError(f"unknown option {name!r}: {hint}")
