"""docs/models.md lists the models that there are."""

from __future__ import annotations

from piecework.lab.models_table import DOCUMENT, with_table


def test_the_document_has_the_table_of_now() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert with_table(text) == text, "run: python -m piecework.lab.models_table --write"
