"""The engines' benchmark on a tiny model, and what its tables say of known figures."""

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM

from bench.engine.arm import Arm, all_arms, command_of
from bench.engine.arm_process import Answer, ArmFailed, ArmProcess
from bench.engine.arms.loop import Prompts, peak_rss_bytes
from bench.engine.arms.pando import make
from bench.engine.ceilings import Ceilings, measure
from bench.engine.floors import ModelCost, decode_floor, prefill_floor
from bench.engine.measure import MEMORY, START, Results, Setup, measure_all, num_measurements
from bench.engine.peers import needed
from bench.engine.step_profile import Stopwatch, parts, profile_tables
from bench.engine.tables import agreement_note, all_tables, goal_table
from bench.engine.tasks import Metric, Sample, Sizes, metrics_of, run_task
from bench.kv_memory.report import as_text, save

TINY = Sizes(batches=(1, 3), num_decoded=4, prompts=(20, 40), end_token=90)
CEILINGS = Ceilings(read_bytes_per_s=1e9, fp32_flops=1e10, bf16_flops=4e10)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    Tokenizer(WordLevel({"a": 0}, unk_token="a")).save(str(folder / "tokenizer.json"))
    return folder


def arms(*names: str) -> list[Arm]:
    name_to_arm = all_arms()
    return [name_to_arm[name] for name in names]


def setup_for(model_dir: Path, log_dir: Path) -> Setup:
    settings = {"model_dir": str(model_dir), "num_threads": 1}
    return Setup(settings, TINY, 1, log_dir, lock=log_dir / "lock")


def test_a_whole_round_of_pando_and_transformers(model_dir: Path, tmp_path: Path) -> None:
    both = arms("pando-fp32", "transformers-fp32")
    setup = setup_for(model_dir, tmp_path)
    said: list[str] = []
    results = measure_all(both, setup, said.append)
    assert results.failures == []
    assert len(said) == num_measurements(both, setup)
    for arm in both:
        wanted = metrics_of(TINY, has_prefix_cache=arm.has_prefix_cache)
        for metric in [*wanted, START, MEMORY]:
            spread = results.spread(arm.name, metric)
            assert spread is not None and spread.median > 0 and spread.num_rounds == 1
    assert "first 5 of 5" in agreement_note(results, both)
    tables = all_tables(results, both, TINY, ModelCost.from_dir(model_dir))
    for table in tables:
        save(table, tmp_path, {"command": "test"})
    names = {path.name for path in tmp_path.glob("engine_*")}
    assert {"engine_decode.png", "engine_prefill.png", "engine_times.json"} <= names
    rows = json.loads((tmp_path / "engine_decode.json").read_text())["rows"]
    assert [(row["arm"], row["size"]) for row in rows] == [
        (arm.name, batch) for batch in TINY.batches for arm in both
    ]
    assert all(row["low"] <= row["tokens_per_s"] <= row["high"] for row in rows)


def test_an_arm_that_fails_is_named_and_left_out(tmp_path: Path) -> None:
    broken = replace(arms("pando-fp32")[0], name="broken", module="no_such_arm")
    results = measure_all([broken], setup_for(tmp_path, tmp_path), lambda _: None)
    assert len(results.failures) == 2  # at its start, and when it should be warmed
    assert "broken gave no answer" in results.failures[0]
    assert "no_such_arm" in results.failures[0]
    assert results.spread("broken", START) is None


def test_an_arm_says_why_it_failed(tmp_path: Path) -> None:
    settings = {"model_dir": str(tmp_path / "nothing"), "num_threads": 1}
    with (
        ArmProcess(arms("pando-fp32")[0], settings, tmp_path / "log") as process,
        pytest.raises(ArmFailed, match="nothing"),
    ):
        process.generate([[1]], 1)


class Recorder:
    """An arm whose every token takes a hundredth of a second, and every prompt token a thousandth."""

    def __init__(self) -> None:
        self.calls: list[Prompts] = []

    def generate(self, prompts: Prompts, num_tokens: int) -> Answer:
        self.calls.append(prompts)
        seconds = 0.001 * sum(map(len, prompts)) + 0.01 * num_tokens
        return Answer(seconds, [[7] * num_tokens] * len(prompts), 5)


def test_rates_are_counted_from_what_an_arm_says() -> None:
    recorder = Recorder()
    decode = run_task(recorder.generate, Metric("decode", 3), TINY, "a")
    # The prompts' time and the first token's cancel out: 3 sequences, a hundredth a step.
    assert decode.sample.value == pytest.approx(300)
    assert [len(token_row) for token_row in decode.tokens] == [5, 5, 5]
    prefill = run_task(recorder.generate, Metric("prefill", 40), TINY, "a")
    assert prefill.sample.value == pytest.approx(40 / 0.05)
    hit = run_task(recorder.generate, Metric("hit", 40), TINY, "a")
    assert hit.sample.value == pytest.approx(0.056 + 0.01)


def test_only_a_hit_meets_what_was_computed_before() -> None:
    recorder = Recorder()
    for seed in ("round 0", "round 1"):
        for metric in metrics_of(TINY, has_prefix_cache=True):
            run_task(recorder.generate, metric, TINY, seed)
    prompts = [tuple(prompt) for call in recorder.calls for prompt in call]
    assert len(set(prompts)) == len(prompts)
    hits = [prompt for prompt in prompts if len(prompt) == 56]
    known = [prompt for prompt in prompts if len(prompt) == 40]
    assert [hit[:40] for hit in hits] == known and len(known) == 2
    heads = [prompt[:16] for prompt in prompts if len(prompt) < 56]
    # A prompt of 20 and one of 40 of the same round may not share a head either, or the longer one hits.
    assert len(set(heads)) == len(heads)


def known_results() -> Results:
    results = Results(ceilings=[CEILINGS, replace(CEILINGS, read_bytes_per_s=5e8)])
    figures = {
        ("pando-fp32", Metric("decode", 1)): (30.0, 10.0, 20.0),
        ("vllm-fp32", Metric("decode", 1)): (10.0,),
        ("vllm-bf16", Metric("decode", 1)): (16.0,),
        ("pando-fp32", Metric("hit", 40)): (0.1,),
        ("vllm-fp32", Metric("hit", 40)): (0.3,),
        ("vllm-bf16", Metric("hit", 40)): (0.15,),
        ("pando-fp32", START): (2.0,),
        ("vllm-fp32", START): (10.0,),
    }
    for (arm, metric), values in figures.items():
        for value in values:
            results.add(arm, Sample(metric, value))
    return results


def test_spread_is_median_and_ends() -> None:
    spread = known_results().spread("pando-fp32", Metric("decode", 1))
    assert spread == (20.0, 10.0, 30.0, 3)
    assert known_results().spread("pando-bf16", START) is None
    assert known_results().best_ceilings() == CEILINGS


def test_goals_compare_with_the_right_configuration() -> None:
    chosen = arms("pando-fp32", "vllm-fp32", "vllm-bf16")
    table = goal_table(known_results(), chosen, TINY)
    rows = {(row[0], row[2]): (row[3], row[5]) for row in table.rows}
    # Decoding beside the same precision, a hit beside the best of all.
    assert rows == {
        ("decode 1", "vllm, same precision"): (2.0, "ok"),
        ("hit 40", "vllm's best"): (pytest.approx(0.1 / 0.15), "missed"),
        ("start", "vllm's best"): (0.2, "ok"),
    }
    assert "≤ 0.5" in as_text(table) and "≥ 1.3" in as_text(table)


def test_floors_follow_from_counted_work(model_dir: Path) -> None:
    cost = ModelCost.from_dir(model_dir)
    layer = 48 * (48 + 24 + 24) + 48 * 48 + 3 * 48 * 80
    assert cost == ModelCost(2 * layer, 96 * 48, 4 * 2 * 48)
    num_weights = 2 * layer + 96 * 48
    reads = 1e9 / (4 * num_weights)
    assert decode_floor(cost, CEILINGS, "fp32", 1) == pytest.approx(reads)
    assert decode_floor(cost, CEILINGS, "bf16", 1) == pytest.approx(2 * reads)
    # Many sequences: multiplying takes longer than reading.
    assert decode_floor(cost, CEILINGS, "fp32", 64) == pytest.approx(1e10 / (2 * num_weights))
    flops = 2 * (3 * 2 * layer + 96 * 48) + 4 * 2 * 48 * (1 + 2 + 3)
    assert prefill_floor(cost, CEILINGS, "fp32", 3) == pytest.approx(3 * 1e10 / flops)


def test_ceilings_are_measured() -> None:
    ceilings = measure(1, size=64, read_bytes=1 << 16)
    assert min(ceilings.read_bytes_per_s, ceilings.fp32_flops, ceilings.bf16_flops) > 0


def test_agreement_ends_at_the_first_difference() -> None:
    results = Results()
    chosen = arms("pando-fp32", "vllm-fp32", "vllm-bf16")
    results.arm_to_tokens = {"pando-fp32": [1, 2, 3, 4], "vllm-bf16": [9, 9, 9, 9]}
    assert agreement_note(results, chosen) == ""
    results.arm_to_tokens["vllm-fp32"] = [1, 2, 8, 4]
    assert "first 2 of 4" in agreement_note(results, chosen)


def test_what_text_generation_needs_of_vllm() -> None:
    requirements = [
        "torch==2.13.0",
        "torchvision==0.28.0; platform_machine == 'x86_64'",
        "opencv-python-headless>=4.13",
        "depyf==0.20.0",
        "numpy",
        "torch-geometric>=2",
        "ray[cgraph]>=2; extra == 'ray'",
        "transformers>=5.5",
    ]
    assert needed(requirements) == ["numpy", "torch-geometric>=2", "transformers>=5.5"]


def test_peak_memory_counts_the_children(tmp_path: Path) -> None:
    def process(pid: int, kib: int, children: str) -> None:
        task = tmp_path / str(pid) / "task" / str(pid)
        task.mkdir(parents=True)
        (task / "children").write_text(children)
        (tmp_path / str(pid) / "status").write_text(f"Name:\tx\nVmHWM:\t{kib} kB\nVmRSS:\t1 kB\n")

    (tmp_path / "self").mkdir()
    process(os.getpid(), 100, "71 72 ")
    process(71, 20, "73")
    process(73, 3, "")  # 72 has ended meanwhile
    assert peak_rss_bytes(tmp_path) == 123 * 1024
    assert peak_rss_bytes(tmp_path / "nothing") > 10 << 20


def test_a_stopwatch_counts_no_time_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 1.0, 3.0, 4.0, 4.5, 10.0])
    monkeypatch.setattr("bench.engine.step_profile.perf_counter", lambda: next(now))
    watch = Stopwatch()
    inner = watch.around("inner", lambda: None)

    def outer() -> None:
        inner()
        inner()

    watch.around("outer", outer)()
    assert dict(watch.label_to_s) == {"inner": 2.5, "outer": 7.5}


@pytest.fixture
def originals() -> Iterator[None]:
    before = [getattr(part.owner, part.name) for part in parts()]
    yield
    assert [getattr(part.owner, part.name) for part in parts()] == before


@pytest.mark.usefixtures("originals")
def test_profile_sees_every_part(model_dir: Path) -> None:
    (table,) = profile_tables(arms("pando-fp32", "vllm-fp32"), model_dir, 1, (1, 3), 40)
    for key in ("decode_1_s", "decode_3_s", "prefill_40_s"):
        *times, whole = table.column(key)
        assert sum(times) == pytest.approx(whole)
        assert all(seconds > 0 for seconds in times)
    assert {"linear", "attention", "scheduler", "sampling"} <= set(table.column("part"))


def test_pando_refuses_aloud(model_dir: Path) -> None:
    settings = {
        "model_dir": str(model_dir),
        "num_threads": 1,
        "dtype": "float32",
        "kv_memory_gib": 0.01,
    }
    generate = make(settings)
    assert len(generate([[3, 4, 5]], 2)[0]) == 2
    with pytest.raises(RuntimeError, match="256"):
        generate([[3] * 300], 2)


def test_the_command_names_no_interpreter_but_ours_and_vllms() -> None:
    for arm in all_arms().values():
        python = command_of(arm, Path("/vllm/python"))[0]
        assert python == ("/vllm/python" if arm.engine == "vllm" else sys.executable)
