"""The Gateway: one Ray Serve ingress for HTTP and gRPC. Thin: it wires the parts and adapts Serve's calls."""

import asyncio
import logging
import tempfile
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import grpc
from fastapi import FastAPI
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from ray import serve
from ray.serve.grpc_util import RayServegRPCContext
from ray.serve.handle import DeploymentHandle

from kvstore.prefix_index.follower import IndexFollower
from kvstore.prefix_index.mirror import IndexMirror
from kvstore.prefix_index.options import IndexOptions
from router.grpc_api import GrpcInference
from router.http_api.app import create_app
from router.inference import InferenceService
from router.options import GatewayOptions, TenancyOptions
from router.policy import RoutingPolicy, install
from router.proto import pando_pb2 as pb
from router.ray_backend import RayBackend
from router.routing_metrics import RoutingCollector
from router.tenancy import Tenants
from workers.errors import Unavailable
from workers.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_HEALTHY_SERVICES = ("", "pando.v1.Inference")
_HEALTH_WATCH_S = 1.0


@serve.ingress()
class Gateway:
    """Authenticates, tokenizes, hashes, routes, and streams back.

    Args:
        replicas: handle to the replicas' deployment, whose request router is `PrefixAwareRouter`.
        index_url: of the prefix index; its being away never stops or slows a request.
        index_server: handle to the embedded index, kept only so that Serve runs it beside us.
    """

    # Serve awaits it; mypy does not know of such constructors.
    async def __init__(  # type: ignore[misc]
        self,
        replicas: DeploymentHandle[Any],
        gateway: GatewayOptions,
        tenancy: TenancyOptions,
        index: IndexOptions,
        index_url: str,
        index_server: DeploymentHandle[Any] | None = None,
    ) -> None:
        self._index_server = index_server
        mirror = IndexMirror(index)
        self._follower = IndexFollower(index, index_url, mirror)
        self._follower.start()
        policy = RoutingPolicy(mirror)
        install(serve.get_replica_context().app_name, policy)
        self._backend = RayBackend(replicas, policy, self._follower)
        # From a replica: the Gateway's machine needs neither the model's files nor a way to its source.
        tokenizer = await asyncio.to_thread(
            _make_tokenizer, await replicas.tokenizer_files.remote()
        )
        self._service = InferenceService(self._backend, tokenizer, Tenants(tenancy), gateway)
        self._service.metrics.registry.register(
            RoutingCollector(policy, lambda: self._follower.is_connected)
        )
        self._grpc = GrpcInference(self._service)
        await self._backend.reports()
        self._watch = asyncio.create_task(self._backend.watch())

    def __serve_build_asgi_app__(self) -> FastAPI:
        # Serve's proxy echoes or makes `x-request-id`, passes it on to us, and adds it to the response.
        return create_app(self._service, adds_request_id_header=False)

    async def Generate(  # noqa: N802 (named like the RPC)
        self, request: pb.GenerateRequest, grpc_context: RayServegRPCContext
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        async with aclosing(self._grpc.generate(request, grpc_context)) as responses:
            async for response in responses:
                yield response

    async def ListModels(  # noqa: N802
        self, request: pb.ListModelsRequest, grpc_context: RayServegRPCContext
    ) -> pb.ListModelsResponse:
        return await self._grpc.list_models(request, grpc_context)

    async def Tokenize(  # noqa: N802
        self, request: pb.TokenizeRequest, grpc_context: RayServegRPCContext
    ) -> pb.TokenizeResponse:
        return await self._grpc.tokenize(request, grpc_context)

    async def Check(  # noqa: N802
        self, request: HealthCheckRequest, grpc_context: RayServegRPCContext
    ) -> HealthCheckResponse:
        """grpc.health.v1: serving while a replica is known."""
        if not self._grpc.is_client_allowed(grpc_context):
            return HealthCheckResponse()
        if request.service not in _HEALTHY_SERVICES:
            grpc_context.set_code(grpc.StatusCode.NOT_FOUND)
            grpc_context.set_details(f"no service {request.service!r} here")
        return self._health()

    async def Watch(  # noqa: N802
        self, request: HealthCheckRequest, grpc_context: RayServegRPCContext
    ) -> AsyncGenerator[HealthCheckResponse, None]:
        """The state now, and again whenever it changes."""
        if not self._grpc.is_client_allowed(grpc_context):
            yield HealthCheckResponse()
            return
        told: HealthCheckResponse | None = None
        while True:
            now = self._health()
            if now != told:
                yield now
                told = now
            await asyncio.sleep(_HEALTH_WATCH_S)

    def _health(self) -> HealthCheckResponse:
        try:
            self._backend.info()
        except Unavailable:
            return HealthCheckResponse(status=HealthCheckResponse.NOT_SERVING)
        return HealthCheckResponse(status=HealthCheckResponse.SERVING)

    def __del__(self) -> None:
        """Called by Serve when the Gateway is stopped in good order."""
        if (follower := getattr(self, "_follower", None)) is not None:
            follower.close()


def _make_tokenizer(name_to_content: dict[str, bytes]) -> Tokenizer:
    with tempfile.TemporaryDirectory(prefix="pando-tokenizer-") as directory:
        for name, content in name_to_content.items():
            (Path(directory) / name).write_bytes(content)
        return Tokenizer.from_directory(Path(directory))
