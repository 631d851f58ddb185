"""Finds formats of quantised checkpoints. Each is a file of `runtime/quantization/` that states its
name in config.json.

    QUANT_METHOD = "fp8"    # `quantization_config.quant_method`

    def read_scheme(config: Mapping[str, Any]) -> Scheme:
        # Return the kind of a linear layer, by its name. Raises `ValueError`.

    def make_method(kind: str) -> LinearMethod:
        # `kind` begins with the name of the file: "w8a8 float8_e4m3fn channel token".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

# Maps the checkpoint's name of a linear layer to the kind of its weight: `PLAIN` or that of a
# method.
Scheme = Callable[[str], str]
PLAIN = "bfloat16"
# Values of `--quantization` that quantise weights of 16 bits on load.
ON_LOAD = ("fp8", "int8", "q8_0", "q4_0")
_FORMATS = "piecework.runtime.quantization"  # The package whose files are formats.
_NAME = re.compile(r'^QUANT_METHOD = "([\w-]+)"', re.MULTILINE)
_LEGACY = "compression_config"


def find_formats() -> dict[str, str]:
    """Return modules by `quant_method`. The files are read, not imported: see `model_registry`."""
    return dict(_formats_in(tuple(import_module(_FORMATS).__path__)))


@cache
def _formats_in(folders: tuple[str, ...]) -> dict[str, str]:
    found = {}
    for path in sorted(path for folder in folders for path in Path(folder).glob("*.py")):
        if name := _NAME.search(path.read_text(encoding="utf-8")):
            found[name[1]] = path.stem
    return found


def quantization_of(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return `quantization_config` of a config.json, or None. Raises `ValueError` for an unknown
    format.
    """
    quantization = config.get("quantization_config") or config.get(_LEGACY)
    if not quantization:
        return None
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    formats = find_formats()
    if not isinstance(method, str) or method not in formats:
        known = ", ".join(sorted(formats))
        raise ValueError(
            f"weights quantised by {str(method)[:80] if method else 'some method'} are not "
            f"supported; supported: {known}; take such a checkpoint, the unquantised one or a "
            ".gguf file"
        )
    return dict(quantization)


def asked_of(path: str, asked: str, config: Mapping[str, Any] | None) -> str:
    """Return what `--quantization` requests for a model: `auto`, `none` or one of `ON_LOAD`.

    `config` is config.json, or None for a .gguf file. The name of a format of checkpoints only
    asserts the format. Raises `ValueError` if the model has another one.
    """
    if asked in ("auto", "none"):
        return asked
    found = {"quant_method": "gguf"} if config is None else quantization_of(config)
    held = None if found is None else found["quant_method"]
    if asked == held:
        return "auto"
    # A .gguf file may also hold weights of 16 bits. The loader checks that.
    if asked in ON_LOAD and (held is None or config is None):
        return asked
    if asked in ON_LOAD:
        raise ValueError(
            f"--quantization {asked} needs weights of 16 bits, but those of {path} are quantised "
            f"by {held}; take --quantization auto, or another checkpoint"
        )
    raise ValueError(
        f"--quantization {asked}, but the weights of {path} are "
        f"{f'quantised by {held}' if held else 'not quantised'}; take --quantization auto, or a "
        f"checkpoint that is quantised by {asked}"
    )


def read_scheme(quantization: Mapping[str, Any]) -> Scheme:
    """Return the scheme of a `quantization_config`. Raises `ValueError` if it is invalid or not
    supported.
    """
    name = find_formats()[quantization["quant_method"]]
    scheme: Scheme = import_module(f"{_FORMATS}.{name}").read_scheme(quantization)
    return scheme
