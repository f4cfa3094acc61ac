"""Toy replicas that measure their reuse with the real meter."""

from collections.abc import AsyncGenerator

from edge_fakes import BLOCK_SIZE, FakeBackend

from kvstore.prefix_hash import HASH_BYTES, root_hash
from kvstore.reuse.meter import ReuseMeter
from router.backend import ClearedCaches
from workers.protocol import (
    EngineEvent,
    GenerateRequest,
    ReplicaLog,
    RequestStarted,
    ReuseReport,
)
from workers.reuse_report import replica_log, reuse_report


class MeasuringBackend(FakeBackend):
    """Every prompt's block lookups and hits are recorded as an engine would.

    Attributes:
        num_deaf: of the replicas asked to forget, how many do not answer.
    """

    num_deaf = 0

    @property
    def meter(self) -> ReuseMeter:
        if not hasattr(self, "_meter"):
            self._meter = ReuseMeter(self.info().num_blocks)
            self._meter.advance(0)
        return self._meter

    async def generate(
        self, request: GenerateRequest
    ) -> AsyncGenerator[tuple[EngineEvent, ...], None]:
        async for batch in super().generate(request):
            for event in batch:
                if isinstance(event, RequestStarted):
                    num_lookups = (event.num_prompt_tokens - 1) // BLOCK_SIZE
                    self.meter.record(
                        root_hash(request.fingerprint, request.salt),
                        request.block_hashes[: num_lookups * HASH_BYTES],
                        event.num_cached_tokens // BLOCK_SIZE,
                    )
            yield batch

    async def reuse(self) -> list[ReuseReport]:
        if not self.is_up:
            return []
        self.meter.advance(1800)
        return [reuse_report(self.info(), self.meter)]

    async def reuse_logs(self) -> list[ReplicaLog]:
        return [replica_log(self.info(), self.meter)] if self.is_up else []

    async def clear_caches(self) -> ClearedCaches:
        if not self.is_up:
            return ClearedCaches(0, 0)
        self._resident.clear()
        return ClearedCaches(1, 1 - self.num_deaf)
