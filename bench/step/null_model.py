"""An engine whose model costs next to nothing, everything else as in production."""

from array import array

import torch
from torch import Tensor

from kernels.batch import AttentionBatch
from kvstore.kv_layout import KvDtype, KvLayout
from kvstore.kv_pool import KvPool
from workers.engine import Engine
from workers.model_runner import ModelRunner
from workers.options import SchedulerOptions
from workers.protocol import GenerateRequest, ReplicaInfo, SamplingParams

# A real vocabulary would measure argmax over rows of it, which is the model's cost and not the step's.
VOCAB_SIZE = 16
_FINGERPRINT = "null"


class NullModel:
    """Reads nothing, writes nothing, and always likes token 7."""

    def __init__(self) -> None:
        self._row = torch.zeros(1, VOCAB_SIZE)
        self._row[0, 7] = 1.0

    def forward(
        self, token_ids: Tensor, positions: Tensor, batch: AttentionBatch, pool: KvPool
    ) -> Tensor:
        return positions[:, None]

    def logits(self, hidden: Tensor) -> Tensor:
        return self._row.expand(hidden.shape[0], VOCAB_SIZE)


def null_engine(
    num_sequences: int, num_context_tokens: int, num_steps: int, block_size: int = 16
) -> Engine:
    """An engine with room for `num_sequences` sequences of that length to grow for `num_steps` steps."""
    num_blocks = num_sequences * ((num_context_tokens + num_steps) // block_size + 2)
    max_model_len = num_context_tokens + num_steps + block_size
    layout = KvLayout(
        num_layers=1,
        num_kv_heads=1,
        head_dim=2,
        block_size=block_size,
        kv_dtype=KvDtype.AUTO,
        compute_dtype=torch.float32,
    )
    device = torch.device("cpu")
    options = SchedulerOptions(
        max_num_seqs=num_sequences,
        max_num_batched_tokens=1 << 16,
        max_num_waiting=1 << 16,
        max_model_len=max_model_len,
    )
    info = ReplicaInfo(
        replica_id="null",
        epoch="null",
        model="null",
        fingerprint=_FINGERPRINT,
        block_size=block_size,
        num_blocks=num_blocks,
        kv_dtype="auto",
        kv_bytes_per_token=layout.bytes_per_token,
        compute_dtype="float32",
        device="cpu",
        max_model_len=max_model_len,
        vocab_size=VOCAB_SIZE,
    )
    runner = ModelRunner(NullModel(), KvPool(layout, num_blocks, device), device, options)
    return Engine(runner, info, options, frozenset())


def request(
    name: str, tokens: "array[int]", num_output_tokens: int, temperature: float = 0.0
) -> GenerateRequest:
    """Greedy, and never done before its time."""
    return GenerateRequest(
        request_id=name,
        tokens=tokens.tobytes(),
        fingerprint=_FINGERPRINT,
        salt=b"null",
        block_hashes=b"",
        sampling=SamplingParams(
            max_tokens=num_output_tokens, temperature=temperature, ignore_eos=True
        ),
    )


def ignore(_events: object) -> None:
    """A sink for those who only want the engine to be told."""
