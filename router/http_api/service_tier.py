"""OpenAI's `service_tier` as priorities, and back. Pure."""

from typing import Literal

from workers.errors import InvalidRequest

ServiceTier = Literal["auto", "default", "flex", "priority"]

_tier_to_priority: dict[ServiceTier, int] = {
    "auto": 0,
    "default": 0,
    "flex": 100,
    "priority": -100,
}


def priority_of(priority: int | None, tier: ServiceTier | None) -> int:
    """The priority that a body's two fields come to.

    Raises:
        InvalidRequest: `priority` stands beside a tier that says something else.
    """
    if priority is None:
        return 0 if tier is None else _tier_to_priority[tier]
    if tier is not None and _tier_to_priority[tier] not in (0, priority):
        raise InvalidRequest(
            f"service_tier {tier!r} means priority {_tier_to_priority[tier]}, "
            f"but priority is {priority}: give one of them",
            param="service_tier",
        )
    return priority


def served_tier(tier: ServiceTier | None, min_priority: int) -> ServiceTier | None:
    """The tier to name in the answer: the one that was served, or None when the client named none.

    Args:
        min_priority: the tenant's, which may turn `priority` into `default`.
    """
    if tier is None:
        return None
    priority = _tier_to_priority[tier]
    if priority < 0 and min_priority > priority:
        return "default"
    return "default" if priority == 0 else tier
