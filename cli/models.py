"""`piecework models`: list the models on this machine, and remove one."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ..runtime.files.resolve import ALIASES, find_model, is_pipeline
from .core.printable import printable
from .pull import format_size

_ADAPTER = "adapter_config.json"  # In folders of PEFT's format.


class Row(NamedTuple):
    """A model on disk.

    Attributes:
        name: The name for `serve`.
        size: Bytes.
        serves: The use of the model, or why it cannot be served.
    """

    name: str
    revision: str
    size: int
    serves: str
    path: str


def add_parser(commands: Any) -> None:
    models = commands.add_parser(
        "models",
        help="list the models on this machine, or remove one",
        description="List the models in the hub's cache (HF_HUB_CACHE) and the built-in alias, "
        "with their size and use.",
    )
    models.add_argument("--json", action="store_true", help="print JSON instead of a table")
    models.set_defaults(func=_list, parser=models)
    actions = models.add_subparsers(title="actions", metavar="ACTION")
    remove = actions.add_parser("rm", help="remove a model from the hub's cache")
    remove.add_argument("name", metavar="NAME", help="name as listed")
    remove.add_argument("--yes", action="store_true", help="do not ask for confirmation")
    remove.set_defaults(func=_remove, parser=remove)


def _list(arguments: argparse.Namespace) -> int:
    rows = [*_aliases(), *_cached()]
    if arguments.json:
        print(json.dumps([row._asdict() for row in rows], indent=1))
        return 0
    if not rows:
        print("no models; `piecework pull MODEL` downloads one", file=sys.stderr)
    width = max((len(row.name) for row in rows), default=0)
    for row in rows:
        size = format_size(row.size)
        print(printable(f"{row.name:{width}}  {row.revision:10}  {size:>10}  {row.serves}"))
    return 0


def _aliases() -> Iterator[Row]:
    for alias, packaged in ALIASES.items():
        try:
            path = find_model(alias)
        except ValueError:
            continue
        yield Row(alias, packaged.package, Path(path).stat().st_size, _serves(Path(path)), path)


def _cached() -> Iterator[Row]:
    for repository in _repositories():
        for revision in sorted(repository.revisions, key=lambda found: found.commit_hash):
            name = ",".join(sorted(revision.refs)) or revision.commit_hash[:10]
            path = Path(revision.snapshot_path)
            yield Row(
                repository.repo_id, name, revision.size_on_disk, _folder_serves(path), str(path)
            )


def _repositories() -> list[Any]:
    """Return the models of the hub's cache, sorted by name."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        found = scan_cache_dir()
    except CacheNotFound:
        return []
    for warning in found.warnings:
        print(f"warning: {printable(' '.join(str(warning).split()))}", file=sys.stderr)
    models = [repo for repo in found.repos if repo.repo_type == "model"]
    return sorted(models, key=lambda repo: repo.repo_id)


def _folder_serves(path: Path) -> str:
    """Return the use of a folder. In a folder of .gguf files, each file is a model."""
    ggufs = sorted(path.rglob("*.gguf"))
    if ggufs and not (path / "config.json").exists():
        return f"{_serves(ggufs[0])}, by the path of its .gguf file"
    return _serves(path)


def _serves(path: Path) -> str:
    from ..runtime.loader.check import check_model
    from ..runtime.pooling.folder import makes_vectors, read_folder
    from ..runtime.speech.folder import is_speech, read_speech_folder

    if (path / _ADAPTER).is_file() and not (path / "config.json").exists():
        return _base_of_adapter(path / _ADAPTER)
    try:
        if is_pipeline(str(path)):
            return "images"
        if is_speech(str(path)):
            read_speech_folder(str(path))
            return "text of speech"
        if makes_vectors(str(path)):
            read_folder(str(path))
            return "vectors"
        check_model(str(path), context_length=None, weights=True)
        return "text"
    except (ValueError, OSError) as error:
        # Leave the folder out, because it is too long for the table.
        reason = " ".join(str(error).split()).removeprefix(f"{path}: ").replace(f"{path}/", "")
        return f"not served: {reason[:120]}"


def _base_of_adapter(config: Path) -> str:
    try:
        base = json.loads(config.read_text())["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        base = "its base model"
    return f"an adapter (LoRA) of {base!s:.100}: serve that with --lora-modules NAME=PATH"


def _remove(arguments: argparse.Namespace) -> int:
    """Remove a model. Returns 0, also if the user declines. Raises `ValueError`."""
    from huggingface_hub import scan_cache_dir

    name: str = arguments.name
    if name in ALIASES:
        package = ALIASES[name].package.replace("_", "-")
        raise ValueError(f"{name} is a Python package; run: pip uninstall {package}")
    found = next((repo for repo in _repositories() if repo.repo_id == name), None)
    if found is None:
        raise ValueError(f"{name} is not in the hub's cache; `piecework models` lists its models")
    if not arguments.yes:
        if not sys.stdin.isatty():
            raise ValueError(f"rm {name} cannot ask without a terminal; give --yes")
        try:
            said = input(f"remove {name}, {format_size(found.size_on_disk)}? [y/N] ")
        except EOFError:
            said = ""
        if said.strip().lower() not in ("y", "yes"):
            return 0
    revisions = [revision.commit_hash for revision in found.revisions]
    # Only this repository: a copy, or the same one under an old name, has the same commits.
    cache = dataclasses.replace(scan_cache_dir(), repos=frozenset([found]))
    cache.delete_revisions(*revisions).execute()
    print(f"removed {name}, {format_size(found.size_on_disk)}", file=sys.stderr)
    return 0
