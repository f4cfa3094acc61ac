"""Where the time of Pando's steps goes, by clocks around its parts.

The parts are timed where they are called, and each one's time is its own: what it calls and is timed too is taken
off. The clocks cost a microsecond a call, some two hundred calls a step.
"""

import functools
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

from bench.engine.arm import Arm
from bench.engine.arms.pando import Batch, engine_of
from bench.kv_memory.report import Cell, Column, Table
from kernels import dispatch
from workers import model_runner
from workers.engine import Engine
from workers.layers.cpu_linear import Int8Linear, PackedLinear
from workers.layers.linear import Linear
from workers.layers.rotary import RotaryEmbedding
from workers.model_runner import ModelRunner, RunningStep
from workers.models.decoder import CausalLM
from workers.scheduler import Scheduler
from workers.step_inputs import InputBuilder

_OTHER = "engine, other"
_PROMPT_TOKENS = 16
_NUM_STEPS = 24
_NUM_WARM_STEPS = 4


class Part(NamedTuple):
    """A callable found as `owner.name`, and which part of a step it is."""

    owner: Any
    name: str
    label: str


def parts() -> list[Part]:
    """Everything timed; what is left of a step is the engine's own."""
    return [
        Part(Linear, "__call__", "linear"),
        Part(PackedLinear, "__call__", "linear"),
        Part(Int8Linear, "__call__", "linear"),
        Part(CausalLM, "logits", "head, cast to float32"),
        Part(dispatch, "paged_attention", "attention"),
        Part(dispatch, "rotate_and_write", "rotate and write"),
        Part(dispatch, "rms_norm", "norm"),
        Part(dispatch, "add_rms_norm", "norm"),
        Part(dispatch, "silu_mul", "silu and multiply"),
        Part(RotaryEmbedding, "__call__", "angles"),
        Part(CausalLM, "forward", "model, other"),
        Part(model_runner, "draw", "sampling"),
        Part(RunningStep, "results", "sampling"),
        Part(InputBuilder, "build", "input building"),
        Part(InputBuilder, "batch", "input building"),
        Part(ModelRunner, "launch", "runner, other"),
        Part(Scheduler, "plan", "scheduler"),
        Part(Scheduler, "commit", "scheduler"),
    ]


class Stopwatch:
    """Own times by label; the time of what is called inside is not counted twice."""

    def __init__(self) -> None:
        self.label_to_s: defaultdict[str, float] = defaultdict(float)
        self._inner_s = [0.0]

    def around(self, label: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call`, timed."""

        @functools.wraps(call)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._inner_s.append(0.0)
            begin = perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                seconds = perf_counter() - begin
                self.label_to_s[label] += seconds - self._inner_s.pop()
                self._inner_s[-1] += seconds

        return timed


@contextmanager
def timed_parts(watch: Stopwatch) -> Iterator[None]:
    """All parts timed, until the block ends."""
    originals = [(part, getattr(part.owner, part.name)) for part in parts()]
    try:
        for part, original in originals:
            setattr(part.owner, part.name, watch.around(part.label, original))
        yield
    finally:
        for part, original in originals:
            setattr(part.owner, part.name, original)


def profile_tables(
    arms: Sequence[Arm],
    model_dir: Path,
    num_threads: int,
    batches: Sequence[int] = (1, 8, 32),
    num_prefilled: int = 512,
) -> list[Table]:
    """One table for each of Pando's arms: milliseconds a step, by part."""
    shared = {"model_dir": str(model_dir), "num_threads": num_threads}
    return [
        _table(arm, {**shared, **arm.settings, "dtype": arm.dtype}, batches, num_prefilled)
        for arm in arms
        if arm.engine == "pando"
    ]


def _table(arm: Arm, settings: dict[str, Any], batches: Sequence[int], num_prefilled: int) -> Table:
    engine = engine_of(settings)
    heading_to_times = {f"decode {batch}": profile_decode(engine, batch) for batch in batches}
    heading_to_times[f"prefill {num_prefilled}"] = profile_prefill(engine, num_prefilled)
    labels = list(dict.fromkeys([part.label for part in parts()] + [_OTHER]))
    rows: list[tuple[Cell, ...]] = [
        (label, *(times.get(label, 0.0) for times in heading_to_times.values())) for label in labels
    ]
    rows.sort(key=lambda row: -float(row[1] or 0))
    rows.append(("a whole step", *(sum(times.values()) for times in heading_to_times.values())))
    columns = (
        Column("part", "part"),
        *(
            Column(heading.replace(" ", "_") + "_s", heading, "seconds")
            for heading in heading_to_times
        ),
    )
    note = (
        f"Means over {_NUM_STEPS} steps of decoding after {_PROMPT_TOKENS} tokens; of one prompt."
    )
    title = f"Where the time of a step goes: {arm.name}"
    return Table(f"engine_profile_{arm.name}", title, columns, tuple(rows), (note,))


def profile_decode(engine: Engine, batch: int) -> dict[str, float]:
    """Seconds a step by part, while `batch` sequences decode."""
    draw = random.Random(batch)
    vocab_size = engine.info.vocab_size
    prompts = [[draw.randrange(vocab_size) for _ in range(_PROMPT_TOKENS)] for _ in range(batch)]
    requests = Batch(engine, prompts, _NUM_STEPS + _NUM_WARM_STEPS + batch, f"decode-{batch}")
    while engine.report().stats.num_running < batch or engine.report().stats.num_waiting:
        engine.step()
    for _ in range(_NUM_WARM_STEPS):
        engine.step()
    times = _timed(engine, _NUM_STEPS)
    _finish(engine, requests)
    return times


def profile_prefill(engine: Engine, num_tokens: int) -> dict[str, float]:
    """Seconds by part, for all the steps of one prompt."""
    draw = random.Random(num_tokens)
    for name in ("warm", "timed"):
        prompt = [draw.randrange(engine.info.vocab_size) for _ in range(num_tokens)]
        requests = Batch(engine, [prompt], 1, f"prefill-{name}")
        watch = Stopwatch()
        with timed_parts(watch):
            _finish(engine, requests, watch.around(_OTHER, engine.step))
    return dict(watch.label_to_s)


def _timed(engine: Engine, num_steps: int) -> dict[str, float]:
    watch = Stopwatch()
    with timed_parts(watch):
        step = watch.around(_OTHER, engine.step)
        for _ in range(num_steps):
            step()
    return {label: seconds / num_steps for label, seconds in watch.label_to_s.items()}


def _finish(engine: Engine, requests: Batch, step: Callable[[], object] | None = None) -> None:
    while not requests.is_done:
        (step or engine.step)()
    requests.wait()
