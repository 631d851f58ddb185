"""The models that exist. Each is a file of `runtime/models/` that states its names and has a class
with the name of its architecture.

    ARCHITECTURE = "Qwen3ForCausalLM"    # in config.json, and the class
    MODEL_TYPE = "qwen3"                 # in config.json
    ALSO_MODEL_TYPE = "qwen3_of_others"  # in config.json of another's checkpoints, where there are
    ALSO_ARCHITECTURE = "QWen3ForCausalLM"  # in config.json of older code
    GGUF_ARCHITECTURE = "qwen3"          # `general.architecture`, where such files exist
    ALSO_GGUF_ARCHITECTURE = "qwen3_b"   # the same of other such files
    GGUF_EMBEDDER = "gemma-embedding"    # of files whose tokens see each other both ways

Of several models that GGUF files call the same, `CausalLM.fits_gguf` tells which it is.

Encoders, which make vectors and scores of texts, say theirs so, and the class has this name:

    ENCODER = "Bert"                     # of BertModel and BertForSequenceClassification
    MODEL_TYPE = "bert"
    CONFIG_OF_OTHERS = "MyBertConfig"    # of folders with code of their own: `auto_map` has it
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
    """What a model is called; `gguf` is None where GGUF files have no name for it, `also_gguf`
    where they have no second one, `also` where config.json has no second `model_type`, `other`
    where it has no second name of the architecture.
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
    """All of them. The files are read and not imported: that takes torch, and seconds before a
    model that is none of them could be refused.
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
    """The same of encoders, whose `architecture` is what the names of their kinds begin with."""
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
    """Read once: an engine's start asks a dozen times."""
    return [
        (path.stem, dict(_NAME.findall(path.read_text(encoding="utf-8"))))
        for path in sorted(path for folder in folders for path in Path(folder).glob("*.py"))
    ]


def find_model(*, architecture: str | None = None, gguf: str | None = None) -> ModelNames:
    """The model with the one or the other name; of several that GGUF files call the same, the
    first. Raises `ValueError` where there is none.
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
    """What our own code does not compute of a model that it has; transformers' may."""


FALLBACK = "TransformersForCausalLM"
"""The architecture of all that transformers' own code computes."""


class ModelCode(NamedTuple):
    """Whose code computes a model. `impl`: as `--model-impl`; `trusted`: whether the folder may
    bring code of its own.
    """

    impl: str = "piecework"
    trusted: bool = False

    def architecture(self, said: str) -> str:
        """The architecture to take a model for that says to be `said`. Raises `ValueError` where
        nothing computes it.
        """
        is_ours = any(said in (names.architecture, names.other) for names in find_models())
        if self.impl == "transformers" or (self.impl == "auto" and not is_ours):
            return FALLBACK
        return find_model(architecture=said).architecture


def model_type_of(architecture: str, content: dict[str, Any]) -> Any:
    """What goes with an architecture in a config.json. Raises `ValueError` for one of which
    transformers' code is to make something, and can make nothing here.
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
    """The class that builds it, a `CausalLM`."""
    is_ours = architecture != FALLBACK
    name = find_model(architecture=architecture).module if is_ours else "fallback"
    return getattr(import_module(f"{_MODELS}.{name}"), architecture)


def encoder_class(names: ModelNames) -> Any:
    """The class that builds an encoder, of `Bert`'s interface."""
    return getattr(import_module(f"{_MODELS}.{names.module}"), names.architecture)
