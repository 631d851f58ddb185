"""Reads what a .gguf file says of a pooling model.

Source of keys and names of tensors: llama.cpp's conversion/bert.py and the constants of the gguf
library.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..config.model_registry import encoder_class, find_encoders, find_model
from .dense import Dense

_HEAD = 2**16  # Bytes at the beginning of a file that hold its architecture and its pooling.
_MODES = {1: ("mean",), 2: ("cls",), 3: ("lasttoken",)}
_RANK = 4
_SIZES = {
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "feed_forward_length": "intermediate_size",
    "context_length": "max_position_embeddings",
}
_DTYPES = {"F32": "float32", "BF16": "bfloat16"}


def gguf_makes_vectors(path: Path) -> bool:
    """Whether a .gguf file is an encoder or states how states become a vector.

    The file is not read to its end. False for other files.
    """
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD)
    except OSError:
        return False
    _, found, rest = head.partition(b"general.architecture" + struct.pack("<I", 8))
    size = int.from_bytes(rest[:8], "little")
    if not found or size > 100:
        return False
    name = rest[8 : 8 + size]
    if any(each.gguf is not None and each.gguf.encode() == name for each in find_encoders()):
        return True
    _, _, value = head.partition(name + b".pooling_type" + struct.pack("<I", 4))
    return int.from_bytes(value[:4], "little") > 0


def read_gguf(path: Path) -> dict[str, Any]:
    """Return the fields of `PoolingFolder`. Raises `ValueError` with a remedy."""
    from ..files.gguf_reader import metadata, open_gguf

    reader = open_gguf(path)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    name = metadata(reader, "general.architecture")
    pooling = metadata(reader, f"{name}.pooling_type", 0)
    if "token_embd.weight" not in tensors:
        raise ValueError(
            f"{path} has no tensor token_embd.weight; it holds no whole model: download it again"
        )
    kind = tensors["token_embd.weight"].tensor_type.name
    encoder = next((each for each in find_encoders() if each.gguf == name), None)
    if encoder is None:
        return _decoder(path, name, pooling, tensors, _DTYPES.get(kind, "bfloat16"))
    rows = {each.name: int(each.shape[1]) for each in reader.tensors if len(each.shape) > 1}
    content: dict[str, Any] = {
        "vocab_size": rows["token_embd.weight"],
        "dtype": _DTYPES.get(kind, "float16"),
        "type_vocab_size": rows.get("token_types.weight", int("token_types.weight" in tensors)),
    }
    keys = {**_SIZES, **encoder_class(encoder).gguf_keys}
    for key, member in keys.items():
        if (value := metadata(reader, f"{name}.{key}")) is not None:
            content[member] = value
    if missing := [key for key, member in _SIZES.items() if member not in content]:
        raise ValueError(f"{path} has no {name}.{missing[0]}; convert the model again")
    if content["num_hidden_layers"] > len(tensors):
        raise ValueError(f"{path} has too few tensors for its layers; download the file again")
    if "cls.weight" in tensors or "cls.output.weight" in tensors or pooling == _RANK:
        return _classifier(path, name, content, tensors)
    content |= {"architectures": [f"{encoder.architecture}Model"], "model_type": encoder.model_type}
    return {
        "path": path,
        "content": content,
        "encoder": encoder,
        "modes": _MODES.get(pooling, ("mean",)),
        "normalizes": True,
    }


def _classifier(
    path: Path, name: str, content: dict[str, Any], tensors: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the fields of a classifier.

    Files hold all of RoBERTa's head. The converter leaves out a part of BERT's heads.
    """
    if name != "bert" or not {"cls.weight", "cls.output.weight"} <= set(tensors):
        raise ValueError(
            f"{path}: a {name} classifier of this kind is not supported as a .gguf file; serve "
            "the model's Hugging Face folder"
        )
    encoder = next(each for each in find_encoders() if each.architecture == "Roberta")
    shape = tensors["cls.output.weight"].shape
    if (labels := int(shape[1]) if len(shape) > 1 else 1) != 1:
        raise ValueError(
            f"{path}: it has {labels} labels, but reranking and scoring take a classifier with "
            "one; choose another model"
        )
    content |= {
        "architectures": ["RobertaForSequenceClassification"],
        "model_type": encoder.model_type,
        "num_labels": 1,
        # The file lacks the rows before the first position.
        "pad_token_id": -1,
    }
    return {
        "path": path,
        "content": content,
        "encoder": encoder,
        "labels": ("LABEL_0",),
        "activation": "Sigmoid",
    }


def _decoder(
    path: Path, name: str, pooling: int, tensors: Mapping[str, Any], dtype: str
) -> dict[str, Any]:
    try:
        decoder = find_model(gguf=name)
    except ValueError:
        encoders = ", ".join(each.gguf for each in find_encoders() if each.gguf is not None)
        raise ValueError(
            f"{path}: the architecture {name!r:.60} is not supported for vectors; supported: "
            f"{encoders}, and the decoders that write text"
        ) from None
    if pooling == _RANK:
        raise ValueError(
            f"{path}: rerankers of decoders are not supported as .gguf files; serve the model's "
            "Hugging Face folder"
        )
    denses = [
        Dense(path, int(size), int(to), bias=False, activation="Identity", number=number)
        for number in (2, 3)
        if f"dense_{number}.weight" in tensors
        for size, to in (tensors[f"dense_{number}.weight"].shape,)
    ]
    return {
        "path": path,
        "content": {
            "architectures": [decoder.architecture],
            "dtype": dtype,
            "use_bidirectional_attention": name == decoder.gguf_embedder,
        },
        "encoder": None,
        "decoder": decoder.architecture,
        "modes": _MODES.get(pooling, ("lasttoken",)),
        "denses": denses,
        "normalizes": True,
    }
