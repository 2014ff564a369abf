"""What the ranks of a rehearsal record, and the checks that compare the records. It imports no torch.

A rank compares nothing itself: it records checksums, bytes and counts (rehearse_rank.py), also those of a run that
fails. So no check needs a collective, and none can hang.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from zeroshard.utils.format import format_bytes

PASSED, WARNING, FAILED, NOT_CHECKED = "passed", "warning", "failed", "not checked"
STATIC_KINDS = ("parameters", "master weights")  # their bytes depend on nothing that a loop does
TOLERANCE = 0.01
COUNTER_BYTES = 16384  # of step counters and alignment
SMALL_BYTES = 65536  # of small all-reduces in a step: which parameters are unused, norms, a digest of the options


@dataclass
class ModelRecord:
    """What one rank records of one sharded model."""

    name: str
    stage: int = 0
    precision: str = ""
    parameter_bytes: int = 0  # of all parameters, in the compute dtype
    data_ranks: int = 1  # ranks that gradients are averaged over
    data_rank: int = 0
    shard_rank: int = 0
    tensor_rank: int = 0
    replica: int = 0  # of those that train alone: Config.local_steps
    is_partitioned: bool = False  # whether each rank has only a shard of the parameters
    start: str | None = None  # checksum of the weights given to shard(); None: none, as on the meta device
    batches: list[str] = field(default_factory=list)  # checksums of the inputs of forwards with gradients
    steps: int = 0
    values: dict[str, dict[str, str]] = field(default_factory=dict)  # by moment: checksum by parameter name
    not_finite: list[str] = field(default_factory=list)
    read: list[str] = field(default_factory=list)  # "parameters", "gradients": whether trained ones could be read
    unread: list[str] = field(default_factory=list)  # and whether some could not, because they are offloaded
    options: str = ""  # of the optimizer's groups, after the last step
    events: int = 0  # in the recorded order of collectives
    traffic: dict[str, tuple[int, int]] = field(default_factory=dict)  # number and bytes of collectives, by kind
    step_traffic: dict[str, tuple[int, int]] = field(default_factory=dict)  # the same of the last step
    formula_traffic: dict[str, int] = field(default_factory=dict)  # bytes of a step by the formula
    backwards: int | None = None  # of the last step; None: in its closure
    held: dict[str, int] = field(default_factory=dict)  # bytes after the last step, by "kind, tier"
    predicted: dict[str, int] = field(default_factory=dict)
    peak: int = 0  # bytes on the device
    peak_bound: int = 0


@dataclass
class RankRecord:
    """What one rank records."""

    rank: int
    device: str = ""
    backend: str = ""
    notes: list[str] = field(default_factory=list)  # how the rehearsal differs from the real job
    models: list[ModelRecord] = field(default_factory=list)
    plain_steps: int = 0  # of optimizers that are not sharded, before shard() was called
    is_finished: bool = False  # whether it has made all steps of the rehearsal
    has_ended: bool = False  # whether the script has ended by itself
    allocated: int = 0  # bytes on the GPU at the peak; 0 without one
    reserved: int = 0
    host: int = 0  # bytes of resident host memory at the peak

    def to_json(self) -> str:
        """Return the record as JSON text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> RankRecord:
        """Return the record of a JSON text.

        >>> RankRecord.from_json(RankRecord(3, models=[ModelRecord("GPT")]).to_json()).models[0].name
        'GPT'
        """
        fields: dict[str, Any] = json.loads(text)
        return cls(**{**fields, "models": [ModelRecord(**model) for model in fields["models"]]})


@dataclass(frozen=True)
class RehearsalCheck:
    """The result of one check."""

    name: str
    status: str
    text: str


def run_checks(records: list[RankRecord], ranks: int, steps: int, disagreement: str = "") -> list[RehearsalCheck]:
    """Return the results of all checks. ``disagreement``: the text of a RanksDisagreeError that ended the run."""
    checks = [_check_steps(records, ranks, steps)]
    if disagreement:
        checks.append(RehearsalCheck("collectives", FAILED, disagreement))
    count = max((len(record.models) for record in records), default=0)
    for index in range(count):
        models = {record.rank: record.models[index] for record in records if len(record.models) > index}
        found = [check(models) for check in _MODEL_CHECKS if not (disagreement and check is _check_collectives)]
        suffix = f", {_first(models).name} {index + 1}" if count > 1 else ""
        checks += [RehearsalCheck(check.name + suffix, check.status, check.text) for check in found]
    return checks


def _check_steps(records: list[RankRecord], ranks: int, wanted: int) -> RehearsalCheck:
    def result(status: str, text: str) -> RehearsalCheck:
        return RehearsalCheck("steps", status, text)

    has_ended = len(records) == ranks and all(record.has_ended or record.is_finished for record in records)
    unsharded = [record.rank for record in records if not record.models]
    if unsharded or len(records) < ranks:
        missing = sorted({*unsharded, *(set(range(ranks)) - {record.rank for record in records})})
        stepped = max((record.plain_steps for record in records), default=0)
        seen = f" An optimizer that is not sharded made {stepped} steps." if stepped else ""
        where = "any rank" if len(missing) == ranks else name_ranks(missing)
        what = f"zeroshard.shard() was not called on {where}"
        if not has_ended:
            what = f"the run ended before zeroshard.shard() had returned on {where}"
        return result(FAILED, f"{what}.{seen} There is nothing to check without it")
    done = {record.rank: max(model.steps for model in record.models) for record in records}
    if len(set(done.values())) > 1:
        return result(FAILED, "; ".join(f"{who}: {number} of {wanted}" for who, number in _by_value(done)))
    number = done[records[0].rank]
    if not number and has_ended:
        return result(FAILED, "no optimizer that shard() returned was stepped: call its step()")
    if has_ended and not all(record.is_finished for record in records):
        return result(PASSED, f"the script ended by itself after {number} of {wanted} on {_all(ranks)}")
    return result(PASSED if has_ended else FAILED, f"{number} of {wanted} on {_all(ranks)}")


def _check_collectives(models: Mapping[int, ModelRecord]) -> RehearsalCheck:
    """Check that all ranks ran the same collectives. (zeroshard has compared their order while they ran.)"""

    def result(status: str, text: str) -> RehearsalCheck:
        return RehearsalCheck("collectives", status, text)

    first = _first(models)
    if first.data_ranks == 1 and len(models) == 1:
        return result(NOT_CHECKED, "one rank has no collectives")
    if (reason := _incomparable(models)) is not None:
        return result(NOT_CHECKED, reason)
    difference = _difference(models, lambda model: (model.events, _equal_traffic(model)))
    if difference is not None:
        return result(FAILED, f"different collectives on {difference}: look for a branch on the rank around the model")
    counts = ", ".join(f"{number} {kind}" for kind, (number, _) in first.step_traffic.items())
    events = f"{first.events} events in {_count(first.steps, 'step')}"
    return result(PASSED, f"the same order on {_all(len(models))}, {events}; last step: {counts}")


def _equal_traffic(model: ModelRecord) -> dict[str, Any]:
    """Return the traffic that is the same on all ranks: owners of whole parameters send different bytes."""
    return {kind: traffic[0] if kind == "all-to-all" else traffic for kind, traffic in model.traffic.items()}


def _check_traffic(models: Mapping[int, ModelRecord]) -> RehearsalCheck:
    def result(status: str, text: str) -> RehearsalCheck:
        return RehearsalCheck("traffic", status, text)

    model = _first(models)
    if not model.formula_traffic or not model.steps:
        reason = "no collectives of a step" if model.data_ranks == 1 else "the formula is not for frozen parameters"
        reason = "the backward is in a closure" if model.backwards is None else reason
        return result(NOT_CHECKED, reason if model.steps else "no step")
    kinds = (f"{axis}{kind}" for kind in ("all-gather", "reduce-scatter") for axis in ("", "outer "))
    measured = {kind: model.step_traffic.get(kind, (0, 0))[1] for kind in kinds}
    reduced = model.step_traffic.get("all-reduce", (0, 0))[1]
    formula = model.formula_traffic
    is_equal = all(nbytes == formula.get(kind, 0) for kind, nbytes in measured.items())
    surplus = reduced - formula.get("all-reduce", 0)
    is_equal = is_equal and 0 <= surplus <= SMALL_BYTES + TOLERANCE * formula.get("all-reduce", 0)
    total, expected = sum(measured.values()) + reduced, sum(formula.values())
    psi = f"{total / model.parameter_bytes:.2f}Ψ" if model.parameter_bytes else "0Ψ"
    text = f"{format_bytes(total)} in the last step ({psi}), by the formula {format_bytes(expected)}"
    if is_equal:
        return result(PASSED, text)
    backwards = _count(model.backwards or 0, "backward")
    return result(
        WARNING,
        f"{text} for {backwards}. An evaluation, a unit that runs several times or no_sync() changes it; else look for "
        "forwards without a backward",
    )


def _check_memory(models: Mapping[int, ModelRecord]) -> RehearsalCheck:
    """Check that the states of each rank have the bytes of the shard plan, and that ranks have equal bytes."""
    if not any(model.steps for model in models.values()):
        return RehearsalCheck("memory", NOT_CHECKED, "no step")
    problems: dict[str, str] = {}  # by kind and tier
    for key in dict.fromkeys(key for model in models.values() for key in model.held):
        found = {rank: model.held.get(key, 0) for rank, model in models.items()}
        for rank, nbytes in found.items():
            planned = models[rank].predicted.get(key, 0)
            if nbytes > planned + _slack(planned):
                problems[key] = f"rank {rank} has {format_bytes(nbytes)} of {key}, planned {format_bytes(planned)}"
                break
        for group in _by_tensor_rank(models) if _has_same_steps(models) else ():
            held = [found[rank] for rank in group]
            is_same_plan = len({models[rank].predicted.get(key, 0) for rank in group}) == 1  # not of owners
            if is_same_plan and max(held) - min(held) > _slack(max(held)):
                each = ", ".join(f"{format_bytes(nbytes)} on {who}" for who, nbytes in _by_value(found))
                problems.setdefault(key, f"ranks have different bytes of {key}: {each}")
    if problems:
        is_static = any(key.startswith(STATIC_KINDS) for key in problems)
        return RehearsalCheck("memory", FAILED if is_static else WARNING, "; ".join(problems.values()))
    first = _first(models)
    held_bytes, planned_bytes = sum(first.held.values()), sum(first.predicted.values())
    text = f"{format_bytes(held_bytes)} of states per rank, planned {format_bytes(planned_bytes)}"
    if first.peak > first.peak_bound:
        peak = f"{format_bytes(first.peak)}, bound {format_bytes(first.peak_bound)}"
        return RehearsalCheck(
            "memory",
            WARNING,
            f"{text}, but the peak of parameters, gradients and buffers is {peak}: gathered(), no_sync(), "
            "state_dict() or a unit inside another one takes more",
        )
    return RehearsalCheck("memory", PASSED, f"{text}; peak without activations {format_bytes(first.peak)}")


def _slack(nbytes: int) -> float:
    """Return by how many bytes states may differ: the padding of a shard has no optimizer states."""
    return TOLERANCE * nbytes + COUNTER_BYTES


def _by_tensor_rank(models: Mapping[int, ModelRecord]) -> Iterable[list[int]]:
    """Yield the ranks that have the same part of the model, by their place on the tensor axis."""
    for tensor_rank in sorted({model.tensor_rank for model in models.values()}):
        yield [rank for rank, model in models.items() if model.tensor_rank == tensor_rank]


def _check_replicas(models: Mapping[int, ModelRecord]) -> RehearsalCheck:
    """Check that ranks with copies of the same values have the same bits."""

    def result(status: str, text: str) -> RehearsalCheck:
        return RehearsalCheck("replicas", status, text)

    first = _first(models)
    groups: dict[Hashable, list[int]] = {}
    for rank, model in models.items():
        shard_rank = model.shard_rank if model.is_partitioned else 0
        groups.setdefault((model.replica, shard_rank, model.tensor_rank), []).append(rank)
    copies = [group for group in groups.values() if len(group) > 1]
    if not copies:
        reason = "each value is on one rank only" if len(models) > 1 else "one rank"
        return result(NOT_CHECKED, reason)
    moments = [when for when in first.values if all(when in model.values for model in models.values())]
    if not any(model.values[when] for model in models.values() for when in moments):
        return result(NOT_CHECKED, "the values are offloaded, and not read" if moments else "no step")
    for when in moments:
        for group in copies:
            for name in models[group[0]].values[when]:
                found = {rank: models[rank].values[when].get(name) for rank in group}
                if len(set(found.values())) > 1:
                    return result(
                        FAILED,
                        f"{name!r} differs {when} on {name_ranks(_minority(found))}: something changes it on some "
                        "ranks only, such as an edit under `if rank == …`",
                    )
    what = "shards of replicas" if first.is_partitioned else "parameters"
    text = f"{what} have the same bits in {_count(len(moments), 'comparison')}" + _unread(models, "parameters")
    return result(PASSED, text)


def _unread(models: Mapping[int, ModelRecord], *kinds: str) -> str:
    """Return which of these kinds could not be read everywhere, as the end of a sentence; "" if all could."""
    unread = [kind for kind in kinds if any(kind in model.unread for model in models.values())]
    return f"; offloaded {' and '.join(unread)} are not read" if unread else ""


def _check_finite(models: Mapping[int, ModelRecord]) -> RehearsalCheck:
    found = {rank: model.not_finite for rank, model in models.items() if model.not_finite}
    if found:
        rank, texts = next(iter(found.items()))
        more = sum(map(len, found.values())) - 1
        is_scaled = _first(models).precision == "fp16" and all("gradient" in text for t in found.values() for text in t)
        hint = "fp16 skips such a step and halves the loss scale" if is_scaled else "look at the loss and learning rate"
        text = f"rank {rank}: {texts[0]} is not finite" + (f", and {more} more" if more else "") + f": {hint}"
        return RehearsalCheck("finite", WARNING if is_scaled else FAILED, text)
    kinds = [kind for kind in ("parameters", "gradients") if any(kind in model.read for model in models.values())]
    if not kinds:
        is_offloaded = any(model.unread for model in models.values())
        reason = "parameters and gradients are offloaded, and not read" if is_offloaded else "no step"
        return RehearsalCheck("finite", NOT_CHECKED, reason)
    text = f"{' and '.join(kinds)} are finite" + _unread(models, "parameters", "gradients")
    return RehearsalCheck("finite", PASSED, text)


def _check_options(models: Mapping[int, ModelRecord]) -> RehearsalCheck:
    if len(models) < 2 or (reason := _incomparable(models)) is not None:
        return RehearsalCheck("optimizer", NOT_CHECKED, "one rank" if len(models) < 2 else str(reason))
    difference = _difference(models, lambda model: model.options)
    if difference is not None:
        text = f"different options on {difference}: set learning rates and weight decay from what all ranks know"
        return RehearsalCheck("optimizer", FAILED, text)
    return RehearsalCheck("optimizer", PASSED, f"the same options on {_all(len(models))}")


def _check_data(models: Mapping[int, ModelRecord]) -> RehearsalCheck:
    """Check that data-parallel ranks get different batches, and the ranks of one tensor axis the same."""

    def result(status: str, text: str) -> RehearsalCheck:
        return RehearsalCheck("data", status, text)

    count = min(len(model.batches) for model in models.values())
    if _first(models).data_ranks == 1 and len(models) == 1:
        return result(NOT_CHECKED, "one rank")
    if not count:
        return result(NOT_CHECKED, "not every rank made a forward with gradients that got a tensor")
    for rank, model in models.items():
        first = next(other for other, peer in models.items() if peer.data_rank == model.data_rank)
        if model.batches[:count] != models[first].batches[:count]:
            return result(
                FAILED,
                f"ranks {first} and {rank} compute one model together (tensor axis) and got different batches: draw "
                "them by the data-parallel rank",
            )
    data_ranks = {rank: model for rank, model in models.items() if model.tensor_rank == 0}
    equal: Counter[tuple[int, ...]] = Counter()  # how often these ranks got the same batch
    for position in range(count):
        by_batch: dict[str, list[int]] = {}
        for rank, model in data_ranks.items():
            by_batch.setdefault(model.batches[position], []).append(rank)
        equal.update(tuple(ranks) for ranks in by_batch.values() if len(ranks) > 1)
    if equal:
        ranks, number = equal.most_common(1)[0]
        return result(
            WARNING,
            f"{name_ranks(ranks)} got the same batch in {number} of {_count(count, 'forward')}: the job computes it "
            "several times over. Is a DistributedSampler missing, or a seed without the rank?",
        )
    return result(PASSED, f"different batches on {_all(len(data_ranks), 'data-parallel ranks')}, {count} compared")


def _check_start(models: Mapping[int, ModelRecord]) -> RehearsalCheck:
    starts = {rank: model.start for rank, model in models.items()}
    if len(models) < 2 or None in starts.values():
        reason = "one rank" if len(models) < 2 else "no weights before shard(), as on the meta device"
        return RehearsalCheck("start", NOT_CHECKED, reason)
    others = [rank for rank, start in starts.items() if start != starts[min(starts)]]
    if others:
        text = f"ranks passed different weights to shard() on {name_ranks(others)}: rank 0's count, as with DDP"
        return RehearsalCheck("start", PASSED, text)
    return RehearsalCheck("start", PASSED, f"the same weights on {_all(len(models))}")


_MODEL_CHECKS: tuple[Callable[[Mapping[int, ModelRecord]], RehearsalCheck], ...] = (
    _check_collectives,
    _check_traffic,
    _check_memory,
    _check_replicas,
    _check_finite,
    _check_options,
    _check_data,
    _check_start,
)


# ------------------------------------------------------------------------------------------------- comparing


def _first(models: Mapping[int, ModelRecord]) -> ModelRecord:
    return models[min(models)]


def _has_same_steps(models: Mapping[int, ModelRecord]) -> bool:
    return len({model.steps for model in models.values()}) == 1


def _incomparable(models: Mapping[int, ModelRecord]) -> str | None:
    """Return why the last records of the ranks cannot be compared; None if they can."""
    if not _has_same_steps(models):
        return "the ranks did not make the same number of steps"
    return None if _first(models).steps else "no step"


def _difference(models: Mapping[int, ModelRecord], value: Callable[[ModelRecord], Any]) -> str | None:
    """Return which ranks differ from the others with the same part of the model; None if none does."""
    for ranks in _by_tensor_rank(models):
        found = {rank: repr(value(models[rank])) for rank in ranks}
        if len(set(found.values())) > 1:
            return name_ranks(_minority(found))
    return None


def _minority(found: Mapping[int, Any]) -> list[int]:
    """Return the ranks that have not the most frequent value; all ranks if no value is more frequent than others.

    >>> _minority({0: "a", 1: "b", 2: "a"}), _minority({0: "a", 1: "b"})
    ([1], [0, 1])
    """
    (usual, number), *others = Counter(found.values()).most_common()
    has_usual = not others or others[0][1] < number
    return [rank for rank, value in found.items() if value != usual or not has_usual]


def _by_value(found: Mapping[int, int]) -> Iterable[tuple[str, int]]:
    for value in dict.fromkeys(found.values()):
        yield name_ranks([rank for rank, other in found.items() if other == value]), value


def _count(number: int, what: str) -> str:
    return f"1 {what}" if number == 1 else f"{number} {what}s"


def _all(ranks: int, what: str = "ranks") -> str:
    return f"all {ranks} {what}" if ranks > 1 else "one rank"


def name_ranks(ranks: Iterable[int]) -> str:
    """Return ranks as short text.

    >>> name_ranks([2]), name_ranks([0, 1, 2, 5])
    ('rank 2', 'ranks 0-2, 5')
    """
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    is_single = len(runs) == 1 and len(runs[0]) == 1
    return f"{'rank' if is_single else 'ranks'} {', '.join(texts)}"
