"""The same behaviour on a GPU, where one is: streams, casts, NCCL. Skipped elsewhere."""

from __future__ import annotations

import copy
import gc
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from plain import Tensors, assert_close, assert_equal, batches, copied, full_parameters, net_loss, run_plain, split
from ranks import run_processes
from zoo import make_net

import zeroshard
from benchmarks.harness.collectives import Echo
from zeroshard.memory import CublasWorkspace, Pool
from zeroshard.models.gpt import GPT, GPTConfig
from zeroshard.train.metrics import StepStatsReducer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

SMALL = GPTConfig(vocab_size=256, context=64, layers=4, heads=4, width=128, checkpoint=True)


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def train_on_gpu(rank: int, world: int, options: dict[str, Any]) -> Tensors:
    model = make_net().cuda()
    model, optimizer = zeroshard.shard(model, adamw(model), bucket_size=256, **options)
    for batch in batches(4):
        net_loss(model, split(batch, rank, world).cuda()).backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.cpu() for name, value in full_parameters(model).items()}


@pytest.mark.parametrize("precision", [None, "bf16"])
def test_stages_are_bit_identical_on_one_gpu_with_two_gloo_ranks(precision: str | None) -> None:
    runs = {s: run_processes(2, train_on_gpu, 2, {"stage": s, "precision": precision}) for s in (1, 2, 3)}
    for stage, (first, second) in runs.items():
        assert_equal(first, second)
        assert_equal(first, runs[1][0]), stage


def test_fp32_equals_the_plain_run_on_the_gpu() -> None:
    def clipped(model: torch.nn.Module) -> torch.optim.Optimizer:
        optimizer = adamw(model)
        optimizer.register_step_pre_hook(lambda *_: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0) and None)
        return optimizer

    plain = run_plain(make_net().cuda(), clipped, [batch.cuda() for batch in batches(4)])
    for stage in (0, 3):
        (ours, _) = run_processes(2, train_on_gpu, 2, {"stage": stage})
        assert_close(ours, {name: value.cpu() for name, value in plain.items()}, 1e-5)


def reference_bf16(model: GPT, data: list[torch.Tensor]) -> Tensors:
    """The bf16 run written by hand: a bf16 copy computes, an fp32 master is updated."""
    computing = copy.deepcopy(model).bfloat16()
    masters = [torch.nn.Parameter(p.detach().clone()) for p in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=1e-2, fused=True)
    for tokens in data:
        computing(tokens, tokens).backward()
        for master, parameter in zip(masters, computing.parameters(), strict=True):
            master.grad, parameter.grad = parameter.grad.float(), None
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(masters, computing.parameters(), strict=True):
                parameter.copy_(master)
    return copied(computing)


def one_nccl_rank(rank: int) -> None:
    dist.destroy_process_group()
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    torch.manual_seed(0)
    model = GPT(SMALL).cuda()
    data = [torch.randint(256, (4, 64), device="cuda") for _ in range(4)]
    expected = reference_bf16(model, data)
    model, optimizer = zeroshard.shard(model, adamw(model), stage=3, precision="bf16")
    for tokens in data:
        model(tokens, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_equal(full_parameters(model), expected)


def test_bf16_on_one_nccl_rank_equals_the_reference_written_by_hand() -> None:
    run_processes(1, one_nccl_rank)


def gradients_come_and_go(rank: int, world: int, stage: int, backwards: int) -> None:
    """Training, with the gradients' memory given back or kept: the same bits, and the memory that is said."""
    found = []
    for given_back in (True, False):
        torch.manual_seed(0)
        model = GPT(SMALL).cuda()
        model, optimizer = zeroshard.shard(model, adamw(model), stage=stage, precision="bf16")
        for number in range(8):
            for tokens in torch.randint(256, (backwards, 4, 64), device="cuda"):
                model(tokens, tokens).backward()
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            torch.cuda.synchronize()
            before, held = torch.cuda.memory_allocated(), zeroshard.report(model).memory["gradients", "device"].now
            optimizer.zero_grad(set_to_none=given_back)
            freed = before - torch.cuda.memory_allocated()
            assert held >= 2 * SMALL.parameters // (world if stage > 1 else 1)
            assert freed == pytest.approx(held if given_back and backwards == 1 else 0, abs=4096), number
        found.append(full_parameters(model))
    assert_equal(*found)


@pytest.mark.parametrize("backwards", [1, 2])
@pytest.mark.parametrize(("world", "stage"), [(1, 0), (2, 0), (2, 1), (2, 3)])
def test_gradients_memory_is_given_back_and_taken_again_on_the_gpu(world: int, stage: int, backwards: int) -> None:
    run_processes(world, gradients_come_and_go, world, stage, backwards)


def cast_or_kept(rank: int, world: int) -> None:
    """The same bits whether a gather casts the master or finds a 16-bit shard, which is what is saved."""
    found, held = [], []
    for cast in (False, True):
        torch.manual_seed(0)
        model = GPT(SMALL).cuda()
        model, optimizer = zeroshard.shard(model, adamw(model), precision="bf16", cast_on_gather=cast)
        for tokens in torch.randint(256, (6, 4, 64), device="cuda"):
            model(tokens, tokens).backward()
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            held.append(zeroshard.report(model).states)
            optimizer.zero_grad()
        found.append(full_parameters(model))
    assert_equal(*found)
    assert held[5] - held[11] == pytest.approx(2 * SMALL.parameters / world, rel=0.02)


@pytest.mark.parametrize("world", [1, 2])
def test_casting_masters_as_they_are_gathered_changes_no_bit_on_the_gpu(world: int) -> None:
    run_processes(world, cast_or_kept, world)


class Late(Echo):
    """One rank of many whose reductions are read long after they were launched, on a stream of their own."""

    def _reduce_scatter_base(self, output: torch.Tensor, whole: torch.Tensor, opts: Any = None) -> Any:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(5_000_000)  # some milliseconds
            super()._reduce_scatter_base(output, whole)
        return Arrived(stream.record_event())

    reduce_scatter_single = _reduce_scatter_base


class Arrived:
    """What torch calls a work."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self) -> None:
        """Make the present stream wait."""
        self._event.wait()


def held_after_training(group: type[Echo], stage: int, bucket_size: int, backwards: int) -> list[torch.Tensor]:
    """What the first rank of four holds after a few steps."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    name = f"fake_{group.__name__.lower()}"
    if name not in dist.Backend.backend_list:
        dist.Backend.register_backend(name, lambda _, rank, size, __: group(rank, size), devices=["cpu", "cuda"])
    dist.init_process_group(name, store=FakeStore(), rank=0, world_size=4)
    torch.manual_seed(0)
    model = GPT(SMALL).cuda()
    options = {"precision": "bf16", "bucket_size": bucket_size}
    model, optimizer = zeroshard.shard(model, adamw(model), stage=stage, units=("blocks.*",), **options)
    for several in torch.randint(256, (4, backwards, 4, 64), device="cuda"):
        for tokens in several:
            model(tokens, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()
    return [run.parameter.detach().clone() for run in optimizer._groups.all_slices]


def late_reductions(rank: int, stage: int, bucket_size: int, backwards: int) -> None:
    dist.destroy_process_group()
    at_once, late = (held_after_training(group, stage, bucket_size, backwards) for group in (Echo, Late))
    assert len(at_once) == len(late)
    for soon, later in zip(at_once, late, strict=True):
        assert torch.equal(soon, later)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_gradient_that_is_reduced_as_it_lies_lives_until_it_was_read(stage: int) -> None:
    run_processes(1, late_reductions, stage, 2**16, 1)


@pytest.mark.parametrize("backwards", [1, 2])
@pytest.mark.parametrize("stage", [2, 3])
def test_a_bucket_that_compute_packs_stays_until_it_was_reduced(stage: int, backwards: int) -> None:
    run_processes(1, late_reductions, stage, 2**27, backwards)


def workspaces(rank: int) -> tuple[int, int]:
    """Bytes that cuBLAS has after some steps, and for one thread."""
    model = GPT(SMALL).cuda()
    model, optimizer = zeroshard.shard(model, adamw(model), precision="bf16")
    for tokens in torch.randint(256, (3, 4, 64), device="cuda"):
        model(tokens, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    held = torch.cuda.memory_allocated()
    CublasWorkspace.clear_all()
    taken, held = held - torch.cuda.memory_allocated(), torch.cuda.memory_allocated()
    CublasWorkspace.allocate()
    return taken, torch.cuda.memory_allocated() - held


def test_cublas_has_memory_for_one_thread_at_a_time() -> None:
    ((taken, one),) = run_processes(1, workspaces)
    assert 2**20 < one <= taken < 1.5 * one  # cuBLASLt may have a little of its own


def drop_pools(rank: int) -> int:
    """Drop a pool in a reference cycle, collect it while another one is in use, and return the bytes that are left."""
    device, free = torch.device("cuda", 0), torch.cuda.memory_reserved()
    for _ in range(2):
        dropped: Any = Pool(device)
        with dropped:
            torch.zeros(2**24, device=device)
        dropped.itself = dropped
        del dropped
        with Pool(device):
            gc.collect()
            torch.zeros(1, device=device)
    gc.collect()
    return torch.cuda.memory_reserved() - free


def test_a_dropped_pool_that_is_collected_while_another_is_in_use_is_freed_later() -> None:
    (left,) = run_processes(1, drop_pools, fresh=True)  # torch would end the process
    assert left < 2**24


def no_syncs(rank: int, precision: str, stage: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    with torch.device("meta"):
        model = GPT(SMALL)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    mesh = init_device_mesh("cuda", (8,))
    model, optimizer = zeroshard.shard(model, optimizer, stage=stage, precision=precision, mesh=mesh)
    tokens = torch.randint(256, (4, 64), device="cuda")
    for step in range(4):
        torch.cuda.set_sync_debug_mode("error" if step > 1 else "default")
        optimizer.scale(model(tokens, tokens)).backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.set_sync_debug_mode("default")


class Scored(torch.nn.Module):
    """Layers, and a loss over some number of classes."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(8)])
        self.head = torch.nn.Linear(1024, classes)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        scores = self.head(self.layers(inputs))
        return torch.nn.functional.cross_entropy(scores, torch.zeros(len(inputs), dtype=torch.long, device="cuda"))


def scored(classes: int, fused: bool) -> tuple[Any, Any]:
    model = Scored(classes).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    return zeroshard.shard(model, optimizer, stage=3, bucket_size=2**22)


def segments_of_states(rank: int, fused: bool) -> tuple[list[int], int]:
    """Bytes of the segments that optimizer states lie in, and of the states."""
    model, optimizer = scored(16, fused)
    model(torch.ones(16, 1024, device="cuda")).backward()
    optimizer.step()
    states = [value for state in optimizer.inner.state.values() for value in state.values() if value.numel() > 2**18]
    parts = [(part["address"], part["total_size"]) for part in torch.cuda.memory._snapshot()["segments"]]
    places = [value.data_ptr() for value in states]
    held = [size for start, size in parts if any(start <= place < start + size for place in places)]
    return held, sum(value.nbytes for value in states)


@pytest.mark.parametrize("fused", [True, False])
def test_optimizer_states_lie_in_segments_of_their_size(fused: bool) -> None:
    ((segments, states),) = run_processes(1, segments_of_states, fused)
    assert states <= sum(segments) < states + len(segments) * 2**21
    assert len(segments) <= 3  # of 16 states: in one pass all are made together, else those of a batch are


def peak_of_backward(rank: int, classes: int, forced: bool) -> tuple[bool, int]:
    """Whether all gradients came at once, as they may be forced to, and the most that was allocated from then on."""
    model, optimizer = scored(classes, fused=True)
    memory = model._zeroshard.engine.gradients.memory
    for _ in range(3):
        loss = model(torch.ones(4096, 1024, device="cuda"))
        memory._peak_allocated_bytes = 2**40 if forced else memory._peak_allocated_bytes
        torch.cuda.reset_peak_memory_stats()
        loss.backward()
        peak = torch.cuda.max_memory_allocated()
        optimizer.step()
        optimizer.zero_grad()
    return memory._is_single_allocation, peak


def test_whole_gradients_come_in_pieces_unless_a_large_loss_was_there_before() -> None:
    ((small, peak),) = run_processes(1, peak_of_backward, 16, False)
    ((large, _),) = run_processes(1, peak_of_backward, 16384, False)
    assert not small and large
    ((forced, most),) = run_processes(1, peak_of_backward, 16, True)
    layer = 4 * 1024 * 1025
    assert forced and peak <= most - 3 * layer  # all 8, less what a layer's activations, as large as 4, gave back


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_step_never_waits_for_the_device(precision: str, stage: int) -> None:
    run_processes(1, no_syncs, precision, stage)


def profiled(rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    with torch.device("meta"):
        model = GPT(SMALL)
    mesh = init_device_mesh("cuda", (8,))
    model, optimizer = zeroshard.shard(model, adamw(model), stage=3, precision="bf16", mesh=mesh)
    tokens = torch.randint(256, (4, 64), device="cuda")
    for _ in range(3):
        with zeroshard.profile(model) as profile:
            model(tokens, tokens).backward()
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
    assert 0 < profile.waited < profile.seconds
    assert max(moment.held["gathered"] for moment in profile.moments) > 0
    held = [(sum(moment.held.values()), moment.allocated) for moment in profile.moments if moment.allocated is not None]
    assert held and all(allocated >= ours for ours, allocated in held)  # activations come on top


def test_a_profile_on_the_gpu_times_the_stream_and_sees_all_that_is_allocated() -> None:
    run_processes(1, profiled)


def beats(rank: int) -> list[list[int]]:
    dist.destroy_process_group()
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    pulse = StepStatsReducer(torch.device("cuda", 0))
    loss, norm = torch.ones((), device="cuda"), torch.ones((), device="cuda")
    seen = []
    for step in range(4):
        torch.cuda.set_sync_debug_mode("error" if step else "default")
        pulse.start_reduce(step, loss, norm, stop_requested=False)
        torch.cuda.set_sync_debug_mode("default")
        seen.append([beat.step for beat in pulse.read_ready()])
    return [*seen, [beat.step for beat in pulse.read_ready(flush=True)]]


def test_what_ranks_share_after_a_step_is_read_one_step_late_and_never_waited_for() -> None:
    assert run_processes(1, beats) == [[[], [0], [1], [2], [3]]]


def test_the_main_job_runs_on_the_gpu_in_bf16_and_resumes(tmp_path: Path) -> None:
    small = ["--plain", "--layers", "2", "--width", "64", "--sequence", "32", "--out", str(tmp_path / "run")]
    command = [sys.executable, "-m", "zeroshard", "train"]
    for arguments in (
        [*small, "--steps", "12", "--checkpoint-every", "6"],
        ["--out", str(tmp_path / "run"), "--resume"],
    ):
        done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0, done.stderr
        assert "over nccl" in done.stdout and "bf16" in done.stdout
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["outcome"] == "finished" and record["memory_over_step"]["moments"][-1]["allocated_bytes"]
    assert "allocated" in (tmp_path / "run" / "charts" / "memory.svg").read_text()
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert all(line["tflops"] > 0 for line in lines if "loss" in line)


def checkpoints_on_gpu(rank: int, world: int, path: Path, stage: int) -> tuple[Any, Any, Any]:
    model = make_net().cuda()
    model, optimizer = zeroshard.shard(model, adamw(model), stage=stage, precision="bf16")

    def steps() -> Tensors:
        for batch in batches(2):
            net_loss(model, split(batch, rank, world).cuda()).backward()
            optimizer.step()
            optimizer.zero_grad()
        return {name: zeroshard.full_parameter(model, name).cpu() for name, _ in model.named_parameters()}

    saved = steps()
    handle = zeroshard.save(path, model, optimizer, wait=False)
    continued = steps()  # while the GPU copies and the host writes
    handle.wait()
    zeroshard.load(path, model, optimizer)
    return saved, continued, steps()


@pytest.mark.parametrize(("world", "stage"), [(1, 0), (2, 1), (2, 3)])
def test_a_checkpoint_is_copied_during_training_and_loads_on_gpu_and_cpu(
    world: int, stage: int, tmp_path: Path
) -> None:
    for saved, continued, again in run_processes(world, checkpoints_on_gpu, world, tmp_path, stage):
        assert_equal(again, continued)
        plain = make_net()
        zeroshard.load(tmp_path, plain, torch.optim.AdamW(plain.parameters()))
        assert_equal(dict(plain.named_parameters()), saved)
