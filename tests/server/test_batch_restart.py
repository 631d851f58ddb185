"""A batch goes on where the server that was killed left it."""

from __future__ import annotations

import json
import time
from pathlib import Path

import openai
import pytest
from server_process import ready
from tiny_models import make_tiny_model


@pytest.mark.slow
def test_a_batch_outlives_the_server(tmp_path: Path) -> None:
    model = str(make_tiny_model(tmp_path / "model", num_hidden_layers=1))
    flags = ["--batch-dir", str(tmp_path / "batches"), "--max-running-requests", "4"]
    url = "/v1/completions"
    bodies = [{"prompt": [5, number], "max_tokens": 40, "seed": number} for number in range(1, 200)]
    lines = [
        {"custom_id": str(number), "method": "POST", "url": url, "body": body}
        for number, body in enumerate(bodies)
    ]
    with ready(model, *flags) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        content = "\n".join(map(json.dumps, lines)).encode()
        file = client.files.create(file=("in.jsonl", content), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint=url, completion_window="24h")
        end = time.monotonic() + 60
        while not (batch.request_counts and batch.request_counts.completed > 5):
            assert time.monotonic() < end and batch.status != "completed"
            batch = client.batches.retrieve(batch.id)
        server.process.kill()
        server.process.wait(20)
    with ready(model, *flags) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        while batch.status != "completed":
            assert time.monotonic() < end
            time.sleep(0.05)
            batch = client.batches.retrieve(batch.id)
        assert batch.output_file_id is not None
        answers = map(json.loads, client.files.content(batch.output_file_id).text.splitlines())
        assert sorted(int(answer["custom_id"]) for answer in answers) == list(range(len(lines)))
