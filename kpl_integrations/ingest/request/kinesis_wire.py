"""POST /: the Kinesis API. An AWS SDK or agent gets aggregation and fairness by changing only its endpoint.

PutRecord and PutRecords always wait for delivery: they answer sequence number and shard of the Kinesis record that
contains the user record. A record with an error is not kept, even with a spool: every client sends it again, and this
API cannot express "not delivered, but safe". Throttled records are answered like those of a busy shard of Kinesis,
one by one, because every client retries those.
"""

import uuid
from collections.abc import Mapping, Sequence
from hashlib import sha256
from http import HTTPStatus
from types import MappingProxyType
from typing import Final, NamedTuple, cast

import msgspec

from kpl_core import Deliveries, RecordResult, UserRecord
from kpl_core.options.kinesis_limits import MAX_HASH_KEY, MIB
from kpl_core.records.record_result import BREAKER_OPEN, EXPIRED, RATE_LIMITED
from kpl_integrations.asgi.protocol import Scope, retry_after_header
from kpl_integrations.ingest.admission.admission import Counts
from kpl_integrations.ingest.admission.refusals import Refusal, Refused
from kpl_integrations.ingest.decoding import SMALL_BYTES
from kpl_integrations.ingest.decoding.put_records_body import named_stream, put_records_in_steps
from kpl_integrations.ingest.decoding.record_counts import aggregate_counts_in_steps, result_of
from kpl_integrations.ingest.http.answers import Answer
from kpl_integrations.ingest.http.request_head import FieldsByName, Server, authorization_of
from kpl_integrations.ingest.open_gateway import OpenGateway
from kpl_integrations.ingest.request.needs import (
    KinesisCall,
    LargeBody,
    Results,
    Slices,
    Steps,
    StreamName,
)
from kpl_integrations.ingest.request.request import (
    Request,
    add_to_hash,
    body,
    cpu_share,
    length,
    open_gateway,
    refused_bytes,
    repeated_fields,
)
from kpl_integrations.ingest.streams.upstream import FAILED, FORWARDED, TOO_OFTEN, UNAVAILABLE
from kpl_integrations.ingest.tenants import AccessKey
from kpl_integrations.kinesis_protocol.requests import (
    INVALID_ARGUMENT,
    UNKNOWN_OPERATION,
    PutRecord,
    PutRecords,
    PutRecordsRequestEntry,
    RequestRefused,
    StreamRequest,
)
from kpl_integrations.kinesis_protocol.sigv4 import (
    REFUSED_CREDENTIALS,
    Credential,
    SignedRequest,
    named_credential,
    require_signature,
)
from kpl_integrations.kinesis_protocol.wire import (
    JSON_CONTENT_TYPE,
    PutResult,
    error_body,
    operation_of,
    present,
    request_of,
    wire_of,
)

THROTTLED: Final = "ProvisionedThroughputExceededException"
_UNKNOWN_KEY: Final = "UnrecognizedClientException"
_INVALID_TOKEN: Final = "The security token included in the request is invalid."  # noqa: S105 - no token
_OPERATIONS: Final = ("PutRecord", "PutRecords", *FORWARDED)
# 10 MiB of data are 13.4 MiB of base64.
_MOST_BODY_BYTES: Final = 16 * MIB
# Retry-After if Kinesis could not be asked: the time that a new connection may take.
_UPSTREAM_RETRY_SECONDS: Final = 1.0
# Between the stream and the token of Kinesis; no stream name or ARN has it.
_TOKEN_SEPARATOR: Final = "|"  # noqa: S105 - no password
# Codes of attempts that Kinesis throttled, and of records that waited for room or rate until they expired.
_THROTTLED_CODES: Final = frozenset({THROTTLED, EXPIRED, RATE_LIMITED, BREAKER_OPEN})


class WireAnswer(NamedTuple):
    """A refusal in the terms of the Kinesis API. `per_record`: PutRecords answers 200 with this code per record."""

    code: str
    status: int = 400
    per_record: bool = False


UNAVAILABLE_ANSWER: Final = WireAnswer(UNAVAILABLE, 503)

WIRE_ANSWERS: Final[Mapping[Refusal, WireAnswer]] = MappingProxyType(
    {
        Refusal.QUOTA: WireAnswer(THROTTLED, per_record=True),
        Refusal.QUEUE_SHARE: WireAnswer(THROTTLED, per_record=True),
        Refusal.CPU_SHARE: UNAVAILABLE_ANSWER,
        Refusal.NO_ROOM: WireAnswer(THROTTLED, per_record=True),
        Refusal.BREAKER_OPEN: UNAVAILABLE_ANSWER,
        Refusal.DRAINING: UNAVAILABLE_ANSWER,
        Refusal.STREAM_UNCERTAIN: UNAVAILABLE_ANSWER,
        Refusal.BAD_CREDENTIALS: WireAnswer(_UNKNOWN_KEY),
        Refusal.FORBIDDEN: WireAnswer("AccessDeniedException"),
        Refusal.UNKNOWN_STREAM: WireAnswer("ResourceNotFoundException"),
        Refusal.TOO_LARGE: WireAnswer("RequestEntityTooLargeException", 413),
        Refusal.SLOW_BODY: WireAnswer("RequestTimeoutException", 408),
        Refusal.BAD_PARAMETER: WireAnswer("SerializationException"),
        Refusal.BAD_RECORDS: WireAnswer("ValidationException"),
    }
)
# Codes with status 400 that no row of the table of refusals has.
WIRE_CODES: Final = REFUSED_CREDENTIALS | {INVALID_ARGUMENT, TOO_OFTEN, UNKNOWN_OPERATION}


class _NotStored(NamedTuple):
    """The result of a record that Kinesis did not store."""

    error_code: str
    error_message: str
    shard_id: str | None = None
    sequence_number: str | None = None


def named_key(request: "KinesisRequest") -> None:
    """Check that the access key is that of a tenant. So an unknown client cannot make the gateway read 16 MiB."""
    gateway, authorization = request.gateway, request.authorization
    if gateway.directory.unknown is None or (authorization is not None and gateway.directory.verifies):
        request.credential = named_credential(authorization)
        request.key = gateway.directory.access_key(request.credential.access_key_id)
        if request.key is None:
            raise RequestRefused(_UNKNOWN_KEY, _INVALID_TOKEN)


def address_bytes(request: "KinesisRequest") -> None:
    """Check that the address has not sent too many bytes in requests that were refused."""
    request.gateway.addresses.require(request.room().client, request.now())


def signature(request: "KinesisRequest") -> Steps[None]:
    """Check that the signature, which covers the body, is that of the tenant's key."""
    hashed = sha256()
    yield from add_to_hash(hashed, request.body or b"")
    key, unknown = request.key, request.gateway.directory.unknown
    if key is not None:
        signed = request.signed._replace(body_hash=hashed.hexdigest())
        tenant = require_signature(signed, request.credential, lambda _: key, now=request.gateway.wall_clock()).tenant
    else:
        assert unknown is not None  # noqa: S101 - `named_key` has found it
        tenant = unknown
    request.know(request.gateway.accounts.of(tenant))


def known_operation(request: "KinesisRequest") -> None:
    """Check that the gateway implements the operation that `X-Amz-Target` names."""
    request.operation = operation_of(request.by_name.get("x-amz-target"), _OPERATIONS)


class KinesisRequest(Request):
    """One request of the Kinesis API.

    Until its signature is verified, it uses the room and the budget of its address, never those of the tenant whose
    key id it names.
    """

    __slots__ = ("by_name", "credential", "key", "operation", "signed", "wire")
    operation: str
    credential: Credential
    route = "/"
    who = (open_gateway, repeated_fields, named_key, address_bytes, length, body, signature)
    may_it = (cpu_share, refused_bytes, known_operation)

    def __init__(
        self,
        gateway: OpenGateway,
        headers: FieldsByName,
        signed: SignedRequest,
        client: str,
        body: bytes | None,
        server: Server | None,
    ) -> None:
        super().__init__(gateway, headers, authorization_of(headers), client, body, server)
        self.by_name = {name.decode("latin-1"): value.decode("latin-1") for name, value in headers.items()}
        self.wire = wire_of(self.by_name.get("content-type"))
        self.signed = signed
        self.key: AccessKey | None = None

    def most_bytes(self) -> int:
        """Return how many bytes the body may have: only PutRecords may have more than are decoded at once."""
        settings = self.gateway.settings
        is_cut = self.by_name.get("x-amz-target", "").endswith(".PutRecords")
        most = _MOST_BODY_BYTES if is_cut else settings.decode_limits().max_uncut_bytes
        return min(most, settings.max_body_bytes)

    def accept(self, received: bytes) -> Steps[Answer]:
        """Put the records and answer their results, or forward the call to Kinesis."""
        if self.operation == "PutRecords":
            return self._answer((yield from self._put_records(received)))
        request = request_of(self.wire, self.operation, received)
        assert isinstance(request, StreamRequest)  # noqa: S101 - all operations here name a stream
        arguments = {} if isinstance(request, PutRecord) else present(msgspec.to_builtins(request))
        asked = request.stream() or _stream_of_token(arguments)
        stream = (yield from self._require_stream(asked)) if asked else ""
        if isinstance(request, PutRecord):
            return self._answer((yield from self._put_record(stream, request)))
        answer = dict((yield KinesisCall(self.operation, arguments, self.account.tenant.id)))
        if answer.get("NextToken"):
            answer["NextToken"] = f"{asked}{_TOKEN_SEPARATOR}{answer['NextToken']}"
        return self._answer(self.wire.encode(answer))

    def charge(self, error: Exception) -> None:
        """Charge the bytes to the tenant, or to the address before the tenant is known."""
        if not self._is_known:
            work_bytes = self.received_bytes + getattr(error, "work_bytes", 0)
            self.gateway.addresses.charge(self.room().client, work_bytes, self.now())
        elif not isinstance(error, RequestRefused):
            super().charge(error)
        elif error.status < HTTPStatus.INTERNAL_SERVER_ERROR and error.code != THROTTLED:
            self.account.charge(self.received_bytes, self.now(), self.payer)

    def rejection(self, error: Exception) -> Answer:
        """Return an error of the Kinesis API."""
        if isinstance(error, RequestRefused):
            if error.code in REFUSED_CREDENTIALS:
                self.gateway.tally.refusals[Refusal.BAD_CREDENTIALS] += 1
            retry_after = _UPSTREAM_RETRY_SECONDS if error.code == UNAVAILABLE else None
            return self._answer(error_body(self.wire, error.code, error.message), error.status, retry_after)
        refused = cast("Refused", error)
        answer = WIRE_ANSWERS.get(refused.refusal, WireAnswer(FAILED, 500))
        retry_after = refused.retry_after if answer is UNAVAILABLE_ANSWER else None
        content = error_body(self.wire, answer.code, refused.detail)
        return self._answer(content, answer.status, retry_after)._replace(is_unread=refused.is_unread)

    def _answer(self, content: bytes, status: int = 200, retry_after: float | None = None) -> Answer:
        fields = [
            (b"content-type", self.wire.content_type.encode()),
            (b"x-amzn-requestid", str(uuid.uuid4()).encode()),
        ]
        if retry_after is not None:
            fields.append(retry_after_header(retry_after))
        return Answer(status, content, fields)

    def _require_stream(self, stream: str) -> Steps[str]:
        """Return the canonical name of the stream."""
        self.stream = stream
        if self._may_write_to(stream):
            return stream
        tenant = self.account.tenant
        name: str | None = yield StreamName(stream, tenant.allows, tenant.id)
        if name is None:
            operation = f"kinesis:{self.operation}"
            detail = f"tenant {tenant.id} is not authorized to perform: {operation} on stream {stream}"
            raise Refused(Refusal.FORBIDDEN, detail)
        return name

    def _may_write_to(self, stream: str) -> bool:
        return stream in self.gateway.streams.known and self.account.tenant.allows(stream)

    def _put_record(self, stream: str, request: PutRecord) -> Steps[bytes]:
        put = yield from self._put(stream, [request])
        (result,) = yield from self._results(*put)
        if result.error_code is not None:
            status = 400 if result.error_code == THROTTLED else 500
            raise RequestRefused(result.error_code, result.error_message or "", status=status)
        return self.wire.encode({"ShardId": result.shard_id, "SequenceNumber": result.sequence_number})

    def _put_records(self, received: bytes) -> Steps[bytes]:
        is_large = len(received) > SMALL_BYTES
        is_cut = is_large and self.wire.content_type == JSON_CONTENT_TYPE
        entries: list[PutRecordsRequestEntry] = []
        # Kinesis is asked for a stream without a turn, so that a slow answer does not stop other large bodies.
        asked = named_stream(received) if is_cut else ""
        stream = (yield from self._require_stream(asked)) if asked else ""
        try:
            steps = self._decode_and_put(received, asked, stream, entries, is_cut=is_cut)
            put, asked = (yield LargeBody(self.room(), len(received), steps)) if is_large else (yield from steps)
            if put is None:
                stream = yield from self._require_stream(asked)
                late = self._put(stream, entries, in_slices=is_large)
                put = (yield LargeBody(self.room(), len(received), late)) if is_large else (yield from late)
        except Refused as refused:
            answer = WIRE_ANSWERS.get(refused.refusal)
            if answer is None or not answer.per_record or not entries:
                raise
            super().charge(refused)
            self.gateway.tally.refusals[refused.refusal] += 1
            return self.wire.encode_put_results([_NotStored(answer.code, refused.detail)] * len(entries))
        return self.wire.encode_put_results((yield from self._results(*put)))

    def _decode_and_put(
        self, received: bytes, asked: str, stream: str, entries: list[PutRecordsRequestEntry], *, is_cut: bool
    ) -> "Steps[tuple[_Put | None, str]]":
        """Decode the body into `entries` and put them. Return None and their stream if that is to be looked up."""
        if is_cut:
            most = self.gateway.settings.decode_limits().max_uncut_bytes
            request: PutRecords = yield Slices(put_records_in_steps(received, most))
        else:
            request = cast("PutRecords", request_of(self.wire, "PutRecords", received))
        entries += request.records or ()
        if request.stream() != asked:
            asked = request.stream()
            stream = asked if self._may_write_to(asked) else ""
        if not stream:
            return None, asked
        return (yield from self._put(stream, entries, in_slices=len(received) > SMALL_BYTES)), asked

    def _put(
        self, stream: str, entries: Sequence[PutRecord | PutRecordsRequestEntry], *, in_slices: bool = False
    ) -> "Steps[_Put]":
        for entry in entries:
            if entry.explicit_hash_key is not None:
                _require_hash_key(entry.explicit_hash_key)
        records = [
            UserRecord(entry.partition_key or "", entry.data or b"", entry.explicit_hash_key) for entry in entries
        ]
        counting = aggregate_counts_in_steps(records)
        counts: Counts = (yield Slices(counting)) if in_slices else result_of(counting)
        deliveries = yield from self.put(
            stream, records, in_slices=in_slices, aggregate=counts is None, keep=False, counts=counts
        )
        return records, deliveries, counts

    def _results(self, records: Sequence[UserRecord], deliveries: Deliveries, counts: Counts) -> Steps[list[PutResult]]:
        """Return the result of each record. A request of which nothing was stored costs no rate."""
        if deliveries:
            yield Results(deliveries)
        results = [_put_result(result) for result in deliveries.known_results() or ()]
        if all(result.error_code is not None for result in results):
            self.gateway.admission.give_back(self.account, records, deliveries, counts)
        return results


_Put = tuple[Sequence[UserRecord], Deliveries, Counts]


def signed_request(scope: Scope) -> SignedRequest:
    """Return what a signature covers of a request, without the hash of its body."""
    raw_path: bytes = scope.get("raw_path") or scope["path"].encode()
    path, query = raw_path.decode("latin-1").partition("?")[0], scope["query_string"].decode("latin-1")
    headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]]
    return SignedRequest(scope["method"], path, query, headers, b"")


def _stream_of_token(arguments: dict[str, object]) -> str:
    """Return the stream of a token of ListShards, and put Kinesis' own token into `arguments`.

    A token stands for a stream. Clients get it together with the stream, so that the tenant's permission is checked.
    """
    token = arguments.get("NextToken")
    if token is None:
        return ""
    stream, separator, arguments["NextToken"] = str(token).partition(_TOKEN_SEPARATOR)
    if not (separator and stream and arguments["NextToken"]):
        raise RequestRefused(INVALID_ARGUMENT, "NextToken is not one that this gateway returned.")
    return stream


def _require_hash_key(explicit_hash_key: str) -> None:
    if int(explicit_hash_key) > MAX_HASH_KEY:
        message = (
            f"Invalid ExplicitHashKey. ExplicitHashKey must be in the range: [0, 2^128-1]. "
            f"Specified value was {explicit_hash_key}"
        )
        raise RequestRefused(INVALID_ARGUMENT, message)


def _put_result(result: RecordResult) -> PutResult:
    if result.successful:
        return result
    codes = {attempt.error_code for attempt in result.attempts}
    message = f"{result.error_code or FAILED}: {result.error_message or 'the record was not stored'}"
    return _NotStored(THROTTLED if codes & _THROTTLED_CODES else FAILED, message)
