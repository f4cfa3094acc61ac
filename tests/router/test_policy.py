"""Decisions over a real mirror and a real ledger, with a clock and a die of our own."""

import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvstore.prefix_hash import chain, digest_of, pack_tokens, root_hash, split_hashes
from kvstore.prefix_index.events import Snapshot
from kvstore.prefix_index.mirror import IndexMirror
from kvstore.prefix_index.options import IndexOptions
from router.ledger import Load
from router.policy import RoutingPolicy
from router.scoring import Candidate, rank, score
from workers.protocol import (
    FinishReason,
    GenerateRequest,
    RequestStarted,
    SamplingParams,
    SequenceFinished,
    TokensEmitted,
)

BLOCK = 16
REPLICAS = ["r0", "r1", "r2"]


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def make_request(name: str, tokens: list[int], salt: bytes = b"t") -> GenerateRequest:
    packed = pack_tokens(tokens)
    return GenerateRequest(
        name, packed, "f", salt, chain(root_hash("f", salt), packed, BLOCK), SamplingParams(max_tokens=8)
    )  # fmt: skip


def make_policy(speculative_s: float = 5.0) -> tuple[RoutingPolicy, IndexMirror, Clock]:
    mirror = IndexMirror(IndexOptions(speculative_s=speculative_s))
    mirror.tick(0.0, is_connected=True)
    for replica in REPLICAS:
        mirror.admit(replica, "e", "f", now=0.0)
    clock = Clock()
    policy = RoutingPolicy(mirror, clock=clock, rng=random.Random(0))
    policy.set_block_size(BLOCK)
    policy.set_replicas(REPLICAS)
    return policy, mirror, clock


def hold(mirror: IndexMirror, replica: str, request: GenerateRequest) -> None:
    """The replica says that it holds the request's prompt."""
    hashes = request.block_hashes
    snapshot = Snapshot(seq=1, digest=digest_of(split_hashes(hashes)), hashes=hashes)
    mirror.reset(replica, "e", snapshot)


def test_the_holder_of_the_prefix_is_chosen() -> None:
    policy, mirror, _ = make_policy()
    request = make_request("q", list(range(1000)))
    hold(mirror, "r1", request)
    policy.open(request)
    receipt = policy.decide("q", REPLICAS)
    assert receipt is not None and receipt.replica_id == "r1"
    best = receipt.ranking[0]
    assert best.candidate.hit_tokens == 1000 // BLOCK * BLOCK
    assert best.uncached_tokens == 1000 - best.candidate.hit_tokens
    assert policy.loads()["r1"]["owed_tokens"] == best.uncached_tokens


def test_a_busy_holder_loses_against_an_idle_stranger() -> None:
    policy, mirror, _ = make_policy()
    hot = make_request("hot", list(range(1000)))
    hold(mirror, "r1", hot)
    for i in range(5):
        long = make_request(f"long{i}", [i + 5] * 9000)
        hold_nothing = long
        policy.open(hold_nothing)
        policy.decide(long.request_id, ["r1"])
    policy.open(hot)
    receipt = policy.decide("hot", REPLICAS)
    assert receipt is not None and receipt.replica_id != "r1"


def test_another_tenants_prefix_is_no_reason() -> None:
    policy, mirror, _ = make_policy()
    hold(mirror, "r1", make_request("mine", list(range(1000)), salt=b"mine"))
    yours = make_request("yours", list(range(1000)), salt=b"yours")
    policy.open(yours)
    receipt = policy.decide("yours", REPLICAS)
    assert receipt is not None
    assert all(each.candidate.hit_tokens == 0 for each in receipt.ranking)


def test_siblings_of_a_burst_follow_the_first() -> None:
    policy, _, _ = make_policy()
    chosen = []
    for i in range(4):
        request = make_request(f"s{i}", [*range(2000), i])
        policy.open(request)
        receipt = policy.decide(f"s{i}", REPLICAS)
        assert receipt is not None
        chosen.append(receipt.ranking[0].candidate)
    assert chosen[0].hit_tokens == 0
    assert [c.hit_tokens for c in chosen[1:3]] == [2000, 2000] or len(
        {c.replica_id for c in chosen}
    ) > 1


def test_guesses_are_forgotten() -> None:
    policy, _, clock = make_policy(speculative_s=1.0)
    first = make_request("a", list(range(500)))
    policy.open(first)
    policy.decide("a", REPLICAS)
    policy.close("a")
    clock.now = 5.0
    again = make_request("b", list(range(500)))
    policy.open(again)
    receipt = policy.decide("b", REPLICAS)
    assert receipt is not None
    assert all(each.candidate.hit_tokens == 0 for each in receipt.ranking)


def test_the_stream_corrects_the_promise_and_the_end_returns_it() -> None:
    policy, _, clock = make_policy()
    request = make_request("q", list(range(100)))
    policy.open(request)
    receipt = policy.decide("q", ["r0"])
    assert receipt is not None
    assert policy.loads()["r0"] == {
        "owed_tokens": 100,
        "num_in_flight": 1,
        "prefill_tokens_per_s": 2000.0,
    }
    clock.now = 1.0
    policy.observe("q", [RequestStarted("r0", "e", 100, 0), TokensEmitted(0, (1,))])
    loads = policy.loads()["r0"]
    assert (loads["owed_tokens"], loads["num_in_flight"]) == (0, 1)
    assert loads["prefill_tokens_per_s"] < 2000
    policy.observe("q", [SequenceFinished(0, FinishReason.STOP)])
    policy.close("q")
    policy.close("q")
    assert policy.loads()["r0"]["num_in_flight"] == 0
    policy.check_invariants()


def test_a_decision_after_the_end_reserves_nothing() -> None:
    policy, _, _ = make_policy()
    request = make_request("q", [1, 2, 3])
    policy.open(request)
    policy.close("q")
    assert policy.decide("q", REPLICAS) is None
    policy.confirm("q", "r0")
    assert all(load["num_in_flight"] == 0 for load in policy.loads().values())


def test_the_promise_goes_where_the_request_went() -> None:
    policy, _, _ = make_policy()
    request = make_request("q", list(range(64)))
    policy.open(request)
    receipt = policy.decide("q", REPLICAS)
    assert receipt is not None
    other = next(r for r in REPLICAS if r != receipt.replica_id)
    policy.confirm("q", other)
    assert policy.loads()[other]["num_in_flight"] == 1
    assert policy.loads()[receipt.replica_id]["num_in_flight"] == 0
    policy.check_invariants()


def test_a_second_decision_moves_the_promise() -> None:
    policy, _, _ = make_policy()
    request = make_request("q", list(range(64)))
    policy.open(request)
    policy.decide("q", ["r0"])
    policy.decide("q", ["r2"])
    assert policy.loads()["r0"]["owed_tokens"] == 0
    assert policy.loads()["r2"]["owed_tokens"] == 64
    assert policy.counters.retries_total == 1


def test_a_replica_that_left_leaves_no_account() -> None:
    policy, _, _ = make_policy()
    request = make_request("q", list(range(64)))
    policy.open(request)
    policy.decide("q", ["r0"])
    policy.close("q")
    policy.set_replicas(["r1", "r2"])
    assert "r0" not in policy.loads()


def test_many_threads_leave_an_empty_ledger() -> None:
    policy, _, _ = make_policy()

    def life(i: int) -> None:
        request = make_request(f"q{i}", [i % 7] * 100)
        policy.open(request)
        policy.decide(f"q{i}", REPLICAS)
        policy.observe(f"q{i}", [RequestStarted("r0", "e", 100, 0), TokensEmitted(0, (1,))])
        policy.close(f"q{i}")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(life, range(400)))
    policy.check_invariants()
    assert policy.num_open == 0
    assert all(
        load["owed_tokens"] == load["num_in_flight"] == 0 for load in policy.loads().values()
    )


def test_equal_estimates_share_the_work() -> None:
    rng = random.Random(1)
    candidates = [Candidate(r, 0, Load(0, 0, 1000.0)) for r in REPLICAS]
    firsts = [rank(candidates, 100, rng)[0].candidate.replica_id for _ in range(300)]
    assert all(60 < firsts.count(r) < 140 for r in REPLICAS)


@pytest.mark.parametrize(
    ("hit", "owed", "in_flight", "expected"),
    [(0, 0, 0, 1.0), (500, 0, 0, 0.5), (1000, 0, 0, 0.001), (0, 2000, 3, 3.03)],
)
def test_the_estimate(hit: int, owed: int, in_flight: int, expected: float) -> None:
    scored = score(Candidate("r", hit, Load(owed, in_flight, 1000.0)), 1000)
    assert scored.estimated_ttft_s == pytest.approx(expected)
