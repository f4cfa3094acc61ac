"""The JSON of chats and of completions, streamed and whole."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from router.http_api.usage import chat_logprobs, completion_logprobs
from router.requests import Delta, Finished, TokenDetail

Json = dict[str, object]


@dataclass(slots=True)
class WholeChoice:
    """One sequence, gathered for an answer in one piece."""

    texts: list[str] = field(default_factory=list)
    details: list[TokenDetail] = field(default_factory=list)
    finished: Finished | None = None

    @property
    def text(self) -> str:
        return "".join(self.texts)


class Shape(Protocol):
    """How one endpoint writes a choice. `index` counts over all prompts and their n sequences."""

    chunk_object: str
    whole_object: str
    id_prefix: str

    def first(self, index: int, prompt_index: int, /) -> Json | None:
        """The choice that opens a streamed sequence, if there is one."""

    def delta(self, index: int, delta: Delta, /) -> Json: ...

    def last(self, index: int, finished: Finished, /) -> Json:
        """The choice that ends a streamed sequence."""

    def whole(self, index: int, prompt_index: int, choice: WholeChoice, /) -> Json: ...


class ChatShape:
    chunk_object = "chat.completion.chunk"
    whole_object = "chat.completion"
    id_prefix = "chatcmpl-"

    def __init__(self, *, has_logprobs: bool) -> None:
        self._has_logprobs = has_logprobs

    def first(self, index: int, _prompt_index: int) -> Json | None:
        return self._choice(index, {"role": "assistant", "content": ""}, (), None)

    def delta(self, index: int, delta: Delta) -> Json:
        return self._choice(index, {"content": delta.text}, delta.details, None)

    def last(self, index: int, finished: Finished) -> Json:
        return self._choice(index, {}, (), finished)

    def whole(self, index: int, _prompt_index: int, choice: WholeChoice) -> Json:
        return {
            "index": index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": chat_logprobs(choice.details) if self._has_logprobs else None,
            **_ending(choice.finished),
        }

    def _choice(
        self, index: int, delta: Json, details: Sequence[TokenDetail], finished: Finished | None
    ) -> Json:
        return {
            "index": index,
            "delta": delta,
            "logprobs": chat_logprobs(details) if self._has_logprobs and details else None,
            **_ending(finished),
        }


class CompletionShape:
    """`echoes` has each prompt's text, to be put before its completions; empty for none."""

    chunk_object = "text_completion"
    whole_object = "text_completion"
    id_prefix = "cmpl-"

    def __init__(self, *, has_logprobs: bool, echoes: Sequence[str]) -> None:
        self._has_logprobs = has_logprobs
        self._echoes = echoes

    def first(self, index: int, prompt_index: int) -> Json | None:
        echo = self._echo(prompt_index)
        return self._choice(index, echo, (), None) if echo else None

    def delta(self, index: int, delta: Delta) -> Json:
        return self._choice(index, delta.text, delta.details, None)

    def last(self, index: int, finished: Finished) -> Json:
        return self._choice(index, "", (), finished)

    def whole(self, index: int, prompt_index: int, choice: WholeChoice) -> Json:
        text = self._echo(prompt_index) + choice.text
        return {
            **self._choice(index, text, choice.details, choice.finished),
            "logprobs": completion_logprobs(choice.details) if self._has_logprobs else None,
        }

    def _echo(self, prompt_index: int) -> str:
        return self._echoes[prompt_index] if self._echoes else ""

    def _choice(
        self, index: int, text: str, details: Sequence[TokenDetail], finished: Finished | None
    ) -> Json:
        return {
            "index": index,
            "text": text,
            "logprobs": completion_logprobs(details) if self._has_logprobs and details else None,
            **_ending(finished),
        }


def _ending(finished: Finished | None) -> Json:
    if finished is None:
        return {"finish_reason": None}
    score = {} if finished.score is None else {"score": finished.score}
    return {"finish_reason": finished.reason.value, "stop_reason": finished.stop, **score}
