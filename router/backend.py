"""What stands behind a Gateway, as the Gateway sees it. `router.ray_backend` has the real one."""

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Protocol

from workers.protocol import (
    EngineEvent,
    GenerateRequest,
    ReplicaInfo,
    ReplicaLog,
    ReplicaReport,
    ReuseReport,
)


@dataclass(frozen=True, slots=True)
class ClearedCaches:
    """How many replicas were told to forget their prefixes, and how many said that they have."""

    num_replicas: int
    num_cleared: int


class Backend(Protocol):
    """The replicas of one model, however they are reached."""

    def generate(self, request: GenerateRequest) -> AsyncGenerator[tuple[EngineEvent, ...], None]:
        """Run `request` on one replica and give its events in order, some at a time.

        Nothing happens before the first event is asked for. The caller must close the generator on every
        path; closing it early cancels the request on its replica.

        Raises:
            PandoError: from the first step on, at any time; a failure may also come as a
                `RequestFailed` event.
        """

    def info(self) -> ReplicaInfo:
        """What the replicas have in common: model, fingerprint, block size, context length, vocabulary.

        Raises:
            Unavailable: no replica is known yet.
        """

    async def reports(self) -> list[ReplicaReport]:
        """The latest report of each live replica; empty when there is none."""

    async def reuse(self) -> list[ReuseReport]:
        """How each live replica's blocks were reused of late."""

    async def reuse_logs(self) -> list[ReplicaLog]:
        """Each live replica's last prompts, for a replay."""

    async def clear_caches(self) -> ClearedCaches:
        """Make every replica forget every cached prefix."""

    async def status(self) -> dict[str, object]:
        """JSON for operators: replicas, prefix index, ledger."""
