"""Beam search as transformers does it (`GenerationMixin._beam_search`), over token ids and log-probabilities. Pure.

At each step every running beam offers its likeliest tokens. Of all offers the best `num_candidates` are kept, in
order. Those that end a sequence may enter the finished list, but only from the first `width` ranks; the best
`width` of the others run on. Scores of finished beams are normalized by length, sums of running ones are not.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import nlargest

from workers.protocol import BeamParams


@dataclass(frozen=True, slots=True)
class Offer:
    """A token one running beam could go on with, and that token's log-probability."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class Survivor:
    """A beam of the next step: running beam `parent` of this step, extended by a token."""

    parent: int
    token_id: int
    logprob_sum: float


@dataclass(frozen=True, slots=True)
class FinishedBeam:
    """`tokens` are what was generated, without the stop token that ended it, if one did."""

    tokens: tuple[int, ...]
    score: float
    is_stopped: bool


class BeamSearch:
    """One request's search. The caller keeps the running beams' tokens, in the order of the last survivors.

    Args:
        params: width and rules.
        stop_token_ids: end a beam; part of its score and length, not of its tokens.
        max_tokens: every beam ends here.
        min_tokens: stop tokens are not offered before.
    """

    def __init__(
        self,
        params: BeamParams,
        stop_token_ids: frozenset[int],
        max_tokens: int,
        min_tokens: int = 0,
    ) -> None:
        self.params = params
        self._stop_token_ids = stop_token_ids
        self._max_tokens = max_tokens
        self._min_tokens = min_tokens
        self._sums = [0.0]
        self._num_generated = 0
        self._finished: list[FinishedBeam] = []
        self._can_improve = True
        self.is_done = False

    @property
    def num_candidates(self) -> int:
        """How many offers of each beam are needed, so that enough of them do not end their sequence."""
        return max(2, 1 + len(self._stop_token_ids)) * self.params.width

    def advance(
        self, outputs: Sequence[Sequence[int]], offers: Sequence[Sequence[Offer]]
    ) -> list[Survivor]:
        """One step; sets `is_done` when it was the last.

        Args:
            outputs: what each running beam has generated so far.
            offers: each running beam's likeliest tokens, at least `num_candidates` where the vocabulary has
                them.

        Returns:
            The beams that run on, best first; none after the last step.
        """
        assert not self.is_done and len(offers) == len(self._sums)
        ranked = self._rank(offers)
        is_last = self._num_generated + 1 >= self._max_tokens
        running: list[Survivor] = []
        ended: list[FinishedBeam] = []
        for rank, candidate in enumerate(ranked):
            is_stopped = candidate.token_id in self._stop_token_ids
            if not (is_stopped or is_last):
                running.append(candidate)
            elif rank < self.params.width:
                ended.append(self._finish(outputs[candidate.parent], candidate, is_stopped))
        self._take(ended)
        self._num_generated += 1
        survivors = running[: self.params.width]
        self._sums = [survivor.logprob_sum for survivor in survivors]
        self._can_improve = self._can_improve and self._could_improve()
        is_full_and_hasty = self.params.early_stopping is True and self._is_full
        self.is_done = is_last or not survivors or not self._can_improve or is_full_and_hasty
        return [] if self.is_done else survivors

    def results(self, n: int) -> list[FinishedBeam]:
        """The n best finished beams, best first."""
        return self._finished[:n]

    @property
    def _is_full(self) -> bool:
        return len(self._finished) == self.params.width

    def _rank(self, offers: Sequence[Sequence[Offer]]) -> list[Survivor]:
        allows_stop = self._num_generated >= self._min_tokens
        candidates = (
            Survivor(parent, offer.token_id, self._sums[parent] + offer.logprob)
            for parent, row in enumerate(offers)
            for offer in row
            if allows_stop or offer.token_id not in self._stop_token_ids
        )
        return nlargest(self.num_candidates, candidates, key=lambda c: c.logprob_sum)

    def _finish(self, output: Sequence[int], candidate: Survivor, is_stopped: bool) -> FinishedBeam:
        tokens = tuple(output) if is_stopped else (*output, candidate.token_id)
        length = self._num_generated + 1
        return FinishedBeam(
            tokens, candidate.logprob_sum / length**self.params.length_penalty, is_stopped
        )

    def _take(self, ended: list[FinishedBeam]) -> None:
        """Once nothing can improve, or a hasty search has enough, the finished list stands."""
        if not self._can_improve or (self.params.early_stopping is True and self._is_full):
            return
        merged = sorted([*self._finished, *ended], key=lambda beam: -beam.score)
        self._finished = merged[: self.params.width]

    def _could_improve(self) -> bool:
        """Whether the best running beam may still beat the worst finished one."""
        if not self._is_full or not self._sums:
            return True
        penalty = self.params.length_penalty
        is_patient = self.params.early_stopping is None and penalty > 0
        length = self._max_tokens if is_patient else self._num_generated
        return self._sums[0] / float(length**penalty) > self._finished[-1].score
