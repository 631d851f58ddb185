"""Settings that vLLM and SGLang call otherwise: their names and values, where they mean the
same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SAME: Mapping[str, str] = {
    "model": "model_path",
    "tokenizer": "tokenizer_path",
    "max_model_len": "context_length",
    "seed": "random_seed",
    "max_num_seqs": "max_running_requests",
    "max_num_batched_tokens": "chunked_prefill_size",
    "block_size": "page_size",
    "tp": "tp_size",
    "tensor_parallel_size": "tp_size",
    "ep": "ep_size",
    "expert_parallel_size": "ep_size",
    "dp": "dp_size",
    "data_parallel_size": "dp_size",
    "generation_config": "sampling_defaults",
    "enforce_eager": "disable_cuda_graph",
}
"""A foreign name to ours. What has the same name and meaning, such as SGLang's
`--max-running-requests`, is not here.
"""
_VALUES: Mapping[str, Mapping[str, str]] = {
    "dtype": {"half": "float16", "float": "float32"},
    "kv_cache_dtype": {"fp8": "fp8_e4m3"},
    "sampling_defaults": {"auto": "model", "vllm": "openai"},
    "load_format": dict.fromkeys(("safetensors", "gguf", "hf"), "auto"),
    "quantization": {"awq_marlin": "awq", "gptq_marlin": "gptq"},
    "attention_backend": {
        "FLASHINFER": "flashinfer",
        "TRITON_ATTN": "triton",
        "TORCH_SDPA": "torch",
        "torch_native": "torch",
    },
}


def own_value(name: str, value: Any) -> Any:
    """What we call `value` of our setting `name`."""
    return _VALUES.get(name, {}).get(value, value) if isinstance(value, str) else value


def own_names(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings under our names. Raises `ValueError` where one is given under both."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        own = SAME.get(name, name)
        if own in found:
            foreign = next(key for key in settings if SAME.get(key) == own)
            raise ValueError(f"{own} is given twice, once as {foreign}; give it once")
        found[own] = own_value(own, value)
    return found
