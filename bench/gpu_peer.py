"""The GPU suite's peers: the load of parts `load_*` through transformers' continuous batching and
through vLLM.
"""

from __future__ import annotations

import json
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers

from ..kernels.platform.detect import detect
from ..kernels.platform.platform import Platform
from .gpu_engines import LeftOut, Scale
from .gpu_prompts import gsm8k_prompts

_LOAD_SECONDS = 60.0  # Seconds after which a load is stopped.
_RESERVE_SECONDS = 10.0  # Seconds that a stopped part needs to end and to write its result.
_WARM_UP_TOKENS = 4


def load_transformers(scale: Scale, folder: Path, device: str) -> dict[str, Any]:
    """Run the load through transformers' `ContinuousBatchingManager`, with the attention, graphs
    and overlap that it chooses.

    Concurrency, tokens per step and the size of the KV cache equal those of our engine. The load is
    stopped after a minute; then `output_tokens_per_second` counts all tokens up to that time.
    Raises `RuntimeError` if a request fails.
    """
    platform = detect(device)
    platform.set_up(None)
    model = _random_model(scale, platform)
    manager = model.init_continuous_batching(
        generation_config=_greedy(scale.output_len),
        continuous_batching_config=_batching_config(scale),
    )
    try:
        manager.warmup()
        manager.start()
        # Warm up: kernels are chosen at the first step of each shape. The other seed has another
        # prefix, so nothing of the load is cached.
        warm_up = gsm8k_prompts(scale, scale.model["vocab_size"], seed=1)[: scale.concurrency]
        _serve(manager, warm_up, min(_WARM_UP_TOKENS, scale.output_len), scale.until)
        settings, steps = _settings(manager), manager.current_batch
        prompts = gsm8k_prompts(scale, scale.model["vocab_size"])
        until = min(time.monotonic() + _LOAD_SECONDS, scale.until - _RESERVE_SECONDS)
        served = _serve(manager, prompts, scale.output_len, until)
        return (
            served
            | {
                "steps": manager.current_batch - steps,
                "peer": f"transformers {transformers.__version__}",
            }
            | settings
        )
    finally:
        if manager.is_running():
            manager.stop(hard_stop=True)
        manager.destroy()


def load_vllm(scale: Scale, folder: Path, device: str) -> dict[str, Any]:
    """Run the load through `vllm.LLM` with its defaults, except for the number of sequences.

    Raises `LeftOut` if vllm is not installed.
    """
    if find_spec("vllm") is None:
        raise LeftOut("vllm is not installed")
    import vllm

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(scale.model))
    engine = vllm.LLM(
        model=str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype=scale.dtype,
        max_model_len=min(8192, scale.model["max_position_embeddings"]),
        max_num_seqs=scale.concurrency,
        enable_prefix_caching=True,
    )

    def serve(prompts: list[list[int]], output_len: int) -> list[Any]:
        params = vllm.SamplingParams(
            temperature=0.0, max_tokens=output_len, ignore_eos=True, detokenize=False
        )
        return list(
            engine.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        )

    serve(
        gsm8k_prompts(scale, scale.model["vocab_size"], seed=1)[: scale.concurrency],
        min(_WARM_UP_TOKENS, scale.output_len),
    )
    engine.reset_prefix_cache()
    prompts = gsm8k_prompts(scale, scale.model["vocab_size"])
    began = time.perf_counter()
    outputs = serve(prompts, scale.output_len)
    seconds = time.perf_counter() - began
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    cached = sum(output.num_cached_tokens or 0 for output in outputs) / sum(map(len, prompts))
    figures = _figures(tokens, len(outputs), len(prompts), seconds)
    return figures | {"cached_share": cached, "peer": f"vllm {vllm.__version__}", "settings": {}}


def _figures(tokens: int, finished: int, requests: int, seconds: float) -> dict[str, Any]:
    return {
        "seconds": seconds,
        "requests": requests,
        "finished": finished,
        "requests_per_second": finished / seconds,
        "output_tokens_per_second": tokens / seconds,
    }


def _random_model(scale: Scale, platform: Platform) -> Any:
    """Return transformers' model of these shapes, with random weights made on the device."""
    shapes = {name: value for name, value in scale.model.items() if name != "model_type"}
    config = transformers.AutoConfig.for_model(scale.model["model_type"], **shapes)
    torch.manual_seed(0)
    with platform.device():
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, scale.dtype), attn_implementation="sdpa"
        )
    return model.eval()


def _greedy(output_len: int) -> Any:
    """Return a config in which no token ends an answer: no vocabulary has the id -1."""
    return transformers.GenerationConfig(
        do_sample=False, max_new_tokens=output_len, eos_token_id=-1
    )


def _batching_config(scale: Scale) -> Any:
    """Return a config that sets only the size of the load. The manager chooses the rest for the
    device.
    """
    defaults = transformers.ContinuousBatchingConfig()
    page = getattr(defaults, "page_size", None) or defaults.block_size
    return transformers.ContinuousBatchingConfig(
        max_requests_per_batch=scale.concurrency,
        max_batch_tokens=max(scale.prefill_sizes),
        num_blocks=-(-scale.max_total_tokens // page),
    )


def _settings(manager: Any) -> dict[str, Any]:
    """Return the settings that the manager chose."""
    config = manager.continuous_batching_config
    return {
        "attention": manager.model.config._attn_implementation,
        "settings": {
            "CUDA graphs": any(config.cuda_graph_booleans),
            "steps that overlap": config.use_async_batching,
            "compiled": config.varlen_compile_config is not None,
            "prefix sharing": config.allow_block_sharing,
        },
    }


def _serve(manager: Any, prompts: list[list[int]], output_len: int, until: float) -> dict[str, Any]:
    """Run all prompts through the running manager, and return the figures.

    The manager is stopped at `until`, in `time.monotonic` seconds. Raises `RuntimeError` if a
    request fails, or if there is no token.
    """
    outputs: list[Any] = []
    began = time.perf_counter()
    manager.add_requests(prompts, max_new_tokens=output_len, record_timestamps=True)
    while len(outputs) < len(prompts) and (left := until - time.monotonic()) > 0:
        output = manager.get_result(timeout=min(1.0, left))
        if output is not None and output.error is not None:
            raise RuntimeError(output.error)
        if output is not None:
            outputs.append(output)
        elif not manager.is_running():
            raise RuntimeError("the manager's loop has ended")
    finished = len(outputs)
    if finished < len(prompts):
        manager.stop(hard_stop=True)
        # The manager returns running requests as failed, with their tokens so far.
        while (output := manager.get_result(timeout=0.0)) is not None:
            outputs.append(output)
    tokens = sum(len(output.generated_tokens) for output in outputs)
    if not tokens:
        raise RuntimeError("no token came")
    ended = max(output.timestamps[-1] for output in outputs if output.timestamps)
    return _figures(tokens, finished, len(prompts), ended - began)
