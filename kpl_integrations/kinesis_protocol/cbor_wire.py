"""The CBOR format, `application/x-amz-cbor-1.1`, which the Java and C++ SDKs use; blobs are not encoded.

The AWS SDK for Java writes and expects timestamps as tag 1 with milliseconds, although tag 1 of CBOR means
seconds. A number too large to be seconds is read as milliseconds.
"""

from collections.abc import Iterable, Mapping
from typing import Final, TypeVar

import cbor2
import msgspec

from kpl_integrations.kinesis_protocol.requests import SERIALIZATION, RequestRefused
from kpl_integrations.kinesis_protocol.wire import PutResult, Timestamp

CBOR_CONTENT_TYPE: Final = "application/x-amz-cbor-1.1"

_EPOCH_TAG: Final = 1
# The year 5138 in seconds, March 1973 in milliseconds.
_MAX_SECONDS: Final = 1e11
# No request of the API nests deeper than 3; deeper input attacks the stack.
_MAX_DEPTH: Final = 16

_Request = TypeVar("_Request", bound=msgspec.Struct)


def _seconds(value: object, _immutable: bool) -> float:  # noqa: FBT001 - cbor2's signature
    if isinstance(value, bool) or not isinstance(value, int | float):
        message = f"a timestamp must be a number, not {type(value).__name__}"
        raise TypeError(message)
    return value / 1000 if value > _MAX_SECONDS else float(value)


def _write_timestamp(encoder: cbor2.CBOREncoder, timestamp: Timestamp) -> None:
    encoder.encode(cbor2.CBORTag(_EPOCH_TAG, timestamp.milliseconds))


class CborWire:
    """The CBOR format; see `Wire`."""

    content_type = CBOR_CONTENT_TYPE

    def decode(self, body: bytes, request_type: type[_Request]) -> _Request:
        """Return the request in `body`."""
        try:
            members = cbor2.loads(
                body,
                semantic_decoders={_EPOCH_TAG: _seconds},
                max_depth=_MAX_DEPTH,
                strict_hashable_types=True,
            )
            return msgspec.convert(members, request_type, builtin_types=(bytes,))
        except (cbor2.CBORDecodeError, msgspec.ValidationError) as error:
            raise RequestRefused(SERIALIZATION, str(error)) from None

    def encode(self, answer: Mapping[str, object]) -> bytes:
        """Return the body of an answer."""
        return cbor2.dumps(answer, encoders={Timestamp: _write_timestamp})

    def encode_put_results(self, results: Iterable[PutResult]) -> bytes:
        """Return the body of a PutRecords answer."""
        entries: list[dict[str, str | None]] = []
        failed = 0
        for result in results:
            if result.error_code is None:
                entries.append({"SequenceNumber": result.sequence_number, "ShardId": result.shard_id})
            else:
                failed += 1
                entries.append({"ErrorCode": result.error_code, "ErrorMessage": result.error_message})
        return cbor2.dumps({"FailedRecordCount": failed, "Records": entries})
