"""Send spans, log records and metrics to Kinesis, and print how many arrived.

    pip install 'kpl-integrations[otel,local]'
    python examples/otel_exporters.py

It starts its own local Kinesis. `KPL_ENDPOINT_URL=http://127.0.0.1:4567` (see `kpl local`) names
another one, which has a stream `orders`. To leave an application unchanged, run it with
`opentelemetry-instrument` and OTEL_TRACES_EXPORTER=kinesis; KPL_OTEL_STREAM then names the stream.
"""

import os
from contextlib import nullcontext

from kpl_core import Config
from kpl_integrations.local_kinesis import LocalKinesis, ThreadedLocalKinesis
from kpl_integrations.otel import kinesis_telemetry

STREAM = "orders"


def work(config: Config) -> None:
    """Create fifty traces with two spans and a log record each, and count them."""
    telemetry = kinesis_telemetry(STREAM, service_name="shop", config=config)
    tracer = telemetry.tracer_provider.get_tracer("shop")
    logger = telemetry.logger_provider.get_logger("shop")
    orders = telemetry.meter_provider.get_meter("shop").create_counter("orders")
    for number in range(50):
        with tracer.start_as_current_span("order", attributes={"order": number}), tracer.start_as_current_span("pay"):
            logger.emit(body=f"order {number} paid")
            orders.add(1)

    # True if everything arrived within 5 seconds.
    print("all arrived:", telemetry.force_flush(timeout_millis=5_000))
    for signal, counts in telemetry.counts().items():
        print(f"{signal}: {counts}")
    telemetry.shutdown()


def main() -> None:
    """Run with the Kinesis of KPL_ENDPOINT_URL, or with a local one."""
    named = os.environ.get("KPL_ENDPOINT_URL")
    own = ThreadedLocalKinesis(LocalKinesis({STREAM: 2})) if named is None else nullcontext()
    with own as local:
        if local is None:
            work(Config(endpoint_url=named))
        else:
            work(
                Config(
                    region="us-east-1",
                    endpoint_url=local.endpoint_url,
                    aws_access_key_id="local",
                    aws_secret_access_key="local",  # noqa: S106 - a dummy value
                )
            )


if __name__ == "__main__":
    main()
