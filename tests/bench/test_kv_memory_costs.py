"""The parts that take time: they measure what they say, on sizes that take none."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bench.kv_memory import overhead
from bench.kv_memory.partial_copy import CopyCost, as_table, measure
from bench.kv_memory.real_beams import compare
from kvstore.kv_layout import KvDtype
from workers.models.decoder import CausalLM
from workers.weights import load_model


@pytest.fixture(scope="module")
def theirs() -> Any:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, initializer_range=0.3,
        bos_token_id=1, eos_token_id=2, pad_token_id=2,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def ours(theirs: Any, tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    directory: Path = tmp_path_factory.mktemp("model")
    theirs.save_pretrained(directory)
    return load_model(directory, dtype=torch.float32, device=torch.device("cpu"))


def test_a_full_pool_evicts_in_every_step_and_a_free_one_never() -> None:
    for is_full in (False, True):
        cost = overhead.measure(300, 40, is_full=is_full, num_sequences=8, num_steps=32)
        assert cost.num_evicted == (8 * 32 // overhead.BLOCK_SIZE if is_full else 0)
        assert 0 < cost.plan_s < cost.median_s
        assert cost.tell_s > 0


def test_the_break_even_is_the_ratio() -> None:
    cost = CopyCost(KvDtype.AUTO, 16, block_bytes=1000, copy_s=0.003, token_s=0.002)
    table = as_table([cost])
    assert table.column("break_even_tokens") == [1.5]
    assert table.column("compute_15_s") == [pytest.approx(0.030)]


def test_copies_and_chunks_are_timed_on_the_models_own_pool(ours: CausalLM) -> None:
    cost = measure(ours, KvDtype.AUTO, 16, chunk_tokens=64, num_chunks=2)
    assert cost.block_bytes == 16 * 2 * 2 * 2 * 8 * 4  # tokens, K and V, layers, heads, floats
    assert cost.copy_s > 0


@pytest.mark.parametrize("width", [2, 4])
def test_beams_are_compared_with_transformers(ours: CausalLM, theirs: Any, width: int) -> None:
    prompts = [[5, 6, 7, 8, 9], list(range(10, 31))]
    found = compare(ours, theirs, prompts, width, 12)
    assert (found.num_equal, found.num_prompts) == (2, 2)
    assert found.worst_score < 1e-3
    assert found.use.mean_blocks < found.use.mean_unshared_blocks
