"""The root logger at DEBUG, with all that the client's libraries say; ends by itself."""

import asyncio
import logging
import os

from kpl_core import Config
from kpl_integrations.logging_handler import KinesisHandler

handler = KinesisHandler(
    "logs", config=Config(region="us-east-1", endpoint_url=os.environ["KPL_ENDPOINT_URL"]), close_timeout=20
)
logging.basicConfig(level=logging.DEBUG, handlers=[handler])
for name in ("botocore", "aiobotocore", "aiohttp", "urllib3", "asyncio", "kpl_core"):
    logging.getLogger(name).setLevel(logging.DEBUG)


async def main() -> None:
    """Make asyncio speak, too: this loop is the program's."""
    for number in range(100):
        logging.getLogger("program").debug("line %d", number)


asyncio.run(main(), debug=True)
