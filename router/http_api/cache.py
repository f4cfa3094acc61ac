"""What operators ask about the KV caches, and the one thing they may do to them."""

from fastapi import APIRouter, Request

from router.cache_view import cache_json, log_json
from router.http_api.generation import key_of
from router.http_api.shapes import Json
from router.inference import InferenceService


def make_cache_router(service: InferenceService) -> APIRouter:
    """/cache and /cache/log. All of it names tenants or disturbs them, so all of it is for operators."""
    router = APIRouter()

    @router.get("/cache")
    async def cache(request: Request) -> Json:
        service.tenants.resolve_admin(key_of(request))
        return cache_json(await service.backend.reuse(), service.tenants.all())

    @router.get("/cache/log")
    async def log(request: Request) -> Json:
        service.tenants.resolve_admin(key_of(request))
        return log_json(await service.backend.reuse_logs())

    # A method that no web page of another origin can use unasked.
    @router.delete("/cache")
    async def flush(request: Request) -> Json:
        service.tenants.resolve_admin(key_of(request))
        flushed = await service.backend.clear_caches()
        return {"num_replicas": flushed.num_replicas, "num_cleared": flushed.num_cleared}

    return router
