"""One rank of `zeroshard rehearse`: runs the user's script, records what it does, and ends it after some steps.

[Note: what a rehearsal replaces]
The script runs as `__main__`, as torchrun would run it, in a process that serves only the rehearsal. In this process
two functions are replaced until the script ends: ``torch.distributed.init_process_group``, where GPUs are missing or
shared, and ``shard_model``, to know which models are sharded. The rest are public hooks: before and after the step of
any optimizer, and before the forward of a sharded model.

[Note: a GPU for several ranks]
If there are fewer GPUs than ranks, the rehearsal looks to the script like machines with that many GPUs each:
``LOCAL_RANK`` is the rank modulo the number of GPUs, ``LOCAL_WORLD_SIZE`` is that number. NCCL refuses two ranks on one
GPU only if they seem to be on the same host, so each rank gets its own host id. ``device_id=`` is dropped: with it, a
mesh splits NCCL's communicator, which crashes if ranks share a GPU.

[Note: how a rehearsal ends]
After the last step a rank waits for the others in the hook after ``step()``, so that none of them loses its peer. Then
the hook raises ``SystemExit``, which ``except Exception`` does not catch. If the script goes on all the same, the next
step raises again, and the launcher kills what still runs after some seconds: the record is already written.
"""

from __future__ import annotations

import contextlib
import faulthandler
import hashlib
import inspect
import json
import os
import resource
import runpy
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch._compile
import torch.distributed as dist
from torch import nn
from torch.distributed import device_mesh, distributed_c10d
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from zeroshard.cli.rehearse_checks import ModelRecord, RankRecord
from zeroshard.comm import RanksDisagreeError
from zeroshard.engine import Engine, FlatParam
from zeroshard.optim import ShardedOptimizer, state_bytes_per_element
from zeroshard.planner import WholeOwners, WholeParamSpec, count_states
from zeroshard.train import report_failure
from zeroshard.utils.tree import tensors_in

# NCCL between ranks that share a GPU: over loopback sockets. Ranks take turns on the GPU, and in each turn pass on what
# a buffer holds, so large buffers are faster.
NCCL_ON_SHARED_GPU = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_ALGO": "Ring",
    "NCCL_PROTO": "Simple",
    "NCCL_BUFFSIZE": str(2**24),
    "NCCL_SOCKET_NTHREADS": "2",
    "NCCL_NSOCKS_PERTHREAD": "4",
}
END_FILE = "end"  # the launcher creates it when all ranks have made their steps
MAX_BATCHES = 64  # forwards whose inputs are compared
MAX_COMPARED_STEPS = 10  # first steps whose values are compared; of later ones, only the last
MAX_NOT_FINITE = 100  # values that are listed
CHUNK_WORDS = 2**18  # of 4 bytes: a checksum needs little memory
CHECKSUM_MODULUS = 2**52 - 47
POLL_SECONDS = 0.05


@dataclass(frozen=True)
class RehearsalSettings:
    """What the launcher tells its ranks."""

    steps: int
    gpus: int  # of this machine; 0: the ranks use gloo
    ranks: int
    deadline: float  # of the whole run, in seconds since the epoch
    is_quiet: bool  # whether rank 0's standard output goes to standard error

    @property
    def shares_gpus(self) -> bool:
        """Whether several ranks use one GPU: see [Note: a GPU for several ranks]."""
        return 0 < self.gpus < self.ranks


def main() -> None:
    """Run as a rank. Arguments: the directory of the rehearsal, "script" or "module", and the script's command line."""
    directory, kind, *command = sys.argv[1:]
    settings = RehearsalSettings(**json.loads(Path(directory, "settings.json").read_text()))
    rank = int(os.environ["RANK"])
    _prepare_process(Path(directory), rank, settings)
    recorder = RankRecorder(Path(directory), rank, settings)
    try:
        with recorder.installed():
            _run_script(kind, command)
    except BaseException as error:
        has_failed = not isinstance(error, SystemExit) or error.code not in (None, 0)
        if recorder.record.is_finished and dist.is_initialized():
            dist.destroy_process_group()  # the script could not: NCCL may wait for it at exit
        if recorder.record.is_finished or not has_failed:
            recorder.end()
            raise
        recorder.write()
        _shorten_traceback(error)
        report_failure(error, rank)
        sys.excepthook = lambda *_: None  # the launcher shows it; zeroshard still tells the other ranks of it
        raise
    recorder.end()


def _run_script(kind: str, command: Sequence[str]) -> None:
    """Run a script or a module as Python itself would."""
    sys.argv[:] = command
    if sys.path[:1] == [""]:  # of `python -c`
        del sys.path[0]
    sys.path.insert(0, os.getcwd() if kind == "module" else str(Path(command[0]).resolve().parent))
    if kind == "module":
        runpy.run_module(command[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(command[0], run_name="__main__")


def _prepare_process(directory: Path, rank: int, settings: RehearsalSettings) -> None:
    """Set this process's environment, standard streams and stack dumps, and end it if the launcher is gone."""
    if settings.shares_gpus:
        os.environ.update(local_rank_environment(rank, settings.ranks, settings.gpus))
        share_gpu(f"rehearsal-{rank}")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    if rank:
        log = os.open(directory / f"{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
    elif settings.is_quiet:
        os.dup2(2, 1)
    stacks = open(directory / f"{rank}.stacks", "w")  # noqa: SIM115  # open until the process ends
    faulthandler.enable()
    faulthandler.dump_traceback_later(max(0.1, settings.deadline - time.time()), file=stacks)
    threading.Thread(target=_end_with_launcher, args=(os.getppid(),), daemon=True).start()


def share_gpu(host_id: str) -> None:
    """Have NCCL accept this rank on a GPU that others use; see [Note: a GPU for several ranks]. Set variables stay."""
    os.environ.update({**NCCL_ON_SHARED_GPU, **os.environ, "NCCL_HOSTID": host_id})


def local_rank_environment(rank: int, ranks: int, gpus: int) -> dict[str, str]:
    """Return the variables of a rank as if each machine had this many GPUs: see [Note: a GPU for several ranks].

    >>> [local_rank_environment(rank, ranks=3, gpus=2)["LOCAL_RANK"] for rank in range(3)]
    ['0', '1', '0']
    >>> local_rank_environment(2, ranks=3, gpus=2)["LOCAL_WORLD_SIZE"]
    '1'
    """
    node, local_rank = divmod(rank, gpus)
    return {
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(min(gpus, ranks - node * gpus)),
        "GROUP_RANK": str(node),
    }


def _end_with_launcher(launcher: int) -> None:
    while os.getppid() == launcher:
        time.sleep(1)
    os.killpg(0, signal.SIGKILL)


def _shorten_traceback(error: BaseException) -> None:
    """Remove the frames before the script's first; of a RanksDisagreeError, which says it all, those after its last."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
        frames = frames.tb_next
    if frames is not None:
        error.__traceback__ = frames
    if isinstance(error, RanksDisagreeError) and frames is not None:
        libraries = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]), contextlib.__file__)
        last = frames
        while frames is not None:
            last = last if frames.tb_frame.f_code.co_filename.startswith(libraries) else frames
            frames = frames.tb_next
        last.tb_next = None
        error.__cause__, error.__suppress_context__ = None, True


class RankRecorder:
    """Records what the script does on this rank, and ends it after the steps of the rehearsal."""

    def __init__(self, directory: Path, rank: int, settings: RehearsalSettings) -> None:
        self.record = RankRecord(rank)
        self._directory, self._settings = directory, settings
        self._sharded: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[ModelRecord, Engine]]
        self._sharded = weakref.WeakKeyDictionary()
        self._is_sharding = False  # shard() steps copies of an optimizer to test it

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Install the hooks: see [Note: what a rehearsal replaces]."""
        auto: Any = import_module("zeroshard.auto")  # where shard() finds ``shard_model``
        shard_model, init_process_group = auto.shard_model, dist.init_process_group
        modules: tuple[Any, ...] = (dist, distributed_c10d, device_mesh)
        handles = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        auto.shard_model = partial(self._shard_model, shard_model)
        for module in modules:
            module.init_process_group = partial(self._init_process_group, init_process_group)
        try:
            yield
        finally:
            auto.shard_model = shard_model
            for module in modules:
                module.init_process_group = init_process_group
            for handle in handles:
                handle.remove()

    # -- what is replaced ---------------------------------------------------------------------------------------

    def _init_process_group(self, init_process_group: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Join the process group, on gloo if there is no GPU: see [Note: what a rehearsal replaces]."""
        bound = inspect.signature(init_process_group).bind(*args, **kwargs)
        settings, arguments = self._settings, bound.arguments
        if not settings.gpus and "nccl" in str(arguments.get("backend")).lower():
            self._note(f"no GPU here: gloo in the place of {arguments['backend']}")
            arguments["backend"] = "gloo"
        if arguments.get("device_id") is not None and (settings.shares_gpus or not settings.gpus):
            device = arguments.pop("device_id")
            self._note("init_process_group() without its device_id=, which needs a GPU for each rank")
            index = device if isinstance(device, int) else device.index
            if settings.gpus and index is not None:
                torch.cuda.set_device(index)
        init_process_group(*bound.args, **bound.kwargs)
        backends = str(dist.get_backend_config()).split(",")  # such as "cpu:gloo,cuda:gloo"
        self.record.backend = ", ".join(dict.fromkeys(backend.rpartition(":")[2] for backend in backends))

    def _note(self, text: str) -> None:
        if text not in self.record.notes:
            self.record.notes.append(text)

    def _shard_model(self, shard_model: Callable[..., Any], model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Shard a model and begin its record."""
        if args and isinstance(args[0], (list, tuple)):
            raise ValueError(f"zeroshard rehearse checks a model with one optimizer, got a list of {len(args[0])}")
        start = _checksum_weights(model) if isinstance(model, nn.Module) else None
        self._is_sharding = True
        try:
            with _without_hooks_of(self):
                sharded, optimizer = shard_model(model, *args, **kwargs)
        finally:
            self._is_sharding = False
        engine: Engine = vars(model)["_zeroshard"].engine
        record = _begin_record(model, engine)
        record.start = start
        if optimizer is not None:
            self._sharded[optimizer] = record, engine
            record.predicted, record.peak_bound = predict_bytes(engine, optimizer)
        self.record.models.append(record)
        self.record.device = str(engine.comm.device)
        model.register_forward_pre_hook(partial(_record_batch, record), prepend=True, with_kwargs=True)
        self.write()
        return sharded, optimizer

    # -- steps --------------------------------------------------------------------------------------------------

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self.record.is_finished:
            raise SystemExit(0)  # again: the script has caught it
        sharded = self._sharded.get(optimizer)
        if sharded is not None:
            record, engine = sharded
            has_closure = len(args) > 1 or kwargs.get("closure") is not None
            record.backwards = None if has_closure else engine.backward_count
            _record_values(record, engine, f"before step {record.steps + 1}")
            if record.steps > MAX_COMPARED_STEPS:
                record.values.pop(f"before step {record.steps}", None)

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        sharded = self._sharded.get(optimizer)
        if sharded is not None:
            record, engine = sharded
            record.steps += 1
            _record_step(record, engine, optimizer)
            if record.steps >= self._settings.steps:
                if engine.context.config.offload is None:  # else the update still runs
                    _record_values(record, engine, f"after step {record.steps}")
                self._finish()
            self.write()
        elif not self.record.models and not self._is_sharding:
            self.record.plain_steps += 1
            if self.record.plain_steps >= self._settings.steps:
                self._finish()

    def _finish(self) -> None:
        """Wait until all ranks are here, and end the script: see [Note: how a rehearsal ends]."""
        self.record.is_finished = True
        self.write()
        (self._directory / f"{self.record.rank}.finished").touch()
        while not (self._directory / END_FILE).exists():
            time.sleep(POLL_SECONDS)
        raise SystemExit(0)

    def end(self) -> None:
        """Record that the script has ended without an error."""
        self.record.has_ended = True
        self.write()

    def write(self) -> None:
        """Write the record to a file that the launcher reads, now or if this rank dies later."""
        record = self.record
        usage = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        record.host = usage * (1 if sys.platform == "darwin" else 1024)
        if self._settings.gpus and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            record.allocated, record.reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        path = self._directory / f"{record.rank}.json"
        path.with_suffix(".writing").write_text(record.to_json())
        path.with_suffix(".writing").replace(path)


# ------------------------------------------------------------------------------------------- what is recorded


def _begin_record(model: nn.Module, engine: Engine) -> ModelRecord:
    comm, config = engine.comm, engine.context.config
    data_rank = 0
    for axis in (comm.average_axis, *comm.data_axes):
        data_rank = data_rank * axis.size + axis.rank
    return ModelRecord(
        type(model).__name__,
        config.stage,
        config.precision or "as the model's",
        parameter_bytes=sum(sum(flat.layout.numels) * flat.dtype.itemsize for flat in _flats(engine)),
        data_ranks=comm.data_parallel_size,
        data_rank=data_rank,
        shard_rank=comm.shard_axis.rank,
        tensor_rank=comm.tensor_axis.rank,
        replica=comm.average_axis.rank,
        is_partitioned=engine.context.placement.parameters and comm.shard_axis.size > 1,
    )


@torch._compile._disable_dynamo
def _record_batch(record: ModelRecord, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Record a checksum of the inputs of a forward with gradients."""
    if torch.is_grad_enabled() and len(record.batches) < MAX_BATCHES:
        inputs = [tensor for tensor in tensors_in((args, kwargs)) if _is_plain(tensor)]
        with suppress(RuntimeError):  # inside vmap, a tensor has no bytes
            if inputs:
                record.batches.append(_digest([(str(tensor.shape), checksum(tensor)) for tensor in inputs]))


@torch.no_grad()
def _record_step(record: ModelRecord, engine: Engine, optimizer: torch.optim.Optimizer) -> None:
    """Record what this rank holds after a step, and what it has communicated."""
    counters, tracker = engine.comm.counters, engine.context.tracker
    record.events = engine.order.event_count
    record.traffic = {kind: (traffic.count, traffic.bytes) for kind, traffic in counters.total.items()}
    record.step_traffic = {kind: (traffic.count, traffic.bytes) for kind, traffic in counters.last_step.items()}
    record.formula_traffic = {} if record.backwards is None else formula_traffic(engine, record.backwards)
    kinds = {key.partition(", ")[0] for key in record.predicted}
    held = {f"{kind}, {tier}": nbytes.now for (kind, tier), nbytes in list(tracker.by_kind.items()) if kind in kinds}
    record.held = {key: nbytes for key, nbytes in held.items() if nbytes}
    record.peak = tracker.total.peak - sum(tracker.get(kind).peak for kind in ("activations", "outer optimizer"))
    record.options = repr([_plain_options(group) for group in optimizer.param_groups])
    shards = []
    for flat, gradient in engine.gradients.flat_grads.items():
        if gradient.has_shard and gradient.is_offloaded:
            _add_once(record.unread, "gradients")
        elif gradient.has_shard and gradient.shard is not None:
            _add_once(record.read, "gradients")
            shards.append((flat, gradient.shard))
    flags = [torch.isfinite(shard).all() for _, shard in shards]
    for (flat, _), is_finite in zip(shards, torch.stack(flags).tolist() if flags else (), strict=True):
        if not is_finite and len(record.not_finite) < MAX_NOT_FINITE:
            record.not_finite.append(f"a gradient of {flat.names[0]!r} or its neighbours in step {record.steps}")


def _plain_options(group: dict[str, Any]) -> dict[str, Any]:
    return {
        key: value.tolist() if isinstance(value, torch.Tensor) else value
        for key, value in group.items()
        if key != "params" and isinstance(value, (torch.Tensor, int, float, str, tuple, list, type(None)))
    }


@torch.no_grad()
def _record_values(record: ModelRecord, engine: Engine, when: str) -> None:
    """Record checksums of the values that other ranks have too, and whether all values are finite."""
    has_copies = engine.comm.data_parallel_size > (engine.comm.shard_axis.size if record.is_partitioned else 1)
    results: list[tuple[str, torch.Tensor]] = []
    for unit in engine.units:
        if unit.state.name == "UNSHARDING" and not unit.is_partitioned:
            unit.wait_for_unshard()
        for flat in unit.flats:
            is_trained = flat.spec.is_trainable
            found = _values(flat, unit.is_partitioned, unit.state.name == "UNSHARDED")
            if is_trained:
                _add_once(record.unread if found is None else record.read, "parameters")
            for name, values in found or ():
                # a frozen parameter may be infinite on purpose, such as a mask, and in a dtype without arithmetic
                is_finite = torch.isfinite(values).all() if is_trained else torch.ones((), device=values.device)
                zero = torch.zeros((), dtype=torch.int64, device=values.device)
                number = checksum_tensor(values) if has_copies else zero
                results.append((name, torch.stack([number, is_finite.to(torch.int64)])))
    checksums: dict[str, list[int]] = {}
    for name, result in results:
        checksum_value, finite_flag = result.tolist()
        checksums.setdefault(name, []).append(checksum_value)
        if not finite_flag and len(record.not_finite) < MAX_NOT_FINITE:
            record.not_finite.append(f"{name!r} {when}")
    record.values[when] = {name: _digest(numbers) for name, numbers in checksums.items()} if has_copies else {}


def _add_once(kinds: list[str], kind: str) -> None:
    if kind not in kinds:
        kinds.append(kind)


def _values(flat: FlatParam, is_partitioned: bool, is_unsharded: bool) -> list[tuple[str, torch.Tensor]] | None:
    """Return names and full parameters, or this rank's shards if they are partitioned; None if they cannot be read."""
    if is_partitioned and not _is_away(flat):
        return [(flat.names[index], values) for index, _, values in flat.owned_slices()]
    if is_unsharded and not is_partitioned:
        return [(name, flat.full[flat.layout.range_of_param(index).slice]) for index, name in enumerate(flat.names)]
    return None


def _is_away(flat: FlatParam) -> bool:
    """Return whether a flat's shard is on disk, or not complete yet."""
    tiers = flat.spec.tier_placement
    is_on_disk = tiers.parameters == "disk" or any(tier == "disk" for _, tier in tiers.optimizer)
    return is_on_disk or flat.pending_update is not None


@contextmanager
def _without_hooks_of(owner: object) -> Iterator[None]:
    """Remove an object's hooks on every optimizer's step: shard() tries unknown optimizers only without hooks."""
    removed: list[tuple[Any, dict[int, Any]]] = []
    for hooks in (_global_optimizer_pre_hooks, _global_optimizer_post_hooks):
        own = {key: hook for key, hook in hooks.items() if getattr(hook, "__self__", None) is owner}
        removed.append((hooks, own))
        for key in own:
            del hooks[key]
    try:
        yield
    finally:
        for hooks, own in removed:
            hooks.update(own)


# ------------------------------------------------------------------------------------------------- formulas


def _flats(engine: Engine) -> list[FlatParam]:
    return [flat for unit in engine.units for flat in unit.flats]


def formula_traffic(engine: Engine, backwards: int) -> dict[str, int]:
    """Return the bytes of a step with so many forwards and backwards, by kind of collective.

    As in the paper, which counts the output of an all-gather, the input of a reduce-scatter and twice an all-reduce.
    Empty in stage 3 if parameters are frozen: backward may not need them, and gathers some apart from trained ones.
    """
    comm, placement = engine.comm, engine.context.placement
    trained = [flat for flat in _flats(engine) if flat.spec.is_trainable]
    if placement.parameters and len(trained) < len(_flats(engine)):
        return {}
    gathers, reductions = placement.collectives_per_step(backwards)
    gathered_bytes, traffic = 0, dict[str, int]()
    if comm.shard_axis.size > 1:
        gathered = _flats(engine) if placement.parameters else trained
        gathered_bytes = sum(flat.spec.gather_bytes for flat in gathered)
        has_averaged = engine.context.config.local_steps > 1 and engine.state_guard.replica_steps.are_replicas_equal
        traffic["all-gather"] = (gathers + (has_averaged and not placement.parameters)) * gathered_bytes
        traffic["reduce-scatter"] = reductions * sum(flat.spec.reduce_bytes[0] for flat in trained)
    if comm.shard_axis.factors is not None:  # [Note: two hops]
        inner = comm.shard_axis.factors[1].size
        gathers, reductions = placement.outer_collectives_per_step(backwards)
        traffic["outer all-gather"] = gathers * gathered_bytes // inner
        traffic["outer reduce-scatter"] = reductions * sum(flat.spec.reduce_bytes[-1] for flat in trained)
    if comm.replicate_axes:
        shards = sum(flat.layout.shard_numel * flat.spec.reduce_dtype.itemsize for flat in trained)
        traffic["all-reduce"] = 2 * len(comm.replicate_axes) * reductions * shards
    return traffic


def predict_bytes(engine: Engine, optimizer: ShardedOptimizer) -> tuple[dict[str, int], int]:
    """Return the bytes of states by "kind, tier" from the shard plan, and the bound of the peak on the device.

    The bound is that of docs/architecture.md, "Memory of a step", without activations.
    """
    specs, config = [flat.spec for flat in _flats(engine)], engine.context.config
    states, routing, step_bytes = state_bytes_per_element(optimizer.inner) // 4, optimizer.routing(), 0
    owned_bytes = None
    if routing.whole or routing.matrices:
        group_of = {name: number for number, names in enumerate(optimizer.group_param_names) for name in names}
        whole = {
            name: WholeParamSpec.from_measured(param.elements, param.state_bytes, 0.0, group_of[name])
            for name, param in routing.whole.items()
        }
        for name, matrix in routing.matrices.items():
            whole[name] = WholeParamSpec(matrix.elements, 1.0, matrix.flops, group_of[name], is_on_shards=True)
        owners = WholeOwners(specs, whole, engine.comm.shard_axis.size, config.bucket_size)
        owned_bytes = owners.state_bytes(engine.comm.shard_axis.rank, states)
        step_bytes = owners.step_buffer_bytes([spec for spec in specs if spec.is_optimized])
    on_device, offloaded = count_states(specs, engine.context.placement, states, owned_bytes)
    predicted = {f"{kind}, device": nbytes for kind, nbytes in on_device.items()}
    predicted |= {f"{kind}, {tier}": nbytes for (kind, tier), nbytes in offloaded.items()}
    trained = [spec for spec in specs if spec.is_trainable]
    unit_bytes, payload_bytes = 0, 0
    if engine.context.placement.parameters:
        unit_bytes = max((unit.full_bytes for unit in engine.units), default=0)
        payloads = (sum(flat.spec.gather_buffer_bytes for flat in unit.flats) for unit in engine.units)
        payload_bytes = max(payloads, default=0)
    grad_bytes = max(
        (
            sum(flat.layout.numel * flat.dtype.itemsize for flat in unit.flats if flat.spec.is_trainable)
            for unit in engine.units
        ),
        default=0,
    )
    needs_receive_buffer, shard_count = engine.comm.needs_receive_buffer, engine.comm.shard_axis.size
    slot_bytes = max(
        (
            (bucket.numel * (1 + 1 / shard_count) + received) * spec.reduce_dtype.itemsize
            for spec in trained
            for bucket, received in zip(spec.layout.buckets, spec.receive_numels(needs_receive_buffer), strict=True)
        ),
        default=0,
    )
    ring_bytes = config.ring * 4 * slot_bytes / 3
    step_bytes = max(step_bytes, 4 * min(sum(spec.layout.shard_numel for spec in trained), config.bucket_size))
    feedback_bytes = 0
    if config.error_feedback:
        sent = [spec for spec in trained if spec.reduce_wire is not None]
        feedback_bytes = sum(spec.layout.numel * spec.reduce_dtype.itemsize for spec in sent)
    bound = (
        sum(on_device.values())
        + feedback_bytes
        + sum(spec.inner_sum_bytes for spec in trained)
        + max(2 * unit_bytes + 2 * payload_bytes + 2 * grad_bytes + ring_bytes, step_bytes)
    )
    return predicted, int(bound)


# ------------------------------------------------------------------------------------------------ checksums


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether the bytes of a tensor can be read where it is."""
    has_storage = isinstance(tensor, DTensor) or not is_traceable_wrapper_subclass(tensor)
    return has_storage and tensor.layout is torch.strided and not (tensor.is_meta or tensor.is_nested)


def _checksum_weights(model: nn.Module) -> str | None:
    """Return a checksum of all parameters of a model; None if some cannot be read, as on the meta device."""
    parameters = dict(model.named_parameters())
    if any(not _is_plain(parameter) for parameter in parameters.values()):
        return None
    return _digest([(name, checksum(parameter)) for name, parameter in parameters.items()])


def checksum(tensor: torch.Tensor) -> int:
    """Return a checksum of a tensor's bytes that depends on their order.

    >>> checksum(torch.tensor([1.0, 2.0])) == checksum(torch.tensor([1.0, 2.0]))
    True
    >>> checksum(torch.tensor([1.0, 2.0])) == checksum(torch.tensor([2.0, 1.0]))
    False
    """
    return int(checksum_tensor(tensor).item())


@torch.no_grad()
def checksum_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the checksum of :func:`checksum` as a tensor on the same device: it does not wait for the device."""
    tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach().as_subclass(torch.Tensor)
    data = tensor.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
    length = data.numel() // 4 * 4
    words = data[:length] if data.storage_offset() % 4 == 0 else data[:length].clone()
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    # at most 2^18 words below 2^31, times weights up to 2^10: the sum fits into 64 bits
    for piece in (*torch.split(words.view(torch.int32), CHUNK_WORDS), data[length:]):
        weights = torch.arange(piece.numel(), device=data.device) * 40503 % 1021 + 1
        total = (total * 257 + (piece.to(torch.int64) * weights).sum()) % CHECKSUM_MODULUS
    return total


def _digest(value: object) -> str:
    return hashlib.blake2b(repr(value).encode(), digest_size=8).hexdigest()
