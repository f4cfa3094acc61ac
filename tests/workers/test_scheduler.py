"""The scheduler driven step by step over a fake model whose output depends on every slot it reads."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from slot_model import SlotRunner, expected_output, make_info, make_request, next_token, outputs_of

from workers.engine import Engine
from workers.options import SchedulerOptions
from workers.protocol import (
    EngineEvent,
    FinishReason,
    RequestFailed,
    RequestStarted,
    SequenceFinished,
    TokensEmitted,
)

BLOCK = 4


class Bench:
    """One engine without its thread, and everything each request was told."""

    def __init__(self, num_blocks: int = 64, **options: int | bool) -> None:
        self.runner = SlotRunner(num_blocks, BLOCK)
        info = make_info(num_blocks, BLOCK, options.get("max_model_len", 4096))
        self.engine = Engine(self.runner, info, SchedulerOptions(**options), frozenset({49}))  # type: ignore[arg-type]
        self.events: dict[str, list[EngineEvent]] = {}

    def submit(self, request_id: str, prompt: list[int], max_tokens: int, **fields: object) -> None:
        told = self.events[request_id] = []
        self.engine.submit(make_request(request_id, prompt, max_tokens, **fields), told.extend)  # type: ignore[arg-type]

    def run(self) -> None:
        for _ in range(10_000):
            if not self.engine.step():
                return
            self.engine.check_invariants()
        raise AssertionError("the engine never came to rest")

    def started(self, request_id: str) -> RequestStarted:
        return next(e for e in self.events[request_id] if isinstance(e, RequestStarted))

    def finish(self, request_id: str) -> list[SequenceFinished]:
        return [e for e in self.events[request_id] if isinstance(e, SequenceFinished)]

    @property
    def pool(self) -> tuple[int, int]:
        stats = self.engine.report().stats
        return stats.num_used_blocks, stats.num_free_blocks + stats.num_cached_blocks


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
def test_a_second_time_all_full_blocks_but_the_last_token_are_reused(length: int) -> None:
    bench = Bench()
    prompt = [i % 7 for i in range(length)]
    for name in ("a", "b"):
        bench.submit(name, prompt, 5)
        bench.run()
    assert bench.started("a").num_cached_tokens == 0
    assert bench.started("b").num_cached_tokens == (length - 1) // BLOCK * BLOCK
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
    assert [bench.started(n).num_cached_tokens for n in "abc"] == [0, 0, 16]


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
    pool = bench.engine._scheduler.pool
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
    run, bench.runner.run = bench.runner.run, None  # type: ignore[assignment,method-assign]
    bench.engine.step()
    bench.runner.run = run  # type: ignore[method-assign]
    assert isinstance(bench.events["a"][-1], RequestFailed)
    bench.submit("b", [1, 2, 3], 5)
    bench.run()
    assert outputs_of(bench.events["b"]) == [expected_output([1, 2, 3], 5)]
    assert bench.pool == (0, 64)


def test_clearing_the_cache_while_a_sequence_runs() -> None:
    bench = Bench()
    bench.submit("a", list(range(9)), 12)
    for _ in range(4):
        bench.engine.step()
    bench.engine._scheduler.tree.clear()
    bench.run()
    assert outputs_of(bench.events["a"]) == [expected_output(list(range(9)), 12)]
    bench.submit("b", list(range(9)), 1)
    bench.run()
    assert bench.started("b").num_cached_tokens == 8


class EngineMachine(RuleBasedStateMachine):
    """Random requests with shared prefixes, forks and cancels over a pool that is far too small."""

    def __init__(self) -> None:
        super().__init__()
        self.bench = Bench(num_blocks=9, max_num_batched_tokens=7, max_num_seqs=5)
        self.expected: dict[str, list[list[int]]] = {}
        self.cancelled: set[str] = set()

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=14),
        max_tokens=st.integers(1, 14),
        n=st.integers(1, 3),
        salt=st.sampled_from([b"x", b"y"]),
    )
    def submit(self, prompt: list[int], max_tokens: int, n: int, salt: bytes) -> None:
        name = f"r{len(self.expected)}"
        self.expected[name] = [expected_output(prompt, max_tokens, k) for k in range(n)]
        self.bench.submit(name, prompt, max_tokens, n=n, salt=salt)

    @rule(num_steps=st.integers(1, 6))
    def steps(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.bench.engine.step()
            self.bench.engine.check_invariants()

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.expected)))
        self.cancelled.add(name)
        self.bench.engine.cancel(name)

    @invariant()
    def nothing_wrong_was_said(self) -> None:
        for name, outputs in self.expected.items():
            for got, want in zip(
                outputs_of(self.bench.events[name], len(outputs)), outputs, strict=True
            ):
                assert got == want[: len(got)]

    def teardown(self) -> None:
        self.bench.run()
        self.bench.engine.check_invariants()
        assert self.bench.pool == (0, 9)
        for name, outputs in self.expected.items():
            if name not in self.cancelled:
                assert outputs_of(self.bench.events[name], len(outputs)) == outputs
                assert len(self.bench.finish(name)) == len(outputs)


EngineMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=30, deadline=None)
TestEngineMachine = EngineMachine.TestCase


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=30), st.integers(1, 20))
def test_tokens_are_told_one_by_one_and_once(prompt: list[int], max_tokens: int) -> None:
    bench = Bench(num_blocks=16)
    bench.submit("a", prompt, max_tokens)
    bench.run()
    told = [e for e in bench.events["a"] if isinstance(e, TokensEmitted)]
    assert [e.token_ids[0] for e in told] == expected_output(prompt, max_tokens)
    assert next_token(prompt, 0) == told[0].token_ids[0]
