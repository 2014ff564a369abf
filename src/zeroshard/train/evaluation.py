"""Evaluation: the loss on held-out text."""

from __future__ import annotations

import torch
import torch.distributed as dist

from zeroshard.train.data.loader import Loader
from zeroshard.train.job import Job


@torch.no_grad()
def evaluate(job: Job, held_out: Loader) -> float:
    """The mean loss over the first windows of the held-out text. Nothing that training depends on changes.

    All ranks call it together, each with as many windows as the others: where there are too few, some count twice.
    Ranks that divide a layer have the same windows.
    """
    world = job.world
    count = max(min(job.options.run.eval_sequences, held_out.windows) // world.data_ranks, 1)
    places = [(index * world.data_ranks + world.data_rank) % held_out.windows for index in range(count)]
    total = torch.zeros((), device=world.device)
    job.model.eval()
    try:
        for first in range(0, count, job.batching.micro):
            pairs = [held_out.in_order(place, 1) for place in places[first : first + job.batching.micro]]
            tokens, targets = (torch.cat(part).to(world.device) for part in zip(*pairs, strict=True))
            total += job.language_model.loss(job.model, tokens, targets) * len(tokens)
    finally:
        job.model.train()
    dist.all_reduce(total)
    return float(total) / (count * world.ranks)
