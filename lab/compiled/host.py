"""What launches cost the host: Python calls of the layers of a step, with a GPU that is not there.

python -m piecework.lab.compiled.host
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
from triton.compiler.compiler import CompiledKernel
from triton.runtime import driver

from piecework.kernels.attention import AttentionMetadata, KVLayout
from piecework.kernels.triton import device
from piecework.kernels.triton.attention import TritonAttention

from .targets import SHARED_MEMORY, StandIn

_LAYERS = 32
_CAPABILITY = 86


class Launches(list[tuple[Any, ...]]):
    """The arguments of each launch, in place of Triton's launcher in C."""

    def __call__(self, *arguments: Any) -> None:
        self.append(arguments)


@contextmanager
def launching(launches: Launches) -> Iterator[None]:
    """Within this context, kernels are compiled, and their launches are only recorded. The
    process's driver of Triton stays replaced.
    """

    def use(kernel: Any) -> None:
        kernel.module, kernel.function, kernel._run = 1, kernel.name, launches

    properties = device.Properties(divmod(_CAPABILITY, 10), 84, SHARED_MEMORY[_CAPABILITY])
    driver.set_active(StandIn(_CAPABILITY))
    with (
        patch.object(CompiledKernel, "_init_handles", use),
        patch.object(device, "properties", lambda _: properties),
    ):
        yield


def step(
    layout: KVLayout, lens: list[tuple[int, int]], backend: TritonAttention
) -> Callable[[], None]:
    """Return the attention of one layer after another in a step of (new tokens, length)."""
    tokens = sum(new for new, _ in lens)
    metadata = AttentionMetadata(
        query_lens=[new for new, _ in lens],
        seq_lens=[length for _, length in lens],
        block_table=torch.zeros(len(lens), 64, dtype=torch.int64),
        slot_mapping=torch.zeros(tokens, dtype=torch.int64),
    )
    plan = backend.plan(metadata, 16)
    shape = (64, 16, layout.num_kv_heads, layout.key_size)

    def layer() -> None:
        q = torch.empty(tokens, layout.num_heads, layout.key_size, dtype=layout.dtype)
        k, v = (torch.empty(tokens, *shape[2:], dtype=layout.dtype) for _ in range(2))
        k_cache, v_cache = (torch.empty(shape, dtype=layout.dtype) for _ in range(2))
        backend.run(q, k, v, torch.empty_like(q), k_cache, v_cache, plan, layout)

    return layer


def calls_of(function: Callable[[], None]) -> int:
    """Count the calls of Python functions and of functions in C that `function` makes."""
    count = 0

    def seen(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(seen)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def main() -> None:
    layout = KVLayout.of_heads(32, 8, 128, torch.bfloat16)
    launches = Launches()
    with launching(launches):
        layer = step(layout, [(1, 500)] * 16, TritonAttention())
        layer()
        first = len(launches)
        counts = {"first": 0, "each": 0}
        counts["first"] = calls_of(step(layout, [(1, 500)] * 16, TritonAttention()))
        for _ in range(_LAYERS):
            counts["each"] = calls_of(layer)
    print(json.dumps({"launches": first, **counts}))


if __name__ == "__main__":
    main()
