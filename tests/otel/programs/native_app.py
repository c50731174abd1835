"""An application with FastAPI's own telemetry, given our providers; KPL_OTEL_* say where they send."""

from fastapi import FastAPI
from opentelemetry._logs import SeverityNumber

from kpl_integrations.otel import kinesis_telemetry

telemetry = kinesis_telemetry(service_name="orders")
app = FastAPI(telemetry=telemetry.for_fastapi())


@app.get("/orders/{number}")
def order(number: int) -> dict[str, int]:
    telemetry.logger_provider.get_logger("orders").emit(
        body=f"order {number}", severity_number=SeverityNumber.WARN, timestamp=1
    )
    telemetry.meter_provider.get_meter("orders").create_counter("orders").add(1)
    return {"order": number}
