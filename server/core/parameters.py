"""Parameters that clients may send and this server does not use, by endpoint family.

A hint is ignored, because the answer is correct without it. A parameter that would change the
answer is refused unless its value is neutral. Wire models refer to these tables by `others`.
Parameters that are used are fields of the wire models.

The names are those of OpenAI's, Anthropic's and Ollama's API references, and of the servers vLLM,
SGLang and llama.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from pydantic_core import PydanticCustomError


class Other(NamedTuple):
    """A parameter that is not used.

    `remedy` is None for a hint. Otherwise the parameter is refused, unless its value is one of
    `neutral` or empty: false, "", [], {}.
    """

    remedy: str | None = None
    neutral: tuple[Any, ...] = ()


Others = Mapping[str, Other]
_HINT = Other()


def _hints(*names: str) -> Others:
    return dict.fromkeys(names, _HINT)


def _refused(remedy: str, *names: str, neutral: tuple[Any, ...] = ()) -> Others:
    return dict.fromkeys(names, Other(remedy, neutral))


_LEAVE_OUT = "leave it out"
_OF_OPENAI = _hints(
    "user", "metadata", "safety_identifier", "service_tier", "store", "verbosity",
)  # fmt: skip
_OF_SERVERS = _hints(
    # vLLM
    "request_id", "length_penalty", "early_stopping", "spaces_between_special_tokens",
    "mm_processor_kwargs", "kv_transfer_params", "vllm_xargs",
    # SGLang
    "rid", "bootstrap_host", "bootstrap_port", "bootstrap_room", "data_parallel_rank",
    "return_cached_tokens_details",
    # llama.cpp
    "mirostat", "mirostat_tau", "mirostat_eta", "cache_prompt", "id_slot", "n_keep", "n_discard",
    "n_cache_reuse", "samplers", "timings_per_token", "return_progress", "repeat_last_n",
    "penalize_nl", "dry_base", "dry_allowed_length", "dry_penalty_last_n",
    "dry_sequence_breakers", "xtc_threshold", "dynatemp_exponent", "num_ctx", "keep_alive",
    "reasoning_format", "parse_tool_calls", "n_probs", "min_keep",
)  # fmt: skip
_SAMPLERS = {
    **_refused(_LEAVE_OUT, "typical_p", "tfs_z", "tfs", "top_a", "smoothing_factor",
               neutral=(1, 0)),
    **_refused(_LEAVE_OUT, "dry_multiplier", "xtc_probability", "dynatemp_range", neutral=(0,)),
    **_refused(_LEAVE_OUT, "top_n_sigma", "t_max_predict_ms", neutral=(-1, 0)),
    **_refused("send repetition_penalty", "repeat_penalty", neutral=(1,)),
    **_refused("send max_tokens", "n_predict", "num_predict", neutral=(-1,)),
    **_refused("send guided_grammar or ebnf", "grammar"),
    **_refused("send add_special_tokens or the text itself", "input_prefix"),
}  # fmt: skip
COMPLETIONS: Others = {
    **_OF_OPENAI,
    **{name: other for name, other in _OF_SERVERS.items() if name != "vllm_xargs"},
    **_SAMPLERS,
}
GENERATION: Others = {
    **COMPLETIONS,
    **_hints("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"),
}
CHAT: Others = {
    name: other
    for name, other in COMPLETIONS.items()
    if name not in {"store", "metadata", "service_tier"}
}
LLAMA_CPP: Others = {
    # Names that llama.cpp's own endpoints use.
    **{name: other for name, other in GENERATION.items() if name not in {
        "n_predict", "n_probs", "repeat_penalty", "grammar", "timings_per_token", "input_prefix"}},
    **_hints("sse_ping_interval", "vllm_xargs"),
    **_refused("send n_cmpl", "n", neutral=(1,)),
    **_refused("send it to /v1/completions or /v1/chat/completions", "cache_salt"),
}  # fmt: skip
RESPONSES: Others = {
    **_hints("client_metadata", "stream_obfuscation", "verbosity"),
    **_OF_SERVERS,
    **_SAMPLERS,
    **_refused("send max_output_tokens", "max_tokens", "max_completion_tokens"),
    **_refused("send it as text.format", "response_format"),
    **_refused("send reasoning with an effort", "reasoning_effort"),
}
OLLAMA: Others = _hints("keep_alive", "width", "height", "steps", "verbose")
OLLAMA_OPTIONS: Others = {
    **_hints("num_ctx", "num_keep", "num_batch", "num_gpu", "main_gpu", "num_thread", "numa",
             "low_vram", "f16_kv", "logits_all", "vocab_only", "embedding_only", "use_mmap",
             "use_mlock", "repeat_last_n", "penalize_newline", "mirostat", "mirostat_tau",
             "mirostat_eta", "num_gqa", "rope_frequency_base", "rope_frequency_scale"),
    **_refused(_LEAVE_OUT, "typical_p", "tfs_z", neutral=(1, 0)),
}  # fmt: skip
MESSAGES: Others = {
    **_hints("metadata", "service_tier", "context_management", "betas", "inference_geo", "speed",
             "diagnostics", "anthropic_version", "anthropic_beta"),
    **_refused("send max_tokens", "max_tokens_to_sample"),
    **_refused("send stop_sequences", "stop"),
}  # fmt: skip


def check_others(others: Others, data: Mapping[str, Any]) -> None:
    """Raise `PydanticCustomError` for the first parameter of `data` that is refused."""
    for name in data.keys() & others.keys():
        remedy, neutral = others[name]
        value = data[name]
        says_nothing = value is None or value is False or value in ("", [], {})
        if (
            remedy is not None
            and not says_nothing
            and (isinstance(value, bool) or value not in neutral)
        ):
            raise PydanticCustomError(
                "disagreement",
                "{param} is not supported by this server; {remedy}",
                {"param": name, "remedy": remedy},
            )
