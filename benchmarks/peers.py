"""DeepSpeed's ZeRO-2 with optimizer states on the host, trained as its documentation says."""

from __future__ import annotations

import os
from typing import Any

import torch

from benchmarks.rank import Memory, Training
from zeroshard.models import GPT, GPTConfig


class DeepSpeedTraining(Training):
    """Steps of one model under DeepSpeed, whose engine wants ``backward`` and ``step`` of its own to be called."""

    def __init__(self, config: GPTConfig, batch: int, memory: Memory) -> None:
        import deepspeed

        device = "cuda" if memory.on_gpu else "cpu"
        for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
            os.environ.setdefault(name, value)
        with torch.device(device):
            model = GPT(config)
        self.adam, optimizer = host_adam(model)
        zero = {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}}
        settings = {
            "train_micro_batch_size_per_gpu": batch,
            "bf16": {"enabled": True},
            "zero_optimization": zero,
            "gradient_clipping": 0.0,  # without this key some versions clip
            "zero_force_ds_cpu_optimizer": False,  # torch's is taken where its own cannot be built
        }
        self.engine: Any = deepspeed.initialize(
            model=model, optimizer=optimizer, config=settings, dist_init_required=False
        )[0]
        super().__init__((model, None), batch, memory)

    def step(self, length: int | None = None) -> None:
        """Train on the first ``length`` tokens of every sequence; without it, on all."""
        tokens = self.tokens[:, :length]
        self.engine.backward(self.engine(tokens, tokens))
        self.engine.step()


def host_adam(model: torch.nn.Module) -> tuple[str, torch.optim.Optimizer]:
    """DeepSpeed's own Adam on the host, or torch's where it cannot be compiled here; and what it is."""
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        return "its own CPU Adam", DeepSpeedCPUAdam(model.parameters(), lr=1e-4, adamw_mode=True)
    except Exception as error:  # a compiler, a header or a toolkit may be missing, each with an exception of its own
        why = (str(error).splitlines() or [type(error).__name__])[0]
        return f"torch's fused AdamW ({why})", torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
