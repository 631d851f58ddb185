"""Makes the OpenTelemetry spans of requests.

Each request is a server span. It is a child of the client's span if the client sent `traceparent`.
Each sequence has spans of its queue, prefill and decode times. Attributes follow
https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/; those of latency are vLLM's.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Callable
from typing import Any

from ...version import __version__
from .otlp import Endpoint, open_provider
from .request_record import RequestRecord
from .sequence_clock import SequenceClock

# From the paths that are traced to `gen_ai.operation.name`.
_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
    "/api/chat": "chat",
    "/api/generate": "text_completion",
    "/v1/completions": "text_completion",
    "/generate": "text_completion",
    "/completion": "text_completion",
    "/completions": "text_completion",
    "/infill": "text_completion",
    "/v1/embeddings": "embeddings",
    "/api/embed": "embeddings",
    "/api/embeddings": "embeddings",
    "/v1/images/generations": "generate_content",
}
_CAPTURE = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
_MAX_SEQUENCES = 16  # Sequences of a request with own spans.
_MAX_TOKENS = 8192  # Captured tokens of a prompt, and of an answer.
_CLOSE_SECONDS = 3.0
_NANOSECONDS = 1_000_000_000


class Tracer:
    """Makes spans of records. They contain texts only if the environment enables that."""

    def __init__(self, endpoint: Endpoint) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = open_provider(endpoint, __version__)
        self._tracer = self._provider.get_tracer("piecework", __version__)
        self._extract = TraceContextTextMapPropagator().extract
        capture = os.environ.get(_CAPTURE, "").lower()
        self._captures = capture in ("true", "span_only", "span_and_event")

    async def close(self) -> None:
        """Send the queued spans, for at most `_CLOSE_SECONDS`."""
        # A daemon thread, so that a collector that hangs does not keep the process alive.
        thread = threading.Thread(target=self._provider.shutdown, daemon=True)
        thread.start()
        await asyncio.to_thread(thread.join, _CLOSE_SECONDS)

    def trace(self, record: RequestRecord) -> None:
        """Make the spans of a finished request."""
        from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context

        operation = _OPERATIONS.get(record.scope["path"])
        if operation is None or record.scope["method"] != "POST":
            return
        carrier = {
            name.decode("latin-1"): value.decode("latin-1")
            for name, value in record.scope["headers"]
            if name in (b"traceparent", b"tracestate")
        }
        span = self._tracer.start_span(
            f"{operation} {record.model}" if record.model else operation,
            context=self._extract(carrier),
            kind=SpanKind.SERVER,
            start_time=record.began_ns,
            attributes=_attributes(record, operation),
        )
        if span.is_recording():
            if record.status >= 500:
                span.set_status(StatusCode.ERROR)
                span.set_attribute("error.type", str(record.status))
            if self._captures and record.decode is not None:
                span.set_attributes(_messages(record, record.decode))
            inside = set_span_in_context(span)
            for number, (_, clock) in enumerate(record.sequences[:_MAX_SEQUENCES]):
                for name, begin, end in _phases(clock, record.ended):
                    phase = self._tracer.start_span(
                        name,
                        context=inside,
                        start_time=_since_epoch(record, begin),
                        attributes={"piecework.sequence": number},
                    )
                    phase.end(_since_epoch(record, end))
        span.end(_since_epoch(record, record.ended))


def _messages(record: RequestRecord, decode: Callable[..., str]) -> dict[str, str]:
    """Return the prompts as the model read them, and the answers."""

    def message(role: str, ids: list[int], **more: str) -> dict[str, Any]:
        return {
            "role": role,
            "parts": [
                {"type": "text", "content": decode(ids[:_MAX_TOKENS], skip_special_tokens=False)}
            ],
            **more,
        }

    prompts = {id(request.prompt_ids): request.prompt_ids for request, _ in record.sequences}
    answers = [
        message("assistant", request.output_ids, finish_reason=clock.finish_reason)
        for request, clock in record.sequences[:_MAX_SEQUENCES]
    ]
    asked = [message("user", ids) for ids in list(prompts.values())[:_MAX_SEQUENCES]]
    return {
        "gen_ai.input.messages": json.dumps(asked),
        "gen_ai.output.messages": json.dumps(answers),
    }


def _since_epoch(record: RequestRecord, moment: float) -> int:
    """Convert a time of `time.monotonic` to nanoseconds since the epoch."""
    return record.began_ns + int((moment - record.began) * _NANOSECONDS)


def _phases(clock: SequenceClock, ended: float) -> list[tuple[str, float, float]]:
    """Return name, begin and end of each phase that a sequence has reached."""
    phases = [("queue", clock.arrival, clock.started or clock.first_token or ended)]
    if clock.started is not None:
        phases.append(("prefill", clock.started, clock.first_token or ended))
    if clock.first_token is not None:
        phases.append(("decode", clock.first_token, clock.last_token or ended))
    return phases


def _attributes(record: RequestRecord, operation: str) -> dict[str, Any]:
    sequences = record.sequences
    prompts, cached, answers = record.usage
    found: dict[str, Any] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "piecework",
        "gen_ai.request.id": record.request_id,
        "http.request.method": record.scope["method"],
        "url.path": record.scope["path"],
        "http.response.status_code": record.status,
        "gen_ai.latency.e2e": record.ended - record.began,
    }
    if record.model is not None:
        found |= {"gen_ai.request.model": record.model, "gen_ai.response.model": record.model}
    if prompts:
        found["gen_ai.usage.input_tokens"] = prompts
    if not sequences:
        return found
    first, clock = sequences[0]
    params = first.params
    return (
        found
        | {
            "gen_ai.request.max_tokens": params.max_new_tokens,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            **({} if params.top_k < 1 else {"gen_ai.request.top_k": params.top_k}),
            **({} if params.seed is None else {"gen_ai.request.seed": params.seed}),
        }
        | _latency(clock)
        | {
            "gen_ai.request.choice.count": len(sequences),
            "gen_ai.response.id": min(first.belongs_to, default=first.name),
            "gen_ai.response.finish_reasons": record.finish_reasons,
            "gen_ai.usage.output_tokens": answers,
            "gen_ai.usage.cache_read.input_tokens": cached,
        }
    )


def _latency(clock: SequenceClock) -> dict[str, float]:
    """Return the latencies of a sequence in seconds, for the phases it has reached."""
    found = {name: end - begin for name, begin, end in _phases(clock, clock.arrival)}
    latencies = {
        "gen_ai.latency.time_in_queue": found["queue"] if clock.started else None,
        "gen_ai.latency.time_to_first_token": clock.first_token
        and clock.first_token - clock.arrival,
        "gen_ai.latency.time_in_model_prefill": found.get("prefill") if clock.first_token else None,
        "gen_ai.latency.time_in_model_decode": found.get("decode"),
    }
    if clock.started is not None and clock.last_token is not None:
        latencies["gen_ai.latency.time_in_model_inference"] = clock.last_token - clock.started
    return {name: seconds for name, seconds in latencies.items() if seconds is not None}
