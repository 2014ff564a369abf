"""What the ranks of a rehearsal record, and the checks that compare the records. It imports no torch.

A rank compares nothing itself: it records checksums, bytes and counts (rank.py), also those of a run that
fails. So no check needs a collective, and none can hang.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from zeroshard.utils.format import format_bytes

PASSED, WARNING, FAILED, NOT_CHECKED = "passed", "warning", "failed", "not checked"
STATIC_KINDS = ("parameters", "master weights")  # their bytes depend on nothing that a loop does
TOLERANCE = 1.01
COUNTER_BYTES = 16384


@dataclass
class ModelRecord:
    """What one rank records of one sharded model."""

    name: str
    stage: int = 0
    precision: str = ""
    parameter_bytes: int = 0  # of all parameters, in the compute dtype
    data_rank: int = 0
    tensor_rank: int = 0
    part: str = ""  # of the model's values: ranks with the same text have copies of the same values
    batches: list[int] = field(default_factory=list)  # checksums of the inputs of forwards with gradients
    steps: int = 0
    values: dict[str, dict[str, list[int]]] = field(default_factory=dict)  # by moment: checksums by parameter name
    not_finite: list[str] = field(default_factory=list)
    has_read: bool = False  # whether some trained parameters could be read
    is_offloaded: bool = False  # whether some could not
    events: int = 0  # in the recorded order of collectives
    collectives: dict[str, int] = field(default_factory=dict)  # number, by kind
    last_step: dict[str, tuple[int, int]] = field(default_factory=dict)  # their number and bytes in it
    held: dict[str, int] = field(default_factory=dict)  # bytes after the last step, by "kind, tier"
    planned: dict[str, int] = field(default_factory=dict)
    peak: int = 0  # bytes on the device
    planned_peak: int | None = None


@dataclass
class RankRecord:
    """What one rank records."""

    rank: int
    backend: str = ""
    notes: list[str] = field(default_factory=list)  # how the rehearsal differs from the real job
    models: list[ModelRecord] = field(default_factory=list)
    plain_steps: int = 0  # of optimizers that are not sharded, before shard() was called
    is_finished: bool = False  # whether it has made all steps of the rehearsal
    has_ended: bool = False  # whether the script has ended by itself
    allocated: int = 0  # bytes on the GPU at the peak; 0 without one
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


Models = Mapping[int, ModelRecord]  # by rank


def run_checks(records: list[RankRecord], ranks: int, steps: int, disagreement: str = "") -> list[RehearsalCheck]:
    """Return the results of all checks. ``disagreement``: the text of a RanksDisagreeError that ended the run."""
    checks = [RehearsalCheck("steps", *_check_steps(records, ranks, steps))]
    if disagreement:
        checks.append(RehearsalCheck("collectives", FAILED, disagreement))
    count = max((len(record.models) for record in records), default=0)
    for index in range(count):
        models = {record.rank: record.models[index] for record in records if len(record.models) > index}
        suffix = f", {_first(models).name} {index + 1}" if count > 1 else ""
        for name, check in _MODEL_CHECKS.items():
            if not (disagreement and check is _check_collectives):
                checks.append(RehearsalCheck(name + suffix, *check(models)))
    return checks


def _check_steps(records: list[RankRecord], ranks: int, wanted: int) -> tuple[str, str]:
    has_ended = len(records) == ranks and all(record.has_ended or record.is_finished for record in records)
    done = {record.rank: max(model.steps for model in record.models) for record in records if record.models}
    missing = set(range(ranks)) - done.keys()
    if missing:
        where = "any rank" if len(missing) == ranks else name_ranks(missing)
        stepped = max((record.plain_steps for record in records), default=0)
        seen = f" An optimizer that is not sharded made {stepped} steps." if stepped else ""
        what = f"zeroshard.shard() was not called on {where}"
        if not has_ended:
            what = f"the run ended before zeroshard.shard() had returned on {where}"
        return FAILED, f"{what}.{seen} There is nothing to check without it"
    if len(set(done.values())) > 1:
        return FAILED, ", ".join(f"rank {rank}: {number} of {wanted}" for rank, number in done.items())
    number = done[0]
    if has_ended and not number:
        return FAILED, "no optimizer that shard() returned was stepped: call its step()"
    itself = "" if all(record.is_finished for record in records) else "; the script ended by itself"
    return PASSED if has_ended else FAILED, f"{number} of {wanted} on all ranks{itself if has_ended else ''}"


def _check_collectives(models: Models) -> tuple[str, str]:
    """Check that all ranks ran the same collectives. (zeroshard has compared their order while they ran.)"""
    first = _first(models)
    if len(models) == 1:
        return NOT_CHECKED, "one rank has no collectives"
    if {model.steps for model in models.values()} != {first.steps or None}:
        return NOT_CHECKED, "the ranks did not make the same steps, or none"
    for tensor_rank in {model.tensor_rank for model in models.values()}:
        group = {rank: model for rank, model in models.items() if model.tensor_rank == tensor_rank}
        found = {rank: repr((model.events, model.collectives)) for rank, model in group.items()}
        if len(set(found.values())) > 1:
            who = name_ranks(_minority(found))
            return FAILED, f"different collectives on {who}: look for a branch on the rank around the model"
    counts = ", ".join(f"{number} {kind}" for kind, (number, _) in first.last_step.items())
    moved = sum(nbytes for _, nbytes in first.last_step.values())
    psi = moved / max(first.parameter_bytes, 1)
    text = f"the same order on all {len(models)} ranks, {first.events} events"
    return PASSED, f"{text}; last step: {counts}, {format_bytes(moved)} ({psi:.2f}Ψ)"


def _check_memory(models: Models) -> tuple[str, str]:
    """Check that the states of each rank have at most the bytes that the planner predicts, and so the peak."""
    first = _first(models)
    if not first.steps:
        return NOT_CHECKED, "no step"
    problems: dict[str, str] = {}  # by kind and tier
    for rank, model in models.items():
        for key, nbytes in model.held.items():
            planned = model.planned.get(key, 0)
            if nbytes > _limit(planned):
                text = f"rank {rank} has {format_bytes(nbytes)} of {key}, planned {format_bytes(planned)}"
                problems.setdefault(key, text)
    if problems:
        is_static = any(key.startswith(STATIC_KINDS) for key in problems)
        return FAILED if is_static else WARNING, "; ".join(problems.values())
    held, planned = sum(first.held.values()), sum(first.planned.values())
    text = f"{format_bytes(held)} of states per rank, planned {format_bytes(planned)}"
    peak = f"peak without activations {format_bytes(first.peak)}"
    if first.planned_peak is not None and first.peak > _limit(first.planned_peak):
        why = "gathered(), no_sync(), state_dict() or a unit inside another one takes more"
        return WARNING, f"{text}, but {peak}, planned {format_bytes(first.planned_peak)}: {why}"
    return PASSED, f"{text}; {peak}"


def _limit(planned: int) -> float:
    """Return the most bytes that are as planned: step counters and the alignment of buffers come on top."""
    return TOLERANCE * planned + COUNTER_BYTES


def _check_replicas(models: Models) -> tuple[str, str]:
    """Check that ranks with copies of the same values have the same bits."""
    parts: dict[str, list[int]] = {}
    for rank, model in models.items():
        parts.setdefault(model.part, []).append(rank)
    copies = [ranks for ranks in parts.values() if len(ranks) > 1]
    if not copies:
        return NOT_CHECKED, "each value is on one rank only"
    moments = [when for when in _first(models).values if all(model.values.get(when) for model in models.values())]
    if not moments:
        return NOT_CHECKED, "no step, or the values are offloaded and not read"
    for when in moments:
        for ranks in copies:
            for name in models[ranks[0]].values[when]:
                found = {rank: repr(models[rank].values[when].get(name)) for rank in ranks}
                if len(set(found.values())) > 1:
                    return FAILED, (
                        f"{name!r} differs {when} on {name_ranks(_minority(found))}: something changes it on some "
                        "ranks only, such as an edit under `if rank == …`"
                    )
    return PASSED, f"the same bits in {len(moments)} comparisons{_unread(models)}"


def _unread(models: Models) -> str:
    return "; offloaded parameters are not read" if any(model.is_offloaded for model in models.values()) else ""


def _check_finite(models: Models) -> tuple[str, str]:
    for rank, model in models.items():
        if model.not_finite:
            return FAILED, f"rank {rank}: {model.not_finite[0]} is not finite: look at the loss and the learning rate"
    if not any(model.has_read for model in models.values()):
        return NOT_CHECKED, "no step, or the values are offloaded and not read"
    return PASSED, f"parameters are finite{_unread(models)}"


def _check_data(models: Models) -> tuple[str, str]:
    """Check that data-parallel ranks get different batches, and the ranks of one tensor axis the same."""
    count = min(len(model.batches) for model in models.values())
    if len(models) == 1 or not count:
        return NOT_CHECKED, "one rank, or not every rank made a forward with gradients that got a tensor"
    equal: Counter[tuple[int, ...]] = Counter()  # how often these ranks got the same batch
    for position in range(count):
        first_of: dict[int, int] = {}  # rank, by data rank
        ranks_by_batch: dict[int, list[int]] = {}
        for rank, model in models.items():
            first = first_of.setdefault(model.data_rank, rank)
            batch = model.batches[position]
            if batch != models[first].batches[position]:
                return FAILED, (
                    f"ranks {first} and {rank} compute one model together (tensor axis) and got different batches: "
                    "draw them by the data-parallel rank"
                )
            if first == rank:
                ranks_by_batch.setdefault(batch, []).append(rank)
        equal.update(tuple(ranks) for ranks in ranks_by_batch.values() if len(ranks) > 1)
    if equal:
        same, number = equal.most_common(1)[0]
        return WARNING, (
            f"{name_ranks(same)} got the same batch in {number} of {count} forwards: the job computes it several "
            "times over. Is a DistributedSampler missing, or a seed without the rank?"
        )
    return PASSED, f"different batches on all data-parallel ranks, {count} compared"


_MODEL_CHECKS: dict[str, Callable[[Models], tuple[str, str]]] = {
    "collectives": _check_collectives,
    "memory": _check_memory,
    "replicas": _check_replicas,
    "finite": _check_finite,
    "data": _check_data,
}


# ------------------------------------------------------------------------------------------------- comparing


def _first(models: Models) -> ModelRecord:
    return models[min(models)]


def _minority(found: Mapping[int, str]) -> list[int]:
    """Return the ranks that have not the most frequent value; all ranks if no value is more frequent than others.

    >>> _minority({0: "a", 1: "b", 2: "a"}), _minority({0: "a", 1: "b"})
    ([1], [0, 1])
    """
    (usual, number), *others = Counter(found.values()).most_common()
    has_usual = not others or others[0][1] < number
    return [rank for rank, value in found.items() if value != usual or not has_usual]


def name_ranks(ranks: Iterable[int]) -> str:
    """Return ranks as short text.

    >>> name_ranks([2]), name_ranks([0, 1, 5])
    ('rank 2', 'ranks 0, 1, 5')
    """
    found = sorted(ranks)
    return f"{'rank' if len(found) == 1 else 'ranks'} {', '.join(map(str, found))}"
