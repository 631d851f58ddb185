"""Prints the figures of the house: sizes, helpers, imports between rooms, and the language.

python -m piecework.lab.house              # this checkout
python -m piecework.lab.house FOLDER ...   # other checkouts beside it
"""

from __future__ import annotations

import argparse
import ast
import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

FLOORS = ("kernels", "compilation", "runtime", "server", "bench", "cli")
_CLOSURES = ("runtime/engine/scheduler.py", "server/openai/chat.py")
_FRAGMENTS = ("Of ", "Whom ", "Whose ", "Whatever ", "To be ", "For a number of ", "Who ")


class Figures(NamedTuple):
    """The figures of one checkout, in the order in which they are printed."""

    lines: int
    files: int
    functions: int
    private_share: float
    mutual_pairs: int
    circular_files: int
    closures: tuple[int, ...]
    fragments: int
    attribute_docstrings: int


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m piecework.lab.house", description=__doc__)
    parser.add_argument("folders", nargs="*", type=Path, help="checkouts; default: this one")
    folders = parser.parse_args().folders or [Path(__file__).parents[1]]
    found = [measure(folder) for folder in folders]
    names = [
        "product lines (Python)",
        "files",
        "functions",
        "private functions, %",
        "mutual pairs of folders",
        "files in circles",
        *(f"files that {path} reaches" for path in _CLOSURES),
        "docstrings that begin with a fragment",
        "docstrings below an attribute",
    ]
    for number, name in enumerate(names):
        print(f"{name:<45}", *(f"{_flat(each)[number]:>10,}" for each in found))


def measure(root: Path) -> Figures:
    """Read every product file below `root`."""
    files = {
        path.relative_to(root).as_posix(): path.read_text(encoding="utf-8")
        for floor in FLOORS
        for path in sorted((root / floor).rglob("*.py"))
    }
    trees = {path: ast.parse(text) for path, text in files.items()}
    functions = [
        node.name
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    private = sum(name.startswith("_") and not name.startswith("__") for name in functions)
    graph = imports(trees)
    docstrings = [
        text
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and (text := ast.get_docstring(node))
    ]
    return Figures(
        lines=sum(text.count("\n") for text in files.values()),
        files=len(files),
        functions=len(functions),
        private_share=round(100 * private / len(functions), 1),
        mutual_pairs=mutual_pairs(graph),
        circular_files=sum(path in reached(graph, path) for path in graph),
        closures=tuple(len(reached(graph, path)) for path in _CLOSURES),
        fragments=sum(text.startswith(_FRAGMENTS) for text in docstrings),
        attribute_docstrings=sum(map(attribute_docstrings, trees.values())),
    )


def imports(trees: Mapping[str, ast.Module]) -> dict[str, set[str]]:
    """Map each file to the files that it imports, anywhere in its code."""
    modules = {path.removesuffix(".py").replace("/", "."): path for path in trees}
    graph: dict[str, set[str]] = {}
    for path, tree in trees.items():
        package = path.split("/")[:-1]
        names: list[str] = []
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                base = package[: len(package) - node.level + 1] if node.level else []
                module = ".".join([*base, *(node.module or "").split(".")]).strip(".")
                names += [module, *(f"{module}.{alias.name}".strip(".") for alias in node.names)]
        graph[path] = {modules[name] for name in names if name in modules} - {path}
    return graph


def mutual_pairs(graph: Mapping[str, Iterable[str]]) -> int:
    """Number of pairs of folders that import one another."""
    arrows = defaultdict(set)
    for path, targets in graph.items():
        for target in targets:
            arrows[path.rpartition("/")[0]].add(target.rpartition("/")[0])
    return sum(a < b and a in arrows[b] for a in list(arrows) for b in arrows[a] if b in arrows)


def reached(graph: Mapping[str, Iterable[str]], start: str) -> set[str]:
    """The files that `start` imports, directly or over others."""
    found: set[str] = set()
    to_visit = [start]
    while to_visit:
        new = set(graph.get(to_visit.pop(), ())) - found
        found |= new
        to_visit += new
    return found


def attribute_docstrings(tree: ast.Module) -> int:
    """Number of strings that stand below an assignment."""
    return sum(
        isinstance(before, ast.Assign | ast.AnnAssign)
        and isinstance(after, ast.Expr)
        and isinstance(after.value, ast.Constant)
        and isinstance(after.value.value, str)
        for node in ast.walk(tree)
        if isinstance(body := getattr(node, "body", None), list)
        for before, after in itertools.pairwise(body)
    )


def _flat(figures: Figures) -> list[float]:
    return [
        number for value in figures for number in (value if isinstance(value, tuple) else (value,))
    ]


if __name__ == "__main__":
    main()
