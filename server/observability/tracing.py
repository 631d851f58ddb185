"""Spans of requests, as OpenTelemetry's conventions for generative AI name them.

https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/ for `gen_ai.*`; those of latency
are vLLM's. A request is one server span, a child of the client's where it sent `traceparent`; each
of its sequences has a span of the time that it waited, was prefilled and decoded.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Callable
from typing import Any

from ... import __version__
from ...runtime.tokenizer.output_processor import RequestState
from .otlp import Endpoint, open_provider
from .request_record import RequestRecord
from .sequence_clock import SequenceClock

_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
    "/v1/completions": "text_completion",
    "/generate": "text_completion",
    "/v1/embeddings": "embeddings",
    "/v1/images/generations": "generate_content",
}
"""Paths whose requests are traced, to `gen_ai.operation.name`."""
_CAPTURE = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
_MOST_SEQUENCES = 16
"""Sequences of a request that have spans of their own."""
_MOST_TOKENS = 8192
"""Tokens of a prompt, and of an answer, that are captured."""
_CLOSE_SECONDS = 3.0
_NANOSECONDS = 1_000_000_000


class Tracer:
    """Makes spans of records; what was said is in them only where the environment says so."""

    def __init__(self, endpoint: Endpoint) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = open_provider(endpoint, __version__)
        self._tracer = self._provider.get_tracer("piecework", __version__)
        self._extract = TraceContextTextMapPropagator().extract
        told = os.environ.get(_CAPTURE, "").lower()
        self._captures = told in ("true", "span_only", "span_and_event")

    async def close(self) -> None:
        """Send what waits, for a few seconds at most."""
        # A daemon: a collector that hangs keeps no process alive.
        thread = threading.Thread(target=self._provider.shutdown, daemon=True)
        thread.start()
        await asyncio.to_thread(thread.join, _CLOSE_SECONDS)

    def trace(self, record: RequestRecord) -> None:
        """The spans of a request that is over; takes no part in answering it."""
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
            for number, (_, clock) in enumerate(record.sequences[:_MOST_SEQUENCES]):
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
    """The prompt as the model read it, and what it wrote."""

    def message(role: str, ids: list[int], **more: str) -> dict[str, Any]:
        return {
            "role": role,
            "parts": [
                {"type": "text", "content": decode(ids[:_MOST_TOKENS], skip_special_tokens=False)}
            ],
            **more,
        }

    prompts = {id(one.prompt_ids): one.prompt_ids for one, _ in record.sequences}
    answers = [
        message("assistant", one.output_ids, finish_reason=clock.finish_reason)
        for one, clock in record.sequences[:_MOST_SEQUENCES]
    ]
    asked = [message("user", ids) for ids in list(prompts.values())[:_MOST_SEQUENCES]]
    return {
        "gen_ai.input.messages": json.dumps(asked),
        "gen_ai.output.messages": json.dumps(answers),
    }


def _since_epoch(record: RequestRecord, moment: float) -> int:
    """Nanoseconds of a moment by `time.monotonic`."""
    return record.began_ns + int((moment - record.began) * _NANOSECONDS)


def _phases(clock: SequenceClock, ended: float) -> list[tuple[str, float, float]]:
    """Name, begin and end of each phase that a sequence came to."""
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
    return (
        found
        | _asked(first)
        | _latency(clock)
        | {
            "gen_ai.request.choice.count": len(sequences),
            "gen_ai.response.id": min(first.belongs_to, default=first.name),
            "gen_ai.response.finish_reasons": record.finish_reasons,
            "gen_ai.usage.output_tokens": answers,
            "gen_ai.usage.cache_read.input_tokens": cached,
        }
    )


def _asked(request: RequestState) -> dict[str, Any]:
    params = request.params
    return {
        "gen_ai.request.max_tokens": params.max_new_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        **({} if params.top_k < 1 else {"gen_ai.request.top_k": params.top_k}),
        **({} if params.seed is None else {"gen_ai.request.seed": params.seed}),
    }


def _latency(clock: SequenceClock) -> dict[str, float]:
    """Seconds, of the first sequence, as far as it came."""
    found = {name: end - begin for name, begin, end in _phases(clock, clock.arrival)}
    told = {
        "gen_ai.latency.time_in_queue": found["queue"] if clock.started else None,
        "gen_ai.latency.time_to_first_token": clock.first_token
        and clock.first_token - clock.arrival,
        "gen_ai.latency.time_in_model_prefill": found.get("prefill") if clock.first_token else None,
        "gen_ai.latency.time_in_model_decode": found.get("decode"),
    }
    if clock.started is not None and clock.last_token is not None:
        told["gen_ai.latency.time_in_model_inference"] = clock.last_token - clock.started
    return {name: seconds for name, seconds in told.items() if seconds is not None}
