"""The log of every process of a server: lines of text or JSON on standard error.

Control characters are escaped, so a message cannot add a line or move a terminal's cursor.
"""

from __future__ import annotations

import json
import logging
import os
import re
import select
import sys
import threading
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

logger = logging.getLogger(__name__)

# `text` or `json`. The processes that a server starts inherit it by the environment.
FORMAT_VARIABLE = "PIECEWORK_LOG_FORMAT"
LOG_FORMATS = ("text", "json")
# Limit of a line of JSON without its newline. Up to this size, processes that write to the same
# pipe do not mix their lines, even if the pipe is full.
_MOST_BYTES: int = getattr(select, "PIPE_BUF", 512) - 1
_TRIES = 32
_LEFT_OUT = " [...] "
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


def set_up_logging(level: str, *, rank: int | None = None) -> None:
    """Log from `level` up, in the format of the environment.

    `rank` is set if several processes compute one model.
    """
    handler = logging.StreamHandler()
    as_json = os.environ.get(FORMAT_VARIABLE) == "json"
    handler.setFormatter(JsonFormatter(rank) if as_json else TextFormatter(rank))
    logging.basicConfig(level=level.upper(), handlers=[handler])
    if as_json:
        # Python itself would print warnings and uncaught exceptions as text.
        logging.captureWarnings(True)
        sys.excepthook = _log_uncaught
        threading.excepthook = lambda hook: _log_uncaught(*hook[:3])


def _log_uncaught(kind: Any, error: BaseException | None, trace: Any) -> None:
    if error is not None and not isinstance(error, SystemExit):
        logger.critical("uncaught exception %s", kind.__name__, exc_info=(kind, error, trace))


def with_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `extra` of a logging call: fields of the JSON object, or words `name=value`."""
    return {"fields": fields}


def _escaped(text: str) -> str:
    return _CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


class TextFormatter(logging.Formatter):
    """Writes `12:00:00 INFO piecework.server: message name=value`, then the indented traceback."""

    def __init__(self, rank: int | None = None) -> None:
        whose = "" if rank is None else f"rank {rank}: "
        super().__init__(f"%(asctime)s %(levelname)s {whose}%(name)s: %(message)s", "%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        fields = getattr(record, "fields", {})
        words = "".join(f" {name}={_word(value)}" for name, value in fields.items())
        return _escaped(super().formatMessage(record) + words)

    def formatException(self, ei: Any) -> str:
        return _indented(super().formatException(ei))

    def formatStack(self, stack_info: str) -> str:
        return _indented(stack_info)


def _indented(text: str) -> str:
    return "\n".join(f"    {_escaped(line)}" for line in text.splitlines())


def _word(value: Any) -> str:
    """Return a value as a word. Values with white space are quoted."""
    if value is None:
        return "-"
    text = str(value)
    return text if re.fullmatch(r'[^\s"=]+', text) else json.dumps(text, ensure_ascii=False)


class JsonFormatter(logging.Formatter):
    """Writes an object per line: `time` (RFC 3339, UTC), `level`, `logger`, `message`, `pid`, the
    `exception` if there is one, and the event's own fields. Long values lose their middle.
    """

    def __init__(self, rank: int | None = None) -> None:
        super().__init__()
        self._rank = {} if rank is None else {"rank": rank}

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            "pid": record.process,
            **self._rank,
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        # ASCII, because readers may take other characters for the end of a line.
        for _ in range(_TRIES):
            if len(text := json.dumps(line, default=str)) <= _MOST_BYTES:
                break
            longest = max(line, key=lambda name: len(json.dumps(line[name], default=str)))
            value = line[longest]
            value = value if isinstance(value, str) else json.dumps(value, default=str)
            # Keep about this share of the longest value, without its middle.
            share = _MOST_BYTES / len(text)
            left = max(0, int(len(value) * share) - len(_LEFT_OUT) - 1) // 2
            line[longest] = f"{value[:left]}{_LEFT_OUT}{value[len(value) - left :]}"
        return text
