"""One pass on a GPU, where one is: every bit of torch's own way, without a wait for the device. Skipped elsewhere.

Each case trains twice in one process, in one pass and torch's way, and compares everything this rank holds: masters,
moments, step counts, its part of the parameters, gradients. A failure lists each tensor that differs, how many of its
elements do, and the first of them with its bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from plain import Tensors, batches, net_loss
from ranks import run_processes
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from zoo import make_net

import zeroshard
from zeroshard.engine import GradScale
from zeroshard.optim import step
from zeroshard.optim.fused_adam.launch_table import SliceTensors
from zeroshard.optim.hyperparams import AdamHyperparams

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

ROUNDED = torch.__version__.startswith("2.11.")  # as [Note: bit-equal to torch's fused Adam] says
LAST_BITS = {"rtol": 1e-5, "atol": 1e-6}  # where another torch rounds otherwise


# ------------------------------------------------------------------------------------------------- what differs


def difference(name: str, ours: torch.Tensor, wanted: torch.Tensor) -> str:
    """Nothing where both are the same to the bit, NaN for NaN; else how many elements differ, and the first."""
    if ours.shape != wanted.shape or ours.dtype != wanted.dtype:
        return f"{name}: {tuple(ours.shape)} {ours.dtype}, wanted {tuple(wanted.shape)} {wanted.dtype}\n"
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[ours.element_size()]
    mine, its = ours.flatten(), wanted.flatten()
    unlike = (mine.view(integers) != its.view(integers)) & ~(mine.isnan() & its.isnan())
    if not unlike.any():
        return ""
    if not ROUNDED and torch.allclose(mine.float(), its.float(), equal_nan=True, **LAST_BITS):
        return ""
    first = int(unlike.nonzero()[0])
    bits = [hex(int(one.view(integers)[first]) & (2 ** (8 * ours.element_size()) - 1)) for one in (mine, its)]
    apart = (mine.double() - its.double()).abs().nan_to_num().max().item()
    found = [f"{one[first].item()!r} ({bit})" for one, bit in zip((mine, its), bits, strict=True)]
    return (
        f"{name}: {int(unlike.sum())} of {mine.numel()} elements differ, at most by {apart:.3g}; "
        f"the first, [{first}], is {found[0]}, wanted {found[1]}\n"
    )


def differences(ours: Tensors, wanted: Tensors) -> str:
    missing = f"only one has {ours.keys() ^ wanted.keys()}\n" if ours.keys() != wanted.keys() else ""
    return missing + "".join(difference(name, ours[name], wanted[name]) for name in ours if name in wanted)


# --------------------------------------------------------------------------------------------------- the kernel


def lines(numel: int, offset: int, seed: int) -> list[torch.Tensor]:
    """A gradient and states over many magnitudes, with zeros, subnormal and infinite values among them."""
    generator = torch.Generator().manual_seed(seed)

    def line() -> torch.Tensor:
        found = torch.randn(numel + offset, generator=generator)
        return found * 10 ** (8 * torch.rand(numel + offset, generator=generator) - 6)

    gradient, master, first, second = (line() for _ in range(4))
    if numel > 1000:
        gradient[offset : offset + 8] = torch.tensor(
            [0.0, -0.0, 1e-39, -1e-44, 1e-20, 3e38, float("inf"), float("nan")]
        )
        master[offset : offset + 16] = 0.0
        first[offset + 4 : offset + 12] *= 1e-37
    return [gradient.cuda(), master.cuda(), first.cuda(), (second**2).cuda()]


CHOSEN = {
    "decay": AdamHyperparams(1e-2, (0.9, 0.999), 1e-8, 0.1),
    "no decay, maximised": AdamHyperparams(3e-4, (0.95, 0.98), 1e-8, 0.0, maximize=True),
    "small eps": AdamHyperparams(1e-3, (0.9, 0.95), 1e-15, 0.01),
    "lr on the device": AdamHyperparams(torch.tensor(1e-2), (0.8, 0.9999), 1e-8, 0.1),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("chosen", CHOSEN)
def test_the_kernel_gives_every_bit_of_torchs(chosen: str, dtype: torch.dtype) -> None:
    from zeroshard.optim.fused_adam.triton_kernel import TritonKernel

    kernel, told = TritonKernel(torch.device("cuda", torch.cuda.current_device())), ""
    numbers = CHOSEN[chosen]
    if isinstance(numbers.lr, torch.Tensor):
        numbers = AdamHyperparams(**{**vars(numbers), "lr": numbers.lr.cuda()})
    inverse, coefficient = torch.tensor(1 / 3, device="cuda"), torch.tensor(0.7, device="cuda")
    for numel, offset in ((1, 0), (7, 0), (37, 1), (1025, 0), (40_003, 3), (1 << 20, 0)):
        gradient, *ours = (line[offset:] for line in lines(numel, offset, seed=numel))
        gradient, theirs = gradient.to(dtype), [line.clone() for line in ours]
        copy = torch.zeros(numel + offset, dtype=dtype, device="cuda")[offset:] if dtype != torch.float32 else None
        laid = kernel.prepare([SliceTensors(0, gradient, *ours, copy)], 1)
        for count in (*range(1, 12), 102, 140, 173, 175, 5000):  # where the GPU's powers of beta are its own
            step = torch.full((), float(count), device="cuda")
            factors = GradScale(inverse, coefficient) if count % 2 else GradScale()
            kernel.run(laid, [step], numbers, factors)
            wide = gradient.float().clone()
            for factor in (factors.inv_scale, factors.clip_coef):
                wide = wide if factor is None else wide * factor
            torch._fused_adamw_(
                [theirs[0]],
                [wide],
                [theirs[1]],
                [theirs[2]],
                [],
                [step],
                lr=numbers.lr,
                beta1=numbers.betas[0],
                beta2=numbers.betas[1],
                weight_decay=numbers.weight_decay,
                eps=numbers.eps,
                amsgrad=False,
                maximize=numbers.maximize,
            )
            where = f"{numel} elements, offset {offset}, step {count}, "
            for name, mine, its in zip(("master", "exp_avg", "exp_avg_sq"), ours, theirs, strict=True):
                told += difference(where + name, mine, its)
            if copy is not None:
                told += difference(where + "copy", copy, ours[0].to(dtype))
            if told:
                break
    assert not told, "\n" + told


def test_the_kernel_writes_nothing_after_an_overflow() -> None:
    from zeroshard.optim.fused_adam.triton_kernel import TritonKernel

    kernel = TritonKernel(torch.device("cuda", torch.cuda.current_device()))
    gradient, *states = lines(5000, 0, seed=0)
    copy = torch.zeros(5000, dtype=torch.float16, device="cuda")
    before = [tensor.clone() for tensor in (*states, copy)]
    laid, step = kernel.prepare([SliceTensors(0, gradient.half(), *states, copy)], 1), torch.ones((), device="cuda")
    kernel.run(laid, [step], CHOSEN["decay"], GradScale(found_inf=torch.ones((), device="cuda")))
    assert not "".join(difference(str(i), a, b) for i, (a, b) in enumerate(zip((*states, copy), before, strict=True)))
    kernel.run(laid, [step], CHOSEN["decay"], GradScale(found_inf=torch.zeros((), device="cuda")))
    assert difference("copy", copy, before[-1])


# ---------------------------------------------------------------------------------------------- whole trainings


def adamw(model: nn.Module, **chosen: Any) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, **{"lr": 0.01, "weight_decay": 0.1, "fused": True, **chosen})


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    rest = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices}, {"params": rest, "weight_decay": 0.0, "betas": (0.8, 0.95), "lr": 0.02}]
    return torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1, fused=True)


def some_torchs(model: nn.Module) -> torch.optim.Optimizer:
    parameters = list(model.parameters())
    groups = [{"params": parameters[0::2]}, {"params": parameters[1::2], "amsgrad": True}]
    return torch.optim.AdamW(groups, lr=0.01, fused=True)


def lr_on_device(model: nn.Module) -> torch.optim.Optimizer:
    return adamw(model, lr=torch.tensor(0.01, device="cuda"))


CASES: dict[str, dict[str, Any]] = {
    "bf16": {},
    "bf16, clipped": {"clip": 0.1},
    "fp16": {"precision": "fp16"},
    "fp16, clipped": {"precision": "fp16", "clip": 0.1},
    "fp16, overflow": {"precision": "fp16", "overflow": True},
    "fp32, clipped": {"precision": None, "clip": 0.1},
    "clipped, no zero_grad": {"clip": 0.1, "clear": False},
    "summed": {"accumulate": 2},
    "reduced in fp32": {"reduce_dtype": "fp32", "clip": 0.1},
    "norms in fp32": {"keep_fp32": (nn.LayerNorm,), "clip": 0.1},
    "one bucket": {"bucket_size": 2**27},
    "two groups": {"make": two_groups},
    "some torch's way": {"make": some_torchs, "clip": 0.1, "all_ours": False},
    "Adam": {"make": lambda model: torch.optim.Adam(model.parameters(), lr=0.01, fused=True)},
    "maximised": {"make": functools.partial(adamw, maximize=True)},
    "lr on the device": {"make": lr_on_device},
    "lr in a tensor": {"make": functools.partial(adamw, lr=torch.tensor(0.01))},
    "scheduled": {"schedule": True},
    "frozen": {"freeze": True},
    "unused": {"skip": True},
}


@contextmanager
def torchs_way(on: bool) -> Iterator[None]:
    kept = step.kernel_for
    if on:
        step.kernel_for = lambda *_: None
    try:
        yield
    finally:
        step.kernel_for = kept


class Skips(nn.Module):
    """A net, and a layer that only some batches use."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net, self.extra = net, nn.Linear(11, 11, bias=False)
        nn.init.eye_(self.extra.weight)
        self.use = True

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found = self.net(tokens)
        return self.extra(found) if self.use else found


def held(optimizer: Any) -> Tensors:
    """Everything that this rank holds."""
    found: Tensors = {}
    for number, run in enumerate(optimizer._groups.all_slices):
        found[f"run {number} master"] = run.parameter.detach().clone()
        for key, value in optimizer.state.get(run.parameter, {}).items():
            found[f"run {number} {key}"] = torch.as_tensor(value).clone()
    for flat, gradient in optimizer._engine.gradients.flat_grads.items():
        for number, owned in enumerate(flat.local_shards):
            found[f"{flat.names[0]} … part {number}"] = owned.clone()
        if gradient.shard is not None:
            found[f"{flat.names[0]} … gradient"] = gradient.shard.clone()
    return found


def inject(optimizer: Any, step: int) -> None:
    """On the fake backend nothing arrives from other ranks: put known gradients in the place of what did not."""
    optimizer.clip_grad_norm_(1.0)  # reduces what is still to be reduced
    gradients = optimizer._engine.gradients
    gradients.scaling.drop_clip()
    for number, gradient in enumerate(gradients.flat_grads.values()):
        generator = torch.Generator().manual_seed(1000 * step + number)
        gradient.shard.copy_(torch.randn(gradient.shard.shape, generator=generator) * 1e-2)


def train(
    stage: int,
    world: int,
    *,
    make: Callable[[nn.Module], torch.optim.Optimizer] = adamw,
    clip: float | None = None,
    accumulate: int = 1,
    overflow: bool = False,
    schedule: bool = False,
    freeze: bool = False,
    skip: bool = False,
    clear: bool = True,
    all_ours: bool = True,
    **options: Any,
) -> tuple[Tensors, int]:
    """Five steps; what is held then, and how often the kernel was launched in the last of them."""
    model: Any = make_net(width=64, blocks=4).cuda()
    model = Skips(model).cuda() if skip else model
    for block in list(model.blocks)[1:3] if freeze else ():
        block.requires_grad_(False)
    options = {"precision": "bf16", "bucket_size": 4096, "loss_scale": 64.0, "stage": stage, **options}
    model, optimizer = zeroshard.shard(model, make(model), **options)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7) if schedule else None
    ours = optimizer._step_runner._fused_adam
    launches: list[int] = []
    if ours is not None:
        launch = ours._kernel._launch
        ours._kernel._launch = lambda *args: (launches.append(number), launch(*args))
    for number, batch in enumerate(batches(5)):
        if skip:
            model.use = number in (1, 2, 4)
        for part in batch.cuda().chunk(accumulate):
            loss = optimizer.scale(net_loss(model, part))
            (loss * (1e30 if overflow and number in (0, 2) else 1)).backward()
        if world > 1:
            inject(optimizer, number)
        if clip is not None:
            optimizer.clip_grad_norm_(clip)
        # the first steps make states; a rank that misses a gradient reads which parameters are unused
        torch.cuda.set_sync_debug_mode("error" if number > 1 and not skip else "default")
        try:
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        if scheduler is not None:
            scheduler.step()
        if clear and number < 4:
            optimizer.zero_grad()
    optimizer._engine.gradients.reduce_pending()  # pays what the step owes
    if ours is not None:
        del ours._kernel._launch
        assert all_ours == (zeroshard.report(model).memory["step", "device"].peak == 0)
    return held(optimizer), launches.count(4)


def both_ways(rank: int, stage: int, world: int, case: str) -> tuple[str, int]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.destroy_process_group()
    if world > 1:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    else:
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    chosen = {"mesh": init_device_mesh("cuda", (world,)), **CASES[case]}
    with torchs_way(True):
        wanted, none = train(stage, world, **chosen)
    with torchs_way(False):
        ours, launches = train(stage, world, **chosen)
    assert none == 0
    return differences(ours, wanted), launches


ALONE = [(stage, 1, case) for case in CASES for stage in ((0, 1, 2, 3) if case in ("bf16", "fp16, clipped") else (3,))]
OF_MANY = [(stage, 64, case) for case in ("bf16, clipped", "fp16", "two groups", "frozen") for stage in (0, 1, 2, 3)]


@pytest.mark.parametrize(("stage", "world", "case"), ALONE + OF_MANY)
def test_a_whole_training_gives_every_bit_of_torchs_way(stage: int, world: int, case: str) -> None:
    ((told, launches),) = run_processes(1, both_ways, stage, world, case)
    assert not told, "\n" + told
    most = {"two groups": 4, "norms in fp32": 4, "some torch's way": 2, "unused": 2}.get(case, 2)  # even and odd strips
    assert 1 <= launches <= most


# ---------------------------------------------------------------------------------------------------- memory


def peak_of_a_step(rank: int) -> tuple[int, int, int]:
    dist.destroy_process_group()
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    model = nn.Sequential(*[nn.Linear(2048, 2048, bias=False) for _ in range(8)]).cuda()
    model, optimizer = zeroshard.shard(model, adamw(model), precision="bf16")
    for _ in range(3):
        model(torch.ones(1, 2048, device="cuda", dtype=torch.bfloat16)).float().square().mean().backward()
        optimizer.clip_grad_norm_(1.0)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        optimizer.step()
        taken = torch.cuda.max_memory_allocated() - before
        optimizer.zero_grad()
    report = zeroshard.report(model).memory
    return taken, report["step", "device"].peak, report["master weights", "device"].now


def test_a_step_takes_no_memory() -> None:
    ((taken, counted, masters),) = run_processes(1, peak_of_a_step)
    assert counted == 0 and masters >= 8 * 2048**2 * 4
    assert taken < 64 * 1024  # powers, and the clip's numbers
