"""Tensors of a GGUF file under the names of Hugging Face checkpoints.

Names and the order of q and k rows: llama.cpp's convert_hf_to_gguf.py.
"""

from __future__ import annotations

import re
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, ReaderTensor
from gguf.quants import dequantize

from ..layers.linear import StoredTensor
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
_NUMBERS = {
    GGMLQuantizationType.F32,
    GGMLQuantizationType.F16,
    GGMLQuantizationType.BF16,
    GGMLQuantizationType.F64,
}
ROPE_FACTORS = "rope_freqs.weight"
_PERMUTING = ("LlamaForCausalLM", "MistralForCausalLM")
_PIECE = 2**18
"""Values that are dequantised at once: a multiple of every format's block."""


def checkpoint_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`; a name that is not known
    stays.
    """
    stem, _, kind = name.rpartition(".")
    if match := re.fullmatch(r"blk\.(\d+)\.(\w+)", stem):
        return f"model.layers.{match[1]}.{_BLOCK.get(match[2], match[2])}.{kind}"
    return f"{_TOP.get(stem, stem)}.{kind}"


def list_tensors(reader: FastGGUFReader, config: ModelConfig) -> list[StoredTensor]:
    """Every tensor of a file. Raises `ValueError` for a storage format that the gguf library does
    not read.
    """
    path, found = reader.path, []
    for tensor in reader.tensors:
        if tensor.name != ROPE_FACTORS:
            shape = tuple(int(size) for size in reversed(tensor.shape))
            heads = _permuted_heads(tensor.name, config)
            quantized = tensor.tensor_type not in _NUMBERS
            kind, blocks = (
                (tensor.tensor_type.name, partial(_blocks, tensor, heads))
                if quantized
                else (None, None)
            )
            found.append(
                StoredTensor(
                    path,
                    checkpoint_name(tensor.name),
                    shape,
                    partial(_copy, tensor, heads),
                    kind,
                    blocks,
                )
            )
    return found


def rope_factors(reader: FastGGUFReader) -> list[float] | None:
    """What each rotary frequency is divided by (Llama 3.1's scaling, worked out by the converter),
    or None.
    """
    for tensor in reader.tensors:
        if tensor.name == ROPE_FACTORS:
            return [float(value) for value in tensor.data]
    return None


def _permuted_heads(name: str, config: ModelConfig) -> int | None:
    """How many heads the rows of q and k of a Llama file belong to; None for tensors whose rows are
    in order.
    """
    if config.architecture not in _PERMUTING:
        return None
    return (
        config.num_heads
        if ".attn_q." in name
        else config.num_kv_heads
        if ".attn_k." in name
        else None
    )


def _copy(tensor: ReaderTensor, permuted_heads: int | None, target: torch.Tensor) -> None:
    if permuted_heads is None:
        _dequantise(tensor, target.view(-1))
        return
    stored = torch.empty(target.shape, dtype=target.dtype)
    _dequantise(tensor, stored.view(-1))
    target.copy_(_in_order(stored, permuted_heads))


def _blocks(tensor: ReaderTensor, permuted_heads: int | None) -> torch.Tensor:
    """[rows, bytes] uint8 of a quantised tensor, copied."""
    rows = torch.from_numpy(
        np.array(tensor.data, dtype=np.uint8).reshape(int(tensor.shape[-1]), -1)
    )
    return rows if permuted_heads is None else _in_order(rows, permuted_heads)


def _in_order(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows are stored for pairs (2i, 2i + 1); ours rotates pairs (i, i + D / 2)."""
    return rows.view(heads, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def _dequantise(tensor: ReaderTensor, values: torch.Tensor) -> None:
    """Write into `values`, flat. Pieces that stay in the cache make it three times as fast as the
    tensor at once.
    """
    block_values, block_bytes = GGML_QUANT_SIZES[tensor.tensor_type]
    # A view as bytes works for every format: those that are not quantised come as numbers.
    stored = tensor.data.reshape(-1).view(np.uint8)
    for begin in range(0, values.numel(), _PIECE):
        end = min(begin + _PIECE, values.numel())
        values[begin:end] = _floats(
            stored[begin // block_values * block_bytes : end // block_values * block_bytes], tensor
        )


def _floats(stored: npt.NDArray[np.uint8], tensor: ReaderTensor) -> torch.Tensor:
    try:
        values = dequantize(stored, tensor.tensor_type)
    except NotImplementedError:
        kind = tensor.tensor_type.name
        raise ValueError(
            f"the tensor {tensor.name} is stored as {kind}, which cannot be read; convert the "
            "model again"
        ) from None
    # What is stored as float32 is still the read-only file, which torch does not take.
    return torch.from_numpy(np.require(values, requirements=["W"]))
