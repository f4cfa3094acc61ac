"""What an engine can be told. Plain dataclasses: a machine with only torch and triton can run an engine."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedulerOptions:
    """Limits of one step and of the waiting room.

    Attributes:
        max_num_seqs: sequences that run at once.
        max_num_batched_tokens: tokens of one step; longer prompts are computed in chunks of at most this.
        max_num_waiting: requests in the waiting room; one more is refused with `Overloaded`.
        max_model_len: prompt + output of one sequence.
        enable_prefix_caching: share prompts through the radix tree.
    """

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    max_num_waiting: int = 1024
    max_model_len: int = 4096
    enable_prefix_caching: bool = True

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_num_waiting", "max_model_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
