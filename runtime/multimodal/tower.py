"""The encoder of images: the vision tower and the projector of a model, as built by transformers.

Its linear layers are this package's, so their weights may be packed for the device's kernels.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from typing import Any

import torch
import transformers
from torch import nn
from transformers.initialization import no_init_weights

from ...kernels.linear import LinearKernels
from ..layers.linear import StoredTensor
from ..loader.loader import fill, finish, make_empty
from ..models.transformers_build import own_layers
from ..quantization.methods import Kinds, Products, scheme_kinds, stored_kinds
from .family import ImageFamily
from .pieces import ATTENTION, cut_layers
from .source import ImageSource

logger = logging.getLogger(__name__)

# Modules that images do not need.
_OTHERS = ("language_model", "text_model", "lm_head", "audio_tower", "embed_audio")


class Tower(nn.Module):
    """The modules of `XModel` of transformers that images need, under their names.

    `tied_weights` and `lm_head` are what `loader.fill` reads of every model.

    Attributes:
        patch_cost: Numbers that are multiplied for a patch that passes all layers.
    """

    def __init__(self, source: ImageSource) -> None:
        super().__init__()
        model = _without_text(source)
        own_layers(model)
        _store_buffers(model)
        self.patch_cost = cut_layers(model)
        model.requires_grad_(requires_grad=False)
        for name, child in model.named_children():
            self.add_module(name, child)
        for name, parameter in model.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        # Not a submodule, because names would appear twice.
        self._model = [model]
        self.tied_weights: dict[str, str] = {}

    @property
    def model(self) -> Any:
        """The model of transformers, without its text model."""
        return self._model[0]


def _store_buffers(model: nn.Module) -> None:
    """Make parameters of the buffers that checkpoints hold, so that they are loaded."""
    for module in model.modules():
        for name in list(module._buffers.keys() - module._non_persistent_buffers_set):
            buffer = module._buffers.pop(name)
            if buffer is not None:
                module.register_parameter(name, nn.Parameter(buffer, requires_grad=False))


def load_tower(
    source: ImageSource,
    dtype: torch.dtype,
    device: torch.device,
    kernels: LinearKernels | None,
    lacking: Collection[torch.dtype] = (),
) -> Tower:
    """Return the encoder of a model. Raises `ValueError` that names what is at fault."""
    scheme, stored = source.scheme, source.tensors()

    def choose(tower: Any) -> Kinds:
        if any(tensor.blocks is not None for tensor in stored):
            return stored_kinds(tower, kernels, _of_tower(tower, source.family, stored))
        products = Products(dtype, device, kernels, lacking)
        return scheme_kinds(tower, scheme, "auto" if scheme else "none", products)

    tower: Tower = make_empty(lambda: Tower(source), dtype, device, choose)
    tensors = _of_tower(tower, source.family, stored)
    fill(tower, tensors, str(source.path), progress=False)  # type: ignore[arg-type]
    finish(tower, kernels, progress=False)
    return tower.eval()


def _of_tower(
    tower: Tower, family: ImageFamily, stored: Sequence[StoredTensor]
) -> list[StoredTensor]:
    """Return the tensors of the encoder under the names of its modules."""
    children = tuple(f"{name}." for name, _ in tower.named_children())
    parameters = {name for name, _ in tower.named_parameters(recurse=False)}
    found = []
    for tensor in stored:
        name = family.tower_name(tensor.name)
        if name.startswith(children) or name in parameters:
            found.append(tensor._replace(name=name))
    return found


def _without_text(source: ImageSource) -> Any:
    """Return the model of images and text without its text model, on torch's default device."""
    config, architecture = source.config(), source.family.config["architectures"][0]
    text = config.get_text_config()
    # The text model is made, but dropped at once: one layer and a small vocabulary are enough.
    text.num_hidden_layers, text.vocab_size, text.pad_token_id = 1, 8, None
    if getattr(config, "audio_config", None) is not None:
        config.audio_config = None
    if getattr(text, "num_kv_shared_layers", None):
        text.num_kv_shared_layers = 0
    for name in ("layer_types", "no_rope_layers"):
        if getattr(text, name, None):
            setattr(text, name, getattr(text, name)[:1])
    for name in ("intermediate_size", "intermediate_size_mlp", "moe_intermediate_size"):
        if isinstance(getattr(text, name, None), int):
            setattr(text, name, 8)
    kind = getattr(transformers, architecture)
    try:
        with no_init_weights():
            dtype = torch.get_default_dtype()
            whole = kind._from_config(config, attn_implementation=ATTENTION, dtype=dtype)
    except Exception as error:
        # The code of any model may raise any exception.
        logger.debug("transformers cannot make %s", architecture, exc_info=True)
        raise ValueError(
            f"{source.path}: transformers {transformers.__version__} cannot make the vision tower "
            f"of {architecture} ({type(error).__name__}: {error!s:.200}); add --disable-vision"
        ) from None
    model = getattr(whole, "model", whole)
    for name in _OTHERS:
        if hasattr(model, name):
            delattr(model, name)
    return model
