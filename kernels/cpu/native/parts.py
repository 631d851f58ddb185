"""The parts of the kernels: each is a library of its own, compiled when a model needs it."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

SOURCES = Path(__file__).parent

SHIPPED = "shipped"  # Folder of the libraries that come with the package.

CORE = "core"  # What every model needs.
RECURRENT = "recurrent"  # Layers with a recurrent state.
_RECURRENT_FILES = ("recurrent", "recurrent_prompts", "recurrent_scan")
_FORMAT_FILE = "format"  # Compiled once for each block format of GGUF files.
_LISTS = ("block", "formats")  # Headers in the folder of the formats that are no format.
# Files that take the longest to compile, longest first.
_LONGEST = ("step", "recurrent_prompts", "attention_bytes", "attention", _FORMAT_FILE)


class Source(NamedTuple):
    """A file to compile. `flags` follow those of all files."""

    path: Path
    flags: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        defined = (each.partition("=")[2] for each in self.flags)
        return "-".join((self.path.stem, *filter(None, defined)))

    @property
    def place(self) -> tuple[int, int]:
        """Sort key that puts long files first, so that no thread compiles one at the end."""
        name = self.path.stem
        is_long = name in _LONGEST
        return _LONGEST.index(name) if is_long else len(_LONGEST), -self.path.stat().st_size


def formats() -> list[str]:
    """Return the names of all block formats, which are parts. Each has a header of its name."""
    headers = (path.stem for path in (SOURCES / "gguf").glob("*.h"))
    return sorted(name.upper() for name in headers if name not in _LISTS)


def all_parts() -> list[str]:
    return [CORE, RECURRENT, *formats()]


def sources_of(part: str) -> tuple[Source, ...]:
    """Return the files of a part."""
    if part == RECURRENT:
        return tuple(Source(SOURCES / f"{name}.cpp") for name in _RECURRENT_FILES)
    if part != CORE:
        return (Source(SOURCES / f"{_FORMAT_FILE}.cpp", (f"-DPIECEWORK_FORMAT={part}",)),)
    others = (*_RECURRENT_FILES, _FORMAT_FILE)
    return tuple(Source(path) for path in sorted(SOURCES.glob("*.cpp")) if path.stem not in others)


def all_sources() -> list[tuple[str, str]]:
    """Return the name and content of every file, for the hash that names a library.

    Builds write headers of their own below `SHIPPED`.
    """
    paths = [path for path in SOURCES.rglob("*") if path.suffix in (".cpp", ".h")]
    names = [path.relative_to(SOURCES) for path in paths]
    return sorted(
        (str(name), path.read_text())
        for name, path in zip(names, paths, strict=True)
        if name.parts[0] != SHIPPED
    )
