"""What the tests of this folder share."""

from __future__ import annotations

import pytest

from piecework.compilation import split_ops


@pytest.fixture(autouse=True)
def own_split_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    """No split ops of other tests' toy models: a compiling process does not know them, and a cut forward is kept by what there is."""
    own = {name: run for name, run in split_ops._implementations.items() if name.startswith("piecework::")}
    monkeypatch.setattr(split_ops, "_implementations", own)
