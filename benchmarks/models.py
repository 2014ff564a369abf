"""Models that are no plain GPT: convolutions, experts, a GPT with adapters, a GPT in many small tensors."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zeroshard.models import GPT


class Residual(nn.Module):
    """Two convolutions with norms, added to what they read."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm = nn.GroupNorm(8, width)
        self.second = nn.Conv2d(width, width, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(F.relu(self.norm(self.first(x))))


class ConvNet(nn.Module):
    """Residual blocks between a first convolution and a linear layer."""

    def __init__(self, layers: int, width: int, classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 7, stride=4, padding=3)
        self.blocks = nn.ModuleList(Residual(width) for _ in range(layers))
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x.mean((2, 3))).float(), labels)


class Experts(nn.Module):
    """A block whose tokens go to the best two of eight experts, each of which takes an even share of them."""

    def __init__(self, width: int, experts: int = 8) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(width), nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.empty(experts, width, 4 * width))
        self.down = nn.Parameter(torch.empty(experts, 4 * width, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the experts anew."""
        for matrix in (self.up, self.down):
            nn.init.normal_(matrix, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.norm(x).flatten(0, 1)
        scores = self.router(tokens).softmax(-1)
        share = -(-2 * tokens.shape[0] // scores.shape[1])
        weights, chosen = scores.t().topk(share)  # (experts, share): the tokens that want an expert most
        taken = torch.bmm(F.gelu(torch.bmm(tokens[chosen], self.up)), self.down) * weights.unsqueeze(-1)
        return x + torch.zeros_like(tokens).index_add(0, chosen.flatten(), taken.flatten(0, 1)).view_as(x)


class ExpertsModel(nn.Module):
    """Blocks of experts between an embedding and a head."""

    def __init__(self, layers: int, width: int, vocabulary: int = 32000) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Experts(width) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), tokens.flatten())


class Adapted(nn.Module):
    """A frozen linear layer, and beside it a trained product of two thin matrices (LoRA)."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.empty(rank, base.in_features))
        self.up = nn.Parameter(torch.empty(base.out_features, rank))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Begin at what the frozen layer does."""
        nn.init.normal_(self.down, std=0.02)
        nn.init.zeros_(self.up)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x) + F.linear(F.linear(x, self.down), self.up)
        return y


class Divided(nn.Module):
    """A linear layer whose weight is as many parameters as it is told to have, each of some of its rows."""

    def __init__(self, base: nn.Linear, pieces: int) -> None:
        super().__init__()
        self.pieces, self.bias = pieces, base.bias
        for place, weight in enumerate(base.weight.detach().tensor_split(pieces)):
            self.register_parameter(f"weight_{place}", nn.Parameter(weight.clone()))

    @property
    def weights(self) -> list[Tensor]:
        """The rows, in order."""
        return [getattr(self, f"weight_{place}") for place in range(self.pieces)]

    def reset_parameters(self) -> None:
        """Draw the weights anew and zero the bias."""
        for weight in self.weights:
            nn.init.normal_(weight, std=0.02)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, torch.cat(self.weights), self.bias)


def adapted(model: GPT, rank: int = 16) -> GPT:
    """Freeze a GPT, and give every linear layer of its blocks an adapter."""
    model.requires_grad_(False)
    return _with_linear(model, lambda layer: Adapted(layer, rank))


def divided(model: GPT, pieces: int) -> GPT:
    """Cut the weight of every linear layer of a GPT's blocks into so many parameters."""
    return _with_linear(model, lambda layer: Divided(layer, pieces))


def _with_linear(model: GPT, new: Callable[[nn.Linear], nn.Module]) -> GPT:
    for block in model.blocks:
        for module in (block.attention, block.mlp):
            for name, child in list(module.named_children()):
                setattr(module, name, new(child))
    return model
