"""Prompts: what texts begin with, by the names that sentence-transformers' folders give them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from ..loader.files import read_json

_FILE = "config_sentence_transformers.json"
_DOCUMENTS = ("document", "passage", "corpus")


class Prompts(NamedTuple):
    """`texts` by name. `default`: the name of the prompt of texts for which nobody names one."""

    texts: Mapping[str, str]
    default: str | None = None

    def text(self, name: str | None) -> str:
        """The prompt of a name, or the default one. Raises `KeyError` for an unknown name."""
        name = self.default if name is None else name
        return "" if name is None else self.texts[name]

    @property
    def of_query(self) -> str:
        """The prompt of texts that look for others, as sentence-transformers' `encode_query`."""
        return self.text("query" if "query" in self.texts else None)

    @property
    def of_document(self) -> str:
        """The prompt of texts that are looked for, as `encode_document`."""
        return self.text(next((name for name in _DOCUMENTS if name in self.texts), None))


NO_PROMPTS = Prompts(MappingProxyType({}))


def read_prompts(folder: Path, poolings: Sequence[Path]) -> Prompts:
    """The prompts of a folder, whose pooling modules lie in `poolings`. Raises `ValueError` with a
    remedy.
    """
    file = folder / _FILE
    content = read_json(file) if file.is_file() else {}
    texts, default = content.get("prompts") or {}, content.get("default_prompt_name")
    if not isinstance(texts, dict) or not all(isinstance(text, str) for text in texts.values()):
        raise ValueError(f"{file}: prompts must be texts by name; fetch the model again")
    if default is not None and default not in texts:
        raise ValueError(
            f"{file}: default_prompt_name is {default!r:.60}, which is none of the prompts; fetch "
            "the model again"
        )
    for pooling in poolings:
        if read_json(pooling / "config.json").get("include_prompt", True) is False and any(
            texts.values()
        ):
            raise ValueError(
                f"{pooling / 'config.json'}: include_prompt is false, but a prompt's tokens always "
                "count here; choose another model"
            )
    return Prompts(texts, default)
