"""Reads a folder in diffusers' layout: checks that it is whole, then lets diffusers load it."""

from __future__ import annotations

import json
import struct
import warnings
from pathlib import Path
from typing import Any

import torch

from ...kernels.platform import Platform
from ..weights.resolve import PIPELINE_FILE
from .config import DiffusionConfig

_INSTALL = "diffusion models need more libraries; run: pip install 'piecework[diffusion]'"
_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_STORED = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_HEADER_LENGTH = 8


def load_pipeline(folder: Path, config: DiffusionConfig, platform: Platform) -> Any:
    """The diffusers pipeline of `folder`, on the device. Raises `ValueError` with a remedy."""
    diffusers = _diffusers()
    index = read_index(folder)
    kind = index["_class_name"]
    pipeline_class = getattr(diffusers, kind, None)
    if pipeline_class is None:
        raise ValueError(f"{folder} needs {kind}, which diffusers {diffusers.__version__} does not have; pip install -U diffusers")
    _check_components(folder, index)
    dit, vae = _precision(config.dit_precision, folder / "transformer"), _precision(config.vae_precision, folder / "vae")
    try:
        with warnings.catch_warnings():
            # Newer versions call the parameter `dtype`, and take this name too.
            warnings.simplefilter("ignore", FutureWarning)
            pipeline = pipeline_class.from_pretrained(folder, torch_dtype={"default": dit, "vae": vae}, local_files_only=True)
        pipeline.set_progress_bar_config(disable=True)
        return pipeline.to(platform.device())
    except Exception as error:
        if platform.is_out_of_memory(error):
            raise ValueError(
                f"{folder} does not fit the memory; try --dit-precision bf16 --vae-precision bf16, or a larger device"
            ) from error
        reason = " ".join(str(error).split())[:300]
        raise ValueError(f"{folder} cannot be loaded ({type(error).__name__}: {reason}); is the download whole?") from error


def read_index(folder: Path) -> dict[str, Any]:
    """model_index.json. Raises `ValueError` where there is none, or where the folder holds something else."""
    file = folder / PIPELINE_FILE
    if not file.is_file():
        if (folder / "config.json").is_file():
            raise ValueError(f"{folder} holds a language model, not a diffusion pipeline; run: piecework serve --model-path {folder}")
        raise ValueError(f"{folder} has no {PIPELINE_FILE}; give the folder of a pipeline in diffusers' layout")
    try:
        index = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from None
    if not isinstance(index, dict) or not isinstance(index.get("_class_name"), str):
        raise ValueError(f"{file} names no pipeline class (_class_name); is the download whole?")
    return index


def _diffusers() -> Any:
    try:
        import diffusers
        import imageio  # noqa: F401  (the files are written with it)
    except ImportError as error:
        raise ValueError(f"{_INSTALL} ({error})") from None
    import transformers

    # What they tell is told here in one line, or as a warning of the request.
    diffusers.utils.logging.set_verbosity_error()
    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return diffusers


def _check_components(folder: Path, index: dict[str, Any]) -> None:
    """Raises `ValueError` that names the first component that is not there."""
    components = {name: part for name, part in index.items() if isinstance(part, list) and part[0] is not None}
    if not any(name.startswith("transformer") for name in components):
        raise ValueError(f"{folder} ({index['_class_name']}) has no transformer; pipelines with a U-Net are not supported")
    for name, (library, kind) in components.items():
        part = folder / name
        if not part.is_dir():
            raise ValueError(f"{folder} lacks its {name} ({library} {kind}): there is no folder {name}; is the download whole?")
        has_weights = kind.endswith(("Model", "Encoder", "ForConditionalGeneration")) or name.startswith(
            ("transformer", "vae", "text_encoder")
        )
        if has_weights and not any(part.glob("*.safetensors")) and not any(part.glob("*.bin")):
            raise ValueError(f"{folder} lacks the weights of its {name}: no .safetensors file in {name}; is the download whole?")
        if not any(part.glob("*.json")) and not any(part.glob("*.model")):
            raise ValueError(f"{folder} lacks the configuration of its {name}: no .json file in {name}; is the download whole?")


def _precision(asked: str, part: Path) -> torch.dtype:
    """The number format asked for; auto: that of most tensors in the first weights file of the folder."""
    if asked != "auto":
        return _DTYPES[asked]
    for file in sorted(part.glob("*.safetensors")):
        with open(file, "rb") as weights:
            (length,) = struct.unpack("<Q", weights.read(_HEADER_LENGTH))
            header = json.loads(weights.read(length))
        kinds = [tensor["dtype"] for name, tensor in header.items() if name != "__metadata__"]
        return _STORED.get(max(set(kinds), key=kinds.count), torch.float32)
    return torch.float32
