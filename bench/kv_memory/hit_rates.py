"""How much of the workloads' prompts comes from the cache, beside the most that any cache could give."""

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bench.kv_memory.driver import EngineDriver
from bench.kv_memory.report import Chart, Column, Table
from bench.kv_memory.workloads import SHAPES, Ask, Outputs, Shape, Workload, agents
from workers.options import SchedulerOptions
from workers.step_plan import StepPlan

GOAL = 0.96
AGENT_GOAL = 1.05
BLOCK_SIZES = (16, 64)
AGENT_BLOCK_SIZES = (8, 16, 32, 64)
MEMORY_SHARES = (1.0, 0.5, 0.25)
_AMPLE_TOKENS = 1 << 20
_OPTIONS = SchedulerOptions(
    max_num_seqs=64, max_num_batched_tokens=2048, max_model_len=_AMPLE_TOKENS
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """One workload's run through the engine.

    Attributes:
        num_prefilled_tokens: computed, and not because they had just been drawn; recomputation after a preemption
            is in it.
        num_optimal_tokens: prompt tokens that an endless cache of single tokens would have had.
        num_new_tokens: prompt tokens that it would not have had.
        num_needed_blocks: in use or cached at the end; short of these something had to be evicted.
    """

    num_prompt_tokens: int
    num_cached_tokens: int
    num_prefilled_tokens: int
    num_optimal_tokens: int
    num_needed_blocks: int
    num_preemptions: int

    @property
    def hit_rate(self) -> float:
        return self.num_cached_tokens / self.num_prompt_tokens

    @property
    def optimal_hit_rate(self) -> float:
        return self.num_optimal_tokens / self.num_prompt_tokens

    @property
    def num_new_tokens(self) -> int:
        return self.num_prompt_tokens - self.num_optimal_tokens


class EndlessCache:
    """Everything ever computed, token by token: the longest prefix found is the offline optimum."""

    def __init__(self) -> None:
        self._texts: list[bytes] = []  # packed big-endian and sorted: neighbours share the most

    def num_known(self, tokens: "array[int]") -> int:
        """Tokens of the longest common prefix with any text added, the last token excepted."""
        text = _packed(tokens)
        place = bisect_left(self._texts, text)
        neighbours = self._texts[max(place - 1, 0) : place + 1]
        return min(
            max((_num_common(text, each) for each in neighbours), default=0), len(tokens) - 1
        )

    def add(self, tokens: "array[int]") -> None:
        text = _packed(tokens)
        self._texts.insert(bisect_left(self._texts, text), text)


def _packed(tokens: "array[int]") -> bytes:
    return np.asarray(tokens, dtype=">u4").tobytes()


def _num_common(one: bytes, other: bytes) -> int:
    size = min(len(one), len(other))
    differs = np.frombuffer(one[:size], ">u4") != np.frombuffer(other[:size], ">u4")
    return int(differs.argmax()) if differs.any() else size // 4


def run_workload(
    workload: Workload,
    block_size: int,
    *,
    num_blocks: int | None = None,
    min_partial_tokens: int = 1,
    enable_prefix_caching: bool = True,
) -> Outcome:
    """The whole workload through one engine; `num_blocks` None is more than it needs."""
    computed = _Computed()
    options = SchedulerOptions(
        max_num_seqs=_OPTIONS.max_num_seqs,
        max_num_batched_tokens=_OPTIONS.max_num_batched_tokens,
        max_model_len=_OPTIONS.max_model_len,
        enable_prefix_caching=enable_prefix_caching,
        min_partial_tokens=min_partial_tokens,
    )
    num_blocks = num_blocks or _AMPLE_TOKENS // block_size
    driver = EngineDriver(num_blocks, block_size, options, watch=computed)
    endless = EndlessCache()
    num_cached = num_prompt = num_optimal = num_decoded = 0
    outputs: list[Outputs] | None = None
    while (asks := _next(workload, outputs)) is not None:
        answers = [driver.submit(ask.prompt, ask.max_tokens, n=ask.n) for ask in asks]
        for ask in asks:
            num_optimal += endless.num_known(ask.prompt)
            endless.add(ask.prompt)
        driver.run()
        outputs = [answer.outputs for answer in answers]
        for ask, answer in zip(asks, answers, strict=True):
            num_cached += answer.num_cached_tokens
            num_prompt += answer.num_prompt_tokens
            num_decoded += sum(len(output) - 1 for output in answer.outputs)
            for output in answer.outputs:
                endless.add(ask.prompt + array("I", output[:-1]))
    stats = driver.stats
    return Outcome(
        num_prompt_tokens=num_prompt,
        num_cached_tokens=num_cached,
        num_prefilled_tokens=computed.num_tokens - num_decoded,
        num_optimal_tokens=num_optimal,
        num_needed_blocks=num_blocks - stats.num_free_blocks,
        num_preemptions=stats.preemptions_total,
    )


class _Computed:
    def __init__(self) -> None:
        self.num_tokens = 0

    def __call__(self, plan: StepPlan) -> None:
        self.num_tokens += plan.num_tokens


def _next(workload: Workload, outputs: list[Outputs] | None) -> list[Ask] | None:
    try:
        return next(workload) if outputs is None else workload.send(outputs)
    except StopIteration:
        return None


def agent_table(
    block_sizes: Sequence[int] = AGENT_BLOCK_SIZES, num_steps: int = 20, num_head_tokens: int = 4096
) -> Table:
    """One agent, with the cache and without."""

    def workload() -> Workload:
        return agents(1, num_steps, num_head_tokens)

    without = run_workload(workload(), block_sizes[0], enable_prefix_caching=False)
    rows = []
    for block_size in block_sizes:
        cached = run_workload(workload(), block_size)
        ratio = cached.num_prefilled_tokens / cached.num_new_tokens
        rows.append(
            (
                block_size,
                cached.num_new_tokens,
                cached.num_prefilled_tokens,
                ratio,
                without.num_prefilled_tokens,
                without.num_prefilled_tokens / cached.num_prefilled_tokens,
                ratio <= AGENT_GOAL,
            )
        )
    return Table(
        name="agent",
        title=f"Tokens prefilled by an agent of {num_steps} steps (head {num_head_tokens}, 200–800 a step)",
        columns=(
            Column("block_size", "block", "count"),
            Column("num_new_tokens", "new tokens", "count"),
            Column("num_prefilled_tokens", "prefilled", "count"),
            Column("ratio", "/ new", "ratio"),
            Column("num_uncached_tokens", "without the cache", "count"),
            Column("factor", "× as many", "number"),
            Column("is_met", "≤ 1.05"),
        ),
        rows=tuple(rows),
        notes=(
            "new tokens: what no cache could have had: head and observations; the agent's own answers were "
            "computed while they were drawn.",
        ),
        chart=Chart(
            "block_size",
            ("num_new_tokens", "num_prefilled_tokens", "num_uncached_tokens"),
            kind="bars",
            is_log_y=True,
        ),
    )


def workload_table(
    shapes: Sequence[Shape] = SHAPES,
    block_sizes: Sequence[int] = BLOCK_SIZES,
    memory_shares: Sequence[float] = MEMORY_SHARES,
) -> Table:
    """Every workload and block size, with as much memory as it needs and with less, partial copies on and off."""
    rows = []
    for shape in shapes:
        for block_size in block_sizes:
            ample = run_workload(shape.make(), block_size)
            for share in memory_shares:
                num_blocks = int(ample.num_needed_blocks * share)
                on, off = (
                    ample
                    if share == 1.0 and limit == 1
                    else run_workload(
                        shape.make(),
                        block_size,
                        num_blocks=None if share == 1.0 else num_blocks,
                        min_partial_tokens=limit,
                    )
                    for limit in (1, block_size)
                )
                rows.append(_row(shape.name, block_size, share, num_blocks, on, off))
    return Table(
        name="workloads",
        title="Prompt tokens that came from the cache",
        columns=(
            Column("workload", "workload"),
            Column("block_size", "block", "count"),
            Column("memory_share", "memory", "percent"),
            Column("num_blocks", "blocks", "count"),
            Column("optimum", "optimum", "percent"),
            Column("hit_rate", "hit rate", "percent"),
            Column("of_optimum", "of optimum", "ratio"),
            Column("without_partial", "no partial copies", "percent"),
            Column("partial_of_optimum", "of optimum", "ratio"),
            Column("num_preemptions", "preempted", "count"),
            Column("is_met", "≥ 0.96"),
        ),
        rows=tuple(rows),
        notes=(
            "memory 100 %: nothing had to be evicted; less is that share of the blocks used then.",
            "optimum: an endless cache of single tokens; the same in every row of a workload.",
            "no partial copies: only whole blocks are reused.",
        ),
        chart=Chart("memory_share", ("of_optimum",), ("workload", "block_size"), kind="bars"),
    )


def _row(
    name: str, block_size: int, share: float, num_blocks: int, on: Outcome, off: Outcome
) -> tuple[str | int | float | bool | None, ...]:
    of_optimum = on.hit_rate / on.optimal_hit_rate
    return (
        name,
        block_size,
        share,
        num_blocks,
        on.optimal_hit_rate,
        on.hit_rate,
        of_optimum,
        off.hit_rate,
        off.hit_rate / off.optimal_hit_rate,
        on.num_preemptions,
        of_optimum >= GOAL if share == 1.0 else None,
    )
