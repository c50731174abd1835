"""The sink: a process on the other core that accepts all PutRecords over plain HTTP and, with a certificate, TLS.

    python -m benchmarks.sink [--cpu N] [--certificate PEM]

It prints its port and its TLS port, and serves until its standard input closes.

In addition to Kinesis' own `POST /` it has these operations for the benchmark:

    POST /open    {"workload": {...}, "delay_ms": 0}    create a new stream
    POST /start                                         discard the warm-up
    GET  /stats                                         requests, bytes and its own CPU time since /start
    GET  /report                                        /stats and the ledger's verdict
"""

import argparse
import asyncio
import gc
import json
import re
import ssl
import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks.kinesis_answers import KinesisAnswers, UnknownOperationError
from benchmarks.machine import pin_to
from benchmarks.workload import Workload

__all__ = ["SinkConnection", "SinkState"]

_HEAD_END = b"\r\n\r\n"
_CONTENT_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_TARGET = re.compile(rb"\r\nx-amz-target: *([\w.]+)", re.IGNORECASE)
_CBOR = re.compile(rb"\r\ncontent-type: *application/x-amz-cbor-1\.1", re.IGNORECASE)


class SinkState:
    """The state shared by all connections: the stream, the counters and the answer delay."""

    def __init__(self) -> None:
        self.answers = KinesisAnswers()
        self.delay_seconds = 0.0
        self._clear()

    def respond(self, head: bytes, body: bytes) -> tuple[bytes, float]:
        """Return the complete HTTP response to one request, and its delay in seconds."""
        method, path, _ = head.split(b" ", 2)
        if path != b"/":
            return self._control(method, path, body), 0.0
        target = _TARGET.search(head)
        is_cbor = _CBOR.search(head) is not None
        try:
            answer = self.answers.answer(target[1] if target else b"", is_cbor=is_cbor, body=body)
        except UnknownOperationError as error:
            return _response(
                b"400 Bad Request", json.dumps({"__type": "UnknownOperationException", "message": str(error)}).encode()
            ), 0.0
        response = _response(b"200 OK", answer, is_cbor=is_cbor)
        self._bytes_in += len(head) + len(_HEAD_END) + len(body)
        self._bytes_out += len(response)
        return response, self.delay_seconds

    def _control(self, method: bytes, path: bytes, body: bytes) -> bytes:
        routes: dict[tuple[bytes, bytes], Callable[[bytes], dict[str, Any]]] = {
            (b"POST", b"/open"): self._open,
            (b"POST", b"/start"): self._start,
            (b"GET", b"/stats"): self._stats,
            (b"GET", b"/report"): self._report,
        }
        route = routes.get((method, path))
        if route is None:
            return _response(b"404 Not Found", b"{}")
        return _response(b"200 OK", json.dumps(route(body)).encode())

    def _open(self, body: bytes) -> dict[str, Any]:
        fields = json.loads(body)
        self.answers.open(Workload.from_fields(fields["workload"]))
        self.delay_seconds = fields.get("delay_ms", 0.0) / 1000
        self._clear()
        return {}

    def _start(self, _body: bytes) -> dict[str, Any]:
        self.answers.start()
        self._clear()
        return {}

    def _stats(self, _body: bytes) -> dict[str, Any]:
        return {
            "requests": self.answers.request_count,
            "bytes_in": self._bytes_in,
            "bytes_out": self._bytes_out,
            "sink_cpu_seconds": time.process_time() - self._cpu_started_at,
        }

    def _report(self, body: bytes) -> dict[str, Any]:
        return self._stats(body) | self.answers.verdict().fields()

    def _clear(self) -> None:
        self._bytes_in = self._bytes_out = 0
        self._cpu_started_at = time.process_time()


class SinkConnection(asyncio.Protocol):
    """One HTTP/1.1 connection; requests are complete bodies with a Content-Length."""

    def __init__(self, state: SinkState) -> None:
        self._state = state
        self._chunks: list[bytes] = []
        self._received_bytes = 0
        self._needed_bytes = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the transport."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Join the pieces of a request only when it is complete: a body of 1 MiB arrives in many pieces."""
        self._chunks.append(data)
        self._received_bytes += len(data)
        if self._received_bytes < self._needed_bytes:
            return
        received = b"".join(self._chunks)
        while (request_bytes := _request_bytes(received)) <= len(received):
            head, _, body = received[:request_bytes].partition(_HEAD_END)
            received = received[request_bytes:]
            self._answer(head, body)
            if not received:
                break
        self._chunks = [received] if received else []
        self._received_bytes = len(received)
        self._needed_bytes = 0 if not received or request_bytes == sys.maxsize else request_bytes

    def _answer(self, head: bytes, body: bytes) -> None:
        response, delay_seconds = self._state.respond(head, body)
        if delay_seconds:
            asyncio.get_running_loop().call_later(delay_seconds, self._transport.write, response)
        else:
            self._transport.write(response)


def _request_bytes(received: bytes) -> int:
    """Return the size of the first request, or sys.maxsize while its head is not complete."""
    head_bytes = received.find(_HEAD_END)
    if head_bytes < 0:
        return sys.maxsize
    content_length = _CONTENT_LENGTH.search(received, 0, head_bytes)
    return head_bytes + len(_HEAD_END) + (int(content_length[1]) if content_length else 0)


def _response(status: bytes, body: bytes, *, is_cbor: bool = False) -> bytes:
    content_type = b"application/x-amz-cbor-1.1" if is_cbor else b"application/x-amz-json-1.1"
    return (
        b"HTTP/1.1 %b\r\nx-amzn-RequestId: 00000000-0000-0000-0000-000000000000\r\n"
        b"Content-Type: %b\r\nContent-Length: %d\r\n\r\n%b" % (status, content_type, len(body), body)
    )


async def _serve(certificate: str) -> None:
    loop = asyncio.get_running_loop()
    state = SinkState()
    contexts: list[ssl.SSLContext | None] = [None]
    if certificate:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        contexts.append(context)
    servers = [
        await loop.create_server(lambda: SinkConnection(state), "127.0.0.1", 0, ssl=context) for context in contexts
    ]
    parent_gone = asyncio.Event()
    loop.add_reader(sys.stdin.fileno(), parent_gone.set)
    print(*(server.sockets[0].getsockname()[1] for server in servers), flush=True)
    await parent_gone.wait()
    for server in servers:
        server.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", type=int, default=None, help="core to stay on")
    parser.add_argument("--certificate", default="", help="PEM file with a key and its certificate, to serve TLS")
    arguments = parser.parse_args()
    pin_to(arguments.cpu)
    # Requests create no reference cycles, and a collection would affect the producer's latency.
    gc.disable()
    asyncio.run(_serve(arguments.certificate))
