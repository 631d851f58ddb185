"""A fingerprint of a model that needs no reading of weights.

It covers the config and the names, shapes and formats of the tensors.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from ..config.model import read_config
from ..config.model_registry import ModelCode
from ..files.folder import Header, read_header, weight_files

_SHOWN = 12


def fingerprint(path: str, *, weights: bool) -> str:
    """Return the first characters of a SHA-256.

    `weights` False leaves the tensors out, for models with random weights. Raises `ValueError` if
    the model cannot be read.
    """
    digest = hashlib.sha256()
    if Path(path).suffix == ".gguf":
        from ..files.gguf_reader import open_gguf

        offset = open_gguf(Path(path)).data_offset
        with Path(path).open("rb") as file:
            digest.update(file.read(offset))
    else:
        config = read_config(Path(path), code=ModelCode("auto"))
        digest.update(json.dumps(config, sort_keys=True).encode())
        headers: dict[str, Header] = {}
        for part in weight_files(Path(path)) if weights else ():
            headers |= read_header(part, quantized=True)
        for name, header in sorted(headers.items()):
            digest.update(f"{name} {tuple(header)}".encode())
    return digest.hexdigest()[:_SHOWN]
