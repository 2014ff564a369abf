"""Evaluation: the loss on held-out text."""

from __future__ import annotations

import torch
import torch.distributed as dist

from zeroshard.train.data.loader import TokenLoader
from zeroshard.train.job import TrainingSetup


@torch.no_grad()
def evaluate(setup: TrainingSetup, loader: TokenLoader) -> float:
    """The mean loss over the first windows of the held-out text. Nothing that training depends on changes.

    All ranks call it together, each with as many windows as the others: where there are too few, some count twice.
    Ranks that divide a layer have the same windows.
    """
    world = setup.rank_info
    count = max(min(setup.options.run.eval_sequences, loader.num_windows) // world.dp_size, 1)
    places = [(index * world.dp_size + world.dp_rank) % loader.num_windows for index in range(count)]
    total = torch.zeros((), device=world.device)
    setup.model.eval()
    try:
        for first in range(0, count, setup.batching.micro):
            pairs = [loader.sequential_batch(place, 1) for place in places[first : first + setup.batching.micro]]
            tokens, targets = (torch.cat(part).to(world.device) for part in zip(*pairs, strict=True))
            total += setup.language_model.loss(setup.model, tokens, targets) * len(tokens)
    finally:
        setup.model.train()
    dist.all_reduce(total)
    return float(total) / (count * world.world_size)
