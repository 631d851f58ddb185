"""How many requests run at a time where memory is short: `python -m
piecework.lab.requests_at_a_time`.

Of models with full layers and those of a sliding window, for two loads: many short texts, and few
long ones. Pages of the two kinds have memory that is split at the start, or share it. The scheduler
plans every step; nothing is computed. The last column is what their bytes alone would allow.
"""

from __future__ import annotations

import argparse
from typing import NamedTuple

from ..kernels.platform.step_defaults import StepDefaults
from ..runtime.cache.kinds import make_cache
from ..runtime.cache.kv_cache import KVCache
from ..runtime.cache.pool import is_windowed, page_bytes, shared_pages, window_of
from ..runtime.config.engine import EngineConfig
from ..runtime.config.model import ModelConfig
from ..runtime.config.resolve import WindowPages, resolve_cache, resolve_steps
from ..runtime.config.resolved import ResolvedConfig
from ..runtime.core.generation import GenerateRequest
from ..runtime.core.request import Request
from ..runtime.core.sampling_params import SamplingParams
from ..runtime.engine.scheduler import Scheduler
from .window_cache import SHAPES, Shape

CONTEXT = 32_768


class Load(NamedTuple):
    """Requests with prompts of these lengths in turn, and answers of one length."""

    prompts: list[int]
    answer: int
    requests: int


LOADS = {
    "short": Load([64, 128, 256, 384, 448], 128, 800),
    "long": Load([31_232], 1024, 60),
}
GIB = {"gemma-3-1b": 4, "gemma-3-27b": 40, "gpt-oss-20b": 6, "gpt-oss-120b": 8}
"""Of the KV cache: few enough that pages run out before `--max-running-requests` does."""


class Memory(NamedTuple):
    """Settings for a shape in some memory, and the bytes of a page of either kind of layer."""

    config: ResolvedConfig
    windows: WindowPages
    full_bytes: int

    def cache(self) -> KVCache:
        size = self.config.page_size
        return make_cache(
            self.config.max_total_tokens // size + 1,
            size,
            share_prefixes=False,
            window=self.windows.window,
            window_pages=self.config.window_pages,
            shared=self.windows.shared,
            num_slabs=self.config.kv_slabs,
        )


def memory_of(shape: Shape, gib: int, *, shares: bool) -> Memory:
    layouts = shape.layouts()
    model = ModelConfig(
        architecture="", vocab_size=1, hidden_size=1, num_layers=shape.layers, num_heads=1,
        num_kv_heads=1, head_dim=2, intermediate_size=1, norm_eps=1e-6,
        max_position_embeddings=CONTEXT, rope_theta=1e4,
    )  # fmt: skip
    steps = resolve_steps(EngineConfig(), model, StepDefaults())
    window = window_of(layouts, CONTEXT)
    assert window is not None
    own, others = (
        page_bytes([each for each in layouts if is_windowed(each, window) == has], steps.page_size)
        for has in (True, False)
    )
    windows = WindowPages(window, own, shared_pages(layouts, window) if shares else None)
    config = resolve_cache(steps, None, free_bytes=gib << 30, page_bytes=others, window=windows)
    return Memory(config, windows, others)


def at_a_time(cache: KVCache, config: ResolvedConfig, load: Load) -> float:
    """Requests that run while others wait, the mean over steps since the first has ended."""
    scheduler = Scheduler(
        cache,
        token_budget=config.chunked_prefill_size,
        max_running_requests=config.max_running_requests,
    )
    params = SamplingParams(temperature=0.0, max_new_tokens=load.answer, ignore_eos=True)
    for number in range(load.requests):
        prompt = [1] * load.prompts[number % len(load.prompts)]
        message = GenerateRequest(
            rid=str(number), input_ids=prompt, arrival_time=float(number), params=params
        )
        length = len(prompt) + load.answer
        scheduler.add(Request(message, seed=1, stop_ids=frozenset(), max_tokens=length))
    running: list[int] = []
    while scheduler.waiting:
        plan = scheduler.plan(in_flight=False)
        assert plan, "nothing can run"
        ended = bool(running)
        for request, num_new in plan:
            cache.advance(request, num_new)
            if request.num_computed == request.num_tokens:
                request.add_placeholder(0)
                request.resolve([1])
                if request.num_tokens == request.max_tokens:
                    scheduler.remove(request)
                    ended = True
        if ended:
            running.append(len(scheduler.running))
    return sum(running) / len(running)


def by_bytes(memory: Memory, gib: int, load: Load) -> float:
    """How many requests of a load their bytes alone allow, half-way through their answers, beside
    one chunk of a prompt.
    """
    config, of_window = memory.config, memory.windows.page_bytes
    size = config.page_size
    chunk = -(-config.chunked_prefill_size // size)
    reach = -(-(memory.windows.window - 1) // size) + 1
    pages = [-(-(prompt + load.answer // 2) // size) for prompt in load.prompts]
    each = [count * memory.full_bytes + min(count, reach) * of_window for count in pages]
    room = (gib << 30) - chunk * of_window
    return min(config.max_running_requests, room * len(each) / sum(each))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.parse_args()
    print(f"{'':14} {'GiB':>4} {'texts':6} {'split':>6} {'shared':>7} {'by bytes':>9}")
    for name, gib in GIB.items():
        split, shared = (memory_of(SHAPES[name], gib, shares=each) for each in (False, True))
        for kind, load in LOADS.items():
            before, after = (at_a_time(each.cache(), each.config, load) for each in (split, shared))
            print(
                f"{name:14} {gib:4} {kind:6} {before:6.1f} {after:7.1f} "
                f"{by_bytes(split, gib, load):9.1f}"
            )


if __name__ == "__main__":
    main()
