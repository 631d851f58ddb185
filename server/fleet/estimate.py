"""Estimates the memory of a model before its first load."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ...runtime.files.folder import read_header
from ...runtime.files.resolve import find_model
from ...runtime.process.memory import free_memory
from ..config.fleet import FleetLimits, MemberConfig
from ..config.server import ServerConfig

_GIB = 2**30
_PROCESS_BYTES = 448 * 2**20  # An engine process without a model: torch and its imports.
_COMPILER_BYTES = 512 * 2**20  # The process that compiles pieces during a model's first run.
# Share of the fleet's memory for the KV cache of a model without flags for its size. A server of
# one model on a CPU takes the same share of the free memory.
_CACHE_SHARE = 0.2
_TOKEN_BYTES = 2**17  # Keys and values of a token in a model of 8B parameters.
_WEIGHTS = (".safetensors", ".gguf", ".bin", ".pt")
_MOST_FILES = 10_000


def estimate(member: MemberConfig, memory: int) -> int:
    """Return the bytes of weights, KV cache and processes, in a fleet of `memory` bytes."""
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
    cache = int(_CACHE_SHARE * memory)
    if engine.max_total_tokens is not None:
        cache = min(cache, engine.max_total_tokens * _TOKEN_BYTES)
    return weights + cache + processes


def with_share(member: MemberConfig, memory: int, free: int) -> MemberConfig:
    """Return the member with a KV cache that is a share of the fleet's `memory`.

    If the flags set the size of the cache, the member is unchanged. `free` is the free memory in
    bytes, because `mem_fraction_static` is a fraction of that.
    """
    server = member.server
    if (
        not isinstance(server, ServerConfig)
        or server.engine.max_total_tokens is not None
        or server.engine.mem_fraction_static is not None
    ):
        return member
    fraction = _CACHE_SHARE * min(1.0, memory / max(1, free))
    engine = replace(server.engine, mem_fraction_static=max(1e-6, fraction))
    return replace(member, server=replace(server, engine=engine))


def memory_limit(limits: FleetLimits) -> int:
    """Return the bytes for all models together: `--fleet-memory`, or the free memory."""
    return free_memory() if limits.fleet_memory is None else int(limits.fleet_memory * _GIB)


def weight_bytes(member: MemberConfig) -> int:
    """Return the bytes of a model's weights, in all of its engines.

    Unless `dtype` is float32, a language model's float32 weights are loaded as 16 bits.
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
    total = sum(each.stat().st_size for each in found if each.exists())
    if isinstance(member.server, ServerConfig) and member.server.engine.dtype != "float32":
        for file in found:
            if file.parent == path and file.suffix == ".safetensors":
                with contextlib.suppress(ValueError, OSError):  # The loader reports the error.
                    headers = read_header(file, quantized=True).values()
                    total -= sum(
                        2 * math.prod(each.shape) for each in headers if each.dtype == "F32"
                    )
    return copies * total


def check_room(members: Sequence[MemberConfig], memory: int) -> None:
    """Raise `ValueError` if the weights of a model do not fit beside the pinned models."""
    sizes = {each.name: weight_bytes(each) for each in members}
    pinned = [each.name for each in members if each.pinned]
    for name, size in sizes.items():
        others = [each for each in pinned if each != name]
        if size + sum(sizes[each] for each in others) > memory:
            held = ", ".join(f"{each} {sizes[each] / _GIB:.2f} GiB" for each in others)
            raise ValueError(
                f"the weights of {name} take {size / _GIB:.2f} GiB and do not fit: all models may "
                f"take {memory / _GIB:.2f} GiB together"
                + (f", of which pinned models take {held}" if held else "")
                + "; raise --fleet-memory"
            )
