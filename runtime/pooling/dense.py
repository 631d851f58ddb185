"""Projections of the vectors of texts (`Dense` of sentence-transformers)."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from ..files.folder import read_json

ACTIVATIONS = ("Identity", "Tanh", "Sigmoid", "ReLU", "GELU", "SiLU")
_VECTOR = "sentence_embedding"


class Dense(NamedTuple):
    """A projection of the pooled vector.

    The weights lie in `folder`, or in a .gguf file under the name with `number`.
    """

    folder: Path
    in_features: int
    out_features: int
    bias: bool
    activation: str
    number: int = 0


def read_dense(folder: Path) -> Dense:
    """Return the projection of a module's folder. Raises `ValueError` with a remedy."""
    config = read_json(folder / "config.json")
    activation = class_name(config.get("activation_function", "torch.nn.modules.activation.Tanh"))
    sizes = config["in_features"], config["out_features"]
    if (given := config.get("module_input_name", _VECTOR)) != _VECTOR:
        raise ValueError(
            f"{folder / 'config.json'}: module_input_name is {given!r:.60}, but only "
            f"projections of a text's vector ({_VECTOR}) are supported; choose another model"
        )
    if activation not in ACTIVATIONS or not all(type(n) is int and 0 < n < 2**20 for n in sizes):
        raise ValueError(
            f"{folder / 'config.json'}: sizes {sizes!r:.60} or the activation {activation!r:.60} "
            f"are not supported; activations: {', '.join(ACTIVATIONS)}"
        )
    return Dense(folder, *sizes, bool(config.get("bias", True)), activation)


def class_name(path: Any) -> str:
    """Return the name of a class without its modules."""
    return str(path).rpartition(".")[2]
