"""Choose the layout of 16-bit weights on a CPU with matrix units (AMX): the kernels' panels, or
oneDNN's layout, whichever is faster here for many rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache

import torch

from . import packed_linear
from .native.build import Kernels
from .native.instruction_sets import instruction_sets
from .native.linear import NativeLinear, multiply

_ROWS, _SIZE, _TIMES = 256, 1024, 5
# Most time of the kernels relative to oneDNN's. Panels are faster in decodes, so they may be slower
# here.
_WORTH = 1.1


@cache
def panels_pay(library: Kernels) -> bool:
    """Return whether to use panels. Without matrix units the answer is yes, with them it is
    measured once.
    """
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
    """Return the least of several times, in seconds."""
    taken = []
    for _ in range(_TIMES):
        begin = time.perf_counter()
        work()
        taken.append(time.perf_counter() - begin)
    return min(taken)
