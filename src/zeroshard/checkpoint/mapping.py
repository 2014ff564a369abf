"""Map saved tensors to the tensors of a model and its optimizer, and check that these can continue with them."""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from zeroshard.checkpoint.extra_states import modules_with_extra_state, state_names
from zeroshard.checkpoint.flat_shards import LocalTensor
from zeroshard.checkpoint.group import CheckpointError
from zeroshard.checkpoint.index import TensorEntry
from zeroshard.checkpoint.json_codec import truncated_repr
from zeroshard.checkpoint.reader import LoadSource, LoadTarget
from zeroshard.checkpoint.replicas import local_steps_of, replicas_in
from zeroshard.checkpoint.train_state import (
    NamedParamGroup,
    TrainState,
    get_train_state,
    persistent_buffers,
    tied_names,
)
from zeroshard.engine import EMA
from zeroshard.optim import ANCHOR, ShardedOptimizer, is_elementwise, state_after_first_step

_REMEDY = "Load an earlier checkpoint, or use load(path, model) to load only the weights"
_NUMBER = "a number"


@dataclass
class LoadMapping:
    """Which tensors of a source are loaded into which tensors of a model and its optimizer."""

    train_state: TrainState
    optimizers: Sequence[torch.optim.Optimizer]
    weights: list[LoadTarget] = field(default_factory=list)
    param_groups: list[NamedParamGroup] | None = None
    optimizer_states: dict[str, dict[str, Any]] | None = None  # by parameter name; None: not loaded
    loss_scale: list[float] | None = None
    outer_states: dict[str, dict[str, Any]] | None = None  # of the outer optimizer, as ``optimizer_states``
    with_anchors: bool = False  # the local steps of the checkpoint continue
    keeps_anchors: bool = False  # those of this run do
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)

    def allocate_targets(self) -> list[LoadTarget]:
        """Set the optimizer's options, allocate its states and return the target of every tensor to load."""
        targets = [*self.weights, *self._allocate_optimizer_targets()]
        return targets + self._allocate_outer_targets()  # also if the optimizer keeps its states: local steps continue

    def _allocate_optimizer_targets(self) -> list[LoadTarget]:
        """Set the optimizer's options, allocate its states and return their targets."""
        if self.optimizer_states is None:
            return []
        if self.param_groups is not None:
            self.train_state.set_options(self.param_groups)
        self.train_state.allocate_optimizer_states(self.optimizer_states)
        for optimizer in self.optimizers:
            if self.loss_scale is not None and isinstance(optimizer, ShardedOptimizer):
                optimizer.load_loss_scale(self.loss_scale)
        targets = []
        for fqn, local in self.train_state.optimizer_states().items():
            name, _, key = fqn.rpartition("/")
            if isinstance(self.optimizer_states[name][key], torch.dtype):  # else it is a number, which has its value
                targets.append(LoadTarget(f"optimizer/{fqn}", local))
        return targets

    def _allocate_outer_targets(self) -> list[LoadTarget]:
        """Allocate the states of the outer optimizer, and return their targets."""
        saved = self.outer_states or {}
        for local_steps in map(local_steps_of, self.optimizers):
            if local_steps is not None and local_steps.outer is not None:
                if not self.keeps_anchors:
                    local_steps.outer.clear()
                local_steps.take_anchors(is_start=False)
                for flat in local_steps.outer.flats() if saved else ():
                    found = [saved.get(name, {}) for name in flat.names]
                    merged = {key: value for state in found for key, value in state.items()}
                    dtypes = {key: value for key, value in merged.items() if isinstance(value, torch.dtype)}
                    scalars = {key: value for key, value in merged.items() if key not in dtypes}
                    local_steps.outer.allocate_states(flat, dtypes, scalars)
        tensors = self.train_state.outer_states(with_anchors=self.with_anchors)
        weights = {target.saved_fqn for target in self.weights}
        targets = []
        for fqn, local in tensors.items():
            name, _, key = fqn.rpartition("/")
            if key in saved.get(name, {}):
                targets.append(LoadTarget(f"outer_optimizer/{fqn}", local))
            elif key == ANCHOR and f"model/{name}" in weights:  # it was not trained: its value is that of the average
                targets.append(LoadTarget(f"model/{name}", local))
        return targets


def map_states(
    source: LoadSource,
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    ema: EMA | None,
    weights: bool,
    strict: bool,
    is_resumed: bool = False,
) -> LoadMapping:
    """Map the source to the model and optimizers; raise an error that lists every mismatch.

    ``is_resumed``: see :func:`open_replica`.
    """
    mapping = LoadMapping(get_train_state(model, optimizers), optimizers)
    if weights:
        _map_weights(mapping, source, model)
    if ema is not None:
        _map_averages(mapping, source, model, ema, strict)
    if optimizers:
        _map_optimizer_states(mapping, source, strict)
        _map_outer_states(mapping, source, is_resumed and weights, strict)
        mapping.keeps_anchors = not weights
    if strict and (mapping.missing or mapping.unexpected):
        problems = [f"not in the file: {', '.join(mapping.missing)}"] if mapping.missing else []
        problems += [f"only in the file: {', '.join(mapping.unexpected)}"] if mapping.unexpected else []
        raise CheckpointError(
            f"{source.path} does not match the model. {'. '.join(problems)}. Pass strict=False to skip these"
        )
    if weights and source.index.rank_data:  # else these are weights alone
        _map_missing_extra_states(mapping, source, model, strict)
    return mapping


def _map_weights(mapping: LoadMapping, source: LoadSource, model: nn.Module) -> None:
    local_tensors = mapping.train_state.parameters() | {
        name: LocalTensor.from_full_tensor(name, buffer) for name, buffer in persistent_buffers(model)
    }
    frozen = {name for name, is_trained in source.index.requires_grad.items() if not is_trained}
    _map_tensors(mapping, source, tied_names(model), "model", local_tensors, optional_names=frozen)
    known_modules = modules_with_extra_state(model)
    mapping.unexpected += state_names({n: s for n, s in source.index.extra_states.items() if n not in known_modules})


def _map_tensors(
    mapping: LoadMapping,
    source: LoadSource,
    ties: Mapping[str, str],
    kind: str,
    local_tensors: Mapping[str, LocalTensor],
    optional_names: Collection[str] = (),
) -> None:
    """Map saved tensors of one kind; those with optional names may be missing: they were saved with frozen=False."""
    saved = source.index.tensors_of_kind(kind)
    suffix = " (EMA)" if kind == "ema" else ""
    known = {*local_tensors, *ties}
    problems = []
    for name, local in local_tensors.items():
        saved_name = _saved_name(name, source, ties, saved)
        if saved_name is not None:
            known.add(saved_name)
            problems += _mismatches(f"{name}{suffix}", saved[saved_name], local.shape, local.dtype)
            mapping.weights.append(LoadTarget(f"{kind}/{saved_name}", local))
        elif name not in optional_names:
            mapping.missing.append(f"{name}{suffix}")
    mapping.unexpected += [f"{name}{suffix}" for name in saved if name not in known]
    _raise_mismatches(source, problems)


def _map_missing_extra_states(mapping: LoadMapping, source: LoadSource, model: nn.Module, strict: bool) -> None:
    """List extra states that are not in the checkpoint. That is no error: its program did not save all, or none."""
    modules = modules_with_extra_state(model)
    missing = state_names({name: None for name in modules if name not in source.index.extra_states})
    mapping.missing += missing
    if missing and strict:
        warnings.warn(
            f"{source.path} has no extra state (get_extra_state()) of {len(missing)} modules, which keep theirs: "
            f"{', '.join(missing[:4])}{', …' if len(missing) > 4 else ''}",
            stacklevel=2,
        )


def _map_averages(mapping: LoadMapping, source: LoadSource, model: nn.Module, ema: EMA, strict: bool) -> None:
    if strict and not source.index.tensors_of_kind("ema"):
        raise CheckpointError(
            f"{source.path} contains no EMA: it was saved without ema=. Load it without ema, then make the EMA, which "
            "starts with the loaded weights"
        )
    _map_tensors(mapping, source, tied_names(model), "ema", mapping.train_state.averages(ema))


def _saved_name(name: str, source: LoadSource, ties: Mapping[str, str], saved: Mapping[str, TensorEntry]) -> str | None:
    """Return the name a parameter is saved under: its own, or one it is, or was, tied to."""
    candidates = [name, source.index.tied_names.get(name), *(alias for alias, first in ties.items() if first == name)]
    return next((candidate for candidate in candidates if candidate in saved), None)


def _mismatches(name: str, saved: TensorEntry, shape: Sequence[int], dtype: torch.dtype) -> list[str]:
    """Return why a saved tensor cannot be loaded into a tensor of this shape and dtype, if it cannot."""
    if tuple(saved.shape) != tuple(shape):
        return [f"{name} has shape {list(saved.shape)}, expected {list(shape)}"]
    if not _can_load_as(saved.dtype, dtype):
        return [f"{name} has dtype {saved.dtype}, expected {dtype}"]
    return []


def _raise_mismatches(source: LoadSource, problems: list[str]) -> None:
    if problems:
        raise CheckpointError(f"{source.path} does not match the model: {'; '.join(problems)}")


def _map_optimizer_states(mapping: LoadMapping, source: LoadSource, strict: bool) -> None:
    if source.index.optimizer is None:
        raise CheckpointError(
            f"{source.path} contains no optimizer states: use load(path, model) to load only the weights"
        )
    saved, current_groups = source.index.optimizer, mapping.train_state.param_groups()
    options = source.decode([group["options"] for group in saved["param_groups"]])
    saved_groups = [
        NamedParamGroup(group["class"], group["param_names"], group_options)
        for group, group_options in zip(saved["param_groups"], options, strict=True)
    ]
    # by parameter: one optimizer with two groups may become two of its class, with a group each
    saved_classes, current_classes = _classes_by_name(saved_groups), _classes_by_name(current_groups)
    common = saved_classes.keys() & current_classes.keys()
    pairs = {frozenset((saved_classes[name], current_classes[name])) for name in common}
    same_classes = all(len(pair) == 1 for pair in pairs)
    if strict and not same_classes:
        raise CheckpointError(
            f"{source.path} was saved with the optimizer {_join_classes(saved_groups)}, expected "
            f"{_join_classes(current_groups)}: use load(path, model) to load only the weights"
        )
    # only these have states with the same meaning
    if not all(len(pair) == 1 or pair <= {"Adam", "AdamW"} for pair in pairs):
        mapping.unexpected += [f"{name} (optimizer)" for name in saved_classes]
        return
    same_groups = [set(group.names) for group in saved_groups] == [set(group.names) for group in current_groups]
    if same_groups and same_classes:
        mapping.param_groups = saved_groups
        for number, (saved_group, current_group) in enumerate(zip(saved_groups, current_groups, strict=True)):
            _check_options(f"{source.path}: group {number}", saved_group.options, current_group.options)
    elif strict and current_classes.keys() == saved_classes.keys():
        raise CheckpointError(
            f"{source.path} has other param groups ({[len(group.names) for group in saved_groups]} parameters) than "
            f"the optimizer ({[len(group.names) for group in current_groups]}): use the same groups, or pass "
            "strict=False to load the states and keep the options of this optimizer"
        )
    mapping.missing += [f"{name} (optimizer)" for name in current_classes if name not in saved_classes]
    mapping.unexpected += [f"{name} (optimizer)" for name in saved_classes if name not in current_classes]
    mapping.optimizer_states = _map_param_states(mapping, source, current_groups)
    if saved["loss_scale"] is not None:
        mapping.loss_scale = [saved["loss_scale"]["scale"], saved["loss_scale"]["growth_tracker"]]


def _map_outer_states(mapping: LoadMapping, source: LoadSource, is_resumed: bool, strict: bool) -> None:
    all_steps = map(local_steps_of, mapping.optimizers)
    outers = [steps.outer for steps in all_steps if steps is not None and steps.outer is not None]
    tensors, saved = source.index.tensors_of_kind("outer_optimizer"), replicas_in(source.index)
    if tensors and not outers:
        warnings.warn(f"{source.path} has states of an outer optimizer, which this run does not have", stacklevel=2)
    if not outers:
        return
    states: dict[str, dict[str, Any]] = {}
    shapes = {name: local.shape for name, local in mapping.train_state.parameters().items()}
    problems = []
    for fqn, entry in tensors.items():
        name, _, key = fqn.rpartition("/")
        states.setdefault(name, {})[key] = entry.dtype
        problems += _mismatches(f"outer_optimizer/{fqn}", entry, shapes.get(name, entry.shape), torch.float32)
    _raise_mismatches(source, problems)
    has_local_steps = is_resumed and saved is not None and any(saved["steps_since_average"])
    if has_local_steps and not any(ANCHOR in state for state in states.values()):
        raise CheckpointError(
            f"{source.path} was saved between two averages of a run without an outer optimizer, and this run has one, "
            "which needs the values of the last average: call zeroshard.average_replicas(model) before "
            "zeroshard.save(), or continue without outer_optimizer until then"
        )
    prefix, scalars = "outer_optimizer/", (source.index.optimizer or {"scalars": {}})["scalars"]
    scalars = {name.removeprefix(prefix): v for name, v in scalars.items() if name.startswith(prefix)}
    for name, values in source.decode(scalars).items():
        states.setdefault(name, {}).update(values)
    try:
        _check_outer_states(source, outers[0].make([nn.Parameter(torch.zeros(1, device="cpu"))]), states, shapes)
    except CheckpointError:  # of another class
        if strict:
            raise
        states = {name: {ANCHOR: state[ANCHOR]} for name, state in states.items() if ANCHOR in state}
        mapping.unexpected.append("the states of the outer optimizer")
    mapping.outer_states, mapping.with_anchors = states, has_local_steps


def _check_outer_states(
    source: LoadSource,
    outer: torch.optim.Optimizer,
    states: Mapping[str, Mapping[str, Any]],
    shapes: Mapping[str, tuple[int, ...]],
) -> None:
    """Raise if an outer optimizer cannot continue with saved states."""
    probe, options = _OptimizerProbe(outer), {k: v for k, v in outer.param_groups[0].items() if k != "params"}
    for name, state in states.items():
        own = {key: value for key, value in state.items() if key != ANCHOR}
        if own and math.prod(shapes.get(name, ())):  # counters of empty parameters are not saved
            probe.check_state(f"{source.path}: outer_optimizer/{name}", options, shapes[name], own)


def _classes_by_name(groups: list[NamedParamGroup]) -> dict[str, str]:
    """Return the class of each parameter's optimizer."""
    return {name: group.class_name for group in groups for name in group.names}


def _join_classes(groups: list[NamedParamGroup]) -> str:
    return " + ".join(dict.fromkeys(group.class_name for group in groups))


def _map_param_states(
    mapping: LoadMapping, source: LoadSource, current_groups: list[NamedParamGroup]
) -> dict[str, dict[str, Any]]:
    """Return the saved states of each parameter: the dtypes of elementwise states, and the scalars."""
    assert source.index.optimizer is not None
    param_states: dict[str, dict[str, Any]] = {name: {} for group in current_groups for name in group.names}
    shapes = {name: local.shape for name, local in mapping.train_state.parameters().items()}
    problems = []
    for name, state in source.index.tensors_of_kind("optimizer").items():
        parameter, _, key = name.rpartition("/")
        if parameter in param_states:
            param_states[parameter][key] = state.dtype
            problems += _mismatches(name, state, shapes[parameter], state.dtype)
    _raise_mismatches(source, problems)
    scalars = {name: values for name, values in source.index.optimizer["scalars"].items() if name in param_states}
    for parameter, values in source.decode(scalars).items():
        _check_scalars(f"{source.path}: {parameter}", values, param_states[parameter], shapes[parameter])
        param_states[parameter] |= values
    probes = {inner: _OptimizerProbe(inner) for inner in mapping.train_state.group_optimizers}
    groups = zip(mapping.param_groups or current_groups, mapping.train_state.group_optimizers, strict=True)
    for group, probe in [(group, probes[inner]) for group, inner in groups]:
        for parameter in group.names:
            if param_states[parameter]:
                where = f"{source.path}: {parameter}"
                numbers = probe.check_state(where, group.options, shapes[parameter], param_states[parameter])
                param_states[parameter] |= {key: source.read(f"optimizer/{parameter}/{key}") for key in numbers}
    for optimizer in mapping.optimizers:
        if isinstance(optimizer, ShardedOptimizer):
            names = {name for group in optimizer.group_param_names for name in group}
            optimizer.check_loadable({name: state for name, state in param_states.items() if name in names})
    return param_states


# ------------------------------------------------ whether the optimizer can continue with what was saved


def _can_load_as(saved: torch.dtype, wanted: torch.dtype) -> bool:
    """Return whether a dtype can be loaded as another: float as any float, integer if its range fits.

    >>> _can_load_as(torch.float64, torch.bfloat16), _can_load_as(torch.int32, torch.int64)
    (True, True)
    >>> _can_load_as(torch.int32, torch.float32)
    False
    """
    if saved == wanted:
        return True
    if saved.is_floating_point or wanted.is_floating_point:
        return saved.is_floating_point and wanted.is_floating_point
    if torch.bool in (saved, wanted) or saved.is_complex or wanted.is_complex:
        return False
    return torch.iinfo(wanted).min <= torch.iinfo(saved).min and torch.iinfo(saved).max <= torch.iinfo(wanted).max


def _check_options(where: str, saved: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Raise if a saved option has another type than the current one, or lr is missing or not finite."""
    for key, value in current.items():
        if key not in saved and key == "lr":
            raise CheckpointError(f"{where} has no lr, expected {_describe_type(value)}. {_REMEDY}")
        if key not in saved or value is None or saved[key] is None:
            continue
        if _describe_type(saved[key]) != _describe_type(value):
            raise CheckpointError(
                f"{where} has {key} {truncated_repr(saved[key])} ({_describe_type(saved[key])}), expected "
                f"{_describe_type(value)} as in the optimizer ({truncated_repr(value)}). {_REMEDY}"
            )
        if key == "lr" and not math.isfinite(float(saved[key])):
            raise CheckpointError(f"{where} has lr {truncated_repr(saved[key])}, expected a finite number. {_REMEDY}")


def _check_scalars(where: str, scalars: Mapping[str, Any], states: Mapping[str, Any], shape: tuple[int, ...]) -> None:
    """Raise if a scalar state has the name or shape of an elementwise state, or ``step`` is not a valid number."""
    for key, value in scalars.items():
        # of a 0-dim parameter, a number may also be a scalar state: see _OptimizerProbe
        if key in states or (shape and is_elementwise(key, value, torch.Size(shape))):
            raise CheckpointError(f"{where} has {key} both as a scalar and as an elementwise state. {_REMEDY}")
        if key == "step" and not (_describe_type(value) == _NUMBER and 0 <= float(value) < math.inf):
            raise CheckpointError(
                f"{where} has step {truncated_repr(value)}, expected a number of at least 0. {_REMEDY}"
            )


class _OptimizerProbe:
    """Finds the states of an optimizer by running one step on a small copy.

    All states of a 0-dim parameter have its shape, so a plain run saves its numbers as elementwise states. A sharded
    run does not: it updates a slice. So the copy has one element, and both forms of a number load.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._is_torch_optimizer = type(optimizer).__module__.startswith("torch.optim")
        self._probed_states: dict[tuple[str, torch.Size], dict[str, Any]] = {}

    def check_state(
        self, where: str, options: Mapping[str, Any], shape: tuple[int, ...], state: Mapping[str, Any]
    ) -> list[str]:
        """Raise if a state the optimizer needs is missing or unfit. ``state`` maps elementwise states to dtypes.

        Return the elementwise states that are numbers.
        """
        small_shape = torch.Size([min(size, 2) for size in shape] or [1])
        cache_key = repr(sorted(options.items(), key=lambda item: item[0])), small_shape
        if cache_key not in self._probed_states:
            self._probed_states[cache_key] = self._probe(where, options, small_shape)
        numbers = []
        for key, value in self._probed_states[cache_key].items():
            if not shape and is_elementwise(key, value, torch.Size()) and isinstance(state.get(key), torch.dtype):
                numbers.append(key)
                continue
            # other optimizers may create states later, or in another form
            if not self._is_torch_optimizer and key != "step":
                continue
            if key not in state:
                raise CheckpointError(
                    f"{where} has the optimizer states {', '.join(state)} but no {key}, which "
                    f"{type(self._optimizer).__name__} needs. {_REMEDY}"
                )
            needs_elementwise, saved = is_elementwise(key, value, small_shape), state[key]
            is_valid = isinstance(saved, torch.dtype) == needs_elementwise
            if not is_valid or (needs_elementwise and not _can_load_as(saved, value.dtype)):
                expected = f"elementwise {value.dtype}" if needs_elementwise else _describe_type(value)
                raise CheckpointError(
                    f"{where} has the optimizer state {key} as {truncated_repr(saved)}, expected {expected}. {_REMEDY}"
                )
        return numbers

    def _probe(self, where: str, options: Mapping[str, Any], shape: torch.Size) -> dict[str, Any]:
        """Return the state after one step with these options; empty if the optimizer cannot be probed."""
        current = self._optimizer.param_groups[0]
        probe_options = dict(current)
        for key, value in options.items():
            is_number = isinstance(value, torch.Tensor) and value.numel() == 1
            keep_tensor = isinstance(current.get(key), torch.Tensor)
            probe_options[key] = value.item() if is_number and not keep_tensor else value
        with torch.random.fork_rng(devices=[]):
            try:
                state_after_first_step(self._optimizer, current, shape)
            except Exception:
                return {}
            try:
                return state_after_first_step(self._optimizer, probe_options, shape)
            except Exception as error:
                raise CheckpointError(
                    f"{where} has options that {type(self._optimizer).__name__} cannot step with: "
                    f"{type(error).__name__}: {error}. {_REMEDY}"
                ) from error


def _describe_type(value: Any) -> str:
    if isinstance(value, bool):
        return "a bool"
    if isinstance(value, (int, float)):
        return _NUMBER
    if isinstance(value, torch.Tensor):
        return _NUMBER if value.numel() == 1 and not value.is_complex() else "a tensor of several numbers"
    if isinstance(value, (list, tuple)):
        items = ("anything" if item is None else _describe_type(item) for item in value)
        return f"{len(value)} values: {', '.join(items)}"
    if isinstance(value, str):
        return "a string"
    return "a dict" if isinstance(value, dict) else type(value).__name__
