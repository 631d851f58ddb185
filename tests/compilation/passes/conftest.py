"""No kernels are registered, whatever earlier engines have: a test says which there are."""

import pytest

from piecework.kernels import ops


@pytest.fixture(autouse=True)
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "_versions", {})
