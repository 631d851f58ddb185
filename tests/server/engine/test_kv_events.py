"""What a real engine process publishes of its prefix cache."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
import zmq
from engine_clients import collect, config, params, request, until

from piecework.runtime.tokenizer.tokenizer import load_tokenizer
from piecework.server.engine.client import EngineClient


@pytest.mark.slow
async def test_a_subscriber_knows_what_is_cached(model: str, tmp_path: Path) -> None:
    """Behind evictions, by what it is sent again, and nothing once all is flushed."""
    told = {"endpoint": f"ipc://{tmp_path}/pub", "replay_endpoint": f"ipc://{tmp_path}/replay"}
    settings = config(model, max_total_tokens=256, kv_events_config=json.dumps(told))
    client = EngineClient(settings, load_tokenizer(model), log_level="warning")
    asked = zmq.Context.instance().socket(zmq.DEALER)
    asked.setsockopt(zmq.RCVTIMEO, 5000)
    asked.connect(told["replay_endpoint"])

    def cached() -> set[int]:
        found: set[int] = set()
        asked.send_multipart((b"", bytes(8)))
        while (frames := asked.recv_multipart())[2]:
            for event in msgspec.msgpack.decode(frames[2])[1]:
                match event["type"]:
                    case "BlockStored":
                        found |= set(event["block_hashes"])
                    case "BlockRemoved":
                        found -= set(event["block_hashes"])
                    case _:
                        found.clear()
        return found

    await client.start()
    try:
        assert await client.wait_ready(), client.failure
        for number in range(8):
            await collect(client, request(f"r{number}", [number + 1] * 50, params(1, 20)))
        await until(lambda: client.stats.running_requests == 0)
        await client.abort(None)
        assert client.info is not None and client.stats.kv_tokens_cached > 0
        page_size = client.info.page_size
        await until(lambda: len(cached()) * page_size == client.stats.kv_tokens_cached)
        await client.flush_cache()
        await until(lambda: cached() == set())
    finally:
        asked.close(linger=0)
        await client.stop()
