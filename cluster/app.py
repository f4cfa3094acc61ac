"""The application: what Ray Serve is told to run."""

import math
import secrets
import socket
from dataclasses import replace
from typing import Any

import ray
from ray import serve
from ray.serve import Application

from cluster.config import ClusterConfig, ReplicaOptions, parse_config
from cluster.index_server import IndexServer
from router.gateway import Gateway
from workers.replica import Replica

# By path: Serve loads it in whichever process holds a handle.
_ROUTER = "router.ray_router.PrefixAwareRouter"


def build_app(args: dict[str, Any]) -> Application:
    """Entry point for Serve config files: `args` is the configuration tree; PANDO_* variables override it.

    Raises:
        ConfigError: an unknown key or a bad value.
    """
    return application(parse_config(args))


def application(config: ClusterConfig) -> Application:
    """Gateways in front of replicas, and an embedded index when no URL is configured."""
    index_server, index_url = _index(config)
    num_gpus = _num_gpus(config.replicas)
    engine = config.engine
    if 0 < num_gpus < 1:  # replicas that share a GPU share its memory
        engine = replace(engine, gpu_memory_fraction=engine.gpu_memory_fraction * num_gpus)
    replicas = serve.deployment(
        name="Replica",
        num_replicas=config.replicas.num_replicas,
        ray_actor_options={"num_cpus": config.replicas.num_cpus, "num_gpus": num_gpus},
        max_ongoing_requests=config.replicas.max_ongoing_requests,
        health_check_period_s=config.replicas.health_check_period_s,
        graceful_shutdown_timeout_s=config.replicas.graceful_shutdown_timeout_s,
        request_router_config={"request_router_class": _ROUTER},
    )(Replica)
    gateways = serve.deployment(
        name="Gateway",
        num_replicas=config.ingress.num_gateways,
        ray_actor_options={"num_cpus": config.ingress.num_cpus},
        max_ongoing_requests=config.ingress.max_ongoing_requests,
    )(Gateway)
    return gateways.bind(
        replicas.bind(config.model, engine, config.index, index_url, str(config.model_cache_dir)),
        config.gateway,
        config.tenancy,
        config.index,
        index_url,
        index_server,
    )


def _num_gpus(replicas: ReplicaOptions) -> float:
    """GPUs for each replica; when left open, one, or an equal share where there are fewer, or none."""
    if replicas.num_gpus is not None:
        return replicas.num_gpus
    total = float(ray.cluster_resources().get("GPU", 0)) if ray.is_initialized() else 0.0
    share = min(1.0, total / replicas.num_replicas)
    return math.floor(share * 100) / 100


def _index(config: ClusterConfig) -> tuple[Application | None, str]:
    if config.index.url is not None:
        return None, config.index.url.get_secret_value()
    port, password = _free_port(), secrets.token_urlsafe(24)
    server = serve.deployment(
        name="IndexServer", num_replicas=1, ray_actor_options={"num_cpus": 0}
    )(IndexServer)
    return server.bind(port, password), f"redis://:{password}@127.0.0.1:{port}/0"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
