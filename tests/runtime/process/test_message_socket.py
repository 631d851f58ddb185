"""Messages between the two processes: whole, in order, and nobody waits for the other end."""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from piecework.runtime.core.messages import EngineFailed
from piecework.runtime.process.mailbox import Mailbox
from piecework.runtime.process.message_socket import MessageSocket

Ends = tuple[MessageSocket, MessageSocket]
FRAMES = st.tuples(st.binary(max_size=20), st.binary(max_size=20) | st.just(b"x" * 10**6))


def connected() -> Ends:
    one, other = socket.socketpair()
    return MessageSocket(one), MessageSocket(other)


@pytest.fixture
def ends() -> Iterator[Ends]:
    pair = connected()
    yield pair
    for end in pair:
        end.close()


@settings(max_examples=40)
@given(st.lists(FRAMES, max_size=6))
def test_what_arrives_is_what_was_sent(messages: list[tuple[bytes, bytes]]) -> None:
    """However the system cuts it, and more of it than a socket holds."""
    sender, receiver = connected()
    for message in messages:
        sender.send(list(message))
    received = []
    while len(received) < len(messages):
        if not receiver.has_more:
            sender.flush()
            assert select.select([receiver], [], [], 5)[0], "this end is not told of what came"
        if (frames := receiver.receive()) is not None:
            received.append(tuple(frames))
    assert received == messages
    assert receiver.receive() is None and not receiver.has_more
    sender.close()
    receiver.close()


def test_an_end_that_waits_for_messages_goes_on_sending(ends: Ends) -> None:
    """An engine that has nothing to do, and a web process that was busy."""
    engine, web = ends
    assert not engine.send([b"name", bytes(10**6)])
    taken = threading.Thread(target=lambda: web.poll(5000))
    taken.start()
    assert not engine.poll(200)
    taken.join(5)
    assert engine.flush()
    assert web.receive() == [b"name", bytes(10**6)]


def test_what_is_kept_leaves_whenever_messages_are_asked_for(ends: Ends) -> None:
    engine, web = ends
    assert not engine.send([b"name", bytes(10**6)])
    for _ in range(100):
        assert not engine.poll(0)
        if (frames := web.receive()) is not None:
            break
    assert frames == [b"name", bytes(10**6)]


def test_a_long_message_leaves_before_the_next_step(ends: Ends) -> None:
    engine, web = ends
    taken = threading.Thread(target=lambda: web.poll(2000))
    taken.start()
    Mailbox(engine).send(EngineFailed(message="x" * 10**7))
    taken.join(5)
    assert web.poll(0)


def test_an_engine_goes_on_where_nobody_takes_its_messages(ends: Ends) -> None:
    engine, web = ends
    Mailbox(engine).send(EngineFailed(message="x" * 10**6))
    web.close()
    Mailbox(engine).send(EngineFailed(message="x"))
    assert engine.is_closed


def test_a_wait_ends_with_a_message_or_its_time(ends: Ends) -> None:
    engine, web = ends
    began = time.monotonic()
    assert not engine.poll(30)
    assert time.monotonic() - began >= 0.03
    late = threading.Timer(0.02, lambda: web.send([b"name", b""]))
    late.start()
    assert engine.poll(1_000_000)
    late.join()


def test_an_end_whose_other_is_gone_neither_fails_nor_spins(ends: Ends) -> None:
    engine, web = ends
    web.close()
    began, computed = time.monotonic(), time.thread_time()
    assert engine.send([b"name", bytes(10**6)])
    assert not engine.poll(400)
    assert engine.is_closed and engine.receive() is None
    assert time.thread_time() - computed < 0.3 * (time.monotonic() - began)


def test_what_had_arrived_is_read_although_the_other_end_is_gone(ends: Ends) -> None:
    engine, web = ends
    web.send([b"name", b"last words"])
    web.close()
    engine.send([b"name", b"nobody reads this"])
    assert engine.is_closed
    assert engine.poll(0) and engine.receive() == [b"name", b"last words"]
    assert not engine.poll(0)


def test_an_end_that_closes_says_all_of_its_last_words(ends: Ends) -> None:
    engine, web = ends
    assert not engine.send([b"name", bytes(10**6)])
    leaving = threading.Thread(target=lambda: engine.close(linger=5.0))
    leaving.start()
    assert web.poll(5000)
    assert web.receive() == [b"name", bytes(10**6)]
    leaving.join(5)


def test_an_end_that_closes_waits_no_longer_than_it_was_told(ends: Ends) -> None:
    engine, _ = ends
    engine.send([b"name", bytes(10**6)])
    engine.close(linger=0.05)
    assert engine._socket.gettimeout() == 0.05
