"""The parts of the GPU suite. Each builds what it needs, measures one thing, and returns JSON."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..kernels.platform.detect import detect
from ..runtime.config.model import ModelConfig
from ..runtime.config.resolve import resolve_steps
from ..runtime.core.generation import GenerateRequest
from ..runtime.core.sampling_params import SamplingParams
from ..runtime.engine.build import Engine
from ..runtime.graphs.compile_process import start
from ..runtime.quantization.methods import NOTHING_PACKED
from .gpu_attention import attention
from .gpu_checks import correctness
from .gpu_diffusion import diffusion
from .gpu_engines import (
    LeftOut,
    Scale,
    close,
    decode_batch,
    engine_config,
    fill_cache,
    layer_parameters,
    make_engine,
    milliseconds,
    no_grad,
    prefill_batch,
)
from .gpu_models import OFF, correctness_models, two_ranks
from .gpu_ops import op_times
from .gpu_peer import load_transformers, load_vllm
from .gpu_prompts import gsm8k_prompts
from .gpu_quantized import quantized_times

Part = Callable[[Scale, Path, str], dict[str, Any]]

_NO_PREFILL: dict[str, Any] = {"cuda_graph_backend_prefill": "disabled"}
_NO_DECODE: dict[str, Any] = {"cuda_graph_backend_decode": "disabled"}
_PIECES: dict[str, Any] = {"piecewise_cuda_graph": True}
_EAGER_PIECES = _PIECES | {"piecewise_cuda_graph_compiler": "eager"}
_INDUCTOR_PIECES = _PIECES | {"piecewise_cuda_graph_compiler": "inductor"}


def floors(scale: Scale, folder: Path, device: str) -> dict[str, Any]:
    """Return the limits of every forward: bytes per second of a copy, read and written, and
    operations per second of a bfloat16 matrix product.
    """
    platform = detect(device)
    source = torch.randint(0, 127, (scale.copy_bytes,), dtype=torch.int8, device=platform.device())
    target = torch.empty_like(source)
    copy = milliseconds(partial(target.copy_, source), platform, scale)
    size = scale.matmul_size
    left, right = (
        torch.randn(size, size, dtype=torch.bfloat16, device=platform.device()) for _ in range(2)
    )
    product = torch.empty_like(left)
    matmul = milliseconds(lambda: torch.mm(left, right, out=product), platform, scale)
    return {
        "copy_bytes_per_second": 2 * scale.copy_bytes / copy["median"] * 1e3,
        "matmul_flops_per_second": 2 * size**3 / matmul["median"] * 1e3,
    }


def prefill(settings: dict[str, Any], scale: Scale, folder: Path, device: str) -> dict[str, Any]:
    """Measure the forward of one prompt of each size. `replayed` says whether a graph ran it."""
    if (
        settings.get("cuda_graph_backend_prefill") in ("breakable", "full")
        and not detect(device).graphs_are_real
    ):
        raise LeftOut(f"{device} records no graphs")
    sizes = ",".join(map(str, scale.prefill_sizes))
    engine = make_engine(
        scale, folder, device, **_NO_DECODE | {"piecewise_cuda_graph_tokens": sizes} | settings
    )
    rows = [
        _forward(engine, prefill_batch(engine, size), scale) | {"tokens": size}
        for size in scale.prefill_sizes
    ]
    model, parameters = scale.model, layer_parameters(engine)
    for row in rows:
        pairs = row["tokens"] ** 2 / 2
        attention = (
            4
            * pairs
            * model["num_attention_heads"]
            * model["head_dim"]
            * model["num_hidden_layers"]
        )
        row["flops"] = 2 * parameters * row["tokens"] + attention
    return {"rows": rows} | _graphs(engine)


def inductor_pieces(scale: Scale, folder: Path, device: str) -> dict[str, Any]:
    """Compile the pieces of part `prefill_piecewise_inductor`. Nothing is measured.

    Raises `RuntimeError` if that fails.
    """
    config = engine_config(scale, folder, device, **_NO_DECODE | _INDUCTOR_PIECES)
    model = ModelConfig.from_pretrained(str(folder))
    platform = detect(device)
    process = start(
        resolve_steps(config, model, platform),
        model,
        getattr(torch, scale.dtype),
        NOTHING_PACKED,
    )
    if (outcome := process.wait()).reason is not None:
        raise RuntimeError(outcome.text)
    return {}


def decode(settings: dict[str, Any], scale: Scale, folder: Path, device: str) -> dict[str, Any]:
    """Measure the forward of one decode step of each batch size. Each sequence has `scale.context`
    tokens.
    """
    sizes = ",".join(map(str, scale.batch_sizes))
    engine = make_engine(scale, folder, device, **_NO_PREFILL | {"cuda_graph_bs": sizes} | settings)
    fill_cache(engine)
    rows = [
        _forward(engine, decode_batch(engine, size, scale.context), scale) | {"batch": size}
        for size in scale.batch_sizes
    ]
    dtype = engine.runner.dtype.itemsize
    model, weights = scale.model, layer_parameters(engine) * dtype
    token = (
        2 * model["num_key_value_heads"] * model["head_dim"] * model["num_hidden_layers"] * dtype
    )
    for row in rows:
        row["bytes"] = weights + row["batch"] * scale.context * token
    return {"rows": rows} | _graphs(engine)


def load(settings: dict[str, Any], scale: Scale, folder: Path, device: str) -> dict[str, Any]:
    """Measure prompts with the lengths of GSM8K's and a common prefix through the scheduler,
    `concurrency` at a time.
    """
    engine = make_engine(scale, folder, device, **settings)
    prompts = gsm8k_prompts(scale, engine.runner.vocab_size)
    # Warm up: kernels are chosen and compiled at the first step of each shape.
    _serve(engine, prompts[: scale.concurrency], scale.concurrency, min(4, scale.output_len))
    engine.core.flush_cache()
    before = engine.core.stats()
    engine.runner.platform.synchronize()
    began = time.perf_counter()
    tokens = _serve(engine, prompts, scale.concurrency, scale.output_len)
    seconds = time.perf_counter() - began
    after = engine.core.stats()
    return {
        "seconds": seconds,
        "requests_per_second": len(prompts) / seconds,
        "output_tokens_per_second": tokens / seconds,
        "steps": after.steps_total - before.steps_total,
        "replays": after.graph_replays_total - before.graph_replays_total,
        "overlapped_steps": after.overlapped_steps_total - before.overlapped_steps_total,
        "discarded_tokens": after.discarded_tokens_total - before.discarded_tokens_total,
        "cached_share": (after.cached_tokens_total - before.cached_tokens_total)
        / (after.prompt_tokens_total - before.prompt_tokens_total),
        "preemptions": after.preemptions_total - before.preemptions_total,
    } | _graphs(engine)


def startup(scale: Scale, folder: Path, device: str) -> dict[str, Any]:
    """Measure the time until ready with `--startup fast`, and until the graphs of all default sizes
    exist.
    """
    began = time.perf_counter()
    engine = make_engine(
        scale, folder, device, startup="fast", piecewise_cuda_graph=True, max_total_tokens=None
    )
    ready = time.perf_counter()
    engine.startup.complete()
    done = time.perf_counter()
    info = engine.runner.graphs.info()
    return {
        "ready_seconds": ready - began,
        "all_graphs_seconds": done - began,
        "phases": engine.runner.clock.seconds | {"captures": info.capture_seconds},
        "kv_tokens": engine.runner.config.max_total_tokens,
        "memory": engine.runner.platform.memory()._asdict(),
        "prefill_sizes": len(info.prefill_sizes),
        "decode_sizes": len(info.decode_sizes),
        "failed_sizes": info.failed_sizes,
    } | _graphs(engine)


@no_grad
def _forward(engine: Engine, batch: Any, scale: Scale) -> dict[str, Any]:
    runner = engine.runner
    before = runner.graph_counts().replays
    times = milliseconds(lambda: runner.forward(batch), runner.platform, scale)
    return {
        "ms": times["median"],
        "min_ms": times["min"],
        "replayed": runner.graph_counts().replays > before,
    }


def _graphs(engine: Engine) -> dict[str, Any]:
    """Return what the graphs cost, and end the engine."""
    info = engine.runner.graphs.info()
    close(engine)
    return {
        "attention": engine.runner.attention_backend,
        "graphs": info.num_graphs,
        "graph_bytes": info.graph_bytes,
        "distinct_pieces": info.distinct_pieces,
        "failed_sizes": info.failed_sizes,
        "capture_seconds": info.capture_seconds,
    }


def _serve(engine: Engine, prompts: list[list[int]], concurrency: int, output_len: int) -> int:
    """Run all prompts through the scheduler. Return the number of output tokens.

    Raises `RuntimeError` if a request fails.
    """
    params = SamplingParams(temperature=0.0, max_new_tokens=output_len, ignore_eos=True)
    waiting = [
        GenerateRequest(rid=f"load-{number}", input_ids=ids, params=params)
        for number, ids in enumerate(prompts)
    ][::-1]
    running = tokens = 0
    while waiting or running:
        while waiting and running < concurrency:
            engine.core.add(waiting.pop())
            running += 1
        for output in engine.core.step().outputs:
            tokens += len(output.token_ids)
            if output.error is not None:
                raise RuntimeError(output.error)
            running -= output.finish_reason is not None
    return tokens


# Sizes of graphs that the load needs. Part `startup` measures the capture of all default sizes.
_FOR_LOAD = {
    "piecewise_cuda_graph_tokens": "16,32,64,96,128,160,192,224,256,320,384,512,1024,2048,4096",
    "cuda_graph_bs": "1,2,4,8,16,32,64,96,112,120,128",
}
# Parts in the order in which they run, the most important first.
PARTS: dict[str, Part] = {
    "floors": floors,
    "correctness": correctness,
    "correctness_models": correctness_models,
    "two_ranks": two_ranks,
    "inductor_pieces": inductor_pieces,
    "attention": attention,
    "ops": op_times,
    "quantized": quantized_times,
    "prefill_off": partial(prefill, OFF),
    "prefill_piecewise_eager": partial(prefill, _EAGER_PIECES),
    "decode_off": partial(decode, OFF),
    "decode_full": partial(decode, {"cuda_graph_backend_decode": "full"}),
    "load_off": partial(load, OFF),
    "load_graphs": partial(load, _EAGER_PIECES | _FOR_LOAD),
    "load_no_overlap": partial(
        load, _EAGER_PIECES | _FOR_LOAD | {"disable_overlap_schedule": True}
    ),
    "prefill_breakable": partial(prefill, {"cuda_graph_backend_prefill": "breakable"}),
    "prefill_full": partial(prefill, {"cuda_graph_backend_prefill": "full"}),
    "startup_cold": startup,
    "startup_warm": startup,
    "diffusion_eager": partial(diffusion, False),
    "diffusion_regional": partial(diffusion, True),
    "prefill_piecewise_inductor": partial(prefill, _INDUCTOR_PIECES),
    "load_vllm": load_vllm,
    "load_transformers": load_transformers,
}
