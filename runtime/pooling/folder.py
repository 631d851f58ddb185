"""Reads what a folder says of a pooling model, without its weights.

Source of the formats: `modules.json` and the folders it names, of sentence-transformers 2.0 to 6.2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..config.encoder import label_count
from ..config.model_registry import ModelNames, find_encoders, find_models
from ..files.folder import no_model, read_json
from .dense import ACTIVATIONS, Dense, class_name, read_dense
from .gguf_file import gguf_makes_vectors, read_gguf
from .prompts import NO_PROMPTS, Prompts, read_prompts

# How the states of tokens become one vector. The vectors of several modes are joined in this order.
MODES = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
# Names of the modes in older files.
_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
CLASSIFIER = "ForSequenceClassification"
_DECODER = "ForCausalLM"
_KINDS = ("Model", CLASSIFIER, "ForMaskedLM", _DECODER)
_MODULES = "modules.json"
_MOST_LABELS = 10_000
_TRANSFORMER_FILES = ("sentence_bert_config.json", "sentence_roberta_config.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingFolder:
    """What a folder or .gguf file says of a pooling model.

    Attributes:
        path: The folder with config.json and weights, or a .gguf file.
        content: The members of config.json, or those that follow from the metadata of the file.
        encoder: Name of the encoder. None: it is a decoder with the architecture `decoder`.
        modes, denses, normalizes: What an embedder does after the transformer.
        activation: Activation of the result of a classifier.
        max_length: The longest text in tokens that the model was made for, if it says so.
        lower_case: Whether texts are converted to lower case first.
        tells_pairs: Whether the model gets the type of the tokens of a second text.
        prompts: Beginnings of texts.
        labels: Names of the numbers of a classifier.
    """

    path: Path
    content: Mapping[str, Any]
    encoder: ModelNames | None
    decoder: str = ""
    modes: tuple[str, ...] = ("mean",)
    denses: list[Dense] = field(default_factory=list)
    normalizes: bool = False
    activation: str = "Identity"
    max_length: int | None = None
    lower_case: bool = False
    tells_pairs: bool = True
    prompts: Prompts = NO_PROMPTS
    labels: tuple[str, ...] = ()

    @property
    def architecture(self) -> str:
        return str(self.content["architectures"][0])

    @property
    def is_classifier(self) -> bool:
        return self.architecture.endswith(CLASSIFIER)


def makes_vectors(path: str) -> bool:
    """Whether the model at a path gives vectors or scores.

    A folder of such a model has `modules.json`, or an architecture that writes no text. Return
    False if the files do not tell.
    """
    folder = Path(path)
    if folder.suffix == ".gguf":
        return gguf_makes_vectors(folder)
    if (folder / _MODULES).is_file():
        return True
    try:
        content = read_json(folder / "config.json")
        name = str(content["architectures"][0])
    except (ValueError, KeyError, TypeError, IndexError):
        return False
    return not name.endswith(_DECODER) and _find(name, content) is not None


def read_folder(path: str) -> PoolingFolder:
    """Return what a folder holds. Raises `ValueError` with a remedy if it is no supported pooling
    model.
    """
    folder = Path(path)
    if folder.suffix == ".gguf":
        return PoolingFolder(**read_gguf(folder))
    if not folder.is_dir():
        raise ValueError(
            f"{path} is no folder; vectors and scores are made by models in Hugging Face's layout, "
            "or by .gguf files"
        )
    modules, root = folder / _MODULES, folder
    named: list[tuple[str, Path]] = []
    if modules.is_file():
        try:
            named = [
                (class_name(entry["type"]), _inside(folder, entry)) for entry in read_json(modules)
            ]
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{modules} is broken ({error}); download the model again") from None
        if not named or named[0][0] != "Transformer":
            raise ValueError(f"{modules} begins with no Transformer; such models are not supported")
        root = named[0][1]
    try:
        return _read(folder, root, named[1:], sentence=bool(named))
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f"{root}: its files are broken ({error}); download the model again"
        ) from None


def _read(
    folder: Path, root: Path, modules: list[tuple[str, Path]], *, sentence: bool
) -> PoolingFolder:
    file = root / "config.json"
    if not file.is_file():
        raise no_model(root, "config.json")
    content = read_json(file)
    match content:
        case {"architectures": [str(name), *_]}:
            found = _find(name, content)
        case _:
            raise ValueError(f'{file} names no model, having no "architectures"')
    if found is None:
        encoders = ", ".join(f"{names.architecture}Model" for names in find_encoders())
        raise ValueError(
            f"{file}: the architecture {name!r:.60} is not supported; supported: {encoders}, their "
            "classifiers, and the decoders that write text"
        )
    encoder, decoder = found
    said = content.get("model_type")
    if encoder is not None and said not in {encoder.model_type, encoder.also} - {None}:
        raise ValueError(
            f'{file}: {name} goes with "model_type": "{encoder.model_type}", got '
            f"{said!r:.60}; download the model again"
        )
    if content.get("quantization_config"):
        raise ValueError(
            f"{file}: quantised weights are for text generation; take a checkpoint of 16 or 32 bits"
        )
    settings = next(filter(None, (_object(root / each) for each in _TRANSFORMER_FILES)), {})
    tokenizer = _object(root / "tokenizer_config.json")
    longest = settings.get("max_seq_length", tokenizer.get("model_max_length"))
    kinds = tokenizer.get("model_input_names")
    common: dict[str, Any] = {
        "path": root,
        "content": content,
        "encoder": encoder,
        "decoder": decoder,
        "max_length": longest if type(longest) is int and longest > 0 else None,
        "lower_case": bool(settings.get("do_lower_case", False)),
        "tells_pairs": kinds is None or "token_type_ids" in kinds,
    }
    if name.endswith(CLASSIFIER):
        labels = _labels(file, content)
        activation = _classifier_activation(root, content, len(labels))
        return PoolingFolder(**common, labels=labels, activation=activation)
    if not sentence:
        # The defaults of sentence-transformers for bare encoders and of vLLM for bare decoders.
        chosen = {"modes": ("mean",)} if encoder else {"modes": ("lasttoken",), "normalizes": True}
        return PoolingFolder(**common, **chosen)
    poolings = [path for kind, path in modules if kind == "Pooling"]
    prompts = read_prompts(folder, poolings, content)
    return PoolingFolder(**common, **_modules(modules), prompts=prompts)


def _modules(modules: list[tuple[str, Path]]) -> dict[str, Any]:
    """Return the modules after the transformer."""
    modes: tuple[str, ...] = ()
    denses: list[Dense] = []
    normalizes = False
    for kind, folder in modules:
        if normalizes or (kind != "Pooling") == (not modes):
            raise ValueError(f"{folder}: {kind} in this place is not supported")
        match kind:
            case "Pooling":
                modes = _pooling_modes(folder / "config.json")
            case "Dense":
                denses.append(read_dense(folder))
            case "Normalize":
                normalizes = True
            case "Dropout":
                pass
            case _:
                raise ValueError(f"{folder}: modules of the kind {kind!r:.60} are not supported")
    if not modes:
        raise ValueError("modules.json names no Pooling; such models are not supported")
    return {"modes": modes, "denses": denses, "normalizes": normalizes}


def _pooling_modes(file: Path) -> tuple[str, ...]:
    config = read_json(file)
    asked = config.get("pooling_mode", [mode for flag, mode in _FLAGS.items() if config.get(flag)])
    modes = (asked,) if isinstance(asked, str) else tuple(asked)
    if not modes or not set(modes) <= set(MODES):
        raise ValueError(f"{file}: the pooling {modes!r:.60} is none of {', '.join(MODES)}")
    return modes


def _object(file: Path) -> Mapping[str, Any]:
    """Return the object in a file, empty if there is no file."""
    content: Mapping[str, Any] = read_json(file) if file.is_file() else {}
    return content


def _labels(file: Path, content: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the labels. Raises `ValueError`."""
    if (count := label_count(content)) > _MOST_LABELS:
        raise ValueError(f"{file}: it has {count} labels, more than {_MOST_LABELS}; choose another")
    names = content.get("id2label") or {}
    return tuple(str(names.get(str(number), f"LABEL_{number}")) for number in range(count))


def _classifier_activation(root: Path, content: Mapping[str, Any], labels: int) -> str:
    """Return the activation of a classifier.

    For one number it is the one that a version of sentence-transformers' CrossEncoder has written,
    by default the sigmoid. For several it is that of transformers' pipeline: softmax, unless a text
    may have several labels.
    """
    if labels > 1:
        several = content.get("problem_type") == "multi_label_classification"
        return "Sigmoid" if several else "Softmax"
    newest = _object(root / "config_sentence_transformers.json")
    said = (
        (content.get("sentence_transformers") or {}).get("activation_fn")
        or content.get("sbert_ce_default_activation_function")
        or newest.get("activation_fn")
        or "Sigmoid"
    )
    if (name := class_name(said)) not in ACTIVATIONS:
        raise ValueError(
            f"{root / 'config.json'}: the activation {said!r:.60} is not supported; supported: "
            f"{', '.join(ACTIVATIONS)}"
        )
    return name


def _find(architecture: str, content: Mapping[str, Any]) -> tuple[ModelNames | None, str] | None:
    """Return the encoder, or the decoder whose architecture without a head this is.

    The trunk of a model of images and text has `Text` in its name: `Gemma3TextModel`. A folder with
    its own code may use the name of another architecture. Then the class of its configuration
    decides.
    """
    code = content.get("auto_map")
    own = class_name(code.get("AutoConfig")) if isinstance(code, dict) else ""
    for kind in _KINDS:
        name = architecture.removesuffix(kind)
        if name == architecture:
            continue
        if kind != _DECODER:
            found = [names for names in find_encoders() if names.architecture == name]
            found = [names for names in find_encoders() if names.config_of_others == own] or found
            if found:
                return found[0], ""
        decoders = {name + _DECODER, name.removesuffix("Text") + _DECODER}
        for decoder in find_models():
            if decoder.architecture in decoders:
                return None, decoder.architecture
    return None


def _inside(folder: Path, entry: Mapping[str, Any]) -> Path:
    path = folder / str(entry.get("path", ""))
    if not path.resolve().is_relative_to(folder.resolve()):
        raise ValueError(
            f"{folder / _MODULES} is broken: it names {path}, outside of the folder; download the "
            "model again"
        )
    return path
