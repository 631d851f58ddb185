"""HTTP/1.1 connections: uvicorn's protocol with limits for clients.

Only this file and `old_client.py` use internal names of uvicorn's classes.
`tests/server/http/test_http_protocol.py` lists names that a release of uvicorn lacks.
"""

from __future__ import annotations

import asyncio
from collections import deque
from enum import Enum
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from ..core.errors import ApiError, MethodNotAllowed
from ..serving.sse import CONNECTION
from .connections import Connections, is_monitoring
from .old_client import send_without_chunks
from .refusals import (
    Refused,
    answer,
    busy,
    check_headers,
    crowded,
    late,
    malformed,
    too_much_waits,
    url_too_long,
)
from .slow_reader import SECOND_LOOK, SlowReader, least_bytes

MAX_PIPELINED = 32  # Unanswered requests of a connection.
MAX_BEHIND = 2**16  # Bytes of requests that wait behind the one that is being answered.
MAX_CHUNKS = 2**16  # Chunks of a body. Each costs a call, regardless of its size.
MAX_CHUNK_OVERHEAD = 2**20  # Bytes of a chunked body's sizes, extensions and trailers.
# Bytes that are parsed at a time. A limit may be exceeded by that many bytes before it is noticed.
_SLICE, _BODY_SLICE = 4096, 2**15
# Seconds for which a refused client may still send. Otherwise it could not read the error.
_LINGER = 2.0


class Awaited(Enum):
    """What the client must send next, or nothing because it waits for an answer."""

    NOTHING = "nothing"
    REQUEST = "request"
    HEAD = "head"
    BODY = "body"
    END = "end"


class BoundedHttpProtocol(HttpToolsProtocol):
    """One connection. A request that exceeds a limit is refused and ends the connection."""

    def __init__(self, connections: Connections, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.url = b""
        self._peers = connections
        self._limits = connections.limits
        self._reading = Awaited.REQUEST
        self._refused = False
        self._unanswered: deque[RequestResponseCycle] = deque()
        self._behind = 0
        self._upgrade_asked = False
        self._head_bytes = self._field_bytes = self._body_bytes = self._payload_bytes = (
            self._chunks
        ) = self._trailers = 0
        self._timed: Awaited | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timed_bytes = 0
        self._slow_reader = SlowReader(self._limits, self._abort)

    @property
    def unsent(self) -> int:
        return self.transport.get_write_buffer_size()

    def give_way(self) -> None:
        self._refused = True
        self._abort()

    def drop_body(self) -> None:
        self._refuse(
            busy(
                "Too many bodies are arriving at once, and this one is the oldest "
                "(--max-unfinished-bodies)"
            )
        )

    @property
    def can_write(self) -> bool:
        return bool(self._unanswered) and not self.flow.write_paused

    def write_part(self, body: bytes) -> None:
        if body:
            is_chunked = self._unanswered[0].chunked_encoding
            self.transport.write(b"%x\r\n%b\r\n" % (len(body), body) if is_chunked else body)

    def took(self, size: int) -> None:
        self._peers.give_back(self, size)

    def holds(self, size: int) -> None:
        if self._reading is Awaited.BODY and len(self._unanswered) == 1:
            self._peers.hold(self, size)

    # Called by asyncio.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self._peers.enter(self):
            self._restart_clock()
        else:
            self._refused = True
            self._write_error(crowded())
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._slow_reader.stop()
        if self._timer is not None:
            self._timer.cancel()
        self._peers.leave(self)
        self._tell_applications()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        rest = memoryview(data)
        try:
            while rest and not self._refused:
                rest = rest[self._feed(rest) :]
        except Refused as refused:
            self._refuse(refused.error)
        except httptools.HttpParserCallbackError as failure:
            cause = failure.__context__
            self._refuse(
                cause.error if isinstance(cause, Refused) else malformed("its URL cannot be read")
            )
        except httptools.HttpParserError as failure:
            self._refuse(malformed(str(failure)))
        self._restart_clock()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._slow_reader.watch(self.transport)
        self._peers.set_unread(self, True)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._slow_reader.stop()
        self._peers.set_unread(self, False)

    # Called by the parser.

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._reading = Awaited.HEAD
        self._head_bytes = self._field_bytes = self._trailers = 0

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > self._limits.max_header_bytes:
            raise Refused(url_too_long(self._limits.max_header_bytes))

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._reading is Awaited.BODY:
            # Trailers are ignored. As headers they would change a request that is already being
            # answered.
            self._trailers += 1
            check_headers(self._limits, count=self._trailers)
            return
        super().on_header(name, value)
        self._field_bytes += len(name) + len(value)
        check_headers(self._limits, count=len(self.headers), size=self._field_bytes)

    def on_headers_complete(self) -> None:
        method = self.parser.get_method()
        if method == b"CONNECT":
            raise Refused(
                MethodNotAllowed(
                    "CONNECT: this server is no proxy; send a request for one of its paths.",
                    code="method_not_allowed",
                )
            )
        if self.parser.should_upgrade():
            self._upgrade_asked = True
            return
        if len(self._unanswered) > MAX_PIPELINED:
            raise Refused(too_much_waits(f"{MAX_PIPELINED} requests"))
        full = not self._unanswered and self._peers.crowded
        if full and not is_monitoring(method, self.url, self.headers):
            raise Refused(crowded())
        super().on_headers_complete()
        # uvicorn stops reading while a request waits behind another one. It would then not notice
        # that the client has left.
        self.flow.resume_reading()
        if self.scope["http_version"] == "1.0":
            send_without_chunks(self.cycle)
        self.scope[CONNECTION] = self  # type: ignore[literal-required]
        if full:
            self.cycle.keep_alive = False
        self._unanswered.append(self.cycle)
        self._reading = Awaited.BODY
        self._timed = None
        self._body_bytes = self._payload_bytes = self._chunks = 0

    def on_chunk_header(self) -> None:
        self._chunks += 1
        if self._chunks > MAX_CHUNKS:
            raise Refused(malformed(f"its body comes in more than {MAX_CHUNKS} chunks"))

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self._payload_bytes += len(body)

    def on_message_complete(self) -> None:
        if self._upgrade_asked:
            return
        super().on_message_complete()
        self._reading = Awaited.REQUEST
        if self._body_bytes:
            self._peers.release(self)

    def on_response_complete(self) -> None:
        self._unanswered.popleft()
        if len(self._unanswered) <= 1:
            self._behind = 0
        super().on_response_complete()
        self._unset_keepalive_if_required()
        if self.unsent:
            self._slow_reader.watch(self.transport)
        # Without "100 Continue" the client may omit its body, so the next bytes are either the body
        # or another request.
        unsure = self._reading is Awaited.BODY and self.expect_100_continue and not self._unanswered
        if self._refused or unsure:
            self._linger()
        self._restart_clock()

    # Reading.

    def _feed(self, rest: memoryview) -> int:
        """Parse the next bytes and return their number.

        Raises `Refused`, directly or inside an error of httptools.
        """
        if self._reading is Awaited.REQUEST:
            self._reading, self._head_bytes = Awaited.HEAD, 0
        in_body = self._reading is Awaited.BODY
        waits = len(self._unanswered) > in_body
        part = rest[:_SLICE] if waits or not in_body else rest[:_BODY_SLICE]
        fed = len(part)
        try:
            self.parser.feed_data(part)
        except httptools.HttpParserUpgrade as upgrade:
            fed = upgrade.args[0]
            # Parse the head again as HTTP/1.1, without its Upgrade header (RFC 9110, 7.8).
            self._upgrade_asked = False
            line = b"%s %s HTTP/%s" % (
                self.parser.get_method(),
                self.url,
                self.parser.get_http_version().encode(),
            )
            fields = [b"%s: %s" % field for field in self.headers if field[0] != b"upgrade"]
            self.parser.feed_data(b"\r\n".join([line, *fields, b"", b""]))
        if self._reading is Awaited.HEAD:
            self._head_bytes += fed
            check_headers(self._limits, size=self._head_bytes)
        elif in_body and self._reading is Awaited.BODY:
            self._count_body(fed)
        if waits:
            # Bytes of waiting requests stay in memory even if the client leaves.
            self._behind += fed
            if self._behind > MAX_BEHIND:
                raise Refused(too_much_waits(f"{MAX_BEHIND} bytes of requests"))
        return fed

    def _count_body(self, size: int) -> None:
        self._body_bytes += size
        if self._body_bytes - self._payload_bytes > MAX_CHUNK_OVERHEAD:
            raise Refused(
                malformed(
                    f"its chunks have more than {MAX_CHUNK_OVERHEAD} bytes of extensions and "
                    "trailers"
                )
            )
        if not self.cycle.response_complete:
            self._peers.hold(self, size)

    # Refusing.

    def _refuse(self, error: ApiError) -> None:
        """Send an error, unless another answer is being sent, and end the connection."""
        if self._refused:
            return
        self._refused = True
        self._peers.release(self)
        self.pipeline.clear()
        self.flow.resume_reading()
        if (
            self._reading is Awaited.BODY
            and len(self._unanswered) == 1
            and not self.cycle.response_started
        ):
            self._tell_applications()
            self._write_error(error)
        elif self._reading is not Awaited.BODY and not self._unanswered:
            self._write_error(error)
        if not self._unanswered:
            self._linger()

    def _write_error(self, error: ApiError) -> None:
        self._peers.count_error(error.type)
        path = self.url.partition(b"?")[0].decode("latin-1")
        self.transport.write(answer(error, path, self.server_state.default_headers))

    def _linger(self) -> None:
        """End the sending side and read for `_LINGER` seconds.

        If the socket were closed at once, the client could lose the answer.
        """
        self._refused = True
        if not self.transport.is_closing():
            self._reading = Awaited.END
            self.flow.resume_reading()
            self.transport.write_eof()

    # Time.

    def _restart_clock(self) -> None:
        """Restart the timer if another part of a request is awaited than before."""
        # While earlier requests are being answered, the client need not send more.
        awaited = self._reading if not self._unanswered else Awaited.NOTHING
        if self._reading is Awaited.BODY and len(self._unanswered) <= 1 and not self._refused:
            awaited = Awaited.BODY
        self._peers.set_waiting(self, not self._unanswered)
        if awaited is self._timed:
            return
        self._timed, self._timed_bytes = awaited, self._body_bytes
        if self._timer is not None:
            self._timer.cancel()
        timeout = {
            Awaited.HEAD: self._limits.timeout_header,
            Awaited.BODY: self._limits.timeout_body,
            Awaited.REQUEST: self._limits.timeout_keep_alive,
            Awaited.END: _LINGER,
        }.get(awaited)
        if timeout is not None:
            self._timer = self.loop.call_later(timeout, self._time_is_up, False)

    def _time_is_up(self, looked_again: bool) -> None:
        if not looked_again:
            self._timer = self.loop.call_later(SECOND_LOOK, self._time_is_up, True)
            return
        match self._timed:
            case Awaited.HEAD:
                self._refuse(
                    late(
                        f"The headers did not end within {self._limits.timeout_header:g} s "
                        "(--timeout-header)"
                    )
                )
            case Awaited.BODY if not (
                self.flow.read_paused
                or self._body_bytes - self._timed_bytes
                >= least_bytes(self._limits, self._limits.timeout_body)
            ):
                self._refuse(
                    late(
                        f"The body did not go on for {self._limits.timeout_body:g} s "
                        "(--timeout-body, --min-transfer-rate)"
                    )
                )
            case Awaited.BODY:
                self._timed = None
            case Awaited.REQUEST:
                self.transport.close()
            case _:
                self._abort()
        self._restart_clock()

    def _abort(self) -> None:
        self._tell_applications()
        self.transport.abort()

    def _tell_applications(self) -> None:
        """Tell the applications that the client is gone, and drop what they still send."""
        for cycle in self._unanswered:
            cycle.disconnected = True
            cycle.message_event.set()
        self._unanswered.clear()
