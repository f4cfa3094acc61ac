"""The HTTP application, for any ASGI server: Ray Serve's in a cluster, uvicorn in tests."""

import time

from fastapi import FastAPI

from router.http_api.cache import make_cache_router
from router.http_api.endpoints import make_generation_router, make_tokenizer_router
from router.http_api.errors import install_error_handlers
from router.http_api.middleware import BodyLimit, LocalOnly, RequestId
from router.http_api.system import make_models_router, make_system_router
from router.inference import InferenceService


def create_app(service: InferenceService, *, adds_request_id_header: bool = True) -> FastAPI:
    """An application that answers from `service`; it owns nothing and needs no shutdown.

    Where no API keys are configured, it answers clients on this machine only.

    Args:
        adds_request_id_header: False behind Ray Serve's proxy, which adds `x-request-id` itself.
    """
    app = FastAPI(title="Pando", docs_url="/docs", redoc_url=None)
    app.include_router(make_generation_router(service))
    app.include_router(make_models_router(service, int(time.time())))
    app.include_router(make_tokenizer_router(service))
    app.include_router(make_system_router(service))
    app.include_router(make_cache_router(service))
    install_error_handlers(app, service.metrics.count_error)
    # The last one added is the outermost: a 413 has its request id too.
    app.add_middleware(BodyLimit, max_body_bytes=service.options.max_body_bytes)
    if not service.tenants.has_keys:
        app.add_middleware(LocalOnly, count_error=service.metrics.count_error)
    app.add_middleware(RequestId, adds_header=adds_request_id_header)
    return app
