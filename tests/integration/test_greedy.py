"""Greedy tokens through the HTTP API against transformers, in float32."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
import torch
from live_cluster import MODEL, Cluster
from transformers import AutoModelForCausalLM

from cluster.config import load_config
from router.http_api.usage import token_text
from workers.model_store import resolve_model
from workers.tokenizer import Tokenizer

pytestmark = pytest.mark.integration

NUM_TOKENS = 64
TIE = 1e-4  # two logits closer than this are a tie that rounding decides
SUBJECTS = [
    "the history of bread", "how a bicycle stays upright", "rain in the desert", "the number seven",
    "a letter to a lost friend", "why the sky is blue", "sorting numbers in Python", "a small village",
]  # fmt: skip
OPENINGS = ["Write about {}.", "Once upon a time, {}", "Here are three facts about {}:\n1.", "{} -"]
PROMPTS = [opening.format(subject) for opening in OPENINGS for subject in SUBJECTS]


@dataclass(frozen=True)
class Reference:
    """The same checkpoint in transformers, and what each token is called in an answer."""

    model: torch.nn.Module
    tokenizer: Tokenizer
    text_to_id: dict[str, int]


@pytest.fixture(scope="module")
def reference() -> Reference:
    directory = resolve_model(MODEL, cache_dir=load_config().model_cache_dir)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    tokenizer = Tokenizer.from_directory(directory)
    texts = {token_text(tokenizer.token_bytes(i)): i for i in range(tokenizer.vocab_size)}
    return Reference(model, tokenizer, texts)


def complete(cluster: Cluster, reference: Reference, token_ids: list[int]) -> list[int]:
    """Our greedy continuation, as token ids."""
    completion = cluster.openai(timeout=300).completions.create(
        model=MODEL, prompt=token_ids, max_tokens=NUM_TOKENS, temperature=0, logprobs=0,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    assert completion.usage is not None
    assert completion.usage.completion_tokens == NUM_TOKENS
    logprobs = completion.choices[0].logprobs
    assert logprobs is not None and logprobs.tokens is not None
    assert len(logprobs.tokens) == NUM_TOKENS
    return [reference.text_to_id[text] for text in logprobs.tokens]


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
    cluster: Cluster, reference: Reference, capsys: pytest.CaptureFixture[str]
) -> None:
    model = reference.model
    prompts = [reference.tokenizer.encode(prompt) for prompt in PROMPTS]
    assert len({tuple(p) for p in prompts}) == 32
    with ThreadPoolExecutor(16) as pool:
        outputs = list(pool.map(lambda prompt: complete(cluster, reference, prompt), prompts))
    num_ties = sum(count_ties(model, p, o) for p, o in zip(prompts, outputs, strict=True))
    with capsys.disabled():
        print(
            f"\n{len(prompts)} prompts × {NUM_TOKENS} greedy tokens: {num_ties} differ, each a tie"
        )
    # The same claim without the induction, for two of them.
    for prompt, output in list(zip(prompts, outputs, strict=True))[::31]:
        generated = model.generate(  # type: ignore[operator]
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), do_sample=False,
            max_new_tokens=NUM_TOKENS, min_new_tokens=NUM_TOKENS, pad_token_id=0,
        )  # fmt: skip
        assert generated[0, len(prompt) :].tolist() == output or num_ties
