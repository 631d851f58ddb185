"""A real server as its operators see it: its log, its traces and its profiles tell one story."""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path

import pytest
from otlp_receiver import attributes, http_receiver
from server_process import ready
from tiny_models import make_tiny_model

FLAGS = ["--dtype", "float32", "--max-total-tokens", "2048", "--num-threads", "1"]
QUIET = ["--served-model-name", "tiny", "--disable-piecewise-cuda-graph"]


@pytest.mark.slow
def test_a_server_s_log_traces_and_profiles(tmp_path: Path) -> None:
    model, traces = str(make_tiny_model(tmp_path, "qwen3")), tmp_path / "traces"
    with http_receiver() as receiver:
        told = ["--log-format", "json", "--log-requests", "--otlp-traces-endpoint", receiver.url]
        flags = [*QUIET, *told, "--profile-dir", str(traces)]
        with ready(model, *flags, common=FLAGS) as server:
            paths = server.client.post("/start_profile", json={"num_steps": 3}).json()["paths"]
            body = {"prompt": [5, 6, 7] * 20, "max_tokens": 16, "ignore_eos": True}
            for _ in range(2):
                answer = server.client.post("/v1/completions", json=body)
                assert answer.status_code == 200, answer.text
            # Three steps have ended it.
            assert server.client.post("/stop_profile").status_code == 400
            end = time.monotonic() + 20
            while not Path(paths[0]).exists():
                assert time.monotonic() < end, "no profile was written"
                time.sleep(0.05)
            metrics = server.client.get("/metrics").text
            server.process.terminate()
            code, out, err = server.finish()
        assert code == 0
    with gzip.open(paths[0]) as file:
        assert json.load(file)["traceEvents"]
    events = [json.loads(line) for line in (out + err).splitlines() if line]
    assert {event["pid"] for event in events} > {server.process.pid}, "the engine logs too"
    lines = [event for event in events if event["logger"] == "piecework.requests"]
    posted = [line for line in lines if line["path"] == "/v1/completions"]
    assert [line["completion_tokens"] for line in posted] == [16, 16]
    assert posted[1]["cached_tokens"] > 0
    spans = receiver.named("text_completion tiny")
    assert len(spans) == 2
    assert [attributes(span)["gen_ai.request.id"] for span in spans] == [
        line["request_id"] for line in posted
    ]
    for span, line in zip(spans, posted, strict=True):
        children = [one for one in receiver.spans if one.parent_span_id == span.span_id]
        assert [one.name for one in children] == ["queue", "prefill", "decode"]
        begins = [one.start_time_unix_nano for one in children]
        assert begins == sorted(begins) and begins[0] >= span.start_time_unix_nano
        assert children[-1].end_time_unix_nano <= span.end_time_unix_nano
        queue = attributes(span)["gen_ai.latency.time_in_queue"]
        assert queue == pytest.approx(line["queue_seconds"], abs=1e-5)
    assert 'piecework:queue_time_seconds_count{model_name="tiny"} 2.0' in metrics
