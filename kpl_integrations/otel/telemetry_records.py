"""Spans, logs and metrics to user records: OTLP messages that fit, each with its partition key.

OpenTelemetry's own encoders make JSON, and protobuf of logs and metrics. Each message is a whole
`Export{Trace,Logs,Metrics}ServiceRequest`, so a consumer needs nothing of this package. A compressed message begins
with the magic bytes of gzip (1f 8b) or zstd (28 b5 2f fd), which no message begins with. An export larger than a
Kinesis record is divided by resource, then by scope, then by record, and each piece is encoded with its resource and
scope.
"""

import dataclasses
import hashlib
import secrets
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import msgspec
from opentelemetry.exporter.otlp.proto.common._log_encoder import encode_logs
from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
from opentelemetry.sdk.metrics.export import Metric, MetricsData, ResourceMetrics, ScopeMetrics
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from kpl_core import Compressed, ConfigError
from kpl_core.options.kinesis_limits import PARTITION_KEY_CHARACTERS
from kpl_integrations.otel.options import Compression, Encoding, KeyChoice, Signal
from kpl_integrations.otel.span_protobuf import SpanEncoder

Encode = Callable[[Sequence[Any]], bytes]
# Some of an export with its partition key; None stands for a random key for each record.
Keyed = tuple[str | None, list[Any]]

_RESOURCE_KEY_BYTES: Final = 8


# Metrics


@dataclasses.dataclass(frozen=True, slots=True)
class MetricLeaf:
    """A metric, or some of its data points, with its resource and scope. A `partition_key` function receives one."""

    resource_metrics: ResourceMetrics
    scope_metrics: ScopeMetrics
    metric: Metric

    @property
    def resource(self) -> Resource:
        """Return its resource."""
        return self.resource_metrics.resource

    @property
    def instrumentation_scope(self) -> InstrumentationScope:
        """Return its instrumentation scope."""
        return self.scope_metrics.scope

    @property
    def points(self) -> int:
        """Return how many data points there are."""
        return len(self.metric.data.data_points)

    def divided(self, parts: int) -> "list[MetricLeaf]":
        """Return about `parts` leaves with its data points, at least one point each."""
        points: Sequence[Any] = self.metric.data.data_points
        data: Any = self.metric.data
        size = max(1, -(-len(points) // parts))
        return [
            dataclasses.replace(
                self,
                metric=dataclasses.replace(
                    self.metric,
                    data=dataclasses.replace(data, data_points=points[start : start + size]),
                ),
            )
            for start in range(0, len(points), size)
        ]


def leaves_of(data: MetricsData) -> list[MetricLeaf]:
    """Return every metric of an export."""
    return [
        MetricLeaf(resource, scope, metric)
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    ]


def _metrics_data(leaves: Sequence[MetricLeaf]) -> MetricsData:
    """Return an export of these metrics, under their resources and scopes."""
    resources: dict[int, tuple[ResourceMetrics, dict[int, tuple[ScopeMetrics, list[Metric]]]]] = {}
    for leaf in leaves:
        _, scopes = resources.setdefault(id(leaf.resource_metrics), (leaf.resource_metrics, {}))
        _, metrics = scopes.setdefault(id(leaf.scope_metrics), (leaf.scope_metrics, []))
        metrics.append(leaf.metric)
    return MetricsData(
        resource_metrics=[
            dataclasses.replace(
                resource,
                scope_metrics=[dataclasses.replace(scope, metrics=metrics) for scope, metrics in scopes.values()],
            )
            for resource, scopes in resources.values()
        ]
    )


# Encoding


def encoder(signal: Signal, encoding: Encoding, compression: Compression = "none") -> Encode:
    """Return the function that encodes spans, log records or metric leaves, and compresses the result.

    Raises:
        ConfigError: a package that the encoding or the compression needs is not installed.
    """
    encode = _PROTO[signal] if encoding == "otlp_proto" else _json(signal)
    if compression == "none":
        return encode
    compress = Compressed("json", compression).compressor()
    return lambda leaves: compress(encode(leaves))


def _proto_metrics(leaves: Sequence[MetricLeaf]) -> bytes:
    encoded: bytes = encode_metrics(_metrics_data(leaves)).SerializeToString()
    return encoded


_PROTO: Final[dict[Signal, Encode]] = {
    "traces": SpanEncoder(),
    "logs": lambda records: encode_logs(records).SerializeToString(),
    "metrics": _proto_metrics,
}


def _json(signal: Signal) -> Encode:
    try:
        from opentelemetry.exporter.otlp.json.common import (  # noqa: PLC0415 - another extra
            _log_encoder as logs,
            metrics_encoder as metrics,
            trace_encoder as traces,
        )
    except ImportError as error:
        message = "encoding is 'otlp_json', which needs another package; pip install 'kpl-integrations[otel-json]'"
        raise ConfigError(message) from error
    by_signal: dict[Signal, Encode] = {
        # `to_json` separates with white space.
        "traces": lambda spans: msgspec.json.encode(traces.encode_spans(spans).to_dict()),
        "logs": lambda records: msgspec.json.encode(logs.encode_logs(records).to_dict()),
        "metrics": lambda leaves: msgspec.json.encode(metrics.encode_metrics(_metrics_data(leaves)).to_dict()),
    }
    return by_signal[signal]


# Dividing


class TelemetryRecord(NamedTuple):
    """A user record with some of an export, encoded, and its partition key (None: a random one).

    `data` is None if the smallest part of the export is still too large for a Kinesis record.
    """

    data: bytes | None
    items: int
    key: str | None = None


def telemetry_records(
    leaves: Sequence[Any], encode: Encode, *, max_bytes: int, key: str | None = None
) -> Iterator[TelemetryRecord]:
    """Yield the encoded leaves in pieces of at most `max_bytes`, in order within a resource and scope."""
    data = encode(leaves)
    if len(data) <= max_bytes:
        yield TelemetryRecord(data, items_in(leaves), key)
        return
    parts = _divided(leaves, -(-len(data) // max_bytes))
    if len(parts) == 1:
        yield TelemetryRecord(None, items_in(leaves), key)
        return
    for part in parts:
        yield from telemetry_records(part, encode, max_bytes=max_bytes, key=key)


def items_in(leaves: Sequence[Any]) -> int:
    """Return how many spans, log records or data points there are."""
    return sum(leaf.points if isinstance(leaf, MetricLeaf) else 1 for leaf in leaves)


def _divided(leaves: Sequence[Any], parts: int) -> list[Sequence[Any]]:
    for place in (_resource, _scope):
        groups: dict[Hashable, list[Any]] = {}
        for leaf in leaves:
            groups.setdefault(place(leaf), []).append(leaf)
        if len(groups) > 1:
            return list(groups.values())
    if len(leaves) == 1 and isinstance(leaves[0], MetricLeaf):
        return [[part] for part in leaves[0].divided(parts)]
    size = max(1, -(-len(leaves) // parts))
    return [leaves[start : start + size] for start in range(0, len(leaves), size)]


# By identity: a provider has one resource, and hashing its attributes costs more than encoding a span.
_resource: Callable[[Any], int] = lambda leaf: id(leaf.resource)  # noqa: E731
_scope: Callable[[Any], int] = lambda leaf: id(leaf.instrumentation_scope)  # noqa: E731


def trace_keys(spans: Sequence[Any], shard_of: Callable[[str], str | None]) -> dict[int, str]:
    """Return the partition key of each trace id: itself in hex, or that of the first trace of the same shard.

    With the same key they share a user record, so its resource is encoded once.
    """
    keys: dict[int, str] = {}
    first_of: dict[str, str] = {}
    for span in spans:
        trace_id = span.context.trace_id
        if trace_id not in keys:
            key = f"{trace_id:032x}"
            shard = shard_of(key)
            keys[trace_id] = key if shard is None else first_of.setdefault(shard, key)
    return keys


# Partition keys


def keyed_parts(leaves: Sequence[Any], choice: KeyChoice) -> Iterator[Keyed]:
    """Yield the leaves by partition key, in the order in which the keys first appear.

    `choice` is "random", "resource" or a function of the leaf; for "trace_id" it is one that `trace_keys` makes.
    """
    if choice == "random":
        yield None, list(leaves)
        return
    key_of: Callable[[Any], object] = choice if callable(choice) else _resource_key()
    groups: dict[object, list[Any]] = {}
    for leaf in leaves:
        groups.setdefault(key_of(leaf), []).append(leaf)
    for key, group in groups.items():
        yield str(key)[:PARTITION_KEY_CHARACTERS] or None, group


def random_key() -> str:
    """Return a key that no other record has."""
    return secrets.token_hex(8)


def _resource_key() -> Callable[[Any], str]:
    """Return a function from a leaf to the key of its resource's attributes, the same in every process."""
    known: dict[int, str] = {}

    def key(leaf: Any) -> str:  # noqa: ANN401 - a span, log record or metric
        resource = leaf.resource
        found = known.get(id(resource))
        if found is None:
            attributes = msgspec.json.encode(sorted((name, str(value)) for name, value in resource.attributes.items()))
            found = known[id(resource)] = hashlib.blake2b(attributes, digest_size=_RESOURCE_KEY_BYTES).hexdigest()
        return found

    return key
