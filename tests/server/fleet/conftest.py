"""Fixtures of the tests of several models in one server."""

from __future__ import annotations

from pathlib import Path

import pytest
from fleet_fixtures import ScriptedFleet

from piecework.server.fleet import fleet as fleet_module


@pytest.fixture
def scripted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ScriptedFleet:
    monkeypatch.setattr(fleet_module, "_SWITCH_SECONDS", 0.05)
    monkeypatch.setattr(fleet_module, "_CHECK_SECONDS", 0.01)
    return ScriptedFleet(tmp_path, monkeypatch)
