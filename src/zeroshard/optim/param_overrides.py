"""ParamOverrides: options of single parameters that bitsandbytes keeps outside of the groups.

[Note: options of single parameters]
The optimizers of bitsandbytes share a manager in the process. It has options for a parameter (32 bits for the states of
an embedding, as the Trainer of transformers sets them) by its id(), by its place in the groups, or by a module and the
name of an attribute. On shards the optimizer steps other tensors in other places. So the inner optimizer gets a manager
of its own with the same options for what it steps, until ``unwrap()``. A group with such a parameter runs on whole
parameters: a slice can have elements of several.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

MANAGER_KEY = "mng"  # the attribute of an optimizer
Options = dict[str, Any]


def is_manager(value: Any) -> bool:
    """Return whether an object is a manager of bitsandbytes.

    >>> is_manager(torch.optim.SGD([torch.ones(1)]))
    False
    """
    names = {"pid2config": dict, "index2config": dict, "module_weight_config_triple": list}
    return all(isinstance(getattr(value, name, None), kind) for name, kind in names.items())


def make_empty_manager(manager: Any) -> Any:
    """Return a manager of the same class without options."""
    empty = object.__new__(type(manager))
    empty.__dict__.update(vars(manager), pid2config={}, index2config={}, module_weight_config_triple=[])
    return empty


class ParamOverrides:
    """The options of single parameters of one optimizer: see [Note: options of single parameters].

    >>> overrides = ParamOverrides(torch.optim.SGD([torch.ones(1)]))
    >>> overrides.find(0, [torch.ones(1)])
    [{}]
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        manager = vars(optimizer).get(MANAGER_KEY)
        self._optimizer, self._shared = optimizer, manager if is_manager(manager) else None
        self.has_manager = self._shared is not None
        self._own: Any = None  # the manager of the sharded optimizer
        self._parameters: list[tuple[Any, Options]] = []  # of all groups, with the options of the parameter itself
        self._registered = self._read_registered()

    def find(self, number: int, parameters: Iterable[Any]) -> list[Options]:
        """Return the options of each parameter of a group."""
        return [self._options_of(parameter, (number, place)) for place, parameter in enumerate(parameters)]

    def _options_of(self, parameter: Any, place: tuple[int, int] | None = None) -> Options:
        """Look options up as bitsandbytes does: those of a module replace all others, and the last ones count."""
        if self._shared is None:
            return {}
        for module, name, options in reversed(self._by_module()):
            if getattr(module, name, None) is parameter:
                return dict(options)
        return {**self._shared.index2config.get(place, {}), **self._shared.pid2config.get(id(parameter), {})}

    def _read_registered(self) -> Any:
        if self._shared is None:
            return None
        modules = [(id(module), *rest, dict(options)) for module, *rest, options in self._by_module()]
        return modules, {key: dict(options) for key, options in self._shared.pid2config.items()}

    def _by_module(self) -> list[tuple[torch.nn.Module, str, Options]]:
        return [] if self._shared is None else list(self._shared.module_weight_config_triple)

    def set_owned(self, number: int, parameters: Sequence[Any], options: Sequence[Options]) -> None:
        """Give the optimizer options of those parameters of a group that this rank steps, in their order.

        ``parameters``: all of the group, as the user knows them.
        """
        if self._shared is None:
            return
        self._parameters += [(parameter, self._options_of(parameter)) for parameter in parameters]
        if self._own is None:
            self._own = vars(self._optimizer)[MANAGER_KEY] = make_empty_manager(self._shared)
        self._own.index2config.update({(number, place): each for place, each in enumerate(options) if each})

    def check_unchanged(self) -> None:
        """Raise if options were registered or changed since ``shard()``: they would have no effect."""
        registered = self._read_registered()
        if registered == self._registered:
            return
        if any(self._options_of(parameter) != options for parameter, options in self._parameters):
            raise RuntimeError(
                f"options of single parameters of {type(self._optimizer).__name__} were registered or changed after "
                "shard(), where they have no effect: register them before it"
            )
        self._registered = registered

    def restore(self) -> None:
        """Give the optimizer the shared manager back, whose modules it then looks up again in its next step."""
        if self._own is not None:
            vars(self._optimizer).update({MANAGER_KEY: self._shared, "initialized": False})
