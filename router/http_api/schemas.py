"""The bodies that clients send. Fields we do not know are let through: clients send many of their own.

Types are checked strictly here (no "0.7" for 0.7, no true for 1); ranges in `router.validation`, under
the same names, because gRPC needs them too.
"""

import re
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from router.http_api.service_tier import ServiceTier, priority_of
from router.requests import (
    BeamFields,
    ChatMessage,
    ChatPrompt,
    InferenceRequest,
    Prompt,
    SamplingFields,
    TextPrompt,
    TokensPrompt,
)
from router.validation import shown
from workers.errors import InvalidRequest

_TOKEN_ID = re.compile(r"-?(0|[1-9][0-9]{0,18})")


class Body(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True, frozen=True)


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class TextPart(Body):
    type: Literal["text"]
    text: str


class Message(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None

    def to_chat_message(self, index: int) -> ChatMessage:
        """Raises InvalidRequest for a message without content, which only an assistant's may be."""
        if self.content is None:
            if self.role != "assistant":
                raise InvalidRequest(
                    f"messages[{index}] of role {self.role!r} has no content", param="messages"
                )
            return ChatMessage(self.role, "")
        if isinstance(self.content, str):
            return ChatMessage(self.role, self.content)
        return ChatMessage(self.role, "".join(part.text for part in self.content))


class GenerationBody(Body):
    """What chats and completions have in common. Without a model, the one that is served answers."""

    model: str | None = None
    n: int | None = None
    best_of: int | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None
    priority: int | None = None
    service_tier: ServiceTier | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
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
    logit_bias: dict[str, float] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None

    @property
    def wants_stream(self) -> bool:
        return bool(self.stream)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def num_choices(self) -> int:
        return 1 if self.n is None else self.n

    def to_request(
        self, prompt: Prompt, sampling: SamplingFields, default_max_tokens: int | None = None
    ) -> InferenceRequest:
        """Raises InvalidRequest when fields contradict each other."""
        request = InferenceRequest(
            model=self.model,
            prompt=prompt,
            sampling=sampling,
            n=self.num_choices,
            best_of=self.best_of,
            beam=self._beam_fields(),
            stop=self.stop_strings,
            priority=priority_of(self.priority, self.service_tier),
            default_max_tokens=default_max_tokens,
        )
        if request.is_ranked and self.wants_stream:
            raise InvalidRequest(
                f"best_of {self.best_of} with stream is not supported: which are the best is known "
                "only at the end",
                param="best_of",
            )
        return request

    def _beam_fields(self) -> BeamFields | None:
        if not self.use_beam_search:
            for name, neutral in (("length_penalty", 1.0), ("early_stopping", False)):
                value = getattr(self, name)
                if value is not None and value != neutral:
                    raise InvalidRequest(
                        f"{name} {shown(value)} needs use_beam_search to be true", param=name
                    )
            return None
        return BeamFields(
            length_penalty=1.0 if self.length_penalty is None else self.length_penalty,
            early_stopping=None if self.early_stopping == "never" else bool(self.early_stopping),
        )

    def sampling_fields(
        self,
        max_tokens: int | None,
        max_tokens_name: str,
        logprobs: int | None,
        logprobs_name: str,
    ) -> SamplingFields:
        """Raises InvalidRequest when a key of logit_bias is not a token id."""
        return SamplingFields(
            max_tokens=max_tokens,
            min_tokens=self.min_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            seed=self.seed,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=_parse_logit_bias(self.logit_bias or {}),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            logprobs=logprobs,
            max_tokens_name=max_tokens_name,
            logprobs_name=logprobs_name,
        )


class ChatBody(GenerationBody):
    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    def to_prompt(self, max_messages: int) -> ChatPrompt:
        """Raises InvalidRequest for no messages or too many."""
        if not 1 <= len(self.messages) <= max_messages:
            raise InvalidRequest(
                f"messages has {len(self.messages)} entries, must have 1 to {max_messages}",
                param="messages",
            )
        return ChatPrompt(tuple(m.to_chat_message(i) for i, m in enumerate(self.messages)))

    def to_sampling(self) -> SamplingFields:
        """Raises InvalidRequest when fields contradict each other."""
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        if self.max_completion_tokens is not None:
            return self.sampling_fields(
                self.max_completion_tokens, "max_completion_tokens", logprobs, "top_logprobs"
            )
        return self.sampling_fields(self.max_tokens, "max_tokens", logprobs, "top_logprobs")


class CompletionBody(GenerationBody):
    prompt: object
    echo: bool | None = None
    logprobs: int | None = None

    def to_prompts(self, max_prompts: int) -> tuple[TextPrompt | TokensPrompt, ...]:
        """One prompt or several. Raises InvalidRequest for anything else."""
        return parse_prompts(self.prompt, max_prompts)

    def to_sampling(self) -> SamplingFields:
        """Raises InvalidRequest for a combination that is not there yet."""
        if self.echo and self.logprobs is not None:
            raise InvalidRequest("logprobs with echo is not supported yet", param="logprobs")
        return self.sampling_fields(self.max_tokens, "max_tokens", self.logprobs, "logprobs")


class TokenizeBody(Body):
    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool = True

    def to_prompt(self, max_messages: int) -> Prompt:
        """Raises InvalidRequest unless exactly one of prompt and messages is given."""
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("give exactly one of prompt and messages", param="prompt")
        if self.prompt is not None:
            return TextPrompt(self.prompt)
        return ChatBody(model="", messages=self.messages or []).to_prompt(max_messages)


class DetokenizeBody(Body):
    model: str | None = None
    tokens: Annotated[list[int], Field(max_length=2**20)]


def parse_prompts(value: object, max_prompts: int) -> tuple[TextPrompt | TokensPrompt, ...]:
    """A text, a list of texts, token ids, or a list of lists of them.

    Raises:
        InvalidRequest: it is none of these, an empty list, or has more than `max_prompts` prompts.
    """
    if isinstance(value, str):
        return (TextPrompt(value),)
    if not isinstance(value, list):
        raise _bad_prompt(value)
    if not value:
        raise InvalidRequest("prompt is an empty list", param="prompt")
    if _is_token_ids(value):
        return (TokensPrompt(tuple(value)),)
    if len(value) > max_prompts:
        raise InvalidRequest(
            f"prompt has {len(value)} prompts, the limit is {max_prompts}", param="prompt"
        )
    if all(isinstance(item, str) for item in value):
        return tuple(TextPrompt(item) for item in value)
    if all(isinstance(item, list) and _is_token_ids(item) for item in value):
        return tuple(TokensPrompt(tuple(item)) for item in value)
    raise _bad_prompt(value)


def _is_token_ids(value: list[object]) -> bool:
    return all(type(item) is int for item in value)  # a bool is an int too, but no token id


def _bad_prompt(value: object) -> InvalidRequest:
    return InvalidRequest(
        "prompt must be a string, a list of strings, a list of token ids or a list of such lists, "
        f"got {shown(value)}",
        param="prompt",
    )


def _parse_logit_bias(key_to_bias: dict[str, float]) -> dict[int, float]:
    token_id_to_bias: dict[int, float] = {}
    for key, bias in key_to_bias.items():
        if not _TOKEN_ID.fullmatch(key):
            raise InvalidRequest(
                f"logit_bias has key {shown(key)}, which is no token id", param="logit_bias"
            )
        token_id_to_bias[int(key)] = bias
    return token_id_to_bias
