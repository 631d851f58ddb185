"""Prints the figures of the house: sizes, helpers, imports between rooms, and the language.

python -m piecework.lab.house              # this checkout
python -m piecework.lab.house FOLDER ...   # other checkouts beside it
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

FLOORS = ("kernels", "compilation", "runtime", "server", "bench", "cli")
_CLOSURES = ("runtime/engine/scheduler.py", "server/openai/chat.py")
_TESTS = Path(__file__).parents[1] / "tests"
_PATH = re.compile(r"`(?:\w+/[\w./*-]*|[\w*]+\.(?:py|h|js)(?=[`:]))|\]\([\w./-]+\.md")
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m piecework.lab.house", description=__doc__)
    parser.add_argument("folders", nargs="*", type=Path, help="checkouts; default: this one")
    folders = parser.parse_args().folders or [Path(__file__).parents[1]]
    found = [measure(folder) for folder in folders]
    for name in dict.fromkeys(name for figures in found for name in figures):
        cells = (f"{figures[name]:>10,}" if name in figures else f"{'-':>10}" for figures in found)
        print(f"{name[:60]:<60}", *cells)


def measure(root: Path) -> dict[str, float]:
    """Return the figures of the product below `root` by their names."""
    files = {
        path.relative_to(root).as_posix(): path.read_text(encoding="utf-8")
        for floor in FLOORS
        for path in sorted((root / floor).rglob("*.py"))
    }
    trees = {path: ast.parse(text) for path, text in files.items()}
    lines = Counter[str]()
    for path, text in files.items():
        lines[path.partition("/")[0]] += text.count("\n")
    functions = [
        node.name
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, _FUNCTIONS)
    ]
    graph = imports(trees)
    return {
        "product lines (Python), without lab/": lines.total(),
        **{f"  {floor}/": lines[floor] for floor in FLOORS},
        "files": len(files),
        "functions": len(functions),
        "private functions, %": round(100 * sum(map(is_private, functions)) / len(functions), 1),
        "private functions that are used once": sum(map(used_once, trees.values())),
        "mutual pairs of folders": mutual_pairs(graph),
        "files in circles": sum(path in reached(graph, path) for path in graph),
        **{f"files that {path} reaches": len(reached(graph, path)) for path in _CLOSURES},
        "forbidden phrases, in code and documents": forbidden_phrases(root, files),
        **{f"to open for {row}": len(named) for row, named in files_to_open(root)},
    }


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def used_once(tree: ast.Module) -> int:
    """Number of private functions of a file that the file names once after their definition."""
    nodes = list(ast.walk(tree))
    used = Counter(
        node.id if isinstance(node, ast.Name) else node.attr
        for node in nodes
        if isinstance(node, ast.Name | ast.Attribute)
    )
    return sum(
        used[node.name] == 1
        for node in nodes
        if isinstance(node, _FUNCTIONS) and is_private(node.name)
    )


def forbidden_phrases(root: Path, files: Mapping[str, str]) -> int:
    """Number of faults that `tests/test_language.py` of this checkout finds below `root`."""
    sys.path.insert(0, str(_TESTS))
    from test_language import faults_of  # type: ignore[import-not-found]

    documents = {path.name: path.read_text() for path in (root / "docs").glob("*.md")}
    return sum(len(faults_of(path, text)) for path, text in {**files, **documents}.items())


def files_to_open(root: Path) -> Iterator[tuple[str, set[str]]]:
    """Yield the rows of "Where to add" in docs/architecture.md with the paths that each names."""
    text = (root / "docs" / "architecture.md").read_text()
    for line in text.partition("## Where to add\n")[2].partition("\n## ")[0].splitlines():
        cells = line.split("|")
        if len(cells) == 4 and cells[1].strip() not in ("what", "---"):
            yield cells[1].strip(), set(_PATH.findall(cells[2]))


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


if __name__ == "__main__":
    main()
