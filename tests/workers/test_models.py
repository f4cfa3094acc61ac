"""Logits of our decoder against transformers', however the sequence is cut up and wherever its KV lies."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_driver import PagedDriver
from tiny_models import MODEL_NAMES, judged_logits, ours, random_tokens
from torch import Tensor

TOLERANCE = 1e-4
LENGTHS = (1, 15, 16, 17, 100)
ONE_OF_EACH_KIND = ("llama_gqa", "mistral_window", "qwen2_window", "qwen3")


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", MODEL_NAMES)
@pytest.mark.parametrize("length", LENGTHS)
def test_whole_prompt(name: str, length: int) -> None:
    tokens = random_tokens(length, length)
    driver = PagedDriver(ours(name))
    logits = driver.run(driver.start(tokens), chunk=length)
    assert_close(logits, judged_logits(name, tuple(tokens)))


@pytest.mark.parametrize("name", MODEL_NAMES)
@pytest.mark.parametrize("chunk", [1, 15, 16, 17])
def test_chunked_prompt(name: str, chunk: int) -> None:
    tokens = random_tokens(100, 1)
    driver = PagedDriver(ours(name))
    logits = driver.run(driver.start(tokens), chunk)
    assert_close(logits, judged_logits(name, tuple(tokens)))


@pytest.mark.parametrize("name", ONE_OF_EACH_KIND)
@pytest.mark.parametrize("block_size", [8, 16, 32])
def test_prefix_hit(name: str, block_size: int) -> None:
    shared = random_tokens(64, 2)
    first, second = shared + random_tokens(11, 3), shared + random_tokens(25, 4)
    driver = PagedDriver(ours(name), block_size=block_size)
    owner = driver.start(first)
    driver.run(owner, chunk=40)
    heir = driver.start(second, shared=tuple(owner.block_table[: 64 // block_size]))
    logits = driver.run(heir, chunk=12)
    assert_close(logits, judged_logits(name, tuple(second))[64:])


@pytest.mark.parametrize("name", ONE_OF_EACH_KIND)
@pytest.mark.parametrize("block_size", [8, 16, 32])
def test_ragged_batch_of_chunks_and_decodes(name: str, block_size: int) -> None:
    driver = PagedDriver(ours(name), block_size=block_size)
    lengths = (1, 40, 90, 17, 33, 120)
    sequences = [driver.start(random_tokens(length, length)) for length in lengths]
    done: list[list[Tensor]] = [[] for _ in sequences]
    chunks = (1, 3, 16, 1, 2, 50)
    while pending := [i for i, s in enumerate(sequences) if s.num_computed < len(s.token_ids)]:
        work = [
            (s, min(chunks[i], len(s.token_ids) - s.num_computed))
            for i, s in enumerate(sequences)
            if i in pending
        ]
        for i, logits in zip(pending, driver.step(work), strict=True):
            done[i].append(logits)
    for sequence, rows in zip(sequences, done, strict=True):
        assert_close(torch.cat(rows), judged_logits(name, tuple(sequence.token_ids)))


@settings(max_examples=25, deadline=None)
@given(
    name=st.sampled_from(ONE_OF_EACH_KIND),
    block_size=st.sampled_from([8, 16, 32]),
    lengths=st.lists(st.sampled_from([1, 9, 17, 100]), min_size=1, max_size=5),
    data=st.data(),
)
def test_any_schedule_gives_the_same_logits(
    name: str, block_size: int, lengths: list[int], data: st.DataObject
) -> None:
    driver = PagedDriver(ours(name), block_size=block_size)
    sequences = [driver.start(random_tokens(length, i)) for i, length in enumerate(lengths)]
    done: dict[int, list[Tensor]] = {i: [] for i in range(len(sequences))}
    while pending := [i for i, s in enumerate(sequences) if s.num_computed < len(s.token_ids)]:
        chosen = data.draw(st.lists(st.sampled_from(pending), min_size=1, unique=True))
        work = []
        for i in chosen:
            left = len(sequences[i].token_ids) - sequences[i].num_computed
            work.append((sequences[i], data.draw(st.integers(min(left, 8), left))))
        for i, logits in zip(chosen, driver.step(work), strict=True):
            done[i].append(logits)
    for i, sequence in enumerate(sequences):
        assert_close(torch.cat(done[i]), judged_logits(name, tuple(sequence.token_ids)))


@pytest.mark.parametrize("name", ONE_OF_EACH_KIND)
def test_long_chunk_runs_in_tiles(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernels.cpu._TILE_ROWS", 7)
    tokens = random_tokens(100, 5)
    driver = PagedDriver(ours(name))
    logits = driver.run(driver.start(tokens), chunk=60)
    assert_close(logits, judged_logits(name, tuple(tokens)))


def test_models_differ_where_their_architectures_do() -> None:
    """The window, the scalings and the biases reach the logits, so the comparisons above mean something."""
    tokens = tuple(random_tokens(100, 6))
    plain = judged_logits("llama_gqa", tokens)
    for name in ("llama_rope3", "llama_linear", "llama_yarn", "mistral_window"):
        assert (judged_logits(name, tokens) - plain).abs().max() > 0.05, name
