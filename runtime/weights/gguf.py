"""Tensors of a GGUF file under the names of Hugging Face checkpoints.

Names and the order of q and k rows: llama.cpp's convert_hf_to_gguf.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from gguf import ReaderTensor
from gguf.quants import dequantize

from ..model_config import ModelConfig
from .gguf_reader import FastGGUFReader

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ROPE_FACTORS = "rope_freqs.weight"
_PERMUTING = ("LlamaForCausalLM", "MistralForCausalLM")
_THREADS = 4


def checkpoint_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`; a name that is not known stays."""
    stem, _, kind = name.rpartition(".")
    if match := re.fullmatch(r"blk\.(\d+)\.(\w+)", stem):
        return f"model.layers.{match[1]}.{_BLOCK.get(match[2], match[2])}.{kind}"
    return f"{_TOP.get(stem, stem)}.{kind}"


def read_tensors(reader: FastGGUFReader, config: ModelConfig, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Checkpoint name and tensor in `dtype`, a few dequantised ahead by other threads."""
    tensors = [tensor for tensor in reader.tensors if tensor.name != ROPE_FACTORS]
    with ThreadPoolExecutor(_THREADS) as pool:
        yield from pool.map(lambda tensor: (checkpoint_name(tensor.name), _values(tensor, config, dtype)), tensors)


def rope_factors(reader: FastGGUFReader) -> list[float] | None:
    """What each rotary frequency is divided by (Llama 3.1's scaling, worked out by the converter), or None."""
    for tensor in reader.tensors:
        if tensor.name == ROPE_FACTORS:
            return [float(value) for value in tensor.data]
    return None


def _values(tensor: ReaderTensor, config: ModelConfig, dtype: torch.dtype) -> torch.Tensor:
    try:
        array = dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError:
        raise ValueError(f"tensor {tensor.name} is stored as {tensor.tensor_type.name}, which cannot be read; convert the file") from None
    if config.architecture in _PERMUTING:
        array = _unpermute(tensor.name, array, config)
    # A copy, because what is not quantised is still the read-only file.
    return torch.from_numpy(np.array(array)).to(dtype)


def _unpermute(name: str, array: np.ndarray, config: ModelConfig) -> np.ndarray:
    """Rows of q and k of a Llama file are ordered for pairs (2i, 2i + 1); ours rotates pairs (i, i + D / 2)."""
    if ".attn_q." in name:
        heads = config.num_heads
    elif ".attn_k." in name:
        heads = config.num_kv_heads
    else:
        return array
    return array.reshape(heads, -1, 2, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
