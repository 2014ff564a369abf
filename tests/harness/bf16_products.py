"""Products in bf16 on CPUs without bf16 instructions, where torch takes a hundred times as long as in fp32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

PRODUCTS = {
    *(torch.mm, torch.bmm, torch.matmul, torch.addmm, torch.baddbmm),
    *(torch.Tensor.mm, torch.Tensor.bmm, torch.Tensor.matmul, torch.Tensor.__matmul__),
}


class Bf16ProductsInFp32(TorchFunctionMode):
    """Sum bf16 products in fp32 and round the sums, as a CPU with bf16 instructions does. Not for backward.

    >>> x = torch.full((2, 2), 1.5, dtype=torch.bfloat16)
    >>> with Bf16ProductsInFp32():
    ...     x @ x
    tensor([[4.5000, 4.5000],
            [4.5000, 4.5000]], dtype=torch.bfloat16)
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        if func not in PRODUCTS or args[0].dtype != torch.bfloat16:
            return func(*args, **options)
        out = options.pop("out", None)
        wide = [arg.float() if isinstance(arg, torch.Tensor) else arg for arg in args]
        result = func(*wide, **options).bfloat16()
        return result if out is None else out.copy_(result)
