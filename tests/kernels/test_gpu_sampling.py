"""Both ways to draw a token, against a plain reading of what `dispatch.sample_tokens` promises."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels import dispatch, reference
from kernels.gpu import sampling

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BACKENDS = [pytest.param(reference, id="twin"), pytest.param(sampling, id="kernel")]
# Sums of float32 weights: a token this near to a line may fall on either side.
EPS = 2e-5


@dataclass(frozen=True)
class Filters:
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


def sample(
    backend: object, logits: Tensor, filters: list[Filters], uniform: list[float]
) -> list[int]:
    def column(values: list[float], dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=DEVICE)

    tokens = backend.sample_tokens(
        logits.to(DEVICE),
        column([f.temperature for f in filters]),
        column([f.top_k for f in filters], torch.int32),
        column([f.top_p for f in filters]),
        column([f.min_p for f in filters]),
        column(uniform),
    )
    assert tokens.dtype == torch.int64
    return tokens.tolist()


def kept_weights(logits: np.ndarray, filters: Filters, eps: float) -> np.ndarray:
    """float64 weights; a positive `eps` keeps what is within rounding of a line, a negative one does not."""
    weights = np.exp((logits.astype(np.float64) - logits.max()) / np.float32(filters.temperature))
    if 0 < filters.top_k < len(logits):
        weights[logits < np.sort(logits)[-filters.top_k]] = 0
    if filters.top_p < 1:
        heavier = np.array([weights[logits > logit].sum() for logit in logits])
        stays = heavier < (np.float32(filters.top_p) + eps) * weights.sum()
        weights[~(stays | (logits == logits.max()))] = 0
    weights[weights < np.float32(filters.min_p) * (1 - eps)] = 0
    return weights


def may_draw(logits: np.ndarray, filters: Filters, uniform: float, token: int) -> bool:
    """Whether `token` is what the promise asks for, under some rounding of its lines."""
    if filters.temperature <= 0:
        return token == int(logits.argmax())
    for eps in (EPS, -EPS, 0.0):
        weights = kept_weights(logits, filters, eps)
        end = weights.cumsum()
        slack = EPS * end[-1]
        target = uniform * end[-1]
        if (
            weights[token] > 0
            and end[token] - weights[token] - slack <= target <= end[token] + slack
        ):
            return True
    return False


filters_strategy = st.builds(
    Filters,
    temperature=st.sampled_from([0.0, -1.0, 0.05, 0.7, 1.0, 2.0]),
    top_k=st.sampled_from([0, 0, 1, 2, 3, 10, 50, 10_000]),
    top_p=st.sampled_from([1.0, 1.0, 0.0, 1e-6, 0.3, 0.5, 0.9, 0.95, 0.999]),
    min_p=st.sampled_from([0.0, 0.0, 0.01, 0.1, 0.5, 1.0]),
)


@st.composite
def batches(draw: st.DrawFn) -> tuple[Tensor, list[Filters], list[float]]:
    """Ragged vocabularies, many equal logits, forbidden tokens."""
    num_rows = draw(st.integers(1, 4))
    vocab_size = draw(st.sampled_from([1, 2, 7, 64, 255, 256, 257, 1000]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))
    spread = draw(st.sampled_from([0.1, 1.0, 4.0, 30.0]))
    logits = torch.randn(num_rows, vocab_size, generator=generator) * spread
    if draw(st.booleans()):
        logits = (logits * 4).round() / 4
    if draw(st.booleans()):
        is_forbidden = torch.rand(num_rows, vocab_size, generator=generator) < 0.5
        is_forbidden[:, vocab_size // 2] = False
        logits = logits.masked_fill(is_forbidden, float("-inf"))
    filters = draw(st.lists(filters_strategy, min_size=num_rows, max_size=num_rows))
    numbers = st.floats(0, 1 - 2.0**-24, width=32)
    return logits, filters, draw(st.lists(numbers, min_size=num_rows, max_size=num_rows))


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=60)
@given(batches())
def test_what_is_drawn_is_what_is_promised(
    backend: object, batch: tuple[Tensor, list[Filters], list[float]]
) -> None:
    logits, filters, uniform = batch
    before = logits.clone()
    tokens = sample(backend, logits, filters, uniform)
    assert torch.equal(logits, before)
    for row, each, number, token in zip(logits.numpy(), filters, uniform, tokens, strict=True):
        assert may_draw(row, each, number, token), (each, number, token)


@pytest.mark.parametrize("backend", BACKENDS)
def test_evenly_spaced_numbers_draw_each_token_by_its_share(backend: object) -> None:
    logits = torch.tensor([0.0, 2.0, 1.0, 2.0, -1.0])
    num_draws = 24
    uniform = [(i + 0.5) / num_draws for i in range(num_draws)]
    for each in (Filters(), Filters(top_k=3), Filters(top_p=0.7), Filters(min_p=0.3)):
        weights = kept_weights(logits.numpy(), each, 0.0)
        tokens = sample(backend, logits.expand(num_draws, -1), [each] * num_draws, uniform)
        shares = np.bincount(tokens, minlength=5) / num_draws
        np.testing.assert_allclose(shares, weights / weights.sum(), atol=1.01 / num_draws)
        assert tokens == sorted(tokens)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("vocab_size", [49152, 151936])
def test_vocabularies_of_real_models(backend: object, vocab_size: int) -> None:
    logits = torch.randn(6, vocab_size, generator=torch.Generator().manual_seed(5)) * 3
    filters = [
        Filters(),
        Filters(top_k=50),
        Filters(top_p=0.95),
        Filters(top_k=1000, top_p=0.9, min_p=1e-4, temperature=1.5),
        Filters(top_p=0.999, temperature=2.0),
        Filters(temperature=0.0),
    ]
    uniform = [0.999999, 0.5, 0.25, 0.75, 0.1, 0.0]
    tokens = sample(backend, logits, filters, uniform)
    for row, each, number, token in zip(logits.numpy(), filters, uniform, tokens, strict=True):
        if each.top_p == 1:
            assert may_draw(row, each, number, token)
        else:
            assert may_draw_sorted(row, each, number, token)


def may_draw_sorted(logits: np.ndarray, filters: Filters, uniform: float, token: int) -> bool:
    """`may_draw` for rows too long to compare all pairs of, and without equal logits."""
    order = np.argsort(-logits, kind="stable")
    kept = np.zeros(len(logits), bool)
    weights = kept_weights(logits, Filters(filters.temperature, filters.top_k), 0.0)
    before = weights[order].cumsum() - weights[order]
    kept[order] = before < np.float32(filters.top_p) * weights.sum()
    weights[~kept | (weights < np.float32(filters.min_p))] = 0
    end = weights.cumsum()
    # Tokens near the line weigh little: they move the ends by no more than this.
    slack = 5 * EPS * end[-1]
    target = uniform * end[-1]
    return end[token] - weights[token] - slack <= target <= end[token] + slack


@pytest.mark.parametrize("backend", BACKENDS)
def test_broken_rows_give_token_0_and_leave_the_others_alone(backend: object) -> None:
    nan, inf = float("nan"), float("inf")
    good = [0.0, 1.0, 5.0, 1.0]
    logits = torch.tensor(
        [[1, nan, 5, 2], good, [nan] * 4, [1, 2, inf, 3], [-inf] * 4, good, [0, inf, nan, 1]]
    )
    for each in (
        Filters(top_k=2, top_p=0.9),
        Filters(temperature=0.0),
        Filters(top_p=0.5, min_p=0.1),
    ):
        tokens = sample(backend, logits, [each] * 7, [0.5] * 7)
        assert tokens == [0, 2, 0, 0, 0, 2, 0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_equal_logits_share_their_fate_and_greedy_takes_the_lowest(backend: object) -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 3.0, 0.0, -0.0]])
    assert sample(backend, logits, [Filters(temperature=0.0)], [0.9]) == [1]
    for each in (Filters(top_k=1), Filters(top_k=2), Filters(top_p=0.01), Filters(top_p=0.0)):
        drawn = {sample(backend, logits, [each], [u])[0] for u in (0.0, 0.2, 0.4, 0.6, 0.9)}
        assert drawn == {1, 2, 3}
    # Zeros of both signs are equal.
    zeros = torch.tensor([[0.0, -0.0, -5.0]])
    drawn = {sample(backend, zeros, [Filters(top_k=1)], [u])[0] for u in (0.1, 0.9)}
    assert drawn == {0, 1}


@pytest.mark.parametrize("backend", BACKENDS)
def test_weights_that_vanish_are_never_drawn(backend: object) -> None:
    logits = torch.full((1, 1000), -200.0)
    logits[0, 500] = 0.0
    for uniform in (0.0, 0.5, 1 - 2.0**-24):
        assert sample(backend, logits, [Filters()], [uniform]) == [500]
        assert sample(backend, logits, [Filters(temperature=1e-38)], [uniform]) == [500]


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_number_0_draws_the_first_token_that_may_be_drawn(backend: object) -> None:
    logits = torch.zeros(1, 20_000)
    logits[0, :17_000] = float("-inf")  # whole tiles of nothing come first
    assert sample(backend, logits, [Filters()], [0.0]) == [17_000]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_rows_token_depends_on_the_row_alone(backend: object) -> None:
    generator = torch.Generator().manual_seed(9)
    logits = torch.randn(8, 3000, generator=generator)
    filters = [Filters(top_p=0.9, top_k=k, temperature=t) for k, t in [(0, 1.0), (40, 0.7)] * 4]
    uniform = torch.rand(8, generator=generator).tolist()
    together = sample(backend, logits, filters, uniform)
    for i in range(8):
        assert sample(backend, logits[i : i + 1], filters[i : i + 1], uniform[i : i + 1]) == [
            together[i]
        ]


def test_dispatch_takes_the_twin_on_a_cpu() -> None:
    logits = torch.tensor([[0.0, 9.0]])
    one, none = torch.ones(1), torch.zeros(1)
    tokens = dispatch.sample_tokens(logits, one, none.int(), one, none, none + 0.5)
    assert tokens.tolist() == [1]
