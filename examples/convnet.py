"""Train a convolutional net with batch norm on images of stripes: zeroshard takes any nn.Module.

    torchrun --standalone --nproc-per-node 2 examples/convnet.py

The class is the direction of the stripes. Phase, width and noise are random for each image, so no image is seen twice.
"""

import argparse
import math
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import zeroshard

CLASSES = 8  # directions, 22.5 degrees apart
SIDE = 16  # pixels
HELD_OUT = 512  # images per rank


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train a convolutional net with zeroshard.")
    parser.add_argument("--stage", type=int, default=3, choices=range(4), help="ZeRO stage (default: 3)")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=32, help="images per rank and step")
    parser.add_argument("--lr", type=float, default=0.01)
    return parser.parse_args()


class Block(nn.Module):
    """A residual block: two convolutions, each with batch norm."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norms[0](self.convs[0](x)))
        return F.relu(x + self.norms[1](self.convs[1](y)))


def build(channels: int = 16) -> nn.Module:
    """Return a small residual net: (images, 1, SIDE, SIDE) to (images, CLASSES) logits."""
    stem = nn.Conv2d(1, channels, 3, stride=2, padding=1)
    blocks = [Block(channels) for _ in range(3)]
    return nn.Sequential(stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES))


def draw(images: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Return images of noisy stripes, and their classes."""
    labels = torch.randint(CLASSES, (images,), generator=generator)
    phase, width = torch.rand(2, images, 1, 1, generator=generator)
    angle = (labels * math.pi / CLASSES).view(-1, 1, 1)
    y, x = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")
    across = x * angle.cos() + y * angle.sin()  # position in pixels, perpendicular to the stripes
    stripes = torch.sin(2 * math.pi * (across / (4 + 3 * width) + phase))  # a period of 4 to 7 pixels
    return (stripes + torch.randn(stripes.shape, generator=generator)).unsqueeze(1), labels


@torch.no_grad()
def accuracy(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    """Return the accuracy over the images of all ranks, in eval mode."""
    model.eval()
    right = (model(images).argmax(1) == labels).float().mean() / dist.get_world_size()
    model.train()
    dist.all_reduce(right)
    return float(right)


def main() -> None:
    """Initialize the process group, train, and print a report."""
    args = parse()
    device = torch.device("cpu")
    if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):  # one GPU per local rank
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    model = build().to(device)
    sgd = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    model, optimizer = zeroshard.shard(model, sgd, stage=args.stage)
    criterion = nn.CrossEntropyLoss()
    generator = torch.Generator().manual_seed(rank)  # different images on every rank
    unseen, classes = (part.to(device) for part in draw(HELD_OUT, generator))
    for step in range(1, args.steps + 1):
        images, labels = (part.to(device) for part in draw(args.batch, generator))
        loss = criterion(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 1 or step % 10 == 0 or step == args.steps:
            share = accuracy(model, unseen, classes)  # on all ranks: in stage 3 forward all-gathers
            if rank == 0:
                print(f"step {step:3d}  accuracy {share:6.1%} on {HELD_OUT * ranks} held-out images")
    if rank == 0:
        print(zeroshard.report(model))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
