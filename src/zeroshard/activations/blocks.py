"""select_blocks: choose the modules of a model that are checkpointed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from zeroshard.sharding import find_repeated_blocks, matches

BlockSelector = int | Iterable[str | type[nn.Module] | nn.Module] | Callable[[str, nn.Module], bool] | None


def select_blocks(model: nn.Module, blocks: BlockSelector) -> dict[str, nn.Module]:
    """Return the modules that ``blocks`` selects, by name, in the order the model defines them.

    >>> class Block(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.linear = nn.Linear(2, 2)
    ...     def forward(self, x):
    ...         return self.linear(x)
    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(*[Block() for _ in range(4)]))
    >>> list(select_blocks(model, None)), list(select_blocks(model, 2)), list(select_blocks(model, ["1.[01]"]))
    (['1.0', '1.1', '1.2', '1.3'], ['1.0', '1.2'], ['1.0', '1.1'])
    """
    names = {module: name for name, module in model.named_modules()}
    if blocks is None or isinstance(blocks, int):
        found = _every_nth_block(model, 1 if blocks is None else blocks)
    elif isinstance(blocks, (str, type)) or (isinstance(blocks, nn.Module) and not isinstance(blocks, Iterable)):
        raise TypeError(f"blocks={blocks!r} is a single entry: pass a list, [{blocks!r}]")
    elif isinstance(blocks, Iterable):
        found = {module for entry in blocks for module in _match_entry(entry, names)}
    elif callable(blocks):
        found = {module for module, name in names.items() if name and blocks(name, module)}
        if not found:
            raise ValueError(f"blocks={blocks!r} selects no module. {_module_names_hint(model)}")
    else:
        raise TypeError(f"blocks must be None, an int, a list or a function (name, module) -> bool, got {blocks!r}")
    selected = {name: module for module, name in names.items() if module in found}
    for name, module in selected.items():
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            raise ValueError(f"{name!r} is a {type(module).__name__}, which is never called: select the modules in it")
    return selected


def _every_nth_block(model: nn.Module, n: int) -> set[nn.Module]:
    if isinstance(n, bool) or n < 1:
        raise ValueError(f"blocks must be an int of at least 1 (every n-th block) or a list, got {n!r}")
    found = set(find_repeated_blocks(model))
    in_order = [module for module in model.modules() if module in found]
    if not in_order:
        hint = f"select some with blocks=[…]. {_module_names_hint(model)}"
        raise ValueError(f"this {type(model).__name__} has no repeated blocks: {hint}")
    return set(in_order[::n])  # prefer the first: backward needs the last ones first, so they gain least


def _match_entry(entry: Any, names: dict[nn.Module, str]) -> list[nn.Module]:
    """Return the modules that one entry of a list selects."""
    if isinstance(entry, nn.Module):
        found = [module for module in names if module is entry]
    elif isinstance(entry, str) or (isinstance(entry, type) and issubclass(entry, nn.Module)):
        found = [module for module, name in names.items() if name and matches(name, module, (entry,))]
    else:
        raise TypeError(f"blocks must contain name patterns, module classes or modules, got {entry!r}")
    if not found:
        described = f"the {type(entry).__name__} given" if isinstance(entry, nn.Module) else repr(entry)
        raise ValueError(f"blocks: {described} matches no module of the model. {_module_names_hint(next(iter(names)))}")
    return found


def _module_names_hint(model: nn.Module) -> str:
    """Describe the module names to choose from."""
    names = [name for name, module in model.named_modules() if name and next(module.children(), None) is not None]
    names = names or [name for name, _ in model.named_modules() if name]
    return f"Examples of module names: {names[:6]}"
