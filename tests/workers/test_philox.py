"""The random numbers against numpy's own generator."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from workers.philox import uniforms

word = st.one_of(
    st.sampled_from([0, 1, 2**32 - 1, 2**32, 2**63, 2**64 - 1]), st.integers(0, 2**64 - 1)
)


@given(st.lists(st.tuples(word, word, st.integers(0, 2**63)), min_size=1, max_size=20))
def test_they_are_numpys(triples: list[tuple[int, int, int]]) -> None:
    columns = [np.array(column, dtype=np.uint64) for column in zip(*triples, strict=True)]
    expected = [
        np.random.Generator(
            np.random.Philox(key=np.array([seed, stream], dtype=np.uint64), counter=counter)
        ).random()
        for seed, stream, counter in triples
    ]
    assert uniforms(*columns).tolist() == expected


def test_every_part_of_the_counter_matters() -> None:
    seeds, streams, counters = np.meshgrid(
        np.array([0, 1, 2**64 - 1], np.uint64),
        np.arange(3, dtype=np.uint64),
        np.arange(5, dtype=np.uint64),
    )
    numbers = uniforms(seeds.ravel(), streams.ravel(), counters.ravel())
    assert len(set(numbers.tolist())) == 45
