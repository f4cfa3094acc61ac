"""Replays the replicas' last prompts here, under every eviction policy and several pool sizes.

Here and not on the replicas: a replay keeps a core busy for seconds, and theirs have requests to serve.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from cluster.cache_status import LogStatus
from kvstore.block_pool import BlockPool
from kvstore.eviction.choice import policy_named
from kvstore.radix_tree import RadixTree
from kvstore.reuse.prompt_log import SampledLog
from kvstore.reuse.replay import MakeTree, replay_log
from workers.options import POLICIES

REPLAY_SCALES = (0.5, 1.0, 2.0)


@dataclass(frozen=True, slots=True)
class PolicyResult:
    """One policy's hit ratio at each of REPLAY_SCALES, over all replicas' logs."""

    policy: str
    hit_ratios: tuple[float, ...]


def replay_policies(
    logs: Sequence[LogStatus],
    name_to_make_tree: Mapping[str, MakeTree],
    on_progress: Callable[[str], None] = lambda _: None,
) -> list[PolicyResult]:
    """Best first, at the pools' present size. Each begins with an empty pool, so all are a little low."""
    sampled = [log.as_log() for log in logs]
    results = []
    for name, make_tree in name_to_make_tree.items():
        on_progress(name)
        ratios = tuple(_hit_ratio(logs, sampled, scale, make_tree) for scale in REPLAY_SCALES)
        results.append(PolicyResult(name, ratios))
    at_present_size = REPLAY_SCALES.index(1.0)
    return sorted(results, key=lambda result: -result.hit_ratios[at_present_size])


def _hit_ratio(
    logs: Sequence[LogStatus], sampled: Sequence[SampledLog], scale: float, make_tree: MakeTree
) -> float:
    num_lookups = sum(log.num_lookups for log in logs)
    num_hits = sum(
        log.num_lookups * replay_log(each, round(log.num_blocks * scale), make_tree)
        for log, each in zip(logs, sampled, strict=True)
    )
    return num_hits / num_lookups if num_lookups else 0.0


def known_policies() -> dict[str, MakeTree]:
    """Every policy that an engine can be told to use, by name."""
    return {name: partial(_tree, name) for name in POLICIES}


def _tree(policy: str, pool: BlockPool) -> RadixTree:
    return RadixTree(pool, block_size=1, policy=policy_named(policy))
