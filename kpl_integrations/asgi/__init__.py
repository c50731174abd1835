"""The producer in any ASGI application; no framework is imported."""

from kpl_integrations.asgi.health import (
    BackpressureMiddleware,
    HealthEndpoints,
    ProducerHealth,
    ReadinessAnswer,
    health_of,
    rejection_check,
)
from kpl_integrations.asgi.lifespan import KinesisASGI, KinesisLifespan, StartupFailed
from kpl_integrations.asgi.outbox import OutboxDelivery, OutboxProducer, RequestOutboxMiddleware, ResultBeforeResponse
from kpl_integrations.asgi.protocol import STATE_KEY, MissingProducer, producer_of

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
