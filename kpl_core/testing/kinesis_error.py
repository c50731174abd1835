"""What the fake service answers instead of a result: an error code, its words and its HTTP status.

The table holds the codes a producer meets, with the status and the wording of the service
(AWS, API pages of Kinesis Data Streams and "Common errors"; wording observed in public issue
reports of the AWS libraries).
"""

from typing import Final, NamedTuple

__all__ = [
    "EXPIRED_ITERATOR",
    "EXPIRED_NEXT_TOKEN",
    "INVALID_ARGUMENT",
    "LIMIT_EXCEEDED",
    "RESOURCE_IN_USE",
    "RESOURCE_NOT_FOUND",
    "SERIALIZATION",
    "SERVICE_ERRORS",
    "THROUGHPUT_EXCEEDED",
    "VALIDATION",
    "KinesisError",
    "ServiceError",
    "constraint_violated",
]

EXPIRED_ITERATOR: Final = "ExpiredIteratorException"
EXPIRED_NEXT_TOKEN: Final = "ExpiredNextTokenException"  # noqa: S105 - the name of an error
INVALID_ARGUMENT: Final = "InvalidArgumentException"
LIMIT_EXCEEDED: Final = "LimitExceededException"
THROUGHPUT_EXCEEDED: Final = "ProvisionedThroughputExceededException"
RESOURCE_IN_USE: Final = "ResourceInUseException"
RESOURCE_NOT_FOUND: Final = "ResourceNotFoundException"
SERIALIZATION: Final = "SerializationException"
VALIDATION: Final = "ValidationException"


class ServiceError(NamedTuple):
    """HTTP status and usual wording of one error code."""

    status: int
    message: str


SERVICE_ERRORS: Final[dict[str, ServiceError]] = {
    "AccessDeniedException": ServiceError(400, "User is not authorized to perform this action on the resource"),
    EXPIRED_ITERATOR: ServiceError(400, "Iterator expired."),
    EXPIRED_NEXT_TOKEN: ServiceError(400, "NextToken expired."),
    "ExpiredTokenException": ServiceError(400, "The security token included in the request is expired"),
    "InternalFailure": ServiceError(500, "Internal Service Failure"),
    INVALID_ARGUMENT: ServiceError(400, "The request holds an invalid argument."),
    "InvalidSignatureException": ServiceError(
        400, "The request signature we calculated does not match the signature you provided."
    ),
    "KMSAccessDeniedException": ServiceError(400, "The ciphertext references a key you cannot use."),
    "KMSDisabledException": ServiceError(400, "The key is disabled."),
    "KMSInvalidStateException": ServiceError(400, "The state of the key is not valid for this request."),
    "KMSNotFoundException": ServiceError(400, "The key cannot be found."),
    "KMSOptInRequired": ServiceError(400, "The AWS access key ID needs a subscription for the service."),
    "KMSThrottlingException": ServiceError(400, "The request was denied due to request throttling by KMS."),
    LIMIT_EXCEEDED: ServiceError(400, "Rate exceeded for stream."),
    THROUGHPUT_EXCEEDED: ServiceError(400, "Rate exceeded for shard."),
    RESOURCE_IN_USE: ServiceError(400, "The stream is not ACTIVE."),
    RESOURCE_NOT_FOUND: ServiceError(400, "The stream was not found."),
    "ServiceUnavailable": ServiceError(503, "Service is unavailable."),
    "ThrottlingException": ServiceError(400, "Rate exceeded"),
    "UnrecognizedClientException": ServiceError(400, "The security token included in the request is invalid."),
    VALIDATION: ServiceError(400, "The request does not satisfy the constraints of the service."),
}


class KinesisError(Exception):
    """The service refuses one whole request; nothing of it was stored.

    `code` is the service's error code, `message` its wording, `status` the HTTP status; the
    latter two default to the row of `SERVICE_ERRORS` (400 for a code without a row).
    """

    def __init__(self, code: str, message: str | None = None, *, status: int | None = None) -> None:
        usual = SERVICE_ERRORS.get(code, ServiceError(400, code))
        self.code = code
        self.message = usual.message if message is None else message
        self.status = usual.status if status is None else status
        super().__init__(f"{code}: {self.message}")


def constraint_violated(*, path: str, constraint: str, value: str | None = None) -> KinesisError:
    """Return the service's ValidationException for one violated constraint.

    `path` is a member in the service's spelling, such as `records.1.member.data`; a `value` is
    quoted when the service quotes it (it leaves out blobs and lists).
    """
    quoted = "" if value is None else f" '{value}'"
    message = f"1 validation error detected: Value{quoted} at '{path}' failed to satisfy constraint: {constraint}"
    return KinesisError(VALIDATION, message)
