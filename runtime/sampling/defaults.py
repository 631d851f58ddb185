"""The sampling parameters that apply where a request names none.

>>> read_sampling_defaults("model", "smollm2-135m", resolve_model_path("smollm2-135m")).values
{'temperature': 0.2, 'top_p': 0.9}

Sources: `GenerationConfig` of transformers for `generation_config.json`; `general.sampling.*` in
llama.cpp's `llama-arch.cpp` for GGUF files.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..core.sampling_params import SamplingParams
from ..files.folder import read_json
from ..files.resolve import ALIASES

logger = logging.getLogger(__name__)

MODEL, OPENAI = "model", "openai"
_FILE = "generation_config.json"
_GGUF_KEYS = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
_NAMES = (*_GGUF_KEYS.values(), "max_new_tokens")


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Default values by the names of `SamplingParams`, and their source."""

    values: Mapping[str, Any] = field(default_factory=dict)
    source: str = "OpenAI's defaults"

    def __str__(self) -> str:
        named = [f"{name} {value:g}" for name, value in self.values.items()]
        return f"{', '.join(named) or 'temperature 1, top_p 1'} ({self.source})"


def read_sampling_defaults(choice: str, model: str, path: str) -> SamplingDefaults:
    """Return the defaults that `--sampling-defaults` chooses.

    `choice` is "model", "openai", or a folder or file with a generation_config.json; `model` is the
    model as it was asked for, `path` its folder or .gguf file. Values that are out of range are
    left out, with a line in the log. Raises `ValueError` for a file that cannot be read.
    """
    if choice == OPENAI:
        return SamplingDefaults()
    if choice != MODEL:
        file = Path(choice).expanduser()
        file = file / _FILE if file.is_dir() else file
        if not file.is_file():
            raise ValueError(
                f"--sampling-defaults {choice}: there is no {_FILE}; name a folder or file that "
                "has one, or give model or openai"
            )
        return _checked(read_json(file), str(file))
    if model in ALIASES and (known := ALIASES[model].sampling):
        return SamplingDefaults(known, "its authors' advice")
    if path.endswith(".gguf"):
        # Imported here, because the gguf library imports numpy.
        from ..files.gguf_reader import metadata, open_gguf

        reader = open_gguf(Path(path))
        found = {
            own: metadata(reader, f"general.sampling.{key}") for key, own in _GGUF_KEYS.items()
        }
        return _checked(found, "the .gguf file's general.sampling")
    file = Path(path) / _FILE
    return _checked(read_json(file), _FILE) if file.is_file() else SamplingDefaults()


def _checked(content: Any, source: str) -> SamplingDefaults:
    values: dict[str, Any] = {}
    for name in _NAMES:
        value = content.get(name) if isinstance(content, dict) else None
        if value is None:
            continue
        if name == "top_k" and value == 0:
            value = -1
        try:
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ValueError(f"{name} must be a number, got {value!r:.60}")
            SamplingParams(**{name: value})  # type: ignore[arg-type]  # checks the range
            values[name] = value
        except ValueError as error:
            logger.warning("%s: %s; this value is not used", source, error)
    return SamplingDefaults(values, source) if values else SamplingDefaults()
