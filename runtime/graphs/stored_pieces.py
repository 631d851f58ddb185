"""The compile cache, for people: what its entries are and which models they belong to, and what
else was compiled.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...compilation.cache import CompileCache, Entry, inductor_folder
from ...kernels.cache_folder import cache_folder, kernels_folder, verdicts_folder


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredEntry:
    """One entry. `kind`: piece or plan (a cut forward); `models`: those that it is known to belong
    to; `age`: in seconds.

    `failed`: why a piece cannot be compiled; it runs as it was traced. `transient`: the machine
    failed, and the next start tries again.
    """

    key: str
    kind: str
    what: str
    models: list[str]
    compiler: str
    torch: str
    num_bytes: int
    age: float
    failed: str | None
    transient: bool

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFolder:
    """Files of a compiler that keeps its own books. `age`: of the newest, in seconds."""

    kind: str
    what: str
    folder: str
    num_files: int
    num_bytes: int
    age: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def open_cache() -> CompileCache:
    """The cache of this machine. Raises `ValueError` with a remedy where its folder cannot be."""
    try:
        return CompileCache(cache_folder())
    except OSError as error:
        raise ValueError(str(error)) from None


def stored_entries(cache: CompileCache) -> list[StoredEntry]:
    """All whole entries, the newest first; a piece belongs to every model whose plan calls it."""
    entries = cache.entries()
    users: dict[str, list[str]] = {}
    for entry in entries:
        if entry.about.get("kind") == "plan":
            for piece in _pieces_of(cache.folder / entry.content):
                users.setdefault(piece, []).append(_model_of(entry))
    return [_described(entry, users) for entry in entries]


def stored_folders(cache: CompileCache) -> list[StoredFolder]:
    """What lies in the cache's folder beside its entries and was compiled; empty folders are left
    out.
    """
    found = []
    for kind, what, folder in _folders(cache):
        files = [status for path in folder.rglob("*") if (status := _file_status(path)) is not None]
        if files:
            size, newest = (
                sum(status.st_size for status in files),
                max(status.st_mtime for status in files),
            )
            age = max(0.0, time.time() - newest)
            found.append(
                StoredFolder(
                    kind=kind,
                    what=what,
                    folder=str(folder),
                    num_files=len(files),
                    num_bytes=size,
                    age=age,
                )
            )
    return found


def clear(cache: CompileCache) -> int:
    """Remove all that was compiled; returns how many bytes that were. Who has loaded some of it
    keeps it.
    """
    freed = sum(found.num_bytes for found in stored_folders(cache))
    for _, _, folder in _folders(cache):
        shutil.rmtree(folder, ignore_errors=True)
    return freed + cache.clear()


def _folders(cache: CompileCache) -> Iterator[tuple[str, str, Path]]:
    """Kind, purpose and place. What the user has put elsewhere is the user's to clear."""
    yield "inductor", "diffusion models, by torch.compile", inductor_folder()
    yield "libraries", "which kernels of libraries are right on this machine", verdicts_folder()
    if kernels_folder().parent == cache.folder:
        yield "native", "kernels for this CPU", kernels_folder()


def _file_status(path: Path) -> os.stat_result | None:
    """None for what is no file, or is gone meanwhile."""
    try:
        return path.stat() if path.is_file() else None
    except OSError:
        return None


def _described(entry: Entry, users: dict[str, list[str]]) -> StoredEntry:
    about = entry.about
    kind = str(about.get("kind", "unknown"))
    is_plan = kind == "plan"
    ops = about.get("ops")
    return StoredEntry(
        key=entry.key,
        kind=kind,
        what=f"{about.get('pieces')} distinct pieces"
        if is_plan
        else f"{len(ops)} ops"
        if isinstance(ops, list)
        else "",
        models=[_model_of(entry)]
        if is_plan
        else sorted(set(users.get(str(about.get("piece")), []))),
        compiler=str(about.get("compiler", "")),
        torch=str(about.get("torch", "")),
        num_bytes=entry.num_bytes,
        age=max(0.0, time.time() - entry.created),
        failed=str(about["failed"]) if about.get("failed") is not None else None,
        transient=bool(about.get("transient")),
    )


def _pieces_of(plan: Path) -> Iterator[str]:
    try:
        pieces = json.loads(plan.read_text())["pieces"]
        yield from [str(piece["key"]) for piece in pieces]
    except (OSError, ValueError, KeyError, TypeError):
        return


def _model_of(plan: Entry) -> str:
    """Architecture, depth, width and dtype, out of the text that `pieces.model_key` made."""
    try:
        (config, dtype), _ = json.JSONDecoder().raw_decode(str(plan.about["model"]))
        return (
            f"{config['architecture']} {config['num_layers']}x{config['hidden_size']} "
            f"{str(dtype).removeprefix('torch.')}"
        )
    except (ValueError, KeyError, TypeError):
        return "unknown model"
