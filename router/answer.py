"""Builds a client's answer out of a replica's events. Pure: events in, outputs out."""

from collections.abc import Iterable, Iterator

from router.detokenizer import SequenceText, TextPiece
from router.requests import Delta, Finished, Output, Started, Usage
from workers.errors import InternalError, ReplicaLost, error_from_code
from workers.protocol import (
    EngineEvent,
    FinishReason,
    ReplicaInfo,
    RequestFailed,
    RequestStarted,
    SequenceFinished,
    TokensEmitted,
)


class Answer:
    """One prompt's answer as it grows.

    Args:
        request_id: the cluster's id of the request.
        model: the name to show the client.
        texts: one for each of the n sequences.
        is_whole: show each sequence in one piece when the replica has ended it, as beams come.
    """

    def __init__(
        self,
        request_id: str,
        model: str,
        info: ReplicaInfo,
        texts: list[SequenceText],
        *,
        is_whole: bool = False,
    ) -> None:
        self._request_id = request_id
        self._model = model
        self._info = info
        self._texts = texts
        self._index_to_held: dict[int, list[int]] | None = {} if is_whole else None
        self._started: RequestStarted | None = None

    @property
    def is_finished(self) -> bool:
        return all(text.is_finished for text in self._texts)

    @property
    def usage(self) -> Usage:
        num_completion_tokens = sum(text.num_tokens for text in self._texts)
        if self._started is None:
            return Usage(num_completion_tokens=num_completion_tokens)
        return Usage(
            self._started.num_prompt_tokens, self._started.num_cached_tokens, num_completion_tokens
        )

    def consume(self, events: Iterable[EngineEvent]) -> Iterator[Output]:
        """The outputs that `events` bring about.

        Raises:
            PandoError: the replica reported a failure, or its events make no sense.
        """
        for event in events:
            match event:
                case RequestStarted():
                    yield from self._start(event)
                case TokensEmitted():
                    yield from self._emit(event)
                case SequenceFinished():
                    yield from self._finish(event)
                case RequestFailed():
                    raise error_from_code(event.code, event.message, event.param)

    def _start(self, event: RequestStarted) -> Iterator[Output]:
        if self._started is None:
            self._started = event
            fingerprint = self._info.fingerprint
            yield Started(self._request_id, self._model, fingerprint, event.replica_id, self.usage)

    def _emit(self, event: TokensEmitted) -> Iterator[Output]:
        text = self._text_of(event.index)
        # After a stop string the engine goes on until the other sequences are done too.
        if text.is_finished:
            return
        if self._index_to_held is not None:
            self._index_to_held.setdefault(event.index, []).extend(event.token_ids)
            return
        piece = text.push(event.token_ids, event.logprobs)
        yield from self._show(event.index, piece)
        if piece.stop is not None:
            yield Finished(event.index, FinishReason.STOP, piece.stop, self.usage)

    def _finish(self, event: SequenceFinished) -> Iterator[Output]:
        text = self._text_of(event.index)
        if text.is_finished:
            return
        if event.reason is FinishReason.ABORT:
            raise ReplicaLost("the replica gave up the request before the answer was complete")
        held = (self._index_to_held or {}).pop(event.index, [])
        piece = _last_piece(text, held)
        yield from self._show(event.index, piece)
        reason = event.reason if piece.stop is None else FinishReason.STOP
        yield Finished(event.index, reason, piece.stop, self.usage, event.score)

    def _show(self, index: int, piece: TextPiece) -> Iterator[Output]:
        if piece.text or piece.details:
            yield Delta(index, piece.text, piece.details, self.usage)

    def _text_of(self, index: int) -> SequenceText:
        if self._started is None or not 0 <= index < len(self._texts):
            raise InternalError("the replica's events are out of order")
        return self._texts[index]


def _last_piece(text: SequenceText, held: list[int]) -> TextPiece:
    """The end of a sequence, of which the tokens `held` were not looked at yet."""
    whole = text.push(held, None)
    if whole.stop is not None:
        return whole
    rest = text.finish()
    return TextPiece(whole.text + rest.text, (*whole.details, *rest.details), rest.stop)
