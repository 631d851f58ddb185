"""`piecework cache`: list, clear, export and import this machine's compiled pieces, and look after
folders of --kv-disk.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..compilation.cache import CompileCache, Entry

_UNITS = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))


def add_parser(commands: Any) -> None:
    cache = commands.add_parser(
        "cache",
        help="list, clear, export or import compiled pieces; look after a folder of --kv-disk",
        description="Compiled pieces are shared by all servers of this machine. They are in "
        "~/.cache/piecework, or in the folder that PIECEWORK_CACHE_DIR names.",
    )
    cache.set_defaults(parser=cache)
    actions = cache.add_subparsers(title="actions", metavar="ACTION")
    listing = actions.add_parser("ls", help="list the entries with their model, size and age")
    listing.add_argument("--json", action="store_true", help="print JSON instead of a table")
    actions.add_parser("clear", help="remove all entries; the next start compiles again")
    export = actions.add_parser(
        "export",
        help="write all entries (pieces and plans) to one file, for a machine of the same kind",
    )
    export.add_argument("file", metavar="FILE", help="a .tar.gz")
    importing = actions.add_parser(
        "import",
        help="add the entries of an exported file; their code will run, so the file must be "
        "trusted",
    )
    importing.add_argument("file", metavar="FILE")
    for name, parser in actions.choices.items():
        parser.set_defaults(func=_cache, parser=parser, action=name)
    blocks = actions.add_parser(
        "kv",
        help="show, measure or prune a folder of --kv-disk; servers may be using it",
    )
    blocks.add_argument("folder", metavar="FOLDER")
    blocks.add_argument(
        "--prune", metavar="SIZE", help="delete what was used least recently until SIZE is left (0)"
    )
    blocks.add_argument(
        "--measure", action="store_true", help="read all blocks: how fast, and how many are damaged"
    )
    blocks.add_argument("--json", action="store_true", help="print JSON instead of lines")
    blocks.set_defaults(func=_blocks, parser=blocks)


def _cache(arguments: argparse.Namespace) -> int:
    """Run the chosen action and return exit code 0. Raises `ValueError`."""
    from ..compilation.cache import CompileCache
    from ..kernels.cache_folder import cache_folder

    try:
        cache = CompileCache(cache_folder())
    except OSError as error:
        raise ValueError(str(error)) from None
    match arguments.action:
        case "ls":
            entries, folders = _entries(cache), _folders(cache)
            if arguments.json:
                listing = {"folder": str(cache.folder), "entries": entries, "folders": folders}
                print(json.dumps(listing, indent=2))
            else:
                size = sum(row["num_bytes"] for row in entries + folders) / 2**20
                end = f"{len(entries)} entries, {size:.1f} MiB in {cache.folder}"
                print("\n".join([*_table(entries, folders), *_failures(entries), end]))
        case "clear":
            freed = sum(row["num_bytes"] for row in _folders(cache))
            for _, _, folder in _other_folders(cache):
                shutil.rmtree(folder, ignore_errors=True)
            print(f"{(freed + cache.clear()) / 2**20:.1f} MiB removed from {cache.folder}")
        case "export":
            file = Path(arguments.file)
            if file.is_dir():
                raise ValueError(f"{file} is a folder; give a file")
            try:
                exported = cache.export(file)
            except OSError as error:
                raise ValueError(f"{file}: {error.strerror}") from None
            print(f"{len(exported)} entries written to {file}")
        case "import":
            print(f"{len(cache.import_(Path(arguments.file)))} entries added to {cache.folder}")
    return 0


def _blocks(arguments: argparse.Namespace) -> int:
    """Describe a folder of `--kv-disk` and return exit code 0. Raises `ValueError`."""
    from ..runtime.config.tiers import parse_size
    from ..runtime.tiers.segments import Segments

    folder = Path(arguments.folder)
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; give the one that --kv-disk names")
    prune = arguments.prune
    most = 0 if prune == "0" else None if prune is None else parse_size(prune, "--prune")
    store = Segments(folder, sys.maxsize)
    about: dict[str, Any] = {"folder": str(folder)}
    if most is not None:
        about["freed_bytes"] = store.prune(most)
    if arguments.measure:
        began = time.perf_counter()
        about["damaged_blocks"], num_bytes = store.check()
        seconds = max(time.perf_counter() - began, 1e-9)
        about["bytes_per_second"] = round(num_bytes / seconds)
    times = [path.stat().st_mtime for path in store.files]
    about |= {
        "files": len(times),
        "blocks": store.num_blocks,
        "num_bytes": store.num_bytes,
        "least_recent_use": max(0.0, time.time() - min(times)) if times else None,
    }
    if arguments.json:
        print(json.dumps(about, indent=2))
        return 0
    if "freed_bytes" in about:
        print(f"{about['freed_bytes'] / 2**20:.1f} MiB removed")
    if "damaged_blocks" in about:
        speed = about["bytes_per_second"] / 2**30
        print(f"{about['damaged_blocks']} damaged blocks, read with {speed:.2f} GiB a second")
    age = "" if not times else f", the first of them used {_age(about['least_recent_use'])} ago"
    size = about["num_bytes"] / 2**20
    print(f"{about['blocks']} blocks, {size:.1f} MiB in {len(times)} files of {folder}{age}")
    return 0


def _entries(cache: CompileCache) -> list[dict[str, Any]]:
    """Return all complete entries, the newest first.

    `kind` is piece or plan (a split forward), `models` the models whose plan calls the piece, `age`
    is in seconds. `failed` says why a piece is not compiled. `transient`: the failure was the
    machine's, and the next start tries again.
    """
    entries = cache.entries()
    users: dict[str, list[str]] = {}
    for entry in entries:
        if entry.about.get("kind") == "plan":
            for piece in _pieces_of(cache.folder / entry.content):
                users.setdefault(piece, []).append(_model_of(entry))
    rows = []
    for entry in entries:
        about = entry.about
        ops, failed = about.get("ops"), about.get("failed")
        if about.get("kind") == "plan":
            what, models = f"{about.get('pieces')} distinct pieces", [_model_of(entry)]
        else:
            what = f"{len(ops)} ops" if isinstance(ops, list) else ""
            models = sorted(set(users.get(str(about.get("piece")), [])))
        rows.append(
            {
                "key": entry.key,
                "kind": str(about.get("kind", "unknown")),
                "what": what,
                "models": models,
                "compiler": str(about.get("compiler", "")),
                "torch": str(about.get("torch", "")),
                "num_bytes": entry.num_bytes,
                "age": max(0.0, time.time() - entry.created),
                "failed": None if failed is None else str(failed),
                "transient": bool(about.get("transient")),
            }
        )
    return rows


def _pieces_of(plan: Path) -> list[str]:
    try:
        return [str(piece["key"]) for piece in json.loads(plan.read_text())["pieces"]]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _model_of(plan: Entry) -> str:
    """Return architecture, depth, width and dtype, read from the text of `pieces.model_key`."""
    try:
        (config, dtype), _ = json.JSONDecoder().raw_decode(str(plan.about["model"]))
        return (
            f"{config['architecture']} {config['num_layers']}x{config['hidden_size']} "
            f"{str(dtype).removeprefix('torch.')}"
        )
    except (ValueError, KeyError, TypeError):
        return "unknown model"


def _folders(cache: CompileCache) -> list[dict[str, Any]]:
    """Return the other non-empty folders of compiled code in the cache folder.

    `age` is the age of the newest file, in seconds.
    """
    rows = []
    for kind, what, folder in _other_folders(cache):
        files = []
        for path in folder.rglob("*"):
            try:
                files += [path.stat()] if path.is_file() else []
            except OSError:
                continue  # Another process has removed it.
        if files:
            rows.append(
                {
                    "kind": kind,
                    "what": what,
                    "folder": str(folder),
                    "num_files": len(files),
                    "num_bytes": sum(status.st_size for status in files),
                    "age": max(0.0, time.time() - max(status.st_mtime for status in files)),
                }
            )
    return rows


def _other_folders(cache: CompileCache) -> Iterator[tuple[str, str, Path]]:
    """Yield kind, purpose and path. Skips a kernels folder that the user has put elsewhere."""
    from ..compilation.cache import inductor_folder
    from ..kernels.cache_folder import kernels_folder, verdicts_folder

    yield "inductor", "diffusion models, by torch.compile", inductor_folder()
    yield "libraries", "verdicts on library kernels of this machine", verdicts_folder()
    if kernels_folder().parent == cache.folder:
        yield "native", "kernels for this CPU", kernels_folder()


def _table(entries: Sequence[dict[str, Any]], folders: Sequence[dict[str, Any]]) -> Iterator[str]:
    if not entries and not folders:
        return
    rows = [("kind", "what", "compiler", "torch", "size", "age", "models")]
    for row in [*entries, *folders]:
        size, age = f"{row['num_bytes'] / 1024:.0f} KiB", _age(row["age"])
        if "folder" in row:
            rows.append((row["kind"], f"{row['num_files']} files", "", "", size, age, row["what"]))
        else:
            what = row["what"] if row["failed"] is None else f"{row['what']}, as traced"
            models = ", ".join(row["models"])
            rows.append((row["kind"], what, row["compiler"], row["torch"], size, age, models))
    widths = [max(len(row[column]) for row in rows) for column in range(6)]
    for line in rows:
        yield "  ".join(
            [*(text.ljust(width) for text, width in zip(line[:-1], widths, strict=True)), line[-1]]
        ).rstrip()


def _failures(entries: Sequence[dict[str, Any]]) -> Iterator[str]:
    for row in entries:
        if row["failed"] is not None:
            when = (
                "at the next start"
                if row["transient"]
                else "with another compiler or torch, or after `piecework cache clear`"
            )
            yield (
                f"the piece of {row['what']} could not be compiled ({row['failed']}); retry: {when}"
            )


def _age(seconds: float) -> str:
    unit, length = next(
        ((unit, length) for unit, length in _UNITS if seconds >= length), _UNITS[-1]
    )
    return f"{seconds // length:.0f} {unit}"
