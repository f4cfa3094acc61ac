"""Waste, as the scheduler makes it and as arithmetic says."""

import numpy as np
import pytest

from bench.kv_memory import waste


def by_arithmetic(lengths: list[int], block_size: int) -> tuple[float, float]:
    """While live and at the end, of sequences whose first half comes in one step and the rest token by token.

    The last token is drawn but never computed.
    """
    steps = [size for n in lengths for size in range(n // 2, n)]
    ends = [n - 1 for n in lengths]

    def empty(filled: list[int]) -> float:
        return 1 - sum(filled) / sum(-(-size // block_size) * block_size for size in filled)

    return empty(steps), empty(ends)


@pytest.mark.parametrize("distribution", waste.DISTRIBUTIONS)
@pytest.mark.parametrize("block_size", [8, 64])
def test_measured_is_computed(distribution: str, block_size: int) -> None:
    found = waste.measure(distribution, 64, block_size, 100)
    lengths = waste.draw_lengths(distribution, 64, 100)
    live, at_end = by_arithmetic(lengths, block_size)
    assert found.live == pytest.approx(live, abs=1e-12)
    assert found.at_end == pytest.approx(at_end, abs=1e-12)
    steps = [size for n in lengths for size in range(n // 2, n)]
    assert found.contiguous[2048] == pytest.approx(1 - sum(steps) / (len(steps) * 2048))


@pytest.mark.parametrize("distribution", waste.DISTRIBUTIONS)
@pytest.mark.parametrize("mean", [64, 500, 2000])
def test_lengths_have_the_mean_and_the_bounds(distribution: str, mean: int) -> None:
    lengths = waste.draw_lengths(distribution, mean, 300)
    assert np.mean(lengths) == pytest.approx(mean, rel=0.005)
    assert min(lengths) >= 4
    assert max(lengths) <= waste.MAX_LENGTH


def test_a_wrong_distribution_is_named() -> None:
    with pytest.raises(ValueError, match="'uniform'"):
        waste.draw_lengths("uniform", 64, 10)


def test_the_table_says_where_the_limit_holds() -> None:
    table = waste.table({64: 128, 200: 128}, (8, 16))
    verdicts = {
        row[:3]: verdict
        for row, verdict in zip(
            zip(
                table.column("distribution"),
                (round(float(mean)) for mean in table.column("mean_length") if mean),
                table.column("block_size"),
                strict=True,
            ),
            table.column("is_within_limit"),
            strict=True,
        )
    }
    for distribution in waste.DISTRIBUTIONS:
        assert verdicts[distribution, 200, 16]
        assert not verdicts[distribution, 64, 16]
    assert "met" in table.notes[-1]
