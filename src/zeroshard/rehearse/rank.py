"""One rank of `zeroshard rehearse`: runs the user's script, records what it does, and ends it after some steps.

[Note: what a rehearsal replaces]
The script runs as `__main__`, as torchrun would run it, in a process that serves only the rehearsal. In this process
two functions are replaced until the script ends: ``torch.distributed.init_process_group``, so that ranks meet in a
file that other users cannot open, and where GPUs are missing or shared; ``shard_model``, to know which models are
sharded. The rest are public hooks: before and after the step of any optimizer, and before the forward of a sharded
model.

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

import ctypes
import faulthandler
import inspect
import json
import os
import resource
import runpy
import sys
import time
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._compile
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import FileStore
from torch.distributed import device_mesh, distributed_c10d
from torch.distributed.constants import default_pg_timeout
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.hooks import RemovableHandle

import zeroshard
from zeroshard.comm import RanksDisagreeError
from zeroshard.engine import Engine, FlatParam, Unit
from zeroshard.optim import ShardedOptimizer, state_bytes_per_element
from zeroshard.planner import PredictedMemory, plan_sizes
from zeroshard.rehearse.checks import ModelRecord, RankRecord
from zeroshard.sharding import ShardPlan, UnitSpec
from zeroshard.train import end_with_launcher, report_failure
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
OWN_FILES = (__file__, runpy.__file__, "<frozen runpy>")
END_FILE = "end"  # the launcher creates it when all ranks have made their steps
MAX_BATCHES = 64  # forwards whose inputs are compared
MAX_COMPARED_STEPS = 10  # first steps whose values are compared; of later ones, only the last
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
    end_with_launcher(directory)
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


def _shorten_traceback(error: BaseException) -> None:
    """Remove the frames before the script's first, and what a RanksDisagreeError comes from: it says it all."""
    while error.__traceback__ is not None and error.__traceback__.tb_frame.f_code.co_filename in OWN_FILES:
        error.__traceback__ = error.__traceback__.tb_next
    if isinstance(error, RanksDisagreeError):
        error.__cause__ = None
        error.__suppress_context__ = True


class RankRecorder:
    """Records what the script does on this rank, and ends it after the steps of the rehearsal."""

    def __init__(self, directory: Path, rank: int, settings: RehearsalSettings) -> None:
        self.record = RankRecord(rank)
        self._directory, self._settings = directory, settings
        self._sharded: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[ModelRecord, Engine]]
        self._sharded = weakref.WeakKeyDictionary()
        self._hooks: list[RemovableHandle] = []
        self._stores = 0

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Install the hooks: see [Note: what a rehearsal replaces]."""
        auto: Any = sys.modules[zeroshard.shard.__module__]  # where shard() finds ``shard_model``
        shard_model, init_process_group = auto.shard_model, dist.init_process_group
        modules: tuple[Any, ...] = (dist, distributed_c10d, device_mesh)
        auto.shard_model = partial(self._shard_model, shard_model)
        for module in modules:
            module.init_process_group = partial(self._init_process_group, init_process_group)
        self._add_hooks()
        try:
            yield
        finally:
            auto.shard_model = shard_model
            for module in modules:
                module.init_process_group = init_process_group
            self._remove_hooks()

    def _add_hooks(self) -> None:
        self._hooks.append(register_optimizer_step_pre_hook(self._before_step))
        self._hooks.append(register_optimizer_step_post_hook(self._after_step))

    def _remove_hooks(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    # -- what is replaced ---------------------------------------------------------------------------------------

    def _init_process_group(self, init_process_group: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Join the process group, in a file and on gloo if there is no GPU: see [Note: what a rehearsal replaces]."""
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
        if arguments.get("init_method") in (None, "env://") and arguments.get("store") is None:
            arguments.pop("init_method", None)
            self._stores += 1  # a script may destroy its group and join another: old addresses would stay
            store = FileStore(os.fspath(self._directory / f"store-{self._stores}"), settings.ranks)
            store.set_timeout(arguments.get("timeout") or default_pg_timeout)
            arguments |= {"store": store, "rank": self.record.rank, "world_size": settings.ranks}
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
        self._remove_hooks()  # shard() steps copies of unknown optimizers to test them, but only without hooks
        try:
            sharded, optimizer = shard_model(model, *args, **kwargs)
        finally:
            self._add_hooks()
        engine: Engine = vars(model)["_zeroshard"].engine
        record = _begin_record(model, engine)
        if optimizer is not None:
            self._sharded[optimizer] = record, engine
            _record_plan(record, engine, optimizer)
        self.record.models.append(record)
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
            _record_values(record, engine, f"before step {record.steps + 1}")
            if record.steps > MAX_COMPARED_STEPS:
                record.values.pop(f"before step {record.steps}", None)

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        sharded = self._sharded.get(optimizer)
        if sharded is not None:
            record, engine = sharded
            record.steps += 1
            _record_step(record, engine)
            if record.steps >= self._settings.steps:
                if engine.context.config.offload is None:  # else the update still runs
                    _record_values(record, engine, f"after step {record.steps}")
                self._finish()
            self.write()
        elif not self.record.models:
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
            record.allocated = torch.cuda.max_memory_allocated()
        path = self._directory / f"{record.rank}.json"
        path.with_suffix(".writing").write_text(record.to_json())
        path.with_suffix(".writing").replace(path)


# ------------------------------------------------------------------------------------------- what is recorded


def _begin_record(model: nn.Module, engine: Engine) -> ModelRecord:
    comm, config = engine.comm, engine.context.config
    data_rank = 0
    for axis in (comm.average_axis, *comm.data_axes):
        data_rank = data_rank * axis.size + axis.rank
    shard_rank = comm.shard_axis.rank if engine.context.placement.parameters else 0
    return ModelRecord(
        type(model).__name__,
        config.stage,
        config.precision or "as the model's",
        parameter_bytes=sum(sum(flat.layout.numels) * flat.dtype.itemsize for flat in _flats(engine)),
        data_rank=data_rank,
        tensor_rank=comm.tensor_axis.rank,
        part=f"replica {comm.average_axis.rank}, shard {shard_rank}, tensor {comm.tensor_axis.rank}",
    )


def _flats(engine: Engine) -> list[FlatParam]:
    return [flat for unit in engine.units for flat in unit.flats]


def _record_plan(record: ModelRecord, engine: Engine, optimizer: ShardedOptimizer) -> None:
    """Record the bytes of states and the peak that the planner predicts for this shard plan."""
    units = [UnitSpec(unit.name, [], [], 0, is_block=False) for unit in engine.units]
    sizes = plan_sizes(
        ShardPlan(units, [[flat.spec for flat in unit.flats] for unit in engine.units]),
        engine.context.config,
        engine.context.placement,
        optimizer_states=state_bytes_per_element(optimizer.inner) // 4,
        on_gpu=engine.comm.device.type == "cuda",
    )
    memory = PredictedMemory.from_sizes(sizes)
    planned = {(kind, "device"): nbytes for kind, nbytes in memory.states.items()} | memory.offloaded
    routing = optimizer.routing()
    if routing.whole or routing.matrices:  # each rank has other states
        planned = {key: nbytes for key, nbytes in planned.items() if key[0] != "optimizer states"}
    else:
        record.planned_peak = memory.peak_bytes
    record.planned = {f"{kind}, {tier}": nbytes for (kind, tier), nbytes in planned.items()}


@torch._compile._disable_dynamo
def _record_batch(record: ModelRecord, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Record a checksum of the inputs of a forward with gradients."""
    if torch.is_grad_enabled() and len(record.batches) < MAX_BATCHES:
        inputs = [tensor for tensor in tensors_in((args, kwargs)) if _is_plain(tensor)]
        with suppress(RuntimeError):  # inside vmap, a tensor has no bytes
            if inputs:
                text = repr([(tensor.shape, checksum(tensor)) for tensor in inputs])
                record.batches.append(zlib.crc32(text.encode()))


def _record_step(record: ModelRecord, engine: Engine) -> None:
    """Record what this rank holds after a step, and what it has communicated."""
    counters, tracker = engine.comm.counters, engine.context.tracker
    record.events = engine.order.event_count
    record.collectives = {kind: traffic.count for kind, traffic in counters.total.items()}
    record.last_step = {kind: (traffic.count, traffic.bytes) for kind, traffic in counters.last_step.items()}
    kinds = {key.partition(", ")[0] for key in record.planned}
    held = {f"{kind}, {tier}": nbytes.now for (kind, tier), nbytes in list(tracker.by_kind.items()) if kind in kinds}
    record.held = {key: nbytes for key, nbytes in held.items() if nbytes}
    record.peak = tracker.total.peak - tracker.get("activations").peak


@torch.no_grad()
def _record_values(record: ModelRecord, engine: Engine, when: str) -> None:
    """Record checksums of this rank's values, and whether all trained ones are finite."""
    checksums: dict[str, list[int]] = {}
    for unit in engine.units:
        if unit.state.name == "UNSHARDING" and not unit.is_partitioned:
            unit.wait_for_unshard()
        for flat in unit.flats:
            # a frozen parameter may be infinite on purpose, such as a mask, and in a dtype without arithmetic
            is_trained = flat.spec.is_trainable
            found = _values(flat, unit)
            if is_trained:
                record.has_read |= found is not None
                record.is_offloaded |= found is None
            for name, values in found or ():
                checksums.setdefault(name, []).append(checksum(values))
                if is_trained and not record.not_finite and not torch.isfinite(values).all():
                    record.not_finite.append(f"{name!r} {when}")
    record.values[when] = checksums


def _values(flat: FlatParam, unit: Unit) -> list[tuple[str, torch.Tensor]] | None:
    """Return names and full parameters, or this rank's shards if they are partitioned; None if they cannot be read."""
    if unit.is_partitioned and not _is_away(flat):
        return [(flat.names[index], values) for index, _, values in flat.owned_slices()]
    if unit.state.name == "UNSHARDED" and not unit.is_partitioned:
        return [(name, flat.full[flat.layout.range_of_param(index).slice]) for index, name in enumerate(flat.names)]
    return None


def _is_away(flat: FlatParam) -> bool:
    """Return whether a flat's shard is on disk, or not complete yet."""
    tiers = flat.spec.tier_placement
    is_on_disk = tiers.parameters == "disk" or any(tier == "disk" for _, tier in tiers.optimizer)
    return is_on_disk or flat.pending_update is not None


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether the bytes of a tensor can be read where it is."""
    has_storage = isinstance(tensor, DTensor) or not is_traceable_wrapper_subclass(tensor)
    return has_storage and tensor.layout is torch.strided and not (tensor.is_meta or tensor.is_nested)


@torch.no_grad()
def checksum(tensor: torch.Tensor) -> int:
    """Return a checksum of a tensor's bytes that depends on their order.

    >>> checksum(torch.tensor([1.0, 2.0])) == checksum(torch.tensor([1.0, 2.0]))
    True
    >>> checksum(torch.tensor([1.0, 2.0])) == checksum(torch.tensor([2.0, 1.0]))
    False
    """
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach().as_subclass(torch.Tensor)
    data = local.resolve_conj().resolve_neg().cpu().contiguous()
    return zlib.crc32(ctypes.string_at(data.data_ptr(), data.nbytes))
