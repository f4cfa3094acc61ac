"""The messages between Gateway and replica: a closed family of small frozen dataclasses. No torch here.

A Gateway sends one `GenerateRequest`; the replica answers with batches of `EngineEvent`:

    RequestStarted  (PromptScored)  TokensEmitted …  SequenceFinished (one for each of n)      the good path
    RequestFailed                                                                instead, at any point, last
"""

from dataclasses import dataclass
from enum import StrEnum

from kvstore.reuse.prompt_log import SampledLog


class FinishReason(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"  # an end-of-sequence or stop token
    LENGTH = "length"  # max_tokens, or the model's context is full
    ABORT = "abort"  # the client left


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen. Ranges are checked by `router`, which knows the field's public name.

    top_k 0, top_p 1, min_p 0 and the penalties' neutral values (1, 0, 0) mean "off"; temperature 0 is greedy.
    `seed` None draws a fresh seed for each request. `logprobs` None returns none; k ≥ 0 returns the chosen
    token's log-probability and the k most likely alternatives at each position, taken from the model's own
    distribution, before temperature and filters. `prompt_logprobs` does the same for the prompt's tokens, whose
    prefix is then computed and not looked up.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class BeamParams:
    """Beam search instead of sampling.

    Attributes:
        width: beams kept at each step; the request's n ≤ width best are returned, best first.
        length_penalty: a finished beam's score is its sum of log-probabilities / (tokens generated)^this.
        early_stopping: True ends with `width` finished beams; False ends when the best running beam could not
            beat the worst finished one at its present length; None only when it could not at any length.
    """

    width: int
    length_penalty: float = 1.0
    early_stopping: bool | None = False


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One request, tokenized and hashed once at the Gateway.

    Attributes:
        request_id: unique in the cluster.
        tokens: the prompt, packed by `kvstore.prefix_hash.pack_tokens`.
        fingerprint: of the model and KV scheme under which `block_hashes` were computed. A replica with
            another fingerprint computes them anew.
        salt: the tenant's secret root (or the public root); never chosen by the client.
        block_hashes: chained digests of the prompt's full blocks, concatenated, 16 bytes each.
        n: how many sequences to draw from the one prompt.
        beam: search with beams; the n best come whole, at the end, in order.
        priority: lower is served first; equal ones in order of arrival.
        tenant: name for metrics only; it decides nothing here.
    """

    request_id: str
    tokens: bytes
    fingerprint: str
    salt: bytes
    block_hashes: bytes
    sampling: SamplingParams
    n: int = 1
    beam: BeamParams | None = None
    priority: int = 0
    tenant: str = "local"


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position: the chosen token's, and the most likely tokens', best first."""

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class RequestStarted:
    """The prompt's first step is about to run. `num_cached_tokens` of it came from the radix tree."""

    replica_id: str
    epoch: str
    num_prompt_tokens: int
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class PromptScored:
    """Log-probabilities of the prompt's tokens from the second on; once, before any token is emitted."""

    logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class TokensEmitted:
    """New tokens of sequence `index` (0 … n−1). `logprobs` has one entry a token, or is None."""

    index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None


@dataclass(frozen=True, slots=True)
class SequenceFinished:
    """Sequence `index` ended; a stop token that ended it was not emitted. `score` is a beam's, else None."""

    index: int
    reason: FinishReason
    score: float | None = None


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """The whole request failed; `code` is a `workers.errors` code."""

    code: str
    message: str
    param: str | None = None


EngineEvent = RequestStarted | PromptScored | TokensEmitted | SequenceFinished | RequestFailed


@dataclass(frozen=True, slots=True)
class ReplicaInfo:
    """What does not change during one epoch of a replica."""

    replica_id: str
    epoch: str
    model: str
    fingerprint: str
    block_size: int
    num_blocks: int
    kv_dtype: str
    kv_bytes_per_token: int
    compute_dtype: str
    device: str
    max_model_len: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class ReplicaStats:
    """A replica's gauges now, and its counters since its epoch began (`*_total`)."""

    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_cached_blocks: int
    num_used_blocks: int
    prompt_tokens_total: int
    cached_tokens_total: int
    generation_tokens_total: int
    preemptions_total: int
    evicted_blocks_total: int
    requests_total: int
    steps_total: int
    digest: int
    index_connected: bool
    # At PREDICTION_SCALES; empty where reuse is not measured.
    predicted_hit_ratios: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    info: ReplicaInfo
    stats: ReplicaStats


# Multiples of the pool at which hit ratios are predicted: those that are always said, and those of a whole curve.
PREDICTION_SCALES = (0.5, 1.0, 2.0, 4.0)
CURVE_SCALES = tuple(2.0 ** (quarter / 4) for quarter in range(-16, 9))


@dataclass(frozen=True, slots=True)
class ReuseCurve:
    """Block lookups of one root, or of all of them, and what least-recently-used pools of other sizes would have
    answered.

    Attributes:
        root: as `kvstore.prefix_hash.root_hash` makes it; empty for all roots, and for those without a curve of
            their own.
        num_hits: what the pool as it is did answer.
        hit_ratios: predicted, at CURVE_SCALES times the pool that all roots share.
    """

    root: bytes
    num_lookups: int
    num_hits: int
    hit_ratios: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class ReuseReport:
    """How one replica's blocks were reused in the last `covered_s` seconds; one block in `weight` was followed."""

    info: ReplicaInfo
    covered_s: float
    weight: int
    overall: ReuseCurve
    roots: tuple[ReuseCurve, ...]


@dataclass(frozen=True, slots=True)
class ReplicaLog:
    """One replica's last prompts, thinned out and without hashes, for a replay elsewhere."""

    info: ReplicaInfo
    log: SampledLog
