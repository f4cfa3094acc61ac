"""A Pando cluster of this process's own: Ray and Serve started here, and ended here, with nothing left behind."""

import contextlib
import io
import logging
import math
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray
from ray import serve

from cluster.app import application
from cluster.config import ClusterConfig

GRPC_SERVICERS = (
    "router.proto.pando_pb2_grpc.add_InferenceServicer_to_server",
    "grpc_health.v1.health_pb2_grpc.add_HealthServicer_to_server",
)

_LAST_WORDS_S = 1.0  # Ray's messages reach the driver by a thread of their own


class ClusterError(RuntimeError):
    """The cluster could not be started; the message says why, for the operator."""


@contextlib.contextmanager
def running_cluster(
    config: ClusterConfig, *, address: str | None = None, is_verbose: bool = False
) -> Iterator[None]:
    """Run the application until the block ends, then end exactly what was started.

    Args:
        address: of a Ray cluster that runs already (`auto` finds the one on this machine); None starts a
            private one, which nobody else joins and whose files vanish with it.
        is_verbose: let the logs of all processes through to this terminal.

    Raises:
        ClusterError: a port is taken, Ray does not start, or the application does not become ready.
    """
    if address is None:
        check_port("listen.http_port", config.listen.host, config.listen.http_port)
        # Serve's gRPC proxy listens on every interface, whatever listen.host says.
        check_port("listen.grpc_port", "0.0.0.0", config.listen.grpc_port)  # noqa: S104
    if not is_verbose:
        for name in ("ray", "ray.serve"):
            logging.getLogger(name).setLevel(logging.ERROR)
    with _ray(config, address, is_verbose), _serve(config, address, is_verbose):
        yield


def check_port(name: str, host: str, port: int) -> None:
    """Raises ClusterError when nobody could listen there now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ClusterError(
                f"{name}: cannot listen on {host}:{port}: {error.strerror}"
            ) from error


@contextlib.contextmanager
def _ray(config: ClusterConfig, address: str | None, is_verbose: bool) -> Iterator[None]:
    logging_level = logging.INFO if is_verbose else logging.ERROR
    shared: dict[str, Any] = {"log_to_driver": is_verbose, "logging_level": logging_level}
    if address is not None:
        _check_somebody_listens(address)
        try:
            ray.init(address=address, **shared)
        except (ConnectionError, TimeoutError) as error:
            raise ClusterError(f"no Ray cluster at {address!r}: {error}") from error
        try:
            yield
        finally:
            ray.shutdown()
        return
    # Short: Ray puts Unix sockets below it, and their paths may have 107 characters.
    temp_dir = Path(tempfile.mkdtemp(prefix="pando-ray-"))
    try:
        ray.init(
            num_cpus=_num_cpus(config),
            include_dashboard=False,
            _temp_dir=str(temp_dir),
            _node_ip_address="127.0.0.1",
            **shared,
        )
        yield
    except (ConnectionError, TimeoutError) as error:
        raise ClusterError(f"Ray did not start: {error}") from error
    finally:
        with _last_words(is_verbose):
            ray.shutdown()
        shutil.rmtree(temp_dir, ignore_errors=True)


def _check_somebody_listens(address: str) -> None:
    """Ray itself would try for a minute. Raises ClusterError; addresses that are not host:port pass."""
    host, separator, port = address.rpartition(":")
    if not separator or not port.isdigit() or "/" in address:
        return
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except (OSError, OverflowError) as error:
        raise ClusterError(f"no Ray cluster at {address!r}: {error}") from error


def _num_cpus(config: ClusterConfig) -> int:
    """Ray's CPUs are tickets, not cores: on a private cluster there are as many as the replicas need."""
    wanted = config.replicas.num_replicas * config.replicas.num_cpus
    wanted += config.ingress.num_gateways * config.ingress.num_cpus
    return max(os.cpu_count() or 1, math.ceil(wanted))


@contextlib.contextmanager
def _serve(config: ClusterConfig, address: str | None, is_verbose: bool) -> Iterator[None]:
    listen = config.listen
    serve.start(
        http_options={"host": listen.host, "port": listen.http_port},
        grpc_options={
            "port": listen.grpc_port,
            "grpc_servicer_functions": list(GRPC_SERVICERS),
            "enable_reflection": True,
        },
        logging_config={"enable_access_log": is_verbose},
    )
    try:
        serve.run(application(config), name=config.app_name, route_prefix="/")
        yield
    except RuntimeError as error:
        raise ClusterError(f"the application did not start: {_reason(error)}") from error
    finally:
        if address is not None:
            serve.delete(config.app_name)
        else:
            with _last_words(is_verbose):
                serve.shutdown()
                time.sleep(_LAST_WORDS_S)


@contextlib.contextmanager
def _last_words(is_verbose: bool) -> Iterator[None]:
    """Ray prints that the controller it was asked to kill is dead; nobody needs to read that."""
    if is_verbose:
        yield
        return
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


def _reason(error: Exception) -> str:
    """The last line of a remote traceback: the only one an operator can use."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
