"""What runs next: continuous batching, chunked prefill, prefix reuse, forks, beams, preemption by recompute.

Pure: events in (`add`, `abort`, `commit`), a `StepPlan` out; no tensors, clocks or threads. One caller, one
thread. Between two calls every block is accounted for (`check_invariants`).

    add → waiting ──plan──▶ running ──commit──▶ finished
              ▲                │
              └── preempt ─────┘   KV given up, tokens kept; mostly found again in the radix tree

Both sides are sorted by (priority, arrival). The last one running is the one to be preempted, so the first one
always gets on. Beams of one request are preempted together.
"""

from workers.admission import check_admissible
from workers.beam_search import Offer
from workers.errors import InvalidRequest
from workers.open_requests import OpenRequests
from workers.options import SchedulerOptions
from workers.protocol import (
    EngineEvent,
    FinishReason,
    GenerateRequest,
    PromptScored,
    ReplicaInfo,
    RequestFailed,
    RequestStarted,
    SequenceFinished,
    TokenLogprobs,
    TokensEmitted,
)
from workers.running_row import RunningRow
from workers.sequence import BeamGroup, Sequence, SequenceState, make_sequence
from workers.sequence_memory import SequenceMemory, bare_twin
from workers.step_plan import (
    PlannedRow,
    RequestEvent,
    RowResult,
    SampledToken,
    SchedulerCounters,
    StepPlan,
    planned_row,
)
from workers.waiting_room import WaitingRoom

_LOGITS_BROKEN = RequestFailed("internal_error", "the model's logits are not finite")
# How far behind the first waiting sequence one may overtake it while it waits for a sibling.
_NUM_LOOK_AHEAD = 64


class Scheduler:
    """Owns the sequences and their tables.

    Args:
        options: limits of a step.
        memory: blocks, the tree over them, and what was measured of both.
        info: who this replica is; its fingerprint is part of every root.
    """

    def __init__(
        self, options: SchedulerOptions, memory: SequenceMemory, info: ReplicaInfo
    ) -> None:
        self.options = options
        self.memory = memory
        self.counters = SchedulerCounters()
        self._info = info
        self._num_watermark_blocks = int(options.watermark * memory.pool.num_blocks)
        self._waiting = WaitingRoom()
        self._running = RunningRow(options.max_num_seqs)
        self._open = OpenRequests()

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        return len(self._running) > 0 or len(self._waiting) > 0

    def add(self, request: GenerateRequest, *, seed: int, eos_token_ids: frozenset[int]) -> None:
        """Put a request into the waiting room.

        Raises:
            InvalidRequest: an empty prompt, a request id that is in use, a count out of range.
            ContextTooLong: it could not be served even alone.
            Overloaded: the waiting room is full.
        """
        if self.is_open(request.request_id):
            raise InvalidRequest(f"request_id {request.request_id!r} is already in use")
        check_admissible(request, self.options, self.memory.pool.num_blocks, self._info.block_size)
        self._waiting.check_room(self.options.max_num_waiting)
        sequence = make_sequence(
            request,
            fingerprint=self._info.fingerprint,
            block_size=self._info.block_size,
            seed=seed,
            eos_token_ids=eos_token_ids,
            arrival=self.counters.requests_total,
        )
        self._waiting.add(sequence)
        self._open.open(request.request_id, request.n)
        self.counters.requests_total += 1
        self.counters.prompt_tokens_total += sequence.num_prompt_tokens

    def is_open(self, request_id: str) -> bool:
        """Whether any of its sequences has still to end."""
        return request_id in self._open

    def abort(self, request_id: str) -> bool:
        """Forget a request and free its blocks at once; emits nothing. False when it is not here."""
        if not self._open.forget(request_id):
            return False
        for sequence in self._running.of_request(request_id):
            self._retire(sequence)
        self._running.sweep()
        self._waiting.remove_request(request_id)
        return True

    def fail(self, request_id: str, failure: RequestFailed) -> None:
        """Abort a request and tell it why."""
        if self.abort(request_id):
            self._open.tell(request_id, failure)

    def plan(self) -> StepPlan:
        """Decide the next step: sequences that run go on first, then waiting ones are admitted."""
        budget = self.options.max_num_batched_tokens
        rows: list[PlannedRow] = []
        num_preemptions_before = self.counters.preemptions_total
        num_waiting_before = len(self._waiting)
        for sequence in list(self._running):
            if sequence.state is not SequenceState.RUNNING:
                continue  # preempted for an earlier one in this very loop
            if sequence.group is None:
                budget -= self._plan_one(sequence, budget, rows)
            elif sequence is sequence.group.leader:
                budget -= self._plan_group(sequence.group, budget, rows)
            if budget == 0:
                break
        if self.counters.preemptions_total == num_preemptions_before:
            self._admit(rows, budget)
        if not rows and self._running.is_held_up and len(self._waiting) == num_waiting_before:
            # Beams wait for siblings that find no room: the last ones in the row give theirs up.
            self._preempt(self._running.last)
        self.counters.steps_total += 1
        return StepPlan(self.memory.drain_copies(), tuple(rows))

    def _plan_one(self, sequence: Sequence, budget: int, rows: list[PlannedRow]) -> int:
        """How much of the budget it takes."""
        if sequence.has_pending_token and sequence.is_full(self.options.max_model_len):
            return 0  # whatever the token is, it is the last one
        num_tokens = min(sequence.num_uncomputed_tokens, budget)
        end = sequence.num_computed_tokens + num_tokens
        if end > sequence.table.num_slots and not self._grow(sequence, end):
            return 0
        rows.append(planned_row(sequence, num_tokens))
        return num_tokens

    def _plan_group(self, group: BeamGroup, budget: int, rows: list[PlannedRow]) -> int:
        """Plan the beams all at once, or bring up those that lag; how much of the budget that takes."""
        can_step = group.is_level
        running = [beam for beam in group.beams if beam.state is SequenceState.RUNNING]
        if can_step and budget < len(running):
            return 0
        planned: list[PlannedRow] = []
        num_left = budget
        for beam in running:
            # The last token waits until the whole group can take it.
            num_wanted = beam.num_uncomputed_tokens - (0 if can_step else 1)
            num_tokens = min(num_wanted, num_left)
            if num_tokens == 0:
                continue
            if not self._grow(beam, beam.num_computed_tokens + num_tokens):
                return 0
            planned.append(planned_row(beam, num_tokens))
            num_left -= num_tokens
        rows += planned
        return budget - num_left

    def _grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Make the table hold `num_tokens`, preempting from the end of the row.

        False: the sequence itself had to go.
        """
        while not self.memory.can_hold(sequence, num_tokens):
            self._preempt(self._running.last)
            if sequence.state is not SequenceState.RUNNING:
                return False
        self.memory.grow(sequence, num_tokens)
        return True

    def _preempt(self, victim: Sequence) -> None:
        for sequence in victim.unit:
            if sequence.state is SequenceState.RUNNING:
                self._running.remove(sequence)
                self._retire(sequence)
                # Drawn again when it comes back: the same number at the same position, and nobody was told yet.
                sequence.forget_pending_token()
                self._put_back(sequence)
                self.counters.preemptions_total += 1

    def _retire(self, sequence: Sequence) -> None:
        if sequence.state is SequenceState.RUNNING:
            self._running.free_place(sequence)
        self.memory.retire(sequence)

    def _put_back(self, sequence: Sequence) -> None:
        sequence.state = SequenceState.WAITING
        self._waiting.add(sequence)

    def _admit(self, rows: list[PlannedRow], budget: int) -> None:
        for sequence in self._waiting.first(_NUM_LOOK_AHEAD):
            if budget == 0 or len(self._running) >= self.options.max_num_seqs:
                return
            self.memory.take_prefix(sequence)
            if self.memory.is_being_computed(sequence):
                self.memory.give_back(sequence)
                continue
            if not self._has_room(sequence):
                self.memory.give_back(sequence)
                return
            self._waiting.remove(sequence)
            self._start(sequence)
            # A beam that comes back holds its last token until its group is level.
            num_held = 0 if len(sequence.unit) == 1 else 1
            num_tokens = min(sequence.num_uncomputed_tokens - num_held, budget)
            self.memory.grow(sequence, sequence.num_computed_tokens + num_tokens)
            if num_tokens:
                rows.append(planned_row(sequence, num_tokens))
                budget -= num_tokens

    def _has_room(self, sequence: Sequence) -> bool:
        """Room for all its tokens and the next one, and for the others to grow; alone it always has."""
        if not len(self._running):
            return True
        is_rejoining = any(each.state is SequenceState.RUNNING for each in sequence.unit)
        num_reserved = 0 if is_rejoining else self._num_watermark_blocks
        return self.memory.can_hold(sequence, sequence.num_tokens + 1, num_reserved)

    def _start(self, sequence: Sequence) -> None:
        self.memory.take_partial(sequence)
        self.memory.announce(sequence)
        self._running.add(sequence)
        if sequence.has_started:
            return
        sequence.has_started = True
        self.memory.record_lookup(sequence)
        num_cached_tokens = sequence.num_computed_tokens
        self.counters.cached_tokens_total += num_cached_tokens
        self._tell(
            sequence,
            RequestStarted(
                self._info.replica_id,
                self._info.epoch,
                sequence.num_prompt_tokens,
                num_cached_tokens,
            ),
        )

    def promise(self, plan: StepPlan) -> None:
        """Go on as if the plan's results were there: the next `plan` may be made before this one's `commit`.

        Every token about to be drawn stands for itself, unknown, at the end of its sequence. Only a plan that
        `is_predictable` can be promised, and one at a time.
        """
        for row in plan.rows:
            if row.sequence.state is SequenceState.RUNNING:
                row.sequence.num_computed_tokens = row.start + row.num_tokens
                if row.num_draws:
                    row.sequence.add_pending_token()

    def commit(self, plan: StepPlan, results: list[RowResult]) -> None:
        """Take in what a step computed: `results[i]` has `plan.rows[i].num_draws` tokens.

        A sequence that ends here may be part of a later plan already: what that computes of it is dropped.
        """
        beam_to_tokens: dict[Sequence, list[SampledToken]] = {}
        request_to_group: dict[str, BeamGroup] = {}
        for row, result in zip(plan.rows, results, strict=True):
            sequence, tokens = row.sequence, result.tokens
            if sequence.state is not SequenceState.RUNNING:
                continue  # aborted while the step ran, or failed with a sibling in it
            sequence.num_computed_tokens = row.start + row.num_tokens
            self.memory.seal(sequence)
            if sequence.prompt_logprobs is not None:
                self._score_prompt(sequence, sequence.prompt_logprobs, result)
            if tokens and not tokens[0].is_valid:  # all of a row are from the same logits
                self.fail(sequence.request_id, _LOGITS_BROKEN)
            elif tokens and sequence.group is not None:
                request_to_group[sequence.request_id] = sequence.group
                beam_to_tokens[sequence] = tokens
            elif tokens:
                self._advance(sequence, tokens)
        for request_id, group in request_to_group.items():
            if self.is_open(request_id):
                self._advance_beams(group, [beam_to_tokens[beam] for beam in group.beams])
        self._running.sweep()

    def _score_prompt(
        self, sequence: Sequence, logprobs: list[TokenLogprobs], result: RowResult
    ) -> None:
        logprobs += result.prompt_logprobs
        if sequence.num_computed_tokens >= sequence.num_prompt_tokens:
            self._tell(sequence, PromptScored(tuple(logprobs)))
            sequence.prompt_logprobs = None

    def _advance(self, sequence: Sequence, tokens: list[SampledToken]) -> None:
        children: list[Sequence] = []
        if sequence.num_draws > 1:
            sequence.num_draws = 1
            children = [self._fork(sequence, index) for index in range(1, len(tokens))]
        self._append(sequence, tokens[0])
        for child, token in zip(children, tokens[1:], strict=True):
            self._append(child, token)

    def _fork(self, parent: Sequence, index: int) -> Sequence:
        """A sibling that runs, or waits when there is no block or no place for it now."""
        has_place = len(self._running) < self.options.max_num_seqs
        child = self.memory.fork(parent, index) if has_place else None
        if child is not None:
            self._running.add(child)
            return child
        child = bare_twin(parent, index)
        self._put_back(child)
        return child

    def _append(self, sequence: Sequence, token: SampledToken) -> None:
        sequence.forget_pending_token()
        reason = sequence.finish_reason(token.token_id, self.options.max_model_len)
        if reason is not FinishReason.STOP:
            sequence.tokens.append(token.token_id)
            self.counters.generation_tokens_total += 1
            logprobs = None if token.logprobs is None else (token.logprobs,)
            self._tell(sequence, TokensEmitted(sequence.index, (token.token_id,), logprobs))
        if reason is not None:
            self._drop(sequence)
            self._tell(sequence, SequenceFinished(sequence.index, reason))
            self._open.close(sequence.request_id, 1)

    def _advance_beams(self, group: BeamGroup, offered: list[list[SampledToken]]) -> None:
        beams = group.beams
        survivors = group.search.advance([b.output for b in beams], list(map(_offers, offered)))
        if group.search.is_done:
            self._finish_beams(group)
            return
        # Those without children first: their blocks may be needed for the forks.
        for beam in group.childless(survivors):
            self._drop(beam)
        next_beams: list[Sequence] = []
        for survivor in survivors:
            beam = beams[survivor.parent]
            if beam in next_beams:
                beam = self._fork(beam, group.num_made)
                group.num_made += 1
            beam.num_draws = group.search.num_candidates
            next_beams.append(beam)
        group.beams = next_beams
        for beam, survivor in zip(group.beams, survivors, strict=True):
            beam.tokens.append(survivor.token_id)

    def _finish_beams(self, group: BeamGroup) -> None:
        first = group.beams[0]
        num_results = self._open.num_open(first.request_id)
        for index, result in enumerate(group.search.results(num_results)):
            self.counters.generation_tokens_total += len(result.tokens)
            reason = FinishReason.STOP if result.is_stopped else FinishReason.LENGTH
            self._tell(first, TokensEmitted(index, result.tokens))
            self._tell(first, SequenceFinished(index, reason, result.score))
        for beam in group.beams:
            self._drop(beam)
        self._open.close(first.request_id, num_results)

    def _drop(self, sequence: Sequence) -> None:
        """It is over for this sequence, wherever it stands. The row of running ones is swept after the commit."""
        if sequence.state is SequenceState.WAITING:
            self._waiting.remove(sequence)
        self._retire(sequence)

    def _tell(self, sequence: Sequence, event: EngineEvent) -> None:
        self._open.tell(sequence.request_id, event)

    def drain_events(self) -> list[RequestEvent]:
        """What the requests must be told, in order, since the last call."""
        return self._open.drain_events()

    def check_invariants(self) -> None:
        self.memory.check_invariants(list(self._running))
        self._running.check_invariants(self.options.max_num_seqs)
        for sequence in self._waiting:
            assert sequence.state is SequenceState.WAITING and not sequence.table.block_ids
        everybody = [*self._running, *self._waiting]
        assert {s.request_id for s in everybody} == self._open.ids()
        assert all(sequence in sequence.unit for sequence in everybody)


def _offers(tokens: list[SampledToken]) -> list[Offer]:
    return [Offer(t.token_id, t.logprobs.logprob) for t in tokens if t.logprobs is not None]
