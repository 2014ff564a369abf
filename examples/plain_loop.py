"""Train a small character-level GPT on Shakespeare: a plain PyTorch loop plus one line.

    torchrun --standalone --nproc-per-node 2 examples/plain_loop.py --stage 3

Try another --stage: the memory in the final report changes, the losses do not. With --checkpoints DIRECTORY it saves
asynchronously, and the same command resumes from the latest checkpoint, also on another number of ranks, stage and
precision.
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
from zeroshard.train import shakespeare


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train a small GPT with zeroshard.")
    parser.add_argument("--stage", type=int, default=3, choices=range(4), help="ZeRO stage (default: 3)")
    parser.add_argument(
        "--precision", default="fp32", choices=["fp32", "bf16"], help="compute dtype; bf16 is slow on most CPUs"
    )
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--width", type=int, default=96, help="a multiple of 32")
    parser.add_argument("--context", type=int, default=64, help="characters per sequence")
    parser.add_argument("--batch", type=int, default=8, help="sequences per rank and step")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--checkpoints", type=Path, help="directory to save to and resume from")
    return parser.parse_args()


def draw(text: torch.Tensor, args: argparse.Namespace, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a random batch: (batch, context) characters, and the character that follows each."""
    starts = torch.randint(len(text) - args.context, (args.batch, 1), generator=generator)
    windows = text[starts + torch.arange(args.context + 1)].long()  # the token id is the ASCII code
    return windows[:, :-1], windows[:, 1:]


def train(args: argparse.Namespace, device: torch.device) -> nn.Module:
    """Train for `args.steps` steps, print the progress, and return the sharded model."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    text = torch.frombuffer(bytearray(shakespeare().encode()), dtype=torch.uint8)
    config = GPTConfig(
        vocab_size=128, context=args.context, layers=args.layers, heads=args.width // 32, width=args.width
    )

    torch.manual_seed(0)
    with torch.device("meta"):  # no memory yet: shard() initializes unit by unit, and no rank ever holds the full model
        model: nn.Module = GPT(config)
    adamw = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.1)
    model, optimizer = zeroshard.shard(model, adamw, stage=args.stage, precision=args.precision)  # the only new line
    if rank == 0:
        print(f"{config.parameters / 1e6:.1f}M parameters on {ranks} ranks ({device.type}), ", end="")
        print(f"stage {args.stage}, {args.precision}, {ranks * args.batch * args.context} characters per step")

    generator = torch.Generator().manual_seed(rank)  # different sequences on every rank
    done, saving = 0, None
    if args.checkpoints is not None and (args.checkpoints / "latest").exists():
        loaded = zeroshard.load(args.checkpoints, model, optimizer)
        done = loaded.extra["step"]
        if rank < len(loaded.rank_extra):
            generator.set_state(loaded.rank_extra[rank])
    clock, timed = time.perf_counter(), done
    for step in range(done + 1, args.steps + 1):
        inputs, targets = (part.to(device) for part in draw(text, args, generator))
        loss = model(inputs, targets)
        loss.backward()
        optimizer.clip_grad_norm_(1.0)  # the global norm; torch.nn.utils.clip_grad_norm_ works too
        optimizer.step()
        optimizer.zero_grad()

        if step == 1 or step % 20 == 0 or step == args.steps:
            mean = loss.detach() / ranks
            dist.all_reduce(mean)
            shown = mean.item()  # in nats per character; waits for the device, so timings are correct
            took = (time.perf_counter() - clock) / (step - timed)
            clock, timed = time.perf_counter(), step
            if rank == 0:
                print(f"step {step:4d}  loss {shown:.3f}  {took * 1e3:.0f} ms/step")
        if args.checkpoints is not None and (step % 50 == 0 or step == args.steps):
            saving = zeroshard.save(  # asynchronous: written during the next steps
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
    """Initialize the process group, train, and print a report."""
    args = parse()
    device = torch.device("cpu")
    if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):  # one GPU per local rank
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    model = train(args, device)
    if dist.get_rank() == 0:
        print(zeroshard.report(model))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
