"""Train a small GPT, letter by letter, on the help texts that every Python carries. Runs on CPUs and GPUs alike.

    torchrun --standalone --nproc-per-node 2 examples/train_gpt.py --stage 3

or `make train`. All that zeroshard asks of a training loop is the one call of `zeroshard.shard`.
"""

import argparse
import os
import time
from pydoc_data.topics import topics

import torch
import torch.distributed as dist

import zeroshard
from zeroshard.models import GPT, GPTConfig


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train a small GPT with zeroshard.")
    parser.add_argument("--stage", type=int, default=3, choices=range(4), help="what is partitioned (default: all)")
    parser.add_argument(
        "--precision",
        default=None,
        choices=["bf16", "fp16"],
        help="of compute (default: fp32); bf16 crawls on CPUs without it",
    )
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128, help="a multiple of 32")
    parser.add_argument("--context", type=int, default=64, help="letters a sequence")
    parser.add_argument("--batch", type=int, default=8, help="sequences a rank and step")
    parser.add_argument("--lr", type=float, default=2e-3)
    return parser.parse_args()


def draw(text: torch.Tensor, args: argparse.Namespace, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Cut a random batch out of the text: (batch, context) letters, and the letters that follow each."""
    starts = torch.randint(len(text) - args.context - 1, (args.batch, 1), generator=generator)
    windows = text[starts + torch.arange(args.context + 1)].long()  # bytes -> token ids
    return windows[:, :-1], windows[:, 1:]


def train(args: argparse.Namespace, device: torch.device) -> None:
    """Run `args.steps` steps and print what they did."""
    rank, world = dist.get_rank(), dist.get_world_size()
    text = torch.frombuffer(bytearray("\n".join(topics.values()).encode("ascii", "ignore")), dtype=torch.uint8)

    torch.manual_seed(0)
    config = GPTConfig(
        vocab_size=128, context=args.context, layers=args.layers, heads=args.width // 32, width=args.width
    )
    gpt = GPT(config).to(device)
    adamw = torch.optim.AdamW(gpt.parameters(), lr=args.lr, weight_decay=0.1)
    model, optimizer = zeroshard.shard(gpt, adamw, stage=args.stage, precision=args.precision)
    if rank == 0:
        print(
            f"{config.parameters / 1e6:.1f}M parameters, {len(text) / 1e3:.0f} kB of text, stage {args.stage}, ", end=""
        )
        print(f"{world} ranks on {device.type}, {world * args.batch * args.context} letters a step")

    generator = torch.Generator().manual_seed(rank)  # every rank reads other pages
    clock, clocked = time.perf_counter(), 0
    for step in range(1, args.steps + 1):
        letters, following = (part.to(device) for part in draw(text, args, generator))
        loss = model(letters, following)
        loss.backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()

        if step == 1 or step % 20 == 0 or step == args.steps:
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            loss_here = mean.item() / world  # waits for the device, so the clock below is true
            took = (time.perf_counter() - clock) / (step - clocked)
            clock, clocked = time.perf_counter(), step
            if rank == 0:
                print(f"step {step:4d}  loss {loss_here:.3f}  {took * 1e3:.0f} ms/step")

    if rank == 0:
        print(zeroshard.report(model))


def main() -> None:
    """Join the process group, train, and leave it."""
    args = parse()
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl")
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    try:
        train(args, device)
    finally:
        dist.destroy_process_group()  # or gloo may abort at exit


if __name__ == "__main__":
    main()
