"""Captured decode steps, planned ahead or not, against steps launched one by one."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slot_model import make_request, outputs_of
from tensor_slot_model import Rerun, make_engine

from workers.options import SchedulerOptions
from workers.protocol import EngineEvent, SequenceFinished

requests = st.lists(
    st.fixed_dictionaries(
        {
            "prompt": st.lists(st.integers(0, 3), min_size=1, max_size=12),
            "max_tokens": st.integers(1, 12),
            "n": st.integers(1, 2),
            "temperature": st.sampled_from([0.0, 1.0]),
            "logprobs": st.sampled_from([None, 2]),
            "stop_token_ids": st.lists(st.integers(0, 49), max_size=8).map(tuple),
            "presence_penalty": st.sampled_from([0.0, 0.0, 0.0, 0.5]),
            "num_steps": st.integers(0, 4),
        }
    ),
    min_size=1,
    max_size=6,
)


def serve(
    asked: list[dict[str, object]], num_blocks: int, *, is_captured: bool, plans_ahead: bool
) -> list[list[EngineEvent]]:
    """What each request is told when it comes so many steps after the one before it."""
    limits = SchedulerOptions(max_num_seqs=5, max_num_batched_tokens=9, max_model_len=40)
    engine = make_engine(
        num_blocks, limits, capture=Rerun if is_captured else None, plans_ahead=plans_ahead
    )
    told: list[list[EngineEvent]] = []
    for i, fields in enumerate(asked):
        rest = dict(fields)
        num_steps = rest.pop("num_steps")
        told.append([])
        engine.submit(make_request(f"r{i}", **rest), told[-1].extend)  # type: ignore[arg-type]
        for _ in range(num_steps):  # type: ignore[call-overload]
            engine.step()
    while engine.step():
        engine.check_invariants()
    return told


@pytest.mark.parametrize("plans_ahead", [False, True])
@settings(max_examples=60)
@given(asked=requests, num_blocks=st.sampled_from([12, 64]))
def test_captured_steps_say_the_same(
    plans_ahead: bool, asked: list[dict[str, object]], num_blocks: int
) -> None:
    plain = serve(asked, num_blocks, is_captured=False, plans_ahead=False)
    captured = serve(asked, num_blocks, is_captured=True, plans_ahead=plans_ahead)
    for fields, mine, theirs in zip(asked, captured, plain, strict=True):
        n = int(fields["n"])  # type: ignore[call-overload]
        assert outputs_of(mine, n) == outputs_of(theirs, n)
        assert [e for e in mine if isinstance(e, SequenceFinished)] == [
            e for e in theirs if isinstance(e, SequenceFinished)
        ]


def test_decoding_is_replayed_and_the_rest_is_not() -> None:
    Rerun.num_replays = 0
    asked = [{"prompt": [1] * 20, "max_tokens": 5, "num_steps": 0}]
    serve(asked, 64, is_captured=True, plans_ahead=True)
    # Twenty prompt tokens in chunks of nine take three steps, the last of which draws the first token.
    assert Rerun.num_replays == 4
