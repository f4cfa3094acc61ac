"""What GET /status says, as far as an operator's commands read it. Unknown keys are let pass."""

from pydantic import BaseModel, NonNegativeFloat, NonNegativeInt

_EPOCH_CHARS = 8


class ReplicaStatus(BaseModel):
    """One replica: `workers.protocol.ReplicaInfo` and `ReplicaStats`, flat."""

    replica_id: str
    epoch: str
    model: str
    device: str
    kv_dtype: str
    compute_dtype: str
    block_size: NonNegativeInt
    num_blocks: NonNegativeInt
    num_running: NonNegativeInt
    num_waiting: NonNegativeInt
    num_free_blocks: NonNegativeInt
    num_cached_blocks: NonNegativeInt
    num_used_blocks: NonNegativeInt
    prompt_tokens_total: NonNegativeInt
    cached_tokens_total: NonNegativeInt
    generation_tokens_total: NonNegativeInt
    requests_total: NonNegativeInt
    preemptions_total: NonNegativeInt
    evicted_blocks_total: NonNegativeInt
    index_connected: bool

    @property
    def epoch_short(self) -> str:
        """The part of the epoch that differs between incarnations, its end."""
        return self.epoch[-_EPOCH_CHARS:]

    @property
    def kv_dtype_shown(self) -> str:
        return self.compute_dtype if self.kv_dtype == "auto" else self.kv_dtype

    @property
    def used_share(self) -> float:
        """Of the pool's blocks, those that running sequences hold."""
        return _share(self.num_used_blocks, self.num_blocks)

    @property
    def cached_share(self) -> float:
        """Of the pool's blocks, those that hold prefixes for later and can be evicted."""
        return _share(self.num_cached_blocks, self.num_blocks)

    @property
    def hit_rate(self) -> float:
        """Of all prompt tokens since the epoch began, those that were not computed anew."""
        return _share(self.cached_tokens_total, self.prompt_tokens_total)


class IndexStatus(BaseModel):
    mode: str
    is_connected: bool
    num_entries: NonNegativeInt


class LoadStatus(BaseModel):
    owed_tokens: float
    num_in_flight: NonNegativeInt
    prefill_tokens_per_s: NonNegativeFloat


class RouterStatus(BaseModel):
    num_open: NonNegativeInt
    decisions_total: NonNegativeInt
    retries_total: NonNegativeInt
    replicas_lost_total: NonNegativeInt
    routed_hit_tokens_total: NonNegativeInt
    delivered_hit_tokens_total: NonNegativeInt
    ledger: dict[str, LoadStatus] = {}


class ClusterStatus(BaseModel):
    """One Gateway's view of the cluster."""

    replicas: list[ReplicaStatus]
    index: IndexStatus
    router: RouterStatus


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
