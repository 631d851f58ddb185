"""Tensors of a GGUF file under the names of Hugging Face checkpoints.

Source of the names and of the order of q and k rows: llama.cpp's convert_hf_to_gguf.py.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, ReaderTensor
from gguf.quants import dequantize

from ..config.gguf import GGUF_ROPE_FACTORS
from ..config.model import ModelConfig
from ..config.model_registry import model_class
from ..files.gguf_reader import FastGGUFReader
from ..layers.linear import StoredTensor
from .gguf_names import checkpoint_name
from .gguf_scales import are_finite, take_factors

_NUMBERS = {
    GGMLQuantizationType.F32,
    GGMLQuantizationType.F16,
    GGMLQuantizationType.BF16,
    GGMLQuantizationType.F64,
}
# In the name of a tensor that holds all experts of a layer, this stands for the number of the
# expert.
_EXPERT = ".*."
# Matrices of encoders that may have a single row.
_OF_ONE_ROW = ("token_types.weight", "cls.output.weight")
_PIECE = 2**18  # Values that are dequantised at once: a multiple of every format's block.


def list_tensors(reader: FastGGUFReader, config: ModelConfig) -> list[StoredTensor]:
    """Return every tensor of a file.

    Raises `ValueError` for a storage format that the gguf library does not read.
    """
    model = model_class(config.architecture)
    found = []
    tensors, factors = take_factors(reader.path, reader.tensors)
    for tensor in tensors:
        if tensor.name not in GGUF_ROPE_FACTORS:
            interleaves = model.gguf_interleaves_heads and _is_query_or_key(tensor.name)
            shape = tuple(int(size) for size in reversed(tensor.shape))
            if len(shape) == 4:
                # Convolutions have dimensions of 1 around their channels.
                shape = tuple(size for size in shape if size != 1)
            stored = _Stored(
                reader.path,
                checkpoint_name(tensor.name, model.gguf_names),
                tensor,
                shape,
                config.head_dim if interleaves else None,
                tuple(factors.get(tensor.name, ())),
            )
            parts = stored.experts() if _EXPERT in stored.name else [stored]
            found += [part.part(tuple(slice(0, size) for size in part.shape)) for part in parts]
    return found


def encoder_tensors(reader: FastGGUFReader, names: dict[str, str]) -> list[StoredTensor]:
    """Return every tensor of the file of an encoder, whose `gguf_names` are `names`."""
    found = []
    for tensor in reader.tensors:
        shape = tuple(int(size) for size in reversed(tensor.shape))
        if tensor.name in _OF_ONE_ROW and len(shape) == 1:
            # The converter leaves out dimensions of 1.
            shape = 1, *shape
        stored = _Stored(reader.path, checkpoint_name(tensor.name, names), tensor, shape, None)
        found.append(stored.part(tuple(slice(0, size) for size in shape)))
    return found


def _is_query_or_key(name: str) -> bool:
    return name.startswith("blk.") and name.split(".")[-2] in ("attn_q", "attn_k")


class _Stored(NamedTuple):
    """A tensor of a file.

    Attributes:
        interleaved: The number of rows of a head, if the rows are stored for rotating pairs (2i, 2i
            + 1). They are reordered, because the layers here rotate pairs (i, i + D / 2).
        factors: The scale of the tensor, or of each expert; empty if there is none.
    """

    path: Path
    name: str
    tensor: ReaderTensor
    shape: tuple[int, ...]
    interleaved: int | None
    factors: tuple[float, ...] = ()

    def experts(self) -> list[_Stored]:
        """Return the tensors of the experts, which are stored one after another."""
        return [
            self._replace(
                name=self.name.replace(_EXPERT, f".{expert}."),
                tensor=self.tensor._replace(data=data),
                shape=self.shape[1:],
                factors=self.factors[expert : expert + 1],
            )
            for expert, data in enumerate(self.tensor.data)
        ]

    def part(self, index: tuple[slice, ...]) -> StoredTensor:
        """Return the part given by a slice for each dimension. Interleaved rows are cut only by
        whole heads.
        """
        kind = self.tensor.tensor_type
        is_quantized = kind not in _NUMBERS
        # Only the kernels of NVFP4 multiply by the scale of a tensor.
        has_blocks = is_quantized and (not self.factors or kind == GGMLQuantizationType.NVFP4)
        return StoredTensor(
            file=self.path,
            name=self.name,
            shape=tuple(part.stop - part.start for part in index),
            copy_to=partial(self._copy, index),
            kind=kind.name if is_quantized else None,
            blocks=partial(self._blocks, index) if has_blocks else None,
            cut=self.part,
            factor=self._factor,
        )

    @property
    def _factor(self) -> float:
        return float(self.factors[0]) if self.factors else 1.0

    def _copy(self, index: tuple[slice, ...], target: torch.Tensor) -> None:
        columns = index[-1] if len(index) > 1 else slice(0, 1)
        block, _ = GGML_QUANT_SIZES[self.tensor.tensor_type]
        # Columns may begin or end inside a block. Whole blocks are read.
        first, last = columns.start // block * block, -(-columns.stop // block) * block
        is_cut = (first, last) != (columns.start, columns.stop)
        if not is_cut and self.interleaved is None:
            self._dequantise(self._bytes(index), target.view(-1))
            return
        stored = torch.empty(target.shape[0], last - first, dtype=target.dtype)
        self._dequantise(self._bytes(index), stored.view(-1))
        stored = stored[:, columns.start - first : columns.stop - first]
        target.copy_(self._in_order(stored).reshape(target.shape))

    def _blocks(self, index: tuple[slice, ...]) -> torch.Tensor:
        """Return a copy of the blocks: [rows, bytes] uint8."""
        blocks = np.array(self._bytes(index))
        self._check(blocks)
        return self._in_order(torch.from_numpy(blocks))

    def _check(self, blocks: npt.NDArray[np.uint8]) -> None:
        """Raise `ValueError` if the numbers of blocks would not be finite."""
        if not are_finite(blocks, self.tensor.tensor_type):
            raise ValueError(
                f"{self.path}: the tensor {self.tensor.name} has scales that are not finite, or "
                "larger than any valid one; download the model again"
            )

    def _bytes(self, index: tuple[slice, ...]) -> npt.NDArray[np.uint8]:
        """Return the bytes of the file that hold some of the columns: [rows, bytes]."""
        # The view as bytes is needed for numbers, which the library returns in their own dtype.
        rows: npt.NDArray[np.uint8] = self.tensor.data.reshape(-1).view(np.uint8)
        rows = rows.reshape(self.shape[0], -1)[index[0]]
        if len(index) == 1:
            return rows
        values, size = GGML_QUANT_SIZES[self.tensor.tensor_type]
        return rows[:, index[1].start // values * size : -(-index[1].stop // values) * size]

    def _in_order(self, rows: torch.Tensor) -> torch.Tensor:
        if self.interleaved is None:
            return rows
        pairs = rows.reshape(-1, self.interleaved // 2, 2, *rows.shape[1:])
        return pairs.transpose(1, 2).reshape(rows.shape)

    def _dequantise(self, rows: npt.NDArray[np.uint8], values: torch.Tensor) -> None:
        """Write into `values`, which is flat.

        Pieces that stay in the CPU cache are three times as fast as the whole tensor at once.
        """
        kind = self.tensor.tensor_type
        block_values, block_bytes = GGML_QUANT_SIZES[kind]
        stored = rows.reshape(-1)
        for begin in range(0, values.numel(), _PIECE):
            end = min(begin + _PIECE, values.numel())
            blocks = slice(begin // block_values * block_bytes, end // block_values * block_bytes)
            if kind not in _NUMBERS:
                self._check(stored[blocks])
            try:
                piece = dequantize(stored[blocks], kind)
            except NotImplementedError:
                raise ValueError(
                    f"the tensor {self.tensor.name} is stored as {kind.name}, which is not "
                    "supported; convert the model to another format"
                ) from None
            # float32 values are a view of the read-only file, which torch does not accept.
            numbers = torch.from_numpy(np.require(piece, requirements=["W"]))
            values[begin:end] = numbers * self._factor if self.factors else numbers
