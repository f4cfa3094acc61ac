"""What a client asks for and what it gets, in no protocol's words: HTTP and gRPC both map onto these."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from workers.protocol import FinishReason


@dataclass(frozen=True, slots=True)
class ChatMessage:
    role: str
    content: str


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    messages: tuple[ChatMessage, ...]


@dataclass(frozen=True, slots=True)
class TextPrompt:
    text: str


@dataclass(frozen=True, slots=True)
class TokensPrompt:
    token_ids: tuple[int, ...]


Prompt = ChatPrompt | TextPrompt | TokensPrompt


@dataclass(frozen=True, slots=True)
class SamplingFields:
    """Sampling as the client named it; None is "not given". `router.validation` checks the ranges.

    `logprobs` is how many alternatives to return at each position, 0 for the chosen token alone.
    `max_tokens_name` and `logprobs_name` are what the client calls these fields, for error messages.
    """

    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    max_tokens_name: str = "max_tokens"
    logprobs_name: str = "logprobs"


@dataclass(frozen=True, slots=True)
class BeamFields:
    """Beam search instead of sampling; `early_stopping` None is "never", as in `BeamParams`.

    `name` is what the client calls this, for error messages.
    """

    length_penalty: float = 1.0
    early_stopping: bool | None = False
    name: str = "use_beam_search"


@dataclass(frozen=True, slots=True)
class InferenceRequest:
    """One prompt and what to make of it. `model` None means whichever is served.

    Attributes:
        n: how many sequences to return.
        best_of: how many to compute, of which the n best are returned; with beams, how many beams to keep.
            None for n.
        stop: strings that end a sequence. Beams are searched without regard to them and cut when they are
            whole; a beam's score stays that of the whole.
        priority: lower is served first; never below what the tenant may ask for.
    """

    model: str | None
    prompt: Prompt
    sampling: SamplingFields = SamplingFields()
    n: int = 1
    best_of: int | None = None
    beam: BeamFields | None = None
    stop: tuple[str, ...] = ()
    priority: int = 0
    default_max_tokens: int | None = None
    timeout_s: float | None = None

    @property
    def num_computed(self) -> int:
        """Sequences or beams to compute side by side."""
        return self.n if self.best_of is None else self.best_of

    @property
    def is_ranked(self) -> bool:
        """Whether more is drawn than returned, so that nothing can be shown before all is there."""
        return self.beam is None and self.num_computed > self.n


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one prompt. `num_cached_tokens` of the prompt were not computed anew.

    `num_completion_tokens` counts every sequence drawn, returned or not, up to its stop string; of beams those
    of the returned ones.
    """

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_completion_tokens: int = 0

    @property
    def num_total_tokens(self) -> int:
        return self.num_prompt_tokens + self.num_completion_tokens

    def __add__(self, other: "Usage") -> "Usage":
        return Usage(
            self.num_prompt_tokens + other.num_prompt_tokens,
            self.num_cached_tokens + other.num_cached_tokens,
            self.num_completion_tokens + other.num_completion_tokens,
        )


@dataclass(frozen=True, slots=True)
class TokenChoice:
    """A token and its log-probability (natural logarithm). `data` is the bytes it stands for."""

    token_id: int
    data: bytes
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenDetail:
    """One position of the output: the token chosen, the likeliest ones best first.

    `text_offset` is where its text begins in the sequence's text, in characters.
    """

    chosen: TokenChoice
    top: tuple[TokenChoice, ...]
    text_offset: int


@dataclass(frozen=True, slots=True)
class Started:
    """The first output, once: a replica has begun on the prompt. `request_id` is the cluster's own."""

    request_id: str
    model: str
    fingerprint: str
    replica_id: str
    usage: Usage


@dataclass(frozen=True, slots=True)
class Delta:
    """More text of sequence `index`: whole characters, no part of a stop string. `usage` so far.

    `details` has an entry for each token whose text is out, when log-probabilities were asked for.
    """

    index: int
    text: str
    details: tuple[TokenDetail, ...]
    usage: Usage


@dataclass(frozen=True, slots=True)
class Finished:
    """Sequence `index` ended; `stop` is the stop string that ended it, when one did; `score` is a beam's."""

    index: int
    reason: FinishReason
    stop: str | None
    usage: Usage
    score: float | None = None


# In this order: Started, then Delta and Finished of each sequence; the last Finished has the final usage.
Output = Started | Delta | Finished
