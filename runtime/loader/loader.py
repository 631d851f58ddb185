"""Builds a model and fills its weights, whatever they are stored in."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
from torch import nn

from ...kernels.linear import LinearKernels
from ..layers.linear import Linear, StoredTensor
from ..layers.rotary import Rotary
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
    part_name,
    weight_name,
)
from . import safetensors

_THREADS = 4
_INITIAL_STD = 0.02
_Place = tuple[tuple[int, ...], Callable[[StoredTensor], None]]
"""The shape of a tensor of a checkpoint, and what takes it."""
_IGNORED = ".rotary_emb.inv_freq"
"""Old checkpoints bring the rotary frequencies, which follow from the config."""


def load_model(
    path: str,
    dtype: torch.dtype,
    device: torch.device,
    progress: bool,
    kernels: LinearKernels | None = None,
    *,
    keep_quantized: bool = False,
) -> LlamaForCausalLM:
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
    kept = tensors if keep_quantized else []
    model = empty_model(config, dtype, device, lambda model: choose_kinds(model, kernels, kept))
    _fill(model, tensors, path, progress=progress)
    _finish(model, kernels, progress=progress)
    return model


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
) -> LlamaForCausalLM:
    """The model that a folder's config.json describes, with random weights made on `device`: the
    same ones each time on one device.

    Norms are 1 and matrices small, as before training, so that activations stay finite in any
    dtype.
    """
    model = empty_model(ModelConfig.from_pretrained(path), dtype, device)
    generator = torch.Generator(device).manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data.fill_(1.0)
        else:
            parameter.data.normal_(std=_INITIAL_STD, generator=generator)
    _finish(model, kernels, progress=False)
    return model


def _fill(
    model: LlamaForCausalLM, tensors: Sequence[StoredTensor], path: str, *, progress: bool
) -> None:
    """Load every tensor into its places. Raises `ValueError`, before any is read, where they are
    not the model's.
    """
    places = _places(model)
    loads: list[Callable[[], None]] = []
    for tensor in tensors:
        if tensor.name.endswith(_IGNORED) or tensor.name in model.tied_weights:
            continue
        if tensor.name not in places:
            raise ValueError(
                f"{tensor.file} holds a tensor that the model has no place for, {tensor.name!r}; "
                "it is another kind of model"
            )
        for shape, load in places[tensor.name]:
            if shape != tensor.shape:
                raise ValueError(
                    f"{tensor.file}: the tensor {tensor.name} has shape {list(tensor.shape)}, but "
                    f"the model's configuration asks for {list(shape)}; fetch the model again"
                )
            loads.append(partial(load, tensor))
    if missing := sorted(places.keys() - {tensor.name for tensor in tensors}):
        raise ValueError(
            f"{path} lacks {len(missing)} tensors, such as {', '.join(missing[:3])}; fetch the "
            "model again"
        )
    shown = {"desc": "loading weights", "total": len(loads), "unit": " tensors", "leave": False}
    with ThreadPoolExecutor(_THREADS) as pool:
        for _ in progress_bar(pool.map(lambda load: load(), loads), shown=progress, **shown):
            pass


def _places(model: LlamaForCausalLM) -> dict[str, list[_Place]]:
    """By the checkpoint's names. An embedding has two where a head that is packed is tied to it."""
    places: defaultdict[str, list[_Place]] = defaultdict(list)
    for prefix, module in model.named_modules():
        parameters = dict(module.named_parameters(recurse=False))
        if isinstance(module, Linear):
            weight = parameters.pop("weight")
            for part, rows in module.parts.items():
                name = weight_name(model, prefix, part)
                if name not in places or weight is not model.get_parameter(name):
                    load = partial(module.method.load, module, part)
                    places[name].append(((rows, module.in_features), load))
                for kind, parameter in parameters.items():
                    values = parameter[module.rows(part)]
                    places[f"{part_name(prefix, part)}.{kind}"].append(_copy_of(values))
        else:
            for kind, parameter in parameters.items():
                places[f"{prefix}.{kind}"].append(_copy_of(parameter))
    return places


def _copy_of(target: torch.Tensor) -> _Place:
    return tuple(target.shape), lambda tensor: tensor.copy_to(target)


def _finish(model: nn.Module, kernels: LinearKernels | None, *, progress: bool) -> None:
    """Bring each linear layer's weight into its last form, one after another."""
    shown = {"desc": "packing weights", "unit": " layers", "leave": False}
    linears = list(named_linears(model))
    for _, linear in progress_bar(linears, shown=progress and kernels is not None, **shown):
        linear.method.finish(linear, kernels)


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
    model = empty_model(config, dtype, torch.device("meta"), lambda _: kinds)
    _finish(model, kernels, progress=False)
    tensors = [*model.parameters(), *model.buffers()]
    size = max(tensor.nbytes for tensor in tensors)
    memory = torch.empty(size, dtype=torch.uint8, device=device)
    placed: dict[torch.Tensor, torch.Tensor] = {}
    for tensor in tensors:
        data = memory[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        is_weight = isinstance(tensor, nn.Parameter)
        placed[tensor] = nn.Parameter(data, requires_grad=False) if is_weight else data
    for module in model.modules():
        for found in (module.named_parameters, module.named_buffers):
            for name, tensor in list(found(recurse=False, remove_duplicate=False)):
                setattr(module, name, placed[tensor])
    return model


def empty_model(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    choose: Callable[[LlamaForCausalLM], Kinds] = lambda _: NOTHING_PACKED,
) -> LlamaForCausalLM:
    """The model with uninitialised weights of `dtype` on `device`. `choose`: which of its layers
    are not kept as numbers.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            model: LlamaForCausalLM = model_class(config.architecture)(config)
            create_weights(model, choose(model))
            for module in model.modules():
                if isinstance(module, Rotary) and not module.cos.is_meta:
                    module.fill()
            return model
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
