"""A real HTTP server on a loopback port, for tests of what clients see."""

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from pydantic import SecretStr

from router.http_api.app import create_app
from router.inference import InferenceService
from router.options import TenancyOptions, TenantKey

TENANCY = TenancyOptions(
    secret=SecretStr("s" * 16),
    keys=(
        TenantKey(tenant="a", key=SecretStr("key-a")),
        TenantKey(tenant="b", key=SecretStr("key-b")),
        TenantKey(tenant="ops", key=SecretStr("key-ops"), is_admin=True),
    ),
)


@contextmanager
def serving(service: InferenceService) -> Iterator[str]:
    """The address of a real server in front of `service`."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        config = uvicorn.Config(create_app(service), log_level="error", ws="none")
        server = uvicorn.Server(config)
        thread = threading.Thread(
            target=lambda: asyncio.run(server.serve(sockets=[listener])), daemon=True
        )
        thread.start()
        wait_until(lambda: server.started)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


def wait_until(condition: object) -> None:
    deadline = time.monotonic() + 20
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, "nothing happened in 20 s"
        time.sleep(0.005)
