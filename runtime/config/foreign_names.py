"""Names and values of settings of vLLM and SGLang that have the same meaning as settings here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Names of other servers' settings and their names here. Settings with the same name and meaning,
# such as SGLang's `--max-running-requests`, are not listed.
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
    "num_speculative_tokens": "speculative_num_steps",
    "speculative_model": "speculative_draft_model_path",
    "speculative_draft_model": "speculative_draft_model_path",
}
_VALUES: Mapping[str, Mapping[str, str]] = {
    "dtype": {"half": "float16", "float": "float32"},
    "kv_cache_dtype": {"fp8": "fp8_e4m3"},
    "sampling_defaults": {"auto": "model", "vllm": "openai"},
    "load_format": dict.fromkeys(("safetensors", "gguf", "hf"), "auto"),
    "quantization": {"awq_marlin": "awq", "gptq_marlin": "gptq"},
    # A draft model is used whatever else guesses.
    "speculative_algorithm": {
        **{"NGRAM": "ngram", "STANDALONE": "prediction"},
        **{"EAGLE3": "eagle3", "NEXTN": "nextn", "MTP": "nextn", "mtp": "nextn"},
    },
    "attention_backend": {
        "FLASHINFER": "flashinfer",
        "TRITON_ATTN": "triton",
        "TORCH_SDPA": "torch",
        "torch_native": "torch",
        # SGLang's names for diffusion pipelines, whose default is torch's attention.
        "torch_sdpa": "auto",
        "torch_cudnn_sdpa": "native_cudnn",
        **{"fa": "flash", "fa2": "flash", "sage_attn": "sage"},
    },
}


def own_value(name: str, value: Any) -> Any:
    """Return the value here for `value` of the setting `name`."""
    return _VALUES.get(name, {}).get(value, value) if isinstance(value, str) else value


def own_names(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings under their names here. Raises `ValueError` if one is given under both
    names.
    """
    found: dict[str, Any] = {}
    for name, value in settings.items():
        own = SAME.get(name, name)
        if own in found:
            foreign = next(key for key in settings if SAME.get(key) == own)
            raise ValueError(f"{own} is given twice, once as {foreign}; give it once")
        found[own] = own_value(own, value)
    return found
