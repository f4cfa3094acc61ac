"""Of several sequences drawn from one prompt, returns the best. Pure: outputs in, outputs out."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from router.requests import Delta, Finished, Output, Started, TokenDetail, Usage


@dataclass(slots=True)
class _Candidate:
    texts: list[str] = field(default_factory=list)
    details: list[TokenDetail] = field(default_factory=list)
    finished: Finished | None = None

    @property
    def mean_logprob(self) -> float:
        # Of a text without tokens nothing is known: it comes after all others.
        if not self.details:
            return -math.inf
        return math.fsum(d.chosen.logprob for d in self.details) / len(self.details)


class BestOf:
    """Holds `num_drawn` sequences back until all have ended, then lets out the n best, best first.

    The best is the one whose shown tokens have the highest mean log-probability, as OpenAI's `best_of`
    has it; of equals the one drawn first. Usage counts all that were drawn.

    Args:
        shows_details: pass the log-probabilities on; they must be in the outputs in any case.
    """

    def __init__(self, num_drawn: int, n: int, *, shows_details: bool) -> None:
        assert 1 <= n <= num_drawn
        self._n = n
        self._shows_details = shows_details
        self._candidates = [_Candidate() for _ in range(num_drawn)]

    def consume(self, outputs: Iterable[Output]) -> Iterator[Output]:
        """Pass `Started` on, gather the rest; with the last `Finished`, everything comes out."""
        for output in outputs:
            match output:
                case Started():
                    yield output
                case Delta():
                    candidate = self._candidates[output.index]
                    candidate.texts.append(output.text)
                    candidate.details.extend(output.details)
                case Finished():
                    self._candidates[output.index].finished = output
                    if all(candidate.finished for candidate in self._candidates):
                        yield from self._best(output.usage)

    def _best(self, usage: Usage) -> Iterator[Output]:
        ranked = sorted(self._candidates, key=lambda candidate: -candidate.mean_logprob)
        for index, candidate in enumerate(ranked[: self._n]):
            details = tuple(candidate.details) if self._shows_details else ()
            text = "".join(candidate.texts)
            if text or details:
                yield Delta(index, text, details, usage)
            assert candidate.finished is not None
            yield replace(candidate.finished, index=index, usage=usage)
