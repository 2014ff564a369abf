"""Train a small GPT on Shakespeare, letter by letter, in a plain PyTorch loop with one line more.

    torchrun --standalone --nproc-per-node 2 examples/plain_loop.py --stage 3

Change --stage or --precision and nothing else has to change: the stage moves the bytes of the report at the end, and
leaves the losses alone. With --checkpoints DIRECTORY it saves while it trains, and the same line goes on from the
latest, also on another number of ranks, at another stage and precision.
"""

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import zeroshard
from zeroshard.models import GPT, GPTConfig
from zeroshard.train.data.corpus import shakespeare


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train a small GPT with zeroshard.")
    parser.add_argument("--stage", type=int, default=3, choices=range(4), help="what is partitioned (default: all)")
    parser.add_argument(
        "--precision", default="fp32", choices=["fp32", "bf16"], help="of computation; bf16 crawls on most CPUs"
    )
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--width", type=int, default=96, help="a multiple of 32")
    parser.add_argument("--context", type=int, default=64, help="letters a sequence")
    parser.add_argument("--batch", type=int, default=8, help="sequences a rank and step")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--checkpoints", type=Path, help="directory to save to, and to go on from")
    return parser.parse_args()


def draw(text: torch.Tensor, args: argparse.Namespace, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Cut a random batch out of the text: (batch, context) letters, and the letter that follows each."""
    starts = torch.randint(len(text) - args.context, (args.batch, 1), generator=generator)
    windows = text[starts + torch.arange(args.context + 1)].long()  # a letter's ASCII number is its token id
    return windows[:, :-1], windows[:, 1:]


def train(args: argparse.Namespace, device: torch.device) -> nn.Module:
    """Run `args.steps` steps, print how they went, and return the sharded model."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    text = torch.frombuffer(bytearray(shakespeare().encode()), dtype=torch.uint8)
    config = GPTConfig(
        vocab_size=128, context=args.context, layers=args.layers, heads=args.width // 32, width=args.width
    )

    torch.manual_seed(0)
    with torch.device("meta"):  # no memory yet: shard() fills the model unit by unit, and no rank ever holds it whole
        model: nn.Module = GPT(config)
    adamw = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.1)
    model, optimizer = zeroshard.shard(model, adamw, stage=args.stage, precision=args.precision)  # the one line
    if rank == 0:
        print(f"{config.parameters / 1e6:.1f}M parameters on {ranks} ranks ({device.type}), ", end="")
        print(f"stage {args.stage}, {args.precision}, {ranks * args.batch * args.context} letters a step")

    generator = torch.Generator().manual_seed(rank)  # every rank reads other pages
    done, saving = 0, None
    if args.checkpoints is not None and (args.checkpoints / "latest").exists():
        loaded = zeroshard.load(args.checkpoints, model, optimizer)
        done = loaded.extra["step"]
        if rank < len(loaded.rank_extra):
            generator.set_state(loaded.rank_extra[rank])
    clock, timed = time.perf_counter(), done
    for step in range(done + 1, args.steps + 1):
        letters, following = (part.to(device) for part in draw(text, args, generator))
        loss = model(letters, following)
        loss.backward()
        optimizer.clip_grad_norm_(1.0)  # in place of torch.nn.utils.clip_grad_norm_: the norm is of all ranks' shards
        optimizer.step()
        optimizer.zero_grad()

        if step == 1 or step % 20 == 0 or step == args.steps:
            mean = loss.detach() / ranks
            dist.all_reduce(mean)
            shown = mean.item()  # nats a letter; waits for the device, so that the clock is true
            took = (time.perf_counter() - clock) / (step - timed)
            clock, timed = time.perf_counter(), step
            if rank == 0:
                print(f"step {step:4d}  loss {shown:.3f}  {took * 1e3:.0f} ms/step")
        if args.checkpoints is not None and (step % 50 == 0 or step == args.steps):
            saving = zeroshard.save(  # written beside the next steps
                args.checkpoints / f"step-{step}",
                model,
                optimizer,
                extra={"step": step},
                rank_extra=generator,
                keep=2,
                wait=False,
            )
    if saving is not None:
        saving.wait()
    return model


def main() -> None:
    """Join the process group, train, report, and leave it."""
    args = parse()
    device = torch.device("cpu")
    if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):  # a GPU for each rank of this machine
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    model = train(args, device)
    if dist.get_rank() == 0:
        print(zeroshard.report(model))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
