"""What operators and clients ask about the service itself."""

from importlib import metadata

from fastapi import APIRouter, Request
from fastapi.responses import Response

from router.http_api.generation import authenticate, key_of
from router.http_api.shapes import Json
from router.inference import InferenceService
from router.metrics import CONTENT_TYPE


def make_models_router(service: InferenceService, created: int) -> APIRouter:
    """/v1/models; `created` is when this Gateway began, in seconds since the epoch."""
    router = APIRouter()

    def card(name: str) -> Json:
        return {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "pando",
            "root": service.info().model,
            "parent": None,
            "max_model_len": service.info().max_model_len,
        }

    @router.get("/v1/models")
    async def list_models(request: Request) -> Json:
        authenticate(service, request)
        return {"object": "list", "data": [card(name) for name in service.model_names()]}

    # A model's name may hold slashes.
    @router.get("/v1/models/{name:path}")
    async def get_model(name: str, request: Request) -> Json:
        authenticate(service, request)
        return card(service.resolve_model(name))

    return router


def make_system_router(service: InferenceService) -> APIRouter:
    """/health, /version, /metrics and /status."""
    router = APIRouter()

    @router.get("/health")
    async def health() -> Json:
        service.info()  # raises Unavailable, which is a 503, while no replica is known
        return {"status": "ok"}

    @router.get("/version")
    async def version() -> Json:
        return {"version": _version()}

    @router.get("/metrics")
    async def metrics(request: Request) -> Response:
        if not service.options.is_metrics_public:
            service.tenants.resolve_admin(key_of(request))
        reports = await service.backend.reports()
        return Response(service.metrics.render(reports), media_type=CONTENT_TYPE)

    @router.get("/status")
    async def status(request: Request) -> Json:
        service.tenants.resolve_admin(key_of(request))
        return await service.backend.status()

    return router


def _version() -> str:
    try:
        return metadata.version("pando")
    except metadata.PackageNotFoundError:  # run from a bare checkout
        return "unknown"
