"""Fixtures of the measurements' tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from scripted_server import ScriptedServer, serve


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with serve(ScriptedServer()) as running:
        yield running


@pytest.fixture
def nobody() -> str:
    """A URL of this machine at which nothing listens."""
    with serve(ScriptedServer()) as gone:
        return gone.url
