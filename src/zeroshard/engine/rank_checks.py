"""Check that all ranks got the same model, optimizer, options and tensor plan, before anything is built.

[Note: NCCL's settings on all ranks]
Some of NCCL's environment variables decide in which pieces a collective sends its data, and NCCL does not compare them.
If they differ between ranks, a collective hangs, or it ends without an error and part of its result is wrong. That
happens if only some processes inherit a variable: those of one node, say, or one that another library has set.
"""

from __future__ import annotations

import json
import os

import torch
from torch import nn

from zeroshard.comm import ConsistencyChecker, RanksDisagreeError
from zeroshard.config.config import Config
from zeroshard.memory import DiskError, TierAllocator
from zeroshard.tensor_parallel import TensorParallelState
from zeroshard.utils.stored_tensor import stored_files

# see [Note: NCCL's settings on all ranks]; the number of channels is negotiated, and networks may differ between nodes
NCCL_VARIABLES = (
    "NCCL_ALGO",
    "NCCL_PROTO",
    "NCCL_BUFFSIZE",
    "NCCL_LL_BUFFSIZE",
    "NCCL_LL128_BUFFSIZE",
    "NCCL_P2P_NET_CHUNKSIZE",
    "NCCL_NTHREADS",
    "NCCL_LL128_NTHREADS",
)


def verify_same_model(
    model: nn.Module,
    optimizer_entries: dict[str, str],
    config: Config,
    consistency: ConsistencyChecker,
    device: torch.device,
) -> None:
    """Raise on every rank if the ranks were given different models, optimizers, options or NCCL settings.

    ``optimizer_entries`` maps a parameter's name to its place in the optimizer.
    """
    described: list[list[str]] = []
    for name, p in model.named_parameters():
        grad_mode = "requires grad" if p.requires_grad else "frozen"
        described.append(
            [name, f"{tuple(p.shape)} {p.dtype}, {grad_mode}, {optimizer_entries.get(name, 'in no optimizer')}"]
        )
    described += [["buffer " + name, f"{tuple(b.shape)} {b.dtype}"] for name, b in model.named_buffers()]
    # ranks may read copies of the files on disks of their own
    files = stored_files(model).values()
    described += [["file " + file.path.name, file.fingerprint()] for file in sorted(files, key=lambda f: f.path.name)]
    compared = (
        "stage",
        "partition",
        "local_steps",
        "outer_optimizer_text",
        "precision",
        "reduce_dtype",
        "gather_dtype",
        "reduce_wire",
        "error_feedback",
        "keep_fp32",
        "keep_bf16",
        "cast_on_gather",
        "bucket_size",
        "ring",
        "units",
        "prefetch",
        "backwards",
        "elementwise",
        "loss_scale",
    )
    options = {name: str(getattr(config, name)) for name in compared}
    options["offload"] = config.offload.summary if config.offload is not None else "None"
    if device.type == "cuda":
        options |= {name: os.environ.get(name, "not set") for name in NCCL_VARIABLES}
    rank0_text = consistency.broadcast_text("model", json.dumps([described, options]))
    error_text = ""
    if rank0_text is not None:
        first, first_options = json.loads(rank0_text)
        differing = [name for name in options if options[name] != first_options.get(name)]
        error_text = _first_difference(described, first) or ", ".join(
            f"{name} is {options[name]} here and {first_options.get(name)} on rank 0" for name in differing
        )
    errors = consistency.gather_text("model", error_text)
    if errors:
        details = "; ".join(f"rank {rank}: {text}" for rank, text in errors.items())
        advice = ". Set NCCL's variables to the same values on all ranks, else its results are wrong"
        advice = advice if any(name in details for name in NCCL_VARIABLES) else ""
        raise RanksDisagreeError(f"ranks were given different models, optimizers or options. {details}{advice}")


def open_tiers(tiers: TierAllocator, consistency: ConsistencyChecker) -> None:
    """Create this rank's file for states on disk; raise on every rank if one rank fails."""
    error_text = ""
    try:
        tiers.open_disk()
    except DiskError as error:
        if not consistency.is_distributed:
            raise
        error_text = str(error)
    errors = consistency.gather_text("disk", error_text)
    if errors:
        raise DiskError("; ".join(f"rank {rank}: {text}" for rank, text in errors.items()))


def verify_same_tensor_plan(tp_state: TensorParallelState | None, consistency: ConsistencyChecker) -> None:
    """Raise on every rank if the ranks shard the model's parameters differently along the tensor axis."""
    parameters = tp_state.tp_params if tp_state is not None else {}
    described = [[name, f"{tp_param.placement}, {tp_param.num_fused} fused"] for name, tp_param in parameters.items()]
    rank0_text = consistency.broadcast_text("tensor plan", json.dumps(described))
    error_text = _first_difference(described, json.loads(rank0_text)) if rank0_text is not None else ""
    errors = consistency.gather_text("tensor plan", error_text)
    if errors:
        details = "; ".join(f"rank {rank}: {text}" for rank, text in errors.items())
        raise RanksDisagreeError(f"ranks were given different tensor plans. {details}")


def _first_difference(ours: list[list[str]], first: list[list[str]]) -> str:
    for own, other in zip(ours, first, strict=False):
        if own[0] != other[0]:
            return f"has {own[0]!r} where rank 0 has {other[0]!r}"
        if own != other:
            return f"{own[0]!r} is {own[1]} here and {other[1]} on rank 0"
    if len(ours) != len(first):
        longer = ours if len(ours) > len(first) else first
        return f"{longer[min(len(ours), len(first))][0]!r} is only on {'this rank' if longer is ours else 'rank 0'}"
    return ""
