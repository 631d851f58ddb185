"""`piecework pull`: fetches a model of the hub into its cache, before a server needs it."""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path
from typing import Any

from ..runtime.files.resolve import ALIASES, HUB_COPIES, HUB_FILES, find_model, hub_reason

_ROOM = 64 * 2**20
"""Bytes that a disk keeps beside what is fetched."""


def add_parser(commands: Any) -> None:
    pull = commands.add_parser(
        "pull",
        help="fetch a model from the hub",
        description="Fetch a model of the hub into its cache (HF_HUB_CACHE), and print the path. "
        "What is there already is not fetched again, and what was cut off goes on. By default all "
        "that piecework serves: config, tokenizer, .safetensors.",
    )
    pull.add_argument("model", metavar="MODEL", help="a hub id such as Qwen/Qwen3-0.6B")
    pull.add_argument("--revision", metavar="NAME", help="branch, tag or commit; default: main")
    pull.add_argument(
        "--include",
        action="append",
        metavar="PATTERN",
        help="only files of this pattern ('*Q4_K_M.gguf'); may be given several times",
    )
    pull.set_defaults(func=_pull, parser=pull)


def _pull(arguments: argparse.Namespace) -> int:
    """Exit code 0. Raises `ValueError` for what cannot be fetched, or has no room."""
    model: str = arguments.model
    if model in ALIASES:
        print(find_model(model))
        return 0
    import huggingface_hub
    from huggingface_hub.utils import (  # type: ignore[attr-defined]
        disable_progress_bars,
        enable_progress_bars,
    )

    wanted: dict[str, Any] = {
        "repo_id": model,
        "revision": arguments.revision,
        "allow_patterns": arguments.include or HUB_FILES,
        "ignore_patterns": None if arguments.include else HUB_COPIES,
    }
    disable_progress_bars()
    try:
        files = huggingface_hub.snapshot_download(**wanted, dry_run=True)
        if not files:
            patterns = ", ".join(arguments.include or HUB_FILES)
            raise ValueError(f"{model} has no files of {patterns}; --include says which to fetch")
        if odd := next((one.filename for one in files if not one.filename.isprintable()), None):
            raise ValueError(f"the name of a file, {odd!r}, has characters that cannot be shown")
        _check_room(files)
        if sys.stderr.isatty():
            enable_progress_bars()
        path = Path(huggingface_hub.snapshot_download(**wanted))
    except ValueError as error:
        raise ValueError(f"{model}: {' '.join(str(error).split())}") from None
    except Exception as error:  # its own kinds, the HTTP client's and the system's
        reason = hub_reason(error.__cause__ or error)
        raise ValueError(f"{model} cannot be fetched: {reason}") from None
    ggufs = [file.filename for file in files if file.filename.endswith(".gguf")]
    print(path / ggufs[0] if len(ggufs) == len(files) == 1 else path)
    return 0


def _check_room(files: list[Any]) -> None:
    """Say what is to be fetched. Raises `ValueError` where the disk has no room for it."""
    from huggingface_hub.constants import HF_HUB_CACHE

    missing = [file for file in files if file.will_download]
    size = sum(file.file_size or 0 for file in missing)
    total = sum(file.file_size or 0 for file in files)
    told = f"{len(files)} files, {told_size(total)}"
    there = f"; {told_size(total - size)} of it are there already" if size < total else ""
    print(f"{told}{there}", file=sys.stderr, flush=True)
    folder = Path(HF_HUB_CACHE)
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if missing and size + _ROOM > free:
        raise ValueError(
            f"{told_size(size)} are to be fetched, and {HF_HUB_CACHE} has {told_size(free)} free; "
            "make room, or name another disk by HF_HUB_CACHE"
        )


def told_size(num_bytes: int) -> str:
    """`1.2 GiB`, `37.0 MiB`."""
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"
