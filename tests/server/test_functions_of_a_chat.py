"""The number of functions that a reader follows from a streamed chat's request to its answer."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import httpx
import pytest
from http_fixtures import MODEL, events

import piecework

MOST = 119
SERVER = str(Path(piecework.__file__).parent / "server")


async def test_a_streamed_chat_calls_few_functions_of_the_server(
    client: httpx.AsyncClient, record_property: pytest.RecordProperty
) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "stream": True}
    called: set[str] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        # Comprehensions have names in angle brackets.
        if event == "call" and SERVER in code.co_filename and not code.co_name.startswith("<"):
            called.add(f"{code.co_filename.partition(SERVER)[2]} {code.co_qualname}")

    assert events(await client.post("/v1/chat/completions", json=body))  # Fill all caches.
    sys.setprofile(note)
    try:
        answer = await client.post("/v1/chat/completions", json=body)
    finally:
        sys.setprofile(None)
    assert len(events(answer)) > 2
    record_property("functions", len(called))
    assert len(called) <= MOST, "\n".join(sorted(called))
