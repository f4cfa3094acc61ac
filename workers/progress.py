"""How long work reports how far it is. Whoever draws a bar passes such a callable in."""

from typing import Protocol


class Progress(Protocol):
    def __call__(self, stage: str, done_bytes: int, total_bytes: int | None) -> None:
        """Called now and then: `done_bytes` of `total_bytes` in the stage of this name.

        `total_bytes` None means that nobody knows the total. A stage ends with done == total, or by the
        next stage's beginning.
        """


def silent(stage: str, done_bytes: int, total_bytes: int | None) -> None:
    """Shows nothing."""
