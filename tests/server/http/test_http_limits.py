"""No client, whatever it sends, leaves out, or leaves unread, takes a connection, memory or the
server from the others.
"""

from __future__ import annotations

import contextlib
import errno
import gzip
import json
import socket
import time
from collections.abc import Iterator

import psutil
import pytest
from http_fixtures import wait_for
from raw_http import (
    BODY,
    HEAD,
    ask,
    connect,
    parse,
    post,
    read_all,
    seconds_until_closed,
    send,
    send_one,
)
from server_process import ServerProcess, ready
from tiny_models import make_tiny_model

MIB = 2**20
LIMITS = [
    *(
        "--timeout-header",
        "1",
        "--timeout-body",
        "1",
        "--timeout-write",
        "1",
        "--timeout-keep-alive",
        "2",
    ),
    *("--max-header-bytes", "8192", "--max-header-count", "50", "--max-unfinished-bodies", "8"),
]
CHUNKED = b"POST /v1/completions HTTP/1.1\r\n" + HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("model"), "llama"))


@pytest.fixture(scope="module")
def server(model: str) -> Iterator[ServerProcess]:
    with ready(model, *LIMITS) as server:
        assert (
            server.client.post(
                "/v1/completions", content=BODY, headers={"Content-Type": "application/json"}
            ).status_code
            == 200
        )
        yield server


@pytest.fixture(autouse=True)
def still_serves(server: ServerProcess) -> Iterator[None]:
    """After each test the server answers a request as it did before all."""
    yield
    assert parse(send_one(server.port, post())).status == 200


def memory(server: ServerProcess) -> int:
    resident: int = psutil.Process(server.process.pid).memory_info().rss
    return resident


def test_a_header_without_end_is_refused_before_it_takes_memory(server: ServerProcess) -> None:
    before = memory(server)
    (answer,) = send(
        server.port, b"GET /health HTTP/1.1\r\nHost: test\r\nX-Long: ", *[b"a" * MIB] * 180
    )
    assert (answer.status, answer.code, answer.headers["connection"]) == (
        431,
        "headers_too_large",
        "close",
    )
    assert "x-request-id" in answer.headers
    assert memory(server) < before + 20 * MIB


def test_headers_are_refused_by_their_number(server: ServerProcess) -> None:
    few = b"".join(b"X-%d: a\r\n" % number for number in range(40))
    (answer,) = send(server.port, b"GET /health HTTP/1.1\r\nConnection: close\r\n" + few + b"\r\n")
    assert answer.status == 200
    (answer,) = send(server.port, b"GET /health HTTP/1.1\r\n" + few * 2 + b"\r\n")
    assert (answer.status, answer.code) == (431, "headers_too_large")


def test_a_connection_of_anthropics_clients_is_refused_in_their_shape(
    server: ServerProcess,
) -> None:
    many = b"".join(b"X-%d: a\r\n" % number for number in range(80))
    (answer,) = send(server.port, b"POST /v1/messages?beta=true HTTP/1.1\r\n" + many + b"\r\n")
    error = json.loads(answer.body)
    assert (answer.status, error["error"]["type"]) == (431, "invalid_request_error")
    assert error["request_id"] == answer.headers["x-request-id"]


def test_a_long_url_is_refused(server: ServerProcess) -> None:
    (answer,) = send(server.port, b"GET /health?" + b"a" * 9000 + b" HTTP/1.1\r\n\r\n")
    assert (answer.status, answer.code) == (414, "url_too_long")
    (answer,) = send(server.port, b"GET /health?", *[b"a" * MIB] * 40)
    assert answer.status == 414


@pytest.mark.parametrize(
    "beginning",
    [b"GET /health HTTP/1.1\r\nX-Slow: ", b"GET /hea", b"\r\n"],
    ids=["header", "request line", "empty lines"],
)
def test_headers_that_do_not_end_are_timed_out_though_bytes_keep_coming(
    server: ServerProcess, beginning: bytes
) -> None:
    with connect(server.port) as connection:
        connection.sendall(beginning)
        seconds, said = seconds_until_closed(connection, b"\r\n" if beginning == b"\r\n" else b"a")
    assert seconds > 0.9
    assert (parse(said).status, parse(said).code) == (408, "request_timeout")


@pytest.mark.parametrize(
    "framing",
    [b"Content-Length: 4000000\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\nFFFFF\r\n"],
    ids=["length", "chunked"],
)
def test_a_body_that_trickles_is_timed_out(server: ServerProcess, framing: bytes) -> None:
    with connect(server.port) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\n" + HEAD + framing)
        seconds, said = seconds_until_closed(connection, b" ")
    assert seconds > 0.9
    assert (parse(said).status, parse(said).code) == (408, "request_timeout")


def test_a_slow_body_that_goes_on_is_answered(server: ServerProcess) -> None:
    body = BODY[:-1] + b" " * 12000 + b"}"
    request = post(body=body, more=b"Connection: close\r\n")
    with connect(server.port) as connection:
        for at in range(0, len(request), 1200):
            connection.sendall(request[at : at + 1200])
            time.sleep(0.3)
        assert parse(read_all(connection)).status == 200


def test_a_body_that_nobody_reads_is_timed_out_too(server: ServerProcess) -> None:
    with connect(server.port) as connection:
        connection.sendall(
            b"POST /nothing HTTP/1.1\r\n" + HEAD + b"Content-Length: 4000000\r\n\r\n"
        )
        _, said = seconds_until_closed(connection, b" ")
    assert parse(said).status == 404 and not parse(said).rest


def test_idle_connections_are_closed(server: ServerProcess) -> None:
    with connect(server.port) as never, connect(server.port) as again:
        again.sendall(post())
        seconds_until_closed(never)
        _, said = seconds_until_closed(again)
    assert parse(said).status == 200 and not parse(said).rest


def test_a_connection_serves_one_request_after_the_other(server: ServerProcess) -> None:
    with connect(server.port) as connection:
        for _ in range(5):
            assert ask(connection, post()).status == 200
            time.sleep(0.3)


@pytest.mark.parametrize("coding", ["identity", "gzip"])
def test_half_bodies_together_are_bounded(server: ServerProcess, coding: str) -> None:
    before = memory(server)
    body = b" " * 3 * MIB
    request = post(
        body=gzip.compress(body) if coding == "gzip" else body,
        more=f"Content-Encoding: {coding}\r\n".encode(),
    )[:-1]
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(connect(server.port)) for _ in range(30)]
        for connection in connections:
            with contextlib.suppress(ConnectionError):
                connection.sendall(request)
        assert memory(server) < before + 45 * MIB
        first = parse(read_all(connections[0]))
    assert (first.status, first.code) == (503, "too_busy")
    assert "retry-after" in first.headers


def test_a_client_that_reads_nothing_is_cut_off(server: ServerProcess) -> None:
    # Prompts that are echoed with their log-probabilities give an answer of megabytes, far more
    # than sockets hold.
    prompts = [[7] * 1500] * 16
    body = json.dumps({"prompt": prompts, "echo": True, "logprobs": 5, "max_tokens": 1}).encode()
    with connect(server.port, receive_buffer=4096) as connection:
        connection.sendall(post(body=body))
        connection.recv(1)
        wait_for(lambda: not has_connection(server, connection.getsockname()[1]), 30)
        # What the kernel kept for it is gone, too.
        wait_for(
            lambda: connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == errno.ECONNRESET
        )
        said = parse(b"H" + read_all(connection))
    assert said.status == 200
    assert len(said.body) < int(said.headers["content-length"])


def has_connection(server: ServerProcess, port: int) -> bool:
    entries = psutil.Process(server.process.pid).net_connections()
    return any(entry.raddr and entry.raddr.port == port for entry in entries)


def test_trailers_and_chunk_extensions_are_bounded(server: ServerProcess) -> None:
    before = memory(server)
    (answer,) = send(server.port, CHUNKED + b"0\r\nX-Trailer: ", *[b"a" * MIB] * 40)
    assert (answer.status, answer.code) == (400, "invalid_http")
    (answer,) = send(server.port, CHUNKED + b"1;extension=", *[b"a" * MIB] * 40)
    assert (answer.status, answer.code) == (400, "invalid_http")
    (answer,) = send(
        server.port, CHUNKED + b"0\r\n" + b"".join(b"X-%d: a\r\n" % number for number in range(60))
    )
    assert (answer.status, answer.code) == (431, "headers_too_large")
    assert memory(server) < before + 20 * MIB


def test_a_trailer_is_not_a_header(server: ServerProcess) -> None:
    chunks = b"%x\r\n%s\r\n0\r\nX-Request-Id: from-a-trailer\r\n\r\n" % (len(BODY), BODY)
    data = send_one(server.port, CHUNKED + chunks)
    answer = parse(data)
    assert answer.status == 200
    assert answer.headers["x-request-id"] != "from-a-trailer"


def test_chunks_are_bounded_by_their_number(server: ServerProcess) -> None:
    (answer,) = send(server.port, CHUNKED + b"1\r\n \r\n" * 70_000)
    assert (answer.status, answer.code) == (400, "invalid_http")


def test_pipelined_requests_are_answered_in_order_and_are_bounded(server: ServerProcess) -> None:
    before = memory(server)
    got = send(
        server.port,
        post()
        + b"GET /version HTTP/1.1\r\n\r\n" * 5
        + b"GET /health HTTP/1.1\r\nConnection: close\r\n\r\n",
    )
    assert ["choices" in answer.body.decode() for answer in got] == [True] + [False] * 6
    assert b"version" in got[1].body and b"status" in got[-1].body
    got = send(server.port, *[b"GET /health HTTP/1.1\r\n\r\n" * 50_000] * 4)
    assert {answer.status for answer in got} == {200} and len(got) < 1000
    assert memory(server) < before + 30 * MIB


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_of_http_1_0_gets_no_chunks(server: ServerProcess, stream: bool) -> None:
    body = json.dumps({"prompt": [5, 6], "max_tokens": 20, "stream": stream}).encode()
    with connect(server.port) as connection:
        connection.sendall(post(body=body).replace(b"HTTP/1.1", b"HTTP/1.0"))
        head, _, text = read_all(connection).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower() and b"connection: close" in head
    if stream:
        assert text.startswith(b"data: {") and text.endswith(b"data: [DONE]\n\n")
        assert all(line.startswith(b"data: ") for line in text.split(b"\n\n")[:-1])
    else:
        assert json.loads(text)["object"] == "text_completion"


@pytest.mark.parametrize("is_later", [False, True])
@pytest.mark.parametrize("behind", [post(), b"GET /version HTTP/1.1\r\n\r\n", post()[:-3]])
def test_a_request_ends_with_its_client_whatever_waits_behind_it(
    server: ServerProcess, behind: bytes, is_later: bool
) -> None:
    body = json.dumps({"prompt": [7], "max_tokens": 1500, "ignore_eos": True}).encode()

    def figure(name: str) -> float:
        lines = server.client.get("/metrics").text.splitlines()
        return next(
            float(line.split()[-1]) for line in lines if line.startswith(f"piecework:{name}")
        )

    before = figure("num_aborted_requests_total")
    with connect(server.port) as connection:
        connection.sendall(post(body=body) + (b"" if is_later else behind))
        wait_for(lambda: figure("num_running_reqs") == 1)
        if is_later:
            connection.sendall(behind)
            time.sleep(0.05)
    wait_for(lambda: figure("num_running_reqs") == 0)
    assert figure("num_aborted_requests_total") == before + 1


@pytest.mark.parametrize("upgrade", [b"h2c", b"websocket"])
def test_a_wish_for_another_protocol_is_passed_over(server: ServerProcess, upgrade: bytes) -> None:
    # As Java's HttpClient sends every first request.
    more = (
        b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: %s\r\nHTTP2-Settings: AAMAAABk\r\n"
        % upgrade
    )
    with connect(server.port) as connection:
        for _ in range(2):
            assert ask(connection, post(more=more)).status == 200


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"CONNECT example.org:443 HTTP/1.1\r\n\r\n", 405),
        (b"CONNECT /health HTTP/1.1\r\n\r\n", 405),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
        (b"GET /\xff HTTP/1.1\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
        (CHUNKED + b"zz\r\n", 400),
        (b"GET /health HTTP/1.1\r\nNo colon\r\n\r\n", 400),
    ],
    ids=[
        "connect",
        "connect path",
        "http2",
        "tls",
        "bytes",
        "two lengths",
        "bad chunk",
        "bad header",
    ],
)
def test_what_is_no_request_is_an_error_in_the_usual_shape(
    server: ServerProcess, request_bytes: bytes, status: int
) -> None:
    (answer,) = send(server.port, request_bytes)
    assert answer.status == status and answer.code


def test_bytes_behind_a_request_do_not_break_its_answer(server: ServerProcess) -> None:
    (answer,) = send(server.port, post() + b"garbage\r\n\r\n")
    assert answer.status == 200
    (answer,) = send(server.port, post(more=b"Connection: close\r\n") + b"a" * 100_000)
    assert answer.status == 200


def test_a_refused_body_that_waited_for_leave_ends_the_connection(server: ServerProcess) -> None:
    request = (
        b"POST /v1/completions HTTP/1.1\r\n"
        + HEAD
        + b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n"
    )
    (answer,) = send(server.port, request % (5 * MIB))
    assert answer.status == 413
    with connect(server.port) as connection:
        connection.sendall(request % len(BODY))
        assert connection.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        assert ask(connection, BODY).status == 200


def test_a_body_too_large_is_told_so_though_all_of_it_is_sent(server: ServerProcess) -> None:
    answer = server.client.post(
        "/v1/completions", content=b" " * 20 * MIB, headers={"Content-Type": "application/json"}
    )
    assert answer.status_code == 413
    assert server.status() == 200


def test_a_refusal_is_counted(server: ServerProcess) -> None:
    def errors() -> float:
        lines = server.client.get("/metrics").text.splitlines()
        return sum(
            float(line.split()[-1])
            for line in lines
            if line.startswith("piecework:num_errors_total{") and "invalid_request" in line
        )

    before = errors()
    send(server.port, b"nonsense\r\n\r\n")
    assert errors() == before + 1


@pytest.mark.parametrize("kind", ["heads", "body"])
def test_what_waits_behind_a_request_is_bounded_in_bytes(server: ServerProcess, kind: str) -> None:
    before = memory(server)
    running = post(body=json.dumps({"prompt": [7], "max_tokens": 300, "ignore_eos": True}).encode())
    head = b"GET /version HTTP/1.1\r\nX-A: " + b"a" * 8000 + b"\r\n\r\n"
    waiting = head * 31 if kind == "heads" else post(body=b" " * 2 * MIB)
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(connect(server.port)) for _ in range(40)]
        for connection in connections:
            with contextlib.suppress(ConnectionError):
                connection.sendall(running)
        for connection in connections:
            with contextlib.suppress(ConnectionError):
                connection.sendall(waiting)
        assert memory(server) < before + 20 * MIB
        got = parse(read_all(connections[0]))
    assert got.status == 200 and got.rest == b""
