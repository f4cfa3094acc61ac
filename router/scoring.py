"""The routing rule: least estimated time to first token.

    estimate = backlog_s + uncached_tokens / prefill_tokens_per_s + IN_FLIGHT_S · num_in_flight

The hit length enters only through the time it saves, so a long match on a busy replica loses against a short
one on an idle replica. The last term stands for the decode steps a prompt has to share, and spreads requests
where the first two terms tie.
"""

import random
from collections.abc import Iterable
from dataclasses import dataclass

from router.ledger import Load

IN_FLIGHT_S = 0.01


@dataclass(frozen=True, slots=True)
class Candidate:
    """A replica one could choose: what it holds of this prompt, and what it owes."""

    replica_id: str
    hit_tokens: int
    load: Load


@dataclass(frozen=True, slots=True)
class Scored:
    """A candidate with its estimate, in seconds."""

    candidate: Candidate
    uncached_tokens: int
    estimated_ttft_s: float


def score(candidate: Candidate, num_prompt_tokens: int) -> Scored:
    """The estimate for one candidate. At least one token is always computed, so a full hit is not free."""
    load = candidate.load
    uncached_tokens = max(1, num_prompt_tokens - candidate.hit_tokens)
    estimate = (
        load.backlog_s
        + uncached_tokens / load.prefill_tokens_per_s
        + IN_FLIGHT_S * load.num_in_flight
    )
    return Scored(candidate, uncached_tokens, estimate)


def rank(
    candidates: Iterable[Candidate], num_prompt_tokens: int, rng: random.Random
) -> list[Scored]:
    """All candidates, best first; equal estimates in random order, so that equals share the work."""
    scored = [score(candidate, num_prompt_tokens) for candidate in candidates]
    rng.shuffle(scored)
    scored.sort(key=lambda each: each.estimated_ttft_s)
    return scored
