"""The GPU suite's checks of whole models: Llama, Qwen3, layers of experts, latent attention and
recurrent layers, with and without graphs, and on two ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from ..kernels.platform.detect import detect
from ..kernels.platform.platform import Platform
from ..runtime.core.generation import GenerateRequest
from ..runtime.core.sampling_params import SamplingParams
from ..runtime.distributed.processes import start_ranks
from ..runtime.engine.build import Engine, build_engine
from .gpu_check import Check, checked, run
from .gpu_engines import LLAMA_TINY, QWEN3_TINY, LeftOut, Scale, close, engine_config

QWEN3_MOE_TINY = QWEN3_TINY | {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}
DEEPSEEK_TINY = LLAMA_TINY | {
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 1.5,
}
MAMBA2_TINY = LLAMA_TINY | {
    "model_type": "mamba2",
    "architectures": ["Mamba2ForCausalLM"],
    "num_heads": 8,
    "head_dim": 16,
    "n_groups": 2,
    "state_size": 32,
    "expand": 2,
    "conv_kernel": 4,
}
_MODES: dict[str, dict[str, Any]] = {
    "piecewise": {
        "piecewise_cuda_graph": True,
        "piecewise_cuda_graph_compiler": "eager",
        "cuda_graph_backend_decode": "disabled",
    },
    "breakable": {
        "cuda_graph_backend_prefill": "breakable",
        "cuda_graph_backend_decode": "disabled",
    },
    "full prefill": {
        "cuda_graph_backend_prefill": "full",
        "cuda_graph_backend_decode": "disabled",
    },
    "full decode": {"cuda_graph_backend_prefill": "disabled", "cuda_graph_backend_decode": "full"},
    "steps that do not overlap": {"disable_overlap_schedule": True, "disable_cuda_graph": True},
    "torch's attention": {"attention_backend": "torch", "disable_cuda_graph": True},
}


OFF: dict[str, Any] = {"disable_cuda_graph": True}
# Maximum share of tokens that differ. The logits of a random model are close, so one near tie in
# bfloat16 changes all later tokens.
_OTHER_TOKENS = {"float32": 0.0, "bfloat16": 0.75}


def correctness_models(scale: Scale, folder: Path, device: str) -> dict[str, Any]:
    """Compare tokens of small models with and without graphs."""
    return run(scale, _model_checks(scale, folder, detect(device)))


def two_ranks(scale: Scale, folder: Path, device: str) -> dict[str, Any]:
    """Compare tokens of two ranks with those of one, without and with graphs."""
    platform = detect(device)
    try:
        platform.check_ranks(2)
    except ValueError as error:
        raise LeftOut(str(error)) from None
    return run(scale, _rank_checks(scale, folder, platform))


def _rank_checks(scale: Scale, folder: Path, platform: Platform) -> Iterator[Check]:
    for model in (LLAMA_TINY, QWEN3_MOE_TINY):
        answer = partial(_tokens, scale, folder, platform, model, "float32")
        expected: list[int] = []
        name = model["model_type"]
        yield checked(f"{name}, one rank", lambda e=expected, a=answer: e.extend(a(OFF)) or 0.0)
        for graphs, settings in (("no graphs", OFF), ("recorded decodes", _MODES["full decode"])):
            differ = partial(_share_of_other_tokens, answer, settings | {"tp_size": 2}, expected)
            yield checked(f"{name}, two ranks, {graphs}", differ, allowed=0.0)


def _model_checks(scale: Scale, folder: Path, platform: Platform) -> Iterator[Check]:
    """Compare greedy tokens of small models: equal in float32, near ties differ in bfloat16."""
    modes = {
        name: settings
        for name, settings in _MODES.items()
        if platform.graphs_are_real or name not in ("breakable", "full prefill")
    }
    for model, dtype in (
        (LLAMA_TINY, "float32"),
        (QWEN3_TINY, "float32"),
        (LLAMA_TINY, "bfloat16"),
        (QWEN3_MOE_TINY, "float32"),
        (DEEPSEEK_TINY, "float32"),
        (MAMBA2_TINY, "float32"),
    ):
        answer = partial(_tokens, scale, folder, platform, model, dtype)
        expected: list[int] = []
        yield checked(
            f"{model['model_type']} in {dtype}, no graphs",
            lambda e=expected, a=answer: e.extend(a(OFF)) or 0.0,
        )
        for name, settings in modes.items():
            if model is MAMBA2_TINY and name in ("full prefill", "torch's attention"):
                continue  # Recurrent layers have no attention, and are no decodes of their own.
            differ = partial(_share_of_other_tokens, answer, settings, expected)
            yield checked(
                f"{model['model_type']} in {dtype}, {name}", differ, allowed=_OTHER_TOKENS[dtype]
            )


def _share_of_other_tokens(
    answer: Callable[[dict[str, Any]], list[int]], settings: dict[str, Any], expected: list[int]
) -> float:
    actual = answer(settings)
    return sum(one != other for one, other in zip(expected, actual, strict=True)) / len(expected)


def _tokens(
    scale: Scale,
    folder: Path,
    platform: Platform,
    model: dict[str, Any],
    dtype: str,
    settings: dict[str, Any],
) -> list[int]:
    """Return a small model's answers to three prompts, each asked twice for a cached prefix."""
    config = engine_config(
        scale, folder / model["model_type"], platform.device_type, model=model,
        max_total_tokens=2048, max_running_requests=4,
        **{
            "dtype": dtype, "context_length": 256, "chunked_prefill_size": 64,
            "piecewise_cuda_graph_tokens": "16,32,64",
        } | settings,
    )  # fmt: skip
    ranks = start_ranks(config)
    try:
        return _answers(build_engine(config, progress=False, ranks=ranks), platform, settings)
    finally:
        ranks.close()


def _answers(engine: Engine, platform: Platform, settings: dict[str, Any]) -> list[int]:
    """Return the tokens of an engine, and end it."""
    params = SamplingParams(temperature=0.0, max_new_tokens=6, ignore_eos=True)
    answers: dict[str, list[int]] = {}
    for repeat in range(2):
        for number, length in enumerate((3, 100, 41)):
            rid = f"{repeat}-{number}"
            answers[rid] = []
            engine.core.add(
                GenerateRequest(rid=rid, input_ids=list(range(5, 5 + length)), params=params)
            )
        while engine.core.has_work:
            for output in engine.core.step().outputs:
                answers[output.rid] += output.token_ids
    failed, replays = (
        engine.runner.graphs.info().failed_sizes,
        engine.core.stats().graph_replays_total,
    )
    close(engine)
    # An engine without its graphs gives the same answers, so check that the graphs ran.
    if failed:
        raise RuntimeError(f"sizes without a graph: {failed}")
    if platform.graphs_are_real and "disable_cuda_graph" not in settings and not replays:
        raise RuntimeError("no step was replayed")
    return [token for rid in sorted(answers) for token in answers[rid]]
