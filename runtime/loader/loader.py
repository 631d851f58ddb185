"""Builds a model and fills its weights, whatever they are stored in."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from ...kernels.linear import LinearKernels
from ..layers.linear import FusedLinear
from ..model_config import ModelConfig
from ..models.llama import LlamaForCausalLM
from ..models.registry import build_model
from ..progress import progress_bar
from ..quantization.packing import (
    NOTHING_PACKED,
    Kinds,
    choose_kinds,
    pack,
    pack_hollow,
    packed_names,
)
from . import safetensors
from .stored import StoredTensor

_THREADS = 4
_INITIAL_STD = 0.02
_IGNORED = ".rotary_emb.inv_freq"
"""Old checkpoints bring the rotary frequencies, which follow from the config."""


class Loaded(NamedTuple):
    """A model, its configuration, and which of its linear layers are packed."""

    model: LlamaForCausalLM
    config: ModelConfig
    kinds: Kinds


def load_model(
    path: str,
    dtype: torch.dtype,
    device: torch.device,
    progress: bool,
    kernels: LinearKernels | None = None,
    *,
    keep_quantized: bool = False,
) -> Loaded:
    """The model of a folder or .gguf file in `dtype` on `device`, its linear layers packed where
    there are `kernels`.

    `keep_quantized`: weights stay in the 4 or 8 bits that a file holds them in, where the kernels
    can multiply by such. Needs little more memory than the weights themselves. Raises `ValueError`
    that names the file or tensor at fault.
    """
    if Path(path).suffix == ".gguf":
        config, tensors = _open_gguf(Path(path))
    else:
        config = ModelConfig.from_pretrained(path)
        tensors = safetensors.list_tensors(Path(path))
    model = empty_model(config, dtype, device)
    kinds = (
        {}
        if kernels is None
        else choose_kinds(model, kernels, tensors, keep_quantized=keep_quantized)
    )
    fill(model, tensors, path, progress=progress, leave_out=packed_names(model, kinds))
    if kernels is not None:
        pack(model, kernels, kinds, tensors, progress=progress)
    return Loaded(model, config, kinds)


def _open_gguf(path: Path) -> tuple[ModelConfig, Sequence[StoredTensor]]:
    # Machines that only measure have no gguf library.
    from ..tokenizer.gguf import gguf_eos_token_ids
    from . import gguf
    from .gguf_reader import open_gguf

    reader = open_gguf(path)
    config = ModelConfig.from_gguf(
        reader, eos_token_ids=gguf_eos_token_ids(reader), rope_factors=gguf.rope_factors(reader)
    )
    return config, gguf.list_tensors(reader, config)


def random_model(
    path: str, dtype: torch.dtype, device: torch.device, kernels: LinearKernels | None = None
) -> Loaded:
    """The model that a folder's config.json describes, with random weights made on `device`: the
    same ones each time on one device.

    Norms are 1 and matrices small, as before training, so that activations stay finite in any
    dtype.
    """
    config = ModelConfig.from_pretrained(path)
    model = empty_model(config, dtype, device)
    generator = torch.Generator(device).manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data.fill_(1.0)
        else:
            parameter.data.normal_(std=_INITIAL_STD, generator=generator)
    kinds = {} if kernels is None else choose_kinds(model, kernels, [], keep_quantized=False)
    if kernels is not None:
        pack(model, kernels, kinds, [], progress=False)
    return Loaded(model, config, kinds)


def fill(
    model: LlamaForCausalLM,
    tensors: Sequence[StoredTensor],
    path: str,
    *,
    progress: bool,
    leave_out: Collection[str] = (),
) -> None:
    """Copy every tensor to its place, but those to `leave_out`. Raises `ValueError`, before any is
    read, where they are not the model's.
    """
    matched = _matched(
        checkpoint_targets(model), tensors, path, tied=model.config.tie_word_embeddings
    )
    copies = [copy for copy in matched if copy[0].name not in leave_out]
    with ThreadPoolExecutor(_THREADS) as pool:
        done = pool.map(lambda copy: copy[0].copy_to(copy[1]), copies)
        for _ in progress_bar(
            done,
            shown=progress,
            desc="loading weights",
            total=len(copies),
            unit=" tensors",
            leave=False,
        ):
            pass


def checkpoint_targets(model: nn.Module) -> dict[str, torch.Tensor]:
    """Where each tensor of a checkpoint belongs: a parameter, or the rows of a fused one that are
    its own.

    A head that shares the embedding's weight is not there.
    """
    seen: set[nn.Parameter] = set()
    return {
        name: target
        for prefix, module in model.named_modules()
        for name, target in _targets_of(prefix, module, seen)
    }


def _targets_of(
    prefix: str, module: nn.Module, seen: set[nn.Parameter]
) -> Iterator[tuple[str, torch.Tensor]]:
    own = [
        (kind, parameter)
        for kind, parameter in module.named_parameters(recurse=False)
        if parameter not in seen
    ]
    seen.update(parameter for _, parameter in own)
    if not isinstance(module, FusedLinear):
        yield from ((f"{prefix}.{kind}", parameter) for kind, parameter in own)
        return
    parent = prefix.rpartition(".")[0]
    for kind, parameter in own:
        row = 0
        for part, rows in module.parts.items():
            yield f"{parent}.{part}.{kind}", parameter[row : row + rows]
            row += rows


def _matched(
    targets: dict[str, torch.Tensor], tensors: Sequence[StoredTensor], path: str, *, tied: bool
) -> list[tuple[StoredTensor, torch.Tensor]]:
    """Each tensor with its place."""
    copies = []
    for tensor in tensors:
        if tensor.name.endswith(_IGNORED) or (tied and tensor.name == "lm_head.weight"):
            continue
        target = targets.get(tensor.name)
        if target is None:
            raise ValueError(
                f"{tensor.file} holds a tensor that the model has no place for, {tensor.name!r}; "
                "it is another kind of model"
            )
        if target.shape != tensor.shape:
            shapes = (
                f"has shape {list(tensor.shape)}, but the model's configuration asks for "
                f"{list(target.shape)}"
            )
            raise ValueError(
                f"{tensor.file}: the tensor {tensor.name} {shapes}; fetch the model again"
            )
        copies.append((tensor, target))
    missing = sorted(targets.keys() - {tensor.name for tensor in tensors})
    if missing:
        raise ValueError(
            f"{path} lacks {len(missing)} tensors, such as {', '.join(missing[:3])}; fetch the "
            "model again"
        )
    return copies


def hollow_model(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    kernels: LinearKernels | None = None,
    kinds: Kinds = NOTHING_PACKED,
) -> LlamaForCausalLM:
    """The model with weights that all lie in one and the same memory, as large as the largest: for
    tracing, which reads none of them.
    """
    model = empty_model(config, dtype, torch.device("meta"))
    if kernels is not None:
        pack_hollow(model, kernels, kinds)
    found = {id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]}
    memory = torch.empty(
        max(tensor.nbytes for tensor in found.values()), dtype=torch.uint8, device=device
    )
    placed = {
        key: _like(tensor, memory[: tensor.nbytes].view(tensor.dtype).view(tensor.shape))
        for key, tensor in found.items()
    }
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            setattr(module, name, placed[id(parameter)])
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            setattr(module, name, placed[id(buffer)])
    return model


def _like(tensor: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    return nn.Parameter(data, requires_grad=False) if isinstance(tensor, nn.Parameter) else data


def empty_model(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> LlamaForCausalLM:
    """The model with uninitialised weights of `dtype` on `device`."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            return build_model(config)
    except RuntimeError as error:
        # torch has an exception of its own for this on a GPU, but not on a CPU.
        if not isinstance(error, torch.OutOfMemoryError) and "can't allocate memory" not in str(
            error
        ):
            raise
        raise ValueError(
            f"too little memory for the weights in {dtype}; choose a smaller model, or free memory"
        ) from error
    finally:
        torch.set_default_dtype(before)
