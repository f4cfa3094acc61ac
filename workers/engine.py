"""The engine: a step loop around a scheduler and a runner. Needs neither Ray nor Redis.

Any thread may `submit`, `cancel` and `report`; everything else happens on the loop's own thread, so the
scheduler needs no lock. A request's events reach its sink in batches, from that thread.
"""

import logging
import secrets
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from kvstore.block_pool import BlockPool
from kvstore.eviction.choice import policy_named
from kvstore.radix_messages import Change, ChangeKind
from kvstore.radix_tree import RadixTree
from kvstore.reuse.meter import ReuseMeter
from workers.errors import PandoError
from workers.options import SchedulerOptions
from workers.protocol import (
    EngineEvent,
    GenerateRequest,
    ReplicaInfo,
    ReplicaReport,
    ReplicaStats,
    RequestFailed,
)
from workers.reuse_report import predicted_hit_ratios
from workers.scheduler import Scheduler
from workers.sequence_memory import SequenceMemory
from workers.step_plan import RowResult, StepPlan

logger = logging.getLogger(__name__)

Sink = Callable[[tuple[EngineEvent, ...]], None]


class LaunchedStep(Protocol):
    """A step on its way."""

    def results(self) -> list[RowResult]:
        """For each row what it asked for; waits for it."""
        ...


class Runner(Protocol):
    """What the loop needs of `workers.model_runner.ModelRunner`."""

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Begin a step. Steps run in the order of their launches, each after the ones before it."""
        ...


@dataclass(frozen=True, slots=True)
class _InFlight:
    plan: StepPlan
    step: LaunchedStep


class IndexSink(Protocol):
    """Where changes of the radix tree go. Must neither block nor raise."""

    is_connected: bool

    def sealed(self, hashes: tuple[bytes, ...]) -> None: ...
    def evicted(self, hashes: tuple[bytes, ...]) -> None: ...
    def cleared(self) -> None: ...


class NoIndex:
    """An engine on its own publishes nothing."""

    is_connected = False

    def sealed(self, hashes: tuple[bytes, ...]) -> None: ...
    def evicted(self, hashes: tuple[bytes, ...]) -> None: ...
    def cleared(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _Submit:
    request: GenerateRequest
    sink: Sink


@dataclass(frozen=True, slots=True)
class _Cancel:
    request_id: str


@dataclass(frozen=True, slots=True)
class _ClearCache:
    done: threading.Event


_Command = _Submit | _Cancel | _ClearCache


class Engine:
    """Continuous batching over one model on one device.

    Args:
        runner: carries plans out.
        info: who this replica is; its block count, block size and fingerprint are those of the pool.
        options: limits of a step.
        eos_token_ids: end a sequence unless its request ignores them.
        index: hears what became or ceased to be reusable.
        plans_ahead: plan and launch the next step while one is still running. Pays where `launch` returns
            before the step has run, as on a CUDA device; a sequence that ends by a token nobody could
            foresee then costs one row of a step too many.

    Attributes:
        reuse: measures how blocks are reused; any thread may read it.
    """

    def __init__(
        self,
        runner: Runner,
        info: ReplicaInfo,
        options: SchedulerOptions,
        eos_token_ids: frozenset[int],
        index: IndexSink | None = None,
        *,
        plans_ahead: bool = False,
    ) -> None:
        self.info = info
        self._runner = runner
        self._eos_token_ids = eos_token_ids
        self._index: IndexSink = index if index is not None else NoIndex()
        self.reuse = ReuseMeter(info.num_blocks)
        pool = BlockPool(info.num_blocks)
        tree = RadixTree(pool, info.block_size, policy_named(options.eviction))
        memory = SequenceMemory(options, pool, tree, self.reuse)
        self._scheduler = Scheduler(options, memory, info)
        self._request_to_sink: dict[str, Sink] = {}
        self._plans_ahead = plans_ahead
        self._in_flight: _InFlight | None = None
        self._inbox: deque[_Command] = deque()
        self._wake = threading.Event()
        self._is_closing = False
        self._thread = threading.Thread(target=self._loop, name="pando-engine", daemon=True)

    def start(self) -> None:
        """Begin the step loop on its own thread."""
        self._thread.start()

    def close(self) -> None:
        """End the loop after the step in hand; requests still open hear nothing more."""
        self._is_closing = True
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join()

    def submit(self, request: GenerateRequest, sink: Sink) -> None:
        """Queue a request. What is wrong with it arrives at `sink` as `RequestFailed`."""
        self._post(_Submit(request, sink))

    def cancel(self, request_id: str) -> None:
        """Free all a request holds before the next step; its sink hears nothing more."""
        self._post(_Cancel(request_id))

    def clear_cache(self, timeout_s: float = 10.0) -> bool:
        """Forget every cached prefix, here and in the index; False when the loop did not get to it in time."""
        done = threading.Event()
        self._post(_ClearCache(done))
        return done.wait(timeout_s)

    def _post(self, command: _Command) -> None:
        self._inbox.append(command)
        self._wake.set()

    def report(self) -> ReplicaReport:
        """A snapshot of gauges and counters; single reads, so it may be a step apart in itself."""
        self.reuse.advance(time.monotonic())
        scheduler, counters = self._scheduler, self._scheduler.counters
        pool, tree = scheduler.memory.pool, scheduler.memory.tree
        stats = ReplicaStats(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting + len(self._inbox),
            num_free_blocks=pool.num_free,
            num_cached_blocks=pool.num_idle,
            num_used_blocks=pool.num_used,
            prompt_tokens_total=counters.prompt_tokens_total,
            cached_tokens_total=counters.cached_tokens_total,
            generation_tokens_total=counters.generation_tokens_total,
            preemptions_total=counters.preemptions_total,
            evicted_blocks_total=tree.num_evicted_total,
            requests_total=counters.requests_total,
            steps_total=counters.steps_total,
            digest=tree.digest,
            index_connected=self._index.is_connected,
            predicted_hit_ratios=predicted_hit_ratios(self.reuse, self.info.num_blocks),
        )
        return ReplicaReport(self.info, stats)

    @property
    def is_alive(self) -> bool:
        """Whether the step loop runs."""
        return self._thread.is_alive()

    def _loop(self) -> None:
        try:
            while not self._is_closing:
                if not self.step():
                    self._wake.wait()
                    self._wake.clear()
        except Exception:
            # Only a fault of our own gets here. The replica is replaced; nobody is left waiting for it.
            logger.critical("the step loop has ended", exc_info=True)
            for sink in self._request_to_sink.values():
                sink((RequestFailed("internal_error", "the replica has failed"),))

    def step(self) -> bool:
        """One turn: take commands, plan, launch, commit what has run, tell. False when there was nothing to do."""
        self._take_commands()
        if self._in_flight is None and self._scheduler.has_work:
            self._in_flight = self._launch(self._scheduler.plan())
        if self._in_flight is not None:
            self._in_flight = self._finish(self._in_flight)
        self._publish(self._scheduler.memory.tree.drain_changes())
        self._deliver()
        return self._in_flight is not None or self._scheduler.has_work or bool(self._inbox)

    def _finish(self, running: _InFlight) -> _InFlight | None:
        """Take in what a step computed; the step that was launched behind it meanwhile, if any."""
        following = None
        if self._plans_ahead and running.plan.is_predictable:
            self._scheduler.promise(running.plan)
            plan = self._scheduler.plan()
            following = self._launch(plan) if plan.rows or plan.copies else None
        try:
            results = running.step.results()
        except Exception:
            logger.exception("a step with %d sequences failed", len(running.plan.rows))
            self._fail(running.plan)
            # What was launched behind it read what it should have written.
            if following is not None:
                self._fail(following.plan)
            return None
        self._scheduler.commit(running.plan, results)
        return following

    def _launch(self, plan: StepPlan) -> _InFlight | None:
        try:
            return _InFlight(plan, self._runner.launch(plan))
        except Exception:
            logger.exception("a step with %d sequences could not be launched", len(plan.rows))
            self._fail(plan)
            return None

    def _take_commands(self) -> None:
        while self._inbox:
            match self._inbox.popleft():
                case _Submit(request, sink):
                    self._add(request, sink)
                case _Cancel(request_id):
                    self._request_to_sink.pop(request_id, None)
                    self._scheduler.abort(request_id)
                case _ClearCache(done):
                    self._scheduler.memory.tree.clear()
                    done.set()

    def _add(self, request: GenerateRequest, sink: Sink) -> None:
        seed = request.sampling.seed
        try:
            self._scheduler.add(
                request,
                seed=secrets.randbits(63) if seed is None else seed,
                eos_token_ids=self._eos_token_ids,
            )
        except PandoError as error:
            sink((RequestFailed(error.code, error.message, error.param),))
        else:
            self._request_to_sink[request.request_id] = sink

    def _fail(self, plan: StepPlan) -> None:
        """A step broke: its requests end with an error, the others and the engine live on."""
        failure = RequestFailed("internal_error", "the replica failed while computing this request")
        for request_id in {row.sequence.request_id for row in plan.rows}:
            self._scheduler.fail(request_id, failure)

    def _publish(self, changes: list[Change]) -> None:
        for change in changes:
            if change.kind is ChangeKind.SEALED:
                self._index.sealed(change.hashes)
            elif change.kind is ChangeKind.EVICTED:
                self._index.evicted(change.hashes)
            else:
                self._index.cleared()

    def _deliver(self) -> None:
        request_to_events: defaultdict[str, list[EngineEvent]] = defaultdict(list)
        for each in self._scheduler.drain_events():
            request_to_events[each.request_id].append(each.event)
        for request_id, events in request_to_events.items():
            self._tell(request_id, tuple(events))
            if not self._scheduler.is_open(request_id):
                self._request_to_sink.pop(request_id, None)

    def _tell(self, request_id: str, events: tuple[EngineEvent, ...]) -> None:
        sink = self._request_to_sink.get(request_id)
        if sink is None:
            return
        try:
            sink(events)
        except Exception:
            logger.warning(
                "request %s cannot be told its events; it is dropped", request_id, exc_info=True
            )
            self._request_to_sink.pop(request_id)
            self._scheduler.abort(request_id)

    def check_invariants(self) -> None:
        """Only while the loop stands still."""
        self._scheduler.check_invariants()
        assert all(self._scheduler.is_open(request_id) for request_id in self._request_to_sink)
