"""The same application with a producer in its lifespan, whose end is the last that a gunicorn worker grants."""

import os

from telemetry_app import app  # type: ignore[import-not-found] # beside it, in the folder of the programs

from kpl_core import Config
from kpl_integrations.asgi import KinesisLifespan

app.router.lifespan_context = KinesisLifespan(Config(region="us-east-1", endpoint_url=os.environ["KPL_OTEL_ENDPOINT"]))
