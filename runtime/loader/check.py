"""Checks whether a model can be served, before torch is imported and before weights are read.

The first metadata of GGUF files (ggml-org/ggml, docs/gguf.md) are read without the gguf library,
because importing it and reading the whole file take tenths of a second.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from ..config.engine import EngineConfig
from ..config.model import read_config
from ..config.model_registry import FALLBACK, ModelCode, find_model
from ..config.options import check_context_length
from ..config.quantization_registry import asked_of, quantization_of
from ..files.folder import check_pointer, read_header, weight_files

_SCALARS = dict(zip((*range(8), 10, 11, 12), "BbHhIif?Qqd", strict=True))
_STRING, _ARRAY = 8, 9
_VERSIONS = (2, 3)
_LONGEST = 2**20  # Bytes of a key or a text. No valid file has longer ones.


def check_model(
    path: str,
    *,
    context_length: int | None,
    weights: bool,
    ranks: int = 1,
    code: ModelCode | None = None,
    quantization: str = "auto",
) -> None:
    """Raise `ValueError` with the reason if a folder or .gguf file holds no model that can be
    served.

    Faults that only transformers or the whole .gguf file show are found later, by the engine.

    Args:
        context_length, ranks: The values of --context-length and --tp-size.
        weights: False skips the weight files, which a model with random weights does not need.
        code: Whose code computes the model.
        quantization: The value of --quantization.
    """
    if Path(path).suffix == ".gguf":
        if code is not None and code.impl == "transformers":
            raise ValueError(
                f"{path}: --model-impl transformers takes folders, not .gguf files; leave it out"
            )
        check_pointer(Path(path))
        # Only the full reader finds these numbers in a file of an unusual form.
        longest: Any = None
        heads: Any = None
        if (found := first_numbers(Path(path))) is not None:
            name, longest, heads = found
            try:
                find_model(gguf=name)
            except ValueError as error:
                raise ValueError(f"{path}: {error}") from None
        asked_of(path, quantization, None)
    else:
        config = read_config(Path(path), code=code)
        longest, heads = config.get("max_position_embeddings"), config.get("num_attention_heads")
        if ranks > 1 and (code or ModelCode()).architecture(config["architectures"][0]) == FALLBACK:
            raise ValueError(
                f"{path}: models that the code of transformers computes run on one rank; leave "
                "--tp-size out"
            )
        quantized = quantization_of(config) is not None
        asked_of(path, quantization, config)
        for file in weight_files(Path(path)) if weights else ():
            read_header(file, quantized=quantized)
    if isinstance(longest, int):
        check_context_length(context_length, longest)
    # Other limits of the number of ranks are found when each rank builds the model.
    # Files of models without attention state 0 heads.
    if isinstance(heads, int) and 0 < heads < ranks:
        raise ValueError(f"--tp-size {ranks} is more than the {heads} heads of {path}")


def check_engine(path: str, config: EngineConfig) -> None:
    """Check the model at `path` by `check_model`, with the settings of an engine."""
    check_model(
        path,
        context_length=config.context_length,
        weights=config.load_format != "dummy",
        ranks=config.tp_size,
        code=config.model_code,
        quantization=config.quantization,
    )


def first_numbers(path: Path) -> tuple[str, int, object] | None:
    """Return the architecture, the longest context in tokens and the number of heads.

    Return None if the file does not state them in the usual place and form.
    """
    values: dict[str, Any] = {}
    try:
        with path.open("rb") as file:
            values.update(_values(file))
    except (struct.error, KeyError, UnicodeDecodeError):
        pass
    name = values.get("general.architecture")
    context = values.get(f"{name}.context_length")
    if not isinstance(context, int):
        return None
    return str(name), context, values.get(f"{name}.attention.head_count")


def _values(file: BinaryIO) -> Iterator[tuple[str, Any]]:
    """Yield keys and values up to the first list. The tokens follow behind it."""
    magic, version, _, count = struct.unpack("<4sIQQ", file.read(24))
    if magic != b"GGUF" or version not in _VERSIONS:
        return
    for _ in range(count):
        key, kind = _text(file), _number(file, "<I")
        if kind == _ARRAY:
            return
        yield key, _text(file) if kind == _STRING else _number(file, "<" + _SCALARS[kind])


def _text(file: BinaryIO) -> str:
    return file.read(min(_number(file, "<Q"), _LONGEST)).decode()


def _number(file: BinaryIO, form: str) -> Any:
    (value,) = struct.unpack(form, file.read(struct.calcsize(form)))
    return value
