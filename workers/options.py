"""What an engine can be told. Plain dataclasses: a machine with only torch and triton can run an engine.

pydantic validates them where they are part of a configuration file; `__pydantic_config__` is all it needs.
"""

from dataclasses import dataclass

POLICIES = ("lru", "lfu", "slru", "s3_fifo", "hit_density")
_FORBID_UNKNOWN = {"extra": "forbid"}


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """Which model, and in which number formats.

    Attributes:
        name: a directory, a `.gguf` file or a hub id; also what clients call it.
        revision: branch, tag or commit of a hub id.
        dtype: compute dtype: auto (bfloat16 on a GPU, as `cpu_weights` asks on a CPU), float32, bfloat16, float16.
        kv_dtype: the KV pool's: auto (the compute dtype) or fp8_e4m3 (one scale a token and head).
        block_size: token positions in a block.
        max_model_len: prompt + output of one sequence; None takes the model's own limit.
        device: auto (a GPU when there is one), cpu, cuda.
    """

    name: str = "HuggingFaceTB/SmolLM2-135M-Instruct"
    revision: str | None = None
    dtype: str = "auto"
    kv_dtype: str = "auto"
    block_size: int = 16
    max_model_len: int | None = None
    device: str = "auto"

    def __post_init__(self) -> None:
        _check_choice("dtype", self.dtype, ("auto", "float32", "bfloat16", "float16"))
        _check_choice("kv_dtype", self.kv_dtype, ("auto", "fp8_e4m3"))
        _check_choice("device", self.device, ("auto", "cpu", "cuda"))
        if self.block_size not in (8, 16, 32, 64):
            raise ValueError(f"block_size must be 8, 16, 32 or 64, not {self.block_size}")
        _check_at_least_one(max_model_len=self.max_model_len)
        if not self.name:
            raise ValueError("name is empty")


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Memory and pace of one engine.

    Attributes:
        num_kv_blocks: blocks in the KV pool; None derives it from memory.
        kv_memory_gib: memory for the KV pool; None takes 1 GiB on a CPU, and on a GPU what
            `gpu_memory_fraction` of its memory leaves after the weights.
        gpu_memory_fraction: of a GPU's memory, for weights and KV together.
        num_threads: of the CPU's BLAS; None leaves torch its default.
        max_num_seqs: sequences that run at once.
        max_num_batched_tokens: tokens of one step; longer prompts are computed in chunks of at most this.
        max_num_waiting: requests in the waiting room; one more is refused with `Overloaded`.
        enable_prefix_caching: share prompts through the radix tree.
        watermark: share of the pool that stays free when a sequence is admitted beside others, so that those
            can grow for a while before somebody must be preempted.
        eviction: what is forgotten first when memory is short: lru, lfu, slru, s3_fifo, hit_density.
        min_partial_tokens: a known block of which only a head is wanted is copied when the head has at least
            this many tokens; below it is computed again.
        cpu_weights: on a CPU: auto (bf16 where the processor multiplies it, else fp32), fp32, bf16, or int8
            (8 bits for weights and, row by row, for activations; refused without VNNI instructions).
        batch_invariant: the same prompt gives the same bits whatever shares its batch; only on a CUDA device,
            and slower.
        cuda_graphs: capture decode steps at start-up and replay them; only on a CUDA device.
    """

    num_kv_blocks: int | None = None
    kv_memory_gib: float | None = None
    gpu_memory_fraction: float = 0.85
    num_threads: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    max_num_waiting: int = 1024
    enable_prefix_caching: bool = True
    watermark: float = 0.01
    eviction: str = "lru"
    min_partial_tokens: int = 1
    cpu_weights: str = "auto"
    batch_invariant: bool = False
    cuda_graphs: bool = True

    def __post_init__(self) -> None:
        _check_at_least_one(
            min_partial_tokens=self.min_partial_tokens,
            num_kv_blocks=self.num_kv_blocks,
            num_threads=self.num_threads,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_num_waiting=self.max_num_waiting,
        )
        if self.kv_memory_gib is not None and self.kv_memory_gib <= 0:
            raise ValueError(f"kv_memory_gib must be above 0, not {self.kv_memory_gib}")
        _check_choice("cpu_weights", self.cpu_weights, ("auto", "fp32", "bf16", "int8"))
        _check_choice("eviction", self.eviction, POLICIES)
        if not 0 <= self.watermark <= 0.5:
            raise ValueError(f"watermark must lie between 0 and 0.5, not {self.watermark}")
        if not 0 < self.gpu_memory_fraction < 1:
            raise ValueError(
                f"gpu_memory_fraction must lie between 0 and 1, not {self.gpu_memory_fraction}"
            )


@dataclass(frozen=True, slots=True)
class SchedulerOptions:
    """The part of `EngineOptions` that the scheduler reads, and the model's context length."""

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    max_num_waiting: int = 1024
    max_model_len: int = 4096
    enable_prefix_caching: bool = True
    watermark: float = 0.01
    eviction: str = "lru"
    min_partial_tokens: int = 1


ModelOptions.__pydantic_config__ = _FORBID_UNKNOWN  # type: ignore[attr-defined]
EngineOptions.__pydantic_config__ = _FORBID_UNKNOWN  # type: ignore[attr-defined]


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, not {value!r}")


def _check_at_least_one(**counts: int | None) -> None:
    for name, value in counts.items():
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, not {value}")
