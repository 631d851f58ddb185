"""Records each HTTP request for its line in the log (`--log-requests`) and its trace.

>>> app = RecordRequests(app, [log_request])

A record is complete once the answer is sent and every sequence has ended. For background responses
the sequences end later. Each watcher is then called with the record.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextvars import ContextVar

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...runtime.process.logs import with_fields
from ...runtime.tokenizer.output_processor import RequestState
from ..core.errors import ERROR, MODEL, REQUEST_ID, ApiError
from ..core.open_paths import OPEN_PATHS
from .sequence_clock import SequenceClock

logger = logging.getLogger(__name__)
request_logger = logging.getLogger("piecework.requests")

KEY_NAME = "piecework.api_key_name"  # Key of a request's scope: the name of its API key.
_PATH_CHARACTERS = 200  # Logged characters of a path.
_REASON_CHARACTERS = 300  # Logged characters of an error's reason.


class RequestRecord:
    """One request.

    Attributes:
        began, began_ns: The start, by `time.monotonic` and in nanoseconds since the epoch.
        status: The HTTP status, or 499 if the client left before the answer began.
        model, decode: The model of the sequences, and the function that decodes its token ids.
        sequences: The sequences and their clocks.
        input_tokens: Tokens of inputs that are no sequences, such as texts to embed.
    """

    def __init__(self, scope: Scope, watchers: Sequence[Watcher]) -> None:
        self.began, self.began_ns = time.monotonic(), time.time_ns()
        self.ended = self.began
        self.scope = scope
        self.status = 499
        self.model: str | None = None
        self.decode: Callable[..., str] | None = None
        self.sequences: list[tuple[RequestState, SequenceClock]] = []
        self.input_tokens = 0
        self._watchers = watchers
        self._holders = 1

    def join(
        self,
        model: str,
        decode: Callable[..., str],
        sequences: Sequence[tuple[RequestState, SequenceClock]],
    ) -> None:
        """Add sequences. The caller must call `leave` once they have ended."""
        self.model, self.decode = model, decode
        self.sequences += sequences
        self._holders += 1

    def leave(self) -> None:
        self._holders -= 1
        if self._holders:
            return
        self.ended = time.monotonic()
        for watch in self._watchers:
            try:
                watch(self)
            except Exception:
                logger.exception("a request cannot be recorded")

    @property
    def request_id(self) -> str:
        return str(self.scope.get(REQUEST_ID, ""))

    @property
    def usage(self) -> tuple[int, int, int]:
        """Prompt tokens, cached prompt tokens and generated tokens so far, as in `usage`.

        The prompt of several samples counts once.
        """
        requests = [request for request, _ in self.sequences]
        prompts = {id(request.prompt_ids): request for request in reversed(requests)}.values()
        return (
            self.input_tokens + sum(len(request.prompt_ids) for request in prompts),
            sum(request.cached_tokens or 0 for request in prompts),
            sum(len(request.output_ids) for request in requests),
        )

    @property
    def tokens(self) -> int:
        """The number of prompt tokens and generated tokens so far."""
        prompts, _, answers = self.usage
        return prompts + answers

    @property
    def finish_reasons(self) -> list[str]:
        """The finish reason of each sequence; `abort` if the client left."""
        return [clock.finish_reason for _, clock in self.sequences]


Watcher = Callable[[RequestRecord], None]
# The record of the HTTP request that is being answered, or None without `RecordRequests`.
current_record: ContextVar[RequestRecord | None] = ContextVar("current_record", default=None)


class RecordRequests:
    """ASGI middleware that records each request, except those of monitoring."""

    def __init__(self, app: ASGIApp, watchers: Sequence[Watcher]) -> None:
        self._app = app
        self._watchers = watchers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        record = RequestRecord(scope, self._watchers)

        async def send_on(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
            await send(message)

        token = current_record.set(record)
        try:
            await self._app(scope, receive, send_on)
        finally:
            current_record.reset(token)
            record.leave()


def log_request(record: RequestRecord) -> None:
    """Log one line with times in seconds. It contains no text of prompts or answers."""
    error: ApiError | None = record.scope.get(ERROR)
    clocks = [clock for _, clock in record.sequences]
    prompt_tokens, cached_tokens, completion_tokens = record.usage
    queued = [clock.started - clock.arrival for clock in clocks if clock.started is not None]
    first = [clock.first_token - record.began for clock in clocks if clock.first_token is not None]
    fields = {
        "request_id": record.request_id,
        "method": record.scope["method"],
        "path": record.scope["path"][:_PATH_CHARACTERS],
        "status": record.status,
        "model": record.model or record.scope.get(MODEL),
        "api_key": record.scope.get(KEY_NAME),
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "cached_tokens": cached_tokens,
        "queue_seconds": round(max(queued), 6) if queued else None,
        "ttft_seconds": round(min(first), 6) if first else None,
        "e2e_seconds": round(record.ended - record.began, 6),
        "finish_reason": ",".join(sorted(set(record.finish_reasons))) or None,
        "error": error and (error.code or error.type),
        "reason": error and (error.reason or error.message)[:_REASON_CHARACTERS],
    }
    request_logger.info("request", extra=with_fields(fields))
