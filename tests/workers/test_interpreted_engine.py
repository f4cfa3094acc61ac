"""The whole CUDA path, kernels, captured decode steps and steps planned ahead, run by Triton's interpreter."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from slot_model import make_info, make_request, outputs_of
from tensor_slot_model import Rerun
from tiny_models import VOCAB_SIZE, ours

from kernels import cpu, dispatch
from kernels.gpu.backend import CudaBackend
from kvstore.kv_layout import KvDtype, KvLayout
from kvstore.kv_pool import KvPool
from workers.engine import Engine
from workers.layers.linear import InvariantLinear
from workers.model_runner import ModelRunner
from workers.models.decoder import CausalLM
from workers.options import SchedulerOptions
from workers.protocol import EngineEvent, TokensEmitted

BLOCK = 8
CPU = torch.device("cpu")
PROMPTS = [[5, 9, 11], [7] * 19, list(range(3, 25))]


@pytest.fixture
def _interpreted() -> Iterator[None]:
    with np.errstate(all="ignore"):
        dispatch.install("cpu", CudaBackend())
        yield
    dispatch.install("cpu", cpu)


def make_interpreted_engine(
    model: CausalLM, kv_dtype: KvDtype, limits: SchedulerOptions, *, is_like_cuda: bool
) -> Engine:
    """Over a pool full of NaN."""
    spec = model.spec
    layout = KvLayout(
        num_layers=spec.num_layers, num_kv_heads=spec.num_kv_heads, head_dim=spec.head_dim,
        block_size=BLOCK, kv_dtype=kv_dtype, compute_dtype=torch.float32,
    )  # fmt: skip
    pool = KvPool(layout, 40, CPU)
    for layer in pool.layers:
        for tensor in layer.tensors():
            tensor.view(torch.uint8).fill_(0xFF)  # NaN in every format
    capture = Rerun if is_like_cuda else None
    runner = ModelRunner(model, pool, CPU, limits, capture=capture)
    info = make_info(40, BLOCK, limits.max_model_len)
    return Engine(runner, info, limits, frozenset(), plans_ahead=is_like_cuda)


def serve(model_name: str, kv_dtype: KvDtype, *, is_like_cuda: bool) -> list[list[list[int]]]:
    """What two rounds of the prompts are answered; the second finds the first one's blocks."""
    limits = SchedulerOptions(max_num_seqs=3, max_num_batched_tokens=16, max_model_len=80)
    engine = make_interpreted_engine(ours(model_name), kv_dtype, limits, is_like_cuda=is_like_cuda)
    told: list[list[EngineEvent]] = []
    for round_number in range(2):
        for i, prompt in enumerate(PROMPTS):
            told.append([])
            request = make_request(
                f"r{round_number}{i}", prompt, 4, n=2 if i == 1 else 1, temperature=0.0
            )
            engine.submit(request, told[-1].extend)
        while engine.step():
            engine.check_invariants()
    return [outputs_of(events, 2 if i % len(PROMPTS) == 1 else 1) for i, events in enumerate(told)]


@pytest.mark.parametrize(
    ("model_name", "kv_dtype"),
    [
        ("llama_gqa", KvDtype.AUTO),
        ("mistral_window", KvDtype.FP8_E4M3),
        pytest.param("qwen3", KvDtype.FP8_E4M3, marks=pytest.mark.slow),
    ],
)
@pytest.mark.usefixtures("_interpreted")
def test_the_cuda_path_answers_like_the_cpu_path(model_name: str, kv_dtype: KvDtype) -> None:
    interpreted = serve(model_name, kv_dtype, is_like_cuda=True)
    dispatch.install("cpu", cpu)
    assert interpreted == serve(model_name, kv_dtype, is_like_cuda=False)
    assert all(token < VOCAB_SIZE for each in interpreted for tokens in each for token in tokens)


@pytest.mark.usefixtures("_interpreted")
def test_batch_invariant_log_probabilities_have_the_same_bits() -> None:
    dispatch.install("cpu", CudaBackend(is_batch_invariant=True))
    model = ours("llama_gqa", InvariantLinear)
    prompt = list(range(3, 25))
    others = [[9, 8, 7], [6] * 12]
    alone = logprobs_of(model, [prompt], max_num_batched_tokens=64)
    among = logprobs_of(model, [others[0], prompt, others[1]], max_num_batched_tokens=17)
    assert alone[0] == among[1]


def logprobs_of(
    model: CausalLM, prompts: list[list[int]], max_num_batched_tokens: int
) -> list[list[tuple[int, float]]]:
    """Tokens and their log-probabilities, to the bit."""
    limits = SchedulerOptions(
        max_num_seqs=4, max_num_batched_tokens=max_num_batched_tokens, max_model_len=64
    )
    engine = make_interpreted_engine(model, KvDtype.AUTO, limits, is_like_cuda=True)
    told: list[list[EngineEvent]] = []
    for i, prompt in enumerate(prompts):
        told.append([])
        request = make_request(f"r{i}", prompt, 4, temperature=0.0, logprobs=0)
        engine.submit(request, told[-1].extend)
    while engine.step():
        pass
    return [
        [
            (event.token_ids[0], event.logprobs[0].logprob)
            for event in events
            if isinstance(event, TokensEmitted) and event.logprobs is not None
        ]
        for events in told
    ]
