"""What sequences of one request share: parallel samples and beams, against sequences that share nothing."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import mean

import numpy as np

from bench.kv_memory.driver import EngineDriver, random_tokens
from bench.kv_memory.report import Chart, Column, Table
from workers.options import SchedulerOptions
from workers.protocol import BeamParams
from workers.step_plan import StepPlan

WIDTHS = (2, 4, 8)
BLOCK_SIZE = 16
NUM_PROMPT_TOKENS = 1000  # 62 blocks and a half
NUM_OUTPUT_TOKENS = 200
_SEED = 2


@dataclass(slots=True)
class BlockMeter:
    """Blocks of one request's sequences at every step from the first fork on, and the copies of all steps."""

    num_together: list[int] = field(default_factory=list)  # distinct blocks
    num_apart: list[int] = field(default_factory=list)  # of all tables, summed
    num_copies: int = 0

    def __call__(self, plan: StepPlan) -> None:
        self.num_copies += len(plan.copies)
        if len(plan.rows) > 1:
            tables = [row.sequence.table.block_ids for row in plan.rows]
            self.num_together.append(len(set().union(*tables)))
            self.num_apart.append(sum(map(len, tables)))


@dataclass(frozen=True, slots=True)
class SampleUse:
    """Blocks of `n` samples at their longest; `num_expected_blocks` is prompt + private tails, by arithmetic."""

    n: int
    num_prompt_tokens: int
    num_blocks: int
    num_expected_blocks: int
    num_unshared_blocks: int
    num_copies: int


def measure_samples(
    n: int,
    num_prompt_tokens: int = NUM_PROMPT_TOKENS,
    num_output_tokens: int = NUM_OUTPUT_TOKENS,
    block_size: int = BLOCK_SIZE,
) -> SampleUse:
    """One request of `n` samples in an engine of its own."""
    meter = BlockMeter()
    driver = _driver(n, num_prompt_tokens + num_output_tokens, block_size, meter)
    prompt = random_tokens(np.random.default_rng(_SEED), num_prompt_tokens)
    driver.submit(prompt, num_output_tokens, n=n)
    driver.run()
    # The last token of each is drawn but never computed.
    num_all = -(-(num_prompt_tokens + num_output_tokens - 1) // block_size)
    num_shared = num_prompt_tokens // block_size
    return SampleUse(
        n=n,
        num_prompt_tokens=num_prompt_tokens,
        num_blocks=max(meter.num_together),
        num_expected_blocks=num_shared + n * (num_all - num_shared),
        num_unshared_blocks=max(meter.num_apart),
        num_copies=meter.num_copies,
    )


@dataclass(frozen=True, slots=True)
class BeamUse:
    """Blocks of a search's beams, over its steps from the first fork on, meaned over the prompts."""

    width: int
    num_steps: float
    peak_blocks: float
    mean_blocks: float
    peak_unshared_blocks: float
    mean_unshared_blocks: float
    copies_per_step: float


def measure_beams(
    width: int,
    num_prompts: int = 10,
    num_prompt_tokens: int = 500,
    num_output_tokens: int = 128,
    block_size: int = BLOCK_SIZE,
) -> BeamUse:
    """Searches one after the other, each in an engine of its own."""
    random = np.random.default_rng(_SEED)
    meters: list[BlockMeter] = []
    for _ in range(num_prompts):
        meters.append(BlockMeter())
        driver = _driver(width, num_prompt_tokens + num_output_tokens, block_size, meters[-1])
        prompt = random_tokens(random, num_prompt_tokens)
        driver.submit(prompt, num_output_tokens, n=width, beam=BeamParams(width))
        driver.run()
    return summed_up(width, meters)


def summed_up(width: int, meters: Sequence[BlockMeter]) -> BeamUse:
    """Of the searches that these meters followed."""
    steps = [len(meter.num_together) for meter in meters]
    return BeamUse(
        width=width,
        num_steps=mean(steps),
        peak_blocks=mean(max(meter.num_together) for meter in meters),
        mean_blocks=mean(mean(meter.num_together) for meter in meters),
        peak_unshared_blocks=mean(max(meter.num_apart) for meter in meters),
        mean_unshared_blocks=mean(mean(meter.num_apart) for meter in meters),
        copies_per_step=sum(meter.num_copies for meter in meters) / sum(steps),
    )


def _driver(
    num_sequences: int, num_tokens: int, block_size: int, meter: BlockMeter
) -> EngineDriver:
    options = SchedulerOptions(max_model_len=num_tokens, max_num_batched_tokens=num_tokens)
    num_blocks = (num_sequences + 1) * (num_tokens // block_size + 2)
    return EngineDriver(num_blocks, block_size, options, watch=meter)


def tables() -> list[Table]:
    """Samples after prompts that end inside a block and at its border; beams."""
    samples = [
        measure_samples(n, num_prompt_tokens)
        for num_prompt_tokens in (NUM_PROMPT_TOKENS, NUM_PROMPT_TOKENS // BLOCK_SIZE * BLOCK_SIZE)
        for n in WIDTHS
    ]
    beams = [measure_beams(width) for width in WIDTHS]
    return [_sample_table(samples), beam_table("beams", "slot model, prompts of 500", beams)]


def _sample_table(uses: Iterable[SampleUse]) -> Table:
    return Table(
        name="samples",
        title=f"Blocks of n samples at their longest ({NUM_OUTPUT_TOKENS} tokens each, block {BLOCK_SIZE})",
        columns=(
            Column("num_prompt_tokens", "prompt", "count"),
            Column("n", "n", "count"),
            Column("num_blocks", "blocks used", "count"),
            Column("num_expected_blocks", "prompt + tails", "count"),
            Column("num_unshared_blocks", "unshared", "count"),
            Column("saved", "saved", "percent"),
            Column("num_copies", "copies", "count"),
            Column("is_met", "as promised"),
        ),
        rows=tuple(
            (
                use.num_prompt_tokens,
                use.n,
                use.num_blocks,
                use.num_expected_blocks,
                use.num_unshared_blocks,
                1 - use.num_blocks / use.num_unshared_blocks,
                use.num_copies,
                use.num_blocks == use.num_expected_blocks and use.num_copies <= use.n - 1,
            )
            for use in uses
        ),
        notes=(
            "as promised: whole prompt blocks once, a private tail each, at most one copy a sibling.",
        ),
        chart=Chart(
            "n", ("num_blocks", "num_unshared_blocks"), ("num_prompt_tokens",), kind="bars"
        ),
    )


def beam_table(name: str, setting: str, uses: Iterable[BeamUse]) -> Table:
    return Table(
        name=name,
        title=f"Blocks of a beam search ({setting} tokens, block {BLOCK_SIZE})",
        columns=(
            Column("width", "width", "count"),
            Column("num_steps", "steps", "number"),
            Column("peak_blocks", "peak", "number"),
            Column("peak_unshared_blocks", "unshared", "number"),
            Column("peak_saved", "saved", "percent"),
            Column("mean_blocks", "mean", "number"),
            Column("mean_unshared_blocks", "unshared", "number"),
            Column("mean_saved", "saved", "percent"),
            Column("copies_per_step", "copies a step", "ratio"),
        ),
        rows=tuple(
            (
                use.width,
                use.num_steps,
                use.peak_blocks,
                use.peak_unshared_blocks,
                1 - use.peak_blocks / use.peak_unshared_blocks,
                use.mean_blocks,
                use.mean_unshared_blocks,
                1 - use.mean_blocks / use.mean_unshared_blocks,
                use.copies_per_step,
            )
            for use in uses
        ),
        notes=(
            "unshared: width × the blocks of one sequence of that length. Copies are of one block each.",
        ),
        chart=Chart("width", ("mean_blocks", "mean_unshared_blocks"), kind="bars"),
    )
