"""Ranks of other machines join over connections that only who has the key can make or write to."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import pytest

from piecework.runtime.config.nodes import split_address
from piecework.runtime.distributed import join as join_module
from piecework.runtime.distributed.join import (
    Hello,
    accept,
    await_ranks,
    join,
    listen,
)
from piecework.runtime.distributed.sealed import Sealed, hung_up, knock, read_key, welcome

KEY = b"a key of sixteen bytes or more"
SAME = {"torch": "2.13.0", "model": "abc"}
HERE = Hello(0, 0, SAME)


@contextlib.contextmanager
def background(*calls: Callable[[], Any]) -> Iterator[list[Future[Any]]]:
    with ThreadPoolExecutor(max(1, len(calls))) as pool:
        yield [pool.submit(call) for call in calls]


@contextlib.contextmanager
def pair() -> Iterator[tuple[Sealed, Sealed, socket.socket]]:
    """Both ends, and the bare socket of the first."""
    listening, joining = socket.socketpair()
    tcp = {"setsockopt": lambda *_: None}
    ends = [
        type("Plain", (socket.socket,), tcp)(fileno=each.detach()) for each in (listening, joining)
    ]
    with background(lambda: welcome(ends[0], KEY), lambda: knock(ends[1], KEY)) as found:
        first, second = (each.result() for each in found)
    yield first, second, ends[0]
    first.close()
    second.close()


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def address(listener: socket.socket) -> str:
    return f"127.0.0.1:{listener.getsockname()[1]}"


def test_messages_go_both_ways_as_they_are() -> None:
    with pair() as (first, second, _):
        for message in (b"", b"one", bytes(100_000)):
            with background(lambda message=message: first.send_bytes(message)):
                assert second.recv_bytes() == message
            with background(lambda message=message: second.send_bytes(message)):
                assert first.recv_bytes() == message
        first.close()
        with pytest.raises(EOFError):
            second.recv_bytes()


@pytest.mark.parametrize("what", ["changed", "repeated", "reflected", "made up"])
def test_a_message_that_the_other_end_did_not_send_next_is_not_taken(what: str) -> None:
    with pair() as (first, second, bare):
        if what == "reflected":
            second.send_bytes(b"hello")
            frame = bare.recv(1000)
            bare.sendall(frame)
        elif what == "made up":
            bare.sendall(b"\0\0\0\5hello" + bytes(32))
        else:
            recorder, tap = socket.socketpair()
            first._socket = tap
            first.send_bytes(b"hello")
            frame = recorder.recv(1000)
            first._socket = bare
            if what == "repeated":
                bare.sendall(frame)
                assert second.recv_bytes() == b"hello"
            else:
                frame = frame.replace(b"hello", b"jello")
            bare.sendall(frame)
            recorder.close()
            tap.close()
        with pytest.raises(OSError, match=r"did not send"):
            second.recv_bytes()


def test_ranks_come_in_any_order_and_are_told_what_to_do(listener: socket.socket) -> None:
    def rank(number: int) -> dict[str, Any]:
        connection, job = join(address(listener), KEY, Hello(1, number, SAME), 10)
        connection.close()
        return job

    with background(lambda: rank(3), lambda: rank(2)) as joining:
        connections = await_ranks(listener, KEY, HERE, {2: 1, 3: 1}, 10)
        for number, connection in enumerate(connections, start=2):
            accept(connection, {"rank": number})
        assert [each.result() for each in joining] == [{"rank": 3}, {"rank": 2}]


def test_who_says_nothing_or_nonsense_keeps_nobody_out(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Longer than anyone waits here: who was greeted after them would be too late."""
    monkeypatch.setattr(join_module, "_HANDSHAKE_SECONDS", 60.0)
    silent, rude = (socket.create_connection(listener.getsockname()) for _ in range(2))
    rude.sendall(b"GET / HTTP/1.1\r\n\r\n" + b"x" * 100)
    with background(lambda: join(address(listener), KEY, Hello(1, 1, SAME), 10)) as (joining,):
        (connection,) = await_ranks(listener, KEY, HERE, {1: 1}, 10)
        accept(connection, {})
        joining.result()
    silent.close()
    rude.close()


def test_who_says_little_at_a_time_keeps_nobody_out(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(join_module, "_HANDSHAKE_SECONDS", 0.5)
    slow = [
        socket.create_connection(listener.getsockname()) for _ in range(join_module._MAX_HANDSHAKES)
    ]
    joined = threading.Event()

    def trickle() -> None:
        while not joined.wait(0.1):
            for each in slow:
                with contextlib.suppress(OSError):
                    each.sendall(b"x")

    with background(trickle, lambda: accept(*await_ranks(listener, KEY, HERE, {1: 1}, 4), {})) as (
        _,
        leading,
    ):
        try:
            plain = socket.create_connection(listener.getsockname(), timeout=4)
            with plain:
                knock(plain, KEY).send_bytes(json.dumps(asdict(Hello(1, 1, SAME))).encode())
                leading.result()
        finally:
            joined.set()
    for each in slow:
        each.close()


def test_another_key_is_one_line_on_both_nodes(listener: socket.socket) -> None:
    other = b"another key of sixteen bytes"
    with background(lambda: join(address(listener), other, Hello(1, 1, SAME), 10)) as (joining,):
        with pytest.raises(ValueError, match=r"node 1 \(rank 1\) did not join .*1 connections had"):
            await_ranks(listener, KEY, HERE, {1: 1}, 0.5)
        with pytest.raises(ValueError, match=r"node 0, at .* has another key"):
            joining.result()


@pytest.mark.parametrize("name", ["torch", "model"])
def test_a_difference_is_the_same_line_on_all_nodes(listener: socket.socket, name: str) -> None:
    good = Hello(1, 1, SAME)
    bad = Hello(2, 2, {**SAME, name: "other"})
    with background(
        lambda: join(address(listener), KEY, good, 10),
        lambda: (time.sleep(0.1), join(address(listener), KEY, bad, 10)),
    ) as joining:
        with pytest.raises(ValueError, match=rf"node 2 has another {name} than node 0") as said:
            await_ranks(listener, KEY, HERE, {1: 1, 2: 2}, 10)
        for each in joining:
            with pytest.raises(ValueError) as heard:
                each.result()
            assert str(heard.value) == str(said.value)


def test_two_nodes_of_one_number_are_refused_and_one_that_came_again_is_not(
    listener: socket.socket,
) -> None:
    def rank() -> None:
        join(address(listener), KEY, Hello(1, 1, SAME), 10)

    with background(rank, rank) as joining:
        with pytest.raises(ValueError, match=r"two nodes have --node-rank 1"):
            await_ranks(listener, KEY, HERE, {1: 1, 2: 2}, 10)
        for each in joining:
            with pytest.raises(ValueError, match=r"two nodes have"):
                each.result()


def test_who_is_missing_is_named_and_who_has_come_is_told(listener: socket.socket) -> None:
    with background(lambda: join(address(listener), KEY, Hello(1, 2, SAME), 10)) as (joining,):
        with pytest.raises(ValueError, match=r"node 1 \(rank 3\), node 2 \(ranks 4, 5\) did not"):
            await_ranks(listener, KEY, HERE, {2: 1, 3: 1, 4: 2, 5: 2}, 0.5)
        with pytest.raises(ValueError, match=r"did not join"):
            joining.result()


def test_who_has_joined_and_gone_again_is_missing(listener: socket.socket) -> None:
    with background(lambda: await_ranks(listener, KEY, HERE, {1: 1, 2: 2}, 2)) as (leading,):
        for rank in (1, 2):
            with socket.create_connection(listener.getsockname(), timeout=4) as plain:
                hello = json.dumps(asdict(Hello(rank, rank, SAME)))
                knock(plain, KEY).send_bytes(hello.encode())
                if rank == 1:
                    time.sleep(0.3)
                else:
                    with pytest.raises(ValueError, match=r"^node 1 \(rank 1\) did not join"):
                        leading.result()


def test_where_nobody_listens_a_rank_says_so_after_a_while(listener: socket.socket) -> None:
    where = address(listener)
    listener.close()
    with pytest.raises(TimeoutError, match=rf"node 0 was not there within 0.3 s .*{where}"):
        join(where, KEY, Hello(1, 1, SAME), 0.3)


def test_a_port_in_use_is_one_line(listener: socket.socket) -> None:
    with pytest.raises(ValueError, match=r"cannot listen on --dist-init-addr .* in use"):
        listen(address(listener))


def test_another_machine_s_address_is_one_line() -> None:
    with pytest.raises(ValueError, match=r"cannot listen on --dist-init-addr 192.0.2.1:29500"):
        listen("192.0.2.1:29500")


@pytest.mark.parametrize("text", ["", "host", "host:", ":1", "host:0", "host:65536", "host:x"])
def test_an_address_that_is_none_is_one_line(text: str) -> None:
    with pytest.raises(ValueError, match=r"--dist-init-addr"):
        split_address(text)


def test_addresses_are_hosts_and_ports() -> None:
    assert split_address("10.0.0.1:29500") == ("10.0.0.1", 29500)
    assert split_address("[fe80::1]:80") == ("fe80::1", 80)


def test_a_key_comes_from_a_file_or_the_environment(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PIECEWORK_DIST_KEY", raising=False)
    with pytest.raises(ValueError, match=r"--nnodes needs the same key"):
        read_key(None)
    monkeypatch.setenv("PIECEWORK_DIST_KEY", "short")
    with pytest.raises(ValueError, match=r"PIECEWORK_DIST_KEY holds less than 16 bytes"):
        read_key(None)
    file = tmp_path / "key"
    with pytest.raises(ValueError, match=r"--dist-key-file .* cannot be read"):
        read_key(str(file))
    file.write_text("  0123456789abcdef0123\n")
    assert read_key(str(file)) == b"0123456789abcdef0123"


def test_an_end_that_is_gone_is_seen_behind_messages_that_wait() -> None:
    with pair() as (first, second, _):
        first.send_bytes(b"a last word")
        assert not hung_up(second, 0.0)
        threading.Timer(0.1, first.close).start()
        assert hung_up(second, 10.0)
        assert second.recv_bytes() == b"a last word"
