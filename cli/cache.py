"""`piecework cache`: list, clear, export and import the compiled pieces that servers of this
machine share.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..runtime.graphs.stored_pieces import StoredEntry, StoredFolder

_UNITS = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))


def add_parser(commands: Any) -> None:
    cache = commands.add_parser(
        "cache",
        help="show, clear or move what was compiled, on disk",
        description="The compiled pieces that servers of this machine share: in "
        "~/.cache/piecework, or where PIECEWORK_CACHE_DIR says.",
    )
    cache.set_defaults(parser=cache)
    actions = cache.add_subparsers(title="actions", metavar="ACTION")
    listing = actions.add_parser(
        "ls", help="list the entries: what, of which model, how large, how old"
    )
    listing.add_argument("--json", action="store_true", help="print JSON instead of a table")
    actions.add_parser("clear", help="remove all that was compiled; the next start compiles anew")
    export = actions.add_parser(
        "export",
        help="write every entry (pieces and plans) into one file, for a machine of the same kind",
    )
    export.add_argument("file", metavar="FILE", help="a .tar.gz")
    importing = actions.add_parser(
        "import",
        help="take the entries of a file that export wrote; their code is run, so it must be "
        "trusted",
    )
    importing.add_argument("file", metavar="FILE")
    for name, parser in actions.choices.items():
        parser.set_defaults(func=_cache, parser=parser, action=name)


def _cache(arguments: argparse.Namespace) -> int:
    """Do what `arguments.action` says; exit code 0. Raises `ValueError` with a remedy."""
    from ..runtime.graphs.stored_pieces import clear, open_cache, stored_entries, stored_folders

    cache = open_cache()
    match arguments.action:
        case "ls":
            entries, folders = stored_entries(cache), stored_folders(cache)
            if arguments.json:
                lists = {
                    "entries": [entry.to_json() for entry in entries],
                    "folders": [found.to_json() for found in folders],
                }
                print(json.dumps({"folder": str(cache.folder), **lists}, indent=2))
            else:
                size = (
                    sum(
                        [entry.num_bytes for entry in entries]
                        + [found.num_bytes for found in folders]
                    )
                    / 2**20
                )
                print(
                    "\n".join(
                        [
                            *_table(entries, folders),
                            *_failures(entries),
                            f"{len(entries)} entries, {size:.1f} MiB in {cache.folder}",
                        ]
                    )
                )
        case "clear":
            print(f"{clear(cache) / 2**20:.1f} MiB removed from {cache.folder}")
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


def _table(entries: Sequence[StoredEntry], folders: Sequence[StoredFolder]) -> Iterator[str]:
    if not entries and not folders:
        return
    rows = [("kind", "what", "compiler", "torch", "size", "age", "of models")]
    rows += [
        (
            entry.kind,
            entry.what if entry.failed is None else f"{entry.what}, as traced",
            entry.compiler,
            entry.torch,
            f"{entry.num_bytes / 1024:.0f} KiB",
            _age(entry.age),
            ", ".join(entry.models),
        )
        for entry in entries
    ]
    for found in folders:
        rows.append(
            (
                found.kind,
                f"{found.num_files} files",
                "",
                "",
                f"{found.num_bytes / 1024:.0f} KiB",
                _age(found.age),
                found.what,
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(6)]
    for row in rows:
        yield "  ".join(
            [*(text.ljust(width) for text, width in zip(row[:-1], widths, strict=True)), row[-1]]
        ).rstrip()


def _failures(entries: Sequence[StoredEntry]) -> Iterator[str]:
    for entry in entries:
        if entry.failed is not None:
            when = (
                "at the next start"
                if entry.transient
                else "with another compiler or torch, or after `piecework cache clear`"
            )
            yield (
                f"the piece of {entry.what} could not be compiled ({entry.failed}); it is tried "
                f"again {when}"
            )


def _age(seconds: float) -> str:
    unit, length = next(
        ((unit, length) for unit, length in _UNITS if seconds >= length), _UNITS[-1]
    )
    return f"{seconds // length:.0f} {unit}"
