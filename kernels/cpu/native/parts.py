"""The parts of the kernels: each is a library of its own, compiled when a model needs it."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import NamedTuple

SOURCES = Path(__file__).parent

SHIPPED = "shipped"  # Folder of the libraries that come with the package.

CORE = "core"  # What every model needs.
RECURRENT = "recurrent"  # Layers with a recurrent state.
RANKS = "ranks"  # Collectives of ranks that share memory.
# Attention over KV caches of these kinds, by the values of `--kv-cache-dtype`, and of models in
# float32.
CACHES = ("fp8_e4m3", "fp8_e5m2", "int8", "float32")
_FILES = {
    RECURRENT: ("recurrent", "recurrent_prompts", "recurrent_scan"),
    RANKS: ("collectives", "reduce_norm"),
}
# Files of these parts that the core has too. Libraries do not share functions.
_SHARED_FILES = {RANKS: ("shared",), **dict.fromkeys(CACHES, ("attention_tiles",))}
_CACHE_FILE = "attention_cache"  # Compiled once for each of `CACHES`.
_FORMAT_FILE = "format"  # Compiled once for each block format of GGUF files.
_LISTS = ("block", "formats")  # Headers in the folder of the formats that are no format.
# Files that take the longest to compile, longest first.
_LONGEST = ("step", _FORMAT_FILE, "recurrent_prompts", _CACHE_FILE, "attention")


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
    return [CORE, *_FILES, *CACHES, *formats()]


def sources_of(part: str) -> tuple[Source, ...]:
    """Return the files of a part."""
    if part == CORE:
        others = {*chain.from_iterable(_FILES.values()), _CACHE_FILE, _FORMAT_FILE}
        paths = sorted(SOURCES.glob("*.cpp"))
        return tuple(Source(path) for path in paths if path.stem not in others)
    if part in CACHES:
        own = [_source(_CACHE_FILE, f"-DPIECEWORK_CACHE={part}")]
    elif part in _FILES:
        own = [_source(name) for name in _FILES[part]]
    else:
        own = [_source(_FORMAT_FILE, f"-DPIECEWORK_FORMAT={part}")]
    return (*own, *(_source(name) for name in _SHARED_FILES.get(part, ())))


def _source(name: str, *flags: str) -> Source:
    return Source(SOURCES / f"{name}.cpp", flags)


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
