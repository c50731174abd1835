"""POST /v1/logs, /v1/traces, /v1/metrics: OTLP/HTTP (OTLP specification 1.x, "OTLP/HTTP").

The answer has the encoding of the request. The body of an error is a google.rpc.Status. An overloaded gateway answers
429 or 503 for the whole request, with Retry-After. It never answers `partial_success`, because a client must not
retry that.

The stream is the one that the settings of the tenant or the gateway name for the signal. The partition key is the
header field X-Partition-Key (set by OTEL_EXPORTER_OTLP_HEADERS), else a random one for each request.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Final, cast

import msgspec

from kpl_core import Deliveries, UserRecord
from kpl_integrations.ingest.admission.admission import Counts
from kpl_integrations.ingest.admission.refusals import REFUSALS, Refusal, Refused, refusal_headers, refused_decoding
from kpl_integrations.ingest.decoding import DecodeRefusal, otlp_in_steps, otlp_records, small_body
from kpl_integrations.ingest.decoding.decoded import random_partition_key
from kpl_integrations.ingest.decoding.json_text import printable
from kpl_integrations.ingest.decoding.otlp_body import JSON, PROTOBUF
from kpl_integrations.ingest.decoding.record_counts import counts_in_steps, otlp_counting, result_of
from kpl_integrations.ingest.http.answers import Answer
from kpl_integrations.ingest.http.request_head import (
    ACK_HEADER,
    FieldsByName,
    Server,
    authorization_of,
    request_options,
)
from kpl_integrations.ingest.open_gateway import OpenGateway
from kpl_integrations.ingest.request.needs import LargeBody, Results, Slices, Steps, StreamName
from kpl_integrations.ingest.request.request import (
    Request,
    body,
    cpu_share,
    credentials,
    length,
    open_gateway,
    refused_bytes,
    repeated_fields,
    require_spool,
    stored,
)
from kpl_integrations.ingest.tenants import SIGNALS, Ack, Signal

OTLP_PATHS: Final[Mapping[str, Signal]] = MappingProxyType({f"/v1/{signal}": signal for signal in SIGNALS})

# google.rpc.Code by HTTP status. Clients use the HTTP status first.
_CODES: Final = {400: 3, 401: 16, 403: 7, 404: 5, 405: 12, 408: 4, 413: 8, 415: 3, 429: 8, 502: 14, 503: 14, 504: 4}
_UNKNOWN_CODE: Final = 2


_Put = tuple[Sequence[UserRecord], Deliveries, Counts]


class RpcStatus(msgspec.Struct, frozen=True):
    """google.rpc.Status."""

    code: int
    message: str


def media_type(request: "OtlpRequest") -> None:
    """Check that the body is protobuf or JSON."""
    if request.media_type not in {PROTOBUF, JSON}:
        detail = f"Content-Type is {printable(request.media_type)!r}; send {PROTOBUF} or {JSON}"
        raise Refused(Refusal.UNSUPPORTED, detail)


def named_stream(request: "OtlpRequest") -> None:
    """Check that the settings name a stream for the signal."""
    tenant = request.account.tenant
    stream = tenant.otlp_streams.get(request.signal)
    if stream is None:
        detail = f"no stream is configured for {request.signal} of tenant {tenant.id}; name one under [otlp]"
        raise Refused(Refusal.UNKNOWN_STREAM, detail)
    request.stream = stream


def options(request: "OtlpRequest") -> None:
    """X-Ack is valid, and the gateway has a spool if it asks for one."""
    request.ack = request_options(b"", request.headers.get(ACK_HEADER)).ack or request.account.tenant.default_ack
    if request.ack == "spooled":
        require_spool(request.gateway)


def existing_stream(request: "OtlpRequest") -> Steps[None] | None:
    """Check that the stream exists."""
    return None if request.stream in request.gateway.streams.known else request.look_up_stream()


class OtlpRequest(Request):
    """One export request of a signal."""

    __slots__ = ("ack", "media_type", "signal")
    ack: Ack
    route = "/v1/{signal}"
    who = (open_gateway, repeated_fields, credentials)
    may_it = (cpu_share, refused_bytes, media_type, named_stream, options, existing_stream, length, body)

    def __init__(
        self,
        gateway: OpenGateway,
        signal: Signal,
        headers: FieldsByName,
        client: str,
        body: bytes | None,
        server: Server | None,
    ) -> None:
        super().__init__(gateway, headers, authorization_of(headers), client, body, server)
        self.signal = signal
        self.media_type = headers.get(b"content-type", b"").partition(b";")[0].strip().lower().decode("latin-1")

    def look_up_stream(self) -> Steps[None]:
        """Find the stream. The settings name it, so the tenant may use it."""
        self.stream = (yield StreamName(self.stream, lambda _: True, self.account.tenant.id)) or self.stream

    def accept(self, received: bytes) -> Steps[Answer]:
        """Put the records, and answer once `ack` is true."""
        records, deliveries, counts = yield from self._put(received)
        try:
            if deliveries and self.ack == "spooled":
                yield from stored(deliveries)
            elif deliveries and self.ack == "delivered":
                yield Results(deliveries)
                _require_delivered(deliveries)
        except Refused:
            self.gateway.admission.give_back(self.account, records, deliveries, counts)
            raise
        is_protobuf = self.media_type == PROTOBUF
        return Answer(200, b"" if is_protobuf else b"{}", [self._content_type()])

    def rejection(self, error: Exception) -> Answer:
        """Return a google.rpc.Status."""
        refused = cast("Refused", error)
        status = REFUSALS[refused.refusal].status
        content = status_message(status, refused.detail, is_protobuf=self.media_type == PROTOBUF)
        return Answer(status, content, [self._content_type(), *refusal_headers(refused)], refused.is_unread)

    def _content_type(self) -> tuple[bytes, bytes]:
        return b"content-type", (PROTOBUF if self.media_type == PROTOBUF else JSON).encode()

    def _put(self, received: bytes) -> Steps[_Put]:
        """Put and return the records: all or none of them; those of a large body in slices."""
        settings, encoding = self.gateway.settings, self.headers.get(b"content-encoding")
        options: dict[str, Any] = {
            "limits": settings.decode_limits(),
            "partition_key": _partition_key(self.headers),
        }
        try:
            small = small_body(encoding, received, settings.max_inflated_bytes)
            if small is None:
                put: _Put = yield LargeBody(self.room(), len(received), self._put_large(received, options))
                return put
            self.inflated_bytes = 0 if encoding is None else len(small)
            records = otlp_records(self.signal, self.media_type, small, **options)
        except DecodeRefusal as refusal:
            raise refused_decoding(refusal) from None
        return (yield from self._put_decoded(records, in_slices=False))

    def _put_large(self, received: bytes, options: dict[str, Any]) -> Steps[_Put]:
        decoder = partial(otlp_in_steps, self.signal, self.media_type, **options)
        records = yield from self.decode_large(received, decoder)
        return (yield from self._put_decoded(records, in_slices=True))

    def _put_decoded(self, records: Sequence[UserRecord], *, in_slices: bool) -> Steps[_Put]:
        if not records:
            return (), Deliveries(0), None
        counts: Counts = None
        if self.account.tenant.records_per_second is not None:
            counting = counts_in_steps(otlp_counting(self.signal, is_protobuf=self.media_type == PROTOBUF), records)
            counts = (yield Slices(counting)) if in_slices else result_of(counting)
        # A client that learns of a failed delivery sends the records again, so the gateway does not keep them.
        keep, durable = self.ack != "delivered", self.ack == "spooled"
        deliveries = yield from self.put(
            self.stream, records, in_slices=in_slices, keep=keep, durable=durable, counts=counts
        )
        return records, deliveries, counts


def _partition_key(headers: FieldsByName) -> str:
    key = headers.get(b"x-partition-key")
    if key is None:
        return random_partition_key()
    try:
        return key.decode()
    except UnicodeDecodeError:
        raise Refused(Refusal.BAD_PARAMETER, "X-Partition-Key is not UTF-8; encode it as UTF-8") from None


def _require_delivered(deliveries: Deliveries) -> None:
    failures = deliveries.known_failures()
    if failures:
        code = next(iter(failures.values())).error_code
        detail = f"{len(failures)} of {len(deliveries)} records were not delivered ({code}); send it again"
        raise Refused(Refusal.NOT_DELIVERED, detail)


def status_message(status: int, detail: str, *, is_protobuf: bool) -> bytes:
    """Return a google.rpc.Status: `code` (field 1) and `message` (field 2)."""
    code = _CODES.get(status, _UNKNOWN_CODE)
    if not is_protobuf:
        return msgspec.json.encode(RpcStatus(code, detail))
    message = detail.encode()
    return b"\x08" + bytes([code]) + b"\x12" + _length(len(message)) + message


def _length(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:  # noqa: PLR2004 - seven bits in a byte
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoded, value])
