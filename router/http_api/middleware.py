"""Around every request: who may ask, a bound on the body, an id on the response. Plain ASGI, nothing buffered twice."""

import re
import uuid
from collections.abc import Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.http_api.errors import error_response
from router.loopback import check_is_local
from workers.errors import PandoError, PayloadTooLarge

REQUEST_ID_HEADER = "x-request-id"
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
# A client that is still sending does not read our 413, so this much more is taken and thrown away.
_DRAINED_BODIES = 8


class RequestId:
    """Echoes the client's `x-request-id` when it is one, else makes one; also in `request.state`.

    Args:
        adds_header: False where a proxy in front of us puts the header on the response.
    """

    def __init__(self, app: ASGIApp, adds_header: bool = True) -> None:
        self._app = app
        self._adds_header = adds_header

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(REQUEST_ID_HEADER, "")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        if not self._adds_header:
            await self._app(scope, receive, send)
            return

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REQUEST_ID_HEADER] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)


class LocalOnly:
    """Answers 403 to every client that is not on this machine."""

    def __init__(self, app: ASGIApp, count_error: Callable[[str], None]) -> None:
        self._app = app
        self._count_error = count_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # As the server saw it. uvicorn, also inside Serve's proxy, believes X-Forwarded-For only from
        # this machine, so a stranger cannot name himself local.
        client = scope.get("client")
        try:
            if scope["type"] == "http":
                check_is_local(client[0] if client else None)
        except PandoError as error:
            self._count_error(error.code)
            await error_response(error)(scope, receive, send)
            return
        await self._app(scope, receive, send)


class BodyLimit:
    """Reads the body before the application does, and answers 413 when it is over `max_body_bytes`."""

    def __init__(self, app: ASGIApp, max_body_bytes: int) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = bytearray()
        num_bytes = 0
        is_more = True
        while is_more and num_bytes <= self._max_body_bytes * _DRAINED_BODIES:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            piece = message.get("body", b"")
            num_bytes += len(piece)
            if num_bytes <= self._max_body_bytes:
                body += piece
            is_more = message.get("more_body", False)
        if num_bytes > self._max_body_bytes:
            error = PayloadTooLarge(
                f"the body has at least {num_bytes} bytes, the limit is {self._max_body_bytes}"
            )
            await error_response(error)(scope, receive, send)
            return
        await self._app(scope, _replay(bytes(body), receive), send)


def _replay(body: bytes, receive: Receive) -> Receive:
    is_sent = False

    async def replay() -> Message:
        nonlocal is_sent
        if is_sent:
            return await receive()
        is_sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay
