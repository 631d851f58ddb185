"""When an engine says that it lives."""

from __future__ import annotations

import pytest

from piecework.runtime.core.messages import EngineAlive
from piecework.runtime.process import heartbeat
from piecework.runtime.process.heartbeat import BEAT_MS, Heartbeat


def test_it_is_said_each_second_and_when_something_else_is_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr(heartbeat.time, "monotonic", lambda: now)
    sent: list[EngineAlive] = []
    heart = Heartbeat(sent.append)
    heart.beat("computing")
    heart.beat("computing")
    heart.beat_again()
    assert sent == [EngineAlive(doing="computing")]
    heart.beat("computing", may_build=True)
    heart.beat_again()
    heart.beat("waiting")
    assert sent[1:] == [
        EngineAlive(doing="computing", may_build=True),
        EngineAlive(doing="waiting"),
    ]
    now += BEAT_MS / 1000
    heart.beat("waiting")
    heart.beat("waiting")
    assert sent[3:] == [EngineAlive(doing="waiting")]
