"""A whole tiny model on the device against the same one on the CPU, and the engine's own shortcuts."""

import copy
import dataclasses

import pytest
import torch
from gpu_cases import DEVICE, HALVES, IS_DRY

from bench.gpu.random_model import llama_spec, random_model
from kvstore.kv_layout import KvDtype, KvLayout
from kvstore.kv_pool import KvPool
from kvstore.prefix_hash import pack_tokens
from workers.decode_graphs import CudaGraphs
from workers.engine import Engine
from workers.layers.linear import Linear
from workers.layers.norm import RmsNorm
from workers.layers.rotary import RotaryEmbedding
from workers.model_runner import ModelRunner
from workers.models.decoder import CausalLM
from workers.options import SchedulerOptions
from workers.protocol import (
    EngineEvent,
    GenerateRequest,
    ReplicaInfo,
    RequestFailed,
    SamplingParams,
    TokensEmitted,
)

pytestmark = pytest.mark.gpu

CPU = torch.device("cpu")
BLOCK_SIZE = 16
SPEC = llama_spec(
    num_layers=3,
    hidden_size=128,
    intermediate_size=224,
    num_q_heads=8,
    num_kv_heads=2,
    head_dim=64,
    vocab_size=300,
    max_model_len=512,
)
NUM_TOKENS = 3 if IS_DRY else 24
PROMPTS = [[(7 * i * i + 3 * i + k) % 300 for i in range(n)] for k, n in enumerate((5, 100, 33, 1))]


def widened(model: CausalLM, factor: float = 6.0) -> CausalLM:
    """Weights so wide that tokens differ from each other and the likeliest one is likeliest by far."""
    for layer in model.layers:
        for linear in (layer.attention.qkv, layer.attention.output, layer.mlp.gate_up):
            linear.weight.mul_(factor)
    model.head.weight.mul_(factor)
    return model


def moved(part: object, dtype: torch.dtype, device: torch.device) -> object:
    """A copy of a model's part elsewhere."""
    if isinstance(part, torch.Tensor):
        return part.to(device=device, dtype=dtype)
    if isinstance(part, tuple):
        return tuple(moved(each, dtype, device) for each in part)
    if isinstance(part, RotaryEmbedding):
        return RotaryEmbedding(SPEC.rope, SPEC.head_dim, dtype, device)
    if dataclasses.is_dataclass(part) and not isinstance(part, type) and part is not SPEC:
        made = copy.copy(part)
        for field in dataclasses.fields(part):
            object.__setattr__(made, field.name, moved(getattr(part, field.name), dtype, device))
        return made
    return part


def on(model: CausalLM, dtype: torch.dtype, device: torch.device) -> CausalLM:
    made = moved(model, dtype, device)
    assert isinstance(made, CausalLM)
    assert isinstance(made.layers[0].attention.qkv, Linear)
    assert isinstance(made.norm, RmsNorm) and made.norm.weight.dtype == dtype
    return made


def engine_over(
    model: CausalLM,
    kv_dtype: KvDtype = KvDtype.AUTO,
    *,
    has_graphs: bool = False,
    plans_ahead: bool = False,
) -> Engine:
    device = model.device
    layout = KvLayout(3, 2, 64, BLOCK_SIZE, kv_dtype, model.dtype)
    options = SchedulerOptions(max_num_seqs=6, max_num_batched_tokens=48, max_model_len=256)
    info = ReplicaInfo(
        replica_id="test",
        epoch="test",
        model="random",
        fingerprint="test",
        block_size=BLOCK_SIZE,
        num_blocks=100,
        kv_dtype=kv_dtype,
        kv_bytes_per_token=layout.bytes_per_token,
        compute_dtype=str(model.dtype),
        device=str(device),
        max_model_len=256,
        vocab_size=300,
    )
    capture = CudaGraphs() if has_graphs else None
    pool = KvPool(layout, info.num_blocks, device)
    runner = ModelRunner(model, pool, device, options, capture=capture)
    return Engine(runner, info, options, frozenset(), plans_ahead=plans_ahead)


def outputs(engine: Engine, temperature: float = 0.0) -> list[list[int]]:
    """NUM_TOKENS after each prompt, all prompts in one go."""
    tokens: list[list[int]] = [[] for _ in PROMPTS]
    for i, prompt in enumerate(PROMPTS):

        def sink(events: tuple[EngineEvent, ...], row: list[int] = tokens[i]) -> None:
            for event in events:
                assert not isinstance(event, RequestFailed), event
                if isinstance(event, TokensEmitted):
                    row += event.token_ids

        sampling = SamplingParams(
            max_tokens=NUM_TOKENS, temperature=temperature, top_p=0.9, seed=i, ignore_eos=True
        )
        request = GenerateRequest(f"r{i}", pack_tokens(prompt), "", b"salt", b"", sampling)
        engine.submit(request, sink)
    while engine.step():
        pass
    engine.check_invariants()
    assert [len(row) for row in tokens] == [NUM_TOKENS] * len(PROMPTS)
    return tokens


@pytest.fixture(scope="module")
def model() -> CausalLM:
    """float32 on the CPU, its weights exact in bfloat16 too."""
    torch.manual_seed(5)
    made = widened(random_model(SPEC, torch.float32, CPU))
    return on(on(made, torch.bfloat16, CPU), torch.float32, CPU)


@pytest.mark.parametrize("dtype", [torch.float32, HALVES[0]])
@pytest.mark.parametrize("kv_dtype", list(KvDtype))
def test_hidden_states_agree_with_the_cpus(
    model: CausalLM, dtype: torch.dtype, kv_dtype: KvDtype
) -> None:
    """One prompt in two chunks, then three tokens; float32 on the CPU is the judge."""
    expected = hidden_states(model, KvDtype.AUTO)
    actual = hidden_states(on(model, dtype, DEVICE), kv_dtype)
    assert expected.std() > 0.5
    is_exact = dtype == torch.float32 and kv_dtype is KvDtype.AUTO
    error = (actual - expected).norm() / expected.norm()
    assert error < (1e-4 if is_exact else 0.08), error


@torch.inference_mode()
def hidden_states(model: CausalLM, kv_dtype: KvDtype) -> torch.Tensor:
    from kernels.batch import AttentionBatch

    device = model.device
    layout = KvLayout(3, 2, 64, BLOCK_SIZE, kv_dtype, model.dtype)
    pool = KvPool(layout, 8, device)
    table = torch.tensor([[6, 1, 4, 0, 3, 2]], dtype=torch.int32, device=device)
    token_ids = torch.tensor(PROMPTS[1][:83], device=device)
    parts, start = [], 0
    for count in (50, 30, 1, 1, 1):
        positions = torch.arange(start, start + count, device=device)
        slots = table[0, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
        batch = AttentionBatch(slots, table, (0, count), (start + count,), BLOCK_SIZE)
        step = slice(start, start + count)
        parts.append(model.forward(token_ids[step], positions, batch, pool))
        start += count
    return torch.cat(parts).float().cpu()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_tokens_are_the_cpus(model: CausalLM, temperature: float) -> None:
    """float32 on both; the random numbers are counted, so sampled tokens are the same too."""
    expected = outputs(engine_over(model), temperature)
    assert len({tuple(row) for row in expected}) == len(PROMPTS)
    actual = outputs(engine_over(on(model, torch.float32, DEVICE)), temperature)
    assert matches(actual, expected) >= 0.95


def matches(actual: list[list[int]], expected: list[list[int]]) -> float:
    """Share of tokens up to the first difference in each row; what follows one differs rightly."""
    same = 0
    for ours, theirs in zip(actual, expected, strict=True):
        pairs = zip(ours, theirs, strict=True)
        same += next((i for i, (a, b) in enumerate(pairs) if a != b), len(ours))
    return same / sum(map(len, expected))


@pytest.mark.parametrize("plans_ahead", [False, True])
@pytest.mark.parametrize("kv_dtype", list(KvDtype))
def test_replayed_steps_are_the_launched_ones(
    model: CausalLM, kv_dtype: KvDtype, plans_ahead: bool
) -> None:
    """In half precision, sampled; where no graphs are, only planning ahead is compared."""
    there = on(model, HALVES[0], DEVICE)
    expected = outputs(engine_over(there, kv_dtype), 0.8)
    has_graphs = not IS_DRY
    engine = engine_over(there, kv_dtype, has_graphs=has_graphs, plans_ahead=plans_ahead)
    # A replay is sized for the longest context and may split attention otherwise, which rounds otherwise.
    assert matches(outputs(engine, 0.8), expected) >= (0.7 if has_graphs else 1.0)
