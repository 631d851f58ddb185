"""Builds what a folder describes: a transformer, and what follows it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ...kernels.linear import LinearKernels
from ..config.encoder import EncoderConfig
from ..config.model import ModelConfig
from ..config.model_registry import encoder_class
from ..layers.linear import Linear, StoredTensor
from ..loader import safetensors
from ..loader.loader import fill, finish, make_empty
from .decoder import PooledDecoder
from .folder import Dense, PoolingFolder
from .pooler import DenseLayer


def read_transformer_config(folder: PoolingFolder) -> EncoderConfig | ModelConfig:
    """Raises `ValueError` that names the file."""
    if folder.encoder is None:
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
    """Of the interface of `models.bert.Bert`. Raises `ValueError` that names the file or tensor at
    fault.
    """

    def make() -> nn.Module:
        if isinstance(config, EncoderConfig):
            assert folder.encoder is not None
            made: nn.Module = encoder_class(folder.encoder)(config)
            return made
        return PooledDecoder(config, int(folder.is_classifier), folder.content)

    # Old checkpoints have whole numbers among their tensors, which nothing reads.
    tensors = safetensors.list_tensors(folder.path, quantized=True)
    try:
        model = make_empty(make, dtype, device)
    except ValueError as error:
        raise ValueError(f"{folder.path}: {error}") from error
    fill(model, model.place_tensors(tensors), str(folder.path), progress=False, unused=model.unused)
    finish(model, kernels, progress=False)
    return model


def load_dense(
    dense: Dense, dtype: torch.dtype, device: torch.device, kernels: LinearKernels | None
) -> DenseLayer:
    """Raises `ValueError` as `load_transformer`."""

    def make() -> nn.Module:
        linear = Linear(dense.in_features, dense.out_features, bias=dense.bias)
        layer = DenseLayer(linear, dense.activation)
        layer.tied_weights = {}  # type: ignore[assignment]
        return layer

    tensors: Sequence[StoredTensor] = safetensors.list_tensors(dense.folder, quantized=False)
    layer: DenseLayer = make_empty(make, dtype, device)
    fill(layer, tensors, str(dense.folder), progress=False)  # type: ignore[arg-type]
    finish(layer, kernels, progress=False)
    return layer


def stored_dtype(folder: PoolingFolder) -> torch.dtype:
    """The number format that config.json gives; transformers takes float32 where it gives none."""
    said = folder.content.get("dtype") or folder.content.get("torch_dtype") or "float32"
    found = getattr(torch, str(said), None)
    return found if found in (torch.float32, torch.float16, torch.bfloat16) else torch.float32
