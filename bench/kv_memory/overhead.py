"""What one step costs beside the model: plan, commit and tell, with a runner that answers at once."""

import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import mean, median, quantiles
from time import perf_counter

import numpy as np

from bench.kv_memory.driver import EngineDriver, NullRunner, random_tokens
from bench.kv_memory.report import Chart, Column, Table
from workers.options import SchedulerOptions
from workers.step_plan import FinishedStep, StepPlan

NUM_SEQUENCES = 256
BLOCK_SIZE = 16
NUM_NODES = (1_000, 10_000, 100_000)
NUM_CONTEXT_TOKENS = (1_000, 8_000)
# An assumption, not a measurement: a decode step of an 8-billion-parameter model on an H100-class GPU at this batch.
MODEL_STEP_S = 0.020
GOAL = 0.02
_NUM_WARM_UP_STEPS = 8
_NUM_STEPS = 48
_NUM_HEADS = 100
_SEED = 7


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds a step that are not the runner's.

    Attributes:
        num_nodes: of the radix tree, resident before the sequences begin.
        num_context_tokens: of each sequence, about.
        is_full: whether no block is free, so that every new one needs an eviction.
        is_cached: whether blocks are sealed into the tree at all.
        plan_s, commit_s, tell_s: medians of planning, of taking results in (with sealing blocks, and all up to the
            first event delivered), and of delivering events to their requests.
        median_s, mean_s, p99_s: of plan and commit together: all that the memory's bookkeeping is in.
        num_evicted: blocks evicted in the steps measured.
        collect_s: one full collection of Python's garbage with everything that lives then.
    """

    num_nodes: int
    num_context_tokens: int
    is_full: bool
    is_cached: bool
    plan_s: float
    commit_s: float
    tell_s: float
    median_s: float
    mean_s: float
    p99_s: float
    num_evicted: int
    collect_s: float


class _Clock:
    """A null runner that notes when it was called and left, and when the first request was told of it."""

    def __init__(self) -> None:
        self._inner = NullRunner()
        self.called_s = self.left_s = self.told_s = 0.0

    def tell(self) -> None:
        self.told_s = perf_counter()

    def launch(self, plan: StepPlan) -> FinishedStep:
        self.called_s = perf_counter()
        step = self._inner.launch(plan)
        self.left_s = perf_counter()
        return step


def measure(
    num_nodes: int,
    num_context_tokens: int,
    *,
    is_full: bool = False,
    is_cached: bool = True,
    num_sequences: int = NUM_SEQUENCES,
    num_steps: int = _NUM_STEPS,
) -> StepCost:
    """Steps of `num_sequences` that only decode, over a tree of `num_nodes` idle one-block nodes.

    Contexts differ in length by up to two blocks, so that every step has some blocks to seal.
    """
    gc.collect()  # what earlier measurements left must not be part of this one's pauses
    random = np.random.default_rng(_SEED)
    num_tokens = _NUM_WARM_UP_STEPS + num_steps
    prompts = [
        random_tokens(random, num_context_tokens + int(extra))
        for extra in random.integers(0, 2 * BLOCK_SIZE, size=num_sequences)
    ]
    num_live = sum(len(prompt) // BLOCK_SIZE + 1 for prompt in prompts)
    num_spare = 0 if is_full else num_sequences * (num_tokens // BLOCK_SIZE + 3)
    num_blocks = num_nodes + num_live + num_spare
    options = SchedulerOptions(
        max_num_seqs=num_sequences,
        max_num_batched_tokens=1 << 16,
        max_num_waiting=1 << 20,
        max_model_len=num_blocks * BLOCK_SIZE,
        watermark=0.0,
        enable_prefix_caching=is_cached,
    )
    clock = _Clock()
    driver = EngineDriver(num_blocks, BLOCK_SIZE, options, runner=clock)
    _fill(driver, random, num_nodes)
    for i, prompt in enumerate(prompts):
        driver.submit(prompt, num_tokens + 64, when_told=None if i else clock.tell)
    while driver.stats.num_waiting:
        driver.step()
    for _ in range(_NUM_WARM_UP_STEPS):
        driver.step()
    num_evicted_before = driver.stats.evicted_blocks_total
    laps = [_lap(driver, clock) for _ in range(num_steps)]
    assert driver.stats.preemptions_total == 0 and driver.stats.num_running == num_sequences
    num_evicted = driver.stats.evicted_blocks_total - num_evicted_before
    steps = [lap.plan_s + lap.commit_s for lap in laps]
    return StepCost(
        num_nodes=num_nodes,
        num_context_tokens=num_context_tokens,
        is_full=is_full,
        is_cached=is_cached,
        plan_s=median(lap.plan_s for lap in laps),
        commit_s=median(lap.commit_s for lap in laps),
        tell_s=median(lap.tell_s for lap in laps),
        median_s=median(steps),
        mean_s=mean(steps),
        p99_s=quantiles(steps, n=100)[98],
        num_evicted=num_evicted,
        collect_s=_collect_s(),
    )


@dataclass(frozen=True, slots=True)
class _Lap:
    """One step's seconds, the runner's own left out."""

    plan_s: float
    commit_s: float
    tell_s: float


def _lap(driver: EngineDriver, clock: _Clock) -> _Lap:
    begun_s = perf_counter()
    driver.step()
    ended_s = perf_counter()
    return _Lap(
        plan_s=clock.called_s - begun_s,
        commit_s=clock.told_s - clock.left_s,
        tell_s=ended_s - clock.told_s,
    )


def _collect_s() -> float:
    begun_s = perf_counter()
    gc.collect()
    return perf_counter() - begun_s


def _fill(driver: EngineDriver, random: np.random.Generator, num_nodes: int) -> None:
    """Short prompts behind a hundred heads, all gone again: each leaves a node."""
    heads = [random_tokens(random, BLOCK_SIZE) for _ in range(min(_NUM_HEADS, num_nodes // 2))]
    for start in range(0, num_nodes - len(heads), 1_000):
        for i in range(start, min(start + 1_000, num_nodes - len(heads))):
            driver.submit(heads[i % len(heads)] + random_tokens(random, BLOCK_SIZE + 1), 1)
        while driver.step():
            pass


def table(
    num_nodes: Sequence[int] = NUM_NODES,
    num_context_tokens: Sequence[int] = NUM_CONTEXT_TOKENS,
    num_sequences: int = NUM_SEQUENCES,
) -> Table:
    """The shortest contexts over every tree, with free blocks and without; longer ones over the smallest tree;
    each length also without a tree."""
    run = partial(measure, num_sequences=num_sequences)
    shortest, *longer = num_context_tokens
    costs = [
        *(
            run(nodes, shortest, is_full=is_full)
            for is_full in (False, True)
            for nodes in num_nodes
        ),
        *(run(num_nodes[0], length) for length in longer),
        *(run(0, length, is_cached=False) for length in num_context_tokens),
    ]
    return Table(
        name="overhead",
        title=f"Bookkeeping a step with {num_sequences} decoding sequences",
        columns=_COLUMNS,
        rows=tuple(
            (
                cost.num_nodes,
                cost.num_context_tokens,
                cost.is_cached,
                cost.is_full,
                cost.plan_s,
                cost.commit_s,
                cost.median_s,
                cost.median_s / MODEL_STEP_S,
                cost.mean_s,
                cost.p99_s,
                cost.tell_s,
                cost.num_evicted,
                cost.collect_s,
            )
            for cost in costs
        ),
        notes=(*_notes(costs), *_EXPLANATIONS),
        chart=Chart("num_nodes", ("median_s",), ("num_context_tokens", "is_full"), kind="bars"),
    )


_COLUMNS = (
    Column("num_nodes", "tree nodes", "count"),
    Column("num_context_tokens", "context", "count"),
    Column("is_cached", "tree"),
    Column("is_full", "pool full"),
    Column("plan_s", "plan", "seconds"),
    Column("commit_s", "commit", "seconds"),
    Column("median_s", "both", "seconds"),
    Column("share", "of 20 ms", "percent"),
    Column("mean_s", "mean", "seconds"),
    Column("p99_s", "p99", "seconds"),
    Column("tell_s", "tell", "seconds"),
    Column("num_evicted", "evicted", "count"),
    Column("collect_s", "full collection", "seconds"),
)
_EXPLANATIONS = (
    "both: plan and commit: all of the scheduler, with pool, tables and tree; medians, then its mean and p99.",
    "of 20 ms: the median's share of an assumed step: an 8B model on an H100-class GPU at this batch.",
    "tell: delivering the step's events to the requests' queues, which comes on top.",
    "full collection: of Python's garbage; where mean or p99 stand out, Python decided on one.",
)


def _notes(costs: Sequence[StepCost]) -> Iterator[str]:
    """What the tree adds, as the difference it makes to the same sequences, and the whole, each against the goal."""
    length_to_bare = {cost.num_context_tokens: cost for cost in costs if not cost.is_cached}
    for cost in costs:
        if cost.is_cached and not cost.is_full and cost.num_nodes == costs[0].num_nodes:
            added_s = cost.median_s - length_to_bare[cost.num_context_tokens].median_s
            yield f"The tree at a context of {cost.num_context_tokens:,}: {_against_goal(added_s)}."
    yield f"The whole scheduler, in the worst row: {_against_goal(max(c.median_s for c in costs))}."


def _against_goal(seconds: float) -> str:
    share = seconds / MODEL_STEP_S
    verdict = "within" if share <= GOAL else "beyond"
    return f"{seconds * 1e6:.0f} µs, {share:.1%} of 20 ms, {verdict} the {GOAL:.0%} asked for"
