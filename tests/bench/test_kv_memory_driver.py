"""The bench's own model is honest: what the engine makes of it is what plain lists of tokens make of it."""

from array import array

import numpy as np
import pytest

from bench.kv_memory.driver import (
    EngineDriver,
    NullRunner,
    offers_after,
    random_tokens,
    token_after,
)
from workers.beam_search import BeamSearch
from workers.options import SchedulerOptions
from workers.protocol import BeamParams

BLOCK = 8


def expected_sample(prompt: "array[int]", num_tokens: int, index: int) -> list[int]:
    tokens = prompt[:]
    for _ in range(num_tokens):
        tokens.append(token_after(tokens.tobytes(), index))
    return list(tokens[len(prompt) :])


def expected_beams(prompt: "array[int]", num_tokens: int, width: int) -> list[list[int]]:
    """The search over whole contexts, without blocks."""
    search = BeamSearch(BeamParams(width), frozenset(), num_tokens)
    outputs: list[list[int]] = [[]]
    while not search.is_done:
        contexts = [(prompt + array("I", output)).tobytes() for output in outputs]
        offers = [offers_after(context, search.num_candidates) for context in contexts]
        survivors = search.advance(outputs, offers)
        outputs = [[*outputs[s.parent], s.token_id] for s in survivors]
    return [list(beam.tokens) for beam in search.results(width)]


@pytest.mark.parametrize("num_blocks", [200, 24])
def test_samples_are_those_of_plain_lists(num_blocks: int) -> None:
    """Also where memory is short and sequences are preempted."""
    random = np.random.default_rng(0)
    driver = EngineDriver(num_blocks, BLOCK, SchedulerOptions(max_num_batched_tokens=40))
    head = random_tokens(random, 29)
    prompts = [head + random_tokens(random, size) for size in (3, 14, 30)]
    answers = [driver.submit(prompt, 25, n=2) for prompt in prompts]
    driver.run()
    assert (driver.stats.preemptions_total > 0) == (num_blocks == 24)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.outputs == [expected_sample(prompt, 25, index) for index in range(2)]
    assert answers[0].num_cached_tokens == 0
    assert answers[2].num_cached_tokens == 29


@pytest.mark.parametrize("width", [2, 5])
def test_beams_are_those_of_plain_lists(width: int) -> None:
    prompt = random_tokens(np.random.default_rng(1), 21)
    driver = EngineDriver(100, BLOCK, SchedulerOptions())
    answer = driver.submit(prompt, 20, n=width, beam=BeamParams(width))
    driver.run()
    assert answer.outputs == expected_beams(prompt, 20, width)
    assert answer.scores == sorted(answer.scores, key=lambda score: -(score or 0.0))


def test_offers_are_probabilities_best_first() -> None:
    offers = offers_after(b"context", 12)
    logprobs = [offer.logprob for offer in offers]
    assert logprobs == sorted(logprobs, reverse=True)
    assert sum(np.exp(logprobs)) == pytest.approx(1.0)
    assert len({offer.token_id for offer in offers}) == 12


def test_a_refused_request_is_an_error() -> None:
    driver = EngineDriver(4, BLOCK, SchedulerOptions(), runner=NullRunner())
    driver.submit(random_tokens(np.random.default_rng(2), 30), 30)
    with pytest.raises(RuntimeError, match="KV pool of 32"):
        driver.run()
