"""The table of docs/models.md, made of what the files of `runtime/models/` say:

python -m piecework.lab.models_table --write
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..runtime.config.model_registry import ModelNames, find_encoders, find_models

_ROOT = Path(__file__).parents[1]
DOCUMENT = _ROOT / "docs" / "models.md"
BEGIN, END = "<!-- made by lab/models_table.py -->", "<!-- to here -->"


def table() -> str:
    """Markdown, a row for each architecture: decoders, then encoders."""
    rows = ["| in config.json | in a .gguf file | what it is |", "|---|---|---|"]
    rows += [_row(f"`{names.architecture}`", names) for names in find_models()]
    rows += [_row(f"`{names.architecture}...`", names) for names in find_encoders()]
    return "\n".join(rows)


def _row(name: str, names: ModelNames) -> str:
    gguf = ", ".join(f"`{each}`" for each in (names.gguf, names.also_gguf) if each)
    return f"| {name} | {gguf} | {' '.join(_first_lines(names.module))} |"


def _first_lines(module: str) -> Iterator[str]:
    """Of the module's docstring, the first paragraph. The file is read and not imported."""
    path = _ROOT / "runtime" / "models" / f"{module}.py"
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    for line in text.splitlines():
        if not line:
            return
        yield line


def with_table(text: str) -> str:
    """The document with the table of now. Raises `ValueError` where it has no place for it."""
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{DOCUMENT} has no lines {BEGIN} and {END} around a table")
    return f"{head}{BEGIN}\n\n{table()}\n\n{END}{tail}"


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="into docs/models.md")
    if parser.parse_args(argv).write:
        DOCUMENT.write_text(with_table(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print(table())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
