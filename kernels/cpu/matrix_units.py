"""Whether weights of 16 bits go into the kernels' panels on a CPU with matrix units (AMX), or into
the layout of oneDNN, which has products by them too: whatever is faster here with many rows.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from functools import cache

import torch

from . import packed_linear
from .native.instruction_sets import instruction_sets
from .native.linear import NativeLinear, multiply

_ROWS, _SIZE, _TIMES = 256, 1024, 5
_WORTH = 1.1
"""As many times oneDNN's time as the kernels may take: their panels serve decodes better."""


@cache
def panels_pay(library: ctypes.CDLL) -> bool:
    """Without matrix units they always do; with them it is measured once."""
    if "amx_bf16" not in instruction_sets() or not packed_linear.is_available():
        return True
    if not library.piecework_has_tiles():
        return False
    weight = torch.ones(_SIZE, _SIZE, dtype=torch.bfloat16)
    x = torch.ones(_ROWS, _SIZE, dtype=torch.bfloat16)
    kernels = NativeLinear(library)
    layout = kernels.layout("bfloat16", _SIZE)
    assert layout is not None
    ours, onednns = kernels.pack("bfloat16", [weight]), packed_linear.pack(weight)
    own = _least(lambda: multiply(library, x, None, ours, None, _SIZE, layout))
    return own <= _WORTH * _least(lambda: packed_linear.OP(x, onednns))


def _least(work: Callable[[], torch.Tensor]) -> float:
    """Seconds, of several times."""
    taken = []
    for _ in range(_TIMES):
        begin = time.perf_counter()
        work()
        taken.append(time.perf_counter() - begin)
    return min(taken)
