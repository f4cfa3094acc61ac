"""The whole engine with random weights of Llama-3-8B's shape: step time against what its bytes must take.

Scheduler, radix tree, block pool, runner and sampling are the real ones. Prompts alone are not computed: the pool
holds random keys and values, and while a batch is set up a stand-in answers for the runner. So the block tables
are what the scheduler made, every sequence reads memory of its own, and a minute of prefill is saved.
"""

import gc
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import torch

from bench.gpu.filled_pool import filled_pool
from bench.gpu.random_model import llama_3_8b, llama_spec, random_model, step_weight_bytes
from bench.gpu.stage import Context, run_stage
from kvstore.kv_layout import KvDtype, KvLayout
from kvstore.prefix_hash import pack_tokens
from workers.decode_graphs import CudaGraphs
from workers.engine import Engine, LaunchedStep, Runner, Sink
from workers.model_runner import ModelRunner
from workers.models.decoder import CausalLM
from workers.models.spec import ModelSpec
from workers.options import SchedulerOptions
from workers.protocol import (
    EngineEvent,
    GenerateRequest,
    ReplicaInfo,
    RequestFailed,
    SamplingParams,
    TokensEmitted,
)
from workers.step_plan import RowResult, SampledToken, StepPlan

_BLOCK_SIZE = 16
_SLACK = 1.05
_MAX_BATCHED_TOKENS = 16384


@dataclass(frozen=True)
class Load:
    """`batch` sequences with `context_len` tokens each when the clock starts."""

    batch: int
    context_len: int
    target: float | None = None


@dataclass(frozen=True)
class Plan:
    """What is run: the loads, and how many steps of each are warm-up and measured."""

    spec: ModelSpec
    loads: tuple[Load, ...]
    num_warm_steps: int
    num_steps: int

    @property
    def max_batch(self) -> int:
        return max(load.batch for load in self.loads)

    @property
    def num_spare_tokens(self) -> int:
        """Of each sequence: those drawn while others are set up, the measured ones, and some more."""
        most = max(load.batch * load.context_len for load in self.loads)
        return (
            most // _MAX_BATCHED_TOKENS + self.max_batch + self.num_warm_steps + self.num_steps + 8
        )

    @property
    def num_blocks(self) -> int:
        spare = self.num_spare_tokens + _BLOCK_SIZE
        most = max(load.batch * (load.context_len + spare) for load in self.loads)
        return int(_SLACK * most / _BLOCK_SIZE) + 1


def full_plan() -> Plan:
    loads = (Load(32, 8192, target=1.35), Load(1, 8192), Load(8, 8192), Load(128, 2048))
    return Plan(llama_3_8b(max_model_len=8192 + 512), loads, num_warm_steps=5, num_steps=50)


def dry_plan() -> Plan:
    spec = llama_spec(
        num_layers=2,
        hidden_size=64,
        intermediate_size=96,
        num_q_heads=4,
        num_kv_heads=2,
        head_dim=16,
        vocab_size=200,
        max_model_len=256,
    )
    return Plan(spec, (Load(4, 48, target=1.35), Load(1, 70)), num_warm_steps=1, num_steps=2)


class StandIn:
    """A runner that computes nothing until `is_standing_in` is False; then it is the real one."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.is_standing_in = True

    def launch(self, plan: StepPlan) -> LaunchedStep:
        if not self.is_standing_in:
            return self._runner.launch(plan)
        return _MadeUp([RowResult([SampledToken(1)] * row.num_draws) for row in plan.rows])


@dataclass(frozen=True)
class _MadeUp:
    rows: list[RowResult]

    def results(self) -> list[RowResult]:
        return self.rows


def run(context: Context) -> None:
    plan = dry_plan() if context.is_dry else full_plan()
    model = random_model(plan.spec, torch.bfloat16, context.device)
    for kv_dtype in (KvDtype.AUTO, KvDtype.FP8_E4M3):
        with context.going_on(f"engine, {kv_dtype}"):
            _run_dtype(context, plan, model, kv_dtype)


def _run_dtype(context: Context, plan: Plan, model: CausalLM, kv_dtype: KvDtype) -> None:
    """A pool and an engine, and all loads through it; the memory is given back at the end."""
    layout = KvLayout(
        num_layers=plan.spec.num_layers,
        num_kv_heads=plan.spec.num_kv_heads,
        head_dim=plan.spec.head_dim,
        block_size=_BLOCK_SIZE,
        kv_dtype=kv_dtype,
        compute_dtype=torch.bfloat16,
    )
    options = SchedulerOptions(
        max_num_seqs=plan.max_batch,
        max_num_batched_tokens=_MAX_BATCHED_TOKENS,
        max_model_len=plan.spec.max_model_len,
    )
    pool = filled_pool(layout, plan.num_blocks, context.device)
    begin_s = perf_counter()
    capture = CudaGraphs() if context.device.type == "cuda" else None
    runner = StandIn(ModelRunner(model, pool, context.device, options, capture=capture))
    precision = "bf16" if kv_dtype is KvDtype.AUTO else "fp8"
    context.add(f"runner made, {precision} KV", perf_counter() - begin_s, "s")
    info = _info(plan, layout)
    engine = Engine(runner, info, options, frozenset(), plans_ahead=True)
    bytes_a_step = step_weight_bytes(model)
    for load in plan.loads:
        with context.going_on(f"{load.batch} × {load.context_len}, {precision}"):
            _run_load(context, plan, load, engine, runner, bytes_a_step)
    # An engine and its thread hold each other, and the engine holds the pool.
    del engine, runner, pool
    gc.collect()


def _run_load(
    context: Context, plan: Plan, load: Load, engine: Engine, runner: StandIn, weight_bytes: int
) -> None:
    batch = _Batch(plan, load, engine)
    runner.is_standing_in = True
    before = engine.report().stats.generation_tokens_total
    while batch.num_drawing < load.batch:
        assert engine.step(), f"nothing left to do: {batch.failures}"
    runner.is_standing_in = False
    for _ in range(plan.num_warm_steps):
        engine.step()
    num_ahead = engine.report().stats.generation_tokens_total - before
    seconds = _seconds(context, plan.num_steps, engine.step) / plan.num_steps
    num_drawn = engine.report().stats.generation_tokens_total - before - num_ahead
    assert num_drawn == plan.num_steps * load.batch, f"{num_drawn} tokens drawn; {batch.failures}"
    num_tokens = load.batch * load.context_len + num_ahead + num_drawn // 2
    kv_bytes = num_tokens * engine.info.kv_bytes_per_token
    _report(context, load, engine.info.kv_dtype, seconds, weight_bytes + kv_bytes)
    batch.cancel()
    while engine.step():
        pass


class _Batch:
    """A load's requests, each with a prompt of its own.

    Attributes:
        failures: what was said of those that failed.
    """

    def __init__(self, plan: Plan, load: Load, engine: Engine) -> None:
        self.failures: list[str] = []
        self._engine = engine
        self._drawing: set[str] = set()
        self._names = [f"{load.batch}-{load.context_len}-{i}" for i in range(load.batch)]
        draw = random.Random(f"{load} {engine.info.kv_dtype}")
        sampling = SamplingParams(
            max_tokens=plan.num_spare_tokens, temperature=0.0, ignore_eos=True
        )
        for name in self._names:
            prompt = pack_tokens(draw.choices(range(plan.spec.vocab_size), k=load.context_len))
            request = GenerateRequest(name, prompt, "", b"bench", b"", sampling)
            engine.submit(request, self._sink(name))

    @property
    def num_drawing(self) -> int:
        """Requests whose prompt is complete."""
        return len(self._drawing)

    def cancel(self) -> None:
        for name in self._names:
            self._engine.cancel(name)

    def _sink(self, name: str) -> Sink:
        def sink(events: tuple[EngineEvent, ...]) -> None:
            for event in events:
                match event:
                    case TokensEmitted():
                        self._drawing.add(name)
                    case RequestFailed(message=message):
                        self.failures.append(message)

        return sink


def _report(context: Context, load: Load, kv_dtype: str, seconds: float, num_bytes: int) -> None:
    """Its step, and how many times as long as its bytes take at the rate of the measured copy."""
    precision = "bf16" if kv_dtype == KvDtype.AUTO else "fp8"
    name = f"{load.batch} × {load.context_len}, {precision} KV"
    rate = context.copy_bytes_per_s
    ratio = None if rate is None else seconds * rate / num_bytes
    note = f"{num_bytes / 1e9:.2f} GB a step"
    note += "" if rate is None else f", {num_bytes / rate * 1e3:.2f} ms at the least"
    context.add(f"step, {name}", seconds * 1e3, "ms", ratio, load.target, is_limit=True, note=note)
    context.add(f"decode, {name}", load.batch / seconds, "tokens/s")


def _info(plan: Plan, layout: KvLayout) -> ReplicaInfo:
    return ReplicaInfo(
        replica_id="bench",
        epoch="bench",
        model="random",
        fingerprint="bench",
        block_size=layout.block_size,
        num_blocks=plan.num_blocks,
        kv_dtype=layout.kv_dtype,
        kv_bytes_per_token=layout.bytes_per_token,
        compute_dtype="bfloat16",
        device="bench",
        max_model_len=plan.spec.max_model_len,
        vocab_size=plan.spec.vocab_size,
    )


def _seconds(context: Context, num_steps: int, step: Callable[[], object]) -> float:
    begin_s = perf_counter()
    for _ in range(num_steps):
        step()
    if context.device.type == "cuda":
        torch.cuda.synchronize()
    return perf_counter() - begin_s


if __name__ == "__main__":
    run_stage("engine", run, sys.argv[1:])
