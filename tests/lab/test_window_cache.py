"""What windows save: no less than the pages of all tokens, and as docs/models.md says."""

from __future__ import annotations

from pathlib import Path

import pytest

from piecework.lab.window_cache import SHAPES, room

MODELS = (Path(__file__).parents[2] / "docs" / "models.md").read_text()


@pytest.mark.parametrize("name", SHAPES)
def test_the_manual_has_the_figures(name: str) -> None:
    before, after = (
        room(SHAPES[name], 32_768, 40 << 30, windows=windows) for windows in (False, True)
    )
    assert before.token_bytes > after.token_bytes and before.texts < after.texts
    row = f"{before.token_bytes:,.0f} | {after.token_bytes:,.0f} | {before.texts} | {after.texts} |"
    assert row in MODELS
