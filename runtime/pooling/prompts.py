"""Prompts, which texts begin with, by their names in folders of sentence-transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from ..core.pooling_messages import NO_ADAPTER
from ..files.folder import read_json

_FILE = "config_sentence_transformers.json"
_QUERIES = ("query", "retrieval.query")
_DOCUMENTS = ("document", "passage", "corpus", "retrieval.passage")


class Start(NamedTuple):
    """The beginning of texts, and the number of the adapter for them."""

    text: str
    adapter: int = NO_ADAPTER


class Prompts(NamedTuple):
    """The prompts of a model.

    Attributes:
        texts: Prompts by name.
        default: Name of the prompt that is used if a request names none.
        adapters: Names of prompts that have an adapter, in the order of the adapters.
    """

    texts: Mapping[str, str]
    default: str | None = None
    adapters: tuple[str, ...] = ()

    def start(self, name: str | None) -> Start:
        """Return the prompt of a name, or the default. Raises `KeyError` for an unknown name."""
        name = self.default if name is None else name
        if name is None:
            return Start("")
        found = name in self.adapters
        return Start(self.texts[name], self.adapters.index(name) if found else NO_ADAPTER)

    @property
    def of_query(self) -> Start:
        """The prompt of queries, like `encode_query` of sentence-transformers."""
        return self.start(next((name for name in _QUERIES if name in self.texts), None))

    @property
    def of_document(self) -> Start:
        """The prompt of documents, like `encode_document` of sentence-transformers."""
        return self.start(next((name for name in _DOCUMENTS if name in self.texts), None))


NO_PROMPTS = Prompts(MappingProxyType({}))


def read_prompts(
    folder: Path, poolings: Sequence[Path], model_content: Mapping[str, Any]
) -> Prompts:
    """Return the prompts of a folder, whose pooling modules lie in `poolings`.

    `model_content` is config.json, which may name adapters of tasks. Raises `ValueError` with a
    remedy.
    """
    file = folder / _FILE
    content = read_json(file) if file.is_file() else {}
    texts, default = content.get("prompts") or {}, content.get("default_prompt_name")
    adapters = tuple(map(str, model_content.get("lora_adaptations") or ()))
    if isinstance(texts, dict):
        texts = dict.fromkeys(adapters, "") | (model_content.get("task_instructions") or {}) | texts
    if not isinstance(texts, dict) or not all(isinstance(text, str) for text in texts.values()):
        raise ValueError(f"{file}: prompts must be texts by name; download the model again")
    if default is not None and default not in texts:
        raise ValueError(
            f"{file}: default_prompt_name is {default!r:.60}, which is none of the prompts; "
            "download the model again"
        )
    for pooling in poolings:
        if read_json(pooling / "config.json").get("include_prompt", True) is False and any(
            texts.values()
        ):
            raise ValueError(
                f"{pooling / 'config.json'}: include_prompt is false, but a prompt's tokens always "
                "count here; choose another model"
            )
    return Prompts(texts, default, adapters)
