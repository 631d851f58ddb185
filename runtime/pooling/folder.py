"""What a folder says of a model that makes vectors or scores, without a look at its weights.

Formats: `modules.json` and the folders that it names are sentence-transformers', 2.0 to 6.2.
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

MODES = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
"""How the states of a text's tokens become one vector; of several, their vectors follow one
another in this order.
"""
_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""How older files say it."""
CLASSIFIER = "ForSequenceClassification"
_DECODER = "ForCausalLM"
_KINDS = ("Model", CLASSIFIER, "ForMaskedLM", _DECODER)
_MODULES = "modules.json"
_MOST_LABELS = 10_000
_TRANSFORMER_FILES = ("sentence_bert_config.json", "sentence_roberta_config.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingFolder:
    """`path` holds config.json, whose members are `content`, and the weights; or it is a .gguf
    file, whose metadata are brought to these members.

    `encoder`: which of our encoders it is; None: a decoder, `decoder` its architecture. `modes`,
    `denses`, `normalizes`: of an embedder, what follows the transformer. `activation`: of a
    classifier, what its number goes through. `max_length`: the longest text that it was made for,
    where it says so. `lower_case`: texts are to be made lower case first. `tells_pairs`: the model
    is told which tokens are a pair's second text, where it has a table for that. `prompts`: what
    texts may begin with. `labels`: what a classifier's numbers are of.
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
    """Whether a folder is made for vectors or scores: it has `modules.json`, or an architecture
    that writes no text. False where that cannot be told.
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
    """What a folder holds. Raises `ValueError` with a remedy where that is no such model, or one
    that needs what we do not have.
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
            raise ValueError(f"{modules} is broken ({error}); fetch the model again") from None
        if not named or named[0][0] != "Transformer":
            raise ValueError(f"{modules} begins with no Transformer; such models are not supported")
        root = named[0][1]
    try:
        return _read(folder, root, named[1:], sentence=bool(named))
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{root}: its files are broken ({error}); fetch the model again") from None


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
            f"{said!r:.60}; fetch the model again"
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
        # What sentence-transformers does with a bare encoder, and vLLM with a bare decoder.
        chosen = {"modes": ("mean",)} if encoder else {"modes": ("lasttoken",), "normalizes": True}
        return PoolingFolder(**common, **chosen)
    poolings = [path for kind, path in modules if kind == "Pooling"]
    prompts = read_prompts(folder, poolings, content)
    return PoolingFolder(**common, **_modules(modules), prompts=prompts)


def _modules(modules: list[tuple[str, Path]]) -> dict[str, Any]:
    """What follows the transformer."""
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
    """What a file holds; nothing where there is none."""
    content: Mapping[str, Any] = read_json(file) if file.is_file() else {}
    return content


def _labels(file: Path, content: Mapping[str, Any]) -> tuple[str, ...]:
    """Raises `ValueError`."""
    if (count := label_count(content)) > _MOST_LABELS:
        raise ValueError(f"{file}: it has {count} labels, more than {_MOST_LABELS}; choose another")
    names = content.get("id2label") or {}
    return tuple(str(names.get(str(number), f"LABEL_{number}")) for number in range(count))


def _classifier_activation(root: Path, content: Mapping[str, Any], labels: int) -> str:
    """Of one number, as sentence-transformers' CrossEncoder finds it, by the version that wrote the
    folder. Of several, as transformers' pipeline: shares of one another, unless a text may have
    several labels.
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
    """An encoder of ours, or the decoder that an architecture is the trunk of. The trunk of a model
    that also takes images has `Text` in its name: `Gemma3TextModel`. A folder with code of its own
    may have the name of another's architecture; its configuration's class tells which it is.
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
            f"{folder / _MODULES} is broken: it names {path}, outside of the folder; fetch the "
            "model again"
        )
    return path
