"""Builds a model and fills its weights, whatever they are stored in."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from ...kernels.linear import LinearKernels
from ..layers.linear import Linear, StoredTensor
from ..model_config import ModelConfig
from ..models.llama import LlamaForCausalLM
from ..models.registry import model_class
from ..progress import progress_bar
from ..quantization.methods import (
    NOTHING_PACKED,
    Kinds,
    choose_kinds,
    create_weights,
    named_linears,
    packed_kinds,
    part_name,
    weight_name,
)
from . import safetensors

_THREADS = 4
_INITIAL_STD = 0.02
_IGNORED = ".rotary_emb.inv_freq"
"""Old checkpoints bring the rotary frequencies, which follow from the config."""


class Loaded(NamedTuple):
    """A model, its configuration, and which of its linear layers are packed."""

    model: LlamaForCausalLM
    config: ModelConfig
    kinds: Kinds


class _Place(NamedTuple):
    """Where a tensor of a checkpoint belongs."""

    shape: tuple[int, ...]
    load: Callable[[StoredTensor], None]


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
    with _allocating(dtype, device):
        model: LlamaForCausalLM = model_class(config.architecture)(config)
        kinds = choose_kinds(model, kernels, tensors) if keep_quantized else NOTHING_PACKED
        create_weights(model, kinds)
    _fill(model, tensors, path, progress=progress)
    _finish(model, kernels, progress=progress)
    return Loaded(model, config, packed_kinds(model))


def _open_gguf(path: Path) -> tuple[ModelConfig, Sequence[StoredTensor]]:
    # Machines that only measure have no gguf library.
    from ..tokenizer.gguf import gguf_eos_token_ids
    from . import gguf
    from .gguf_reader import open_gguf

    reader = open_gguf(path)
    config = ModelConfig.from_gguf(reader, eos_token_ids=gguf_eos_token_ids(reader))
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
    _finish(model, kernels, progress=False)
    return Loaded(model, config, packed_kinds(model))


def _fill(
    model: LlamaForCausalLM, tensors: Sequence[StoredTensor], path: str, *, progress: bool
) -> None:
    """Load every tensor into its places. Raises `ValueError`, before any is read, where they are
    not the model's.
    """
    loads = _matched(model, tensors, path)
    with ThreadPoolExecutor(_THREADS) as pool:
        done = pool.map(lambda load: load[0].load(load[1]), loads)
        for _ in progress_bar(
            done,
            shown=progress,
            desc="loading weights",
            total=len(loads),
            unit=" tensors",
            leave=False,
        ):
            pass


def _finish(model: nn.Module, kernels: LinearKernels | None, *, progress: bool) -> None:
    """Bring each linear layer's weight into its last form, one after another."""
    for _, linear in progress_bar(
        list(named_linears(model)),
        shown=progress and kernels is not None,
        desc="packing weights",
        unit=" layers",
        leave=False,
    ):
        linear.method.finish(linear, kernels)


def _places(model: LlamaForCausalLM) -> dict[str, list[_Place]]:
    """By the checkpoint's names. An embedding has two where a head that is packed is tied to it."""
    places = defaultdict(list)
    for prefix, module in model.named_modules():
        if not isinstance(module, Linear):
            for kind, parameter in module.named_parameters(recurse=False):
                places[f"{prefix}.{kind}"].append(_copy_place(parameter))
            continue
        for part, size in module.parts.items():
            if module.bias is not None:
                bias = module.bias[module.rows(part)]
                places[f"{part_name(prefix, part)}.bias"].append(_copy_place(bias))
            name = weight_name(model, prefix, part)
            tied = name in model.tied_weights.values()
            if not tied or module.weight is not model.get_parameter(name):
                shape, load = (size, module.in_features), partial(module.method.load, module, part)
                places[name].append(_Place(shape, load))
    return places


def _copy_place(target: torch.Tensor) -> _Place:
    return _Place(tuple(target.shape), lambda tensor: tensor.copy_to(target))


def _matched(
    model: LlamaForCausalLM, tensors: Sequence[StoredTensor], path: str
) -> list[tuple[_Place, StoredTensor]]:
    """Each tensor with its places."""
    places, loads = _places(model), []
    for tensor in tensors:
        if tensor.name.endswith(_IGNORED) or tensor.name in model.tied_weights:
            continue
        if tensor.name not in places:
            raise ValueError(
                f"{tensor.file} holds a tensor that the model has no place for, {tensor.name!r}; "
                "it is another kind of model"
            )
        for place in places[tensor.name]:
            if place.shape != tensor.shape:
                raise ValueError(
                    f"{tensor.file}: the tensor {tensor.name} has shape {list(tensor.shape)}, but "
                    f"the model's configuration asks for {list(place.shape)}; fetch the model again"
                )
            loads.append((place, tensor))
    missing = sorted(places.keys() - {tensor.name for tensor in tensors})
    if missing:
        raise ValueError(
            f"{path} lacks {len(missing)} tensors, such as {', '.join(missing[:3])}; fetch the "
            "model again"
        )
    return loads


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
    model = empty_model(config, dtype, torch.device("meta"), kinds)
    _finish(model, kernels, progress=False)
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


def empty_model(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, kinds: Kinds = NOTHING_PACKED
) -> LlamaForCausalLM:
    """The model with uninitialised weights of `dtype` on `device`."""
    with _allocating(dtype, device):
        model: LlamaForCausalLM = model_class(config.architecture)(config)
        create_weights(model, kinds)
    return model


@contextmanager
def _allocating(dtype: torch.dtype, device: torch.device) -> Iterator[None]:
    """Inside, tensors are of `dtype` on `device`. Raises `ValueError` where memory is too small."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            yield
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
