"""A line of the log is one event, whatever it quotes."""

from __future__ import annotations

import json
import logging
import os
import select
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from piecework.runtime.process.logs import (
    FORMAT_VARIABLE,
    JsonFormatter,
    TextFormatter,
    with_fields,
)

FORMS = pytest.mark.parametrize("form", [TextFormatter(), JsonFormatter()])


def record(message: str, *arguments: object, fault: str | None = None) -> logging.LogRecord:
    told = None
    if fault is not None:
        try:
            raise ValueError(fault)
        except ValueError:
            told = sys.exc_info()
    return logging.LogRecord("a.b", logging.INFO, __file__, 1, message, arguments, told)


@FORMS
@given(st.text())
def test_what_is_quoted_makes_no_second_line(form: logging.Formatter, quoted: str) -> None:
    event = record("request %s ends", quoted)
    event.fields = {"path": quoted}  # type: ignore[attr-defined]
    line = form.format(event)
    assert len(line.splitlines()) == 1
    assert line.isprintable() or "\u00ad" in quoted or isinstance(form, TextFormatter)
    assert "\x1b" not in line


def test_a_traceback_begins_no_line_of_its_own() -> None:
    lines = TextFormatter().format(record("it broke", fault="x\n12:00:00 INFO a: forged\x1b[2J"))
    first, *rest = lines.split("\n")
    assert first.endswith("INFO a.b: it broke")
    assert len(rest) > 2 and all(line.startswith("    ") for line in rest)
    assert "\x1b" not in lines


def test_an_event_in_json() -> None:
    event = record("it %s", "broke", fault="x\ny")
    event.__dict__.update(with_fields({"tokens": 3, "key": None}))
    told = json.loads(JsonFormatter(rank=2).format(event))
    assert told["time"].endswith("+00:00")
    assert "ValueError: x\ny" in told["exception"]
    names = ("level", "logger", "message", "rank", "tokens", "key")
    assert [told[name] for name in names] == ["info", "a.b", "it broke", 2, 3, None]


@given(
    st.lists(st.sampled_from(["x", "\n", "ä", "\x00", "\U0001f600"]), max_size=9),
    st.integers(0, 4000),
)
def test_a_line_in_json_comes_whole_through_a_pipe(quoted: list[str], times: int) -> None:
    event = record("begins %s ends", "".join(quoted) * times)
    event.fields = {"reasons": ["stop"] * times, "tokens": 7}  # type: ignore[attr-defined]
    line = JsonFormatter().format(event)
    told = json.loads(line)
    assert len(line) < select.PIPE_BUF and told["tokens"] == 7
    assert told["message"].startswith("begins ") and told["message"].endswith(" ends")


_WRITER = """
import logging
from piecework.runtime.process.logs import set_up_logging
set_up_logging("info")
for _ in range(40):
    logging.info("x" * 20_000)
"""


def test_lines_of_processes_that_share_a_full_pipe_stay_whole() -> None:
    environment = {**os.environ, FORMAT_VARIABLE: "json"}
    reading, writing = os.pipe()
    writers = [
        subprocess.Popen([sys.executable, "-c", _WRITER], env=environment, stderr=writing)
        for _ in range(3)
    ]
    os.close(writing)
    with open(reading, "rb") as pipe:
        lines = pipe.read().splitlines()
    assert all(writer.wait(30) == 0 for writer in writers)
    assert len([json.loads(line) for line in lines]) == 120


_TROUBLE = """
import threading, warnings
from piecework.runtime.process.logs import set_up_logging
set_up_logging("info")
def ends():
    raise SystemExit(3)
def breaks():
    raise ValueError("in a\\nthread")
for one in (ends, breaks):
    thread = threading.Thread(target=one)
    thread.start()
    thread.join()
warnings.warn("beware")
raise KeyError("at the end")
"""


def test_what_python_prints_itself_is_json_too() -> None:
    environment = {**os.environ, FORMAT_VARIABLE: "json"}
    command = [sys.executable, "-c", _TROUBLE]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    told = [json.loads(line) for line in done.stderr.splitlines()]
    assert done.returncode == 1 and [one["level"] for one in told] == [
        "critical", "warning", "critical",
    ]  # fmt: skip
    assert "ValueError: in a\nthread" in told[0]["exception"]
    assert "beware" in told[1]["message"]
    assert "KeyError: 'at the end'" in told[2]["exception"]


def test_fields_follow_the_message_as_words() -> None:
    event = record("request")
    event.__dict__.update(with_fields({"status": 200, "key": None, "path": "/a b\n="}))
    line = TextFormatter().format(event)
    assert line.endswith(r'a.b: request status=200 key=- path="/a b\\n="') or line.endswith(
        r'a.b: request status=200 key=- path="/a b\n="'
    )
