"""Measure which fraction of a device's rates, measured one by one, it sustains in training."""

from __future__ import annotations

import time

import torch

from zeroshard.models import GPT, GPTConfig
from zeroshard.planner.machines.machine import Machine
from zeroshard.planner.step_time import TraceCost
from zeroshard.planner.tracing.trace_model import trace_model

TRAINING_SHAPES = {  # a GPT and its batch, whose device time is much longer than their launch time
    "cuda": (GPTConfig(vocab_size=16384, context=1024, layers=4, heads=16, width=2048), 16),
    "cpu": (GPTConfig(vocab_size=512, context=64, layers=2, heads=4, width=128), 2),
}
PRECISION_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SUSTAINED_RANGE = (0.2, 1.0)  # values outside come from something else, so they are clamped


def sustained_fraction(machine: Machine, device: torch.device, seconds: float) -> float:
    """Train a few layers for ``seconds`` and return the step time predicted from the rates over the measured one.

    On a CPU the prediction includes the host time for launching, because one thread does both.
    """
    precision = max(machine.flops, key=lambda name: (machine.flops[name], name == "bf16"))
    config, batch = TRAINING_SHAPES[device.type]
    with torch.device(device):
        model = GPT(config).to(PRECISION_DTYPES[precision])
        tokens = torch.zeros(batch, config.context, dtype=torch.int64)
    cost = TraceCost.from_trace(
        trace_model(model, micro_batch=batch, device_kind=machine.kind, precision=_trace_precision(precision)), machine
    )
    predicted_seconds = sum(cost.device_seconds) + (sum(cost.host_seconds) if device.type == "cpu" else 0.0)
    runs, begin = 0, 0.0
    while runs < 2 or time.perf_counter() - begin < seconds:
        if runs == 1:  # the first run selects algorithms and fills the allocator's caches
            _synchronize(device)
            begin = time.perf_counter()
        model(tokens, tokens).backward()
        model.zero_grad()
        runs += 1
        if runs % 4 == 0:
            _synchronize(device)
    _synchronize(device)
    measured_seconds = (time.perf_counter() - begin) / (runs - 1)
    return min(max(predicted_seconds / measured_seconds, SUSTAINED_RANGE[0]), SUSTAINED_RANGE[1])


def _trace_precision(precision: str) -> str | None:
    return None if precision == "fp32" else precision


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
