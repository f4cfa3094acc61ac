"""Greedy tokens through the HTTP API against transformers, in float32."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from live_cluster import MODEL, Cluster
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from cluster.config import load_config
from workers.model_store import resolve_model

pytestmark = pytest.mark.integration

NUM_TOKENS = 64
TIE = 1e-4  # two logits closer than this are a tie that rounding decides
SUBJECTS = [
    "the history of bread", "how a bicycle stays upright", "rain in the desert", "the number seven",
    "a letter to a lost friend", "why the sky is blue", "sorting numbers in Python", "a small village",
]  # fmt: skip
OPENINGS = ["Write about {}.", "Once upon a time, {}", "Here are three facts about {}:\n1.", "{} -"]
PROMPTS = [opening.format(subject) for opening in OPENINGS for subject in SUBJECTS]


@pytest.fixture(scope="module")
def reference() -> tuple[torch.nn.Module, PreTrainedTokenizerBase]:
    directory = resolve_model(MODEL, cache_dir=load_config().model_cache_dir)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(directory)


def complete(cluster: Cluster, token_ids: list[int]) -> list[int]:
    """Our greedy continuation, as token ids."""
    completion = cluster.openai(timeout=300).completions.create(
        model=MODEL, prompt=token_ids, max_tokens=NUM_TOKENS, temperature=0, logprobs=0,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )  # fmt: skip
    assert completion.usage is not None
    assert completion.usage.completion_tokens == NUM_TOKENS
    return list(completion.choices[0].token_ids)  # type: ignore[attr-defined]


@torch.inference_mode()
def count_ties(model: torch.nn.Module, prompt: list[int], output: list[int]) -> int:
    """Check every token of `output` against the reference's own greedy choice after the same tokens.

    By induction that is what `generate` would have drawn; after a tie both go on from our token.
    """
    tokens = torch.tensor([prompt + output])
    logits = model(tokens).logits[0, len(prompt) - 1 : -1]
    num_ties = 0
    for position, (row, token) in enumerate(zip(logits, output, strict=True)):
        best = int(row.argmax())
        if best == token:
            continue
        gap = float(row[best] - row[token])
        assert gap < TIE, f"token {position}: ours {token}, theirs {best}, {gap} apart"
        num_ties += 1
    return num_ties


def test_greedy_tokens_are_transformers(
    cluster: Cluster, reference: tuple[torch.nn.Module, PreTrainedTokenizerBase]
) -> None:
    model, tokenizer = reference
    prompts = [tokenizer.encode(prompt) for prompt in PROMPTS]
    assert len({tuple(p) for p in prompts}) == 32
    with ThreadPoolExecutor(16) as pool:
        outputs = list(pool.map(lambda prompt: complete(cluster, prompt), prompts))
    num_ties = sum(count_ties(model, p, o) for p, o in zip(prompts, outputs, strict=True))
    print(f"{len(prompts)} prompts × {NUM_TOKENS} tokens: {num_ties} differences, all of them ties")
    # The same claim without the induction, for two of them.
    for prompt, output in list(zip(prompts, outputs, strict=True))[::31]:
        generated = model.generate(  # type: ignore[operator]
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), do_sample=False,
            max_new_tokens=NUM_TOKENS, min_new_tokens=NUM_TOKENS, pad_token_id=0,
        )  # fmt: skip
        assert generated[0, len(prompt) :].tolist() == output or num_ties
