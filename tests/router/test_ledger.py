"""The ledger against a plain model: one dictionary of promises."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from router.ledger import DEFAULT_PREFILL_TOKENS_PER_S, Ledger

requests = st.sampled_from(["a", "b", "c", "d"])
replicas = st.sampled_from(["r0", "r1", "r2"])


class LedgerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.promises: dict[str, tuple[str, int]] = {}
        self.now = 0.0

    @rule(request=requests, replica=replicas, tokens=st.integers(1, 5000))
    def reserve(self, request: str, replica: str, tokens: int) -> None:
        self.ledger.reserve(request, replica, tokens, self.now)
        self.promises[request] = (replica, tokens)

    @rule(request=requests, tokens=st.integers(0, 5000), elapsed=st.floats(0, 50))
    def first_token(self, request: str, tokens: int, elapsed: float) -> None:
        self.now += elapsed
        self.ledger.first_token(request, tokens, self.now)
        if request in self.promises:
            self.promises[request] = (self.promises[request][0], 0)

    @rule(request=requests)
    def release(self, request: str) -> None:
        self.ledger.release(request)
        self.promises.pop(request, None)

    @rule(replica=replicas)
    def forget(self, replica: str) -> None:
        self.ledger.forget({replica})

    @invariant()
    def agrees(self) -> None:
        self.ledger.check_invariants()
        assert self.ledger.num_reservations == len(self.promises)
        for replica in ("r0", "r1", "r2"):
            mine = [tokens for r, tokens in self.promises.values() if r == replica]
            load = self.ledger.load(replica)
            assert (load.owed_tokens, load.num_in_flight) == (sum(mine), len(mine))


TestLedger = LedgerMachine.TestCase


def test_a_replica_shows_its_speed() -> None:
    ledger = Ledger()
    for i in range(60):
        ledger.reserve(f"q{i}", "r", 1000, now=float(10 * i))
        ledger.first_token(f"q{i}", 1000, now=10 * i + 4.0)
        ledger.release(f"q{i}")
    assert ledger.load("r").prefill_tokens_per_s == pytest.approx(250, rel=0.01)
    assert ledger.load("other").prefill_tokens_per_s == DEFAULT_PREFILL_TOKENS_PER_S


def test_what_stood_ahead_counts_for_the_speed() -> None:
    ledger = Ledger()
    for i in range(80):
        now = 100.0 * i
        ledger.reserve(f"a{i}", "r", 1000, now)
        ledger.reserve(f"b{i}", "r", 1000, now)
        ledger.first_token(f"a{i}", 1000, now + 1)
        ledger.first_token(f"b{i}", 1000, now + 2)
        ledger.release(f"a{i}")
        ledger.release(f"b{i}")
    assert ledger.load("r").prefill_tokens_per_s == pytest.approx(1000, rel=0.01)


def test_one_outlier_moves_the_estimate_by_a_factor() -> None:
    ledger = Ledger()
    ledger.reserve("slow", "r", 1000, now=0)
    ledger.first_token("slow", 1000, now=1e6)
    assert ledger.load("r").prefill_tokens_per_s > DEFAULT_PREFILL_TOKENS_PER_S / 100
