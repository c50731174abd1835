"""What AWS' errors mean to who typed the command, as a table."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import aiohttp
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectionError as NoConnection,
    ConnectTimeoutError,
    EndpointConnectionError,
    HTTPClientError,
    NoCredentialsError,
    PartialCredentialsError,
    ReadTimeoutError,
    SSLError,
)

from kpl_integrations.cli.failure import CommandFailure

__all__ = ["advice", "told_in_one_sentence"]

_CREDENTIALS: Final = (
    "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, as for any AWS client; "
    "a Kinesis on this machine takes any"
)
_REFUSED_CREDENTIALS: Final = "renew them, and check AWS_PROFILE and the clock of this machine"

# code (a trailing * stands for any ending) -> what to do about it
_ADVICE: Final = {
    "ResourceNotFoundException": "check its name, the region and the endpoint, or create it",
    "AccessDenied*": "allow it in the IAM policy of these credentials",
    "NoCredentials": _CREDENTIALS,
    "UnrecognizedClientException": _REFUSED_CREDENTIALS,
    "InvalidSignatureException": _REFUSED_CREDENTIALS,
    "IncompleteSignature*": _REFUSED_CREDENTIALS,
    "MissingAuthenticationToken*": _REFUSED_CREDENTIALS,
    "ExpiredToken*": _REFUSED_CREDENTIALS,
    "KMS*": "check the key that encrypts the stream, and the permission to use it",
    "ProvisionedThroughputExceededException": "give the stream more shards, or send less",
    "LimitExceededException": "try again in a moment",
    "ResourceInUseException": "wait until the stream is ACTIVE",
    "Expired": "the stream took less than was sent; give it more shards, or send less",
}
_OTHERWISE: Final = "check the stream and the endpoint"


def advice(code: str) -> str:
    """Return what to do about an error code of Kinesis or of the producer."""
    for pattern, fix in _ADVICE.items():
        if code == pattern or (pattern.endswith("*") and code.startswith(pattern[:-1])):
            return fix
    return _OTHERWISE


@contextmanager
def told_in_one_sentence(place: str, stream: str, *, way: str = "") -> Iterator[None]:
    """Turn what an AWS client raises inside the block into a CommandFailure.

    `place` says where Kinesis was looked for, such as "Kinesis in eu-west-1"; `way` are the options of the
    `aws` command that lead there.
    """
    try:
        yield
    except ClientError as error:
        raise CommandFailure(_refusal(error, place, stream, way)) from error
    except (NoCredentialsError, PartialCredentialsError) as error:
        message = f"no AWS credentials found ({_one_line(error)}); {_CREDENTIALS}"
        raise CommandFailure(message) from error
    except SSLError as error:
        message = f"{place} has no certificate to trust: {_one_line(error)}; check the endpoint or AWS_CA_BUNDLE"
        raise CommandFailure(message) from error
    except (EndpointConnectionError, ConnectTimeoutError, NoConnection, HTTPClientError, ReadTimeoutError) as error:
        message = (
            f"{place} cannot be reached; check --endpoint-url, the region and the network "
            "(`kpl local` starts a Kinesis on this machine)"
        )
        raise CommandFailure(message) from error
    except (BotoCoreError, aiohttp.ClientError) as error:
        message = (
            f"{place} cannot be used: {_one_line(error)}; check AWS_PROFILE, AWS' configuration files and the endpoint"
        )
        raise CommandFailure(message) from error


def _refusal(error: ClientError, place: str, stream: str, way: str) -> str:
    details = error.response.get("Error", {})
    code = details.get("Code") or "an unnamed error"
    if code == "ResourceNotFoundException":
        name = stream.rpartition("/")[2]  # of an ARN, its end
        create = f"aws kinesis create-stream --stream-name {name} --shard-count 1 {way}".rstrip()
        return f"{place} has no stream {stream!r}; {advice(code)}: {create}"
    said = " ".join((details.get("Message") or "").split())
    words = f"{code}: {said}" if said else code
    return f"{place} refuses {error.operation_name} of {stream!r} ({words.rstrip('.')}); {advice(code)}"


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__
