"""An event stream closes what it draws from before it returns, not when the garbage is collected."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from router.http_api.sse import EventStream


@pytest.mark.parametrize("num_sent_before_stall", [0, 1, 3])
@pytest.mark.parametrize("spec_version", ["2.3", "2.4"])
def test_the_source_is_closed_when_a_slow_client_goes(
    num_sent_before_stall: int, spec_version: str
) -> None:
    async def scenario() -> None:
        is_closed = False
        num_sent = 0
        is_stalled = asyncio.Event()

        async def source() -> AsyncGenerator[dict[str, object], None]:
            nonlocal is_closed
            try:
                for i in range(100):
                    yield {"i": i}
            finally:
                is_closed = True

        # This reference keeps the collector away from the generator.
        drawn_from = source()
        await anext(drawn_from)

        async def chunks() -> AsyncGenerator[dict[str, object], None]:
            async for item in drawn_from:
                yield item

        async def send(message: Any) -> None:
            nonlocal num_sent
            if num_sent == num_sent_before_stall:
                is_stalled.set()
                await asyncio.sleep(60)
            num_sent += 1

        async def receive() -> dict[str, object]:
            await asyncio.sleep(60)
            return {"type": "http.disconnect"}

        response = EventStream(chunks(), drawn_from, lambda code: None, {})
        scope = {"type": "http", "asgi": {"spec_version": spec_version}}
        task = asyncio.create_task(response(scope, receive, send))
        await is_stalled.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert is_closed

    asyncio.run(scenario())
