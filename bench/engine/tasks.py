"""What is measured of each arm, all of it made of "generate n tokens after these prompts"."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from bench.engine.arm_process import Answer
from bench.engine.arms.loop import Prompts

Generate = Callable[[Prompts, int], Answer]
# Ids that every vocabulary of the models used here has; the first hundred may be special.
_FIRST_TOKEN, _END_TOKEN = 100, 40_000
_DECODE_PROMPT_TOKENS = 16
_NEW_AFTER_HIT = 16


@dataclass(frozen=True)
class Sizes:
    """How much of each kind is measured.

    Attributes:
        batches: of decoding; `num_decoded` tokens for each sequence.
        prompts: lengths of what is prefilled; the longest one is looked for again in the prefix cache.
        end_token: ids of prompts lie below it.
    """

    batches: tuple[int, ...] = (1, 8, 32)
    num_decoded: int = 32
    prompts: tuple[int, ...] = (512, 3000)
    end_token: int = _END_TOKEN


class Metric(NamedTuple):
    """`kind` is decode (size: sequences), prefill (size: tokens), hit (size: tokens), start or memory."""

    kind: str
    size: int = 0


class Sample(NamedTuple):
    metric: Metric
    value: float  # tokens/s of decode and prefill, seconds of hit and start, bytes of memory


@dataclass(frozen=True)
class TaskRun:
    """One round of one task: its figure, the tokens it was made of, the arm's peak memory by then."""

    sample: Sample
    tokens: list[list[int]]
    peak_rss_bytes: int


def metrics_of(sizes: Sizes, *, has_prefix_cache: bool) -> list[Metric]:
    """What a round measures of an arm, in this order."""
    metrics = [Metric("decode", batch) for batch in sizes.batches]
    metrics += [Metric("prefill", num_tokens) for num_tokens in sizes.prompts]
    return [*metrics, Metric("hit", max(sizes.prompts))] if has_prefix_cache else metrics


def run_task(generate: Generate, metric: Metric, sizes: Sizes, seed: str) -> TaskRun:
    """One round of one metric.

    Args:
        seed: prompts are drawn from it; another round must have another one, or the prefix cache answers. A hit
            finds the prompt that the longest prefill had under the same seed.
    """
    if metric.kind == "decode":
        return _decode(generate, metric, sizes, seed)
    if metric.kind == "prefill":
        answer = generate([_prompt(metric.size, sizes, f"{seed} prefill {metric.size}")], 1)
        return _run(metric, metric.size / answer.seconds, answer)
    assert metric.kind == "hit", metric
    known = _prompt(metric.size, sizes, f"{seed} prefill {metric.size}")
    answer = generate([known + _prompt(_NEW_AFTER_HIT, sizes, f"{seed} new")], 1)
    return _run(metric, answer.seconds, answer)


def _decode(generate: Generate, metric: Metric, sizes: Sizes, seed: str) -> TaskRun:
    """The rate between the first token and the last: what a run of one token takes is taken off."""

    def prompts(part: str) -> Prompts:
        names = [f"{seed} {metric.size} {part} {i}" for i in range(metric.size)]
        return [_prompt(_DECODE_PROMPT_TOKENS, sizes, name) for name in names]

    first = generate(prompts("first"), 1)
    whole = generate(prompts("whole"), 1 + sizes.num_decoded)
    seconds = max(whole.seconds - first.seconds, 1e-9)
    return _run(metric, metric.size * sizes.num_decoded / seconds, whole)


def _run(metric: Metric, value: float, answer: Answer) -> TaskRun:
    return TaskRun(Sample(metric, value), answer.tokens, answer.peak_rss_bytes)


def _prompt(num_tokens: int, sizes: Sizes, name: str) -> list[int]:
    draw = random.Random(name)
    first = min(_FIRST_TOKEN, sizes.end_token // 2)
    return [draw.randrange(first, sizes.end_token) for _ in range(num_tokens)]
