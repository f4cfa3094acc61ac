"""The way from a Gateway to the replicas: `router.backend.Backend` over a Ray Serve handle."""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from contextvars import Context
from dataclasses import asdict
from typing import Any, TypeVar

from ray.exceptions import RayActorError, TaskCancelledError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from kvstore.prefix_index.follower import IndexFollower
from kvstore.prefix_index.mirror import ReplicaRow
from router.backend import ClearedCaches
from router.policy import RoutingPolicy
from workers.errors import InternalError, Overloaded, PandoError, ReplicaLost, Unavailable
from workers.protocol import (
    EngineEvent,
    GenerateRequest,
    ReplicaInfo,
    ReplicaLog,
    ReplicaReport,
    ReuseReport,
)

logger = logging.getLogger(__name__)

_MAX_ATTEMPTS = 3
_REPORT_TIMEOUT_S = 2.0
_CLEAR_TIMEOUT_S = 15.0
_POLL_UNTIL_KNOWN_S = 0.5
_POLL_S = 5.0
_RETRY_AFTER_S = 2.0
_NUM_RECEIPTS_SHOWN = 20
Answer = TypeVar("Answer", ReplicaReport, ReuseReport, ReplicaLog)


class RayBackend:
    """`router.backend.Backend` over a Serve handle whose request router is `PrefixAwareRouter`.

    Args:
        handle: to the replicas' deployment.
        policy: the one installed for that deployment in this process.
        follower: for status only.
    """

    def __init__(
        self, handle: DeploymentHandle[Any], policy: RoutingPolicy, follower: IndexFollower
    ) -> None:
        self._handle = handle
        # Untyped: what `options(stream=True)` returns calls differently from what its annotation says.
        self._stream: Any = handle.options(stream=True)
        self._policy = policy
        self._follower = follower
        self._info: ReplicaInfo | None = None
        self._num_replicas_lost = 0

    def info(self) -> ReplicaInfo:
        if self._info is None:
            raise Unavailable("no replica is ready yet", retry_after_s=_RETRY_AFTER_S)
        return self._info

    async def watch(self) -> None:
        """Keep `info` true for as long as the Gateway lives: replicas may be replaced by others."""
        while True:
            await self.reports()
            await asyncio.sleep(_POLL_UNTIL_KNOWN_S if self._info is None else _POLL_S)

    async def generate(
        self, request: GenerateRequest
    ) -> AsyncGenerator[tuple[EngineEvent, ...], None]:
        self._policy.open(request)
        try:
            for attempt in range(1, _MAX_ATTEMPTS + 1):
                if not self._policy.replica_ids:
                    raise Unavailable("no replica can serve now", retry_after_s=_RETRY_AFTER_S)
                has_answered = False
                try:
                    async with aclosing(self._attempt(request)) as batches:
                        async for batch in batches:
                            has_answered = True
                            yield batch
                    return
                except ReplicaLost:
                    self._num_replicas_lost += 1
                    # Nothing was shown to the client yet: another replica can begin from the start.
                    if has_answered or attempt == _MAX_ATTEMPTS:
                        raise
        finally:
            self._policy.close(request.request_id)

    async def _attempt(
        self, request: GenerateRequest
    ) -> AsyncGenerator[tuple[EngineEvent, ...], None]:
        # In a context of its own: calls made while serving one HTTP request would else share Serve's internal
        # id, by which Serve tells waiting calls apart, and all but one of them would wait for ever.
        response = Context().run(self._stream.generate.remote, request)
        try:
            async for batch in response:
                self._policy.observe(request.request_id, batch)
                yield batch
        except (asyncio.CancelledError, GeneratorExit, PandoError):
            raise
        except Exception as error:
            raise _translate(error) from error
        finally:
            # Also after the end: it is then a no-op, and on every other path it frees the replica's blocks.
            response.cancel()

    async def reports(self) -> list[ReplicaReport]:
        reports = await self._of_all("report", ReplicaReport)
        if reports:
            self._info = reports[0].info
            self._policy.set_block_size(reports[0].info.block_size)
        return reports

    async def reuse(self) -> list[ReuseReport]:
        return await self._of_all("reuse", ReuseReport)

    async def reuse_logs(self) -> list[ReplicaLog]:
        return await self._of_all("reuse_log", ReplicaLog)

    async def clear_caches(self) -> ClearedCaches:
        answers = await self._ask_all("clear_cache", _CLEAR_TIMEOUT_S)
        return ClearedCaches(len(answers), sum(answer is True for answer in answers))

    async def _of_all(self, method: str, kind: type[Answer]) -> list[Answer]:
        """Every replica's answer that came in time, by replica."""
        answers = await self._ask_all(method, _REPORT_TIMEOUT_S)
        found = [answer for answer in answers if isinstance(answer, kind)]
        return sorted(found, key=lambda answer: answer.info.replica_id)

    async def _ask_all(self, method: str, timeout_s: float) -> list[Any]:
        """What every replica's `method` returned or raised."""
        try:
            return list(
                await self._handle.broadcast(method).results_async(
                    timeout_s=timeout_s, return_exceptions=True
                )
            )
        except (DeploymentUnavailableError, TimeoutError, RayActorError):
            return []

    async def status(self) -> dict[str, object]:
        mirror = self._policy.mirror
        counters = self._policy.counters
        reports = await self.reports()
        return {
            "replicas": [_report_json(report) for report in reports],
            "index": {
                "mode": str(mirror.mode),
                "is_connected": self._follower.is_connected,
                "num_entries": mirror.num_entries,
                "replicas": [_row_json(row) for row in mirror.replicas()],
            },
            "router": {
                "num_open": self._policy.num_open,
                "decisions_total": counters.decisions_total,
                "retries_total": counters.retries_total,
                "replicas_lost_total": self._num_replicas_lost,
                "routed_hit_tokens_total": counters.routed_hit_tokens_total,
                "delivered_hit_tokens_total": counters.delivered_hit_tokens_total,
                "ledger": self._policy.loads(),
            },
            "receipts": [r.to_json() for r in self._policy.receipts(_NUM_RECEIPTS_SHOWN)],
        }


def _report_json(report: ReplicaReport) -> dict[str, object]:
    # Digests are 64-bit, more than a JSON number surely carries: they travel as text.
    stats = asdict(report.stats) | {"digest": f"{report.stats.digest:016x}"}
    return asdict(report.info) | stats


def _row_json(row: ReplicaRow) -> dict[str, object]:
    return {
        "replica_id": row.replica_id,
        "epoch": row.epoch,
        "is_synced": row.is_synced,
        "seq": row.seq,
        "num_hashes": row.num_hashes,
        "digest": f"{row.digest:016x}",
        "lag_s": round(row.lag_s, 3),
    }


def _translate(error: Exception) -> PandoError:
    """What went wrong between Gateway and replica, in the error tree's words."""
    if isinstance(error, RayActorError):
        return ReplicaLost("the replica died while it was answering")
    if isinstance(error, BackPressureError):
        return Overloaded("every replica's queue is full", retry_after_s=_RETRY_AFTER_S)
    if isinstance(error, DeploymentUnavailableError):
        return Unavailable("no replica can serve now", retry_after_s=_RETRY_AFTER_S)
    if isinstance(error, TaskCancelledError):
        return ReplicaLost("the replica gave the request up")
    logger.error("a replica failed in a way it does not document", exc_info=error)
    return InternalError("an internal error; it has been logged")
