"""Everything logs at DEBUG, including the exporter's libraries, and logging is configured again meanwhile."""

import logging
import logging.config
import sys

from opentelemetry.instrumentation.logging.handler import LoggingHandler
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import BatchLogRecordProcessor

from kpl_integrations.otel import KinesisLogRecordExporter

LINES = 200

exporter = KinesisLogRecordExporter()
provider = LoggerProvider()
provider.add_log_record_processor(BatchLogRecordProcessor(exporter, schedule_delay_millis=50))
handler = LoggingHandler(logger_provider=provider)
root = logging.getLogger()
root.setLevel(logging.DEBUG)
root.addHandler(handler)
for number in range(LINES):
    logging.getLogger("application").info("line %d", number)
    if number == LINES // 2:
        # It flushes the handlers there are, under logging's own lock.
        empty = {"level": "DEBUG", "handlers": []}
        logging.config.dictConfig({"version": 1, "disable_existing_loggers": False, "root": empty})
        root.addHandler(handler)
provider.force_flush()
arrived = exporter.force_flush(20_000)
provider.shutdown()
sys.exit(not arrived or exporter.counts().delivered != LINES)
