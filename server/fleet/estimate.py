"""What a model will need of the memory, before it was ever loaded."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ...runtime.files.folder import read_header
from ...runtime.files.resolve import find_model
from ...runtime.process.memory import free_memory
from ..config.server import ServerConfig
from .config import FleetLimits, MemberConfig

_GIB = 2**30
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
    """Bytes, in a fleet that may take `memory`: weights, the KV cache, and processes."""
    server, weights = member.server, weight_bytes(member)
    if not isinstance(server, ServerConfig):
        return weights + _PROCESS_BYTES
    engine = server.engine
    compiles = not (
        engine.disable_cuda_graph
        or engine.disable_piecewise_cuda_graph
        or engine.piecewise_cuda_graph is False
    )
    processes = server.dp_size * (_PROCESS_BYTES * engine.tp_size + _COMPILER_BYTES * compiles)
    return weights + _cache_bytes(server, memory) + processes


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


def memory_limit(limits: FleetLimits) -> int:
    """Bytes that all models may take together: what was asked for, or what is free now."""
    asked = limits.fleet_memory
    return free_memory() if asked is None else int(asked * _GIB)


def weight_bytes(member: MemberConfig) -> int:
    """Of a model's weights, in all of its engines: a language model's numbers of 32 bits become 16
    bits where nothing else is asked for.
    """
    copies = member.server.dp_size if isinstance(member.server, ServerConfig) else 1
    path = Path(find_model(member.server.engine.model_path))
    if path.is_file():
        return copies * path.stat().st_size
    found = [
        Path(folder) / name
        for folder, _, names in os.walk(path)
        for name in names
        if name.endswith(_WEIGHTS)
    ][:_MOST_FILES]
    held = sum(each.stat().st_size for each in found if each.exists())
    if isinstance(member.server, ServerConfig) and member.server.engine.dtype != "float32":
        held -= sum(map(_cut_off, (each for each in found if each.parent == path)))
    return copies * held


def _cut_off(file: Path) -> int:
    """Half of the bytes that its numbers of 32 bits take."""
    try:
        headers = read_header(file, quantized=True) if file.suffix == ".safetensors" else {}
    except (ValueError, OSError):
        return 0  # whoever loads it says what is wrong
    return sum(2 * math.prod(each.shape) for each in headers.values() if each.dtype == "F32")


def check_room(members: Sequence[MemberConfig], memory: int) -> None:
    """Raises `ValueError` for a model whose weights alone have no room beside what is pinned."""
    sizes = {each.name: weight_bytes(each) for each in members}
    pinned = [each.name for each in members if each.pinned]
    for name, size in sizes.items():
        others = [each for each in pinned if each != name]
        if size + sum(sizes[each] for each in others) > memory:
            held = ", ".join(f"{each} {sizes[each] / _GIB:.2f} GiB" for each in others)
            raise ValueError(
                f"the weights of {name} take {size / _GIB:.2f} GiB and have no room: all models "
                f"may take {memory / _GIB:.2f} GiB together (--fleet-memory)"
                + (f", and pinned are {held}" if held else "")
            )
