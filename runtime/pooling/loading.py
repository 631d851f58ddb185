"""Builds the transformer and the projections that a folder describes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...kernels.linear import LinearKernels
from ..config.encoder import EncoderConfig
from ..config.model import ModelConfig
from ..config.model_registry import encoder_class, model_class
from ..layers.linear import Linear, StoredTensor
from ..loader import safetensors
from ..loader.loader import fill, finish, make_empty
from .decoder import PooledDecoder
from .dense import Dense
from .folder import PoolingFolder
from .pooler import DenseLayer


def read_transformer_config(folder: PoolingFolder) -> EncoderConfig | ModelConfig:
    """Return the config. Raises `ValueError` that names the file."""
    if folder.encoder is None:
        if folder.path.suffix == ".gguf":
            # Imported here, because machines that only measure have no gguf library.
            from ..files.gguf_reader import open_gguf

            return ModelConfig.from_gguf(open_gguf(folder.path), eos_token_ids=[])
        return ModelConfig.from_pretrained(folder.path, folder.decoder)
    model = encoder_class(folder.encoder)
    try:
        return EncoderConfig.from_content(folder.content, model)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{folder.path / 'config.json'}: {error}") from None


def load_transformer(
    folder: PoolingFolder,
    config: EncoderConfig | ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    kernels: LinearKernels | None,
) -> Any:
    """Return the model, with the interface of `models.bert.Bert`. Raises `ValueError` that names
    the file or tensor at fault.
    """

    def make() -> nn.Module:
        if isinstance(config, EncoderConfig):
            assert folder.encoder is not None
            made: nn.Module = encoder_class(folder.encoder)(config)
            return made
        return PooledDecoder(config, len(folder.labels), folder.content)

    try:
        model = make_empty(make, dtype, device)
    except ValueError as error:
        raise ValueError(f"{folder.path}: {error}") from error
    if folder.path.suffix == ".gguf":
        placed = _gguf_tensors(folder.path, model, config)
    else:
        # Old checkpoints hold integer tensors that are not used.
        placed = model.place_tensors(safetensors.list_tensors(folder.path, quantized=True))
    fill(model, placed, str(folder.path), progress=False, unused=model.unused)
    finish(model, kernels, progress=False)
    return model


def _gguf_tensors(
    path: Path, model: Any, config: EncoderConfig | ModelConfig
) -> Sequence[StoredTensor]:
    from ..files.gguf_reader import open_gguf
    from ..loader.gguf import encoder_tensors, list_tensors

    reader = open_gguf(path)
    if isinstance(config, EncoderConfig):
        placed: Sequence[StoredTensor] = model.place_tensors(
            encoder_tensors(reader, model.gguf_names)
        )
        return placed
    tensors = model_class(config.architecture).gguf_tensors(config, list_tensors(reader, config))
    return [tensor._replace(name=f"decoder.{tensor.name}") for tensor in tensors]


def load_dense(
    dense: Dense, dtype: torch.dtype, device: torch.device, kernels: LinearKernels | None
) -> DenseLayer:
    """Load the projections. Raises `ValueError` as `load_transformer` does."""

    def make() -> nn.Module:
        linear = Linear(dense.in_features, dense.out_features, bias=dense.bias)
        layer = DenseLayer(linear, dense.activation)
        layer.tied_weights = {}  # type: ignore[assignment]
        return layer

    tensors: Sequence[StoredTensor]
    if dense.number:
        from ..files.gguf_reader import open_gguf
        from ..loader.gguf import encoder_tensors

        names = {f"dense_{dense.number}": "linear"}
        found = encoder_tensors(open_gguf(dense.folder), names)
        tensors = [tensor for tensor in found if tensor.name.startswith("linear.")]
    else:
        tensors = safetensors.list_tensors(dense.folder, quantized=False)
    layer: DenseLayer = make_empty(make, dtype, device)
    fill(layer, tensors, str(dense.folder), progress=False)  # type: ignore[arg-type]
    finish(layer, kernels, progress=False)
    return layer


def stored_dtype(folder: PoolingFolder) -> torch.dtype:
    """Return the dtype in config.json. If it is missing, transformers uses float32."""
    said = folder.content.get("dtype") or folder.content.get("torch_dtype") or "float32"
    found = getattr(torch, str(said), None)
    return found if found in (torch.float32, torch.float16, torch.bfloat16) else torch.float32
