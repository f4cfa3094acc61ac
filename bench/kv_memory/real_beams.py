"""Beam search on the real model over the real pool: is it transformers' own, and what do its beams share?"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.kv_memory.driver import Answer, EngineDriver
from bench.kv_memory.partial_copy import layout_of
from bench.kv_memory.report import Table
from bench.kv_memory.sharing import BLOCK_SIZE, BeamUse, BlockMeter, beam_table, summed_up
from kvstore.kv_layout import KvDtype
from kvstore.kv_pool import KvPool
from workers.model_runner import ModelRunner
from workers.models.decoder import CausalLM
from workers.options import SchedulerOptions
from workers.protocol import BeamParams
from workers.tokenizer import Tokenizer
from workers.weights import load_model

WIDTHS = (2, 4, 8)
NUM_OUTPUT_TOKENS = 32
TOLERANCE = 1e-3
_NUM_BLOCKS = 512
PROMPTS = (
    "The three primary colours are",
    "A good way to learn a new language is to",
    "Once upon a time there was a lighthouse keeper who",
    "def fibonacci(n):\n    ",
    "The main difference between a virus and a bacterium is that",
    "Dear Sir or Madam, I am writing to complain about",
    "In the year 1969, the first",
    "To make bread you need flour, water,",
    "Question: Why is the sky blue?\nAnswer:",
    "The quick brown fox jumps over the lazy dog. The dog",
)


@dataclass(frozen=True, slots=True)
class Comparison:
    """One width over all prompts.

    Attributes:
        num_equal: prompts whose beams are all the same, in the same order.
        num_prompts: of so many.
        worst_score: the greatest difference between two scores of one rank.
    """

    use: BeamUse
    num_equal: int
    num_prompts: int
    worst_score: float


def compare(
    ours: CausalLM, theirs: Any, prompts: list[list[int]], width: int, num_output_tokens: int
) -> Comparison:
    """All `width` beams of every prompt, from both."""
    meters: list[BlockMeter] = []
    num_equal, worst = 0, 0.0
    for prompt in prompts:
        meters.append(BlockMeter())
        answer = _search(ours, prompt, width, num_output_tokens, meters[-1])
        expected, scores = _search_transformers(theirs, prompt, width, num_output_tokens)
        num_equal += answer.outputs == [_until_stop(e, ours.spec.eos_token_ids) for e in expected]
        differences = [abs(a - b) for a, b in zip(_scores(answer), scores, strict=True)]
        worst = max(worst, *differences)
    return Comparison(summed_up(width, meters), num_equal, len(prompts), worst)


def _search(
    model: CausalLM, prompt: list[int], width: int, num_output_tokens: int, meter: BlockMeter
) -> Answer:
    pool = KvPool(layout_of(model, KvDtype.AUTO, BLOCK_SIZE), _NUM_BLOCKS, torch.device("cpu"))
    limits = SchedulerOptions()
    driver = EngineDriver(
        _NUM_BLOCKS,
        BLOCK_SIZE,
        limits,
        runner=ModelRunner(model, pool, pool.device, limits),
        watch=meter,
        eos_token_ids=frozenset(model.spec.eos_token_ids),
    )
    answer = driver.submit(
        prompt, num_output_tokens, n=width, beam=BeamParams(width), ignore_eos=False
    )
    driver.run()
    return answer


@torch.inference_mode()
def _search_transformers(
    model: Any, prompt: list[int], width: int, num_output_tokens: int
) -> tuple[list[list[int]], list[float]]:
    found = model.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        num_beams=width, num_return_sequences=width, max_new_tokens=num_output_tokens,
        do_sample=False, repetition_penalty=1.0, return_dict_in_generate=True, output_scores=True,
    )  # fmt: skip
    return [row[len(prompt) :].tolist() for row in found.sequences], found.sequences_scores.tolist()


def _until_stop(tokens: list[int], stops: Any) -> list[int]:
    """Without the stop token and the padding after it."""
    end = next((i for i, token in enumerate(tokens) if token in stops), len(tokens))
    return tokens[:end]


def _scores(answer: Answer) -> list[float]:
    return [score for score in answer.scores if score is not None]


def table(model_dir: Path) -> Table:
    """Ten prompts at every width."""
    from transformers import AutoModelForCausalLM

    ours = load_model(model_dir, dtype=torch.float32, device=torch.device("cpu"))
    theirs = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    tokenizer = Tokenizer.from_directory(model_dir)
    prompts = [tokenizer.encode(prompt) for prompt in PROMPTS]
    found = [compare(ours, theirs, prompts, width, NUM_OUTPUT_TOKENS) for width in WIDTHS]
    base = beam_table(
        "real_beams",
        f"{model_dir.name}, {len(PROMPTS)} prompts, {NUM_OUTPUT_TOKENS}",
        [each.use for each in found],
    )
    verdicts = tuple(
        f"width {each.use.width}: {each.num_equal} of {each.num_prompts} prompts have exactly transformers' beams, in "
        f"order; scores differ by at most {each.worst_score:.1e} "
        f"({'within' if each.worst_score <= TOLERANCE else 'beyond'} {TOLERANCE:g})."
        for each in found
    )
    return Table(base.name, base.title, base.columns, base.rows, base.notes + verdicts, base.chart)
