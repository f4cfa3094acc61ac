"""One Gateway's routing state: the index mirror, the ledger, and the decision over both.

Thread-safe: Serve runs request routers on a loop of their own, while the Gateway's loop reports what became of
the requests. Every method holds the lock for microseconds and never waits for anything.

Life of a request here: `open` → `decide` (reserves; again after a rejection) → `observe` … → `close`. A
decision for a request that is not open, or no longer, reserves nothing: a request that was cancelled while it
was being routed leaves no trace.
"""

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvstore.prefix_hash import num_tokens, split_hashes
from kvstore.prefix_index.mirror import IndexMirror
from router.ledger import Ledger
from router.receipts import Receipt
from router.scoring import Candidate, rank
from workers.protocol import EngineEvent, GenerateRequest, RequestStarted, TokensEmitted

_NUM_RECEIPTS = 256


@dataclass(slots=True)
class PolicyCounters:
    """Since this Gateway began. Predicted and delivered reuse side by side show what the index is worth."""

    decisions_total: int = 0
    routed_hit_tokens_total: int = 0
    delivered_hit_tokens_total: int = 0
    retries_total: int = 0


@dataclass(slots=True)
class _Open:
    request: GenerateRequest
    hashes: list[bytes]
    uncached_tokens: int | None = None


class RoutingPolicy:
    """Decides for one Gateway.

    Args:
        mirror: who holds which prefixes.
        block_size: tokens in a block, as the replicas report it; set once known.
        clock: seconds, monotonic.
        rng: breaks ties.
    """

    def __init__(
        self,
        mirror: IndexMirror,
        *,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self.mirror = mirror
        self.counters = PolicyCounters()
        self._clock = clock
        self._rng = rng or random.Random()
        self._lock = threading.Lock()
        self._ledger = Ledger()
        self._open: dict[str, _Open] = {}
        self._replica_ids: frozenset[str] = frozenset()
        self._block_size = 1
        self._receipts: deque[Receipt] = deque(maxlen=_NUM_RECEIPTS)

    def set_block_size(self, block_size: int) -> None:
        self._block_size = block_size

    def set_replicas(self, replica_ids: Iterable[str]) -> None:
        """The replicas Serve would send requests to now; accounts of others are dropped when empty."""
        with self._lock:
            self._replica_ids = frozenset(replica_ids)
            self._ledger.forget(self._ledger.known_replicas() - self._replica_ids)

    @property
    def replica_ids(self) -> frozenset[str]:
        return self._replica_ids

    def open(self, request: GenerateRequest) -> None:
        """A request begins; until `close`, decisions for it reserve."""
        with self._lock:
            self._open[request.request_id] = _Open(request, split_hashes(request.block_hashes))

    def decide(self, request_id: str, replica_ids: Sequence[str]) -> Receipt | None:
        """Rank the replicas for an open request and reserve the best one. None: not open, or none to rank."""
        now = self._clock()
        with self._lock:
            entry = self._open.get(request_id)
            if entry is None or not replica_ids:
                return None
            request = entry.request
            hits = self.mirror.match(request.fingerprint, entry.hashes, now)
            candidates = [
                Candidate(r, hits.get(r, 0) * self._block_size, self._ledger.load(r))
                for r in replica_ids
            ]
            num_prompt_tokens = num_tokens(request.tokens)
            ranking = rank(candidates, num_prompt_tokens, self._rng)
            receipt = Receipt(
                request_id, now, str(self.mirror.mode), num_prompt_tokens, tuple(ranking)
            )
            if self._ledger.reservation(request_id) is not None:
                self.counters.retries_total += 1
            self._reserve(entry, receipt.replica_id, ranking[0].uncached_tokens, now)
            self.counters.decisions_total += 1
            self.counters.routed_hit_tokens_total += ranking[0].candidate.hit_tokens
            self._receipts.append(receipt)
            return receipt

    def confirm(self, request_id: str, replica_id: str) -> None:
        """Serve sent the request to `replica_id`; when that was not the first choice, move the promise."""
        now = self._clock()
        with self._lock:
            entry = self._open.get(request_id)
            reservation = self._ledger.reservation(request_id)
            if entry is None or (reservation is not None and reservation.replica_id == replica_id):
                return
            hits = self.mirror.match(entry.request.fingerprint, entry.hashes, now)
            hit_tokens = hits.get(replica_id, 0) * self._block_size
            uncached = max(1, num_tokens(entry.request.tokens) - hit_tokens)
            self._reserve(entry, replica_id, uncached, now)

    def _reserve(self, entry: _Open, replica_id: str, uncached_tokens: int, now: float) -> None:
        request = entry.request
        self._ledger.reserve(request.request_id, replica_id, uncached_tokens, now)
        # Siblings of one burst follow the first of them, although no block is sealed yet.
        self.mirror.speculate(replica_id, request.fingerprint, entry.hashes, now)

    def observe(self, request_id: str, events: Iterable[EngineEvent]) -> None:
        """Correct the promise by what the replica said."""
        with self._lock:
            entry = self._open.get(request_id)
            if entry is None:
                return
            for event in events:
                if isinstance(event, RequestStarted):
                    entry.uncached_tokens = event.num_prompt_tokens - event.num_cached_tokens
                    self.counters.delivered_hit_tokens_total += event.num_cached_tokens
                elif isinstance(event, TokensEmitted) and entry.uncached_tokens is not None:
                    self._ledger.first_token(request_id, entry.uncached_tokens, self._clock())

    def close(self, request_id: str) -> None:
        """The request is over, one way or another: return what it holds. Idempotent."""
        with self._lock:
            self._open.pop(request_id, None)
            self._ledger.release(request_id)

    def receipts(self, limit: int) -> list[Receipt]:
        """The latest decisions, newest first."""
        with self._lock:
            return list(reversed(self._receipts))[:limit]

    def loads(self) -> dict[str, dict[str, float]]:
        """The ledger for operators: replica → what it owes."""
        with self._lock:
            ids = self._ledger.known_replicas() | self._replica_ids
            id_to_load = {replica_id: self._ledger.load(replica_id) for replica_id in ids}
        return {
            replica_id: {
                "owed_tokens": load.owed_tokens,
                "num_in_flight": load.num_in_flight,
                "prefill_tokens_per_s": round(load.prefill_tokens_per_s, 1),
            }
            for replica_id, load in sorted(id_to_load.items())
        }

    @property
    def num_open(self) -> int:
        return len(self._open)

    def check_invariants(self) -> None:
        with self._lock:
            self._ledger.check_invariants()
            assert self._ledger.num_reservations <= len(self._open)


_installed: dict[str, RoutingPolicy] = {}


def install(app_name: str, policy: RoutingPolicy) -> None:
    """Make `policy` decide for the application's replicas in this process. Serve builds the request router
    itself, so this is how the router and the Gateway come to share one state."""
    _installed[app_name] = policy


def installed(app_name: str) -> RoutingPolicy | None:
    return _installed.get(app_name)
