"""The engine over the real model, without Ray and without Redis."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from cluster.config import load_config
from kernels.batch import AttentionBatch
from kvstore.kv_layout import KvDtype, KvLayout
from kvstore.kv_pool import KvPool
from kvstore.prefix_hash import chain, pack_tokens, root_hash
from workers.engine import Engine
from workers.engine_builder import build_engine
from workers.model_store import resolve_model
from workers.options import EngineOptions, ModelOptions
from workers.protocol import (
    EngineEvent,
    GenerateRequest,
    RequestStarted,
    SamplingParams,
    SequenceFinished,
    TokensEmitted,
)
from workers.tokenizer import Tokenizer
from workers.weights import load_model

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
QUESTIONS = {
    "What is the capital of France?": "Paris",
    "What color is the sky on a clear day?": "blue",
    "How many days are there in a week?": "7 days",
}


@pytest.fixture(scope="module")
def model_dir() -> Path:
    return resolve_model(MODEL, cache_dir=load_config().model_cache_dir)


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> Tokenizer:
    return Tokenizer.from_directory(model_dir)


@pytest.fixture(scope="module", params=["auto", "fp8_e4m3"])
def engine(request: pytest.FixtureRequest, model_dir: Path) -> Iterator[Engine]:
    built = build_engine(
        ModelOptions(name=str(model_dir), kv_dtype=request.param, dtype="float32"),
        EngineOptions(num_kv_blocks=256, num_threads=1),
        cache_dir=model_dir,
    )
    yield built.engine
    built.engine.check_invariants()


def run(
    engine: Engine, tokens: list[int], sampling: SamplingParams, n: int = 1
) -> list[EngineEvent]:
    """One request to its end, on this thread."""
    packed = pack_tokens(tokens)
    root = root_hash(engine.info.fingerprint, b"salt")
    events: list[EngineEvent] = []
    request = GenerateRequest(
        request_id="r", tokens=packed, fingerprint=engine.info.fingerprint, salt=b"salt",
        block_hashes=chain(root, packed, engine.info.block_size), sampling=sampling, n=n,
    )  # fmt: skip
    engine.submit(request, events.extend)
    while engine.step():
        pass
    assert sum(isinstance(e, SequenceFinished) for e in events) == n, events
    return events


def text_of(tokenizer: Tokenizer, events: list[EngineEvent], index: int = 0) -> str:
    ids = [
        token
        for event in events
        if isinstance(event, TokensEmitted) and event.index == index
        for token in event.token_ids
    ]
    return tokenizer.decode(ids)


@pytest.mark.parametrize("question", QUESTIONS)
def test_answers_are_sensible_and_the_second_time_cached(
    engine: Engine, tokenizer: Tokenizer, question: str
) -> None:
    prompt = tokenizer.render_chat([{"role": "user", "content": question}])
    sampling = SamplingParams(max_tokens=40, temperature=0.0)
    events = run(engine, prompt, sampling)
    answer = text_of(tokenizer, events)
    print(f"[{engine.info.kv_dtype}] {question} → {answer}")
    assert QUESTIONS[question].lower() in answer.lower()
    again = run(engine, prompt, sampling)
    assert text_of(tokenizer, again) == answer
    started = next(e for e in again if isinstance(e, RequestStarted))
    # Whole blocks, and of the one in which the prompt ends as much as a full block of the first run holds.
    assert (len(prompt) - 1) // 16 * 16 <= started.num_cached_tokens < len(prompt)


def test_a_seed_repeats_its_whole_set_of_samples(engine: Engine, tokenizer: Tokenizer) -> None:
    prompt = tokenizer.render_chat([{"role": "user", "content": "Name an animal."}])
    sampling = SamplingParams(max_tokens=12, temperature=1.0, seed=11)
    # From equal states of the cache: a prompt computed in other pieces is rounded otherwise, and where KV is
    # fp8 that can move a value by a whole step.
    run(engine, prompt, sampling)
    first, second = (run(engine, prompt, sampling, n=3) for _ in range(2))
    texts = [text_of(tokenizer, first, i) for i in range(3)]
    assert texts == [text_of(tokenizer, second, i) for i in range(3)]
    assert len(set(texts)) == 3


def test_fp8_costs_at_most_055_of_bf16_and_little_divergence(
    model_dir: Path, tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prints the divergence; the bound only catches a broken pool."""
    model = load_model(model_dir, dtype=torch.float32, device=torch.device("cpu"))
    spec = model.spec

    def layout(kv_dtype: KvDtype, dtype: torch.dtype) -> KvLayout:
        return KvLayout(spec.num_layers, spec.num_kv_heads, spec.head_dim, 16, kv_dtype, dtype)

    bf16 = layout(KvDtype.AUTO, torch.bfloat16).bytes_per_token
    fp8 = layout(KvDtype.FP8_E4M3, torch.bfloat16).bytes_per_token
    assert fp8 <= 0.55 * bf16

    divergences = []
    for question, answer in QUESTIONS.items():
        chat = [{"role": "user", "content": question}]
        tokens = tokenizer.render_chat(chat) + tokenizer.encode(f"The answer is {answer}.")
        rows = [
            log_probabilities(model, layout(kv_dtype, torch.float32), tokens)
            for kv_dtype in (KvDtype.AUTO, KvDtype.FP8_E4M3)
        ]
        divergences.append((rows[0].exp() * (rows[0] - rows[1])).sum(dim=-1))
    kl = torch.cat(divergences)
    figures = {
        "bytes_per_token_fp8": fp8,
        "bytes_per_token_bf16": bf16,
        "kl_mean": round(float(kl.mean()), 5),
        "kl_p99": round(float(kl.quantile(0.99)), 5),
        "kl_max": round(float(kl.max()), 5),
        "num_tokens": kl.numel(),
    }
    with capsys.disabled():
        print("\nfp8 KV against the compute dtype:", json.dumps(figures))
    assert 0 < float(kl.mean()) < 0.05


@torch.inference_mode()
def log_probabilities(
    model: "torch.nn.Module", layout: KvLayout, tokens: list[int]
) -> torch.Tensor:
    """float32 [num_tokens, vocab_size]: the sequence in one chunk, in a pool that holds nothing else."""
    num_blocks = -(-len(tokens) // layout.block_size)
    batch = AttentionBatch(
        slots=torch.arange(len(tokens)),
        block_tables=torch.arange(num_blocks, dtype=torch.int32)[None],
        query_starts=(0, len(tokens)),
        context_lens=(len(tokens),),
        block_size=layout.block_size,
    )
    pool = KvPool(layout, num_blocks, torch.device("cpu"))
    hidden = model.forward(torch.tensor(tokens), torch.arange(len(tokens)), batch, pool)
    return model.logits(hidden).log_softmax(dim=-1)  # type: ignore[operator, no-any-return]
