"""Which models there are: each is a file of this package that says its names and has a class of its
architecture's name.

    ARCHITECTURE = "Qwen3ForCausalLM"    # in config.json, and the class
    MODEL_TYPE = "qwen3"                 # in config.json
    GGUF_ARCHITECTURE = "qwen3"          # `general.architecture`, where such files exist
"""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from . import __path__ as _folders

_NAME = re.compile(r'^(ARCHITECTURE|MODEL_TYPE|GGUF_ARCHITECTURE) = "(\w+)"', re.MULTILINE)


class ModelNames(NamedTuple):
    """What a model is called; `gguf` is None where GGUF files have no name for it."""

    module: str
    architecture: str
    model_type: str
    gguf: str | None


def find_models() -> list[ModelNames]:
    """All of them. The files are read and not imported: that takes torch, and seconds before a
    model that is none of them could be refused.
    """
    found = []
    for path in sorted(path for folder in _folders for path in Path(folder).glob("*.py")):
        names = dict(_NAME.findall(path.read_text(encoding="utf-8")))
        if "ARCHITECTURE" in names:
            gguf = names.get("GGUF_ARCHITECTURE")
            found.append(ModelNames(path.stem, names["ARCHITECTURE"], names["MODEL_TYPE"], gguf))
    return found


def find_model(*, architecture: str | None = None, gguf: str | None = None) -> ModelNames:
    """The model with the one or the other name. Raises `ValueError` where there is none."""
    models = find_models()
    for names in models:
        if names.architecture == architecture or (gguf is not None and names.gguf == gguf):
            return names
    raise ValueError(
        f"the architecture {architecture or gguf!r} is not supported; supported: "
        f"{', '.join(names.architecture for names in models)}"
    )


def model_class(architecture: str) -> Any:
    """The class that builds it, of `LlamaForCausalLM`'s interface."""
    module = import_module(f"{__package__}.{find_model(architecture=architecture).module}")
    return getattr(module, architecture)
