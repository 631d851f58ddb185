"""Finds models. Each is a file of `runtime/models/` that states its names and has a class with the
name of its architecture.

    ARCHITECTURE = "Qwen3ForCausalLM"    # in config.json, and the class
    MODEL_TYPE = "qwen3"                 # in config.json
    ALSO_MODEL_TYPE = "qwen3_of_others"  # in config.json of other checkpoints, optional
    ALSO_ARCHITECTURE = "QWen3ForCausalLM"  # in config.json of older code
    GGUF_ARCHITECTURE = "qwen3"          # `general.architecture`, optional
    ALSO_GGUF_ARCHITECTURE = "qwen3_b"   # a second one, optional
    GGUF_EMBEDDER = "gemma-embedding"    # of files with bidirectional attention

If several models have the same name in GGUF files, `CausalLM.fits_gguf` chooses one.

Encoders state their names as follows, and the class has the name ENCODER:

    ENCODER = "Bert"                     # of BertModel and BertForSequenceClassification
    MODEL_TYPE = "bert"
    CONFIG_OF_OTHERS = "MyBertConfig"    # Of folders with code of their own, in `auto_map`.
"""

from __future__ import annotations

import re
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

_MODELS = "piecework.runtime.models"  # The package whose files are models.
_NAME = re.compile(
    r"^((?:ALSO_)?(?:ARCHITECTURE|MODEL_TYPE|GGUF_ARCHITECTURE)|ENCODER|GGUF_EMBEDDER"
    r'|CONFIG_OF_OTHERS) = "([\w-]+)"',
    re.MULTILINE,
)


class ModelNames(NamedTuple):
    """The names of a model.

    Attributes:
        gguf, also_gguf: Names in GGUF files, or None.
        also: A second `model_type` in config.json, or None.
        other: A second name of the architecture, or None.
    """

    module: str
    architecture: str
    model_type: str
    gguf: str | None
    also: str | None = None
    config_of_others: str | None = None
    gguf_embedder: str | None = None
    also_gguf: str | None = None
    other: str | None = None


def find_models() -> list[ModelNames]:
    """Return the names of all models.

    The files are read, not imported. Importing them takes torch, and seconds in which an
    unsupported model could be refused.
    """
    return [
        ModelNames(
            module,
            names["ARCHITECTURE"],
            names["MODEL_TYPE"],
            names.get("GGUF_ARCHITECTURE"),
            names.get("ALSO_MODEL_TYPE"),
            gguf_embedder=names.get("GGUF_EMBEDDER"),
            also_gguf=names.get("ALSO_GGUF_ARCHITECTURE"),
            other=names.get("ALSO_ARCHITECTURE"),
        )
        for module, names in _named_files(tuple(import_module(_MODELS).__path__))
        if "ARCHITECTURE" in names
    ]


def find_encoders() -> list[ModelNames]:
    """Return the names of all encoders. An `architecture` is the beginning of the names of its
    variants.
    """
    return [
        ModelNames(
            module,
            names["ENCODER"],
            names["MODEL_TYPE"],
            names.get("GGUF_ARCHITECTURE"),
            names.get("ALSO_MODEL_TYPE"),
            names.get("CONFIG_OF_OTHERS"),
        )
        for module, names in _named_files(tuple(import_module(_MODELS).__path__))
        if "ENCODER" in names
    ]


@cache
def _named_files(folders: tuple[str, ...]) -> list[tuple[str, dict[str, str]]]:
    """Read the files once, because the start of an engine needs them a dozen times."""
    return [
        (path.stem, dict(_NAME.findall(path.read_text(encoding="utf-8"))))
        for path in sorted(path for folder in folders for path in Path(folder).glob("*.py"))
    ]


def find_model(*, architecture: str | None = None, gguf: str | None = None) -> ModelNames:
    """Return the model with one of these names.

    If several models have the same name in GGUF files, it is the first. Raises `ValueError` if
    there is none.
    """
    models = find_models()
    for names in models:
        is_said = architecture is not None and architecture in (names.architecture, names.other)
        in_gguf = names.gguf, names.also_gguf, names.gguf_embedder
        if is_said or (gguf is not None and gguf in in_gguf):
            return names
    raise ValueError(
        f"the architecture {architecture or gguf!r} is not supported; supported: "
        f"{', '.join(names.architecture for names in models)}"
    )


class UnsupportedError(ValueError):
    """A variant of a supported model that only the code of transformers may compute."""


# The architecture of all models that the code of transformers computes.
FALLBACK = "TransformersForCausalLM"


class ModelCode(NamedTuple):
    """The code that computes a model: that of this package or of transformers.

    `impl` is the value of --model-impl. `trusted`: the folder may contain code.
    """

    impl: str = "piecework"
    trusted: bool = False

    def architecture(self, said: str) -> str:
        """Return the architecture that computes the architecture `said`. Raises `ValueError` if
        none does.
        """
        is_ours = any(said in (names.architecture, names.other) for names in find_models())
        if self.impl == "transformers" or (self.impl == "auto" and not is_ours):
            return FALLBACK
        return find_model(architecture=said).architecture


def model_type_of(architecture: str, content: dict[str, Any]) -> Any:
    """Return the `model_type` of an architecture. Raises `ValueError` if the code of transformers
    does not support it.
    """
    if architecture != FALLBACK:
        names = find_model(architecture=architecture)
        is_also = names.also is not None and content.get("model_type") == names.also
        return names.also if is_also else names.model_type
    if content.get("quantization_config") is not None:
        raise ValueError(
            "transformers' code computes it, which is given no quantised weights here; take a "
            "checkpoint of 16 bits, and --quantization int8 or fp8"
        )
    if content.get("is_encoder_decoder"):
        raise ValueError("it is an encoder with a decoder, which is not supported; choose another")
    return content.get("model_type")


def model_class(architecture: str) -> Any:
    """Return the subclass of `CausalLM` that builds the model."""
    is_ours = architecture != FALLBACK
    name = find_model(architecture=architecture).module if is_ours else "fallback"
    return getattr(import_module(f"{_MODELS}.{name}"), architecture)


def encoder_class(names: ModelNames) -> Any:
    """Return the class that builds an encoder, with the interface of `Bert`."""
    return getattr(import_module(f"{_MODELS}.{names.module}"), names.architecture)
