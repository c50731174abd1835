"""The producer behind any ASGI framework; nothing here imports one."""

from kpl_integrations.asgi.backpressure import BackpressureMiddleware
from kpl_integrations.asgi.connection_state import STATE_KEY, MissingProducer, producer_of
from kpl_integrations.asgi.health import HealthEndpoints, ProducerHealth, ReadinessAnswer, health_of
from kpl_integrations.asgi.lifespan import KinesisLifespan
from kpl_integrations.asgi.lifespan_wrapper import KinesisASGI
from kpl_integrations.asgi.outbox import OutboxDelivery, OutboxProducer, ResultBeforeResponse
from kpl_integrations.asgi.outbox_middleware import RequestOutboxMiddleware
from kpl_integrations.asgi.rejections import rejection_check
from kpl_integrations.asgi.startup import StartupFailed

__all__ = [
    "STATE_KEY",
    "BackpressureMiddleware",
    "HealthEndpoints",
    "KinesisASGI",
    "KinesisLifespan",
    "MissingProducer",
    "OutboxDelivery",
    "OutboxProducer",
    "ProducerHealth",
    "ReadinessAnswer",
    "RequestOutboxMiddleware",
    "ResultBeforeResponse",
    "StartupFailed",
    "health_of",
    "producer_of",
    "rejection_check",
]
