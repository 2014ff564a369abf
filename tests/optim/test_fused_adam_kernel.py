"""The Triton kernel of one pass without a GPU, where Triton is installed: interpreted, and as it is compiled for one.

Interpreted, ``fma`` rounds twice, so numbers are near and not equal; that they are equal on a GPU is asserted there, in
test_fused_adam_gpu.py. What is compiled is looked at: which operations there are, and how each rounds.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from typing import Any

import pytest
import torch
from plain import Tensors

from zeroshard.engine import GradScale
from zeroshard.optim.cpu.kernels import _beta_power_table
from zeroshard.optim.fused_adam import triton_kernel
from zeroshard.optim.fused_adam.launch_table import ROW_FIELDS, SliceTensors
from zeroshard.optim.hyperparams import AdamHyperparams
from zeroshard.utils.kernel_loader import EXACT_FP_OPTIONS

triton = pytest.importorskip("triton")

PLAIN = AdamHyperparams(lr=0.01, weight_decay=0.1, fused=True, is_cuda_rounding=True)
FACTORS = {"inv_scale": torch.tensor(1 / 3), "clip_coef": torch.tensor(0.7)}


def strips(numels: list[int], gradient: torch.dtype, copy: torch.dtype | None, offset: int = 0) -> list[SliceTensors]:
    """Random ones, two of a run; ``offset``: elements by which they miss a vector's beginning."""
    generator = torch.Generator().manual_seed(0)

    def line(numel: int) -> torch.Tensor:
        return torch.randn(numel + offset, generator=generator)[offset:]

    found = []
    for number, numel in enumerate(numels):
        g, p, m, v = (line(numel) for _ in range(4))
        copied = None if copy is None else torch.zeros(numel + offset, dtype=copy)[offset:]
        found.append(SliceTensors(number // 2, g.to(gradient), p, m, v.square() + 0.1, copied))
    return found


def host_update(native: Any, strip: SliceTensors, numbers: AdamHyperparams, step: int, factors: Tensors) -> list[Any]:
    """What the host's native kernel makes of a strip, by the formulas of a GPU."""
    old = (strip.master.clone(), strip.exp_avg.clone(), strip.exp_avg_sq.clone())
    lr = float(numbers.lr)
    chosen = dataclasses.replace(numbers, lr=lr)
    powers = tuple(_beta_power_table(beta, 0, "cpu")[step] for beta in numbers.betas)
    scaled = [float(value) for key, value in factors.items() if key != "overflow"]
    native.adam(*old, strip.gradient.clone(), chosen, out=old, step=step, grad_factors=scaled, beta_powers=powers)
    return list(old)


CASES: dict[str, tuple[torch.dtype, torch.dtype | None, int, dict[str, Any], Tensors]] = {
    "bf16": (torch.bfloat16, torch.bfloat16, 0, {}, {}),
    "fp16, scaled and clipped": (torch.float16, torch.float16, 0, {}, FACTORS),
    "fp32, its own copy": (torch.float32, None, 0, {}, {"clip_coef": torch.tensor(0.3)}),
    "no vectors": (torch.bfloat16, torch.bfloat16, 1, {}, {}),
    "no decay, maximised": (torch.bfloat16, torch.bfloat16, 0, {"weight_decay": 0.0, "maximize": True}, {}),
    "lr on the device": (torch.bfloat16, torch.bfloat16, 0, {"lr": torch.tensor(0.02)}, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_strips_are_updated_by_the_formulas_of_a_gpu(
    case: str, native_kernels: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(triton_kernel, "find_row", triton.jit(triton_kernel.find_row.fn))  # compiled at import
    gradient, copy, offset, changed, factors = CASES[case]
    numbers = AdamHyperparams(**{**vars(PLAIN), **changed})
    found = strips([64, 300, 33, 1, 128, 5], gradient, copy, offset)
    steps = [1, 7, 100]
    wanted = [host_update(native_kernels, strip, numbers, steps[strip.slice_index], factors) for strip in found]
    ours = triton_kernel.TritonKernel(torch.device("cpu"), block=64)
    ours.run(ours.prepare(found, 3), [torch.tensor(float(step)) for step in steps], numbers, GradScale(**factors))
    for number, (strip, states) in enumerate(zip(found, wanted, strict=True)):
        mine = [strip.master, strip.exp_avg, strip.exp_avg_sq]
        torch.testing.assert_close(mine, states, rtol=1e-5, atol=1e-6, msg=lambda m, n=number: f"strip {n}: {m}")
        if strip.compute_param is not None:
            rounding = torch.finfo(strip.compute_param.dtype).eps  # interpreted, it is cut off
            torch.testing.assert_close(strip.compute_param.float(), strip.master, rtol=rounding, atol=0)


def test_after_an_overflow_nothing_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(triton_kernel, "find_row", triton.jit(triton_kernel.find_row.fn))  # compiled at import
    (strip,) = strips([100], torch.float16, torch.float16)
    before = [tensor.clone() for tensor in (strip.master, strip.exp_avg, strip.exp_avg_sq, strip.compute_param)]
    ours = triton_kernel.TritonKernel(torch.device("cpu"), block=64)
    laid = ours.prepare([strip], 1)
    for overflow in (1.0, 0.0):
        ours.run(laid, [torch.tensor(1.0)], PLAIN, GradScale(found_inf=torch.tensor(overflow)))
        after = [strip.master, strip.exp_avg, strip.exp_avg_sq, strip.compute_param]
        assert [torch.equal(a, b) for a, b in zip(after, before, strict=True)] == [overflow == 1.0] * 4


def compiled(**chosen: Any) -> str:
    """The kernel's code for a GPU that need not be there."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    tl = triton.language
    constants = {
        "ROW": ROW_FIELDS,
        "GRADIENT": tl.bfloat16,
        "COPY": tl.bfloat16,
        "EVEN": True,
        "LR_ON_DEVICE": False,
        "DECAYS": True,
        "MAXIMIZE": False,
        "BLOCK": triton_kernel.BLOCK_NUMEL,
        **chosen,
    }
    function = triton.jit(triton_kernel.fused_adam_kernel)
    pointers = {"blocks": "*i32", "table": "*i64", "powers": "*fp32"}
    pointers |= dict.fromkeys(("inverse", "coefficient", "overflow"), "*fp32")
    numbers = dict.fromkeys(("lr", "beta1", "beta2", "eps", "weight_decay"), "fp32")
    signature = {**pointers, **numbers, **dict.fromkeys(constants, "constexpr")}
    places = {(function.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=function, signature=signature, constexprs=places)
    options = {"num_warps": triton_kernel.NUM_WARPS, **EXACT_FP_OPTIONS}
    return str(triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"])


def test_the_compiled_kernel_rounds_as_is_written_and_moves_whole_vectors() -> None:
    code = compiled()
    found = Counter(re.findall(r"\b((?:ld|st)\.global\.\w+(?:\.\w+)?|(?:mul|add|sub|fma|div|sqrt)[\w.]*\.f32)\b", code))
    each = triton_kernel.BLOCK_NUMEL // (32 * triton_kernel.NUM_WARPS)  # elements of a thread
    assert ".ftz" not in code and ".approx" not in code and "rcp" not in code
    arithmetic = {name for name in found if name.endswith(".f32")}
    assert arithmetic == {f"{name}.rn.f32" for name in ("mul", "add", "sub", "fma", "div", "sqrt")}
    assert found["fma.rn.f32"] == 5 * each  # decay, two for each moment
    assert found["div.rn.f32"] == 2 * each + 1 and found["sqrt.rn.f32"] == each + 1
    assert found["mul.rn.f32"] == 4 * each + 1  # two factors, the square, the rate; and lr times decay
    assert found["ld.global.v4.b32"] == found["st.global.v4.b32"] == 3 * each // 4
    assert found["ld.global.v2.b32"] == found["st.global.v2.b32"] == each // 4  # 16 bits
