"""The rooms of the house: imports between folders, and between files, go one way only."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest
from source_facts import ROOT, facts, product_files

VERSION = "version.py"  # The ground of all floors, in the root, where installers read it.
MOST_REACHED = {"runtime/engine/scheduler.py": 15, "server/openai/chat.py": 120}  # Files.


def imports(root: Path) -> dict[str, set[str]]:
    """Map each product file to the product files that it imports, anywhere in its code."""
    files = product_files(root)
    by_module = {
        ".".join(["piecework", *path.removesuffix(".py").split("/")]): path for path in files
    }
    return {
        path: {
            by_module[found]
            for _, name in facts(root, path).imports
            for found in (name, name.rpartition(".")[0])
            if found in by_module
        }
        - {path}
        for path in files
    }


def mutual_rooms(graph: Mapping[str, Iterable[str]]) -> list[str]:
    """Pairs of folders whose files import one another, a folder and its parent included."""
    arrows = defaultdict(list)
    for path, targets in graph.items():
        for target in set(targets) - {VERSION}:
            arrows[path.rpartition("/")[0], target.rpartition("/")[0]].append((path, target))
    return [
        f"{a} and {b} import one another: {arrows[a, b][0]}, {arrows[b, a][0]}"
        for a, b in sorted(arrows)
        if a < b and (b, a) in arrows
    ]


def reached(graph: Mapping[str, Iterable[str]], start: str) -> set[str]:
    """The files that `start` imports, directly or over others."""
    found: set[str] = set()
    to_visit = [start]
    while to_visit:
        new = set(graph.get(to_visit.pop(), ())) - found
        found |= new
        to_visit += new
    return found


def circles(graph: Mapping[str, Iterable[str]]) -> list[str]:
    """Files that import themselves over others."""
    return sorted(path for path in graph if path in reached(graph, path))


@pytest.fixture(scope="module")
def house() -> dict[str, set[str]]:
    graph = imports(ROOT)
    assert sum(map(len, graph.values())) > 1000, "most imports of the product were not found"
    return graph


def test_no_two_rooms_import_one_another(house: dict[str, set[str]]) -> None:
    assert mutual_rooms(house) == []


def test_the_version_imports_nothing(house: dict[str, set[str]]) -> None:
    assert house[VERSION] == set()


def test_no_file_imports_itself_over_others(house: dict[str, set[str]]) -> None:
    assert circles(house) == []


@pytest.mark.parametrize("path", MOST_REACHED)
def test_a_file_reaches_few_others(house: dict[str, set[str]], path: str) -> None:
    assert len(reached(house, path)) <= MOST_REACHED[path]


def test_a_mutual_pair_and_a_circle_are_found(tmp_path: Path) -> None:
    for path, text in {
        "server/app.py": "from .openai import chat\n",
        "server/openai/chat.py": "def f():\n    from ..errors import ApiError\n",
        "server/errors.py": "",
        "runtime/a.py": "if TYPE_CHECKING:\n    from .b import B\n",
        "runtime/b.py": "from piecework.runtime import a\n",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    graph = imports(tmp_path)
    (pair,) = mutual_rooms(graph)
    assert pair.startswith("server and server/openai import one another")
    assert circles(graph) == ["runtime/a.py", "runtime/b.py"]
    assert reached(graph, "server/app.py") == {"server/openai/chat.py", "server/errors.py"}
