"""One stream, one pipeline, by whichever name it is asked for; and nobody writes where he may not."""

from collections.abc import Callable
from typing import Any

import pytest
from botocore.exceptions import BotoCoreError, ClientError, EndpointConnectionError, ParamValidationError

from kpl_core.testing import FakeKinesis
from kpl_core.testing.fake_transport import FakeTransport
from kpl_integrations.ingest.admission.refusals import Refusal, Refused
from kpl_integrations.ingest.streams.stream_directory import ABSENT_SECONDS, StreamDirectory, ask_arn
from kpl_integrations.ingest.tenants import Tenant

pytestmark = pytest.mark.anyio

OWN = "arn:aws:kinesis:us-east-1:000000000000:stream/orders"
FOREIGN = "arn:aws:kinesis:us-east-1:111111111111:stream/orders"
ELSEWHERE = "arn:aws:kinesis:eu-west-1:000000000000:stream/orders"


class Scene:
    """A directory whose account has one stream; counts how often its ARN was asked for."""

    def __init__(self, arn: str | None = OWN) -> None:
        self.arn = arn
        self.asked: list[str] = []
        self.now = 0.0
        self.directory = StreamDirectory(
            FakeTransport(FakeKinesis({"orders": 1})), clock=lambda: self.now, arn_of=self._arn_of
        )

    async def _arn_of(self, name: str) -> str | None:
        self.asked.append(name)
        return self.arn if name == "orders" else None


def globs(*streams: str) -> Callable[[str], bool]:
    return Tenant(id="t", streams=streams).allows


# What the tenant may write to, what it asks for, and the name under which the gateway knows it (None: 403).
ROWS = [
    (("orders",), "orders", "orders"),
    (("*",), OWN, "orders"),
    (("orders",), OWN, "orders"),
    (("arn:*",), OWN, "orders"),
    ((OWN,), OWN, "orders"),
    (("orders",), FOREIGN, None),
    (("*",), FOREIGN, None),
    (("orders",), ELSEWHERE, None),
    (("payments",), OWN, None),
    (("payments",), "orders", None),
]


@pytest.mark.parametrize(("allowed", "asked", "known_as"), ROWS)
async def test_an_arn_of_the_account_is_the_stream_s_name_and_another_account_s_is_not(allowed, asked, known_as):
    scene = Scene()
    assert await scene.directory.admit(asked, globs(*allowed)) == known_as
    assert scene.directory.known == ({known_as} if known_as else set())


async def test_who_may_not_use_a_stream_makes_nobody_ask_for_it():
    scene = Scene()
    assert await scene.directory.admit(OWN, globs("payments")) is None
    assert scene.asked == []


async def test_the_account_is_asked_once_however_many_arns_are_invented():
    scene = Scene()
    for number in range(50):
        invented = f"arn:aws:kinesis:us-east-1:{number:012}:stream/orders"
        assert await scene.directory.admit(invented, globs("orders")) == ("orders" if number == 0 else None)
    assert scene.asked == ["orders"]


async def test_an_arn_of_which_nobody_can_say_whose_it_is_stays_as_it_is_and_is_asked_for_again_later():
    scene = Scene(arn=None)
    assert await scene.directory.admit(OWN, globs("orders")) is None
    assert await scene.directory.admit(OWN, globs("orders")) is None
    assert scene.asked == ["orders"]
    scene.arn, scene.now = OWN, ABSENT_SECONDS + 1
    assert await scene.directory.admit(OWN, globs("orders")) == "orders"


class FailingClient:
    """Fails to describe a stream, until it is mended."""

    def __init__(self, failure: Exception) -> None:
        self.failure: Exception | None = failure

    async def describe_stream_summary(self, **_: str) -> Any:
        if self.failure is not None:
            raise self.failure
        return {"StreamDescriptionSummary": {"StreamARN": OWN}}


def of_kinesis(code: str) -> ClientError:
    return ClientError({"Error": {"Code": code}}, "DescribeStreamSummary")


# What asking for the ARN fails with, and whether that says anything of the stream.
FAILURES = [
    (of_kinesis("AccessDeniedException"), True),
    (of_kinesis("AccessDenied"), True),
    (of_kinesis("ResourceNotFoundException"), True),
    (of_kinesis("ValidationException"), True),
    (ParamValidationError(report="too short"), True),
    (of_kinesis("LimitExceededException"), False),
    (of_kinesis("ThrottlingException"), False),
    (of_kinesis("InternalFailure"), False),
    (of_kinesis("ExpiredTokenException"), False),
    (EndpointConnectionError(endpoint_url="https://kinesis"), False),
    (BotoCoreError(), False),
    (TimeoutError(), False),
    (ConnectionResetError(), False),
    # From the application's own provider of credentials, and of an answer in which everything is missing.
    (LookupError("the vault is away"), False),
    (KeyError("StreamDescriptionSummary"), False),
]


@pytest.mark.parametrize(("failure", "says"), FAILURES, ids=lambda value: repr(value)[:60])
async def test_a_failure_that_passes_gives_no_stream_a_second_pipeline(failure, says):
    client = FailingClient(failure)
    directory = StreamDirectory(
        FakeTransport(FakeKinesis({"orders": 1})), clock=lambda: 0.0, arn_of=lambda name: ask_arn(client, name)
    )
    if says:
        assert await ask_arn(client, "orders") is None
        return
    with pytest.raises(Refused) as refused:
        await directory.admit(OWN, globs("*"))
    assert refused.value.refusal is Refusal.STREAM_UNCERTAIN
    assert refused.value.retry_after == 2.0
    assert directory.known == set()
    client.failure = None
    assert await directory.admit(OWN, globs("*")) == "orders"
