"""The default model, fetched and converted as a user's first start does it."""

from pathlib import Path

import pytest
import torch
from paged_driver import PagedDriver
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from kvstore.kv_layout import KvDtype
from workers.model_store import DEFAULT_MODEL, resolve_model
from workers.models.decoder import CausalLM
from workers.weights import load_model

pytestmark = pytest.mark.slow
QUESTION = "What is the capital of France?"
TIE = 1e-4


@pytest.fixture(scope="module")
def model_dir(request: pytest.FixtureRequest) -> Path:
    """Kept in pytest's own cache between runs."""
    assert request.config.cache is not None
    return resolve_model(DEFAULT_MODEL, cache_dir=request.config.cache.mkdir("models"))


@pytest.fixture(scope="module")
def model(model_dir: Path) -> CausalLM:
    return load_model(model_dir, dtype=torch.float32, device=torch.device("cpu"))


@pytest.fixture(scope="module")
def judge(model_dir: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()


def chat_tokens(model_dir: Path, question: str) -> list[int]:
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
    )
    token_ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
    return token_ids


def greedy(model: CausalLM, prompt: list[int], num_tokens: int, kv_dtype: KvDtype) -> list[int]:
    driver = PagedDriver(model, kv_dtype=kv_dtype)
    sequence = driver.start(prompt)
    logits = driver.run(sequence, chunk=17)
    for _ in range(num_tokens):
        sequence.token_ids.append(int(logits[-1].argmax()))
        if sequence.token_ids[-1] in model.spec.eos_token_ids:
            break
        (logits,) = driver.step([(sequence, 1)])
    return sequence.token_ids[len(prompt) :]


@pytest.mark.parametrize("kv_dtype", list(KvDtype))
def test_capital_of_france(model_dir: Path, model: CausalLM, kv_dtype: KvDtype) -> None:
    output = greedy(model, chat_tokens(model_dir, QUESTION), 24, kv_dtype)
    assert "Paris" in AutoTokenizer.from_pretrained(model_dir).decode(output)
    assert output[-1] in model.spec.eos_token_ids


def test_greedy_tokens_equal_transformers(
    model_dir: Path, model: CausalLM, judge: PreTrainedModel
) -> None:
    for question in (QUESTION, "Write a haiku about rivers.", "def fibonacci(n):"):
        prompt = chat_tokens(model_dir, question)
        with torch.inference_mode():
            whole = judge.generate(torch.tensor([prompt]), max_new_tokens=32, do_sample=False)
        expected = whole[0, len(prompt) :].tolist()
        output = greedy(model, prompt, 32, KvDtype.AUTO)
        if output != expected:
            assert_tie(judge, prompt, output, expected)


def assert_tie(
    judge: PreTrainedModel, prompt: list[int], output: list[int], expected: list[int]
) -> None:
    """Where the two part, the two best logits are as good as equal."""
    first = next(i for i, (a, b) in enumerate(zip(output, expected, strict=False)) if a != b)
    with torch.inference_mode():
        last: Tensor = judge(torch.tensor([prompt + expected[:first]])).logits[0, -1]
    best, second = last.topk(2).values.tolist()
    assert best - second < TIE
