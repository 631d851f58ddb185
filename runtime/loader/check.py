"""Whether a model can be served, found out before torch is imported and before a weight is read."""

from __future__ import annotations

from pathlib import Path

from ..config import check_context_length
from ..model_config import read_config
from ..models.registry import find_model
from .files import check_pointer, read_header, weight_files
from .gguf_header import architecture_and_context


def check_model(path: str, *, context_length: int | None, weights: bool) -> None:
    """Raises `ValueError` with the reason where a folder or .gguf file holds no model that we
    serve.

    `context_length`: what was asked for; `weights` False leaves out the files of weights, which a
    model with random ones does not need. What takes transformers or the whole of a .gguf file to
    find out, the engine finds out later.
    """
    if Path(path).suffix == ".gguf":
        longest: object = _gguf_context(Path(path))
    else:
        longest = read_config(Path(path)).get("max_position_embeddings")
        for file in weight_files(Path(path)) if weights else ():
            read_header(file)
    if isinstance(longest, int):
        check_context_length(context_length, longest)


def _gguf_context(path: Path) -> int | None:
    """The longest context of a .gguf file's model, None where its reader has to find out."""
    check_pointer(path)
    found = architecture_and_context(path)
    if found is None:
        return None
    try:
        find_model(gguf=found[0])
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return found[1]
