"""Notice, after ``shard()``, what changes the rule of an optimizer."""

from __future__ import annotations

from typing import Any

import torch

from zeroshard.optim.elementwise_check.classification import find_whole_param_groups
from zeroshard.optim.elementwise_check.trial import short_repr
from zeroshard.optim.step import ELEMENTWISE_OPTIMIZERS


class RuleChecker:
    """Notices what changes the rule of a group on slices after ``shard()``: an option, or attributes of parameters.

    Then the group is tried again, and rejected if it needs whole parameters now. Each combination is tried once.
    Numbers count only as zero or not, learning rates not at all: schedulers change them. What the optimizer itself
    changes in a step is not tried.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, dtype: torch.dtype | None, groups: list[Any]) -> None:
        """``groups``: each a mapping with the model's parameters, and whether it ``needs_whole``; may grow."""
        self._optimizer, self._dtype, self._groups = optimizer, dtype, groups
        self._last = self._rules()
        self._tried = [self._last]

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer, elementwise: bool | None, *others: Any) -> RuleChecker | None:
        """Return None if the rule is known to stay the same, or if the user asserts what it is."""
        is_fixed = type(optimizer) in (*ELEMENTWISE_OPTIMIZERS, torch.optim.Adafactor, torch.optim.Muon)
        return None if is_fixed or elementwise is not None else cls(optimizer, *others)

    def check(self) -> None:
        """Raise if a group on slices needs whole parameters now. All ranks call it before a step."""
        rules = self._rules()
        if rules == self._last:
            return
        self._last = [*self._last, *rules[len(self._last) :]]  # add_param_group() has tried the new groups
        if rules != self._last and rules not in self._tried:
            self._try(rules)
            self._tried.append(rules)
        self._last = rules

    def _try(self, rules: list[dict[Any, Any]]) -> None:
        changes = [
            f"parameters of group {number} have the attributes {sorted(now[key] - before[key])} now"
            if key is None
            else f"{key!r} of group {number} is {short_repr(self._groups[number].get(key))} now"
            for number, (before, now) in enumerate(zip(self._last, rules, strict=True))
            for key in before | now
            if before.get(key) != now.get(key)
        ]
        what = f"the rule of {type(self._optimizer).__qualname__} has changed after shard(): {'; '.join(changes)}"
        try:
            groups = [dict(group) for group in self._groups]
            needs_whole = find_whole_param_groups(self._optimizer, None, self._dtype, groups)
        except ValueError as error:
            raise RuntimeError(f"{what}. {error}") from error
        if any(now and not group.needs_whole for now, group in zip(needs_whole, self._groups, strict=True)):
            raise RuntimeError(
                f"{what}. With this it reads whole parameters, which slices do not have: set it before shard(), or "
                "pass elementwise=False to shard()"
            )

    def accept(self) -> None:
        """Accept what the optimizer itself has changed in its options."""
        self._last = self._rules()

    def _rules(self) -> list[dict[Any, Any]]:
        """Return what decides over the rule of each group: options by name, and names of attributes under None."""
        rules = []
        for group in self._groups:
            options: dict[Any, Any] = {}
            for key, value in group.items():
                if value is None or isinstance(value, (bool, str, torch.dtype)):
                    options[key] = value
                elif key not in ("params", "param_names") and "lr" not in key:
                    options[key] = bool(value != 0) if isinstance(value, (int, float)) else type(value)
            if not group.needs_whole:
                names = set().union(*map(vars, group["params"]))
                options[None] = {name for name in names if not name.startswith("_zeroshard")}
            rules.append(options)
        return rules
