"""The JSON wire: `application/x-amz-json-1.1`, blobs in base64, what almost every SDK speaks."""

from collections.abc import Iterable, Mapping
from typing import Final, TypeVar

import msgspec

from kpl_integrations.kinesis_protocol.put_results import PutResult
from kpl_integrations.kinesis_protocol.refusal import SERIALIZATION, RequestRefused
from kpl_integrations.kinesis_protocol.timestamp import Timestamp

__all__ = ["JSON_CONTENT_TYPE", "JsonWire"]

JSON_CONTENT_TYPE: Final = "application/x-amz-json-1.1"

_Request = TypeVar("_Request", bound=msgspec.Struct)


def _plain(value: object) -> object:
    if isinstance(value, Timestamp):
        return value.milliseconds / 1000
    message = f"an answer cannot hold a {type(value).__name__}"
    raise TypeError(message)


_ENCODER: Final = msgspec.json.Encoder(enc_hook=_plain)


class JsonWire:
    """Decodes requests and encodes answers."""

    content_type = JSON_CONTENT_TYPE

    def decode(self, body: bytes, request_type: type[_Request]) -> _Request:
        """Return the request in `body`.

        Raises:
            RequestRefused: a SerializationException; it is no JSON, or a member has another type.
        """
        try:
            return msgspec.json.decode(body, type=request_type)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise RequestRefused(SERIALIZATION, str(error)) from None

    def encode(self, answer: Mapping[str, object]) -> bytes:
        """Return the body of an answer; members may be `Timestamp` and bytes."""
        return _ENCODER.encode(answer)

    def encode_put_results(self, results: Iterable[PutResult]) -> bytes:
        """Return the body of a PutRecords answer; by hand, for its 500 entries are most of what a server sends."""
        failed = 0
        parts = []
        for result in results:
            if result.error_code is None:
                parts.append(f'{{"SequenceNumber":"{result.sequence_number}","ShardId":"{result.shard_id}"}}')
            else:
                failed += 1
                entry = {"ErrorCode": result.error_code, "ErrorMessage": result.error_message}
                parts.append(_ENCODER.encode(entry).decode())
        return f'{{"FailedRecordCount":{failed},"Records":[{",".join(parts)}]}}'.encode()
