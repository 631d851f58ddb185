"""Server-sent events from bytes that arrive in pieces of any size."""

from __future__ import annotations


class SSEDecoder:
    """Decodes the chunks of a `text/event-stream` to the data of its events.

    Format: https://html.spec.whatwg.org/multipage/server-sent-events.html. A line may end in LF, CR
    LF or CR, and a chunk may end anywhere. Comments and fields other than `data` are skipped.
    Several `data` lines of an event are joined by LF.
    """

    def __init__(self) -> None:
        self._line = bytearray()
        self._data: list[bytes] = []
        self._after_cr = False

    def feed(self, chunk: bytes) -> list[bytes]:
        """Return the data of every event that `chunk` completes, in order."""
        if not chunk:
            return []
        if self._after_cr and chunk.startswith(b"\n"):
            chunk = chunk[1:]
        self._after_cr = chunk.endswith(b"\r")
        if b"\r" in chunk:
            chunk = chunk.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *ended, rest = chunk.split(b"\n")
        events: list[bytes] = []
        for line in ended:
            self._line += line
            self._end_line(events)
        self._line += rest
        return events

    def _end_line(self, events: list[bytes]) -> None:
        line = bytes(self._line)
        self._line.clear()
        if not line:
            if self._data:
                events.append(b"\n".join(self._data))
                self._data = []
            return
        name, _, value = line.partition(b":")
        if name == b"data":
            self._data.append(value.removeprefix(b" "))
