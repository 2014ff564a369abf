"""Train a character-level GPT on Shakespeare in a loop with Lightning's Fabric. One line differs from a script for DDP.

    python examples/fabric_loop.py --devices 2

Fabric starts the ranks itself; torchrun works as well. With --checkpoint FILE it saves a Fabric checkpoint, and goes on
from it if it is there: on any number of devices, with any stage or strategy.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric

import zeroshard.integrations.lightning  # noqa: F401 - registers the strategies
from zeroshard.models import GPT, GPTConfig
from zeroshard.train import shakespeare


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train a small GPT with Lightning's Fabric and zeroshard.")
    parser.add_argument("--strategy", default="zeroshard_stage_3", help='or "ddp", for comparison')
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int, default=16, help="sequences per micro-batch, over all devices")
    parser.add_argument("--context", type=int, default=64, help="characters per sequence")
    parser.add_argument("--checkpoint", type=Path, help="file to resume from, if it exists, and to save to")
    return parser.parse_args()


def main() -> None:
    """Train with two micro-batches per step, and print the loss."""
    args = parse()
    fabric = Fabric(
        strategy=args.strategy,  # "zeroshard_stage_3" instead of "ddp": the one line that changes
        devices=args.devices,
        accelerator="gpu" if torch.cuda.device_count() >= args.devices else "cpu",
    )
    fabric.launch()
    fabric.seed_everything(0)
    model: Any = GPT(GPTConfig(vocab_size=128, context=args.context, layers=2, heads=2, width=64))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer = fabric.setup(model, optimizer)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "step": 0}
    if args.checkpoint is not None and args.checkpoint.exists():
        fabric.load(args.checkpoint, state)

    text = torch.frombuffer(bytearray(shakespeare().encode()), dtype=torch.uint8).long()
    while state["step"] < args.steps:
        state["step"] += 1
        for part in range(2):
            generator = torch.Generator().manual_seed(2 * state["step"] + part)  # the same on all devices
            starts = torch.randint(len(text) - args.context - 1, (args.batch, 1), generator=generator)
            batch = text[starts + torch.arange(args.context + 1)][fabric.global_rank :: fabric.world_size]
            batch = fabric.to_device(batch)
            with fabric.no_backward_sync(model, enabled=part == 0):
                loss = model(batch[:, :-1], batch[:, 1:])
                fabric.backward(loss / 2)
        norm = fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        if state["step"] % 10 == 0:
            mean: Any = fabric.all_reduce(loss.detach(), reduce_op="mean")
            fabric.print(f"step {state['step']:3d}  loss {float(mean):.4f}  norm {float(norm or 0):.4f}")
    if args.checkpoint is not None:
        fabric.save(args.checkpoint, state)


if __name__ == "__main__":
    main()
