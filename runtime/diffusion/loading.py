"""Check that a folder in diffusers' layout is complete, and load it by diffusers."""

from __future__ import annotations

import json
import warnings
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ...kernels.platform.memory import Memory
from ..files.resolve import PIPELINE_FILE
from .config import DiffusionConfig
from .offload import is_offloaded

_INSTALL = "diffusion models need more libraries; run: pip install 'piecework[diffusion]'"
_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_STORED = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def load_pipeline(folder: Path, config: DiffusionConfig, platform: Memory) -> Any:
    """Return the diffusers pipeline of `folder`, on the device. Raise `ValueError` with a
    remedy.
    """
    diffusers = _diffusers()
    index = read_index(folder)
    kind = index["_class_name"]
    pipeline_class = getattr(diffusers, kind, None)
    if pipeline_class is None:
        raise ValueError(
            f"{folder} needs {kind}, which diffusers {diffusers.__version__} does not have; pip "
            "install -U diffusers"
        )
    # If a pipeline's libraries are missing, diffusers puts another class in its place, which
    # reports them when it is loaded.
    if not (
        isinstance(pipeline_class, type)
        and (
            issubclass(pipeline_class, diffusers.DiffusionPipeline)
            or hasattr(pipeline_class, "_backends")
        )
    ):
        raise ValueError(
            f"{folder / PIPELINE_FILE} names {kind}, which is no pipeline; is it the pipeline's "
            "own file?"
        )
    _check_components(folder, _components(folder, index), kind)
    dit, vae = (
        _precision(config.dit_precision, folder / "transformer"),
        _precision(config.vae_precision, folder / "vae"),
    )
    # Diffusers expects some components even if the index has none, so name the missing ones in the
    # call.
    left_out = {
        name: None for name, entry in index.items() if isinstance(entry, list) and entry[0] is None
    }
    pipeline = _from_pretrained(
        pipeline_class, folder, {"default": dit, "vae": vae}, left_out, config, platform
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def _from_pretrained(
    pipeline_class: Any,
    folder: Path,
    dtypes: Mapping[str, torch.dtype],
    left_out: Mapping[str, None],
    config: DiffusionConfig,
    platform: Memory,
) -> Any:
    """Return the pipeline on the device, except for offloaded parts. Raise `ValueError` with
    diffusers' error in one line.
    """
    try:
        with warnings.catch_warnings():
            # Newer versions name the parameter `dtype`, and accept this name too.
            warnings.simplefilter("ignore", FutureWarning)
            pipeline = pipeline_class.from_pretrained(
                folder, torch_dtype=dict(dtypes), local_files_only=True, **left_out
            )
        if lacking := _lacking_weight(pipeline):
            raise ValueError(lacking)
        for name, part in pipeline.components.items():
            if isinstance(part, torch.nn.Module) and not is_offloaded(name, config):
                part.to(platform.device())
        return pipeline
    except Exception as error:
        if platform.is_out_of_memory(error):
            raise ValueError(
                f"{folder} does not fit the memory; try --dit-precision bf16 --vae-precision bf16, "
                "or a larger device"
            ) from error
        reason = " ".join(str(error).split())[:300]
        raise ValueError(
            f"{folder} cannot be loaded ({type(error).__name__}: {reason}); is the download whole?"
        ) from error


def read_index(folder: Path) -> dict[str, Any]:
    """Return model_index.json. Raise `ValueError` if it is missing or if the folder holds something
    else.
    """
    file = folder / PIPELINE_FILE
    if not file.is_file():
        if (folder / "config.json").is_file():
            raise ValueError(
                f"{folder} holds a language model, not a diffusion pipeline; run: piecework serve "
                f"{folder}"
            )
        raise ValueError(
            f"{folder} has no {PIPELINE_FILE}; give the folder of a pipeline in diffusers' layout"
        )
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

    # Errors of these libraries are reported in one line, or as a warning of the request.
    diffusers.utils.logging.set_verbosity_error()
    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"diffusers\.")
    return diffusers


def _components(folder: Path, index: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """Return library and class of each component of the pipeline. Raise `ValueError` for an invalid
    entry.
    """
    components = {}
    for name, entry in index.items():
        match entry:
            case [None, *_]:
                pass
            case [str(library), str(kind)]:
                components[name] = (library, kind)
            case list():
                raise ValueError(
                    f"{folder / PIPELINE_FILE}: {name} should name a library and a class, got "
                    f"{entry!r:.100}"
                )
    return components


def _check_components(
    folder: Path, components: Mapping[str, tuple[str, str]], pipeline: str
) -> None:
    """Raise `ValueError` that names the first missing component."""
    if not any(name.startswith("transformer") for name in components):
        raise ValueError(
            f"{folder} ({pipeline}) has no transformer; pipelines with a U-Net are not supported"
        )
    for name, (library, kind) in components.items():
        part = folder / name
        if not part.is_dir():
            raise ValueError(
                f"{folder} lacks its {name} ({library} {kind}): there is no folder {name}; is the "
                "download whole?"
            )
        has_weights = kind.endswith(
            ("Model", "Encoder", "ForConditionalGeneration")
        ) or name.startswith(("transformer", "vae", "text_encoder"))
        if has_weights and not any(part.glob("*.safetensors")) and not any(part.glob("*.bin")):
            raise ValueError(
                f"{folder} lacks the weights of its {name}: no .safetensors file in {name}; is the "
                "download whole?"
            )
        if not any(part.glob("*.json")) and not any(part.glob("*.model")):
            raise ValueError(
                f"{folder} lacks the configuration of its {name}: no .json file in {name}; is the "
                "download whole?"
            )


def _precision(asked: str, part: Path) -> torch.dtype:
    """Return the requested number format. "auto": the format of most tensors in the folder's first
    file of weights.
    """
    if asked != "auto":
        return _DTYPES[asked]
    file = min(part.glob("*.safetensors"), default=None)
    if file is None:
        return torch.float32
    try:
        with safe_open(file, framework="pt") as weights:
            kinds = Counter(weights.get_slice(name).get_dtype() for name in weights.keys())  # noqa: SIM118  (no mapping)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} cannot be read ({error}); is the download whole?") from None
    return _STORED.get(kinds.most_common(1)[0][0], torch.float32) if kinds else torch.float32


def _lacking_weight(pipeline: Any) -> str | None:
    """Return a sentence about the first weight that the files lack. Diffusers leaves it on the meta
    device.
    """
    for part_name, part in pipeline.components.items():
        for name, weight in part.named_parameters() if isinstance(part, torch.nn.Module) else ():
            if weight.is_meta:
                return f"the files of its {part_name} lack {name}"
    return None
