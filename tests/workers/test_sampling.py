"""The sampler against transformers' logits processors and against frequencies."""

from array import array
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kernels import dispatch
from kvstore.block_table import BlockTable
from workers.protocol import SamplingParams
from workers.sampling import Draw, draw, finish, stage_draws
from workers.sequence import Sequence
from workers.staging import StagingBuffer
from workers.step_plan import SampledToken

VOCAB = 100
NUM_SPACED = 512


def make_sequence(
    prompt: list[int],
    output: list[int] | None = None,
    *,
    seed: int = 0,
    stop: tuple[int, ...] = (),
    **fields: object,
) -> Sequence:
    return Sequence(
        request_id="a", index=0, root=b"", tokens=array("I", [*prompt, *(output or [])]),
        num_prompt_tokens=len(prompt), sampling=SamplingParams(max_tokens=99, **fields),  # type: ignore[arg-type]
        seed=seed, stop_token_ids=frozenset(stop), table=BlockTable(16),
    )  # fmt: skip


def sample(logits: torch.Tensor, draws: list[Draw]) -> list[SampledToken]:
    staging = StagingBuffer(1 << 16, torch.device("cpu"))
    staging.begin()
    inputs = stage_draws(draws, len(logits), staging)
    staging.flush()
    return finish(draw(logits, inputs))


def make_draw(row: int, sequence: Sequence, stream: int = 0) -> Draw:
    return Draw(row, sequence, stream, sequence.num_tokens)


def draw_one(logits: torch.Tensor, sequence: Sequence, index: int = 0) -> int:
    return sample(logits[None], [make_draw(0, sequence, index)])[0].token_id


def shares(logits: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
    """How much of the numbers in [0, 1), evenly spaced, leads to each token."""
    uniform = (torch.arange(NUM_SPACED) + 0.5) / NUM_SPACED

    def column(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full((NUM_SPACED,), value, dtype=dtype)

    tokens = dispatch.sample_tokens(
        logits.expand(NUM_SPACED, -1),
        column(sampling.temperature),
        column(sampling.top_k, torch.int32),
        column(sampling.top_p),
        column(sampling.min_p),
        uniform,
    )
    return torch.bincount(tokens, minlength=len(logits)) / NUM_SPACED


@given(
    st.integers(0, 10_000),
    st.floats(0.1, 2),
    st.integers(0, 120),
    st.floats(0.05, 1),
    st.floats(0, 0.5),
)
def test_filters_agree_with_transformers(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    sampling = SamplingParams(max_tokens=1, temperature=temperature, top_k=top_k, top_p=top_p)
    expected = TemperatureLogitsWarper(temperature)(None, logits[None])
    if top_k:
        expected = TopKLogitsWarper(top_k)(None, expected)
    if top_p < 1:
        expected = TopPLogitsWarper(top_p)(None, expected)
    ours = shares(logits, sampling)
    theirs = expected.softmax(dim=-1)[0]
    # They add up from the small end, we from the large one: a token within rounding of the line may differ.
    large = 2 / NUM_SPACED
    assert ((ours > 0) & (theirs == 0)).sum() + ((ours == 0) & (theirs > large)).sum() <= 1
    torch.testing.assert_close(ours, theirs, atol=0.06, rtol=0)
    with_min_p = shares(logits, replace(sampling, top_k=0, top_p=1.0, min_p=min_p))
    expected = MinPLogitsWarper(min_p)(
        None, TemperatureLogitsWarper(temperature)(None, logits[None])
    )
    torch.testing.assert_close(with_min_p, expected.softmax(-1)[0], atol=large, rtol=0)


def test_repetition_penalty_agrees_with_transformers() -> None:
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(1))
    sequence = make_sequence(
        [1, 2, 3], [4, 4], temperature=0.0, repetition_penalty=1.7, logprobs=VOCAB
    )
    theirs = RepetitionPenaltyLogitsProcessor(1.7)(
        torch.tensor([[1, 2, 3, 4, 4]]), logits[None].clone()
    )
    assert draw_one(logits, sequence) == int(theirs.argmax())


def test_presence_and_frequency_count_the_output_alone() -> None:
    logits = torch.zeros(VOCAB)
    logits[7], logits[8], logits[9] = 3.0, 2.5, 2.0
    assert draw_one(logits, make_sequence([7, 7], [8], temperature=0.0, presence_penalty=1.0)) == 7
    assert draw_one(logits, make_sequence([1], [7], temperature=0.0, presence_penalty=0.75)) == 8
    assert (
        draw_one(logits, make_sequence([1], [7, 7, 8], temperature=0.0, frequency_penalty=0.6)) == 9
    )


def test_bias_and_minimum_length() -> None:
    logits = torch.zeros(VOCAB)
    logits[5] = 1.0
    assert (
        draw_one(logits, make_sequence([1], temperature=0.0, logit_bias=((6, 100.0), (5, -100.0))))
        == 6
    )
    short = make_sequence([1], [2], stop=(5,), temperature=0.0, min_tokens=3)
    assert draw_one(logits, short) != 5
    assert (
        draw_one(logits, make_sequence([1], [2, 2, 2], stop=(5,), temperature=0.0, min_tokens=3))
        == 5
    )


def test_one_seed_repeats_and_siblings_differ() -> None:
    logits = torch.zeros(VOCAB)
    draws = [draw_one(logits, make_sequence([1], seed=s), i) for s in range(4) for i in range(4)]
    again = [draw_one(logits, make_sequence([1], seed=s), i) for s in range(4) for i in range(4)]
    assert draws == again
    assert len(set(draws)) > 10


def test_a_draw_does_not_depend_on_its_batch() -> None:
    logits = torch.randn(8, VOCAB, generator=torch.Generator().manual_seed(2))
    sequences = [make_sequence([1] * (i + 1), seed=i, top_p=0.9) for i in range(8)]
    together = sample(logits, [make_draw(i, s) for i, s in enumerate(sequences)])
    alone = [draw_one(logits[i], s) for i, s in enumerate(sequences)]
    assert [t.token_id for t in together] == alone


def test_draws_follow_the_distribution() -> None:
    probabilities = torch.tensor([0.5, 0.25, 0.125, 0.125])
    logits = probabilities.log()
    counts = torch.zeros(4)
    for seed in range(4000):
        counts[draw_one(logits, make_sequence([1], seed=seed))] += 1
    # Five standard deviations of a binomial share at 4,000 draws are at most 0.04.
    torch.testing.assert_close(counts / 4000, probabilities, atol=0.04, rtol=0)


def test_logprobs_are_the_models_own() -> None:
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(3))
    (token,) = sample(
        logits[None], [make_draw(0, make_sequence([1], temperature=0.3, top_k=5, logprobs=4))]
    )
    assert token.logprobs is not None
    expected = logits.log_softmax(-1)
    assert token.logprobs.logprob == pytest.approx(float(expected[token.token_id]))
    assert [i for i, _ in token.logprobs.top] == expected.topk(4).indices.tolist()


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_broken_row_is_marked_and_its_neighbour_is_not(poison: float) -> None:
    logits = torch.zeros(2, VOCAB)
    logits[0, 3] = poison
    tokens = sample(logits, [make_draw(0, make_sequence([1])), make_draw(1, make_sequence([1]))])
    assert [t.is_valid for t in tokens] == [False, True]
