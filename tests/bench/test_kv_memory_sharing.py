"""Blocks that samples and beams share, exactly."""

import pytest

from bench.kv_memory import sharing


@pytest.mark.parametrize("n", [2, 4, 8])
@pytest.mark.parametrize("num_prompt_tokens", [80, 84])
def test_samples_take_the_prompt_once_and_a_tail_each(n: int, num_prompt_tokens: int) -> None:
    use = sharing.measure_samples(n, num_prompt_tokens, 40, block_size=16)
    # 80 or 84 prompt tokens fill five blocks; with 39 more that are computed, a sequence has eight.
    assert use.num_blocks == use.num_expected_blocks == 5 + 3 * n
    assert use.num_unshared_blocks == 8 * n
    assert use.num_copies == (n - 1 if num_prompt_tokens % 16 else 0)


@pytest.mark.parametrize("width", [2, 4])
def test_beams_stay_between_one_sequence_and_private_tails(width: int) -> None:
    use = sharing.measure_beams(width, 3, num_prompt_tokens=84, num_output_tokens=40)
    assert use.num_steps == 39
    assert use.peak_unshared_blocks == 8 * width
    assert 8 < use.peak_blocks <= 5 + 3 * width
    # Beam lengths 85 … 123, at each so many blocks a beam.
    lengths = range(85, 124)
    assert use.mean_unshared_blocks == pytest.approx(
        width * sum(-(-length // 16) for length in lengths) / len(lengths)
    )
    assert use.mean_blocks < use.mean_unshared_blocks
    assert 0 < use.copies_per_step <= width
