"""Hit rates of the eviction policies on public traces, beside what knowing the future would give.

    python -m bench.kv_memory.trace_replay [--traces FOLDER] [--out FOLDER] [--shares 0.01 0.05 …]

Pools are shares of a trace's working set (its distinct blocks). No policy knows anything of a trace beforehand,
and every one runs with its defaults everywhere.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.kv_memory.replay import replay, replay_clairvoyant
from bench.kv_memory.report import Chart, Column, Table, as_text, save
from bench.kv_memory.traces import DEFAULT_FOLDER, Trace, find_traces, load_trace
from kvstore.eviction.hit_density import HitDensityPolicy
from kvstore.eviction.policy import EvictionPolicy
from kvstore.eviction.ranked import LfuPolicy, LruPolicy, SlruPolicy
from kvstore.eviction.s3_fifo import S3FifoPolicy

SHARES = (0.01, 0.02, 0.05, 0.1, 0.2)
OURS = "hit density"
TAUGHT = "same, taught"
BOUND = "clairvoyant"
UNBOUNDED = 1 << 40
NAME_TO_POLICY: dict[str, Callable[[], EvictionPolicy]] = {
    "LRU": LruPolicy,
    "LFU": LfuPolicy,
    "LFU, all history": lambda: LfuPolicy(num_remembered_blocks=UNBOUNDED),
    "SLRU": SlruPolicy,
    "S3-FIFO": S3FifoPolicy,
    OURS: HitDensityPolicy,
}
TIE = 0.005
CLOSED_GOAL = 0.25


def replay_all(trace: Trace, shares: Sequence[float]) -> Table:
    """A row for each pool size: every policy's block hit rate, the bound, and what ours closes of the gap."""
    num_distinct = trace.num_distinct
    rows: list[tuple[float | int | str, ...]] = []
    teacher = HitDensityPolicy()
    replay(trace, num_distinct, teacher)
    for share in shares:
        num_blocks = max(int(share * num_distinct), 1)
        rates = {
            name: replay(trace, num_blocks, make()).hit_rate
            for name, make in NAME_TO_POLICY.items()
        }
        fixed = max(rate for name, rate in rates.items() if name != OURS)
        taught = HitDensityPolicy(ages=teacher.ages.taught())
        rates[TAUGHT] = replay(trace, num_blocks, taught).hit_rate
        bound = replay_clairvoyant(trace, num_blocks).hit_rate
        closed = (rates[OURS] - fixed) / (bound - fixed) if bound > fixed else 0.0
        rows.append((100 * share, num_blocks, *rates.values(), bound, rates[OURS] - fixed, closed))
    names = [*NAME_TO_POLICY, TAUGHT, BOUND]
    columns = (
        Column("pool_percent", "pool, % of set", "number"),
        Column("num_blocks", "blocks", "count"),
        *(Column(name, name, "percent") for name in names),
        Column("lead", "ours − best fixed", "percent"),
        Column("closed", "of gap closed", "percent"),
    )
    return Table(
        name=f"replay_{trace.name}",
        title=f"Block hit rate on the {trace.name} trace: {len(trace.paths):,} requests, "
        f"{trace.num_references:,} blocks asked for, {num_distinct:,} distinct",
        columns=columns,
        rows=tuple(rows),
        notes=_notes(trace, rows),
        chart=Chart("pool_percent", tuple(names), is_log_x=True),
    )


def _notes(trace: Trace, rows: list[tuple[float | int | str, ...]]) -> tuple[str, ...]:
    ideal = 1 - trace.num_distinct / trace.num_references
    leads = [float(row[-2]) for row in rows]
    closed = [float(row[-1]) for row in rows]
    num_ties = sum(lead >= -TIE for lead in leads)
    num_closed = sum(part >= CLOSED_GOAL for part in closed)
    return (
        f"An unbounded cache would reach {ideal:.2%}.",
        f"{TAUGHT}: {OURS} that knew every class's reuse rates from the start, by a first pass over the",
        "trace: what these classes of blocks can tell. The rest is which one of a class returns.",
        f"{BOUND}: evicts the leaf whose next use is furthest; like every policy here it must bring in",
        "all blocks of a request.",
        "LFU, all history: counts survive eviction without limit; an upper bound of what LFU can be.",
        f"Ours is best or within {100 * TIE:g} points at {num_ties} of {len(rows)} sizes, "
        f"and closes {CLOSED_GOAL:.0%} of the gap at {num_closed}.",
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--traces", type=Path, default=DEFAULT_FOLDER)
    parser.add_argument("--out", type=Path, default=Path("out/kv_memory"))
    parser.add_argument("--shares", type=float, nargs="+", default=SHARES)
    options = parser.parse_args(arguments)
    paths = find_traces(options.traces)
    if not paths:
        print("skipped: no *.jsonl.gz in the folder of traces; name one with --traces")
        return 0
    for path in paths:
        table = replay_all(load_trace(path), options.shares)
        print(as_text(table), flush=True)
        save(table, options.out, {"command": "python -m bench.kv_memory.trace_replay"})
    return 0


if __name__ == "__main__":
    sys.exit(main())
