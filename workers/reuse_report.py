"""What the engine's reuse meter knows, as messages for the Gateway."""

from collections.abc import Iterable

from kvstore.reuse.curve import MissRatioCurve
from kvstore.reuse.meter import ReuseMeter
from workers.protocol import (
    CURVE_SCALES,
    PREDICTION_SCALES,
    ReplicaInfo,
    ReplicaLog,
    ReuseCurve,
    ReuseReport,
)


def predicted_hit_ratios(meter: ReuseMeter, num_blocks: int) -> tuple[float, ...]:
    """At PREDICTION_SCALES times the pool."""
    return _hit_ratios(meter.curve(), num_blocks, PREDICTION_SCALES)


def reuse_report(info: ReplicaInfo, meter: ReuseMeter) -> ReuseReport:
    return ReuseReport(
        info=info,
        covered_s=meter.covered_s,
        weight=meter.weight,
        overall=_message(b"", meter.curve(), info.num_blocks),
        roots=tuple(
            _message(root, curve, info.num_blocks) for root, curve in meter.root_to_curve().items()
        ),
    )


def replica_log(info: ReplicaInfo, meter: ReuseMeter) -> ReplicaLog:
    return ReplicaLog(info, meter.log())


def _message(root: bytes, curve: MissRatioCurve, num_blocks: int) -> ReuseCurve:
    return ReuseCurve(
        root,
        curve.counts.num_lookups,
        curve.counts.num_hits,
        _hit_ratios(curve, num_blocks, CURVE_SCALES),
    )


def _hit_ratios(
    curve: MissRatioCurve, num_blocks: int, scales: Iterable[float]
) -> tuple[float, ...]:
    return tuple(curve.hit_ratio(scale * num_blocks) for scale in scales)
