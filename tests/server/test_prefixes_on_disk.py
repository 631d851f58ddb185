"""Prefixes on disk, as clients of real servers see them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
from server_process import ServerProcess, ready
from tiny_models import make_tiny_model

PROMPT = [1 + (7 * i) % 300 for i in range(200)]


def ask(server: ServerProcess) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Return the text, and what `/v1/completions` and `/generate` say of cached tokens."""
    body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()
    native = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 1}}
    meta = httpx.post(f"{server.url}/generate", json=native, timeout=60).json()["meta_info"]
    return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"], meta


def test_a_server_finds_the_prefixes_of_one_that_ended_and_says_where(tmp_path: Path) -> None:
    model = str(make_tiny_model(tmp_path / "model", "llama"))
    flags = ("--kv-disk", f"{tmp_path / 'kv'}:64M", "--max-total-tokens", "4096")
    with ready(model, *flags) as first:
        text, details, _ = ask(first)
        assert details == {"cached_tokens": 0}
    with ready(model, *flags) as second:
        again, details, meta = ask(second)
    assert again == text
    cached = details["cached_tokens"]
    assert cached >= 184
    assert details["cached_tokens_details"] == {"device": 0, "host": 0, "storage": cached}
    # The KV cache has them now.
    assert meta["cached_tokens"] >= cached and "cached_tokens_details" not in meta
