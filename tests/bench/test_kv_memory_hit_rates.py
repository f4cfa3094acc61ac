"""Hit rates of workloads: the optimum against brute force, and prefills against arithmetic."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.kv_memory.hit_rates import EndlessCache, agent_table, run_workload, workload_table
from bench.kv_memory.workloads import (
    SHAPES,
    Ask,
    Shape,
    Workload,
    agents,
    chats,
    few_shot,
    tree_of_thought,
)

TOKENS = st.lists(st.sampled_from([0, 1, 255, 256, 1 << 20]), min_size=1, max_size=8)


def num_common(one: list[int], other: list[int]) -> int:
    pairs = list(zip(one, other, strict=False))
    return next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))


@given(st.lists(TOKENS, max_size=12), TOKENS)
def test_the_optimum_is_the_longest_common_prefix(texts: list[list[int]], text: list[int]) -> None:
    cache = EndlessCache()
    for each in texts:
        cache.add(array("I", each))
    longest = max((num_common(text, each) for each in texts), default=0)
    assert cache.num_known(array("I", text)) == min(longest, len(text) - 1)


def asks_of(workload: Workload) -> list[list[Ask]]:
    """All rounds, when every token drawn is 7."""
    rounds = [next(workload)]
    while True:
        outputs = [[[7] * ask.max_tokens for _ in range(ask.n)] for ask in rounds[-1]]
        try:
            rounds.append(workload.send(outputs))
        except StopIteration:
            return rounds


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_a_workload_is_always_the_same(shape: Shape) -> None:
    rounds = asks_of(shape.make())
    assert rounds == asks_of(shape.make())
    assert len(rounds) > 1


def test_an_agent_prefills_what_is_new_and_the_ends_of_blocks() -> None:
    rounds = asks_of(agents(1, num_steps=5, num_head_tokens=100, tokens_a_step=(20, 80)))
    asks = [ask for (ask,) in rounds]
    num_computed = 0
    expected = num_new = 0
    for ask in asks:
        # Of what was computed before, whole blocks are found; the head of the next block nobody had sealed.
        expected += len(ask.prompt) - num_computed // 16 * 16
        num_new += len(ask.prompt) - num_computed
        num_computed = len(ask.prompt) + ask.max_tokens - 1
    workload = agents(1, num_steps=5, num_head_tokens=100, tokens_a_step=(20, 80))
    outcome = run_workload(workload, 16)
    assert outcome.num_prefilled_tokens == expected
    assert outcome.num_new_tokens == num_new
    assert outcome.num_prompt_tokens - outcome.num_cached_tokens == expected
    workload = agents(1, num_steps=5, num_head_tokens=100, tokens_a_step=(20, 80))
    without = run_workload(workload, 16, enable_prefix_caching=False)
    assert without.num_prefilled_tokens == sum(len(ask.prompt) for ask in asks)


def test_questions_behind_one_head_reach_the_optimum_by_partial_copies() -> None:
    def workload() -> Workload:
        return few_shot(num_questions=12, num_head_tokens=100, rounds=2)

    assert run_workload(workload(), 16).hit_rate == pytest.approx(
        11 * 100 / _num_tokens(workload())
    )
    whole = run_workload(workload(), 16, min_partial_tokens=16)
    assert whole.hit_rate == pytest.approx(11 * 96 / _num_tokens(workload()))


def _num_tokens(workload: Workload) -> int:
    return sum(len(ask.prompt) for asks in asks_of(workload) for ask in asks)


def test_less_memory_is_never_better_and_goals_are_judged_where_it_suffices() -> None:
    shapes = (
        Shape("chats", lambda: chats(num_chats=4, num_turns=3)),
        Shape("tree", lambda: tree_of_thought(num_problems=2, depth=2)),
    )
    table = workload_table(shapes, block_sizes=(16,), memory_shares=(1.0, 0.5))
    for name in ("chats", "tree"):
        ample, tight = (
            row
            for row, each in zip(table.rows, table.column("workload"), strict=True)
            if each == name
        )
        keys = [column.key for column in table.columns]
        ample_by_key = dict(zip(keys, ample, strict=True))
        tight_by_key = dict(zip(keys, tight, strict=True))
        assert ample_by_key["is_met"] is True
        assert tight_by_key["is_met"] is None
        assert tight_by_key["hit_rate"] < ample_by_key["hit_rate"] <= ample_by_key["optimum"]
        assert ample_by_key["without_partial"] <= ample_by_key["hit_rate"]


def test_the_agent_table_sets_both_costs_side_by_side() -> None:
    table = agent_table(block_sizes=(8, 16), num_steps=4, num_head_tokens=512)
    assert table.column("is_met") == [True, True]
    for prefilled, uncached in zip(
        table.column("num_prefilled_tokens"), table.column("num_uncached_tokens"), strict=True
    ):
        assert isinstance(prefilled, int) and isinstance(uncached, int)
        assert uncached > 2 * prefilled
