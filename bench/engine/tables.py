"""From samples to tables."""

from collections.abc import Sequence
from dataclasses import dataclass

from bench.engine.arm import Arm
from bench.engine.floors import PRECISION_TO_BYTES, ModelCost, decode_floor, prefill_floor
from bench.engine.measure import MEMORY, START, Results
from bench.engine.tasks import Metric, Sizes
from bench.kv_memory.report import Cell, Chart, Column, Table

_MIB = 2**20
_FASTER_NOTE = "Medians; beside them the lowest and the highest round. More is better."


@dataclass(frozen=True)
class Goal:
    """Pando's figure over a peer's, in one run.

    Attributes:
        of: Pando's precision; None: each one beside the peer's same precision.
        beside: the peer; the best of its configurations counts.
        is_same_precision: whether only the peer's configuration of that precision counts.
        bound: at least this for rates, at most this for times.
    """

    metric: Metric
    of: str
    beside: str
    is_same_precision: bool
    bound: float


def goals(sizes: Sizes) -> list[Goal]:
    """What Pando is meant to reach."""
    same = [
        Goal(Metric("decode", batch), precision, "vllm", True, 1.1 if batch == 8 else 1.3)
        for batch in sizes.batches
        for precision in PRECISION_TO_BYTES
    ]
    auto = [Goal(Metric("decode", batch), "auto", "vllm", False, 2.0) for batch in sizes.batches]
    longest = max(sizes.prompts)
    return [
        *same,
        *auto,
        Goal(Metric("prefill", longest), "fp32", "vllm", False, 2.0),
        Goal(Metric("prefill", longest), "fp32", "transformers", False, 1.1),
        Goal(Metric("hit", longest), "fp32", "vllm", False, 0.5),
        Goal(START, "fp32", "vllm", False, 0.5),
    ]


def all_tables(results: Results, arms: Sequence[Arm], sizes: Sizes, cost: ModelCost) -> list[Table]:
    """Those that have rows."""
    if not results.ceilings:
        return []
    tables = [
        _rates("decode", sizes.batches, results, arms, cost),
        _rates("prefill", sizes.prompts, results, arms, cost),
        _times(results, arms, sizes),
        goal_table(results, arms, sizes),
        _ceiling_table(results),
    ]
    return [table for table in tables if table.rows]


def _rates(
    kind: str, sizes: Sequence[int], results: Results, arms: Sequence[Arm], cost: ModelCost
) -> Table:
    ceilings = results.best_ceilings()
    limit = decode_floor if kind == "decode" else prefill_floor
    rows: list[tuple[Cell, ...]] = []
    for size in sizes:
        for arm in arms:
            spread = results.spread(arm.name, Metric(kind, size))
            if spread is None:
                continue
            is_known = arm.precision in PRECISION_TO_BYTES
            most = limit(cost, ceilings, arm.precision, size) if is_known else None
            share = spread.median / most if most is not None else None
            rows.append((arm.name, size, spread.median, spread.low, spread.high, most, share))
    x = "sequences" if kind == "decode" else "prompt tokens"
    columns = (
        Column("arm", "arm"),
        Column("size", x, "count"),
        Column("tokens_per_s", "tokens/s", "number"),
        Column("low", "low", "number"),
        Column("high", "high", "number"),
        Column("most", "machine's most", "number"),
        Column("share", "share of it", "percent"),
    )
    title = (
        "Decoding: tokens/s of all sequences together"
        if kind == "decode"
        else "Prefill: tokens/s of one prompt"
    )
    notes = (
        _FASTER_NOTE,
        "The machine's most: weight bytes over measured reads, or operations over measured matrix products, "
        "whichever is slower.",
    )
    chart = Chart(x="size", y=("tokens_per_s",), by=("arm",), kind="bars")
    return Table(f"engine_{kind}", title, columns, tuple(rows), notes, chart)


def _times(results: Results, arms: Sequence[Arm], sizes: Sizes) -> Table:
    longest = max(sizes.prompts)
    rows: list[tuple[Cell, ...]] = []
    for arm in arms:
        start = results.spread(arm.name, START)
        hit = results.spread(arm.name, Metric("hit", longest))
        memory = results.spread(arm.name, MEMORY)
        rows.append(
            (
                arm.name,
                *(start[:3] if start else (None,) * 3),
                *(hit[:3] if hit else (None,) * 3),
                round(memory.median / _MIB) if memory else None,
            )
        )
    columns = (
        Column("arm", "arm"),
        Column("start_s", "start to first token", "seconds"),
        Column("start_low_s", "low", "seconds"),
        Column("start_high_s", "high", "seconds"),
        Column("hit_s", f"first token, {longest:,} known", "seconds"),
        Column("hit_low_s", "low", "seconds"),
        Column("hit_high_s", "high", "seconds"),
        Column("peak_rss_mib", "peak memory, MiB", "count"),
    )
    notes = (
        "Start: of the process, its model's files in the page cache. Known: a prompt computed before, and 16 "
        "new tokens after it.",
        "Peak memory: resident, over all tasks.",
    )
    return Table("engine_times", "Times, and memory", columns, tuple(rows), notes)


def goal_table(results: Results, arms: Sequence[Arm], sizes: Sizes) -> Table:
    """Each goal whose figures are there: the ratio, and whether it is reached."""
    rows: list[tuple[Cell, ...]] = []
    for goal in goals(sizes):
        ratio = _ratio(goal, results, arms)
        if ratio is None:
            continue
        is_rate = goal.metric.kind in ("decode", "prefill")
        bound = f"{'≥' if is_rate else '≤'} {goal.bound:g}"
        is_reached = ratio >= goal.bound if is_rate else ratio <= goal.bound
        peer = (
            f"{goal.beside}, same precision" if goal.is_same_precision else f"{goal.beside}'s best"
        )
        what = f"{goal.metric.kind} {goal.metric.size or ''}".strip()
        rows.append(
            (what, f"pando-{goal.of}", peer, ratio, bound, "ok" if is_reached else "missed")
        )
    columns = (
        Column("what", "what"),
        Column("arm", "arm"),
        Column("beside", "over"),
        Column("ratio", "ratio", "ratio"),
        Column("goal", "goal"),
        Column("verdict", "verdict"),
    )
    notes = ("Medians over medians of one run. Decoding and prefill are rates, the others times.",)
    return Table("engine_goals", "Pando over its peers", columns, tuple(rows), notes)


def _ratio(goal: Goal, results: Results, arms: Sequence[Arm]) -> float | None:
    ours = results.spread(f"pando-{goal.of}", goal.metric)
    theirs = [
        spread.median
        for arm in arms
        if arm.engine == goal.beside
        and (not goal.is_same_precision or arm.precision == goal.of)
        and (spread := results.spread(arm.name, goal.metric)) is not None
    ]
    if ours is None or not theirs:
        return None
    is_rate = goal.metric.kind in ("decode", "prefill")
    return ours.median / (max(theirs) if is_rate else min(theirs))


def _ceiling_table(results: Results) -> Table:
    ceilings = results.best_ceilings()
    rows: tuple[tuple[Cell, ...], ...] = (
        ("memory reads, GB/s", ceilings.read_bytes_per_s / 1e9),
        ("fp32 matrix product, GFLOP/s", ceilings.fp32_flops / 1e9),
        ("bf16 matrix product, GFLOP/s", ceilings.bf16_flops / 1e9),
    )
    columns = (Column("what", "what"), Column("measured", "measured", "number"))
    notes = (f"The best of {len(results.ceilings)} rounds, each the best of five tries.",)
    return Table("engine_ceilings", "What the machine gives", columns, rows, notes)


def agreement_note(results: Results, arms: Sequence[Arm]) -> str:
    """Whether arms of full precision say the same after the same prompt."""
    name_to_tokens = {
        arm.name: results.arm_to_tokens[arm.name]
        for arm in arms
        if arm.precision == "fp32" and arm.name in results.arm_to_tokens
    }
    if len(name_to_tokens) < 2:
        return ""
    shared = 0
    for tokens in zip(*name_to_tokens.values(), strict=True):
        if len(set(tokens)) > 1:
            break
        shared += 1
    total = len(next(iter(name_to_tokens.values())))
    return (
        f"The first {shared} of {total} greedy tokens are the same in {', '.join(name_to_tokens)}."
    )
