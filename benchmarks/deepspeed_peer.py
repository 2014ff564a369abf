"""DeepSpeed, trained as its documentation says: its stages, and ZeRO-2 with optimizer states on the host."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.rank import Memory, Training
from zeroshard.models import GPT, GPTConfig

BUCKET = 500_000_000  # elements, DeepSpeed's default


def initialize(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: int, mixed: bool, zero: dict[str, Any], times: int = 1
) -> Any:
    """DeepSpeed's engine on the process group that there is. ``times``: backwards a step.

    Its gradients travel through a buffer that is taken whole, 5e8 elements unless told otherwise. For a model with
    fewer it is told otherwise: it communicates the same in less memory.
    """
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if next(model.parameters()).is_cuda else "cpu")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for name, value in {"RANK": rank, "LOCAL_RANK": 0, "WORLD_SIZE": ranks}.items():
        os.environ.setdefault(name, str(value))
    import deepspeed
    import deepspeed.ops

    # of use to inference alone; on a CPU it is compiled at first use, for minutes, and if that is ended, never again
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    bucket = min(BUCKET, sum(parameter.numel() for parameter in trained))
    settings = {
        "train_micro_batch_size_per_gpu": batch,
        "gradient_accumulation_steps": times,
        "bf16": {"enabled": mixed},
        "zero_optimization": {"reduce_bucket_size": bucket, **zero},
        "gradient_clipping": 0.0,  # without this key some versions clip
        "zero_force_ds_cpu_optimizer": False,  # torch's is taken where its own cannot be built
        "zero_allow_untested_optimizer": True,
    }
    return deepspeed.initialize(
        model=model, optimizer=optimizer, model_parameters=trained, config=settings, dist_init_required=False
    )[0]


class DeepSpeedLoop:
    """Steps of one model under DeepSpeed, whose engine wants ``backward`` and ``step`` of its own to be called."""

    def __init__(self, engine: Any, inputs: tuple[Tensor, ...], times: int) -> None:
        self.model = self.engine = engine
        self.inputs, self.times = inputs, times
        self.loss: Tensor | None = None

    def step(self) -> None:
        """Forward and backward as often as the row says, and an update: the engine counts."""
        for _ in range(self.times):
            loss = self.engine(*self.inputs)
            self.engine.backward(loss)
            self.engine.step()
            self.loss = loss.detach()


class DeepSpeedTraining(Training):
    """Steps of the reference GPT under ZeRO-2 with optimizer states on the host."""

    def __init__(self, config: GPTConfig, batch: int, memory: Memory) -> None:
        with torch.device("cuda" if memory.on_gpu else "cpu"):
            model = GPT(config)
        self.adam, optimizer = host_adam(model)
        zero = {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}}
        self.engine: Any = initialize(model, optimizer, batch, mixed=True, zero=zero)
        super().__init__((model, None), batch, memory)

    def step(self, length: int | None = None) -> None:
        """Train on the first ``length`` tokens of every sequence; without it, on all."""
        tokens = self.tokens[:, :length]
        self.engine.backward(self.engine(tokens, tokens))
        self.engine.step()


def host_adam(model: nn.Module) -> tuple[str, torch.optim.Optimizer]:
    """DeepSpeed's own Adam on the host, or torch's where it cannot be compiled here; and what it is."""
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        return "its own CPU Adam", DeepSpeedCPUAdam(model.parameters(), lr=1e-4, adamw_mode=True)
    except Exception as error:  # a compiler, a header or a toolkit may be missing, each with an exception of its own
        why = (str(error).splitlines() or [type(error).__name__])[0]
        return f"torch's fused AdamW ({why})", torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
