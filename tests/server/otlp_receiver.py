"""A collector for tests: takes OTLP over HTTP or gRPC on loopback, and keeps the spans."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


class Received:
    """Spans by name, in the order of their arrival, and the attributes of what sent them."""

    def __init__(self, url: str = "") -> None:
        self.url = url
        self.spans: list[Any] = []
        self.resource: dict[str, Any] = {}

    def take(self, request: Any) -> None:
        for sent in request.resource_spans:
            self.resource = attributes(sent.resource)
            self.spans += [span for scope in sent.scope_spans for span in scope.spans]

    def named(self, name: str) -> list[Any]:
        return [span for span in self.spans if span.name == name]


def attributes(owner: Any) -> dict[str, Any]:
    return {one.key: _value(one.value) for one in owner.attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, kind)


@contextlib.contextmanager
def http_receiver() -> Iterator[Received]:
    received = Received()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            assert self.path == "/v1/traces"
            received.take(trace_service_pb2.ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        received.url = f"http://127.0.0.1:{server.server_port}"
        yield received
        server.shutdown()


@contextlib.contextmanager
def grpc_receiver() -> Iterator[Received]:
    received = Received()

    class Service(trace_service_pb2_grpc.TraceServiceServicer):  # type: ignore[misc]
        def Export(self, request: Any, context: Any) -> Any:
            received.take(request)
            return trace_service_pb2.ExportTraceServiceResponse()

    server = grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Service(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    received.url = f"grpc://127.0.0.1:{port}"
    yield received
    server.stop(None)
