"""The replicas' reuse reports as one JSON for operators: by replica, by tenant, and together. Pure.

Replicas know roots and no tenants; the Gateway, which made the roots out of the tenants' salts, puts the names back.
"""

from collections.abc import Iterable, Sequence

from kvstore.prefix_hash import root_hash
from router.tenancy import Tenant
from workers.protocol import CURVE_SCALES, ReplicaLog, ReuseCurve, ReuseReport


def cache_json(reports: Sequence[ReuseReport], tenants: Iterable[Tenant]) -> dict[str, object]:
    """What GET /cache says; a tenant of None is everybody without a curve of his own.

    A scale multiplies every replica's pool at once.
    """
    known = tuple(tenants)
    name_to_curves: dict[str | None, list[ReuseCurve]] = {}
    for report in reports:
        root_to_name = {root_hash(report.info.fingerprint, t.salt): t.id for t in known}
        for curve in report.roots:
            name_to_curves.setdefault(root_to_name.get(curve.root), []).append(curve)
    names = sorted(name_to_curves, key=lambda name: (name is None, name))
    return {
        "scales": list(CURVE_SCALES),
        "overall": _curve_json([report.overall for report in reports]),
        "tenants": [{"tenant": name} | _curve_json(name_to_curves[name]) for name in names],
        "replicas": [_replica_json(report) for report in reports],
    }


def log_json(logs: Iterable[ReplicaLog]) -> dict[str, object]:
    """What GET /cache/log says."""
    return {
        "replicas": [
            {
                "replica_id": each.info.replica_id,
                "num_blocks": each.info.num_blocks,
                "covered_s": round(each.log.covered_s, 1),
                "weight": each.log.weight,
                "num_lookups": each.log.num_lookups,
                "num_hits": each.log.num_hits,
                "num_sampled_hits": each.log.num_sampled_hits,
                "lookups": [path.is_lookup for path in each.log.paths],
                "paths": [path.blocks for path in each.log.paths],
            }
            for each in logs
        ]
    }


def _replica_json(report: ReuseReport) -> dict[str, object]:
    return {
        "replica_id": report.info.replica_id,
        "num_blocks": report.info.num_blocks,
        "block_size": report.info.block_size,
        "kv_bytes_per_token": report.info.kv_bytes_per_token,
        "covered_s": round(report.covered_s, 1),
        "weight": report.weight,
    } | _curve_json([report.overall])


def _curve_json(curves: Sequence[ReuseCurve]) -> dict[str, object]:
    """The sum of some curves: of one tenant on several replicas, say."""
    num_lookups = sum(curve.num_lookups for curve in curves)
    weights = [curve.num_lookups / num_lookups if num_lookups else 0.0 for curve in curves]
    return {
        "num_lookups": num_lookups,
        "num_hits": sum(curve.num_hits for curve in curves),
        "hit_ratios": [
            round(sum(w * c.hit_ratios[i] for w, c in zip(weights, curves, strict=True)), 4)
            for i in range(len(CURVE_SCALES))
        ],
    }
