"""One application in each of four frameworks, wrapped in KinesisASGI; FRAMEWORK says which."""

import os
from typing import Any

from kpl_core import Config, Delivery
from kpl_integrations.asgi import KinesisASGI, KinesisLifespan, MissingProducer, producer_of


def put(scope: Any) -> Delivery:
    return producer_of(scope).put_nowait("orders", partition_key="k", data=os.environ["FRAMEWORK"].encode())


def django() -> Any:
    from django.conf import settings
    from django.core.asgi import get_asgi_application
    from django.http import JsonResponse
    from django.urls import path

    async def order(request: Any) -> JsonResponse:
        try:
            return JsonResponse({"successful": (await put(request.scope)).successful})
        except MissingProducer as error:
            return JsonResponse({"error": str(error)}, status=500)

    settings.configure(
        SECRET_KEY="test", ALLOWED_HOSTS=["*"], ROOT_URLCONF=type("Urls", (), {"urlpatterns": [path("orders", order)]})
    )
    return get_asgi_application()


def quart() -> Any:
    from quart import Quart, request

    app = Quart(__name__)

    @app.get("/orders")
    async def order() -> dict[str, bool]:
        return {"successful": (await put(request.scope)).successful}

    return app


def litestar() -> Any:
    from litestar import Litestar, Request, get

    @get("/orders")
    async def order(request: Request[Any, Any, Any]) -> dict[str, bool]:
        return {"successful": (await put(request.scope)).successful}

    return Litestar([order])


def starlette() -> Any:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    async def order(request: Request) -> JSONResponse:
        return JSONResponse({"successful": (await put(request.scope)).successful})

    return Starlette(routes=[Route("/orders", order)])


config = Config(region="us-east-1", endpoint_url=os.environ["KPL_ENDPOINT_URL"], record_max_buffered_time_ms=5)
app = KinesisASGI(globals()[os.environ["FRAMEWORK"]](), KinesisLifespan(config))
