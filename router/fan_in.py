"""Several prompts of one request: their outputs as one stream."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from router.requests import Output

# Enough that no prompt waits for a client that reads steadily; a slow one holds all of them up.
_MAX_QUEUED = 256


@dataclass(frozen=True, slots=True)
class Tagged:
    """An output and which of the request's prompts it belongs to."""

    prompt_index: int
    output: Output


@dataclass(frozen=True, slots=True)
class _Ended:
    error: Exception | None


async def fan_in(streams: Sequence[AsyncGenerator[Output, None]]) -> AsyncGenerator[Tagged, None]:
    """The outputs of all `streams` as they come; each stream's own keep their order.

    The first failure ends all of them. All are closed by the time this generator is.
    """
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for output in only:
                yield Tagged(0, output)
        return
    queue: asyncio.Queue[Tagged | _Ended] = asyncio.Queue(_MAX_QUEUED)
    tasks = [asyncio.create_task(_pump(i, stream, queue)) for i, stream in enumerate(streams)]
    try:
        num_open = len(tasks)
        while num_open:
            item = await queue.get()
            if isinstance(item, Tagged):
                yield item
            elif item.error is not None:
                raise item.error
            else:
                num_open -= 1
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(
    prompt_index: int,
    stream: AsyncGenerator[Output, None],
    queue: "asyncio.Queue[Tagged | _Ended]",
) -> None:
    error: Exception | None = None
    async with aclosing(stream):
        try:
            async for output in stream:
                await queue.put(Tagged(prompt_index, output))
        except Exception as caught:
            error = caught
    await queue.put(_Ended(error))
