"""Finding the units of a model: its repeated blocks, and the rest in between, without the user's help.

[Note: small blocks]
A collective of few bytes takes as long as its latency, and the host as long to launch it as any other. So neighbouring
blocks are gathered and reduced together while they have few parameters: at most ``GROUP`` elements, whose gather takes
about as long as its latency on a fast network, and at most a sixteenth of all blocks. Of up to 31 blocks of one size
each is a unit, however small. Some groups are in memory at a time, as parameters, gradients and buckets: that grows
with a group, and the host's time with their number. So from 48 blocks up both grow with the square root of the blocks.

The last blocks run backward beside all the activations there are, which is where the memory of a step is highest; what
is behind a group has given its activations back. So behind each group are at least ``BEHIND`` times as many elements as
it has: from the end 1, 1, … 2, 2, 2, 3, ….
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from zeroshard.precision import matches

TINY = 16  # a neighbour under 1/16 of the other is merged into it whatever the sum
GROUP = 2**24  # elements that neighbouring blocks may have together
PARTS = 16  # groups of blocks, at least
TOGETHER = 3  # blocks of a group, from which on there are more groups too
BEHIND = 6  # times as many elements as a group has are in the blocks behind it, at least


@dataclass
class Plan:
    """A unit to be: its parameters, and the modules whose run needs them."""

    name: str
    parameters: list[str]
    modules: list[str]
    numel: int
    is_block: bool
    blocks: int = 1  # that it was made of, where it is one

    def absorb(self, other: Plan) -> None:
        """Make one unit of two neighbours."""
        self.blocks += other.blocks
        self.name = f"{self.name}+{other.name}"
        self.parameters += other.parameters
        self.modules += other.modules
        self.numel += other.numel


def plan_units(
    model: nn.Module, patterns: tuple[str | type[nn.Module], ...] | None, bucket_size: int, together: bool = True
) -> list[Plan]:
    """Divide the model's parameters into units, in the order the model defines them.

    ``together``: small blocks may go together, where no units are asked for.

    >>> class Block(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)
    >>> blocks = nn.Sequential(*[Block() for _ in range(3)])
    >>> model = nn.Sequential(nn.Embedding(100, 8), blocks, nn.LayerNorm(8), nn.Linear(8, 100))
    >>> [plan.name for plan in plan_units(model, None, 2**25)]
    ['0', '1.0', '1.1', '1.2', '2+3']
    """
    names = {module: name for name, module in model.named_modules()}
    if patterns is None:
        blocks = set(repeated(model))
    else:
        blocks = {module for module, name in names.items() if name and matches(name, module, patterns)}
        if not blocks:
            known = list(names.values())[1:6]
            raise ValueError(f"units={patterns!r} matches no module; modules are named like {known}")
    owner: dict[nn.Parameter, Plan] = {}
    plans: list[Plan] = []
    for module, inside, is_block in _rooms(model, blocks):
        plan = Plan(names[module], [], [names[module]], 0, is_block)
        for submodule in inside:
            for key, parameter in submodule.named_parameters(names[submodule], recurse=False, remove_duplicate=False):
                home = owner.get(parameter)
                if home is None:
                    owner[parameter] = plan
                    plan.parameters.append(key)
                    plan.numel += parameter.numel()
                elif home is not plan and names[module] not in home.modules:
                    home.modules.append(names[module])  # tied: this module needs that unit too
        if plan.parameters:
            plans.append(plan)
    return _merged(_grouped(plans) if together and patterns is None else plans, bucket_size)


def repeated(model: nn.Module) -> Iterator[nn.Module]:
    """Find the outermost containers' children of one class: transformer layers, residual blocks, stages."""
    found = _alike(model) if isinstance(model, (nn.ModuleList, nn.Sequential)) else []  # the model is the container
    yield from found
    for child in model.children():
        if child not in found:
            yield from _repeated_in(child)


def _repeated_in(child: nn.Module) -> Iterator[nn.Module]:
    members = list(child.children()) if isinstance(child, (nn.ModuleList, nn.Sequential, nn.ModuleDict)) else []
    found = _alike(child) if members else []
    yield from found
    for member in [child] if not members else [m for m in members if m not in found]:
        yield from repeated(member)


def _alike(container: nn.Module) -> list[nn.Module]:
    """The children of a container that are of one class with another, and have children and parameters."""
    members = list(container.children())
    counts = Counter(type(m) for m in members if next(m.children(), None) is not None)
    return [m for m in members if counts[type(m)] > 1 and next(m.parameters(), None) is not None]


Room = tuple[nn.Module, list[nn.Module], bool]


def _rooms(module: nn.Module, blocks: set[nn.Module], root: bool = True) -> Iterator[Room]:
    """Yield each module that becomes (part of) a unit, the submodules whose parameters it takes, whether a block.

    A module with parameters of its own and no block inside takes all below it, since its forward may use a child's
    parameters directly, as nn.MultiheadAttention does.
    """
    own = next(module.parameters(recurse=False), None) is not None
    has_blocks = any(m in blocks for m in module.modules() if m is not module)
    is_block = module in blocks
    if (is_block or (own and not root)) and not has_blocks:
        yield module, list(module.modules()), is_block
        return
    if own:
        yield module, [module], is_block
    for child in module.children():
        yield from _rooms(child, blocks, root=False)


def _grouped(plans: list[Plan]) -> list[Plan]:
    """Merge neighbouring blocks of one container while they are small: see [Note: small blocks]."""
    blocks = [plan.numel for plan in plans if plan.is_block]
    limit = _most_together(sum(blocks), len(blocks))
    grouped: list[Plan] = []  # from the end
    behind = 0  # elements of the blocks behind the last group
    for plan in reversed(plans):
        last = grouped[-1] if grouped else None
        if (
            last is not None
            and _of_one_container(plan, last)
            and plan.numel + last.numel <= min(limit, behind // BEHIND)
        ):
            plan.absorb(last)
            grouped[-1] = plan
            continue
        behind += last.numel if last is not None and last.is_block else 0
        grouped.append(plan)
    return grouped[::-1]


def blocks_together(numel: int, blocks: int) -> int:
    """How many of so many blocks, of ``numel`` elements each, go together: see [Note: small blocks].

    >>> blocks_together(1000, 31), blocks_together(1000, 48), blocks_together(2**23, 1000)
    (1, 3, 2)
    """
    return max(1, _most_together(blocks * numel, blocks) // max(1, numel))


def _most_together(numel: int, blocks: int) -> int:
    """Elements that a group may have, of those that so many blocks have together."""
    return min(GROUP, numel // max(PARTS, math.isqrt(blocks * PARTS // TOGETHER)))


def _of_one_container(*plans: Plan) -> bool:
    containers = {plan.modules[0].rpartition(".")[0] for plan in plans}
    return len(containers) == 1 and all(plan.is_block for plan in plans)


def _merged(plans: list[Plan], bucket_size: int) -> list[Plan]:
    """Merge neighbours that are not blocks while they are small beside the blocks, or tiny beside each other."""
    blocks = [plan.numel for plan in plans if plan.is_block]
    total = sum(plan.numel for plan in plans)
    limit = min(sum(blocks) // len(blocks) if blocks else total // 8, bucket_size)
    merged: list[Plan] = []
    for plan in plans:
        last = merged[-1] if merged else None
        if last is not None and not plan.is_block and not last.is_block and "" not in plan.modules + last.modules:
            small, large = sorted((last.numel, plan.numel))
            if small + large <= limit or small * TINY <= large:
                last.absorb(plan)
                continue
        merged.append(plan)
    return merged
