"""The tools of the GPU suite: engines with random weights, made-up steps, and a clock that waits
for the device.
"""

from __future__ import annotations

import gc
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..kernels.platform.platform import Platform
from ..runtime.config.engine import EngineConfig
from ..runtime.core.batch import Batch, build_batch
from ..runtime.core.generation import GenerateRequest
from ..runtime.core.request import Request, Scheduled
from ..runtime.core.sampling_params import SamplingParams
from ..runtime.engine.build import Engine, build_engine

_WARM_UPS = 3
_COMMON = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
# Llama-3.1-8B's shapes, without its rope scaling, which does not change times.
LLAMA_8B = _COMMON | {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
}
LLAMA_TINY = _COMMON | {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
}
QWEN3_TINY = LLAMA_TINY | {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "rms_norm_eps": 1e-6,
}


class LeftOut(Exception):
    """A part cannot run on this machine, for the reason in its text. This is not a failure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """What is measured. Lengths are in tokens."""

    model: dict[str, Any]
    dtype: str
    prefill_sizes: Sequence[int]
    batch_sizes: Sequence[int]
    context: int
    num_requests: int  # The load through the scheduler has these three.
    concurrency: int
    output_len: int
    max_total_tokens: int
    copy_bytes: int  # Bytes that the floors copy.
    matmul_size: int  # Rows and columns of the matrices of the floors.
    repeats: int
    warm_up: float  # Seconds of calls before timing, until the processor has its clock rate.
    until: float = math.inf  # When a part must be done, in `time.monotonic` seconds.


FULL = Scale(
    model=LLAMA_8B,
    dtype="bfloat16",
    prefill_sizes=(16, 32, 64, 128, 256, 512, 1024, 2048, 4096),
    batch_sizes=(1, 2, 4, 8, 16, 32, 64, 128, 256),
    context=512,
    num_requests=256,
    concurrency=128,
    output_len=512,
    max_total_tokens=200_000,
    copy_bytes=2**32,
    matmul_size=8192,
    repeats=10,
    warm_up=0.1,
)
TINY = Scale(
    model=LLAMA_TINY,
    dtype="float32",
    prefill_sizes=(16, 32),
    batch_sizes=(1, 4),
    context=24,
    num_requests=6,
    concurrency=3,
    output_len=4,
    max_total_tokens=8192,
    copy_bytes=2**16,
    matmul_size=64,
    repeats=2,
    warm_up=0.0,
)
SCALES = {"full": FULL, "tiny": TINY}


def engine_config(scale: Scale, folder: Path, device: str, **settings: Any) -> EngineConfig:
    """Return the settings of an engine with random weights and a small KV cache.

    The model's config.json is written to `folder`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(settings.pop("model", scale.model)))
    defaults = {
        "dtype": scale.dtype,
        "context_length": min(8192, scale.model["max_position_embeddings"]),
        "chunked_prefill_size": max(scale.prefill_sizes),
        "max_running_requests": max(*scale.batch_sizes, scale.concurrency),
        "max_total_tokens": scale.max_total_tokens,
        "startup": "full",
        "piecewise_cuda_graph": False,
    }
    return EngineConfig(
        model_path=str(folder), load_format="dummy", device=device, **defaults | settings
    )


def make_engine(scale: Scale, folder: Path, device: str, **settings: Any) -> Engine:
    """Build an engine of `engine_config`, including its graphs. Raises as `build_engine` does."""
    return build_engine(engine_config(scale, folder, device, **settings), progress=False)


def close(engine: Engine) -> None:
    """End the threads and processes of an engine. Its memory is freed when the caller drops the
    engine.
    """
    engine.startup.stop()
    gc.collect()
    engine.runner.platform.empty_cache()


def prefill_batch(engine: Engine, num_tokens: int) -> Batch:
    """Return a batch of one prompt, computed in one step."""
    return _batch(engine, [(num_tokens, num_tokens)])


def decode_batch(engine: Engine, batch_size: int, context: int) -> Batch:
    """Return a batch of `batch_size` sequences of `context` tokens: the last one is computed."""
    return _batch(engine, [(context, 1)] * batch_size)


def _batch(engine: Engine, lens: list[tuple[int, int]]) -> Batch:
    """Return a batch of sequences of (length, new tokens).

    Each sequence has its own pages, in a random order.
    """
    pool, draw = engine.runner.pool, np.random.default_rng(0)
    pages = iter((draw.permutation(pool.num_pages - 1) + 1).tolist())
    scheduled = []
    for number, (length, new) in enumerate(lens):
        ids = draw.integers(3, engine.runner.vocab_size, length).tolist()
        message = GenerateRequest(
            rid=str(number), input_ids=ids, params=SamplingParams(max_new_tokens=1)
        )
        request = Request(message, seed=number, stop_ids=frozenset(), max_tokens=length + 1)
        request.num_computed = length - new
        request.pages = [next(pages) for _ in range(-(-length // pool.page_size))]
        scheduled.append(Scheduled(request, new))
    slot_dtype = engine.runner.platform.slot_dtype
    return build_batch(scheduled, pool.page_size, engine.runner.device, slot_dtype)


def fill_cache(engine: Engine) -> None:
    """Fill the KV cache with random numbers, because processors are faster on zeros."""
    for layer in [*engine.runner.pool.k, *engine.runner.pool.v]:
        layer.normal_()


def milliseconds(call: Callable[[], object], platform: Platform, scale: Scale) -> dict[str, float]:
    """Return the median and the least time of one call, until the device is done.

    The host's clock is used, because a step includes the host's time.
    """
    warm = time.perf_counter() + scale.warm_up
    for number in count():
        if number >= _WARM_UPS and time.perf_counter() >= warm:
            break
        call()
        platform.synchronize()
    times = []
    for _ in range(scale.repeats):
        platform.synchronize()
        began = time.perf_counter()
        call()
        platform.synchronize()
        times.append((time.perf_counter() - began) * 1e3)
    return {"median": statistics.median(times), "min": min(times)}


def layer_parameters(engine: Engine) -> int:
    """Return the number of parameters of the layers.

    Embedding and output head are excluded: a forward looks up rows of the embedding, and the head
    runs in the sampler.
    """
    return sum(parameter.numel() for parameter in engine.runner.model.model.layers.parameters())


def no_grad(function: Callable[..., Any]) -> Callable[..., Any]:
    """Run `function` in inference mode, as the scheduler does."""
    return torch.inference_mode()(function)
