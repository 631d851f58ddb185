"""What the GPU suite measures on: engines with random weights, made-up steps, and a clock that
waits for the device.
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

from ..kernels.platform import Platform
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
# Llama-3.1-8B's shapes. Its rope scaling does not change times and is left out.
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
    """A part cannot run on this machine, for the reason that is told; nothing has failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """What is measured. Lengths in tokens; `copy_bytes` and `matmul_size`: how much the floors
    move, and the side of their matrices.

    `num_requests`, `concurrency`, `output_len`: the load through the scheduler. `warm_up`: seconds
    of calls before calls are timed, which a processor at rest needs to reach its clock rate.
    `until`: when a part has to be done, by `time.monotonic`.
    """

    model: dict[str, Any]
    dtype: str
    prefill_sizes: Sequence[int]
    batch_sizes: Sequence[int]
    context: int
    num_requests: int
    concurrency: int
    output_len: int
    max_total_tokens: int
    copy_bytes: int
    matmul_size: int
    repeats: int
    warm_up: float
    until: float = math.inf


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
    """An engine of `engine_config`, graphs included. Raises as `build_engine` does."""
    return build_engine(engine_config(scale, folder, device, **settings), progress=False)


def close(engine: Engine) -> None:
    """End what the engine has started; its memory is free once the caller has dropped it too."""
    engine.startup.stop()
    gc.collect()
    engine.runner.platform.empty_cache()


def prefill_batch(engine: Engine, num_tokens: int) -> Batch:
    """One prompt that is computed in one step."""
    return _batch(engine, [(num_tokens, num_tokens)])


def decode_batch(engine: Engine, batch_size: int, context: int) -> Batch:
    """`batch_size` sequences of `context` tokens, of which the last is computed."""
    return _batch(engine, [(context, 1)] * batch_size)


def _batch(engine: Engine, lens: list[tuple[int, int]]) -> Batch:
    """(length, new tokens) of each sequence. Every one has pages of its own, dealt in a random
    order.
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
    """Random keys and values: a processor is faster on zeros."""
    for layer in [*engine.runner.pool.k, *engine.runner.pool.v]:
        layer.normal_()


def milliseconds(call: Callable[[], object], platform: Platform, scale: Scale) -> dict[str, float]:
    """Median and least time of one call, until the device is done; by the host's clock, for a step
    costs the host time too.
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
    """Numbers in the weights of the layers: embedding and output head aside, which a forward looks
    up, or leaves to the sampler.
    """
    return sum(parameter.numel() for parameter in engine.runner.model.model.layers.parameters())


def no_grad(function: Callable[..., Any]) -> Callable[..., Any]:
    """Steps run in inference mode, as the scheduler runs them."""
    return torch.inference_mode()(function)
