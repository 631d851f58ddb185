"""Writes tiny models as GGUF files, quantised as asked."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

Kind = gguf.GGMLQuantizationType

_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "block_sparse_moe.gate.": "ffn_gate_inp.",
    "mlp.gate.": "ffn_gate_inp.",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers.": "blk.",
}
_EXPERT = re.compile(r"layers\.(\d+)\..*experts\.(\d+)\.(\w+)\.weight")
_ROUTER = re.compile(r"\.(gate|shared_expert_gate)\.weight")
"""Stored as numbers of 32 bits."""
_PROJECTIONS = {
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "down",
    "w1": "gate",
    "w3": "up",
    "w2": "down",
}
_PLAIN = (Kind.F32, Kind.F16)


def write_gguf(
    folder: Path,
    path: Path,
    architecture: str,
    kind: Kind,
    *,
    rope_factors: Sequence[float] | None = None,
    **changes: Any,
) -> dict[str, torch.Tensor]:
    """Write a model folder as `path` with matrices of type `kind`; returns the checkpoint that the
    file then holds.

    `changes`: metadata of the architecture, dots written as double underscores; None leaves a key
    out.
    """
    config = AutoConfig.from_pretrained(folder)
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in {**metadata_of(config), **changes}.items():
        add_metadata(writer, f"{architecture}.{key.replace('__', '.')}", value)
    writer.add_eos_token_id(2)
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", np.array(rope_factors, np.float32))
    tensors, held = load_file(folder / "model.safetensors"), {}
    for name, parts in experts(tensors).items():
        arrays = np.stack([tensors.pop(part).float().numpy() for part in parts])
        stored, values = _store(name, arrays, architecture, kind, config)
        held |= dict(zip(parts, values, strict=True))
        writer.add_tensor(name, stored, raw_dtype=None if kind in _PLAIN else kind)
    for name, tensor in tensors.items():
        array = tensor.float().numpy()
        stored, held[name] = _store(name, array, architecture, kind, config)
        gguf_name = name
        for theirs, ours in _NAMES.items():
            gguf_name = gguf_name.replace(theirs, ours)
        raw_type = kind if array.ndim == 2 and not _ROUTER.search(name) else Kind.F32
        writer.add_tensor(gguf_name, stored, raw_dtype=None if raw_type in _PLAIN else raw_type)
    finish(writer)
    return held


def experts(tensors: Collection[str]) -> dict[str, list[str]]:
    """By the name of a tensor of all experts of a layer, those of each."""
    found: dict[str, dict[int, str]] = {}
    for name in tensors:
        if one := _EXPERT.search(name):
            layer, expert, projection = one.groups()
            merged = f"blk.{layer}.ffn_{_PROJECTIONS[projection]}_exps.weight"
            found.setdefault(merged, {})[int(expert)] = name
    return {name: [each[i] for i in range(len(each))] for name, each in found.items()}


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def metadata_of(config: Any) -> dict[str, Any]:
    # Gemma 4's config refuses to say what differs between layers otherwise.
    config.allow_global_per_layer_attribute_access = True
    return {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention__head_count": config.num_attention_heads,
        "attention__head_count_kv": config.num_key_value_heads,
        "attention__key_length": getattr(config, "head_dim", None)
        or config.hidden_size // config.num_attention_heads,
        **_epsilon_of(config),
        "rope__freq_base": (getattr(config, "rope_parameters", None) or {}).get("rope_theta"),
        "expert_count": getattr(config, "num_local_experts", getattr(config, "num_experts", None)),
        "expert_used_count": getattr(config, "num_experts_per_tok", None),
        "expert_feed_forward_length": getattr(config, "moe_intermediate_size", None),
        "expert_shared_feed_forward_length": getattr(
            config, "shared_expert_intermediate_size", None
        ),
    }


def _epsilon_of(config: Any) -> dict[str, float]:
    if hasattr(config, "layer_norm_eps"):
        return {"attention__layer_norm_epsilon": config.layer_norm_eps}
    # As LFM2, StarCoder2 and Mamba 2 call it.
    names = ("norm_eps", "norm_epsilon", "layer_norm_epsilon", "rms_norm_eps")
    epsilon = next(getattr(config, name) for name in names if getattr(config, name, None))
    return {"attention__layer_norm_rms_epsilon": epsilon}


def add_metadata(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case list():
            writer.add_array(key, value)
        case _:
            assert value is None


def _store(
    name: str, array: np.ndarray, architecture: str, kind: Kind, config: Any
) -> tuple[np.ndarray, torch.Tensor]:
    """(what goes into the file, what it stands for)."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(
        name.split(".")[-2]
    )
    permuted = array
    if architecture == "llama" and heads is not None:
        permuted = array.reshape(heads, 2, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
    if array.ndim == 1 or _ROUTER.search(name):
        # llama.cpp has a product with one row as a vector.
        return permuted.squeeze(0) if array.shape[0] == 1 else permuted, torch.from_numpy(array)
    quantised = gguf.quants.quantize(permuted, kind)
    values = gguf.quants.dequantize(quantised, kind)
    if permuted is not array:
        values = values.reshape(heads, -1, 2, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
    return quantised, torch.from_numpy(np.ascontiguousarray(values))
