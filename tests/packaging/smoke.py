"""Check an installed wheel: is it the expected one, does it deliver, and do its aggregated records decode?

python tests/packaging/smoke.py compiled|pure    with the Python of the environment of the wheel, from another folder
"""

import asyncio
import sys
from pathlib import Path

from kpl_core import COMPILED, Config, Producer, decode
from kpl_core.testing import FakeKinesis, FakeTransport

COUNT = 10_000


async def delivered(kinesis: FakeKinesis) -> int:
    """Put records of 1,000 keys and return how many of them were delivered."""
    async with Producer(Config(region="us-east-1"), transport=FakeTransport(kinesis)) as producer:
        pairs = [(f"key-{number % 1_000}", b"%d" % number) for number in range(COUNT)]
        deliveries = await producer.put_many("orders", pairs)
        results = [await delivery for delivery in deliveries]
    return sum(result.successful for result in results)


def main(expected: str) -> None:
    """Exit with an error if anything is not as expected."""
    imported = Path(sys.modules["kpl_core"].__file__ or "")
    if "site-packages" not in imported.parts:
        sys.exit(f"kpl_core was imported from {imported.parent}; run this outside the checkout")
    if COMPILED is not (expected == "compiled"):
        sys.exit(f"the wheel should be {expected}, but COMPILED is {COMPILED}")
    kinesis = FakeKinesis({"orders": 4})
    count = asyncio.run(delivered(kinesis))
    stored = sorted(
        int(user_record.data) for record in kinesis.records("orders") for user_record in decode(record.data) or ()
    )
    if count != COUNT or stored != list(range(COUNT)):
        sys.exit(f"{count:,} of {COUNT:,} records were delivered and {len(stored):,} were stored")
    sys.stdout.write(f"Python {sys.version.split()[0]}, {expected}: {count:,} records delivered, each stored once\n")


if __name__ == "__main__":
    main(sys.argv[1])
