"""`piecework pull`: download a model of the hub into its cache."""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path
from typing import Any

from ..runtime.files.resolve import ALIASES, HUB_COPIES, HUB_FILES, find_model, hub_reason

_ROOM = 64 * 2**20  # Bytes that stay free on the disk.


def add_parser(commands: Any) -> None:
    pull = commands.add_parser(
        "pull",
        help="download a model from the hub",
        description="Download a model of the hub into its cache (HF_HUB_CACHE), and print the "
        "path. Files in the cache are not downloaded again, and interrupted downloads are "
        "resumed. By default it downloads config, tokenizer and .safetensors files.",
    )
    pull.add_argument("model", metavar="MODEL", help="a hub id such as Qwen/Qwen3-0.6B")
    pull.add_argument("--revision", metavar="NAME", help="branch, tag or commit; default: main")
    pull.add_argument(
        "--include",
        action="append",
        metavar="PATTERN",
        help="download only files that match ('*Q4_K_M.gguf'); repeatable",
    )
    pull.set_defaults(func=_pull, parser=pull)


def _pull(arguments: argparse.Namespace) -> int:
    """Download the model and return 0. Raises `ValueError` if that fails."""
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
            raise ValueError(f"no files match {patterns}; choose files with --include")
        if odd := next((file.filename for file in files if not file.filename.isprintable()), None):
            raise ValueError(f"the file name {odd!r} has unprintable characters")
        _check_room(files)
        if sys.stderr.isatty():
            enable_progress_bars()
        path = Path(huggingface_hub.snapshot_download(**wanted))
    except ValueError as error:
        raise ValueError(f"{model}: {' '.join(str(error).split())}") from None
    except Exception as error:  # The hub's, the HTTP client's or the system's error.
        reason = hub_reason(error.__cause__ or error)
        raise ValueError(f"{model} cannot be downloaded: {reason}") from None
    ggufs = [file.filename for file in files if file.filename.endswith(".gguf")]
    print(path / ggufs[0] if len(ggufs) == len(files) == 1 else path)
    return 0


def _check_room(files: list[Any]) -> None:
    """Print the size of the download. Raises `ValueError` if the disk has no room for it."""
    from huggingface_hub.constants import HF_HUB_CACHE

    missing = [file for file in files if file.will_download]
    size = sum(file.file_size or 0 for file in missing)
    total = sum(file.file_size or 0 for file in files)
    cached = f"; {format_size(total - size)} of it is in the cache" if size < total else ""
    print(f"{len(files)} files, {format_size(total)}{cached}", file=sys.stderr, flush=True)
    folder = Path(HF_HUB_CACHE)
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if missing and size + _ROOM > free:
        raise ValueError(
            f"{format_size(size)} are missing, but {HF_HUB_CACHE} has {format_size(free)} free; "
            "delete something, or set HF_HUB_CACHE to a folder on another disk"
        )


def format_size(num_bytes: int) -> str:
    """Format a size as `1.2 GiB` or `37.0 MiB`."""
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"
