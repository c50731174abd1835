"""One metric with the resource and the scope it stands under: what an export of metrics is divided into."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from opentelemetry.sdk.metrics.export import Metric, MetricsData, ResourceMetrics, ScopeMetrics
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

__all__ = ["MetricLeaf", "leaves_of", "metrics_data"]


@dataclasses.dataclass(frozen=True, slots=True)
class MetricLeaf:
    """A metric, or some of its data points. `partition_key` functions are given these."""

    resource_metrics: ResourceMetrics
    scope_metrics: ScopeMetrics
    metric: Metric

    @property
    def resource(self) -> Resource:
        """Return the resource it comes from."""
        return self.resource_metrics.resource

    @property
    def instrumentation_scope(self) -> InstrumentationScope:
        """Return the library that made it."""
        return self.scope_metrics.scope

    @property
    def points(self) -> int:
        """Return how many data points there are."""
        return len(self.metric.data.data_points)

    def divided(self, parts: int) -> "list[MetricLeaf]":
        """Return the same with the data points in about `parts` parts; one point is the least."""
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


def metrics_data(leaves: Sequence[MetricLeaf]) -> MetricsData:
    """Return an export of these metrics, under their resources and scopes as before."""
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
