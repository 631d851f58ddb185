"""`piecework models`: which models this machine has, what serves them, and how to be rid of one."""

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
from .pull import told_size


class Row(NamedTuple):
    """A model on disk. `name`: what `serve` takes, `size` in bytes, `serves`: what it is for, or
    why it cannot be served.
    """

    name: str
    revision: str
    size: int
    serves: str
    path: str


def add_parser(commands: Any) -> None:
    models = commands.add_parser(
        "models",
        help="list the models of this machine, or remove one",
        description="The models in the hub's cache (HF_HUB_CACHE) and the built-in alias: how "
        "large they are, and what piecework serves them for.",
    )
    models.add_argument("--json", action="store_true", help="print JSON instead of a table")
    models.set_defaults(func=_list, parser=models)
    actions = models.add_subparsers(title="actions", metavar="ACTION")
    remove = actions.add_parser("rm", help="remove a model from the hub's cache")
    remove.add_argument("name", metavar="NAME", help="as the list has it")
    remove.add_argument("--yes", action="store_true", help="do not ask")
    remove.set_defaults(func=_remove, parser=remove)


def _list(arguments: argparse.Namespace) -> int:
    rows = [*_aliases(), *_cached()]
    if arguments.json:
        print(json.dumps([row._asdict() for row in rows], indent=1))
        return 0
    if not rows:
        print("no models; `piecework pull MODEL` fetches one", file=sys.stderr)
    width = max((len(row.name) for row in rows), default=0)
    for row in rows:
        told = f"{row.name:{width}}  {row.revision:10}  {told_size(row.size):>10}  {row.serves}"
        print(printable(told))
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
        for revision in sorted(repository.revisions, key=lambda one: one.commit_hash):
            name = ",".join(sorted(revision.refs)) or revision.commit_hash[:10]
            path = Path(revision.snapshot_path)
            yield Row(
                repository.repo_id, name, revision.size_on_disk, _folder_serves(path), str(path)
            )


def _repositories() -> list[Any]:
    """The models of the hub's cache by their names."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        found = scan_cache_dir()
    except CacheNotFound:
        return []
    for warning in found.warnings:
        print(f"warning: {printable(' '.join(str(warning).split()))}", file=sys.stderr)
    models = [one for one in found.repos if one.repo_type == "model"]
    return sorted(models, key=lambda one: one.repo_id)


def _folder_serves(path: Path) -> str:
    """What a folder is for; one with .gguf files alone has a model in each."""
    ggufs = sorted(path.rglob("*.gguf"))
    if ggufs and not (path / "config.json").exists():
        return f"{_serves(ggufs[0])}, by the path of its .gguf file"
    return _serves(path)


def _serves(path: Path) -> str:
    from ..runtime.loader.check import check_model
    from ..runtime.pooling.folder import makes_vectors, read_folder

    try:
        if is_pipeline(str(path)):
            return "images"
        if makes_vectors(str(path)):
            read_folder(str(path))
            return "vectors"
        check_model(str(path), context_length=None, weights=True)
        return "text"
    except (ValueError, OSError) as error:
        # Without the folder, which is longer than there is room.
        reason = " ".join(str(error).split()).removeprefix(f"{path}: ").replace(f"{path}/", "")
        return f"not served: {reason[:120]}"


def _remove(arguments: argparse.Namespace) -> int:
    """Exit code 0, also where the user changes his mind. Raises `ValueError`."""
    from huggingface_hub import scan_cache_dir

    name: str = arguments.name
    if name in ALIASES:
        package = ALIASES[name].package.replace("_", "-")
        raise ValueError(f"{name} is a Python package; run: pip uninstall {package}")
    found = next((one for one in _repositories() if one.repo_id == name), None)
    if found is None:
        raise ValueError(f"{name} is not in the hub's cache; `piecework models` lists what is")
    if not arguments.yes:
        if not sys.stdin.isatty():
            raise ValueError(f"rm {name} asks before it removes; give --yes")
        try:
            said = input(f"remove {name}, {told_size(found.size_on_disk)}? [y/N] ")
        except EOFError:
            said = ""
        if said.strip().lower() not in ("y", "yes"):
            return 0
    revisions = [revision.commit_hash for revision in found.revisions]
    # Of this repository alone: a copy of it, or it under its former name, has the same commits.
    cache = dataclasses.replace(scan_cache_dir(), repos=frozenset([found]))
    cache.delete_revisions(*revisions).execute()
    print(f"removed {name}, {told_size(found.size_on_disk)}", file=sys.stderr)
    return 0
