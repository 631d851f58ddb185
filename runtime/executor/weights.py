"""Changes the weights of a loaded model in place.

Pieces, graphs and native steps keep the addresses of weights.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from typing import IO, Any

import torch
from torch import nn

from ...kernels.cache_folder import cache_folder
from ..files.resolve import resolve_model_path
from ..loader.check import check_engine
from ..loader.loader import load_model
from ..lora.slots import LayerSlots
from ..multimodal.build import make_encodings
from ..multimodal.encodings import Encodings
from .model_runner import ModelRunner


def weights_of(runner: ModelRunner) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers of the model by name. Shared ones have one name. Names of
    the encoder of images begin with "images.".

    The slots of adapters (LoRA) are left out: they stay, whatever the weights are.
    """
    return _named(runner.model, runner.images)


def load_like(runner: ModelRunner, path: str) -> dict[str, torch.Tensor]:
    """Load another model with the settings of the engine. Return its weights.

    It takes as much memory as the weights until it is dropped. May run in another thread. Raise
    `ValueError` if it is not of the same architecture, formats and shapes.
    """
    config, platform = runner.config, runner.platform
    path = resolve_model_path(path)
    check_engine(path, config)
    kernels = platform.linear_kernels(
        runner.dtype,
        platform.make_attention_backend(runner.attention_backend),
        config.cpu_activations,
    )
    model = load_model(
        path,
        runner.dtype,
        runner.device,
        False,
        kernels,
        quantization=config.quantization,
        lacking=platform.lacking_dtypes,
        shard=runner.shard,
        context_length=runner.model_config.max_position_embeddings,
        code=config.model_code,
    )
    if model.kv_scales != runner.model.kv_scales:
        raise ValueError(f"{path} has other scales of a float8 KV cache; start a server for it")
    images = None
    if runner.images is not None:
        images = make_encodings(path, config, platform, runner.dtype, kernels)
    new, old = _named(model, images), weights_of(runner)
    for name in sorted(old.keys() | new.keys()):
        there, here = new.get(name), old.get(name)
        if there is None or here is None or (there.shape, there.dtype) != (here.shape, here.dtype):
            raise ValueError(
                f"{path} has another {name} than the served model ({_form(there)} instead of "
                f"{_form(here)}): its architecture, formats and shapes must be the same"
            )
    return new


def replace_weights(runner: ModelRunner, new: Mapping[str, torch.Tensor]) -> None:
    """Copy the weights that `load_like` returned over those of the model."""
    with torch.no_grad():
        for name, tensor in weights_of(runner).items():
            tensor.copy_(new[name])
    if runner.images is not None:
        runner.images.clear()


class StoredWeights:
    """The weights in an unnamed file, while the memory of the model is freed.

    Raise `OSError` if the disk has no room for them.
    """

    def __init__(self, runner: ModelRunner) -> None:
        folder = cache_folder()
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._file: IO[bytes] = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
        try:
            for part in _bytes_of(runner):
                written = 0
                while written < len(part):
                    written += os.write(self._file.fileno(), part[written:])
        except OSError:
            self._file.close()
            raise

    def restore(self, runner: ModelRunner) -> None:
        """Read the weights back, and delete the file."""
        with self._file as file:
            file.seek(0)
            for part in _bytes_of(runner):
                read = 0
                while read < len(part):
                    count = os.readv(file.fileno(), [part[read:]])
                    if not count:
                        raise OSError("the file of the weights is shorter than what was written")
                    read += count


def _bytes_of(runner: ModelRunner) -> Iterator[memoryview[Any]]:
    """Yield the memory of the weights of a model on the CPU."""
    for tensor in weights_of(runner).values():
        flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
        assert flat.data_ptr() == tensor.data_ptr(), "a weight has gaps"
        yield flat.numpy().data


def _named(model: nn.Module, images: Encodings | None) -> dict[str, torch.Tensor]:
    slots = {id(each) for module in model.modules() if isinstance(module, LayerSlots)
             for each in module.buffers()}  # fmt: skip
    named = [*model.named_parameters(), *model.named_buffers()]
    if images is not None:
        tower = images.tower
        of_tower = [*tower.named_parameters(), *tower.named_buffers()]
        named += [(f"images.{name}", tensor) for name, tensor in of_tower]
    return {name: tensor for name, tensor in named if id(tensor) not in slots}


def _form(tensor: torch.Tensor | None) -> str:
    if tensor is None:
        return "none"
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
