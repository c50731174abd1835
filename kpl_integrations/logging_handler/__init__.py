"""`logging` to Kinesis: a handler that does not block, does not grow, and counts what it loses."""

from kpl_integrations.logging_handler.formatter import JsonFormatter
from kpl_integrations.logging_handler.handler import KinesisHandler
from kpl_integrations.logging_handler.level_queue import LogCounts
from kpl_integrations.logging_handler.options import LogOptions

__all__ = ["JsonFormatter", "KinesisHandler", "LogCounts", "LogOptions"]
