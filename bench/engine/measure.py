"""The order of the measurements: all arms warm, then round by round and task by task, one arm after another."""

import fcntl
import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from time import perf_counter, sleep
from typing import Any, NamedTuple

from bench.engine.arm import Arm
from bench.engine.arm_process import ArmFailed, ArmProcess
from bench.engine.ceilings import Ceilings
from bench.engine.tasks import Metric, Sample, Sizes, TaskRun, metrics_of, run_task

START, MEMORY = Metric("start"), Metric("memory")
# Threads of the arm before may spin for a fifth of a second after their last work.
_SETTLE_S = 0.3


class Spread(NamedTuple):
    median: float
    low: float
    high: float
    num_rounds: int


@dataclass
class Results:
    """Attributes:
    samples: by arm and metric, one a round.
    ceilings: one a round.
    arm_to_tokens: what each arm generated in the first round of the smallest batch.
    failures: what happened to arms that gave up.
    """

    samples: dict[tuple[str, Metric], list[float]] = field(
        default_factory=lambda: defaultdict(list)
    )
    ceilings: list[Ceilings] = field(default_factory=list)
    arm_to_tokens: dict[str, list[int]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def spread(self, arm: str, metric: Metric) -> Spread | None:
        """None where nothing was measured."""
        values = self.samples.get((arm, metric))
        if not values:
            return None
        return Spread(median(values), min(values), max(values), len(values))

    def best_ceilings(self) -> Ceilings:
        """Each ceiling's best round: what the machine gives when nobody disturbs it."""
        names = ("read_bytes_per_s", "fp32_flops", "bf16_flops")
        return Ceilings(*(max(getattr(c, name) for c in self.ceilings) for name in names))

    def add(self, arm: str, sample: Sample) -> None:
        self.samples[arm, sample.metric].append(sample.value)


@dataclass(frozen=True)
class Setup:
    """What all arms share.

    Attributes:
        settings: what each arm's process is told: model_dir, num_threads.
        lock: a file that is locked while something is measured, so that several measuring programs take turns.
        log_dir: one log for each arm.
    """

    settings: dict[str, Any]
    sizes: Sizes
    num_rounds: int
    log_dir: Path
    vllm_python: Path | None = None
    lock: Path | None = None

    def start(self, arm: Arm) -> ArmProcess:
        log = self.log_dir / f"{arm.name}.log"
        return ArmProcess(arm, self.settings, log, self.vllm_python)

    @contextmanager
    def turn(self) -> Iterator[None]:
        if self.lock is None:
            sleep(_SETTLE_S)
            yield
            return
        with self.lock.open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            sleep(_SETTLE_S)
            yield


Say = Callable[[str], None]


def num_measurements(arms: Sequence[Arm], setup: Setup) -> int:
    """How often `measure_all` will report progress."""
    num_metrics = sum(
        len(metrics_of(setup.sizes, has_prefix_cache=arm.has_prefix_cache)) for arm in arms
    )
    return num_metrics * (setup.num_rounds + 1) + len(arms) * setup.num_rounds


def measure_all(arms: Sequence[Arm], setup: Setup, say: Say) -> Results:
    """Everything but the profile. An arm that fails is left out from there on, and named in the results.

    Args:
        say: hears what is measured next, once for each measurement.
    """
    results = Results()
    _measure_starts(arms, setup, results, say)
    with ExitStack() as stack:
        running: list[ArmProcess] = []
        for arm in arms:
            with _giving_up(arm, running, results):
                process = stack.enter_context(setup.start(arm))
                running.append(process)
                _warm(process, setup, say)
        for turn in range(setup.num_rounds):
            with setup.turn():
                results.ceilings.append(_ceilings(setup))
            _measure_round(running, turn, setup, results, say)
    return results


def _measure_starts(arms: Sequence[Arm], setup: Setup, results: Results, say: Say) -> None:
    """From the process's start to its first token, its files read before. Nothing else runs meanwhile."""
    for turn in range(setup.num_rounds):
        for arm in arms:
            say(f"{arm.name}: start {turn + 1}")
            with setup.turn(), _giving_up(arm, [], results), setup.start(arm) as process:
                process.generate([[setup.sizes.end_token // 2]], 1)
                results.add(arm.name, Sample(START, perf_counter() - process.begin))


def _warm(process: ArmProcess, setup: Setup, say: Say) -> None:
    """Every shape once: first-time costs are paid when a server starts, not by its users."""
    for metric in metrics_of(setup.sizes, has_prefix_cache=process.arm.has_prefix_cache):
        say(f"{process.arm.name}: warming {_name(metric)}")
        run_task(process.generate, metric, setup.sizes, "warm")


def _measure_round(
    running: list[ArmProcess], turn: int, setup: Setup, results: Results, say: Say
) -> None:
    longest = max((p.arm for p in running), key=lambda arm: arm.has_prefix_cache, default=None)
    if longest is None:
        return
    for metric in metrics_of(setup.sizes, has_prefix_cache=longest.has_prefix_cache):
        for process in list(running):
            arm = process.arm
            if metric not in metrics_of(setup.sizes, has_prefix_cache=arm.has_prefix_cache):
                continue
            say(f"round {turn + 1}: {arm.name}: {_name(metric)}")
            with setup.turn(), _giving_up(arm, running, results):
                run = run_task(process.generate, metric, setup.sizes, f"round {turn}")
                _keep(arm.name, metric, run, results)


def _keep(arm: str, metric: Metric, run: TaskRun, results: Results) -> None:
    results.add(arm, run.sample)
    results.samples[arm, MEMORY] = [float(run.peak_rss_bytes)]
    if metric.kind == "decode":
        results.arm_to_tokens.setdefault(arm, run.tokens[0])


@contextmanager
def _giving_up(arm: Arm, running: list[ArmProcess], results: Results) -> Iterator[None]:
    try:
        yield
    except ArmFailed as error:
        results.failures.append(str(error))
        running[:] = [process for process in running if process.arm is not arm]


def _ceilings(setup: Setup) -> Ceilings:
    threads = str(setup.settings["num_threads"])
    command = [sys.executable, "-m", "bench.engine.ceilings", "--threads", threads]
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=root)
    return Ceilings(**json.loads(done.stdout))


def _name(metric: Metric) -> str:
    return f"{metric.kind} {metric.size}"
