"""Grammars are checked in a process that ends when one takes too much, or when nobody waits."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest

from piecework.runtime.sampling import grammar_process
from piecework.runtime.sampling.grammar_process import CheckUnavailable, check, made

PATTERNS = " & ".join(rf"/(.|\n)*a.{{{number}}}b(.|\n)*/" for number in range(1, 26))
LARGE = f"start: T\nT: {PATTERNS}"


async def test_the_reason_is_told() -> None:
    await check('start: "a"')
    with pytest.raises(ValueError, match="unknown name"):
        await check("start: nothing")


async def test_a_grammar_that_takes_too_much_memory_is_refused_and_the_next_is_checked() -> None:
    # Less memory than usual, so that a slow processor does not reach the limit of time before.
    limits = f"import {grammar_process.__name__} as checks; checks.MEGABYTES = 12; checks.main()"
    process = subprocess.Popen(
        [sys.executable, "-c", limits], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    grammar_process._idle.append(process)
    with pytest.raises(ValueError, match=r"takes more than 96 MB of memory; send a simpler one"):
        await check(LARGE)
    await check('start: "a"')


async def test_a_grammar_that_takes_too_much_time_is_refused_by_that_limit() -> None:
    busy = "import sys\nsys.stdin.readline()\nwhile True: pass"
    limits = "import resource; resource.setrlimit(resource.RLIMIT_CPU, (1, 9))"
    command = [sys.executable, "-c", f"{limits}\n{busy}"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    grammar_process._idle.append(process)
    with pytest.raises(ValueError, match="takes more than 3 s of the processor's time"):
        await check('start: "b"')


async def test_what_needs_no_check_does_not_wait_for_checks() -> None:
    slow = [asyncio.create_task(check(f"{LARGE} // {number}")) for number in range(4)]
    await asyncio.sleep(0.1)
    assert await asyncio.wait_for(made(lambda: ("known", None)), 1.0) == "known"
    for each in slow:
        each.cancel()
    await asyncio.gather(*slow, return_exceptions=True)


async def test_what_nobody_waits_for_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    await check('start: "a"')
    (process, *_) = grammar_process._idle[-1:]
    slow = asyncio.create_task(check('start: "b"'))
    process.send_signal(19)  # SIGSTOP: an answer that never comes
    await asyncio.sleep(0.2)
    slow.cancel()
    with pytest.raises(asyncio.CancelledError):
        await slow
    process.wait(60)
    await check('start: "c"')


async def test_a_check_whose_process_is_killed_is_done_again_in_a_new_process() -> None:
    await killed('start: "b"', times=1)
    with pytest.raises(ValueError, match="unknown name"):
        await killed("start: nothing", times=1)


async def test_a_check_whose_process_is_killed_again_says_nothing_of_the_grammar() -> None:
    with pytest.raises(CheckUnavailable, match="ended with code -9"):
        await killed('start: "b"', times=2)
    await check('start: "b"')


async def killed(grammar: str, times: int) -> None:
    """Check a grammar in processes of which the first ones are killed while it is checked."""
    asleep = [
        subprocess.Popen(["sleep", "60"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for _ in range(times)
    ]
    start = grammar_process._start
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grammar_process, "_idle", [])
        patch.setattr(grammar_process, "_start", lambda: waiting.pop() if waiting else start())
        waiting = list(asleep)
        checking = asyncio.create_task(check(grammar))
        for process in reversed(asleep):
            while process in waiting:
                await asyncio.sleep(0.01)
            process.kill()
        await checking


async def test_a_process_that_was_ended_while_idle_is_replaced() -> None:
    await check('start: "a"')
    for process in grammar_process._idle:
        process.kill()
        process.wait(20)
    await check('start: "b"')
    with pytest.raises(ValueError, match="unknown name"):
        await check("start: nothing")


async def test_a_process_that_has_grown_is_replaced() -> None:
    await check('start: "a"')
    (process, *_) = grammar_process._idle[-1:]
    chain = "\n".join(f'a{number}: "x" a{number + 1}' for number in range(12_000))
    await check(f'start: a0\n{chain}\na12000: "y"')
    assert await asyncio.to_thread(process.wait, 20) == 0
    await check('start: "a"')
