"""What Kinesis says of a stream's ARN: the one thing that tells this account's stream from another's of that name."""

from typing import Any, Final

from botocore.exceptions import ClientError, ParamValidationError

from kpl_integrations.ingest.admission.admission import Refusal, Refused

__all__ = ["ask_arn"]

# There is none of that name, or none can be: asking again says the same.
_ABSENT_CODES: Final = frozenset({"ResourceNotFoundException", "ValidationException", "InvalidArgumentException"})


async def ask_arn(client: Any, name: str) -> str | None:  # noqa: ANN401 - botocore has no types
    """Return the ARN of this account's stream of that name; None if there is none, or nobody to ask.

    `client` is an aiobotocore client, or None.

    Raises:
        Refused: Kinesis could not be asked just now. Who took that for "none" would give the stream a second pipeline.
    """
    if client is None:
        return None
    try:
        answer = await client.describe_stream_summary(StreamName=name)
        arn: str = answer["StreamDescriptionSummary"]["StreamARN"]
    except ParamValidationError:
        return None
    except ClientError as error:
        code = str(error.response.get("Error", {}).get("Code", ""))
        if code in _ABSENT_CODES or code.startswith("AccessDenied"):
            return None
        raise _uncertain(name, code or type(error).__name__) from error
    except Exception as error:
        # Out of reach, or answering nonsense; or what a session's credentials and event handlers raise.
        raise _uncertain(name, type(error).__name__) from error
    return arn


def _uncertain(name: str, why: str) -> Refused:
    detail = f"the ARN of stream {name} could not be looked up ({why}); the gateway asks again with the next request"
    return Refused(Refusal.STREAM_UNCERTAIN, detail, retry_after=2.0)
