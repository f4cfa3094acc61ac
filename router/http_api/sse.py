"""Server-sent events as OpenAI's clients read them: `data: {json}` blocks, `data: [DONE]` at the end."""

import json
import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from router.status_codes import error_body
from workers.errors import InternalError, PandoError

_log = logging.getLogger(__name__)
Chunk = Mapping[str, object]


class EventStream(StreamingResponse):
    """Sends `chunks` as events; whatever happens, `source` is closed before the response ends.

    `source` is what `chunks` draws from. It is closed here and not by `chunks`, since a generator that
    was never started does not run its own clean-up.

    A failure in mid-stream becomes an event `{"error": …}`, after which the stream ends without [DONE]:
    the status line has long been sent, and a silent cut would look like a whole answer.
    """

    def __init__(
        self,
        chunks: AsyncGenerator[Chunk, None],
        source: AsyncGenerator[Any, None],
        count_error: Callable[[str], None],
        headers: Mapping[str, str],
    ) -> None:
        self._chunks = chunks
        self._source = source
        super().__init__(
            _events(chunks, count_error),
            media_type="text/event-stream",
            # Proxies that buffer would turn the stream into one late block.
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers},
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._chunks.aclose()
            await self._source.aclose()


async def _events(
    chunks: AsyncGenerator[Chunk, None], count_error: Callable[[str], None]
) -> AsyncGenerator[bytes, None]:
    try:
        async for chunk in chunks:
            yield _event(chunk)
    except PandoError as error:
        count_error(error.code)
        yield _event(error_body(error))
    except Exception:
        _log.exception("unexpected failure in mid-stream")
        unexpected = InternalError("an internal error; it has been logged")
        count_error(unexpected.code)
        yield _event(error_body(unexpected))
    else:
        yield b"data: [DONE]\n\n"


def _event(chunk: Chunk) -> bytes:
    # ASCII only: clients that split lines as Python does would otherwise break at U+2028 or U+0085.
    return b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n"
