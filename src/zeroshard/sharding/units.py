"""Finding the units of a model: its repeated blocks, and the rest in between, without the user's help.

[Note: small blocks]
A collective of few bytes takes as long as its latency, and the host as long to launch it as any other. So neighbouring
blocks are gathered and reduced together while they have few parameters: at most ``MAX_GROUP_ELEMENTS`` elements, whose
gather takes about as long as its latency on a fast network, and at most a sixteenth of all blocks. Of up to 31 blocks
of one size each is a unit, however small. Some groups are in memory at a time, as parameters, gradients and buckets:
that grows with a group, and the host's time with their number. So from 48 blocks up both grow with the square root of
the blocks.

The last blocks run backward beside all the activations there are, which is where the memory of a step is highest; what
is behind a group has given its activations back. So behind each group are at least ``MIN_ELEMENTS_BEHIND_RATIO`` times
as many elements as it has: from the end 1, 1, … 2, 2, 2, 3, ….
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from zeroshard.sharding.precision import matches

TINY_NEIGHBOR_RATIO = 16  # a neighbour under 1/16 of the other is merged into it whatever the sum
MAX_GROUP_ELEMENTS = 2**24  # elements that neighbouring blocks may have together
MIN_GROUPS = 16  # groups of blocks, at least
GROUP_GROWTH_BLOCKS = 3  # blocks of a group, from which on there are more groups too
MIN_ELEMENTS_BEHIND_RATIO = 6  # times as many elements as a group has are in the blocks behind it, at least


@dataclass
class UnitSpec:
    """A unit to be: its parameters, and the modules whose run needs them."""

    name: str
    parameters: list[str]
    modules: list[str]
    numel: int
    is_block: bool
    block_count: int = 1  # that it was made of, where it is one

    def merge(self, other: UnitSpec) -> None:
        """Make one unit of two neighbours."""
        self.block_count += other.block_count
        self.name = f"{self.name}+{other.name}"
        self.parameters += other.parameters
        self.modules += other.modules
        self.numel += other.numel


def plan_units(
    model: nn.Module,
    patterns: tuple[str | type[nn.Module], ...] | None,
    bucket_size: int,
    group_small_blocks: bool = True,
) -> list[UnitSpec]:
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
        blocks = set(find_repeated_blocks(model))
    else:
        blocks = {module for module, name in names.items() if name and matches(name, module, patterns)}
        if not blocks:
            known = list(names.values())[1:6]
            raise ValueError(f"units={patterns!r} matches no module; modules are named like {known}")
    owner: dict[nn.Parameter, UnitSpec] = {}
    plans: list[UnitSpec] = []
    for module, inside, is_block in _candidate_modules(model, blocks):
        plan = UnitSpec(names[module], [], [names[module]], 0, is_block)
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
    return _merge_small_neighbors(
        _group_small_blocks(plans) if group_small_blocks and patterns is None else plans, bucket_size
    )


def find_repeated_blocks(model: nn.Module) -> Iterator[nn.Module]:
    """Find the outermost containers' children of one class: transformer layers, residual blocks, stages."""
    found = (
        _same_class_children(model) if isinstance(model, (nn.ModuleList, nn.Sequential)) else []
    )  # the model is the container
    yield from found
    for child in model.children():
        if child not in found:
            yield from _find_repeated_in(child)


def _find_repeated_in(child: nn.Module) -> Iterator[nn.Module]:
    members = list(child.children()) if isinstance(child, (nn.ModuleList, nn.Sequential, nn.ModuleDict)) else []
    found = _same_class_children(child) if members else []
    yield from found
    for member in [child] if not members else [m for m in members if m not in found]:
        yield from find_repeated_blocks(member)


def _same_class_children(container: nn.Module) -> list[nn.Module]:
    """The children of a container that are of one class with another, and have children and parameters."""
    members = list(container.children())
    counts = Counter(type(m) for m in members if next(m.children(), None) is not None)
    return [m for m in members if counts[type(m)] > 1 and next(m.parameters(), None) is not None]


CandidateModule = tuple[nn.Module, list[nn.Module], bool]


def _candidate_modules(module: nn.Module, blocks: set[nn.Module], root: bool = True) -> Iterator[CandidateModule]:
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
        yield from _candidate_modules(child, blocks, root=False)


def _group_small_blocks(specs: list[UnitSpec]) -> list[UnitSpec]:
    """Merge neighbouring blocks of one container while they are small: see [Note: small blocks]."""
    blocks = [plan.numel for plan in specs if plan.is_block]
    limit = _group_element_limit(sum(blocks), len(blocks))
    grouped: list[UnitSpec] = []  # from the end
    behind = 0  # elements of the blocks behind the last group
    for plan in reversed(specs):
        last = grouped[-1] if grouped else None
        if (
            last is not None
            and _is_same_container(plan, last)
            and plan.numel + last.numel <= min(limit, behind // MIN_ELEMENTS_BEHIND_RATIO)
        ):
            plan.merge(last)
            grouped[-1] = plan
            continue
        behind += last.numel if last is not None and last.is_block else 0
        grouped.append(plan)
    return grouped[::-1]


def blocks_per_group(numel: int, blocks: int) -> int:
    """How many of so many blocks, of ``numel`` elements each, go together: see [Note: small blocks].

    >>> blocks_per_group(1000, 31), blocks_per_group(1000, 48), blocks_per_group(2**23, 1000)
    (1, 3, 2)
    """
    return max(1, _group_element_limit(blocks * numel, blocks) // max(1, numel))


def _group_element_limit(numel: int, blocks: int) -> int:
    """Elements that a group may have, of those that so many blocks have together."""
    return min(MAX_GROUP_ELEMENTS, numel // max(MIN_GROUPS, math.isqrt(blocks * MIN_GROUPS // GROUP_GROWTH_BLOCKS)))


def _is_same_container(*plans: UnitSpec) -> bool:
    containers = {plan.modules[0].rpartition(".")[0] for plan in plans}
    return len(containers) == 1 and all(plan.is_block for plan in plans)


def _merge_small_neighbors(specs: list[UnitSpec], bucket_size: int) -> list[UnitSpec]:
    """Merge neighbours that are not blocks while they are small beside the blocks, or tiny beside each other."""
    blocks = [plan.numel for plan in specs if plan.is_block]
    total = sum(plan.numel for plan in specs)
    limit = min(sum(blocks) // len(blocks) if blocks else total // 8, bucket_size)
    merged: list[UnitSpec] = []
    for plan in specs:
        last = merged[-1] if merged else None
        if last is not None and not plan.is_block and not last.is_block and "" not in plan.modules + last.modules:
            small, large = sorted((last.numel, plan.numel))
            if small + large <= limit or small * TINY_NEIGHBOR_RATIO <= large:
                last.merge(plan)
                continue
        merged.append(plan)
    return merged
