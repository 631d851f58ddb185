"""The rules of plain English that a machine can read, for all product code and documents."""

from __future__ import annotations

import ast
import io
import itertools
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest
from source_facts import ROOT, product_files

_BEGINNINGS = ("Of ", "Whom ", "Whose ", "Whatever ", "To be ", "For a number of ", "Who ")
_THINGS = "request|rank|page|engine|process|step|batch|model|layer|tensor|token|file|server|client"
_PEOPLE = re.compile(rf"\b(?:{_THINGS})s?,? (?:who|whom)\b", re.IGNORECASE)
_PHRASES = re.compile(r"\bso many times as many\b|\bas it were\b|\bgive[sn]? way\b|\bnobody\b")
_END = re.compile(r"[.:!?)`]$")


def faults_of(path: str, text: str) -> list[str]:
    """What the file at `path` says against the rules, a line each."""
    if path.endswith(".md"):
        return [
            f"{path}:{number} {fault}"
            for number, line in enumerate(text.splitlines(), 1)
            for fault in faults_in(line)
        ]
    tree = ast.parse(text)
    found = [
        f"{path}:{line} {fault}"
        for line, said in [*docstrings(tree), *comments(text)]
        for fault in faults_in(said)
    ]
    found += [
        f"{path}:{line} ends without a full stop: {said.splitlines()[-1]!r}"
        for line, said in docstrings(tree)
        if not _END.search(said.strip())
    ]
    return found + [
        f"{path}:{line} has a docstring below an attribute; write a comment on its line"
        for line in attribute_docstrings(tree)
    ]


def faults_in(text: str) -> Iterator[str]:
    if text.startswith(_BEGINNINGS):
        yield f"begins with a fragment: {text[:40]!r}"
    for pattern in (_PEOPLE, _PHRASES):
        for match in pattern.finditer(text):
            yield f"has {match[0]!r}"


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(
            node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        ) and (text := ast.get_docstring(node)):
            yield node.body[0].lineno, text


def comments(text: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("# ")


def attribute_docstrings(tree: ast.Module) -> Iterator[int]:
    """Lines of strings that stand behind an assignment."""
    for node in ast.walk(tree):
        for body in (getattr(node, "body", None), getattr(node, "orelse", None)):
            if isinstance(body, list):
                for before, after in itertools.pairwise(body):
                    if (
                        isinstance(before, ast.Assign | ast.AnnAssign | ast.AugAssign)
                        and isinstance(after, ast.Expr)
                        and isinstance(after.value, ast.Constant)
                        and isinstance(after.value.value, str)
                    ):
                        yield after.lineno


DOCUMENTS = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
FILES = [*product_files(ROOT), *(path.relative_to(ROOT).as_posix() for path in DOCUMENTS)]


@pytest.mark.parametrize("floor", sorted({path.partition("/")[0] for path in FILES}))
def test_a_floor_is_written_in_plain_english(floor: str) -> None:
    files = [path for path in FILES if path.partition("/")[0] == floor]
    assert [fault for path in files for fault in faults_of(path, (ROOT / path).read_text())] == []


@pytest.mark.parametrize(
    "text",
    [
        '"""Of a GPU; (0, 0) of what is none."""',
        '"""A page"""',
        'X = 1\n"""Below it."""',
        "def f():\n    # The request who asked.\n    pass",
        'def f():\n    self.x = 1\n    """Below it."""',
    ],
)
def test_a_fault_is_found(text: str, tmp_path: Path) -> None:
    assert faults_of("runtime/bad.py", text)
