"""A client that comes before the engine is ready: it learns what the engine does and when to try
again, and succeeds by the retries of OpenAI's client.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from native_variants import needs_kernels
from server_process import serve
from tiny_models import make_tiny_model
from waiting_compiler import use_waiting_compiler

pytestmark = needs_kernels


def _starting(server: Any) -> httpx.Response:
    """The answer of /health while the engine compiles its kernels."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            answer = server.client.get("/health")
        except httpx.TransportError:
            answer = None
        if answer is not None and "compiling" in answer.text:
            return answer
        time.sleep(0.05)
    raise AssertionError("the server does not say that it compiles")


def test_a_client_that_retries_as_told_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    openai = pytest.importorskip("openai")
    use_waiting_compiler(tmp_path, monkeypatch)
    with serve(str(make_tiny_model(tmp_path / "model"))) as server:
        answer = _starting(server)
        detail = answer.json()["error"]
        assert (answer.status_code, detail["code"]) == (503, "engine_unavailable")
        assert detail["phase"].startswith("compiling CPU kernels")
        assert 5 <= detail["retry_after"] <= 60
        assert answer.headers["retry-after"] == str(detail["retry_after"])
        asked = {"prompt": "The quick", "max_tokens": 3}
        refused = server.client.post("/v1/completions", json=asked)
        assert refused.status_code == 503 and "compiling" in refused.json()["error"]["message"]
        messages = server.client.post(
            "/v1/messages", json={"messages": [{"role": "user", "content": "x"}], "max_tokens": 3}
        )
        assert messages.json()["error"]["retry_after"] >= 5
        waits: list[float] = []
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")

        def wait(seconds: float, sleep: Callable[[float], None] = time.sleep) -> None:
            if seconds < 1:  # Not the client's.
                return sleep(seconds)
            waits.append(seconds)
            (tmp_path / "go").touch()
            server.wait_ready()

        monkeypatch.setattr(openai._base_client.time, "sleep", wait)
        made = client.completions.create(model="tiny", **asked)
        assert made.usage.completion_tokens == 3
        assert len(waits) == 1 and 5 <= waits[0] <= 60
