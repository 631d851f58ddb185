"""Fixtures of the lab's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from scripted_server import ScriptedServer, serve


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with serve(ScriptedServer()) as running:
        yield running
