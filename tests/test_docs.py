"""What the documents say of the code is there: files, the functions in them, links."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "lab").glob("*.md")]
)
NAMED = re.compile(r"`((?:[a-z_]+/)+[a-z_0-9]+\.(?:py|cpp|h|md|json))(?::([\w.]+))?`")
LINK = re.compile(r"\]\((?!https?:)([^)#]+)")


def definitions(path: Path) -> set[str]:
    """Names of a file's functions and classes, those of methods behind their class's."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = [
                own for own in node.body if isinstance(own, ast.FunctionDef | ast.AsyncFunctionDef)
            ]
            found |= {f"{node.name}.{method.name}" for method in methods}
    return found


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_what_is_named_exists(document: Path) -> None:
    text = " ".join(document.read_text().split())
    missing = [link for link in LINK.findall(text) if not (document.parent / link).exists()]
    for file, name in NAMED.findall(text):
        if not (ROOT / file).exists():
            missing.append(file)
        elif name and name not in definitions(ROOT / file):
            missing.append(f"{file}:{name}")
    assert missing == []
