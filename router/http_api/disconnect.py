"""Work for a client ends when the client leaves, whether or not its answer has begun."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from fastapi import Request

Result = TypeVar("Result")


class ClientGone(Exception):
    """The client closed its connection before the answer began."""


async def until_disconnect(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`, which is cancelled when the client leaves. The body must have been read.

    Raises:
        ClientGone: the client left first; `work` has come to its end by then.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        await _end(watcher)
        await _end(task)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _end(task: "asyncio.Future[Any]") -> None:
    """Cancel a task and see it out; its own failure, if any, has been told already or does not matter."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
