"""`PrefixAwareRouter`: Serve's request router interface over `router.policy`. Thin: it decides nothing itself.

Two habits of Serve shape it. Inside one tier Serve re-ranks by queue length, so every tier holds one replica.
An exception here would leave the request waiting for ever, so none gets out.
"""

import logging
import random
from typing import Any

from ray.serve.request_router import (
    PendingRequest,
    ReplicaID,
    RequestRouter,
    RunningReplica,
)

from router.policy import RoutingPolicy, installed
from workers.protocol import GenerateRequest

logger = logging.getLogger(__name__)


class PrefixAwareRouter(RequestRouter):
    """Ranks replicas by estimated time to first token for this Gateway's policy."""

    def initialize_state(self, **kwargs: Any) -> None:
        """Takes no settings: the Gateway configures the policy it installs."""
        if kwargs:
            raise ValueError(
                f"PrefixAwareRouter takes no request_router_kwargs, not {sorted(kwargs)}"
            )

    @property
    def _policy(self) -> RoutingPolicy | None:
        return installed(self.app_name)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._tell_policy()

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._tell_policy()

    def _tell_policy(self) -> None:
        policy = self._policy
        if policy is not None:
            policy.set_replicas(replica_id.unique_id for replica_id in self.curr_replicas)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """One replica a tier, best first; any order when there is nothing to decide by."""
        if pending_request is not None:
            # Without it Serve asks again at once, in a tight loop, while every replica is full.
            pending_request.routing_context.should_backoff = True
        try:
            ranking = self._rank(candidate_replicas, pending_request)
        except Exception:
            logger.exception("routing failed; falling back to a random order")
            ranking = random.sample(candidate_replicas, len(candidate_replicas))
        return [[replica] for replica in ranking]

    def _rank(
        self, candidates: list[RunningReplica], pending_request: PendingRequest | None
    ) -> list[RunningReplica]:
        request = _generate_request(pending_request)
        policy = self._policy
        id_to_replica = {replica.replica_id.unique_id: replica for replica in candidates}
        receipt = None
        if request is not None and policy is not None:
            receipt = policy.decide(request.request_id, list(id_to_replica))
        if receipt is None:
            return random.sample(candidates, len(candidates))
        return [id_to_replica[scored.candidate.replica_id] for scored in receipt.ranking]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        """Serve may have had to take a later tier: the promise goes where the request went."""
        request = _generate_request(pending_request)
        policy = self._policy
        if request is not None and policy is not None:
            policy.confirm(request.request_id, replica_id.unique_id)


def _generate_request(pending_request: PendingRequest | None) -> GenerateRequest | None:
    if pending_request is None or not pending_request.args:
        return None
    first = pending_request.args[0]
    return first if isinstance(first, GenerateRequest) else None
