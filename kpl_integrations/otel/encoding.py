"""OTLP from what the SDK hands out: by OpenTelemetry's own encoders, as protobuf or as JSON.

Each encoded export is a whole `Export{Trace,Logs,Metrics}ServiceRequest`, so a consumer needs nothing of ours.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final

from opentelemetry.exporter.otlp.proto.common._log_encoder import encode_logs
from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans

from kpl_core import ConfigError
from kpl_integrations.otel.metric_leaf import MetricLeaf, metrics_data
from kpl_integrations.otel.options import Encoding, Signal

__all__ = ["Encode", "encoder"]

Encode = Callable[[Sequence[Any]], bytes]


def encoder(signal: Signal, encoding: Encoding) -> Encode:
    """Return what makes bytes of spans, log records or metric leaves.

    Raises:
        ConfigError: the encoding is JSON, and its package is not installed.
    """
    return _PROTO[signal] if encoding == "otlp_proto" else _json(signal)


def _proto_metrics(leaves: Sequence[MetricLeaf]) -> bytes:
    encoded: bytes = encode_metrics(metrics_data(leaves)).SerializeToString()
    return encoded


_PROTO: Final[dict[Signal, Encode]] = {
    "traces": lambda spans: encode_spans(spans).SerializeToString(),
    "logs": lambda records: encode_logs(records).SerializeToString(),
    "metrics": _proto_metrics,
}


def _json(signal: Signal) -> Encode:
    try:
        from opentelemetry.exporter.otlp.json.common import (  # noqa: PLC0415 - an extra of its own
            _log_encoder as logs,
            metrics_encoder as metrics,
            trace_encoder as traces,
        )
    except ImportError as error:
        message = "encoding is 'otlp_json', which needs another package; pip install 'kpl-integrations[otel-json]'"
        raise ConfigError(message) from error
    by_signal: dict[Signal, Encode] = {
        "traces": lambda spans: traces.encode_spans(spans).to_json().encode(),
        "logs": lambda records: logs.encode_logs(records).to_json().encode(),
        "metrics": lambda leaves: metrics.encode_metrics(metrics_data(leaves)).to_json().encode(),
    }
    return by_signal[signal]
