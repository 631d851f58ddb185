"""Reads an adapter from its files into host memory."""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path

import torch

from ..layers.linear import StoredTensor
from .adapter import Adapter, AdapterFault, Update
from .peft_folder import CONFIG, is_peft, read_peft
from .stored import StoredAdapter
from .targets import Targets

_HASH_BYTES = 16


def read_adapter(path: str, targets: Targets, dtype: torch.dtype, most_rank: int) -> Adapter:
    """Return the part of an adapter that this rank needs, in `dtype`.

    Shapes and ranks are checked before any matrix is read, so that a large file costs nothing.
    Raise `AdapterFault`.
    """
    stored = _open(Path(path).expanduser())
    rank = max(update.rank for update in stored.updates)
    if rank > most_rank:
        raise AdapterFault(
            f"{path} has rank {rank}, more than {most_rank}: start the server with "
            f"--max-lora-rank {rank}"
        )
    changes = [
        (update, targets.find(update, in_gguf=stored.in_gguf))
        for update in sorted(stored.updates, key=lambda update: update.name)
    ]
    places = [target.place for _, found in changes for target in found]
    if len(set(places)) < len(places):
        raise AdapterFault(f"{path} changes a layer twice; download the adapter again")
    updates: dict[tuple[str, str], Update] = {}
    digest = blake2b(digest_size=_HASH_BYTES)
    for stored_update, found in changes:
        a, b, scale = _read(stored_update.a), _read(stored_update.b), stored_update.scale
        for target in found:
            updates[target.place] = target.update(a, b, scale, dtype)
        digest.update(repr((stored_update.name, a.shape, b.shape, scale)).encode())
        for matrix in (a, b):
            digest.update(matrix.view(torch.uint8).numpy().data)
    return Adapter(digest.hexdigest(), rank, updates)


def _read(tensor: StoredTensor) -> torch.Tensor:
    try:
        values = tensor.read()
    except (ValueError, RuntimeError, OSError) as error:
        raise AdapterFault(f"{tensor.name:.200} cannot be read ({error})") from None
    if not bool(values.isfinite().all()):
        raise AdapterFault(f"{tensor.file}: {tensor.name:.200} holds numbers that are not finite")
    return values


def _open(path: Path) -> StoredAdapter:
    if not path.exists():
        raise AdapterFault(f"{path} does not exist; give the folder of an adapter")
    if path.suffix == ".gguf" and path.is_file():
        # Imported here, because machines that only measure have no gguf library.
        from .gguf_adapter import read_gguf_adapter

        return read_gguf_adapter(path)
    if path.is_file():
        raise AdapterFault(f"{path} is neither a folder of PEFT nor a .gguf file")
    if is_peft(path):
        return read_peft(path)
    raise AdapterFault(f"{path} holds no adapter: it lacks {CONFIG}")
