"""Builds a model and fills its weights, whatever they are stored in."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import nn
from tqdm import tqdm

from ..layers.linear import FusedLinear
from ..model_config import ModelConfig
from ..models.llama import LlamaForCausalLM
from ..models.registry import build_model
from . import gguf, safetensors
from .gguf_reader import open_gguf
from .gguf_tokenizer import gguf_eos_token_ids


def load_model(path: str, dtype: torch.dtype, device: torch.device, progress: bool) -> tuple[LlamaForCausalLM, ModelConfig]:
    """The model of a folder or .gguf file in `dtype` on `device`.

    Needs little more memory than the weights themselves. Raises `ValueError` that names the file or tensor at fault.
    """
    if Path(path).suffix == ".gguf":
        reader = open_gguf(Path(path))
        eos_token_ids = gguf_eos_token_ids(Path(path))
        config = ModelConfig.from_gguf(reader, eos_token_ids=eos_token_ids, rope_factors=gguf.rope_factors(reader))
        tensors: Iterable[tuple[str, torch.Tensor]] = gguf.read_tensors(reader, config, dtype)
        count = len(reader.tensors)
    else:
        config = ModelConfig.from_pretrained(path)
        files = safetensors.shards(Path(path))
        tensors = (pair for file in files for pair in safetensors.read_tensors(file))
        count = None
    model = _empty_model(config, dtype, device)
    fill(model, tqdm(tensors, "loading weights", count, unit=" tensors", file=sys.stderr, disable=not progress, leave=False))
    return model, config


def fill(model: LlamaForCausalLM, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Copy every tensor to its place. Raises `ValueError` where one is missing or has another shape."""
    targets = checkpoint_targets(model)
    # A tied head has no tensor of its own in the checkpoint.
    missing = {name: target for name, target in targets.items() if name != "lm_head.weight" or not model.config.tie_word_embeddings}
    for name, tensor in tensors:
        if name not in targets:
            continue  # rotary tables, or layers of another task
        target = targets[name]
        if target.shape != tensor.shape:
            raise ValueError(f"the weight {name} has shape {list(tensor.shape)}, but config.json asks for {list(target.shape)}")
        with torch.no_grad():
            target.copy_(tensor)
        missing.pop(name, None)
    if missing:
        some = ", ".join(sorted(missing)[:3])
        raise ValueError(f"{len(missing)} weights are missing, such as {some}; the download is incomplete or of another model")


def checkpoint_targets(model: nn.Module) -> dict[str, torch.Tensor]:
    """Where each tensor of a checkpoint belongs: a parameter, or the rows of a fused one that are its own."""
    return {name: target for prefix, module in model.named_modules() for name, target in _targets_of(prefix, module)}


def _targets_of(prefix: str, module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    own = list(module.named_parameters(recurse=False))
    if not isinstance(module, FusedLinear):
        yield from ((f"{prefix}.{kind}", parameter) for kind, parameter in own)
        return
    parent = prefix.rpartition(".")[0]
    for kind, parameter in own:
        row = 0
        for part, rows in module.parts.items():
            yield f"{parent}.{part}.{kind}", parameter[row : row + rows]
            row += rows


def _empty_model(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> LlamaForCausalLM:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            return build_model(config)
    finally:
        torch.set_default_dtype(before)
