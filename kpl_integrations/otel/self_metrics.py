"""The exporter's own metrics, by the names of OpenTelemetry's semantic conventions.

    otel.sdk.exporter.span.exported            and .log.exported, .metric_data_point.exported
    otel.sdk.exporter.span.inflight

What was lost carries `error.type`. The SDK's processors count what they hand over as processed, whatever an
exporter says, so these are the only numbers that tell of a loss. They are made where the SDK makes its own:
with OTEL_PYTHON_SDK_INTERNAL_METRICS_ENABLED=true, or for a `meter_provider` that is given.
"""

import os
from collections.abc import Callable, Iterator
from itertools import count
from typing import Final

from opentelemetry.metrics import CallbackOptions, MeterProvider, Observation, get_meter_provider

from kpl_integrations.otel.counts import ExportCounts
from kpl_integrations.otel.options import Signal

__all__ = ["observe"]

_ENABLED: Final = "OTEL_PYTHON_SDK_INTERNAL_METRICS_ENABLED"
_COMPONENTS: Final[dict[Signal, tuple[str, str]]] = {
    "traces": ("span", "kinesis_span_exporter"),
    "logs": ("log", "kinesis_log_exporter"),
    "metrics": ("metric_data_point", "kinesis_metric_exporter"),
}
_numbers: Final = {signal: count() for signal in _COMPONENTS}


def observe(signal: Signal, counts: Callable[[], ExportCounts], meter_provider: MeterProvider | None) -> None:
    """Make the metrics of one exporter, if anybody asked for them."""
    if meter_provider is None:
        if os.environ.get(_ENABLED, "").strip().lower() != "true":
            return
        meter_provider = get_meter_provider()
    noun, component = _COMPONENTS[signal]
    attributes = {"otel.component.type": component, "otel.component.name": f"{component}/{next(_numbers[signal])}"}

    def exported(_options: CallbackOptions) -> Iterator[Observation]:
        now = counts()
        yield Observation(now.delivered, attributes)
        for reason, lost in now.lost.items():
            yield Observation(lost, {**attributes, "error.type": reason})

    def inflight(_options: CallbackOptions) -> Iterator[Observation]:
        yield Observation(counts().pending, attributes)

    meter = meter_provider.get_meter("kpl_integrations.otel")
    meter.create_observable_counter(
        f"otel.sdk.exporter.{noun}.exported",
        [exported],
        unit=f"{{{noun}}}",
        description="Arrived, or lost for a reason.",
    )
    meter.create_observable_up_down_counter(
        f"otel.sdk.exporter.{noun}.inflight", [inflight], unit=f"{{{noun}}}", description="Exported, no result yet."
    )
