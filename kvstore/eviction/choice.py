"""The policies by the names that configuration uses."""

from collections.abc import Callable

from kvstore.eviction.hit_density import HitDensityPolicy
from kvstore.eviction.policy import EvictionPolicy
from kvstore.eviction.ranked import LfuPolicy, LruPolicy, SlruPolicy
from kvstore.eviction.s3_fifo import S3FifoPolicy

_name_to_policy: dict[str, Callable[[], EvictionPolicy]] = {
    "lru": LruPolicy,
    "lfu": LfuPolicy,
    "slru": SlruPolicy,
    "s3_fifo": S3FifoPolicy,
    "hit_density": HitDensityPolicy,
}


def policy_named(name: str) -> EvictionPolicy:
    """A new policy for one tree. Raises KeyError for a name that `workers.options.POLICIES` lacks."""
    return _name_to_policy[name]()
