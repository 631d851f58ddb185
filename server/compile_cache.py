"""`piecework cache`: list, clear, export and import the compiled pieces that servers of this machine share."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..runtime.stored_pieces import StoredEntry, open_cache, stored_entries

_UNITS = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))


def run(arguments: argparse.Namespace) -> int:
    """Do what `arguments.action` says; exit code 0. Raises `ValueError` with a remedy."""
    cache = open_cache()
    match arguments.action:
        case "ls":
            entries = stored_entries(cache)
            if arguments.json:
                print(json.dumps({"folder": str(cache.folder), "entries": [entry.to_json() for entry in entries]}, indent=2))
            else:
                print("\n".join([*_table(entries), f"{_size(entries)} in {cache.folder}"]))
        case "clear":
            print(f"{cache.clear() / 2**20:.1f} MiB removed from {cache.folder}")
        case "export":
            file = Path(arguments.file)
            if file.is_dir():
                raise ValueError(f"{file}: this is a folder; name a file")
            try:
                exported = cache.export(file)
            except OSError as error:
                raise ValueError(f"{file}: {error.strerror}") from None
            print(f"{len(exported)} entries written to {file}")
        case "import":
            print(f"{len(cache.import_(Path(arguments.file)))} entries taken into {cache.folder}")
    return 0


def _table(entries: Sequence[StoredEntry]) -> Iterator[str]:
    if not entries:
        return
    rows = [("kind", "what", "compiler", "torch", "size", "age", "of models")]
    rows += [
        (
            entry.kind,
            entry.what,
            entry.compiler,
            entry.torch,
            f"{entry.num_bytes / 1024:.0f} KiB",
            _age(entry.age),
            ", ".join(entry.models),
        )
        for entry in entries
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(6)]
    for row in rows:
        yield "  ".join([*(text.ljust(width) for text, width in zip(row[:-1], widths, strict=True)), row[-1]]).rstrip()


def _age(seconds: float) -> str:
    unit, length = next(((unit, length) for unit, length in _UNITS if seconds >= length), _UNITS[-1])
    return f"{seconds // length:.0f} {unit}"


def _size(entries: Sequence[StoredEntry]) -> str:
    return f"{len(entries)} entries, {sum(entry.num_bytes for entry in entries) / 2**20:.1f} MiB"
