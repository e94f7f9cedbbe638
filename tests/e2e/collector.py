"""An OpenTelemetry collector that keeps what it gets."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.ports import free_ports


class Collector:
    """Takes spans by HTTP while the ``with`` block runs.

    Attributes:
        endpoint: Where to send them.
        spans: What came, in order.
    """

    def __init__(self) -> None:
        self.spans: list[Any] = []
        port = free_ports()
        self.endpoint = f"http://127.0.0.1:{port}/v1/traces"
        self._server = ThreadingHTTPServer(("127.0.0.1", port), self._make_handler())

    def _make_handler(self) -> type[BaseHTTPRequestHandler]:
        spans = self.spans

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                    for scope in resource.scope_spans:
                        spans.extend(scope.spans)
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Say nothing."""

        return Handler

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
