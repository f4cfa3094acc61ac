"""What runs next: continuous batching, chunked prefill, prefix reuse, forks, preemption by recompute.

Pure: events in (`add`, `abort`, `commit`), a `StepPlan` out; no tensors, clocks or threads. One caller, one
thread. Between two calls every block is accounted for (`check_invariants`).

    add → waiting ──plan──▶ running ──commit──▶ finished
              ▲                │
              └── preempt ─────┘   KV given up, tokens kept; mostly found again in the radix tree
"""

from array import array
from collections import deque
from dataclasses import dataclass, replace

from kvstore.block_pool import BlockPool
from kvstore.block_table import BlockCopy, BlockTable
from kvstore.prefix_hash import HASH_BYTES, root_hash, unpack_tokens
from kvstore.radix_tree import RadixTree
from workers.admission import check_admissible
from workers.errors import InvalidRequest, Overloaded
from workers.options import SchedulerOptions
from workers.protocol import (
    EngineEvent,
    FinishReason,
    GenerateRequest,
    RequestFailed,
    RequestStarted,
    SequenceFinished,
    TokensEmitted,
)
from workers.sequence import Sequence, SequenceState
from workers.step_plan import PlannedRow, SampledToken, StepPlan


@dataclass(frozen=True, slots=True)
class RequestEvent:
    """An event and the request it belongs to."""

    request_id: str
    event: EngineEvent


@dataclass(slots=True)
class SchedulerCounters:
    """Since the engine began."""

    requests_total: int = 0
    prompt_tokens_total: int = 0
    cached_tokens_total: int = 0
    generation_tokens_total: int = 0
    preemptions_total: int = 0
    steps_total: int = 0


class Scheduler:
    """Owns the sequences, their tables and the radix tree.

    Args:
        options: limits of a step.
        pool: block ids; the tree's and the tables' references are all taken from it.
        tree: known prefixes over the same pool.
        fingerprint: of the model and KV scheme; part of every root.
        replica_id, epoch: copied into `RequestStarted`.
    """

    def __init__(
        self,
        options: SchedulerOptions,
        pool: BlockPool,
        tree: RadixTree,
        *,
        block_size: int,
        fingerprint: str = "",
        replica_id: str = "local",
        epoch: str = "0",
    ) -> None:
        self.options = options
        self.pool = pool
        self.tree = tree
        self.counters = SchedulerCounters()
        self._block_size = block_size
        self._fingerprint = fingerprint
        self._replica_id = replica_id
        self._epoch = epoch
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._copies: list[BlockCopy] = []
        self._events: list[RequestEvent] = []
        self._request_to_num_open: dict[str, int] = {}

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting)

    def add(self, request: GenerateRequest, *, seed: int, eos_token_ids: frozenset[int]) -> None:
        """Put a request into the waiting room.

        Raises:
            InvalidRequest: an empty prompt, a request id that is in use.
            ContextTooLong: it could not be served even alone.
            Overloaded: the waiting room is full.
        """
        tokens = array("I", unpack_tokens(request.tokens))
        if self.is_open(request.request_id):
            raise InvalidRequest(f"request_id {request.request_id!r} is already in use")
        check_admissible(request, self.options, self.pool.num_blocks * self._block_size)
        if len(self._waiting) >= self.options.max_num_waiting:
            raise Overloaded(
                f"{len(self._waiting)} requests are waiting already", retry_after_s=1.0
            )
        sampling = request.sampling
        stop_token_ids = frozenset(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            stop_token_ids |= eos_token_ids
        sequence = Sequence(
            request_id=request.request_id,
            index=0,
            root=root_hash(self._fingerprint, request.salt),
            tokens=tokens,
            num_prompt_tokens=len(tokens),
            sampling=sampling,
            seed=seed,
            stop_token_ids=stop_token_ids,
            table=BlockTable(self._block_size),
            num_draws=request.n,
        )
        num_hash_bytes = len(tokens) // self._block_size * HASH_BYTES
        if request.fingerprint == self._fingerprint and len(request.block_hashes) == num_hash_bytes:
            sequence.hashes = bytearray(request.block_hashes)
        self._waiting.append(sequence)
        self._request_to_num_open[request.request_id] = request.n
        self.counters.requests_total += 1
        self.counters.prompt_tokens_total += len(tokens)

    def is_open(self, request_id: str) -> bool:
        """Whether any of its sequences has still to end."""
        return request_id in self._request_to_num_open

    def abort(self, request_id: str) -> bool:
        """Forget a request and free its blocks at once; emits nothing. False when it is not here."""
        if self._request_to_num_open.pop(request_id, None) is None:
            return False
        for sequence in [s for s in self._running if s.request_id == request_id]:
            self._retire(sequence)
        self._running = [s for s in self._running if s.request_id != request_id]
        self._waiting = deque(s for s in self._waiting if s.request_id != request_id)
        return True

    def fail(self, request_id: str, failure: RequestFailed) -> None:
        """Abort a request and tell it why."""
        if self.abort(request_id):
            self._events.append(RequestEvent(request_id, failure))

    def plan(self) -> StepPlan:
        """Decide the next step: sequences that run go on first, then waiting ones are admitted."""
        budget = self.options.max_num_batched_tokens
        rows: list[PlannedRow] = []
        num_preemptions_before = self.counters.preemptions_total
        for sequence in list(self._running):
            if budget == 0:
                break
            if sequence.state is not SequenceState.RUNNING:
                continue  # preempted for an earlier one in this very loop
            num_tokens = min(sequence.num_uncomputed_tokens, budget)
            if self._grow(sequence, sequence.num_computed_tokens + num_tokens):
                rows.append(self._row(sequence, num_tokens))
                budget -= num_tokens
        if self.counters.preemptions_total == num_preemptions_before:
            self._admit(rows, budget)
        copies, self._copies = tuple(self._copies), []
        self.counters.steps_total += 1
        return StepPlan(copies, tuple(rows))

    def _row(self, sequence: Sequence, num_tokens: int) -> PlannedRow:
        is_complete = num_tokens == sequence.num_uncomputed_tokens
        return PlannedRow(
            sequence,
            sequence.num_computed_tokens,
            num_tokens,
            sequence.num_draws if is_complete else 0,
        )

    def _grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Make the table hold `num_tokens`, preempting the youngest sequences if it must. False: it was itself one."""
        num_blocks = sequence.table.num_blocks_to_hold(num_tokens)
        while self.pool.num_available < num_blocks:
            victim = self._running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        self._allocate(sequence, num_blocks)
        return True

    def _allocate(self, sequence: Sequence, num_blocks: int) -> None:
        if self.pool.num_free < num_blocks:
            self.tree.evict(num_blocks - self.pool.num_free)
        sequence.table.append(self.pool.allocate(num_blocks))

    def _preempt(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        self._retire(sequence)
        sequence.state = SequenceState.WAITING
        sequence.num_computed_tokens = 0
        sequence.num_sealed_blocks = 0
        sequence.num_preemptions += 1
        self._waiting.appendleft(sequence)
        self.counters.preemptions_total += 1

    def _retire(self, sequence: Sequence) -> None:
        """Give the blocks back; what was sealed stays in the tree, freshly used."""
        # A copy that was planned into these blocks must not run once they belong to somebody else.
        self._copies = [c for c in self._copies if c.target not in sequence.table.block_ids]
        if self.options.enable_prefix_caching and sequence.num_sealed_blocks:
            num_tokens = sequence.num_sealed_blocks * self._block_size
            self.tree.match(sequence.root, sequence.packed(num_tokens), sequence.num_sealed_blocks)
        sequence.table.release(self.pool)
        sequence.state = SequenceState.FINISHED

    def _admit(self, rows: list[PlannedRow], budget: int) -> None:
        while self._waiting and budget > 0 and len(self._running) < self.options.max_num_seqs:
            sequence = self._waiting[0]
            self._take_prefix(sequence)
            num_blocks = sequence.table.num_blocks_to_hold(sequence.num_tokens + 1)
            if self._running and self.pool.num_available < num_blocks:
                sequence.table.release(self.pool)
                sequence.num_computed_tokens = sequence.num_sealed_blocks = 0
                return
            num_tokens = min(sequence.num_uncomputed_tokens, budget)
            num_blocks = sequence.table.num_blocks_to_hold(
                sequence.num_computed_tokens + num_tokens
            )
            self._allocate(sequence, num_blocks)
            self._waiting.popleft()
            self._start(sequence)
            rows.append(self._row(sequence, num_tokens))
            budget -= num_tokens

    def _take_prefix(self, sequence: Sequence) -> None:
        """Point the table at the longest known prefix, keeping the last token to be computed."""
        if not self.options.enable_prefix_caching:
            return
        max_blocks = (sequence.num_tokens - 1) // self._block_size
        found = self.tree.match(sequence.root, sequence.packed(sequence.num_tokens), max_blocks)
        # Before anything is allocated: an eviction must not take the blocks just found.
        self.pool.acquire(found.block_ids)
        sequence.table.append(list(found.block_ids))
        sequence.num_computed_tokens = len(found.block_ids) * self._block_size
        sequence.num_sealed_blocks = len(found.block_ids)

    def _start(self, sequence: Sequence) -> None:
        sequence.state = SequenceState.RUNNING
        self._running.append(sequence)
        if sequence.has_started:
            return
        sequence.has_started = True
        self.counters.cached_tokens_total += sequence.num_computed_tokens
        started = RequestStarted(
            self._replica_id, self._epoch, sequence.num_prompt_tokens, sequence.num_computed_tokens
        )
        self._events.append(RequestEvent(sequence.request_id, started))

    def commit(self, plan: StepPlan, sampled: list[list[SampledToken]]) -> None:
        """Take in what a step computed: `sampled[i]` has `plan.rows[i].num_draws` tokens."""
        for row, tokens in zip(plan.rows, sampled, strict=True):
            sequence = row.sequence
            if sequence.state is not SequenceState.RUNNING:
                continue  # aborted while the step ran
            sequence.num_computed_tokens = row.start + row.num_tokens
            self._seal(sequence)
            if any(not token.is_valid for token in tokens):
                self.fail(
                    sequence.request_id,
                    RequestFailed("internal_error", "the model's logits are not finite"),
                )
            elif tokens:
                self._advance(sequence, tokens)
        self._running = [s for s in self._running if s.state is SequenceState.RUNNING]

    def _advance(self, sequence: Sequence, tokens: list[SampledToken]) -> None:
        sequence.num_draws = 1
        children = [self._fork(sequence, index) for index in range(1, len(tokens))]
        for each, token in zip([sequence, *children], tokens, strict=True):
            self._append(each, token)

    def _fork(self, parent: Sequence, index: int) -> Sequence:
        """A sibling that shares every full block; its partial block is copied before the next step runs."""
        child = replace(
            parent,
            index=index,
            tokens=parent.tokens[:],
            hashes=parent.hashes[:],
            table=BlockTable(self._block_size),
        )
        has_partial_block = parent.num_computed_tokens % self._block_size > 0
        if (has_partial_block and self.pool.num_available == 0) or len(
            self._running
        ) >= self.options.max_num_seqs:
            child.state = SequenceState.WAITING
            child.num_computed_tokens = child.num_sealed_blocks = 0
            self._waiting.appendleft(child)
            return child
        if has_partial_block and self.pool.num_free == 0:
            self.tree.evict(1)
        fork = parent.table.fork(parent.num_computed_tokens, self.pool)
        child.table = fork.table
        if fork.copy is not None:
            self._copies.append(fork.copy)
        self._running.append(child)
        return child

    def _append(self, sequence: Sequence, token: SampledToken) -> None:
        reason = sequence.finish_reason(token.token_id, self.options.max_model_len)
        if reason is not FinishReason.STOP:
            sequence.tokens.append(token.token_id)
            self.counters.generation_tokens_total += 1
            logprobs = None if token.logprobs is None else (token.logprobs,)
            emitted = TokensEmitted(sequence.index, (token.token_id,), logprobs)
            self._events.append(RequestEvent(sequence.request_id, emitted))
        if reason is not None:
            self._finish(sequence, reason)

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        if sequence.state is SequenceState.WAITING:
            self._waiting.remove(sequence)
        self._retire(sequence)
        self._events.append(
            RequestEvent(sequence.request_id, SequenceFinished(sequence.index, reason))
        )
        num_open = self._request_to_num_open[sequence.request_id] - 1
        if num_open:
            self._request_to_num_open[sequence.request_id] = num_open
        else:
            del self._request_to_num_open[sequence.request_id]

    def _seal(self, sequence: Sequence) -> None:
        """Offer newly full blocks to the tree; where it knows them already, use its copy."""
        num_full = sequence.num_computed_tokens // self._block_size
        if num_full <= sequence.num_sealed_blocks:
            return
        hashes = sequence.hashes_of(num_full)
        sequence.num_sealed_blocks = num_full
        if not self.options.enable_prefix_caching:
            return
        duplicates = self.tree.insert(
            sequence.root,
            sequence.packed(num_full * self._block_size),
            sequence.table.block_ids[:num_full],
            hashes,
        )
        for duplicate in duplicates:
            sequence.table.replace(duplicate.index, duplicate.block_id, self.pool)

    def drain_events(self) -> list[RequestEvent]:
        """What the requests must be told, in order, since the last call."""
        events, self._events = self._events, []
        return events

    def check_invariants(self) -> None:
        self.pool.check_invariants()
        self.tree.check_invariants()
        counts = [0] * self.pool.num_blocks
        for sequence in self._running:
            assert sequence.state is SequenceState.RUNNING
            assert sequence.table.num_blocks_to_hold(sequence.num_computed_tokens) == 0
            for block_id in sequence.table.block_ids:
                counts[block_id] += 1
        for sequence in self._waiting:
            assert sequence.state is SequenceState.WAITING and not sequence.table.block_ids
        for block_id, count in enumerate(counts):
            assert count == self.pool.ref_count(block_id), f"block {block_id} leaks"
        open_ids = {s.request_id for s in (*self._running, *self._waiting)}
        assert open_ids == set(self._request_to_num_open)
