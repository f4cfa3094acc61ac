"""One sequence's way from token ids to text that may be shown: whole characters, cut at stop strings."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from router.requests import TokenChoice, TokenDetail
from router.stop_strings import StopStrings
from workers.protocol import TokenLogprobs
from workers.tokenizer import Detokenizer


@dataclass(frozen=True, slots=True)
class TextPiece:
    """Text and token details that became showable; `stop` is the stop string that ended the sequence."""

    text: str
    details: tuple[TokenDetail, ...] = ()
    stop: str | None = None


@dataclass(frozen=True, slots=True)
class _Pending:
    """A token whose text is not out yet. `end` is where it ends, None while its character is incomplete."""

    detail: TokenDetail
    end: int | None


class SequenceText:
    """The text of one sequence.

    The first `min_tokens` tokens are shown without looking for stop strings in them.

    Args:
        token_bytes: what a token stands for, for the log-probabilities' sake.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        stops: Sequence[str],
        min_tokens: int,
        token_bytes: Callable[[int], bytes],
    ) -> None:
        self._detokenizer = detokenizer
        self._stops = StopStrings(stops)
        self._min_tokens = min_tokens
        self._token_bytes = token_bytes
        self._pending: deque[_Pending] = deque()
        self._num_chars = 0
        self._num_shown_chars = 0
        self.num_tokens = 0
        self.is_finished = False

    def push(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs] | None) -> TextPiece:
        """Take in tokens. Those after the one that completes a stop string are neither shown nor counted."""
        assert not self.is_finished
        shown: list[str] = []
        for i, token_id in enumerate(token_ids):
            self.num_tokens += 1
            text = self._detokenizer.push(token_id)
            if logprobs is not None:
                self._add_detail(token_id, logprobs[i], len(text))
            self._num_chars += len(text)
            stop = self._scan(text, shown)
            if stop is not None:
                return self._piece(shown, stop)
        return self._piece(shown, None)

    def finish(self) -> TextPiece:
        """The engine ended the sequence: show what was held back, unless it completes a stop string."""
        assert not self.is_finished
        shown: list[str] = []
        text = self._detokenizer.flush()
        self._num_chars += len(text)
        self._close_open_details()
        stop = self._scan(text, shown)
        if stop is None:
            shown.append(self._stops.flush())
        self.is_finished = True
        return self._piece(shown, stop)

    def _scan(self, text: str, shown: list[str]) -> str | None:
        if self.num_tokens <= self._min_tokens:
            shown.append(text)
            return None
        scan = self._stops.push(text)
        shown.append(scan.text)
        if scan.matched is not None:
            self.is_finished = True
        return scan.matched

    def _add_detail(self, token_id: int, logprobs: TokenLogprobs, num_new_chars: int) -> None:
        detail = TokenDetail(
            chosen=TokenChoice(token_id, self._token_bytes(token_id), logprobs.logprob),
            top=tuple(
                TokenChoice(other, self._token_bytes(other), logprob)
                for other, logprob in logprobs.top
            ),
            text_offset=self._num_chars,
        )
        self._pending.append(_Pending(detail, None))
        if num_new_chars:
            self._close_open_details(self._num_chars + num_new_chars)

    def _close_open_details(self, end: int | None = None) -> None:
        """Tokens that made no text of their own belong to the character that was completed after them."""
        end = self._num_chars if end is None else end
        for i in range(len(self._pending) - 1, -1, -1):
            if self._pending[i].end is not None:
                break
            self._pending[i] = replace(self._pending[i], end=end)

    def _piece(self, shown: Sequence[str], stop: str | None) -> TextPiece:
        text = "".join(shown)
        self._num_shown_chars += len(text)
        details: list[TokenDetail] = []
        while self._pending:
            end = self._pending[0].end
            if end is None or end > self._num_shown_chars:
                break
            details.append(self._pending.popleft().detail)
        return TextPiece(text, tuple(details), stop)
