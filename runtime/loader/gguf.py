"""Tensors of a GGUF file under the names of Hugging Face checkpoints.

Names and the order of q and k rows: llama.cpp's convert_hf_to_gguf.py.
"""

from __future__ import annotations

import re
from functools import partial

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, ReaderTensor
from gguf.quants import dequantize

from ..layers.linear import StoredTensor
from ..model_config import GGUF_ROPE_FACTORS, ModelConfig
from ..models.registry import model_class
from .gguf_reader import FastGGUFReader

_NUMBERS = {
    GGMLQuantizationType.F32,
    GGMLQuantizationType.F16,
    GGMLQuantizationType.BF16,
    GGMLQuantizationType.F64,
}
_PIECE = 2**18
"""Values that are dequantised at once: a multiple of every format's block."""


def checkpoint_name(name: str, names: dict[str, str]) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`, by a model's `gguf_names`;
    a name that is not known stays.
    """
    stem, _, kind = name.rpartition(".")
    pattern = re.sub(r"^blk\.(\d+)\.", "blk.{}.", stem)
    numbers = re.findall(r"^blk\.(\d+)\.", stem)
    return f"{names[pattern].format(*numbers)}.{kind}" if pattern in names else name


def list_tensors(reader: FastGGUFReader, config: ModelConfig) -> list[StoredTensor]:
    """Every tensor of a file. Raises `ValueError` for a storage format that the gguf library does
    not read.
    """
    model, found = model_class(config.architecture), []
    for tensor in reader.tensors:
        if tensor.name != GGUF_ROPE_FACTORS:
            heads = _heads(tensor.name, config) if model.gguf_interleaves_heads else None
            quantized = tensor.tensor_type not in _NUMBERS
            found.append(
                StoredTensor(
                    file=reader.path,
                    name=checkpoint_name(tensor.name, model.gguf_names),
                    shape=tuple(int(size) for size in reversed(tensor.shape)),
                    copy_to=partial(_copy, tensor, heads),
                    kind=tensor.tensor_type.name if quantized else None,
                    blocks=partial(_blocks, tensor, heads) if quantized else None,
                )
            )
    return found


def _heads(name: str, config: ModelConfig) -> int | None:
    """How many heads the rows of q or k belong to; None for tensors whose rows are in order."""
    heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}
    return heads.get(name.split(".")[-2]) if name.startswith("blk.") else None


def _copy(tensor: ReaderTensor, heads: int | None, target: torch.Tensor) -> None:
    if heads is None:
        _dequantise(tensor, target.view(-1))
        return
    stored = torch.empty(target.shape, dtype=target.dtype)
    _dequantise(tensor, stored.view(-1))
    target.copy_(_in_order(stored, heads))


def _blocks(tensor: ReaderTensor, heads: int | None) -> torch.Tensor:
    """[rows, bytes] uint8 of a quantised tensor, copied."""
    rows = torch.from_numpy(
        np.array(tensor.data, dtype=np.uint8).reshape(int(tensor.shape[-1]), -1)
    )
    return rows if heads is None else _in_order(rows, heads)


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
        blocks = slice(begin // block_values * block_bytes, end // block_values * block_bytes)
        try:
            piece = dequantize(stored[blocks], tensor.tensor_type)
        except NotImplementedError:
            raise ValueError(
                f"the tensor {tensor.name} is stored as {tensor.tensor_type.name}, which cannot be "
                "read; convert the model again"
            ) from None
        # What is stored as float32 is still the read-only file, which torch does not take.
        values[begin:end] = torch.from_numpy(np.require(piece, requirements=["W"]))
