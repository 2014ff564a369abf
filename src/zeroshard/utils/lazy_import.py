"""Import a package's public names on first use: the command line answers ``--help`` without waiting for torch.

And import without garbage collection: see `uncollected_imports`.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any


def lazy_names(
    package: str, names_by_module: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` for a package that imports its public names on first use.

    ``names_by_module`` maps each module, relative to the package, to its names, separated by spaces.

    >>> getattr_, _ = lazy_names("zeroshard.models", {"presets": "PRESETS"})
    >>> len(getattr_("PRESETS")) > 0
    True
    """
    module_of = {name: module for module, names in names_by_module.items() for name in names.split()}

    def getattr_(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(f"{package}.{module_of[name]}"), name)
        setattr(sys.modules[package], name, value)
        return value

    def dir_() -> list[str]:
        return [*vars(sys.modules[package]), *module_of]

    return getattr_, dir_


@contextmanager
def uncollected_imports() -> Iterator[None]:
    """Import in this context without garbage collection, and exclude what there is then from later collections.

    For a program that imports torch: its million objects live as long as the process, and visiting them in collections,
    and once more at exit, takes a third of the time of start and exit.
    """
    is_enabled = gc.isenabled()
    gc.collect()  # else garbage of the caller would never be freed, and tensors that it refers to
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if is_enabled:
            gc.enable()
