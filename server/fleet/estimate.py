"""What a model will need of the memory, before it was ever loaded."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from ...runtime.loader.resolve import find_model
from ..config import ServerConfig
from .config import MemberConfig

_PROCESS_BYTES = 448 * 2**20
"""Of an engine process without a model: torch, and what it brings."""
_COMPILER_BYTES = 512 * 2**20
"""Of the process that compiles pieces of a language model beside its first life."""
_SHARE = 0.2
"""Of all memory of a fleet, for the KV cache of a model whose flags do not say; of the memory that
is free a CPU takes as much for one model.
"""
_TOKEN_BYTES = 2**17
"""Of keys and values of a token, in a model of 8B parameters."""
_WEIGHTS = (".safetensors", ".gguf", ".bin", ".pt")
_MOST_FILES = 10_000


def estimate(member: MemberConfig, memory: int) -> int:
    """Bytes, in a fleet that may take `memory`: files of weights, the KV cache, and processes."""
    server, weights = member.server, _file_bytes(Path(find_model(member.server.engine.model_path)))
    if not isinstance(server, ServerConfig):
        return weights + _PROCESS_BYTES
    engine = server.engine
    compiles = not (
        engine.disable_cuda_graph
        or engine.disable_piecewise_cuda_graph
        or engine.piecewise_cuda_graph is False
    )
    return weights + _cache_bytes(server, memory) + _PROCESS_BYTES + _COMPILER_BYTES * compiles


def with_share(member: MemberConfig, memory: int, free: int) -> MemberConfig:
    """The same model with a KV cache that is a share of the fleet's `memory`, where its flags do
    not say how large it is. `free`: bytes that the machine has free, most of which the engine would
    take to be its own.
    """
    server = member.server
    if not isinstance(server, ServerConfig) or _says_cache_size(server):
        return member
    fraction = _SHARE * min(1.0, memory / max(1, free))
    engine = replace(server.engine, mem_fraction_static=max(1e-6, fraction))
    return replace(member, server=replace(server, engine=engine))


def _says_cache_size(server: ServerConfig) -> bool:
    engine = server.engine
    return engine.max_total_tokens is not None or engine.mem_fraction_static is not None


def _cache_bytes(server: ServerConfig, memory: int) -> int:
    tokens, share = server.engine.max_total_tokens, int(_SHARE * memory)
    return share if tokens is None else min(share, tokens * _TOKEN_BYTES)


def _file_bytes(path: Path) -> int:
    """Of the weights of a folder, those of its folders included, or of a file."""
    if path.is_file():
        return path.stat().st_size
    found = [
        os.path.join(folder, name)
        for folder, _, names in os.walk(path)
        for name in names
        if name.endswith(_WEIGHTS)
    ]
    return sum(os.path.getsize(each) for each in found[:_MOST_FILES] if os.path.exists(each))
