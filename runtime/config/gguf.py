"""Converts the metadata of a GGUF file to members of config.json."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..files.gguf_reader import FastGGUFReader, metadata
from .model_registry import find_model, find_models, model_class
from .rope import gguf_rope

# Tensors of divisors of rotary frequencies.
GGUF_ROPE_FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
# Keys that each file must have, and their members of config.json.
_GGUF_KEYS = {
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "feed_forward_length": "intermediate_size",
    "context_length": "max_position_embeddings",
}


def gguf_members(reader: FastGGUFReader) -> tuple[str, dict[str, Any]]:
    """Return the architecture and the members of config.json that the metadata of a file give.

    Source of the keys: the GGUF specification's "Standardized key-value pairs", and the constants
    of the gguf library.
    """
    name = metadata(reader, "general.architecture")

    def get(key: str, default: Any = None, kind: type[int | float | str | list[int]] = int) -> Any:
        value = metadata(reader, f"{name}.{key}", default)
        if kind is not str and not isinstance(value, int | kind):
            raise ValueError(
                f"{name}.{key} must be a{' whole' if kind is int else ''} number, got {value!r}; "
                "convert the model again"
            )
        return value

    architecture = find_model(gguf=name).architecture
    same = [each.architecture for each in find_models() if name in (each.gguf, each.also_gguf)]
    if len(same) > 1:
        architecture = next((each for each in same if model_class(each).fits_gguf(get)), same[0])
    model = model_class(architecture)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    if "token_embd.weight" not in tensors:
        raise ValueError(
            "it has no tensor token_embd.weight; it holds no whole model, or is one of several "
            "parts: merge them"
        )
    content = _needed(get, model.gguf_lists, most_layers=len(tensors))
    heads = content["num_attention_heads"]
    head_dim = get("attention.key_length", content["hidden_size"] // max(heads, 1))
    if head_dim < 1:
        raise ValueError(f"heads of {head_dim} numbers make no sense; download the model again")
    turned = get("rope.dimension_count", head_dim)
    if turned != head_dim and not model.takes_partial_rotary:
        raise ValueError(
            "rotary embedding of a part of each head (rope.dimension_count) is not supported; "
            "choose another model"
        )
    if get("expert_count", 0) and "expert_count" not in model.gguf_keys:
        raise ValueError("mixtures of experts are not supported; choose another model")
    given = {
        member: metadata(reader, f"{name}.{key}")
        for key, member in model.gguf_keys.items()
        if reader.get_field(f"{name}.{key}") is not None
    }
    eps = "attention.layer_norm_epsilon"
    if reader.get_field(f"{name}.{eps}") is None:
        eps = "attention.layer_norm_rms_epsilon"
    factors = {
        each: [float(value) for value in tensors[each].data]
        for each in GGUF_ROPE_FACTORS
        if each in tensors
    }
    rope = gguf_rope(get, factors)
    kv_heads = get("attention.head_count_kv", heads, list)
    return architecture, {
        **content,
        "vocab_size": int(tensors["token_embd.weight"].shape[1]),
        # A number for each layer, if some layers have none.
        "num_key_value_heads": max(kv_heads) if isinstance(kv_heads, list) else kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": get(eps, kind=float),
        "rope_theta": get("rope.freq_base", 10000.0, kind=float),
        "rope_scaling": {**model.gguf_rope, **rope},
        **{name: rope[name] for name in ("original_max_position_embeddings",) if name in rope},
        "partial_rotary_factor": turned / head_dim,
        "tie_word_embeddings": "output.weight" not in tensors,
        "sliding_window": None,
        **given,
        **model.gguf_members(get, tensors),
    }


def _needed(get: Callable[..., Any], lists: Sequence[str], *, most_layers: int) -> dict[str, Any]:
    """Return the members of config.json that each file must have.

    `lists` are keys that may hold a number for each layer. Raises `ValueError`.
    """
    content = {}
    for key, member in _GGUF_KEYS.items():
        # The converter omits the key if all layers have experts.
        of_experts = get("expert_feed_forward_length", 0) or None
        default = of_experts if key == "feed_forward_length" else None
        value = get(key, default, kind=list if key in lists else int)
        content[member] = max(value, default=0) if isinstance(value, list) else value
    if content["num_hidden_layers"] > most_layers:
        raise ValueError(
            f"{most_layers} tensors are too few for {content['num_hidden_layers']} layers; "
            "download the model again"
        )
    return content
