"""An outage that outlasts every record the gateway holds: refused while it lasts, and taken again after it."""

import anyio
import pytest

from kpl_core.testing import ErrorAnswer, When
from tests.ingest.app.scene import Client, kinesis, open_gateway, records

pytestmark = pytest.mark.anyio


async def test_a_gateway_whose_records_have_all_expired_takes_new_ones_when_kinesis_answers_again() -> None:
    transport = kinesis()
    outage = transport.kinesis.faults.add(ErrorAnswer("ServiceUnavailable"), When(operation="PutRecords"))
    async with open_gateway(transport, record_ttl_ms=1_000, aggregation_enabled=False) as gateway:
        client = Client(gateway)
        seen: set[int] = set()
        for _ in range(100):
            answer = await client.post(records(20), ack="queued")
            seen.add(answer.status)
            if answer.status == 503:
                assert int(answer.headers["retry-after"]) >= 1
            await anyio.sleep(0.1)
        assert seen == {202, 503}
        transport.kinesis.faults.remove(outage)
        await anyio.sleep(6.0)
        assert (await client.post(records(20), ack="delivered")).status == 200
