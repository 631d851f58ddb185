"""Grammars are checked in a process that ends when one takes too much, or when nobody waits."""

from __future__ import annotations

import asyncio
import time

import pytest

from piecework.runtime.sampling import grammar_process
from piecework.runtime.sampling.grammar_process import check

PATTERNS = " & ".join(rf"/(.|\n)*a.{{{number}}}b(.|\n)*/" for number in range(1, 26))
LARGE = f"start: T\nT: {PATTERNS}"


async def test_the_reason_is_told() -> None:
    await check('start: "a"')
    with pytest.raises(ValueError, match="unknown name"):
        await check("start: nothing")


async def test_a_grammar_that_takes_too_much_is_refused_and_the_next_is_checked() -> None:
    with pytest.raises(ValueError, match=r"a simpler one|Unable to determine|too"):
        await check(LARGE)
    await check('start: "a"')


async def test_what_nobody_waits_for_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    await check('start: "a"')
    (process, *_) = grammar_process._idle[-1:]
    slow = asyncio.create_task(check('start: "b"'))
    process.send_signal(19)  # SIGSTOP: an answer that never comes
    await asyncio.sleep(0.2)
    began = time.monotonic()
    slow.cancel()
    with pytest.raises(asyncio.CancelledError):
        await slow
    process.wait(20)
    assert time.monotonic() - began < 20
    await check('start: "c"')


async def test_a_process_that_was_ended_while_idle_is_replaced() -> None:
    await check('start: "a"')
    for process in grammar_process._idle:
        process.kill()
        process.wait(20)
    await check('start: "b"')
    with pytest.raises(ValueError, match="unknown name"):
        await check("start: nothing")
