"""Replays of small traces: the bound against exhaustive search, the policies against the bound."""

import gzip
import json
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.kv_memory.replay import replay, replay_clairvoyant
from bench.kv_memory.report import as_text
from bench.kv_memory.trace_replay import BOUND, NAME_TO_POLICY, TAUGHT, main, replay_all
from bench.kv_memory.traces import DEFAULT_FOLDER, Trace, find_traces, load_trace

# Paths through a binary tree whose nodes are numbered as in a heap, so that a block fixes its prefix.
turns = st.lists(st.integers(0, 1), min_size=1, max_size=4)


def path_of(choices: list[int]) -> tuple[int, ...]:
    blocks: list[int] = []
    node = 1
    for choice in choices:
        node = 2 * node + choice
        blocks.append(node)
    return tuple(blocks)


traces = st.lists(turns, min_size=1, max_size=9).map(
    lambda paths: Trace("small", tuple(path_of(path) for path in paths))
)


def most_hits(trace: Trace, num_blocks: int) -> int:
    """By trying every choice of leaves at every eviction."""

    @cache
    def from_here(index: int, resident: frozenset[int]) -> int:
        if index == len(trace.paths):
            return 0
        path = trace.paths[index][:num_blocks]
        found = [block for block in path if block in resident]
        return len(found) + max(
            from_here(index + 1, kept | frozenset(path))
            for kept in after_evictions(resident | frozenset(path), frozenset(path), num_blocks)
        )

    return from_here(0, frozenset())


def after_evictions(
    resident: frozenset[int], held: frozenset[int], num_blocks: int
) -> set[frozenset[int]]:
    if len(resident) <= num_blocks:
        return {resident}
    leaves = [b for b in resident - held if not {2 * b, 2 * b + 1} & resident]
    return {
        result for leaf in leaves for result in after_evictions(resident - {leaf}, held, num_blocks)
    }


@settings(max_examples=150, deadline=None)
@given(trace=traces, num_blocks=st.integers(4, 8))
def test_the_clairvoyant_replay_is_the_optimum(trace: Trace, num_blocks: int) -> None:
    assert replay_clairvoyant(trace, num_blocks).num_hits == most_hits(trace, num_blocks)


@pytest.mark.parametrize("name", NAME_TO_POLICY)
@settings(max_examples=60, deadline=None)
@given(trace=traces, num_blocks=st.integers(1, 12))
def test_no_policy_beats_it(name: str, trace: Trace, num_blocks: int) -> None:
    result = replay(trace, num_blocks, NAME_TO_POLICY[name]())
    assert result.num_references == trace.num_references
    assert result.num_hits <= replay_clairvoyant(trace, num_blocks).num_hits
    if num_blocks >= trace.num_distinct:
        assert result.num_hits == trace.num_references - trace.num_distinct


def test_the_table_names_every_policy_and_its_lead() -> None:
    trace = Trace("tiny", tuple(path_of([i & 1, i >> 1 & 1, 1]) for i in range(12)))
    table = replay_all(trace, [0.5, 1.0])
    assert [column.key for column in table.columns[2:-2]] == [*NAME_TO_POLICY, TAUGHT, BOUND]
    assert table.column(BOUND)[1] == 1 - trace.num_distinct / trace.num_references
    assert "tiny trace" in as_text(table)


def write(path: Path, rows: list[object]) -> Path:
    with gzip.open(path, "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return path


def test_traces_are_read_in_order_of_time(tmp_path: Path) -> None:
    rows: list[object] = [
        {"timestamp": 5, "hash_ids": [1, 3]},
        {"timestamp": 2, "hash_ids": [1, 2]},
    ]
    trace = load_trace(write(tmp_path / "chat_trace.jsonl.gz", rows))
    assert trace == Trace("chat", ((1, 2), (1, 3)))
    assert (trace.num_references, trace.num_distinct) == (4, 3)


@pytest.mark.parametrize(
    "row",
    [{"timestamp": 1}, {"timestamp": 1, "hash_ids": 7}, [], {"hash_ids": ["x"], "timestamp": 1}],
)
def test_a_bad_line_is_named(tmp_path: Path, row: object) -> None:
    good = {"timestamp": 1, "hash_ids": [1]}
    path = write(tmp_path / "bad_trace.jsonl.gz", [good, row])
    with pytest.raises(ValueError, match=r"bad_trace\.jsonl\.gz: line 2"):
        load_trace(path)


def test_without_traces_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--traces", str(tmp_path)]) == 0
    assert "skipped" in capsys.readouterr().out


def test_output_files_are_written(tmp_path: Path) -> None:
    rows: list[object] = [{"timestamp": i, "hash_ids": [1, 2 + i % 3]} for i in range(9)]
    write(tmp_path / "chat_trace.jsonl.gz", rows)
    assert main(["--traces", str(tmp_path), "--out", str(tmp_path), "--shares", "0.5", "1"]) == 0
    content = json.loads((tmp_path / "replay_chat.json").read_text())
    assert content["rows"][1][BOUND] == content["rows"][1]["LRU"] == 1 - 4 / 18
    assert (tmp_path / "replay_chat.png").stat().st_size > 0


@pytest.mark.slow
@pytest.mark.parametrize("path", find_traces(DEFAULT_FOLDER), ids=lambda path: path.name)
def test_ours_is_best_or_ties_everywhere(path: Path) -> None:
    table = replay_all(load_trace(path), [0.01, 0.05, 0.2])
    assert all(isinstance(lead, float) and lead >= -0.005 for lead in table.column("lead"))
