"""A Kinesis producer for Python services: aggregation, limits, retries, and nothing lost silently.

async with Producer(Config(region="us-east-1")) as producer:
    delivery = await producer.put("orders", partition_key="42", data=b"...")
    result = await delivery
"""

from collections.abc import Coroutine
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, TypeVar

from kpl_core.errors import (
    BufferFull,
    ConfigError,
    InvalidUserRecord,
    KplError,
    NotSpooled,
    ProducerClosed,
    ResultPending,
    WrongEventLoop,
)
from kpl_core.hooks import Hook
from kpl_core.options.config import Config, StreamConfig
from kpl_core.options.coordination_options import CoordinationOptions
from kpl_core.options.kinesis_limits import (
    BYTES_PER_SECOND_PER_SHARD as BYTES_PER_SEC_PER_SHARD,
    RECORDS_PER_SECOND_PER_SHARD as RECORDS_PER_SEC_PER_SHARD,
)
from kpl_core.options.policy import FairnessPolicy, RateLimitPolicy
from kpl_core.options.reliability import BreakerPolicy, DeadLetterOptions, SpoolOptions, TierPolicy
from kpl_core.pipeline.open_record import COMPILED
from kpl_core.producer.delivery import Deliveries, Delivery
from kpl_core.producer.producer import Producer
from kpl_core.producer.report import ProducerReport
from kpl_core.records.aggregated_record import decode, encode
from kpl_core.records.record_result import Attempt, RecordResult
from kpl_core.records.topic import BoundTopic, Compressed, Topic
from kpl_core.records.user_record import UserRecord

if TYPE_CHECKING:
    from kpl_core.background.blocking import BlockingProducer
    from kpl_core.background.blocking_delivery import BlockingDelivery
    from kpl_core.records.received_record import DuplicateFilter, ReceivedRecord, content_of, user_records

T = TypeVar("T")

# A topic bound to a `Producer`.
TopicProducer = BoundTopic[T, Delivery, Coroutine[Any, Any, Delivery], Coroutine[Any, Any, Deliveries]]

__all__ = [
    "BYTES_PER_SEC_PER_SHARD",
    "COMPILED",
    "RECORDS_PER_SEC_PER_SHARD",
    "Attempt",
    "BlockingDelivery",
    "BlockingProducer",
    "BoundTopic",
    "BreakerPolicy",
    "BufferFull",
    "Compressed",
    "Config",
    "ConfigError",
    "CoordinationOptions",
    "DeadLetterOptions",
    "Deliveries",
    "Delivery",
    "DuplicateFilter",
    "FairnessPolicy",
    "Hook",
    "InvalidUserRecord",
    "KplError",
    "NotSpooled",
    "Producer",
    "ProducerClosed",
    "ProducerReport",
    "RateLimitPolicy",
    "ReceivedRecord",
    "RecordResult",
    "ResultPending",
    "SpoolOptions",
    "StreamConfig",
    "TierPolicy",
    "Topic",
    "TopicProducer",
    "UserRecord",
    "WrongEventLoop",
    "content_of",
    "decode",
    "encode",
    "user_records",
]


# Imported at the first use, so that a program without threads of its own or without a consumer starts sooner.
_LATER: Final = {
    "BlockingDelivery": "kpl_core.background.blocking_delivery",
    "BlockingProducer": "kpl_core.background.blocking",
    "DuplicateFilter": "kpl_core.records.received_record",
    "content_of": "kpl_core.records.received_record",
    "ReceivedRecord": "kpl_core.records.received_record",
    "user_records": "kpl_core.records.received_record",
}


def __getattr__(name: str) -> object:
    module = _LATER.get(name)
    if module is None:
        message = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(message)
    value: object = getattr(import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
