"""Builds a Whisper model and fills it from the files of its folder."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ...kernels.linear import LinearKernels
from ..layers.linear import StoredTensor
from ..loader import safetensors
from ..loader.loader import fill, finish, make_empty
from .folder import SpeechFolder
from .whisper import Whisper

_KEYS, _VALUES = "k_proj.weight", "v_proj.bias"


def load_whisper(
    folder: SpeechFolder,
    dtype: torch.dtype,
    device: torch.device,
    kernels: LinearKernels | None,
) -> Whisper:
    """Return the model. Raises `ValueError` that names the file or tensor at fault."""
    try:
        model: Whisper = make_empty(lambda: Whisper(folder.sizes), dtype, device)
    except (KeyError, ValueError) as error:
        raise ValueError(f"{folder.path}: {error}") from error
    tensors = list(_with_key_biases(safetensors.list_tensors(folder.path, quantized=False)))
    fill(model, tensors, str(folder.path), progress=False)  # type: ignore[arg-type]
    finish(model, kernels, progress=False)
    return model


def _with_key_biases(tensors: list[StoredTensor]) -> Iterator[StoredTensor]:
    """Add biases of 0 for keys. Keys have none, but share a product with values, which do."""
    for tensor in tensors:
        yield tensor
        if tensor.name.endswith(_KEYS):
            name = tensor.name.removesuffix("weight") + "bias"
            yield StoredTensor(tensor.file, name, tensor.shape[:1], lambda target: target.zero_())  # type: ignore[arg-type]
