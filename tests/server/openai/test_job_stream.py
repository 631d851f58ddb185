"""Streams of background responses to those who come later."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from piecework.server.openai.responses.job import Job
from piecework.server.openai.responses.stream import JobStream
from piecework.server.serving.sse import KeepAlive


class Encoder:
    """Events that are encoded already."""

    def opening(self, *_: str) -> list[bytes]:
        return [b"%999d\n" % number for number in range(500)]

    def encode(self, _: Any) -> list[bytes]:
        return []

    def last(self) -> list[bytes]:
        return [b"last\n"]


async def test_a_slow_reader_has_little_waiting_and_reads_to_the_end() -> None:
    nothing: Any = None
    job = Job(nothing, [], nothing, Encoder())
    job.end()
    bodies: list[bytes] = []

    async def send(message: Any) -> None:
        if "body" in message:
            bodies.append(message["body"])
            job.forget()

    await asyncio.wait_for(JobStream(job, 0, KeepAlive(15))({}, asyncio.Event().wait, send), 10)
    assert max(map(len, bodies)) < 2**16 + 1000
    lines = b"".join(bodies).split()
    assert lines == [*(b"%d" % number for number in range(500)), b"last"]


def test_what_can_still_be_read_weighs_what_it_was_made_from() -> None:
    answer: Any = SimpleNamespace(size=2**20)
    job = Job(answer, [], answer, Encoder())
    job.end()
    assert job.weight == 2**20 + sum(map(len, job.events))
    job.forget()
    assert job.weight == 0
