"""Server-sent events come out the same however their bytes are cut."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from piecework.bench.sse import SSEDecoder

DATA = st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), min_size=1)


def cut(stream: bytes, places: list[int]) -> list[bytes]:
    borders = [0, *sorted(place % (len(stream) + 1) for place in places), len(stream)]
    return [stream[begin:end] for begin, end in pairwise(borders)]


@given(
    events=st.lists(DATA),
    line_end=st.sampled_from(["\n", "\r\n", "\r"]),
    places=st.lists(st.integers(0, 10_000)),
)
def test_events_survive_any_cut(events: list[str], line_end: str, places: list[int]) -> None:
    stream = "".join(f"data: {data}{line_end}{line_end}" for data in events).encode()
    decoder = SSEDecoder()
    found = [data for chunk in cut(stream, places) for data in decoder.feed(chunk)]
    assert found == [data.encode() for data in events]


def test_an_event_is_out_with_its_last_byte() -> None:
    decoder = SSEDecoder()
    assert decoder.feed(b"data: a\n") == []
    assert decoder.feed(b"\ndata: b\n\nda") == [b"a", b"b"]


@pytest.mark.parametrize(
    ("stream", "events"),
    [
        (b": comment\n\ndata: x\n\n", [b"x"]),
        (b"event: message\nid: 1\ndata: x\nretry: 3\n\n", [b"x"]),
        (b"data: one\ndata: two\n\n", [b"one\ntwo"]),
        (b"data:x\n\n", [b"x"]),
        (b"data:  x\n\n", [b" x"]),
        (b"\n\n\n", []),
        (b"data: unfinished\n", []),
    ],
)
def test_fields_by_the_standard(stream: bytes, events: list[bytes]) -> None:
    assert SSEDecoder().feed(stream) == events
