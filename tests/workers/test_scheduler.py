"""The scheduler driven step by step over a fake model whose output depends on every slot it reads."""

import pytest
from engine_bench import BLOCK, Bench
from hypothesis import given, settings
from hypothesis import strategies as st
from slot_model import expected_beams, expected_output, next_token, outputs_of

from workers.protocol import (
    BeamParams,
    FinishReason,
    RequestFailed,
    RequestStarted,
    SequenceFinished,
    TokensEmitted,
)
from workers.step_plan import RowResult, StepPlan


@pytest.fixture(params=[False, True], ids=["in_turn", "ahead"], autouse=True)
def _whether_steps_are_planned_ahead(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Bench, "plans_ahead", request.param)


@pytest.mark.parametrize("chunk", [1, 3, 4, 5, 512])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9, 40])
def test_output_does_not_depend_on_the_chunk(length: int, chunk: int) -> None:
    bench = Bench(max_num_batched_tokens=chunk)
    prompt = [i % 7 for i in range(length)]
    bench.submit("a", prompt, 10)
    bench.run()
    assert outputs_of(bench.events["a"]) == [expected_output(prompt, 10)]
    assert bench.finish("a") == [SequenceFinished(0, FinishReason.LENGTH)]
    assert bench.pool == (0, 64)


@pytest.mark.parametrize("length", [1, 3, 4, 5, 7, 8, 9, 16])
def test_a_second_time_all_that_was_sealed_but_the_last_token_is_reused(length: int) -> None:
    bench = Bench()
    prompt = [i % 7 for i in range(length)]
    for name in ("a", "b"):
        bench.submit(name, prompt, 5)
        bench.run()
    assert bench.started("a").num_cached_tokens == 0
    num_sealed = (length + 4) // BLOCK * BLOCK  # the last token drawn was never computed
    assert bench.started("b").num_cached_tokens == min(length - 1, num_sealed)
    assert outputs_of(bench.events["a"]) == outputs_of(bench.events["b"])


def test_the_next_turn_reuses_what_was_generated() -> None:
    bench = Bench()
    bench.submit("a", [1, 2, 3], 9)
    bench.run()
    longer = [1, 2, 3, *outputs_of(bench.events["a"])[0], 5, 5]
    bench.submit("b", longer, 3)
    bench.run()
    # 3 + 9 tokens; the last one was drawn but its KV never computed: 11 tokens, two full blocks.
    assert bench.started("b").num_cached_tokens == 8
    assert outputs_of(bench.events["b"]) == [expected_output(longer, 3)]


def test_another_salt_shares_nothing() -> None:
    bench = Bench()
    for name, salt in (("a", b"x"), ("b", b"y"), ("c", b"x")):
        bench.submit(name, list(range(20)), 2, salt=salt)
        bench.run()
    assert [bench.started(n).num_cached_tokens for n in "abc"] == [0, 0, 19]


def test_prefix_caching_can_be_switched_off() -> None:
    bench = Bench(enable_prefix_caching=False)
    for name in ("a", "b"):
        bench.submit(name, list(range(20)), 2)
        bench.run()
    assert bench.started("b").num_cached_tokens == 0
    assert bench.engine.report().stats.num_cached_blocks == 0


@pytest.mark.parametrize("length", [1, 4, 17, 16, 18])
def test_n_costs_one_prompt_and_at_most_one_copy_each(length: int) -> None:
    bench = Bench()
    prompt = [i % 7 for i in range(length)]
    bench.submit("a", prompt, 6, n=4)
    bench.run()
    assert outputs_of(bench.events["a"], 4) == [expected_output(prompt, 6, k) for k in range(4)]
    assert bench.runner.num_copies == (0 if length % BLOCK == 0 else 3)
    assert bench.runner.num_computed_tokens == length + 4 * 5
    assert sorted(e.index for e in bench.finish("a")) == [0, 1, 2, 3]
    assert bench.pool == (0, 64)


def test_after_the_first_token_siblings_share_the_full_block_and_own_their_tail() -> None:
    bench = Bench()
    bench.submit("a", [1, 2, 3, 4, 5], 8, n=2)
    bench.engine.step()
    one, two = (s.table.block_ids for s in bench.engine._scheduler._running)
    assert one[0] == two[0] and one[1] != two[1]
    pool = bench.engine._scheduler.memory.pool
    assert [pool.ref_count(b) for b in (one[0], one[1], two[1])] == [2, 1, 1]


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_too_small_a_pool_preempts_and_changes_nothing(enable_prefix_caching: bool) -> None:
    bench = Bench(
        num_blocks=10, max_num_batched_tokens=8, enable_prefix_caching=enable_prefix_caching
    )
    prompts = {f"r{i}": [i, i + 1, 3, 4, 5] for i in range(4)}
    for name, prompt in prompts.items():
        bench.submit(name, prompt, 30)
    bench.run()
    assert bench.engine.report().stats.preemptions_total > 0
    for name, prompt in prompts.items():
        assert outputs_of(bench.events[name]) == [expected_output(prompt, 30)]
        assert sum(isinstance(e, RequestStarted) for e in bench.events[name]) == 1
    assert bench.pool == (0, 10)


def test_forks_survive_a_full_pool() -> None:
    bench = Bench(num_blocks=6)
    bench.submit("a", [1, 2, 3, 4, 5, 6], 14, n=3)
    bench.run()
    assert outputs_of(bench.events["a"], 3) == [
        expected_output([1, 2, 3, 4, 5, 6], 14, k) for k in range(3)
    ]
    assert bench.pool == (0, 6)


@pytest.mark.parametrize(
    ("prompt", "fields", "code", "words"),
    [
        ([], {}, "invalid_request", "no tokens"),
        ([1], {"n": 65}, "invalid_request", "n is 65"),
        ([1] * 30, {}, "context_length_exceeded", "30 tokens and max_tokens is 5"),
        ([1] * 60, {}, "context_length_exceeded", "60 tokens"),
    ],
)
def test_what_can_never_run_is_refused(
    prompt: list[int], fields: dict[str, object], code: str, words: str
) -> None:
    bench = Bench(num_blocks=8, max_model_len=50)
    bench.submit("a", prompt, 5, **fields)
    bench.run()
    (failure,) = bench.events["a"]
    assert isinstance(failure, RequestFailed)
    assert failure.code == code and words in failure.message
    assert bench.pool == (0, 8)


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("length", [1, 4, 7, 17])
def test_beams_are_those_of_the_unpaged_search(length: int, width: int) -> None:
    bench = Bench()
    prompt = [i % 7 for i in range(length)]
    beam = BeamParams(width)
    bench.submit("a", prompt, 9, n=width, beam=beam)
    bench.run()
    expected = expected_beams(prompt, beam, 9, width)
    assert outputs_of(bench.events["a"], width) == [list(b.tokens) for b in expected]
    assert [e.score for e in bench.finish("a")] == pytest.approx([b.score for b in expected])
    # One prompt, and at each of the 8 later steps at most one copy for a beam that another one branched off.
    assert bench.runner.num_computed_tokens <= length + 8 * width
    assert bench.runner.num_copies <= 8 * width
    assert bench.pool == (0, 64)


def test_beams_are_preempted_together_and_come_back_the_same() -> None:
    bench = Bench(num_blocks=13, max_num_batched_tokens=16)
    beam = BeamParams(3)
    bench.submit("plain", [9, 9, 9, 9, 9], 40)
    for _ in range(16):
        bench.engine.step()
    bench.submit("beams", [1, 2, 3, 4, 5, 6], 12, n=3, beam=beam)
    bench.run()
    assert bench.engine.report().stats.preemptions_total >= 3
    expected = expected_beams([1, 2, 3, 4, 5, 6], beam, 12, 3)
    assert outputs_of(bench.events["beams"], 3) == [list(b.tokens) for b in expected]
    assert outputs_of(bench.events["plain"]) == [expected_output([9] * 5, 40)]


def test_too_many_beams_for_the_pool_are_refused() -> None:
    bench = Bench(num_blocks=8)
    bench.submit("a", [1] * 8, 16, n=4, beam=BeamParams(4))
    bench.run()
    (failure,) = bench.events["a"]
    assert isinstance(failure, RequestFailed)
    assert "4 beams of 8 + 16 tokens take 18 blocks" in failure.message


def test_siblings_wait_for_the_first_to_fill_the_cache() -> None:
    bench = Bench(max_num_batched_tokens=8)
    prompts = {f"r{i}": [*range(24), i] for i in range(6)}
    for name, prompt in prompts.items():
        bench.submit(name, prompt, 3)
    bench.run()
    assert bench.runner.num_computed_tokens <= 25 + 5 * 1 + 6 * 2
    for name, prompt in prompts.items():
        assert outputs_of(bench.events[name]) == [expected_output(prompt, 3)]


def test_a_lower_priority_number_is_served_first() -> None:
    bench = Bench(max_num_seqs=1)
    for name, priority in (("late", 5), ("mid", 0), ("first", -5)):
        bench.submit(name, [1, 2, 3], 4, priority=priority)
    finished: list[str] = []
    while bench.engine.step():
        finished += [n for n in bench.events if bench.finish(n) and n not in finished]
    finished += [n for n in bench.events if n not in finished]
    assert finished == ["first", "mid", "late"]


def test_a_known_head_of_a_block_is_copied_not_computed() -> None:
    bench = Bench()
    bench.submit("a", [1, 2, 3, 4, 5, 6, 7, 8], 1)
    bench.run()
    computed = bench.runner.num_computed_tokens
    bench.submit("b", [1, 2, 3, 4, 5, 6, 9, 9], 1)
    bench.run()
    assert bench.started("b").num_cached_tokens == 6
    assert bench.runner.num_computed_tokens - computed == 2
    assert bench.runner.num_copies == 1
    assert outputs_of(bench.events["b"]) == [expected_output([1, 2, 3, 4, 5, 6, 9, 9], 1)]


def test_short_heads_are_computed_when_told_so() -> None:
    bench = Bench(min_partial_tokens=3)
    for name, tail in (("a", [5, 6, 7, 8]), ("b", [5, 6, 9, 9]), ("c", [5, 6, 7, 9])):
        bench.submit(name, [1, 2, 3, 4, *tail], 1)
        bench.run()
    assert [bench.started(n).num_cached_tokens for n in "abc"] == [0, 4, 7]


def test_a_request_id_in_use_is_refused_and_the_first_goes_on() -> None:
    bench = Bench()
    bench.submit("a", [1, 2], 3)
    first = bench.events["a"]
    bench.submit("a", [1, 2], 3)
    bench.run()
    assert isinstance(bench.events["a"][0], RequestFailed)
    assert outputs_of(first) == [expected_output([1, 2], 3)]


def test_a_full_waiting_room_says_so() -> None:
    bench = Bench(max_num_waiting=2)
    for i in range(4):
        bench.submit(f"r{i}", [1, 2], 3)
    bench.run()
    codes = [
        e.code for i in range(4) for e in bench.events[f"r{i}"] if isinstance(e, RequestFailed)
    ]
    assert codes == ["overloaded", "overloaded"]


def test_an_end_token_ends_and_is_not_emitted() -> None:
    bench = Bench()
    output = expected_output([1, 2, 3], 20)
    stop = output[6]
    bench.submit("a", [1, 2, 3], 20, stop_token_ids=(stop,))
    bench.run()
    assert outputs_of(bench.events["a"]) == [output[: output.index(stop)]]
    assert bench.finish("a") == [SequenceFinished(0, FinishReason.STOP)]


def test_a_cancelled_request_frees_its_blocks_before_the_next_step() -> None:
    bench = Bench()
    bench.submit("a", [1] * 10, 1000, n=3)
    bench.submit("b", [2] * 10, 5)
    for _ in range(3):
        bench.engine.step()
    bench.engine.cancel("a")
    bench.engine.step()
    told = len(bench.events["a"])
    bench.run()
    assert len(bench.events["a"]) == told
    assert outputs_of(bench.events["b"]) == [expected_output([2] * 10, 5)]
    assert bench.pool == (0, 64)


def test_a_step_that_breaks_fails_its_requests_and_nothing_else() -> None:
    bench = Bench()
    bench.submit("a", [1, 2, 3], 5)
    launch, bench.runner.launch = bench.runner.launch, None  # type: ignore[assignment,method-assign]
    bench.engine.step()
    bench.runner.launch = launch  # type: ignore[method-assign]
    assert isinstance(bench.events["a"][-1], RequestFailed)
    bench.submit("b", [1, 2, 3], 5)
    bench.run()
    assert outputs_of(bench.events["b"]) == [expected_output([1, 2, 3], 5)]
    assert bench.pool == (0, 64)


class BrokenStep:
    def results(self) -> list[RowResult]:
        raise RuntimeError("the device has failed")


def test_results_that_never_come_fail_the_step_and_the_one_launched_behind_it() -> None:
    bench = Bench()
    bench.submit("a", [1, 2, 3], 9)
    bench.engine.step()
    bench.submit("b", [4, 5, 6], 9)
    launch = bench.runner.launch

    def launch_broken(plan: StepPlan) -> BrokenStep:
        launch(plan)
        return BrokenStep()

    bench.runner.launch = launch_broken  # type: ignore[method-assign,assignment]
    bench.engine.step()
    bench.runner.launch = launch  # type: ignore[method-assign]
    bench.submit("d", [7, 8, 9], 9)
    bench.run()
    if Bench.plans_ahead:  # its prompt was launched behind the broken step
        assert isinstance(bench.events["d"][-1], RequestFailed)
    else:
        assert outputs_of(bench.events["d"]) == [expected_output([7, 8, 9], 9)]
    # In turn, the step that broke has both; ahead, the one before it is whole, and "b" may be behind it.
    for name, prompt in {"a": [1, 2, 3], "b": [4, 5, 6]}.items():
        (told,) = outputs_of(bench.events[name])
        expected = expected_output(prompt, 9)
        is_failed = isinstance(bench.events[name][-1], RequestFailed)
        assert told == (expected[: len(told)] if is_failed else expected)
    assert isinstance(bench.events["a"][-1], RequestFailed)
    bench.submit("c", [1, 2, 3], 5)
    bench.run()
    assert outputs_of(bench.events["c"]) == [expected_output([1, 2, 3], 5)]
    assert bench.pool == (0, 64)


def test_clearing_the_cache_while_a_sequence_runs() -> None:
    bench = Bench()
    bench.submit("a", list(range(9)), 12)
    for _ in range(4):
        bench.engine.step()
    bench.engine._scheduler.memory.tree.clear()
    bench.run()
    assert outputs_of(bench.events["a"]) == [expected_output(list(range(9)), 12)]
    bench.submit("b", list(range(9)), 1)
    bench.run()
    assert bench.started("b").num_cached_tokens == 8


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=30), st.integers(1, 20))
def test_tokens_are_told_one_by_one_and_once(prompt: list[int], max_tokens: int) -> None:
    bench = Bench(num_blocks=16)
    bench.submit("a", prompt, max_tokens)
    bench.run()
    told = [e for e in bench.events["a"] if isinstance(e, TokensEmitted)]
    assert [e.token_ids[0] for e in told] == expected_output(prompt, max_tokens)
    assert next_token(prompt, 0) == told[0].token_ids[0]
