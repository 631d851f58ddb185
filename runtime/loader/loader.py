"""Builds models and fills their weights from checkpoints of any format."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from torch import nn

from ...kernels.linear import LinearKernels
from ..config.model import ModelConfig
from ..config.model_registry import FALLBACK, ModelCode, model_class
from ..config.quantization_registry import Scheme, asked_of, quantization_of, read_scheme
from ..files.folder import read_json
from ..layers.linear import (
    CannotSplitError,
    Embedding,
    Linear,
    Place,
    StoredTensor,
    part_name,
)
from ..layers.rotary import Rotary
from ..models.causal_lm import CausalLM
from ..models.checkpoint import check_fits
from ..models.experts import absent_experts, check_experts
from ..process.progress import progress_bar
from ..quantization.methods import (
    NOTHING_PACKED,
    Kinds,
    Products,
    create_weights,
    named_embeddings,
    named_linears,
    scheme_kinds,
    split_errors,
    stored_kinds,
    tied_head,
)
from ..quantization.on_load import COLUMNS
from . import safetensors
from .kv_scales import split_kv_scales
from .narrow import copies_of, copy_of, whole_place
from .parallel import WHOLE, Shard, split

_THREADS = 4
_INITIAL_STD = 0.02
_SMALL = 2**16  # Tensors of up to this many numbers are loaded first.
_TOO_LARGE = "can't allocate memory", "Storage size calculation overflowed"
# Old checkpoints hold the rotary frequencies, which follow from the config.
_IGNORED = ".rotary_emb.inv_freq"


def load_model(
    path: str,
    dtype: torch.dtype,
    device: torch.device,
    progress: bool,
    kernels: LinearKernels | None = None,
    *,
    quantization: str = "none",
    lacking: Collection[torch.dtype] = (),
    shard: Shard = WHOLE,
    context_length: int | None = None,
    code: ModelCode | None = None,
    takes_images: bool = False,
) -> CausalLM:
    """Return the model of a folder or .gguf file in `dtype` on `device`.

    If `kernels` are given, the linear layers are packed for them. Loading needs little more memory
    than the weights. Raises `ValueError` that names the file or tensor at fault.

    Args:
        quantization: The value of --quantization. auto: weights keep the 4 or 8 bits of the files;
            in a .gguf file only if the kernels can multiply them. none: weights become numbers.
        lacking: See `Platform.lacking_dtypes`.
        shard: The part of the model that this rank holds. Only this part is read.
        context_length: Tokens of the longest text that is served.
        code: Whose code computes the model. None: that of this package.
        takes_images: See `ModelConfig`.
    """
    scheme: Scheme | None = None
    if Path(path).suffix == ".gguf":
        config, tensors = _open_gguf(Path(path))
        quantization = asked_of(path, quantization, None)
    else:
        config, scheme = ModelConfig.from_pretrained(path, code=code), scheme_of(Path(path))
        quantization = asked_of(path, quantization, read_json(Path(path, "config.json")))
        found = safetensors.list_tensors(Path(path), quantized=scheme is not None)
        tensors = model_class(config.architecture).checkpoint_tensors(config, found)
    if takes_images and config.architecture == FALLBACK:
        raise ValueError(
            f"{path}: transformers' code computes this variant of the model and takes texts alone; "
            "add --disable-vision"
        )
    config = replace(config.within(context_length), takes_images=takes_images)
    tensors, kv_scales = split_kv_scales(tensors, config.num_layers)
    is_quantized = scheme is not None or any(tensor.kind is not None for tensor in tensors)
    if is_quantized and quantization in COLUMNS:
        raise ValueError(
            f"--quantization {quantization} needs weights of 16 bits, but those of {path} are "
            "quantised already; use --quantization auto or another checkpoint"
        )

    def choose(model: CausalLM) -> Kinds:
        if is_quantized and scheme is None:
            return stored_kinds(model, kernels, tensors) if quantization == "auto" else {}
        return scheme_kinds(model, scheme, quantization, Products(dtype, device, kernels, lacking))

    try:
        _check_split(config, dtype, choose, shard)
        model = empty_model(config, dtype, device, choose, shard)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    model.kv_scales = [kv_scales[layer] for layer in model.kv_layers]
    fill(model, tensors, path, progress=progress)
    finish(model, kernels, progress=progress)
    return model


def read_model_config(path: str, code: ModelCode | None = None) -> ModelConfig:
    """Return the config of a folder or .gguf file. Raises the errors of `load_model`."""
    is_gguf = Path(path).suffix == ".gguf"
    return _open_gguf(Path(path))[0] if is_gguf else ModelConfig.from_pretrained(path, code=code)


def scheme_of(folder: Path) -> Scheme | None:
    """Return what config.json says of quantised weights, or None if there are none."""
    path = folder / "config.json"
    try:
        quantization = quantization_of(read_json(path))
        return None if quantization is None else read_scheme(quantization)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _open_gguf(path: Path) -> tuple[ModelConfig, Sequence[StoredTensor]]:
    # Imported here, because machines that only measure have no gguf library.
    from ..files.gguf_reader import open_gguf
    from ..tokenizer.gguf import gguf_eos_token_ids
    from . import gguf

    reader = open_gguf(path)
    config = ModelConfig.from_gguf(reader, eos_token_ids=gguf_eos_token_ids(reader))
    model = model_class(config.architecture)
    return config, model.gguf_tensors(config, gguf.list_tensors(reader, config))


def random_model(
    path: str,
    dtype: torch.dtype,
    device: torch.device,
    kernels: LinearKernels | None = None,
    *,
    quantization: str = "none",
    lacking: Collection[torch.dtype] = (),
    shard: Shard = WHOLE,
    context_length: int | None = None,
    code: ModelCode | None = None,
) -> CausalLM:
    """Return the model of a folder's config.json with random weights, made on `device`.

    The weights are the same each time on one device. A rank gets the part of `shard`. Norms are 1
    and matrices small, as before training, so that activations stay finite in any dtype. Raises
    `ValueError` if the weights were to be quantised as the checkpoint says.
    """
    quantization = asked_of(path, quantization, read_json(Path(path, "config.json")))
    if quantization == "auto" and scheme_of(Path(path)) is not None:
        raise ValueError(
            f"--load-format dummy makes weights of 16 bits, but those of {path} are quantised; add "
            "--quantization none, fp8 or int8"
        )
    products = Products(dtype, device, kernels, lacking)
    choose = partial(scheme_kinds, scheme=None, quantization=quantization, products=products)
    config = ModelConfig.from_pretrained(path, code=code).within(context_length)
    _check_split(config, dtype, choose, shard)
    model = empty_model(config, dtype, device, choose, shard)
    for name, places in _places(model).items():
        for place in places:
            make = partial(_make_random, name)
            place.load(StoredTensor(Path(path), name, place.shapes[0], make, dtype))
    finish(model, kernels, progress=False)
    return model


def _make_random(name: str, target: torch.Tensor) -> None:
    generator = torch.Generator(target.device).manual_seed(crc32(name.encode()))
    target.fill_(1.0) if target.dim() == 1 else target.normal_(0, _INITIAL_STD, generator=generator)


def fill(
    model: CausalLM,
    tensors: Sequence[StoredTensor],
    path: str,
    *,
    progress: bool,
    unused: tuple[str, ...] = (),
) -> None:
    """Load every tensor into its places.

    Raises `ValueError`, before any is read, if the tensors are not those of the model. Names that
    begin with one of `unused` need no place.
    """
    places = _places(model)
    absent = absent_experts(model)
    loads: list[tuple[StoredTensor, Place]] = []
    found: dict[str, Path] = {}
    for tensor in tensors:
        is_absent = tensor.name.rpartition(".")[0] in absent
        if is_absent or tensor.name.endswith(_IGNORED) or tensor.name in model.tied_weights:
            continue
        if tensor.name not in places:
            if tensor.name.startswith(unused):
                continue
            raise ValueError(
                f"{tensor.file} holds the tensor {tensor.name!r}, which this architecture does not "
                "have; check model_type and architectures in config.json"
            )
        if (other := found.setdefault(tensor.name, tensor.file)) != tensor.file:
            raise ValueError(
                f"{other} and {tensor.file} both hold the tensor {tensor.name}; keep the files of "
                "one copy of the model"
            )
        for place in places[tensor.name]:
            check_fits(tensor, place)
            loads.append((tensor, place))
    if missing := sorted(
        name
        for name, wanted in places.items()
        if name not in found and not all(place.is_optional for place in wanted)
    ):
        raise ValueError(
            f"{path} lacks {len(missing)} tensors, for example {', '.join(missing[:3])}; download "
            "the model again"
        )
    loads.sort(key=lambda load: prod(load[0].shape) > _SMALL)
    shown = {"desc": "loading weights", "total": len(loads), "unit": " tensors", "leave": False}
    with ThreadPoolExecutor(_THREADS) as pool:
        done = pool.map(lambda load: load[1].load(load[0]), loads)
        for _ in progress_bar(done, shown=progress, **shown):
            pass


def _places(model: CausalLM) -> dict[str, list[Place]]:
    """Return the places by the names of the checkpoint. Raises `CannotSplitError`.

    An embedding has two places if a packed head is tied to it.
    """
    places: defaultdict[str, list[Place]] = defaultdict(list)
    for prefix, module in model.named_modules():
        if not isinstance(module, Linear):
            if isinstance(module, Embedding):
                if tied_head(model, module) is None:
                    place = whole_place(module.place(), module.held_rows, None)
                    places[f"{prefix}.weight"].append(place)
                continue
            rows = getattr(module, "held_rows", None)
            for kind, parameter in module.named_parameters(recurse=False):
                places[f"{prefix}.{kind}".removeprefix(".")] += copies_of(parameter, rows)
            continue
        for kind, parameter in module.own_parameters():
            places[f"{prefix}.{kind}"].append(copy_of(parameter))
        for part in module.parts:
            for kind, place in _linear_places(prefix, module, part).items():
                own = f"{part_name(prefix, part)}.{kind}"
                name = model.tied_weights.get(own, own)
                if (
                    name == own
                    or name not in places
                    or module.weight is not model.get_parameter(name)
                ):
                    places[name].append(place)
    return places


def _linear_places(prefix: str, linear: Linear, part: str) -> dict[str, Place]:
    """Return the places of a part of a layer, with that of its bias."""
    rows, columns = linear.held_rows.get(part), linear.held_columns
    with split_errors(prefix, linear):
        places = {
            kind: whole_place(place, rows, columns)
            for kind, place in linear.method.places(linear, part).items()
        }
    if linear.bias is not None:
        places["bias"] = copy_of(linear.bias[linear.rows(part)], linear.bias_rows(part))
    return places


def finish(model: nn.Module, kernels: LinearKernels | None, *, progress: bool) -> None:
    """Convert the weights of each linear layer into their final form, and compute tables."""
    shown = {"desc": "packing weights", "unit": " layers", "leave": False}
    linears = list(named_linears(model))
    for _, linear in progress_bar(linears, shown=progress and kernels is not None, **shown):
        linear.method.finish(linear, linear.usable(kernels))
    for _, embedding in named_embeddings(model):
        embedding.finish(kernels, tied_head(model, embedding))
    check_experts(model)
    for module in model.modules():
        if isinstance(module, Rotary) and not module.cos.is_meta:
            module.fill()


def _check_split(
    config: ModelConfig,
    dtype: torch.dtype,
    choose: Callable[[CausalLM], Kinds],
    shard: Shard,
) -> None:
    """Raise `ValueError`, before memory is allocated, if a layer cannot be split over the ranks.

    The message names the largest number of ranks that works.
    """

    def lay_out(size: int) -> CannotSplitError | None:
        try:
            part = shard._replace(rank=0, size=size)
            _places(empty_model(config, dtype, torch.device("meta"), choose, part))
        except CannotSplitError as error:
            return error
        return None

    if shard.size > 1 and (error := lay_out(shard.size)) is not None:
        fits = next(size for size in range(shard.size - 1, 0, -1) if lay_out(size) is None)
        raise ValueError(f"{error}; use --tp-size {fits}")


def empty_model(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    choose: Callable[[CausalLM], Kinds] = lambda _: NOTHING_PACKED,
    shard: Shard = WHOLE,
) -> CausalLM:
    """Return the model, or a rank's part of it, with uninitialised weights.

    `choose` returns which layers are not kept as numbers.
    """
    make = partial(model_class(config.architecture), config)
    model: CausalLM = make_empty(make, dtype, device, choose, shard)
    return model


def make_empty(
    make: Callable[[], Any],
    dtype: torch.dtype,
    device: torch.device,
    choose: Callable[[CausalLM], Kinds] = lambda _: NOTHING_PACKED,
    shard: Shard = WHOLE,
) -> Any:
    """Return the model that `make` builds, with uninitialised weights.

    Raises `ValueError` if there is too little memory.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            model = make()
            split(model, shard)
            create_weights(model, choose(model))
            return model
    except RuntimeError as error:
        # On a CPU torch raises a RuntimeError, which only its text identifies.
        is_memory_error = any(text in str(error) for text in _TOO_LARGE)
        if not isinstance(error, torch.OutOfMemoryError) and not is_memory_error:
            raise
        raise ValueError(
            f"too little memory for the weights in {dtype}; use a smaller model, or free memory"
        ) from error
    finally:
        torch.set_default_dtype(before)
