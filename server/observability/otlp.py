"""Exports spans to `--otlp-traces-endpoint` by OTLP over HTTP or gRPC.

The libraries of the extra `otlp` are imported only if that flag is given.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple
from urllib.parse import urlsplit

logger = logging.getLogger(__name__)

_PROTOCOL_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_PROTOCOLS = ("http/protobuf", "grpc")
_GRPC_PORT = 4317
_HTTP_PATH = "/v1/traces"


class Endpoint(NamedTuple):
    """A collector. `url` has the form that the exporter of `protocol` expects."""

    protocol: str
    url: str


def read_endpoint(url: str, environment: Mapping[str, str] = os.environ) -> Endpoint:
    """Parse the URL of a collector.

    `grpc://HOST:PORT` and port 4317 mean gRPC, other URLs HTTP. The variables of
    `_PROTOCOL_VARIABLES` override that. Raises `ValueError` for other URLs and missing libraries.
    """
    flag = f"--otlp-traces-endpoint {url}"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ValueError(f"{flag}: {error}") from None
    if parts.scheme not in ("http", "https", "grpc") or not parts.hostname:
        raise ValueError(
            f"{flag} is no URL of a collector; give http://HOST:4318/v1/traces or grpc://HOST:4317"
        )
    if parts.username is not None or parts.password is not None:
        raise ValueError(
            "--otlp-traces-endpoint: a name or password in the URL can be read by every user of "
            "this machine, and by clients; give it by OTEL_EXPORTER_OTLP_HEADERS"
        )
    named = [environment[name] for name in _PROTOCOL_VARIABLES if environment.get(name)]
    by_url = "grpc" if parts.scheme == "grpc" or port == _GRPC_PORT else "http/protobuf"
    protocol = named[0] if named else by_url
    if protocol not in _PROTOCOLS:
        raise ValueError(
            f"{_PROTOCOL_VARIABLES[0]} must be one of {', '.join(_PROTOCOLS)}, got {protocol!r}"
        )
    package = f"opentelemetry.exporter.otlp.proto.{protocol.partition('/')[0]}.trace_exporter"
    try:
        has_exporter = find_spec(package) is not None  # The SDK may be installed without it.
    except ImportError:
        has_exporter = False
    if not has_exporter:
        raise ValueError(f"{flag} needs OpenTelemetry; pip install 'piecework[otlp]'")
    if protocol == "grpc":
        return Endpoint(
            protocol, parts._replace(scheme=parts.scheme.replace("grpc", "http")).geturl()
        )
    if parts.scheme == "grpc":
        raise ValueError(f"{flag} is for gRPC, and {_PROTOCOL_VARIABLES[0]} says {protocol}")
    return Endpoint(protocol, url if parts.path.strip("/") else url.rstrip("/") + _HTTP_PATH)


def open_provider(endpoint: Endpoint, version: str) -> Any:
    """Return a `TracerProvider` that sends batches from a thread, out of a bounded queue.

    Spans that do not fit into the queue or cannot be sent are dropped. OpenTelemetry's variables
    (OTEL_SERVICE_NAME, OTEL_EXPORTER_OTLP_HEADERS, OTEL_TRACES_SAMPLER, OTEL_BSP_*) are read.
    Raises `ValueError` for invalid values of OTEL_BSP_*.
    """
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

    inner: SpanExporter
    if endpoint.protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc import trace_exporter as over_grpc

        inner = over_grpc.OTLPSpanExporter(
            endpoint.url, insecure=endpoint.url.startswith("http://")
        )
    else:
        from opentelemetry.exporter.otlp.proto.http import trace_exporter as over_http

        inner = over_http.OTLPSpanExporter(endpoint.url)

    class Exporter(SpanExporter):
        """Logs once when the collector stops answering, and once when it answers again."""

        is_failing = False

        def export(self, spans: Sequence[Any]) -> SpanExportResult:
            try:
                result = inner.export(spans)
            except Exception:
                result = SpanExportResult.FAILURE
            failed = result is not SpanExportResult.SUCCESS
            if failed != self.is_failing:
                self.is_failing = failed
                if failed:
                    logger.warning(
                        "traces cannot be sent to %s; they are dropped until it takes them",
                        endpoint.url,
                    )
                else:
                    logger.info("traces are sent to %s again", endpoint.url)
            return result

        def shutdown(self) -> None:
            inner.shutdown()

    named = "OTEL_SERVICE_NAME" in os.environ
    resource = Resource.create(
        {"service.version": version, **({} if named else {"service.name": "piecework"})}
    )
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    try:
        provider.add_span_processor(BatchSpanProcessor(Exporter()))
    except ValueError as error:
        raise ValueError(f"one of the variables OTEL_BSP_* is invalid: {error}") from None
    # Until here the libraries warned about invalid variables. From now on they would warn at each
    # failed export, as `Exporter` already does, and print headers of clients.
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
    return provider
