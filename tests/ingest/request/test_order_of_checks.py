"""The order of a request's checks: each row of the tables, alone and in front of each row behind it."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import combinations
from typing import Any, Final, NamedTuple

import pytest
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from kpl_integrations.ingest import IngestGateway
from kpl_integrations.ingest.admission.refusals import Refusal, Refused
from kpl_integrations.ingest.http.answers import Answer
from kpl_integrations.ingest.http.request_head import Server, records_head
from kpl_integrations.ingest.request.kinesis_wire import KinesisRequest, signed_request
from kpl_integrations.ingest.request.needs import Body, Results, StreamName
from kpl_integrations.ingest.request.otlp import OtlpRequest
from kpl_integrations.ingest.request.records import RecordsRequest
from kpl_integrations.ingest.request.request import Request
from kpl_integrations.ingest.tenants import AccessKey, Tenant
from kpl_integrations.kinesis_protocol.requests import UNKNOWN_OPERATION, RequestRefused
from kpl_integrations.kinesis_protocol.sigv4 import INVALID, MISSING
from tests.support.gateway_scene import JSON, STREAM, open_gateway
from tests.support.running_gateway import key_directory
from tests.support.virtual_time import Backend, virtual_time_backend

pytestmark = pytest.mark.anyio
CLIENT: Final = "192.0.2.1"
MANY_BYTES: Final = 1 << 30
RECORD: Final = b'{"partition_key":"k","data":"x"}'
PUT: Final = b'{"StreamName":"orders","PartitionKey":"k","Data":"eA=="}'
LOGS: Final = b'{"resourceLogs":[{"scopeLogs":[{"logRecords":[{"body":{"stringValue":"x"}}]}]}]}'
TENANT: Final = Tenant(id="ada", otlp_streams={"logs": STREAM})
UNNAMED: Final = Tenant(id="ben")

# What makes the check of each name fail, and what is then refused.
BROKEN: Final[Mapping[str, Refusal | str]] = {
    "open_gateway": Refusal.DRAINING,
    "repeated_fields": Refusal.BAD_PARAMETER,
    "credentials": Refusal.BAD_CREDENTIALS,
    "named_key": MISSING,
    "address_bytes": Refusal.QUOTA,
    "signature": INVALID,
    "cpu_share": Refusal.CPU_SHARE,
    "refused_bytes": Refusal.QUOTA,
    "media_type": Refusal.UNSUPPORTED,
    "named_stream": Refusal.UNKNOWN_STREAM,
    "options": Refusal.BAD_PARAMETER,
    "existing_stream": Refusal.FORBIDDEN,
    "known_operation": UNKNOWN_OPERATION,
    "length": Refusal.TOO_LARGE,
    "body": Refusal.SLOW_BODY,
}
# The order of the checks of each form, as its class has it.
FORMS: Final[tuple[type[Request], ...]] = (RecordsRequest, OtlpRequest, KinesisRequest)


def checks_of(form: type[Request]) -> list[str]:
    return [step.__name__ for step in (*form.who, *form.may_it)]


class Scene(NamedTuple):
    """A gateway, and the names of the checks that fail."""

    gateway: IngestGateway
    broken: frozenset[str]

    def request(self, form: type[Request]) -> Request:
        """Return a request of this form, for which only the broken checks fail."""
        opened, broken = self.gateway.opened, self.broken
        body = {RecordsRequest: RECORD, OtlpRequest: LOGS, KinesisRequest: PUT}[form]
        headers = {"content-length": str(MANY_BYTES if "length" in broken else len(body)), "host": "gateway"}
        server = Server(lambda _: "cpu_share" not in broken, lambda: None, lambda _: lambda: None, lambda: None)
        tenant = UNNAMED if "named_stream" in broken else TENANT
        if "open_gateway" in broken:
            opened.admission.state = "closed"
        if "address_bytes" in broken:
            opened.addresses.charge(CLIENT, MANY_BYTES, opened.admission.now())
        if "refused_bytes" in broken:
            opened.accounts.of(tenant).charge(MANY_BYTES, opened.admission.now())
        made: Request
        if form is KinesisRequest:
            made = KinesisRequest(opened, *self._signed(headers, body), CLIENT, None, server)
        else:
            headers["content-type"] = "text/plain" if "media_type" in broken else JSON
            headers["authorization"] = "Bearer " + ("nobody" if "credentials" in broken else tenant.id)
            if "options" in broken:
                headers["x-ack"] = "never"
            fields = {name.encode(): value.encode() for name, value in headers.items()}
            if form is OtlpRequest:
                made = OtlpRequest(opened, "logs", fields, CLIENT, None, server)
            else:
                head = records_head(STREAM, b"", fields)
                made = RecordsRequest(opened, self.gateway.settings.decode_limits(), head, CLIENT, None, server)
        if "repeated_fields" in broken:
            made.repeated = Refused(Refusal.BAD_PARAMETER, "repeated")
        return made

    def _signed(self, headers: dict[str, str], body: bytes) -> tuple[Any, Any]:
        operation = "Absent" if "known_operation" in self.broken else "PutRecord"
        headers |= {"content-type": "application/x-amz-json-1.1", "x-amz-target": f"Kinesis_20131202.{operation}"}
        if "named_key" not in self.broken:
            request = AWSRequest(method="POST", url="https://gateway/", data=body, headers=headers)
            secret = "another" if "signature" in self.broken else "secret"
            SigV4Auth(Credentials("ADA", secret), "kinesis", "eu-west-1").add_auth(request)
            headers = {name.lower(): value for name, value in request.headers.items()}
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        scope = {"method": "POST", "path": "/", "query_string": b"", "headers": raw}
        return dict(raw), signed_request(scope)

    def refused(self, form: type[Request]) -> Refusal | str | None:
        """Run the request as a driver that knows no stream; return why it was refused."""
        request = self.request(form)
        bodies = {RecordsRequest: RECORD, OtlpRequest: LOGS, KinesisRequest: PUT}
        slow = Refused(Refusal.SLOW_BODY, "slow")
        forbidden = Refused(Refusal.FORBIDDEN, "no")
        with rejections(form) as seen:
            steps = request.run()
            with suppress(StopIteration):
                need = next(steps)
                while not isinstance(need, Results):
                    if isinstance(need, Body):
                        need = steps.throw(slow) if "body" in self.broken else steps.send(bodies[form])
                    else:
                        assert isinstance(need, StreamName)
                        need = steps.throw(forbidden) if "existing_stream" in self.broken else steps.send(STREAM)
        return seen[0] if seen else None


@contextmanager
def rejections(form: type[Request]) -> Iterator[list[Refusal | str]]:
    seen: list[Refusal | str] = []
    answer: Callable[[Request, Exception], Answer] = form.rejection

    def noted(self: Request, error: Exception) -> Answer:
        seen.append(error.code if isinstance(error, RequestRefused) else error.refusal)  # type: ignore[attr-defined]
        return answer(self, error)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(form, "rejection", noted)
        yield seen


@pytest.fixture
def anyio_backend() -> Backend:
    return virtual_time_backend("asyncio")


async def outcome(form: type[Request], *broken: str) -> tuple[Refusal | str | None, int]:
    """Return why a request was refused, and how many records were accepted."""
    directory = key_directory(AccessKey("ADA", "secret", TENANT), ada=TENANT, ben=UNNAMED)
    async with open_gateway(directory=directory) as gateway:
        return Scene(gateway, frozenset(broken)).refused(form), gateway.producer.report().accepted


@pytest.mark.parametrize("form", FORMS)
async def test_a_request_that_passes_all_checks_is_accepted(form: type[Request]) -> None:
    assert await outcome(form) == (None, 1)


@pytest.mark.parametrize("form", FORMS)
async def test_each_check_refuses_and_nothing_is_put(form: type[Request]) -> None:
    for name in checks_of(form):
        assert await outcome(form, name) == (BROKEN[name], 0), name


@pytest.mark.parametrize("form", FORMS)
async def test_of_two_checks_that_fail_the_first_one_answers(form: type[Request]) -> None:
    for first, second in combinations(checks_of(form), 2):
        assert await outcome(form, first, second) == (BROKEN[first], 0), (first, second)


def test_each_row_of_the_tables_has_its_case() -> None:
    assert {name for form in FORMS for name in checks_of(form)} == BROKEN.keys()
    for form in FORMS:
        assert checks_of(form)[:2] == ["open_gateway", "repeated_fields"]
        assert checks_of(form).index("length") == checks_of(form).index("body") - 1
