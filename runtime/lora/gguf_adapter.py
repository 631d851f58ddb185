"""Reads adapters as llama.cpp's convert_lora_to_gguf.py writes them.

Names: `llama_adapter_lora_init_impl` in llama.cpp's src/llama-adapter.cpp.
"""

from __future__ import annotations

from pathlib import Path

from ..files.gguf_reader import metadata, open_gguf
from ..layers.linear import StoredTensor
from ..loader.gguf import encoder_tensors
from .adapter import AdapterFault
from .stored import StoredAdapter, StoredUpdate

_HALVES = ".weight.lora_a", ".weight.lora_b"


def read_gguf_adapter(path: Path) -> StoredAdapter:
    """Return the adapter of a file. Raise `AdapterFault`."""
    try:
        reader = open_gguf(path)
        kinds = [metadata(reader, key) for key in ("general.type", "adapter.type")]
        alpha = metadata(reader, "adapter.lora.alpha")
        tensors = {tensor.name: tensor for tensor in encoder_tensors(reader, {})}
    except (ValueError, OSError) as error:
        raise AdapterFault(str(error)) from None
    if kinds != ["adapter", "lora"]:
        raise AdapterFault(
            f"{path} is no LoRA adapter: its general.type is {kinds[0]!r:.50} and its adapter.type "
            f"{kinds[1]!r:.50}; give the output of convert_lora_to_gguf.py"
        )
    if not isinstance(alpha, int | float):
        raise AdapterFault(f"{path} lacks adapter.lora.alpha; convert the adapter again")
    names = {name.removesuffix(half) for name in tensors for half in _HALVES if half in name}
    if len(tensors) != 2 * len(names) or not names:
        raise AdapterFault(
            f"{path} holds tensors that are no pairs of lora_a and lora_b; convert it again"
        )
    updates = [_update(path, name, tensors, alpha) for name in sorted(names)]
    return StoredAdapter(path, updates, in_gguf=True)


def _update(path: Path, name: str, tensors: dict[str, StoredTensor], alpha: float) -> StoredUpdate:
    both = [tensors.get(f"{name}{half}") for half in _HALVES]
    a, b = both
    if a is None or b is None:
        raise AdapterFault(f"{path} lacks a half of {name:.200}; convert it again")
    if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != b.shape[1]:
        raise AdapterFault(
            f"{path}: the matrices of {name:.200} have shapes {list(a.shape)} and {list(b.shape)}"
        )
    # llama.cpp takes an alpha of 0 as none.
    return StoredUpdate(name, a, b, alpha / a.shape[0] if alpha else 1.0)
