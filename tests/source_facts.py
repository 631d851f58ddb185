"""What tests of the house rules read of the source files."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
ROOT_PACKAGE = ""
NOT_PACKAGED = {"lab", "tests", "docs", "docker", "build", "dist"}


def python_files(root: Path) -> list[str]:
    """Paths below `root`, without those in hidden or cached folders."""
    found = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if not name.startswith((".", "__pycache__"))]
        found += [
            (Path(folder) / name).relative_to(root).as_posix()
            for name in names
            if name.endswith(".py")
        ]
    return sorted(found)


def product_files(root: Path) -> list[str]:
    return [path for path in python_files(root) if path.split("/")[0] not in NOT_PACKAGED]


def floor_of(path: str) -> str:
    return path.split("/")[0] if "/" in path else ROOT_PACKAGE


class Facts(NamedTuple):
    """What the rules ask of a file. Its tree is not kept: all trees together are hundreds of MB."""

    lines: int
    docstring: bool
    imports: list[tuple[int, str]]
    attributes: set[str]
    functions: list[tuple[int, str, int]]
    """First line, name and number of lines."""


def facts(root: Path, path: str) -> Facts:
    return facts_of((root / path).read_text(), path)


@cache
def facts_of(text: str, path: str) -> Facts:
    """Of each text once, for several rules ask."""
    tree = ast.parse(text, filename=path)
    nodes = list(ast.walk(tree))
    return Facts(
        lines=len(text.splitlines()),
        docstring=bool(ast.get_docstring(tree)),
        imports=list(imported_modules(nodes, path)),
        attributes={name_of(node) for node in nodes if isinstance(node, ast.Attribute)},
        functions=[
            (node.lineno, node.name, (node.end_lineno or node.lineno) - node.lineno + 1)
            for node in nodes
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        ],
    )


def name_of(node: ast.expr) -> str:
    """`a.b.c` as it is written; empty where it begins with no name."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(names)]) if isinstance(node, ast.Name) else ""


def imported_modules(nodes: list[ast.AST], path: str) -> Iterator[tuple[int, str]]:
    """(line, absolute module name) of every import anywhere in the file: under TYPE_CHECKING and in
    functions too.

    `from a import b` yields `a.b`, which is either a module or a name in one. Relative imports are
    resolved to `piecework...`.
    """
    package = ["piecework", *path.split("/")[:-1]]
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = [*base, *(node.module.split(".") if node.module else [])]
            yield from ((node.lineno, ".".join([*module, alias.name])) for alias in node.names)
