"""Configure a sender, send, and say which modules its thread imported.

python import_early.py handler | exporter
"""

import logging
import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor

from kpl_integrations.logging_handler import KinesisHandler
from kpl_integrations.otel import KinesisSpanExporter


def log(endpoint_url: str, spool: Path) -> set[str]:
    handler = KinesisHandler("logs", region="us-east-1", endpoint_url=endpoint_url, spool_path=str(spool))
    before = set(sys.modules)
    logger = logging.getLogger("program")
    logger.addHandler(handler)
    logger.error("sent")
    handler.flush()
    handler.close()
    return before


def export(endpoint_url: str, _: Path) -> set[str]:
    exporter = KinesisSpanExporter("logs", region="us-east-1", endpoint_url=endpoint_url)
    before = set(sys.modules)
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    provider.get_tracer("program").start_span("sent").end()
    provider.force_flush()
    provider.shutdown()
    return before


def main() -> None:
    with TemporaryDirectory() as folder:
        before = {"handler": log, "exporter": export}[sys.argv[1]](
            os.environ["KPL_ENDPOINT_URL"], Path(folder) / "spool.db"
        )
    sys.stdout.write(" ".join(sorted(set(sys.modules) - before)))


main()
