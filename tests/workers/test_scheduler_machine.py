"""The scheduler under random requests, cancels and a pool that is far too small."""

from dataclasses import dataclass
from itertools import takewhile

import pytest
from engine_bench import Bench
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from slot_model import expected_beams, expected_output, outputs_of

from workers.options import POLICIES
from workers.protocol import BeamParams


@dataclass
class Expected:
    """What a request must be told: the tokens of each of its sequences, and of beams the scores."""

    outputs: list[list[int]]
    scores: list[float] | None = None


class EngineMachine(RuleBasedStateMachine):
    """Random requests with shared prefixes, forks, beams, priorities and cancels over a pool far too small."""

    def __init__(self) -> None:
        super().__init__()
        self.expected: dict[str, Expected] = {}
        self.cancelled: set[str] = set()

    @initialize(eviction=st.sampled_from(POLICIES), plans_ahead=st.booleans())
    def begin(self, eviction: str, plans_ahead: bool) -> None:
        Bench.plans_ahead = plans_ahead
        self.bench = Bench(
            num_blocks=10, max_num_batched_tokens=7, max_num_seqs=5, eviction=eviction
        )

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=14),
        max_tokens=st.integers(1, 14),
        n=st.integers(1, 3),
        salt=st.sampled_from([b"x", b"y"]),
        priority=st.integers(-1, 1),
        stops=st.frozensets(st.integers(0, 49), max_size=12),
    )
    def submit(
        self,
        prompt: list[int],
        max_tokens: int,
        n: int,
        salt: bytes,
        priority: int,
        stops: frozenset[int],
    ) -> None:
        name = f"r{len(self.expected)}"
        outputs = [
            list(takewhile(lambda t: t not in stops, expected_output(prompt, max_tokens, k)))
            for k in range(n)
        ]
        self.expected[name] = Expected(outputs)
        self.bench.submit(
            name, prompt, max_tokens, n=n, salt=salt, priority=priority, stop_token_ids=tuple(stops)
        )

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=9),
        max_tokens=st.integers(1, 6),
        width=st.integers(1, 3),
        early_stopping=st.sampled_from([True, False, None]),
        stops=st.frozensets(st.integers(0, 49), max_size=2),
    )
    def submit_beams(
        self,
        prompt: list[int],
        max_tokens: int,
        width: int,
        early_stopping: bool | None,
        stops: frozenset[int],
    ) -> None:
        name = f"r{len(self.expected)}"
        beam = BeamParams(width, 1.0, early_stopping)
        results = expected_beams(prompt, beam, max_tokens, width, stops)
        self.expected[name] = Expected(
            [list(r.tokens) for r in results], [r.score for r in results]
        )
        self.bench.submit(name, prompt, max_tokens, n=width, beam=beam, stop_token_ids=tuple(stops))

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

    @rule()
    def clear(self) -> None:
        self.bench.engine._scheduler.memory.tree.clear()

    @invariant()
    def nothing_wrong_was_said(self) -> None:
        for name, expected in self.expected.items():
            told = outputs_of(self.bench.events[name], len(expected.outputs))
            for got, want in zip(told, expected.outputs, strict=True):
                assert got == want[: len(got)]

    def teardown(self) -> None:
        self.bench.run()
        self.bench.engine.check_invariants()
        assert self.bench.pool == (0, 10)
        for name, expected in self.expected.items():
            if name in self.cancelled:
                continue
            told = self.bench.events[name]
            assert outputs_of(told, len(expected.outputs)) == expected.outputs
            assert len(self.bench.finish(name)) == len(expected.outputs)
            if expected.scores is not None:
                assert [e.score for e in self.bench.finish(name)] == pytest.approx(expected.scores)


# 350 runs of up to 60 operations: twenty thousand of them.
EngineMachine.TestCase.settings = settings(max_examples=350, stateful_step_count=60)
TestEngineMachine = EngineMachine.TestCase


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_million_operations() -> None:
    marathon = settings(
        max_examples=17_000,
        stateful_step_count=60,
        phases=[Phase.generate],
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(EngineMachine, settings=marathon)
