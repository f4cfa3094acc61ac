"""Why a request went where it went: one frozen record for each decision."""

from dataclasses import dataclass

from router.scoring import Scored


@dataclass(frozen=True, slots=True)
class Receipt:
    """A routing decision as it was made. `ranking` holds every candidate, the chosen one first."""

    request_id: str
    decided_at: float
    index_mode: str
    num_prompt_tokens: int
    ranking: tuple[Scored, ...]

    @property
    def replica_id(self) -> str:
        return self.ranking[0].candidate.replica_id

    def to_json(self) -> dict[str, object]:
        """Plain values, for GET /status and for replaying a decision offline."""
        return {
            "request_id": self.request_id,
            "index_mode": self.index_mode,
            "num_prompt_tokens": self.num_prompt_tokens,
            "candidates": [
                {
                    "replica_id": each.candidate.replica_id,
                    "hit_tokens": each.candidate.hit_tokens,
                    "owed_tokens": each.candidate.load.owed_tokens,
                    "num_in_flight": each.candidate.load.num_in_flight,
                    "prefill_tokens_per_s": round(each.candidate.load.prefill_tokens_per_s, 1),
                    "estimated_ttft_s": round(each.estimated_ttft_s, 6),
                }
                for each in self.ranking
            ],
        }
