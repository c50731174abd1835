"""POST /v1/logs, /v1/traces, /v1/metrics: OTLP/HTTP (OTLP specification 1.x, "OTLP/HTTP").

The answer has the encoding of the request. The body of an error is a google.rpc.Status. An overloaded gateway answers
429 or 503 for the whole request, with Retry-After. It never answers `partial_success`, because a client must not
retry that.

The stream is the one that the settings of the tenant or the gateway name for the signal. The partition key is the
header field X-Partition-Key (set by OTEL_EXPORTER_OTLP_HEADERS), else a random one for each request.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import msgspec

from kpl_core import Deliveries, UserRecord
from kpl_integrations.asgi.protocol import Receive, Scope, Send
from kpl_integrations.ingest.admission.acknowledgement import answer_spooled
from kpl_integrations.ingest.admission.admission import Counts
from kpl_integrations.ingest.admission.refusals import REFUSALS, Refusal, Refused, refusal_headers, refused_decoding
from kpl_integrations.ingest.admission.senders import SenderRoom
from kpl_integrations.ingest.admission.tenant_account import TenantAccount
from kpl_integrations.ingest.decoding import DecodeRefusal, otlp_in_steps, otlp_records, pieces_of
from kpl_integrations.ingest.decoding.decoded import random_partition_key
from kpl_integrations.ingest.decoding.json_text import printable
from kpl_integrations.ingest.decoding.otlp_body import JSON, PROTOBUF
from kpl_integrations.ingest.decoding.record_counts import counts_in_steps, otlp_counting, result_of
from kpl_integrations.ingest.http.answers import send_answer
from kpl_integrations.ingest.http.bodies import ClientGone, read_body, require_length
from kpl_integrations.ingest.http.large_bodies import small_body
from kpl_integrations.ingest.http.request_head import ACK_HEADER, FieldsByName, header_fields, request_options
from kpl_integrations.ingest.open_gateway import OpenGateway, client_of
from kpl_integrations.ingest.tenants import SIGNALS, Ack, Signal

OTLP_PATHS: Final[Mapping[str, Signal]] = MappingProxyType({f"/v1/{signal}": signal for signal in SIGNALS})

# google.rpc.Code by HTTP status. Clients use the HTTP status first.
_CODES: Final = {400: 3, 401: 16, 403: 7, 404: 5, 405: 12, 408: 4, 413: 8, 415: 3, 429: 8, 502: 14, 503: 14, 504: 4}
_UNKNOWN_CODE: Final = 2


class RpcStatus(msgspec.Struct, frozen=True):
    """google.rpc.Status."""

    code: int
    message: str


class OtlpRoute:
    """The handler of one signal's path."""

    def __init__(self, gateway: OpenGateway, signal: Signal) -> None:
        self._gateway = gateway
        self._signal = signal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one export request."""
        is_protobuf = False
        extra: list[tuple[bytes, bytes]] = []
        try:
            headers: FieldsByName = header_fields(scope["headers"])
            media_type = headers.get(b"content-type", b"").partition(b";")[0].strip().lower().decode("latin-1")
            is_protobuf = media_type == PROTOBUF
            await self._export(scope, media_type, headers, receive)
            status, body = 200, b"" if is_protobuf else b"{}"
        except Refused as refused:
            self._gateway.tally.refusals[refused.refusal] += 1
            status = REFUSALS[refused.refusal].status
            body = status_message(status, refused.detail, is_protobuf=is_protobuf)
            extra = refusal_headers(refused)
        except ClientGone:
            return
        self._gateway.tally.answers[status] += 1
        echoed = (PROTOBUF if is_protobuf else JSON).encode()
        start = [(b"content-type", echoed), (b"content-length", str(len(body)).encode()), *extra]
        await send_answer(send, status, start, body)

    async def _export(self, scope: Scope, media_type: str, headers: FieldsByName, receive: Receive) -> None:
        gateway, settings = self._gateway, self._gateway.settings
        gateway.admission.require_open()
        account = gateway.account_of(scope, headers)
        payer = gateway.payer_of(account, client_of(scope))
        account.requests += 1
        work_bytes = 0
        try:
            account.require_readable(gateway.admission.now(), payer)
            stream, ack = await self._destination(account, media_type, headers)
            require_length(headers.get(b"content-length"), settings.max_body_bytes)
            most, seconds, room = settings.max_body_bytes, settings.body_seconds, gateway.room_of(account, scope)
            body = await read_body(scope, receive, most_bytes=most, seconds=seconds, room=room)
            work_bytes = len(body)
            records, deliveries, counts = await self._put(account, (stream, ack), media_type, headers, body, room)
            try:
                if deliveries and ack == "spooled":
                    await answer_spooled(gateway.producer, deliveries, [])
                elif deliveries and ack == "delivered":
                    await _require_delivered(deliveries)
            except Refused:
                gateway.admission.give_back(account, records, deliveries, counts)
                raise
        except Refused as refused:
            account.count_refused(refused, work_bytes, gateway.admission.now(), payer)
            raise

    async def _destination(self, account: TenantAccount, media_type: str, headers: FieldsByName) -> tuple[str, Ack]:
        """Return the stream of the signal, and how to acknowledge."""
        gateway = self._gateway
        if media_type not in {PROTOBUF, JSON}:
            detail = f"Content-Type is {printable(media_type)!r}; send {PROTOBUF} or {JSON}"
            raise Refused(Refusal.UNSUPPORTED, detail)
        stream = account.tenant.otlp_streams.get(self._signal)
        if stream is None:
            detail = f"no stream is configured for {self._signal} of tenant {account.tenant.id}; name one under [otlp]"
            raise Refused(Refusal.UNKNOWN_STREAM, detail)
        ack = request_options(b"", headers.get(ACK_HEADER)).ack or account.tenant.default_ack
        if ack == "spooled" and gateway.settings.spool is None:
            raise Refused(Refusal.BAD_PARAMETER, "ack=spooled needs a spool, and this gateway has none")
        if stream not in gateway.streams.known:
            # The settings name this stream, so the tenant may use it.
            stream = await gateway.streams.admit(stream, lambda _: True, tenant=account.tenant.id) or stream
        return stream, ack

    async def _put(
        self,
        account: TenantAccount,
        destination: tuple[str, Ack],
        media_type: str,
        headers: FieldsByName,
        body: bytes,
        room: SenderRoom,
    ) -> tuple[Sequence[UserRecord], Deliveries, Counts]:
        """Put and return the records of a request: all or none of them; those of a large body in slices."""
        gateway, settings, inflated = self._gateway, self._gateway.settings, [0]
        encoding, (stream, ack) = headers.get(b"content-encoding"), destination
        options: Any = {"limits": settings.decode_limits(), "partition_key": _partition_key(headers)}
        # A client that learns of a failed delivery sends the records again, so the gateway does not keep them.
        keep, durable = ack != "delivered", ack == "spooled"
        count = None
        if account.tenant.records_per_second is not None:
            count = otlp_counting(self._signal, is_protobuf=media_type == PROTOBUF)
        try:
            small = small_body(encoding, body, settings.max_inflated_bytes)
            if small is not None:
                inflated[0] = 0 if encoding is None else len(small)
                records = otlp_records(self._signal, media_type, small, **options)
                if not records:
                    return (), Deliveries(0), None
                counts = None if count is None else result_of(counts_in_steps(count, records))
                deliveries = gateway.admission.put_records(
                    account, stream, records, keep=keep, durable=durable, counts=counts
                )
                return records, deliveries, counts
            async with gateway.large_bodies.turn(room, len(body)):
                pieces = pieces_of(encoding, body, settings.max_inflated_bytes, inflated)
                steps = otlp_in_steps(self._signal, media_type, pieces, **options)
                records = await gateway.large_bodies.run(steps)
                if not records:
                    return (), Deliveries(0), None
                counts = None if count is None else await gateway.large_bodies.run(counts_in_steps(count, records))
                group = gateway.admission.begin_group(
                    account, stream, records, keep=keep, durable=durable, counts=counts
                )
                await gateway.large_bodies.put(group)
                return records, group.deliveries, counts
        except DecodeRefusal as refusal:
            raise refused_decoding(refusal, inflated[0]) from None
        except Refused as refused:
            refused.work_bytes = inflated[0]
            raise


def _partition_key(headers: FieldsByName) -> str:
    key = headers.get(b"x-partition-key")
    if key is None:
        return random_partition_key()
    try:
        return key.decode()
    except UnicodeDecodeError:
        raise Refused(Refusal.BAD_PARAMETER, "X-Partition-Key is not UTF-8; encode it as UTF-8") from None


async def _require_delivered(deliveries: Deliveries) -> None:
    results = await deliveries.results()
    failed = [result for result in results if not result.successful]
    if failed:
        detail = f"{len(failed)} of {len(results)} records were not delivered ({failed[0].error_code}); send it again"
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
