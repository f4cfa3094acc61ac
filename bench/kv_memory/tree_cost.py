"""What the radix tree's bookkeeping costs, under each eviction policy, as the tree grows.

    python -m bench.kv_memory.tree_cost [--out FOLDER] [--nodes 1000 10000 100000]

CPU time of one thread, medians. The prompt that is matched has 100,000 tokens in blocks of 16, in 20 edges as an agent's steps leave
them; the other nodes are short texts that share their first block with ten others.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from bench.kv_memory.report import Column, Table, as_text, save
from kvstore.block_pool import BlockPool
from kvstore.eviction.hit_density import HitDensityPolicy
from kvstore.eviction.policy import EvictionPolicy
from kvstore.eviction.ranked import LfuPolicy, LruPolicy, SlruPolicy
from kvstore.eviction.s3_fifo import S3FifoPolicy
from kvstore.prefix_hash import chain, pack_tokens, root_hash
from kvstore.radix_tree import RadixTree

BLOCK_SIZE = 16
PROMPT_TOKENS = 100_000
PROMPT_EDGES = 20
TEXT_BLOCKS = 4
NUM_REPEATS = 200
NODE_COUNTS = (1_000, 10_000, 100_000)
GOAL_S = 2e-3
NAME_TO_POLICY: dict[str, Callable[[], EvictionPolicy]] = {
    "LRU": LruPolicy,
    "LFU": LfuPolicy,
    "SLRU": SlruPolicy,
    "S3-FIFO": S3FifoPolicy,
    "hit density": HitDensityPolicy,
}
_ROOT = root_hash("bench", b"one tenant")


@dataclass(frozen=True, slots=True)
class Costs:
    """Medians, in seconds."""

    num_nodes: int
    match_prompt_s: float
    match_text_s: float
    seal_block_s: float
    insert_block_s: float
    evict_one_s: float
    evict_block_s: float


class FilledTree:
    """A tree of about `num_nodes` nodes, all of them idle, and one long prompt among them."""

    def __init__(self, num_nodes: int, policy: EvictionPolicy) -> None:
        num_prompt_blocks = PROMPT_TOKENS // BLOCK_SIZE
        self.pool = BlockPool(2 * num_nodes * TEXT_BLOCKS + 4 * num_prompt_blocks)
        self.tree = RadixTree(self.pool, BLOCK_SIZE, policy)
        self.num_texts = 0
        while self.num_texts < num_nodes:
            self.add(self.new_text())
        self.prompt = pack_tokens(3_000_000 + i for i in range(PROMPT_TOKENS))
        for step in range(1, PROMPT_EDGES + 1):
            num_tokens = step * num_prompt_blocks // PROMPT_EDGES * BLOCK_SIZE
            self.add(self.prompt[: 4 * num_tokens])
            self.add(self.prompt[: 4 * num_tokens] + self.new_text())  # makes a branch there

    def new_text(self) -> bytes:
        """A text nobody has asked for; its first block is that of nine others."""
        self.num_texts += 1
        head = [1 + self.num_texts // 10] * BLOCK_SIZE
        tail = [self.num_texts] * (BLOCK_SIZE * (TEXT_BLOCKS - 1))
        return pack_tokens([*head, *tail])

    def add(self, tokens: bytes) -> float:
        """Serve a prompt as an engine does; the seconds its insert took."""
        num_tokens = len(tokens) // 4
        found = list(self.tree.match(_ROOT, tokens, num_tokens).block_ids)
        self.pool.acquire(found)
        blocks = found + self.pool.allocate(num_tokens // BLOCK_SIZE - len(found))
        hashes = chain(_ROOT, tokens, BLOCK_SIZE)
        start = time.thread_time()
        self.tree.insert(_ROOT, tokens, blocks, hashes)
        elapsed_s = time.thread_time() - start
        self.pool.release(blocks)
        self.tree.drain_changes()
        return elapsed_s

    def seal_time(self) -> float:
        """A sequence of 4,096 tokens seals its next block: the step that decoding repeats most."""
        tokens = self.prompt[: 4 * 4096] + self.new_text()[: 4 * BLOCK_SIZE]
        return self.add(tokens)


def _time(action: Callable[[], object], num_repeats: int = NUM_REPEATS) -> float:
    times: list[float] = []
    for _ in range(num_repeats):
        start = time.thread_time()
        action()
        times.append(time.thread_time() - start)
    return median(times)


def measure(num_nodes: int, policy: EvictionPolicy) -> Costs:
    filled = FilledTree(num_nodes, policy)
    tree, num_texts = filled.tree, filled.num_texts
    text = pack_tokens([1 + num_texts // 10] * BLOCK_SIZE)
    return Costs(
        num_nodes=num_nodes,
        match_prompt_s=_time(lambda: tree.match(_ROOT, filled.prompt, PROMPT_TOKENS), 50),
        match_text_s=_time(lambda: tree.match(_ROOT, text, BLOCK_SIZE)),
        seal_block_s=median(filled.seal_time() for _ in range(50)),
        insert_block_s=median(filled.add(filled.new_text()) for _ in range(NUM_REPEATS))
        / TEXT_BLOCKS,
        evict_one_s=_time(lambda: tree.evict(1)),
        evict_block_s=_time(lambda: tree.evict(64), 10) / 64,
    )


def cost_table(node_counts: Sequence[int]) -> Table:
    measured = {
        (name, num_nodes): measure(num_nodes, make())
        for name, make in NAME_TO_POLICY.items()
        for num_nodes in node_counts
    }
    worst_s = max(costs.match_prompt_s for costs in measured.values())
    return Table(
        name="tree_cost",
        title="The radix tree's bookkeeping: CPU time, medians",
        columns=(
            Column("policy", "policy"),
            Column("num_nodes", "nodes", "count"),
            Column("match_prompt_s", "match 100k tokens", "seconds"),
            Column("match_text_s", "match 1 block", "seconds"),
            Column("seal_block_s", "seal at 4k tokens", "seconds"),
            Column("insert_block_s", "insert a block", "seconds"),
            Column("evict_one_s", "evict 1", "seconds"),
            Column("evict_block_s", "a block of evict 64", "seconds"),
        ),
        rows=tuple(
            (
                name,
                num_nodes,
                costs.match_prompt_s,
                costs.match_text_s,
                costs.seal_block_s,
                costs.insert_block_s,
                costs.evict_one_s,
                costs.evict_block_s,
            )
            for (name, num_nodes), costs in measured.items()
        ),
        notes=(
            f"Goal: a prompt of 100,000 tokens matched in under {1000 * GOAL_S:g} ms; "
            f"at worst {1000 * worst_s:.2f} ms here.",
        ),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("out/kv_memory"))
    parser.add_argument("--nodes", type=int, nargs="+", default=NODE_COUNTS)
    options = parser.parse_args(arguments)
    table = cost_table(options.nodes)
    print(as_text(table))
    save(table, options.out, {"command": "python -m bench.kv_memory.tree_cost"})
    return 0


if __name__ == "__main__":
    sys.exit(main())
