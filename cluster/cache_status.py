"""What GET /cache and GET /cache/log say, as far as `pando cache` reads it. Unknown keys are let pass."""

from typing import Annotated, Self

from pydantic import (
    BaseModel,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    model_validator,
)

from kvstore.reuse.prompt_log import LoggedPath, SampledLog

Ratio = Annotated[float, Field(ge=0, le=1)]
HOUR_S = 3600.0


class Curve(BaseModel):
    """Block lookups, the hits among them, and the hit ratio predicted at each of `CacheStatus.scales`."""

    num_lookups: NonNegativeInt
    num_hits: NonNegativeInt
    hit_ratios: list[Ratio]

    @property
    def measured(self) -> float:
        return self.num_hits / self.num_lookups if self.num_lookups else 0.0


class TenantCurve(Curve):
    tenant: str | None

    @property
    def name(self) -> str:
        return "(others)" if self.tenant is None else self.tenant


class ReplicaCache(Curve):
    replica_id: str
    num_blocks: PositiveInt
    block_size: PositiveInt
    kv_bytes_per_token: NonNegativeInt
    covered_s: NonNegativeFloat
    weight: PositiveInt

    @property
    def num_bytes(self) -> int:
        """Of the whole pool."""
        return self.num_blocks * self.block_size * self.kv_bytes_per_token

    @property
    def lookup_tokens_per_hour(self) -> float:
        if self.covered_s == 0:
            return 0.0
        return self.num_lookups * self.block_size * HOUR_S / self.covered_s


class CacheStatus(BaseModel):
    """One Gateway's view of all replicas' caches. `scales` are multiples of every pool, rising."""

    scales: list[Annotated[float, Field(gt=0)]]
    overall: Curve
    tenants: list[TenantCurve]
    replicas: list[ReplicaCache]

    @model_validator(mode="after")
    def _has_a_ratio_for_each_scale(self) -> Self:
        for curve in (self.overall, *self.tenants, *self.replicas):
            if len(curve.hit_ratios) != len(self.scales):
                raise ValueError("hit_ratios and scales differ in length")
        return self

    def at(self, curve: Curve, scale: float) -> float:
        """The ratio at the scale nearest to the one asked for."""
        nearest = min(range(len(self.scales)), key=lambda i: abs(self.scales[i] - scale))
        return curve.hit_ratios[nearest]

    @property
    def lookup_tokens_per_hour(self) -> float:
        return sum(replica.lookup_tokens_per_hour for replica in self.replicas)


class LogStatus(BaseModel):
    """One replica's last prompts: `workers.protocol.ReplicaLog`, with `lookups[i]` belonging to `paths[i]`."""

    replica_id: str
    num_blocks: PositiveInt
    covered_s: NonNegativeFloat
    weight: PositiveInt
    num_lookups: NonNegativeInt
    num_hits: NonNegativeInt
    num_sampled_hits: NonNegativeInt
    lookups: list[bool]
    paths: list[list[Annotated[int, Field(ge=0, lt=2**32)]]]

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if len(self.lookups) != len(self.paths):
            raise ValueError("lookups and paths differ in length")
        return self

    def as_log(self) -> SampledLog:
        paths = zip(self.paths, self.lookups, strict=True)
        return SampledLog(
            paths=tuple(LoggedPath(tuple(blocks), is_lookup) for blocks, is_lookup in paths),
            weight=self.weight,
            covered_s=self.covered_s,
            num_lookups=self.num_lookups,
            num_hits=self.num_hits,
            num_sampled_hits=self.num_sampled_hits,
        )


class CacheLogs(BaseModel):
    replicas: list[LogStatus]


class Flushed(BaseModel):
    num_replicas: NonNegativeInt
    num_cleared: NonNegativeInt
