"""Which formats of quantised checkpoints there are: each is a file of this package that says its
name in config.json.

    QUANT_METHOD = "fp8"    # `quantization_config.quant_method`

    def read_scheme(config: Mapping[str, Any]) -> Scheme:
        # What `quantization_config` says of a linear layer, by its name. Raises `ValueError`.

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

from . import __path__ as _folders

Scheme = Callable[[str], str]
"""A linear layer's name in the checkpoint to the kind of its weight: `PLAIN` or a method's."""
PLAIN = "bfloat16"
_NAME = re.compile(r'^QUANT_METHOD = "([\w-]+)"', re.MULTILINE)
_LEGACY = "compression_config"


def find_formats() -> dict[str, str]:
    """Modules by `quant_method`. The files are read and not imported: see `models.registry`."""
    return dict(_formats_in(tuple(_folders)))


@cache
def _formats_in(folders: tuple[str, ...]) -> dict[str, str]:
    found = {}
    for path in sorted(path for folder in folders for path in Path(folder).glob("*.py")):
        if name := _NAME.search(path.read_text(encoding="utf-8")):
            found[name[1]] = path.stem
    return found


def quantization_of(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The `quantization_config` of a config.json; None where the weights are numbers. Raises
    `ValueError` for a format that is not known.
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


def read_scheme(quantization: Mapping[str, Any]) -> Scheme:
    """What a `quantization_config` says. Raises `ValueError` where it makes no sense or asks for
    what is not supported.
    """
    name = find_formats()[quantization["quant_method"]]
    scheme: Scheme = import_module(f"{__package__}.{name}").read_scheme(quantization)
    return scheme
