"""Traces as a real collector gets them."""

from __future__ import annotations

import ast
import json
import logging
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from http_fixtures import MODEL, client_of, make_app
from otlp_receiver import Received, attributes, grpc_receiver, http_receiver
from scripted_engine import REPLY, ScriptedEngine

from piecework.server.observability.otlp import read_endpoint

ROOT = Path(__file__).parents[2]
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CHAT = {"messages": [{"role": "user", "content": "How is Tuesday?"}], "max_tokens": 4}
CAPTURE = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"


@pytest.fixture
def receiver() -> Iterator[Received]:
    with http_receiver() as received:
        yield received


@pytest.fixture
def started(scripted: ScriptedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scripted engine tells when each request began, as the real one's messages do."""
    add = scripted.add_request

    def began(request: Any) -> None:
        add(request)
        request.started = time.monotonic()

    monkeypatch.setattr(scripted, "add_request", began)


async def traced(app: FastAPI, path: str, body: Any, headers: Any = None) -> None:
    """Ask, and wait until the spans are sent."""
    async with client_of(app) as client:
        await client.post(path, json=body, headers=headers)
    await app.state.tracer.close()


async def test_a_request_is_a_span_of_its_client_s_trace_and_its_phases_are_within(
    scripted: ScriptedEngine, receiver: Received, started: None
) -> None:
    app = make_app(scripted, otlp_traces_endpoint=receiver.url)
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1"}
    await traced(app, "/v1/chat/completions", CHAT | {"temperature": 0.5, "n": 2}, headers)
    (server,) = receiver.named(f"chat {MODEL}")
    assert (server.trace_id.hex(), server.parent_span_id.hex()) == (TRACE, PARENT)
    assert server.trace_state == "vendor=1"
    assert receiver.resource["service.name"] == "piecework"
    told = attributes(server)
    expected = {
        "gen_ai.operation.name": "chat", "gen_ai.request.model": MODEL,
        "gen_ai.request.temperature": 0.5, "gen_ai.request.max_tokens": 4,
        "gen_ai.response.finish_reasons": ["length", "length"],
        "gen_ai.usage.output_tokens": 8, "http.response.status_code": 200,
    }  # fmt: skip
    assert {name: told[name] for name in expected} == expected
    assert told["gen_ai.response.id"].startswith("chatcmpl-")
    prompt = len(scripted.requests[0].prompt_ids)
    assert told["gen_ai.usage.input_tokens"] == prompt
    assert told["gen_ai.usage.cache_read.input_tokens"] == prompt // 2
    assert "Tuesday" not in str(receiver.spans)
    for sequence in (0, 1):
        phases = [
            span
            for span in receiver.spans
            if attributes(span).get("piecework.sequence") == sequence
        ]
        assert [span.name for span in phases] == ["queue", "prefill", "decode"]
        assert {span.parent_span_id for span in phases} == {server.span_id}
        moments = [phases[0].start_time_unix_nano]
        for span in phases:
            assert span.start_time_unix_nano == moments[-1] <= span.end_time_unix_nano
            moments.append(span.end_time_unix_nano)
        assert server.start_time_unix_nano <= moments[0]
        assert moments[-1] <= server.end_time_unix_nano
    seconds = (server.end_time_unix_nano - server.start_time_unix_nano) / 1e9
    assert told["gen_ai.latency.e2e"] == pytest.approx(seconds, abs=1e-6)
    inside = [told[f"gen_ai.latency.time_in_model_{name}"] for name in ("prefill", "decode")]
    assert told["gen_ai.latency.time_in_model_inference"] == pytest.approx(sum(inside))


async def test_over_grpc(scripted: ScriptedEngine) -> None:
    with grpc_receiver() as receiver:
        app = make_app(scripted, otlp_traces_endpoint=receiver.url)
        await traced(app, "/v1/completions", {"prompt": [5], "max_tokens": 1})
    assert [span.name for span in receiver.spans if not span.parent_span_id] == [
        f"text_completion {MODEL}"
    ]


async def test_what_is_said_is_in_spans_only_where_the_environment_says_so(
    scripted: ScriptedEngine, receiver: Received, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CAPTURE, "true")
    app = make_app(scripted, otlp_traces_endpoint=receiver.url)
    await traced(app, "/v1/chat/completions", CHAT | {"max_tokens": 200})
    told = attributes(receiver.named(f"chat {MODEL}")[0])
    (asked,) = json.loads(told["gen_ai.input.messages"])
    (answer,) = json.loads(told["gen_ai.output.messages"])
    assert "How is Tuesday?" in asked["parts"][0]["content"]
    assert answer["parts"][0]["content"].startswith(REPLY)
    assert (asked["role"], answer["role"]) == ("user", "assistant")


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/nowhere"])
async def test_what_generates_nothing_is_not_traced(
    scripted: ScriptedEngine, receiver: Received, path: str
) -> None:
    app = make_app(scripted, otlp_traces_endpoint=receiver.url)
    await traced(app, path, {})
    assert receiver.spans == []


async def test_a_collector_that_is_down_is_told_once_and_holds_nobody_up(
    scripted: ScriptedEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "5")
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "8")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "2")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "0.05")
    app = make_app(scripted, otlp_traces_endpoint="http://127.0.0.1:9")
    async with client_of(app) as client:
        for _ in range(30):
            body = {"prompt": [5], "max_tokens": 1}
            assert (await client.post("/v1/completions", json=body)).status_code == 200
    await app.state.tracer.close()
    warned = [one for one in caplog.records if one.levelno >= logging.WARNING]
    assert [one.getMessage().partition(";")[0] for one in warned] == [
        "traces cannot be sent to http://127.0.0.1:9/v1/traces"
    ]


async def test_variables_that_are_not_followed_are_told_and_garbage_of_clients_is_not(
    scripted: ScriptedEngine,
    receiver: Received,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "opentelemetry")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "allways_on")
    app = make_app(scripted, otlp_traces_endpoint=receiver.url)
    assert "allways_on" in caplog.text
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "GARBAGE"}
    await traced(app, "/v1/completions", {"prompt": [5], "max_tokens": 1}, headers)
    assert len(receiver.named(f"text_completion {MODEL}")) == 1 and "GARBAGE" not in caplog.text


def test_a_variable_that_cannot_be_taken_is_named(
    scripted: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "5000")
    with pytest.raises(ValueError, match=r"OTEL_BSP_.*max_export_batch_size"):
        make_app(scripted, otlp_traces_endpoint="http://127.0.0.1:9")


@pytest.mark.parametrize(
    ("url", "protocol", "wanted"),
    [
        ("http://a:4318", None, ("http/protobuf", "http://a:4318/v1/traces")),
        ("http://a:4318/", None, ("http/protobuf", "http://a:4318/v1/traces")),
        ("https://a/x/traces", None, ("http/protobuf", "https://a/x/traces")),
        ("http://a:4317", None, ("grpc", "http://a:4317")),
        ("grpc://a:99", None, ("grpc", "http://a:99")),
        ("http://a:99", "grpc", ("grpc", "http://a:99")),
        ("http://a:4317/v1/traces", "http/protobuf", ("http/protobuf", "http://a:4317/v1/traces")),
    ],
)
def test_which_protocol(url: str, protocol: str | None, wanted: tuple[str, str]) -> None:
    told = {} if protocol is None else {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": protocol}
    assert read_endpoint(url, told) == wanted


@pytest.mark.parametrize(
    ("url", "protocol"),
    [("a:4318", None), ("ftp://a", None), ("http://", None), ("http://a:x", None),
     ("http://a", "http/json"), ("grpc://a", "http/protobuf"), ("http://me:secret@a", None)],
)  # fmt: skip
def test_what_is_no_collector_is_refused(url: str, protocol: str | None) -> None:
    told = {} if protocol is None else {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": protocol}
    with pytest.raises(ValueError, match=r"--otlp-traces-endpoint|OTEL_EXPORTER_OTLP") as raised:
        read_endpoint(url, told)
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
def test_an_sdk_without_its_exporter_is_not_enough(
    monkeypatch: pytest.MonkeyPatch, protocol: str
) -> None:
    """Ray brings one."""
    for name in {"opentelemetry.exporter", *sys.modules}:
        if name.startswith("opentelemetry.exporter"):
            monkeypatch.setitem(sys.modules, name, None)
    told = {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": protocol}
    with pytest.raises(ValueError, match=r"pip install 'piecework\[otlp\]'"):
        read_endpoint("http://a", told)


def test_no_module_imports_the_libraries_before_they_are_asked_for() -> None:
    for path in (ROOT / "server").rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                assert "opentelemetry" not in ast.unparse(node), path
