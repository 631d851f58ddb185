"""Responses of a server that is killed, is stopped, and starts again; one whose engine dies."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from server_process import NO_PIECES, ServerProcess, ready

pytestmark = pytest.mark.slow
FLAGS = ["--num-threads", "1", "--max-total-tokens", "8192", "--log-level", "warning", NO_PIECES]


def create(server: ServerProcess, **asked: Any) -> dict[str, Any]:
    answer = server.client.post(
        "/v1/responses", json={"model": "default", "input": "Hi", "temperature": 0, **asked}
    )
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    return told


def until(
    server: ServerProcess, response_id: str, fits: Callable[[dict[str, Any]], bool]
) -> dict[str, Any]:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        told: dict[str, Any] = server.client.get(f"/v1/responses/{response_id}").json()
        if fits(told):
            return told
        time.sleep(0.05)
    raise AssertionError(told)


def test_what_becomes_of_responses(tmp_path: Path) -> None:
    flags = [*FLAGS, "--responses-store", str(tmp_path / "kept.sqlite"), "--drain-timeout", "0.2"]
    long: dict[str, Any] = {"background": True, "ignore_eos": True}
    with ready("smollm2-135m", common=flags) as server:
        done = create(server, max_output_tokens=5)
        crossing = create(server, max_output_tokens=60, **long)
        until(server, crossing["id"], lambda told: told["status"] == "in_progress")
        server.engine().kill()
        crossed = until(server, crossing["id"], lambda told: told["usage"] is not None)
        assert [crossed["status"], crossed["usage"]["output_tokens"]] == ["incomplete", 60]
        assert crossed["output"][0]["content"][0]["text"]
        lost = create(server, **long)
        until(server, lost["id"], lambda told: told["status"] == "in_progress")
        server.process.kill()
    with ready("smollm2-135m", common=flags) as server:
        assert until(server, done["id"], bool) == done
        assert until(server, lost["id"], bool)["status"] == "failed"
        stopped = create(server, previous_response_id=done["id"], **long)
        until(server, stopped["id"], lambda told: told["output"] != [])
        server.process.send_signal(signal.SIGTERM)
        assert server.finish()[0] == 0
    with ready("smollm2-135m", common=flags) as server:
        told = until(server, stopped["id"], bool)
        assert told["status"] == "cancelled" and told["output"][0]["status"] == "incomplete"
        items = server.client.get(f"/v1/responses/{stopped['id']}/input_items").json()["data"]
        assert [item["role"] for item in items] == ["user", "assistant", "user"]
