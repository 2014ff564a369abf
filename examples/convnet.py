"""Train a convolutional net with batch norm on images of stripes: any nn.Module is sharded, not only transformers.

    torchrun --standalone --nproc-per-node 2 examples/convnet.py

A class is the direction of the stripes. Their phase, their width and the noise over them are drawn anew for each image,
so what is learnt has to hold for images never seen.
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
HELD_OUT = 512  # images a rank


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train a convolutional net with zeroshard.")
    parser.add_argument("--stage", type=int, default=3, choices=range(4), help="what is partitioned (default: all)")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=32, help="images a rank and step")
    parser.add_argument("--lr", type=float, default=0.01)
    return parser.parse_args()


class Block(nn.Module):
    """Two convolutions, each with its batch norm, added to what came in."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norms[0](self.convs[0](x)))
        return F.relu(x + self.norms[1](self.convs[1](y)))


def build(channels: int = 16) -> nn.Module:
    """A small residual net: (images, 1, SIDE, SIDE) to (images, CLASSES) scores."""
    stem = nn.Conv2d(1, channels, 3, stride=2, padding=1)
    blocks = [Block(channels) for _ in range(3)]
    return nn.Sequential(stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES))


def draw(images: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Make noisy stripes, and the class of each."""
    labels = torch.randint(CLASSES, (images,), generator=generator)
    phase, width = torch.rand(2, images, 1, 1, generator=generator)
    angle = (labels * math.pi / CLASSES).view(-1, 1, 1)
    y, x = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")
    across = x * angle.cos() + y * angle.sin()  # pixels, at a right angle to the stripes
    stripes = torch.sin(2 * math.pi * (across / (4 + 3 * width) + phase))  # one every 4 to 7 pixels
    return (stripes + torch.randn(stripes.shape, generator=generator)).unsqueeze(1), labels


@torch.no_grad()
def accuracy(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    """The share of all ranks' images that is classed rightly, by the running statistics of the batch norms."""
    model.eval()
    right = (model(images).argmax(1) == labels).float().mean() / dist.get_world_size()
    model.train()
    dist.all_reduce(right)
    return float(right)


def main() -> None:
    """Join the process group, train, report, and leave it."""
    args = parse()
    device = torch.device("cpu")
    if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):  # a GPU for each rank of this machine
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    model = build().to(device)
    sgd = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    model, optimizer = zeroshard.shard(model, sgd, stage=args.stage)
    criterion = nn.CrossEntropyLoss()
    generator = torch.Generator().manual_seed(rank)  # every rank draws other images
    unseen, classes = (part.to(device) for part in draw(HELD_OUT, generator))
    for step in range(1, args.steps + 1):
        images, labels = (part.to(device) for part in draw(args.batch, generator))
        loss = criterion(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 1 or step % 10 == 0 or step == args.steps:
            share = accuracy(model, unseen, classes)  # on every rank: in stage 3 this gathers, as training does
            if rank == 0:
                print(f"step {step:3d}  accuracy {share:6.1%} on {HELD_OUT * ranks} images not trained on")
    if rank == 0:
        print(zeroshard.report(model))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
