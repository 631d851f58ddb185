"""Tells models apart whose keys and values differ."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from ..files.folder import weight_files
from ..files.kept_folder import kept_folder

_READ_BYTES = 1 << 22


def weights_digest(path: Path) -> str:
    """Return a SHA-256 of the files of a model: its config and all weights, read to the end.

    The digest of a file is kept until its size, time or inode changes. `path` is a folder or a
    .gguf file. Raise `OSError` if a file cannot be read.
    """
    files = [path] if path.is_file() else [path / "config.json", *weight_files(path)]
    kept = kept_folder("digests", path.name) / "files.json"
    try:
        known = json.loads(kept.read_text())
    except (OSError, ValueError):
        known = {}
    digests = dict[str, str]()
    for file in files:
        status = file.stat()
        mark = f"{file.resolve()} {status.st_size} {status.st_mtime_ns} {status.st_ino}"
        digest = known.get(mark) if isinstance(known, dict) else None
        digests[mark] = digest if isinstance(digest, str) else _digest(file)
    if digests != known:
        try:
            kept.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            unfinished = kept.with_suffix(f".{os.getpid()}")
            unfinished.write_text(json.dumps(digests))
            unfinished.replace(kept)
        except OSError:
            pass  # The next start reads the files again.
    return hashlib.sha256("\n".join(digests.values()).encode()).hexdigest()


def _digest(file: Path) -> str:
    with file.open("rb", buffering=0) as opened:
        digest, part = hashlib.sha256(), memoryview(bytearray(_READ_BYTES))
        while count := opened.readinto(part):
            digest.update(part[:count])
    return digest.hexdigest()
