"""What products of matrices in half precision take inside of one operation on a CPU: they are run once. Knows shapes; no ledger.

Where the CPU has instructions for them, torch gives them to oneDNN, which packs both matrices into buffers of a size that its blocking
bounds: some tens of kilobytes to one and a half megabytes a thread, whatever the matrices' own size; of many products each thread works on
one. Which instructions there are it knows best itself.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from lightning_autopar.memory.scratch_convolution import taken_beside

#: Larger matrices are packed in pieces no larger than this.
_MOST_ROWS = 1024
_HALVES = (torch.bfloat16, torch.float16)


def half_product_bytes(function: Any, args: tuple[Any, ...]) -> int:
    """Of a product like ``aten.mm`` or ``aten.addmm``, its matrices fake or real; 0 of other dtypes.

    Raises:
        CannotMeasure: while a profiler runs.
    """
    matrices = [each for each in args if isinstance(each, Tensor)]
    if matrices[-1].dtype not in _HALVES or not all(each.numel() for each in matrices):
        return 0
    threads = torch.get_num_threads()

    def few(shape: torch.Size) -> tuple[int, ...]:
        return (*(min(count, 2 * threads) for count in shape[:-2]), *(min(size, _MOST_ROWS) for size in shape[-2:]))

    told = tuple((few(each.shape), each.dim() > 1 and each.stride(-1) != 1) for each in matrices)
    return _asked(function, matrices[-1].dtype, threads, told)


@lru_cache(maxsize=1024)
def _asked(function: Any, dtype: torch.dtype, threads: int, told: tuple[tuple[tuple[int, ...], bool], ...]) -> int:
    with _disable_current_modes():
        real = [
            torch.zeros((*shape[:-2], shape[-1], shape[-2]), dtype=dtype).mT if turned else torch.zeros(shape, dtype=dtype)
            for shape, turned in told
        ]
    return taken_beside(function, real)
