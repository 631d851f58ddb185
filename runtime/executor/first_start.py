"""Whether an engine serves before the kernels of its device are compiled.

The server starts an engine process with `later`. If kernels are missing, that process computes with
plain torch, and the server starts another one with `required`. When that process is ready, it takes
over all requests. If the user sets the variable to `wait`, the first process compiles them.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

from ...kernels.platform.platform import Platform
from ..config.engine import EngineConfig
from ..distributed.ranks import Ranks
from ..files.folder import weight_files
from ..process.parent import KERNELS

# Larger weights take longer to load twice than the kernels take to compile.
_MOST_BYTES = 2**30
_PROCESS_BYTES = 2**30  # Two processes without their weights.
_UNPACKED = 4  # Bytes that plain torch needs for a byte of a GGUF file, at most.


def starts_without_kernels(
    config: EngineConfig, path: str, platform: Platform, ranks: Ranks
) -> bool:
    """Return whether this process computes without kernels that are not compiled yet. If not,
    compile them.

    A larger model waits for the kernels. So does an engine whose results must not depend on the
    time of the start, which would publish the events of two prefix caches, or whose machine has no
    memory for two processes. Raise `ValueError` if this process replaces one without kernels, but
    has none either.
    """
    file, role = Path(path), os.environ.get(KERNELS)
    if (
        role == "later"
        and config.startup == "fast"
        and config.attention_backend == "auto"
        and not config.batch_invariant
        and config.kv_events_config is None
        and ranks.size == 1
        and (size := _bytes_of(file, config)) <= _MOST_BYTES
        and 2 * size + _PROCESS_BYTES <= platform.memory().free
        and platform.leave_out_kernels()
    ):
        return True
    is_successor = role == "required"
    names = partial(_called, file, config, ranks)
    has_kernels = platform.prepare_kernels(names, at_low_priority=is_successor)
    if is_successor and not has_kernels:
        raise ValueError("the kernels cannot be compiled; the warning above says why")
    return False


def _called(file: Path, config: EngineConfig, ranks: Ranks) -> set[str]:
    """Return the names of the kernels that not every engine calls, as `prepare_kernels` takes
    them.
    """
    called = {config.kv_cache_dtype, config.dtype} | ({"ranks"} if ranks.size > 1 else set())
    return called | _stored_formats(file)


def _stored_formats(file: Path) -> set[str]:
    """Return the names of the formats of the tensors in a GGUF file."""
    if file.suffix != ".gguf":
        return set()
    # Only such files need the library.
    from ..files.gguf_reader import open_gguf

    return {tensor.tensor_type.name for tensor in open_gguf(file).tensors}


def _bytes_of(path: Path, config: EngineConfig) -> int:
    """Return the bytes of the weights that plain torch multiplies."""
    if config.load_format == "dummy":
        return 0
    if path.is_file():
        return path.stat().st_size * _UNPACKED
    return sum(each.stat().st_size for each in weight_files(path))
