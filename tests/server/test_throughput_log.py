"""The line of throughput: while there is traffic, with what was done since the last one."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
from http_fixtures import client_of, make_app
from scripted_engine import ScriptedEngine

from piecework.server.serving.throughput_log import ThroughputLog


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [one.__dict__["fields"] for one in caplog.records if one.name == "piecework.throughput"]


async def test_a_line_tells_what_was_done_since_the_last_and_none_is_written_without_traffic(
    scripted: ScriptedEngine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "piecework")
    app = make_app(scripted)
    log: ThroughputLog = app.state.throughput
    async with client_of(app) as client:
        log.log()
        (busy,) = lines(caplog)
        assert (busy["running"], busy["waiting"]) == (3, 2)
        assert (busy["generation_tokens_per_second"], busy["cache_hit_rate"]) == (0, None)
        assert busy["cache_usage"] == 0.25
        scripted.stats = replace(scripted.stats, running_requests=0, queued_requests=0)
        log.log()
        assert len(lines(caplog)) == 1
        await client.post("/v1/completions", json={"prompt": [5] * 8, "max_tokens": 4})
        log.log()
        log.log()
    _, after = lines(caplog)
    assert after["generation_tokens_per_second"] > 0 and after["cache_hit_rate"] == 0.5
    speeds = after["prompt_tokens_per_second"], after["generation_tokens_per_second"]
    # Both are rounded to a tenth, which counts where a slow machine makes them small.
    assert speeds[0] == pytest.approx(2 * speeds[1], abs=0.16)


def test_the_lines_may_be_turned_off(scripted: ScriptedEngine) -> None:
    assert not hasattr(make_app(scripted, log_stats_interval=0.0).state, "throughput")
