"""Find the units of a model, its repeated blocks and the modules between them, without the user's help.

[Note: small blocks]
A collective of few bytes takes as long as its latency, and the host needs as long to launch it as any other. So
consecutive blocks are all-gathered and reduce-scattered together while they have few parameters: at most
``MAX_GROUP_ELEMENTS`` elements, whose all-gather takes about as long as its latency on a fast network, and at most a
sixteenth of all blocks. With up to 31 blocks of equal size, each is a unit, however small. A few groups are in memory
at a time, as parameters, gradients and buckets: this memory grows with the size of a group, and the host's time with
the number of groups. So from 48 blocks on, both grow with the square root of the number of blocks.

The last blocks run backward while all activations are in memory, which is the memory peak of a step. When backward
reaches a group, the blocks executed later in forward have freed their activations. So these have at least
``MIN_ELEMENTS_BEHIND_RATIO`` times as many elements as the group. Group sizes from the end: 1, 1, … 2, 2, 2, 3, ….
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from zeroshard.config.config import Config
from zeroshard.sharding.precision import matches

TINY_NEIGHBOR_RATIO = 16  # a neighbour under 1/16 of the other is merged into it, whatever their total size
MAX_GROUP_ELEMENTS = 2**24  # elements in a group of consecutive blocks, at most
MIN_GROUPS = 16  # groups of blocks, at least
GROUP_GROWTH_BLOCKS = 3  # blocks per group, from which on the number of groups grows too
MIN_ELEMENTS_BEHIND_RATIO = 6  # elements executed after a group in forward, per element of the group, at least


@dataclass
class UnitSpec:
    """What a unit will consist of: its parameters, and the modules whose calls need them."""

    name: str
    parameters: list[str]
    modules: list[str]
    numel: int
    is_block: bool
    block_count: int = 1  # merged blocks, if ``is_block``

    def merge(self, other: UnitSpec) -> None:
        """Merge the next unit into this one."""
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
    """Split the model's parameters into units, in the order the model defines them.

    ``group_small_blocks``: small blocks may share a unit, if ``patterns`` is None.

    >>> class Block(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)
    >>> blocks = nn.Sequential(*[Block() for _ in range(3)])
    >>> model = nn.Sequential(nn.Embedding(100, 8), blocks, nn.LayerNorm(8), nn.Linear(8, 100))
    >>> [spec.name for spec in plan_units(model, None, 2**25)]
    ['0', '1.0', '1.1', '1.2', '2+3']
    """
    names = {module: name for name, module in model.named_modules()}
    blocks = find_blocks(model, patterns)
    spec_of_param: dict[nn.Parameter, UnitSpec] = {}
    specs: list[UnitSpec] = []
    for module, submodules, is_block in _candidate_modules(model, blocks):
        spec = UnitSpec(names[module], [], [names[module]], 0, is_block)
        for submodule in submodules:
            for key, parameter in submodule.named_parameters(names[submodule], recurse=False, remove_duplicate=False):
                owner = spec_of_param.get(parameter)
                if owner is None:
                    spec_of_param[parameter] = spec
                    spec.parameters.append(key)
                    spec.numel += parameter.numel()
                elif owner is not spec and names[module] not in owner.modules:
                    owner.modules.append(names[module])  # tied: this module needs that unit too
        if spec.parameters:
            specs.append(spec)
    return _merge_small_neighbors(
        _group_small_blocks(specs) if group_small_blocks and patterns is None else specs, bucket_size
    )


def find_blocks(model: nn.Module, patterns: tuple[str | type[nn.Module], ...] | None) -> set[nn.Module]:
    """Return the modules that ``Config.units`` names, or the repeated blocks if it is None."""
    if patterns is None:
        return set(find_repeated_blocks(model))
    names = {module: name for name, module in model.named_modules() if name}
    blocks = {module for module, name in names.items() if matches(name, module, patterns)}
    if not blocks:
        raise ValueError(f"units={patterns!r} matches no module. Examples of module names: {[*names.values()][:5]}")
    return blocks


def find_cast_blocks(model: nn.Module, config: Config) -> set[nn.Module]:
    """Return the blocks whose floating-point inputs are cast to 16 bits: they have parameters in that dtype.

    The parameters of ``model`` already have their compute dtypes.
    """
    if config.cast_inputs is not True or not config.has_master:
        return set()
    blocks = find_blocks(model, config.units)
    return {block for block in blocks if any(p.dtype is config.compute_dtype for p in block.parameters())}


def find_repeated_blocks(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost containers' children that share a class: transformer layers, residual blocks, stages."""
    # the model itself may be the container
    found = _same_class_children(model) if isinstance(model, (nn.ModuleList, nn.Sequential)) else []
    yield from found
    for child in model.children():
        if child not in found:
            yield from _find_repeated_in(child)


def find_block_matrices(model: nn.Module) -> list[str]:
    """Return the names of the trainable matrices of the repeated blocks, which Muon is made for; raise if none.

    Embeddings are not among them, and neither are matrices that are tied to a parameter outside of the blocks.

    >>> blocks = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)) for _ in range(2)])
    >>> find_block_matrices(nn.Sequential(nn.Embedding(9, 4), blocks, nn.Linear(4, 9)))
    ['1.0.0.weight', '1.1.0.weight']
    """
    in_blocks = {id(module) for block in find_repeated_blocks(model) for module in block.modules()}
    excluded = {
        id(parameter)
        for module in model.modules()
        if id(module) not in in_blocks or isinstance(module, nn.Embedding)
        for parameter in module.parameters(recurse=False)
    }
    found = [
        name
        for name, parameter in model.named_parameters()
        if parameter.dim() == 2 and parameter.requires_grad and id(parameter) not in excluded
    ]
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no trained matrices in repeated blocks, which Muon would update (AdamW "
            "updates embeddings, head, norms and biases): use AdamW, or a model with at least two blocks"
        )
    return found


def _find_repeated_in(child: nn.Module) -> Iterator[nn.Module]:
    members = list(child.children()) if isinstance(child, (nn.ModuleList, nn.Sequential, nn.ModuleDict)) else []
    found = _same_class_children(child) if members else []
    yield from found
    for member in [child] if not members else [m for m in members if m not in found]:
        yield from find_repeated_blocks(member)


def _same_class_children(container: nn.Module) -> list[nn.Module]:
    """Return the children of a container that share a class and have children and parameters."""
    members = list(container.children())
    counts = Counter(type(m) for m in members if next(m.children(), None) is not None)
    return [m for m in members if counts[type(m)] > 1 and next(m.parameters(), None) is not None]


CandidateModule = tuple[nn.Module, list[nn.Module], bool]


def _candidate_modules(module: nn.Module, blocks: set[nn.Module], root: bool = True) -> Iterator[CandidateModule]:
    """Yield each module that becomes (part of) a unit, the submodules whose parameters it gets, and ``is_block``.

    A module that has direct parameters and contains no block gets the parameters of all its submodules, because its
    forward may use a child's parameters directly, as nn.MultiheadAttention does.
    """
    has_own_params = next(module.parameters(recurse=False), None) is not None
    has_blocks = any(m in blocks for m in module.modules() if m is not module)
    is_block = module in blocks
    if (is_block or (has_own_params and not root)) and not has_blocks:
        yield module, list(module.modules()), is_block
        return
    if has_own_params:
        yield module, [module], is_block
    for child in module.children():
        yield from _candidate_modules(child, blocks, root=False)


def _group_small_blocks(specs: list[UnitSpec]) -> list[UnitSpec]:
    """Merge consecutive blocks of one container while they are small: see [Note: small blocks]."""
    block_numels = [spec.numel for spec in specs if spec.is_block]
    limit = _group_element_limit(sum(block_numels), len(block_numels))
    grouped: list[UnitSpec] = []  # in reverse order
    numel_behind = 0  # elements of the blocks executed after the last group in forward
    for spec in reversed(specs):
        last = grouped[-1] if grouped else None
        if (
            last is not None
            and _is_same_container(spec, last)
            and spec.numel + last.numel <= min(limit, numel_behind // MIN_ELEMENTS_BEHIND_RATIO)
        ):
            spec.merge(last)
            grouped[-1] = spec
            continue
        numel_behind += last.numel if last is not None and last.is_block else 0
        grouped.append(spec)
    return grouped[::-1]


def blocks_per_group(numel: int, blocks: int) -> int:
    """Return how many of ``blocks`` blocks, of ``numel`` elements each, form a group: see [Note: small blocks].

    >>> blocks_per_group(1000, 31), blocks_per_group(1000, 48), blocks_per_group(2**23, 1000)
    (1, 3, 2)
    """
    return max(1, _group_element_limit(blocks * numel, blocks) // max(1, numel))


def _group_element_limit(numel: int, blocks: int) -> int:
    """Return the most elements that a group may have, if ``blocks`` blocks have ``numel`` elements in total."""
    return min(MAX_GROUP_ELEMENTS, numel // max(MIN_GROUPS, math.isqrt(blocks * MIN_GROUPS // GROUP_GROWTH_BLOCKS)))


def _is_same_container(*plans: UnitSpec) -> bool:
    containers = {spec.modules[0].rpartition(".")[0] for spec in plans}
    return len(containers) == 1 and all(spec.is_block for spec in plans)


def _merge_small_neighbors(specs: list[UnitSpec], bucket_size: int) -> list[UnitSpec]:
    """Merge consecutive units that are not blocks while they are small compared to the blocks or to each other."""
    block_numels = [spec.numel for spec in specs if spec.is_block]
    total = sum(spec.numel for spec in specs)
    limit = min(sum(block_numels) // len(block_numels) if block_numels else total // 8, bucket_size)
    merged: list[UnitSpec] = []
    for spec in specs:
        last = merged[-1] if merged else None
        if last is not None and not spec.is_block and not last.is_block and "" not in spec.modules + last.modules:
            small, large = sorted((last.numel, spec.numel))
            if small + large <= limit or small * TINY_NEIGHBOR_RATIO <= large:
                last.merge(spec)
                continue
        merged.append(spec)
    return merged
