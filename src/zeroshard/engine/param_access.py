"""ParamAccess: what an access to a unit's parameters meets, and whether the user's code has changed them.

[Note: edits of parameters]
Replicated parameters without a master weight are what the optimizer updates, so an in-place edit (an initialisation,
``clamp_``, an EMA copied in) needs nothing. With a master weight, the edit must be copied to it. Autograd's version
counter counts each in-place change, so a counter that has grown since the last check identifies the edited parameters.
It does not count changes through ``parameter.data`` (``p.data.clamp_(…)``): reading ``data`` is taken as an edit.
``parameter.data = …`` is different: the parameter is no longer a view of the flat, and neither the optimizer nor an
all-gather would see it again, so it raises.

All ranks must make the same edit, or replicas would differ from then on. So the next step compares them, in an
all-reduce that each step needs anyway (``StepChecker``): each rank sends a number made of the values of its edited
units, computed on the device, and 0 for none. Some accesses change nothing: one rank alone logs ``p.data.norm()``, or
evaluates with other weights and restores its own. So before ``data`` is returned or ``load_state_dict`` begins, a
checksum of the unit is recorded, and if it is the same again at the step, the unit counts as not edited. Nothing
intercepts other edits before they are made: they count even if they are undone.

Partitioned parameters are a copy that is gathered for a pass: an edit would be lost, so it raises, and so does
``parameter.data = …``.
"""

from __future__ import annotations

import functools
import sys
import types
import weakref
from collections.abc import Iterable, Sequence
from itertools import chain
from operator import is_not
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import stateless

from zeroshard.engine.flat_param import FlatParam
from zeroshard.engine.param_data import data_ptrs, local_data, param_versions
from zeroshard.engine.parameter import (
    GatheredDTensor,
    GatheredParameter,
    GuardedDTensor,
    GuardedParameter,
    ParamOwner,
    ReducedGradDTensor,
    ReducedGradParameter,
    param_info,
)

DATA_PTR = torch.Tensor.data_ptr
MAX_FORWARD_EDIT_CHECKS = 2  # forwards of a replicated unit after which the values are compared
MAX_CHECKSUMS = 4  # all-gathers of a partitioned unit whose values are compared: two forwards, two backwards
_CHECKSUM_COLUMNS = 256
_UNKNOWN_CHECKSUM = -1


class ParamClasses:
    """The classes of a parameter, looked up once: its class changes several times a step."""

    def __init__(self, parameter: nn.Parameter, original: type[nn.Parameter]) -> None:
        self.parameter: Any = parameter
        self.original = original
        info = param_info(parameter)
        flat = info.flat() if info is not None else None
        self.is_float8 = flat is not None and flat.spec.is_gathered_in_float8  # guarded also while its layer runs
        kinds: dict[str, tuple[type, type]] = {
            "guarded": (GuardedParameter, GuardedDTensor),
            "gathered": (GatheredParameter, GatheredDTensor),
            "reduced_grad": (ReducedGradParameter, ReducedGradDTensor),
        }
        is_dtensor = isinstance(parameter, DTensor)
        self.by_kind: dict[str, type] = {"original": original} | {
            kind: dtensor if is_dtensor else _subclass_for(plain, original, parameter)
            for kind, (plain, dtensor) in kinds.items()
        }


def _is_in_compiled_code() -> bool:
    """Return whether code that torch.compile runs has called this: there parameters need their plain class."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and not frame.f_code.co_qualname.startswith("_TorchDynamoContext.__call__"):
        frame = frame.f_back
    return frame is not None


@functools.cache
def _subclass(kind: type, original: type) -> type:
    return type(original)(f"{kind.__name__}[{original.__name__}]", (kind, original), {"__slots__": ()})


def _subclass_for(kind: type, original: type, parameter: nn.Parameter) -> type:
    """Return ``kind``, or a class derived from it and the user's parameter class, so that isinstance() still holds."""
    if original is nn.Parameter or issubclass(nn.Parameter, original):
        return kind
    try:
        derived = _subclass(kind, original)
        parameter.__class__ = derived  # Python swaps only classes with the same layout
        parameter.__class__ = original
    except TypeError:
        return kind
    return derived


class ParamAccess:
    """What an access to a unit's parameters meets, by their class (see parameter.py), and whether it has changed them.

    A partitioned unit guards its parameters while no running module uses them; a replicated unit guards them while
    their values are not there.
    """

    def __init__(self, flats: list[FlatParam], is_partitioned: bool) -> None:
        self._flats, self._is_partitioned = flats, is_partitioned
        self._param_classes: list[ParamClasses] = []  # of all parameters
        self._param_classes_by_module: dict[str, list[ParamClasses]] = {}  # the parameters that each module may use
        self.unguarded: list[ParamClasses] = []  # partitioned: all other parameters are guarded
        self.unguarded_kind = "original"  # replicated: "reduced_grad" if ``grad`` is the reduced gradient
        self._guarded_kind = "guarded"  # partitioned: "gathered" inside gathered()
        self._versions: list[int] = []  # partitioned: the version counters when the all-gather started
        self._checksums: list[torch.Tensor] = []  # partitioned: of each flat when the all-gather was complete
        self._checksums_left = MAX_CHECKSUMS
        self._has_float8 = any(flat.spec.is_gathered_in_float8 for flat in flats)  # see [Note: gathering float8]
        self._rewritten: set[str] = set()  # partitioned: frozen parameters that a pass sets to themselves

    def add_param(self, parameter: nn.Parameter, original: type[nn.Parameter]) -> None:
        """Register a parameter of the unit, and the class it had."""
        self._param_classes.append(ParamClasses(parameter, original))

    def add_module(self, name: str, module: nn.Module) -> None:
        """Record which of the unit's parameters a module has."""
        own = {id(parameter) for parameter in module.parameters()}
        self._param_classes_by_module[name] = [
            classes for classes in self._param_classes if id(classes.parameter) in own
        ]

    def set_owner(self, owner: ParamOwner) -> None:
        """Let the parameters ask ``owner``, the engine, for their values and gradients."""
        reference = weakref.ref(owner)  # weak: parameter → owner → unit → parameter would be a cycle
        for classes in self._param_classes:
            info = param_info(classes.parameter)
            if info is not None:
                info.owner = reference

    def original_class(self, parameter: nn.Parameter) -> type[nn.Parameter]:
        """Return the class that a parameter of the unit had before shard()."""
        return next(classes.original for classes in self._param_classes if classes.parameter is parameter)

    # -- classes ------------------------------------------------------------------------------------------------

    def unguard(self, module: str | None) -> None:
        """Unguard the parameters of a module of a partitioned unit, or all of them."""
        every = self._param_classes
        if len(self.unguarded) == len(every):
            return
        wanted = every if module is None else self._param_classes_by_module.get(module, every)
        if self._has_float8 and self._guarded_kind == "guarded" and not _is_in_compiled_code():
            wanted = [classes for classes in wanted if not classes.is_float8]
        guarded = [classes for classes in wanted if classes.parameter.__class__ is not classes.original]
        for classes in guarded:
            classes.parameter.__class__ = classes.original
        self.unguarded = self.unguarded + guarded if self.unguarded else guarded

    def guard(self) -> None:
        """Guard all parameters of a partitioned unit."""
        for classes in self.unguarded:
            classes.parameter.__class__ = classes.by_kind[self._guarded_kind]
        self.unguarded = []

    def set_classes(self, kind: str) -> None:
        """Set the class of all parameters; ``kind`` is a key of ``ParamClasses.by_kind``."""
        for classes in self._param_classes:
            classes.parameter.__class__ = classes.by_kind[kind]

    def set_unguarded_kind(self, kind: str, has_values: bool) -> None:
        """Set the class of unguarded parameters; of a replicated unit's, now and whenever it has its values."""
        if self._is_partitioned:
            for classes in self.unguarded:
                classes.parameter.__class__ = classes.by_kind[kind]
            return
        self.unguarded_kind = kind
        if has_values:
            self.set_classes(kind)

    def set_guarded_kind(self, kind: str) -> None:
        """Set the class that a partitioned unit's parameters have while no running module uses them."""
        self._guarded_kind = kind
        unguarded = {id(classes) for classes in self.unguarded}
        for classes in self._param_classes if self._is_partitioned else ():
            if id(classes) not in unguarded:
                classes.parameter.__class__ = classes.by_kind[kind]

    # -- edits of a partitioned unit's parameters while they are unsharded --------------------------------------
    #
    # Addresses show that ``parameter.data`` was replaced, and version counters show all other changes except those
    # through ``parameter.data``, at 0.1 µs per parameter each. So the first few times the values are compared as well:
    # a forward that changes its weights does so every time. Later they are compared if ``data`` of a parameter was read
    # while its own module did not run, as a loop that averages weights into a teacher's does it. The counter of a
    # frozen parameter may grow without a change: torch's register_parametrization(), which PEFT calls in each forward
    # for its target_parameters, sets the parameter to itself.

    def record_versions(self) -> None:
        """Record the version counters when an all-gather starts."""
        with torch._C.DisableTorchFunctionSubclass():
            self._versions = [classes.parameter._version for classes in self._param_classes]
        self._checksums = []

    def record_checksums(self, is_data_read: bool = False) -> None:
        """Record checksums of the values when the all-gather is complete, or before ``parameter.data`` is returned."""
        if self._checksums_left > 0 or (is_data_read and not self._checksums):
            self._checksums = [_checksum(flat.full) for flat in self._flats]

    def accept_edits(self) -> None:
        """Record versions and checksums again, after the changes have been written back."""
        has_checksums = bool(self._checksums)
        if self._versions:
            self.record_versions()
        if has_checksums:
            self.record_checksums()

    def find_edit(self, keep_record: bool = False) -> RuntimeError | None:
        """Return the error to raise if a parameter has changed since the record. Drop it unless ``keep_record``."""
        old_versions, checksums = self._versions, self._checksums
        if not keep_record:
            self._versions, self._checksums = [], []
        with torch._C.DisableTorchFunctionSubclass():
            versions = [classes.parameter._version for classes in self._param_classes]
            for flat in self._flats:
                values = map(local_data, flat.parameters) if flat.has_dtensors else flat.parameters
                found, expected = list(map(DATA_PTR, values)), list(map(DATA_PTR, flat.views))
                if found != expected:
                    return _data_replaced_error(flat.names, expected, found)
        changed: list[str] = []
        if versions != old_versions:
            names = [name for flat in self._flats for name in flat.names]
            changed = [n for n, old, new in zip(names, old_versions, versions, strict=True) if old != new]
            trained = [name for flat in self._flats if flat.spec.is_trainable for name in flat.names]
            if not (checksums or self._rewritten.issuperset(changed)) or not set(changed).isdisjoint(trained):
                return _lost_edit_error(changed[0])
        if checksums:
            for flat, checksum in zip(self._flats, checksums, strict=True):
                if not torch.equal(_checksum(flat.full), checksum):
                    return _lost_edit_error(*(changed[:1] or flat.names))
            self._rewritten.update(changed)
            self._checksums_left -= not keep_record
        return None


@torch.no_grad()
def _checksum(full: torch.Tensor) -> torch.Tensor:
    """Return sums of a tensor's bits as integers, by rows and by columns: elements that change places change them."""
    data = full.view(torch.uint8)
    even = data.numel() // (8 * _CHECKSUM_COLUMNS) * 8 * _CHECKSUM_COLUMNS
    table = data[:even].view(torch.int64).view(-1, _CHECKSUM_COLUMNS)
    return torch.cat([table.sum(0).view(torch.uint8), table.sum(1).view(torch.uint8), data[even:]])


def _lost_edit_error(name: str, *others: str) -> RuntimeError:
    which = f"{name!r}" + (f", or another of {others}," if others else "")
    return RuntimeError(
        f"the values of {which} were changed in place during a forward or backward, where they are a copy that is "
        "gathered for the pass: the change would be lost. Compute what is to be used from the parameter in forward, "
        "without changing it (weight = self.weight.clamp(…)), or change it after step() inside "
        "`with zeroshard.gathered(model, write_rank=0):`"
    )


class ReplicatedEditDetector:
    """Detects changes to a replicated unit's parameters: see [Note: edits of parameters]."""

    def __init__(self, flats: list[FlatParam], is_compared: bool) -> None:
        """``is_compared``: other ranks have the same values, and must make the same edits."""
        self._flats, self.is_compared = flats, is_compared
        # the parameters' addresses and version counters when last checked
        self._known_data_ptrs: dict[FlatParam, list[int]] = {}
        self._known_versions: dict[FlatParam, list[int]] = {}
        self._data_aliases: list[weakref.ref[torch.Tensor]] = []  # ``parameter.data`` in the user's hands
        # before the first possible edit since the last step, None if there was none
        self.checksum_before: torch.Tensor | int | None = None
        self._forward_checks_left = MAX_FORWARD_EDIT_CHECKS
        self._has_forward_edits = False  # a forward was found that writes through ``parameter.data``

    @property
    def has_masters(self) -> bool:
        """Whether the optimizer updates master weights, not the parameters."""
        return any(flat.master is not None for flat in self._flats)

    def record_data_alias(self, values: torch.Tensor) -> None:
        """Remember that the user got ``parameter.data`` and may write to it while it is alive."""
        if self.has_masters:
            self._data_aliases.append(weakref.ref(values))
        self.record_checksum()

    def record_checksum(self) -> None:
        """Record a checksum of the values before an edit that may follow."""
        if self.is_compared and self.checksum_before is None and not self._find_version_edits():
            self.checksum_before = self.checksum()

    def checksum(self) -> torch.Tensor:
        """Return one number for the values of all flats without parameters that are split over the tensor axis."""
        total = torch.ones((), dtype=torch.int64, device=self._flats[0].device)
        for flat in self._flats:
            if not any(flat.tp_shards):
                sums = _checksum(flat.full).long()
                total += (sums * torch.arange(1, 2 * sums.numel(), 2, device=sums.device)).sum()
        return total

    def record_versions(self, flats: Iterable[FlatParam] | None = None) -> None:
        """Record that the masters, of all flats or of these, match the current values."""
        for flat in self._flats if flats is None else flats:
            if self.is_compared or flat.master is not None:
                self._known_versions[flat] = param_versions(flat.parameters)

    def accept_values(self) -> None:
        """Record the versions of values that all ranks got, so that earlier edits do not count."""
        self.record_versions()
        self.checksum_before = None

    def _find_version_edits(self) -> list[FlatParam]:
        """Return the flats whose version counters have grown, and count them as edited when ranks are compared."""
        tracked = [flat for flat in self._flats if self.is_compared or flat.master is not None]
        edited = [flat for flat in tracked if param_versions(flat.parameters) != self._known_versions.get(flat)]
        if edited and self.is_compared:
            self.record_versions(flat for flat in edited if flat.master is None)
            self.checksum_before = _UNKNOWN_CHECKSUM if self.checksum_before is None else self.checksum_before
        return edited

    def forget_data_ptrs(self) -> None:
        """Accept that the parameters' memory has moved."""
        self._known_data_ptrs.clear()

    def check_forward(self) -> None:
        """Check after a forward whether it has changed the parameters through ``parameter.data``.

        Nothing intercepts that during forward, but such a forward does it every time: so the first few times the values
        are compared with their master weights.
        """
        if self._forward_checks_left and self.has_masters:
            self._forward_checks_left -= 1
            self._has_forward_edits = self._has_forward_edits or any(flat.differs_from_master() for flat in self._flats)

    def is_edited(self, has_values: bool) -> bool:
        """Return whether a parameter with a master may have been edited since the last check.

        Raises if the data of a parameter was replaced. ``has_values``: the unit's values are in memory and up to date.
        """
        is_edited = has_values and self.has_masters and self._may_have_data_edits()
        for flat in self._flats:
            if flat not in self._known_data_ptrs:
                self._known_data_ptrs[flat] = [view.data_ptr() for view in flat.views]
            addresses = data_ptrs(flat.parameters, flat.has_dtensors)
            if addresses != self._known_data_ptrs[flat]:
                raise _data_replaced_error(flat.names, self._known_data_ptrs[flat], addresses)
        return any(flat.master is not None for flat in self._find_version_edits()) or is_edited

    def _may_have_data_edits(self) -> bool:
        """Return whether the user has ``parameter.data``, or had it since the last call, or forward writes to it."""
        was_read = bool(self._data_aliases)
        self._data_aliases = [alias for alias in self._data_aliases if alias() is not None]
        return was_read or self._has_forward_edits


def take_edits(detectors: Sequence[ReplicatedEditDetector]) -> torch.Tensor | None:
    """Return a number that all ranks get if they have made the same edits since the last call; 0 or None for none."""
    numbers = []
    for factor, detector in enumerate(detectors, 1):
        if detector.checksum_before is not None:
            checksum = detector.checksum()
            numbers.append(factor * checksum * (checksum != detector.checksum_before))
            detector.checksum_before = None
    return torch.stack(numbers).sum() if numbers else None


def _data_replaced_error(names: Sequence[str], known: list[int], addresses: list[int]) -> RuntimeError:
    name = next(name for name, old, new in zip(names, known, addresses, strict=True) if old != new)
    return RuntimeError(
        f"the data of {name!r} was replaced after zeroshard.shard() (by `parameter.data = …`, "
        "vector_to_parameters, model.to(…) or the like), so the optimizer no longer updates what the model uses. "
        "Change values in place (`parameter.copy_(…)` under torch.no_grad()) or inside "
        "`with zeroshard.gathered(model, write_rank=0):`; change dtype, device or memory format before shard()"
    )


class ReplacedParamDetector:
    """Detects that a model's parameters are not those it was sharded with.

    A check costs about 0.2 µs per module, so it runs once a forward.
    """

    def __init__(self, model: nn.Module) -> None:
        self._param_ids = {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)}
        self._record(model)

    def _record(self, model: nn.Module) -> None:
        modules = list(model.modules())
        self._module_dicts: list[dict[str, Any]] = [m._parameters for m in modules] + [m._modules for m in modules]
        self._nonempty_dicts = [entries for entries in self._module_dicts if entries]
        self._recorded_values = list(chain.from_iterable(map(dict.values, self._nonempty_dicts)))

    def check(self, model: nn.Module) -> None:
        """Raise if a parameter was replaced, or if one was added that is not trained."""
        values = chain.from_iterable(map(dict.values, self._nonempty_dicts))
        if sum(map(len, self._module_dicts)) != len(self._recorded_values) or any(
            map(is_not, values, self._recorded_values)
        ):
            self._check_each_param(model)

    def _check_each_param(self, model: nn.Module) -> None:
        if _is_functional_call():  # the caller's tensors replace the parameters for one call
            return
        for name, parameter in model.named_parameters(remove_duplicate=False):
            is_replaced = self._param_ids.get(name, id(parameter)) != id(parameter)
            if not is_replaced and (param_info(parameter) is not None or not parameter.requires_grad):
                continue
            raise RuntimeError(
                f"{name!r} is another nn.Parameter than the one that was sharded, so nobody would train it: something "
                "replaced or added it after zeroshard.shard() (an assignment, load_state_dict(assign=True), "
                "resize_token_embeddings, an adapter, FSDP). Do it before shard(), or call zeroshard.unwrap() first "
                "and shard the changed model; to change values only, write into the parameter inside "
                "`with zeroshard.gathered(model, write_rank=0):`"
            )
        self._record(model)


def _is_functional_call() -> bool:
    """Return whether torch.func.functional_call is running: it replaces the parameters for one call."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not stateless._functional_call.__code__:
        frame = frame.f_back
    return frame is not None
