"""What Kinesis says of a stream's ARN: the one thing that tells this account's stream from another's of that name."""

from typing import Any

import aiohttp
from botocore.exceptions import BotoCoreError, ClientError

__all__ = ["ask_arn"]


async def ask_arn(client: Any, name: str) -> str | None:  # noqa: ANN401 - botocore has no types
    """Return the ARN of this account's stream of that name; None if there is none, or nobody to ask.

    `client` is an aiobotocore client, or None.
    """
    if client is None:
        return None
    try:
        answer = await client.describe_stream_summary(StreamName=name)
    except (ClientError, BotoCoreError, aiohttp.ClientError, OSError, TimeoutError):
        return None
    arn: str = answer["StreamDescriptionSummary"]["StreamARN"]
    return arn
