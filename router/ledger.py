"""What each replica owes: exact, because every routing decision writes here before the next one reads.

    reserve ──▶ prefill owed ──first token──▶ decoding ──release──▶ nothing
                     └──────────────── release ────────────────────────┘

Not a measurement of replicas but an account of promises: tokens still to be computed and streams still to be
served. `release` is called in a `finally` of every request, whatever became of it, and is idempotent, so an
idle Gateway owes exactly nothing.
"""

from dataclasses import dataclass

# A first guess until a replica has shown its own speed; within minutes it no longer matters.
DEFAULT_PREFILL_TOKENS_PER_S = 2000.0
_RATE_WEIGHT = 0.2
# Below this, the fixed cost of a step hides the cost of its tokens.
_MIN_LEARNED_TOKENS = 64
# Tokens a second: what no clock's jump may take an estimate beyond.
_SLOWEST, _FASTEST = 1.0, 1e7


@dataclass(frozen=True, slots=True)
class Reservation:
    """One request's promise. `owed_tokens_before` is what stood ahead of it when it was made."""

    replica_id: str
    uncached_tokens: int
    owed_tokens_before: int
    reserved_at: float
    is_prefilling: bool = True


@dataclass(slots=True)
class _Account:
    owed_tokens: int = 0
    num_in_flight: int = 0
    prefill_tokens_per_s: float = DEFAULT_PREFILL_TOKENS_PER_S


@dataclass(frozen=True, slots=True)
class Load:
    """What one replica owes now, and how fast it computes prompts."""

    owed_tokens: int
    num_in_flight: int
    prefill_tokens_per_s: float

    @property
    def backlog_s(self) -> float:
        return self.owed_tokens / self.prefill_tokens_per_s


class Ledger:
    """Accounts of all replicas and reservations of all requests in flight. Not thread-safe; no clock."""

    def __init__(self) -> None:
        self._accounts: dict[str, _Account] = {}
        self._reservations: dict[str, Reservation] = {}

    @property
    def num_reservations(self) -> int:
        return len(self._reservations)

    def load(self, replica_id: str) -> Load:
        account = self._accounts.get(replica_id) or _Account()
        return Load(account.owed_tokens, account.num_in_flight, account.prefill_tokens_per_s)

    def reservation(self, request_id: str) -> Reservation | None:
        return self._reservations.get(request_id)

    def reserve(self, request_id: str, replica_id: str, uncached_tokens: int, now: float) -> None:
        """Promise `replica_id` this request; an earlier promise of the same request is returned first."""
        self.release(request_id)
        account = self._accounts.setdefault(replica_id, _Account())
        self._reservations[request_id] = Reservation(
            replica_id, uncached_tokens, account.owed_tokens, now
        )
        account.owed_tokens += uncached_tokens
        account.num_in_flight += 1

    def first_token(self, request_id: str, uncached_tokens: int, now: float) -> None:
        """The prompt is computed: its tokens are owed no more, and the replica has shown its speed.

        Args:
            uncached_tokens: what the replica really had to compute.
        """
        reservation = self._reservations.get(request_id)
        if reservation is None or not reservation.is_prefilling:
            return
        account = self._accounts[reservation.replica_id]
        account.owed_tokens -= reservation.uncached_tokens
        self._learn(
            account, reservation.owed_tokens_before + uncached_tokens, now - reservation.reserved_at
        )
        self._reservations[request_id] = Reservation(
            reservation.replica_id,
            0,
            reservation.owed_tokens_before,
            reservation.reserved_at,
            False,
        )

    def release(self, request_id: str) -> None:
        """Return whatever the request still holds; does nothing the second time."""
        reservation = self._reservations.pop(request_id, None)
        if reservation is None:
            return
        account = self._accounts[reservation.replica_id]
        account.owed_tokens -= reservation.uncached_tokens
        account.num_in_flight -= 1

    def forget(self, replica_ids: set[str]) -> None:
        """Drop accounts of replicas that are gone, once nothing is reserved there."""
        for replica_id in replica_ids:
            account = self._accounts.get(replica_id)
            if account is not None and account.num_in_flight == 0:
                del self._accounts[replica_id]

    def known_replicas(self) -> set[str]:
        return set(self._accounts)

    def _learn(self, account: _Account, num_tokens: int, elapsed_s: float) -> None:
        if num_tokens < _MIN_LEARNED_TOKENS or elapsed_s <= 0:
            return
        rate = min(max(num_tokens / elapsed_s, _SLOWEST), _FASTEST)
        # Geometric: one slow outlier (a pause, a swap) moves the estimate by a factor, not to its value.
        account.prefill_tokens_per_s *= (rate / account.prefill_tokens_per_s) ** _RATE_WEIGHT

    def check_invariants(self) -> None:
        owed: dict[str, int] = dict.fromkeys(self._accounts, 0)
        in_flight: dict[str, int] = dict.fromkeys(self._accounts, 0)
        for reservation in self._reservations.values():
            owed[reservation.replica_id] += reservation.uncached_tokens
            in_flight[reservation.replica_id] += 1
        for replica_id, account in self._accounts.items():
            assert account.owed_tokens == owed[replica_id]
            assert account.num_in_flight == in_flight[replica_id]
            assert account.prefill_tokens_per_s > 0
